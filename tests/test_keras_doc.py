# SPDX-License-Identifier: Apache-2.0
"""docs/keras.md names what shows each row, and leaves no feature of the suite out."""

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_STATUSES = {"works", "differs", "refused"}


def _rows():
    """Cells of the rows of the tables of features, without their headings."""
    text = (_ROOT / "docs" / "keras.md").read_text()
    lines = text[text.index("\n## The same numbers\n") :].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    rows = [row for row in rows if row[-1] != "shown by" and not set(row[0]) <= set("- ")]
    assert len(rows) > 40
    return rows


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


def test_each_row_is_shown_and_each_feature_has_a_row():
    features = _features()
    assert len(features) > 50
    tests = {function.name for function in _functions((_ROOT / "tests").rglob("test_*.py"))}
    named = set()
    for row in _rows():
        assert len(row) == 4, row
        _, status, _, shown = row
        assert status in _STATUSES, row
        names = re.findall(r"`([^`]+)`", shown)
        assert names and ", ".join(f"`{name}`" for name in names) == shown, row
        unknown = set(names) - features - {one for one in tests if one.startswith("test_")}
        assert not unknown, f"{row[0]}: {', '.join(sorted(unknown))}"
        named |= set(names)
    missing = features - named
    assert not missing, f"docs/keras.md has no row for: {', '.join(sorted(missing))}"
