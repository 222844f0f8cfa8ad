# SPDX-License-Identifier: Apache-2.0
"""docs/keras-tests.md names what shows each line of docs/keras.md, and each feature."""

import ast
import re
import runpy
import textwrap
from pathlib import Path

import pytest

from tests.support.ranks import start_alone

_ROOT = Path(__file__).resolve().parents[1]
_STATUSES = {"works", "differs", "refused"}


def _rows(page, heading):
    """Cells of the rows of a page's tables whose last heading is `heading`."""
    found, is_one = [], False
    for line in (_ROOT / "docs" / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            is_one = False
        elif cells[-1] == heading:
            is_one = True
        elif is_one and not set(cells[0]) <= set("- "):
            found.append(cells)
    assert len(found) > 40
    return found


def _functions(paths):
    """All functions in these files; read, not imported: that would take TensorFlow's seconds."""
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield node


def _features():
    """Names of all features of the suite."""
    return {
        function.name
        for function in _functions((_ROOT / "tests" / "strategies" / "features").glob("*.py"))
        for mark in function.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "feature"
    }


def test_each_line_has_a_status_and_is_shown():
    lines = _rows("keras.md", "note")
    for line in lines:
        assert len(line) == 3 and line[1] in _STATUSES, line
    assert [line[0] for line in lines] == [line[0] for line in _rows("keras-tests.md", "shown by")]


def test_what_shows_a_line_exists_and_no_feature_is_left_out():
    features = _features()
    assert len(features) > 50
    tests = {function.name for function in _functions((_ROOT / "tests").rglob("test_*.py"))}
    named = set()
    for row in _rows("keras-tests.md", "shown by"):
        assert len(row) == 2, row
        names = re.findall(r"`([^`]+)`", row[1])
        assert names and ", ".join(f"`{name}`" for name in names) == row[1], row
        unknown = set(names) - features - {one for one in tests if one.startswith("test_")}
        assert not unknown, f"{row[0]}: {', '.join(sorted(unknown))}"
        named |= set(names)
    missing = features - named
    assert not missing, f"docs/keras-tests.md has no row for: {', '.join(sorted(missing))}"


@pytest.mark.tf
def test_the_custom_loop_runs_as_one_worker(tmp_path):
    page = (_ROOT / "docs" / "keras.md").read_text()
    [block] = re.findall(
        r"^### Custom loops\n\n```python\n(.*?)```", page, re.MULTILINE | re.DOTALL
    )
    made = """
        import keras, numpy as np, tensorflow as tf, tf_hips

        def make_model():
            return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])

        xs = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
        ys = xs.sum(axis=1, keepdims=True)
        strategy = tf_hips.CompressedRing()
        """
    told = "print('steps:', int(optimizer.iterations), 'loss:', float(loss))\n"
    (tmp_path / "loop.py").write_text(f"{textwrap.dedent(made)}\n{block}\n{told}")
    assert "steps: 2 loss: " in start_alone(run_loop, tmp_path, deadline_s=50)


def run_loop():
    """In a process that has TensorFlow already."""
    runpy.run_path("loop.py", run_name="__main__")
