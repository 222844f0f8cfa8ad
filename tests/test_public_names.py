# SPDX-License-Identifier: Apache-2.0
"""Names of `tf_hips` are the same to a program, to `dir` and to a type checker."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tf_hips
from tf_hips import errors

ROOT = Path(__file__).resolve().parents[1]


def seen_by_checkers() -> dict[str, str]:
    """The module of each name that `if TYPE_CHECKING:` imports."""
    tree = ast.parse((ROOT / "tf_hips/__init__.py").read_text(encoding="utf-8"))
    block = next(
        one for one in tree.body if isinstance(one, ast.If) and isinstance(one.test, ast.Name)
    )
    assert all(isinstance(one, ast.ImportFrom) for one in block.body)
    return {name.name: one.module for one in block.body for name in one.names}


def test_all_lists_name_the_same() -> None:
    homes = dict(tf_hips._HOMES) | dict.fromkeys(tf_hips._MODULES, "tf_hips")
    assert seen_by_checkers() == homes
    assert {*tf_hips.__all__} == {*homes, "__version__"} == {*dir(tf_hips)}
    assert [*tf_hips._HOMES] == sorted(tf_hips._HOMES)


@pytest.mark.tf
def test_every_name_is_there() -> None:
    for name in tf_hips.__all__:
        value = getattr(tf_hips, name)
        if name in tf_hips._HOMES:
            assert value is getattr(importlib.import_module(tf_hips._HOMES[name]), name)
    with pytest.raises(AttributeError, match="no attribute 'onebitt'"):
        _ = tf_hips.onebitt


def test_who_has_no_tensorflow_is_told_how_to_get_it() -> None:
    program = (
        "import sys\n"
        "class Nothing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('tensorflow', 'keras'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Nothing())\n"
        "import tf_hips\n"
        "from tf_hips import errors\n"
        "from tf_hips.trainer.__main__ import main\n"
        "for ask in (lambda: tf_hips.HierarchicalPS, lambda: tf_hips.models.build,\n"
        "            lambda: main('train', '{}'), lambda: main('evaluate', '{}')):\n"
        "    try:\n"
        "        ask()\n"
        "    except errors.LibraryError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines() == [
        f"{by} needs TensorFlow: pip install 'tf_hips[cpu]', or 'tf_hips[gpu]'"
        for by in (
            "tf_hips.HierarchicalPS",
            "tf_hips.models.build",
            "tf-hips train",
            "tf-hips evaluate",
        )
    ], done.stderr


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'horovod'", name="horovod"),
        ImportError("Extension horovod.tensorflow has not been built: mpi_lib.so not found\nIf"),
    ],
)
def test_who_has_no_horovod_is_told_which_one(error: ImportError) -> None:
    said = "^tf-hips run needs Horovod as `make wheel` builds it .*dist/horovod.*Received: .*orovod"
    wanted = errors.packages_wanted("tf-hips run")
    with pytest.raises(errors.LibraryError, match=said) as raised, wanted:
        raise error
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("cannot import name 'x' from 'tensorflow'", name="tensorflow"),
        ModuleNotFoundError("No module named 'mine'", name="mine"),
        errors.LibraryError("the native libraries have not been built"),
    ],
)
def test_other_failed_imports_are_told_as_they_are(error: ImportError) -> None:
    with pytest.raises(type(error)) as raised, errors.packages_wanted("tf-hips run"):
        raise error
    assert raised.value is error


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_type_checker_sees_types(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import tf_hips\n"
        "reveal_type(tf_hips.error_feedback(tf_hips.onebit()))\n"
        "reveal_type(tf_hips.robust.median(f=1))\n"
        "reveal_type(tf_hips.config.role())\n"
        "reveal_type(tf_hips.HierarchicalPS('onebit').global_rank)\n"
        "tf_hips.onebitt()\n"
        "tf_hips.topk('much')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={ROOT / 'pyproject.toml'}", script],
        cwd=ROOT,  # where its cache is
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    told = re.findall(r"script.py:\d+: (?:note: Revealed type is|error:) (.*)", done.stdout)
    assert told == [
        '"tf_hips.ops.compressor.Compressor"',
        '"tf_hips.robust.aggregator.Aggregator"',
        '"str"',
        '"int"',
        'Module has no attribute "onebitt"; maybe "onebit"?  [attr-defined]',
        'Argument 1 to "topk" has incompatible type "str"; expected "float"  [arg-type]',
    ], done.stdout + done.stderr
