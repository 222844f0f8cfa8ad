# SPDX-License-Identifier: Apache-2.0
"""What the tree promises about itself: sizes, names, licences, imports.

The import contracts stand in pyproject.toml; here they are kept, and each is seen to break when a
module that violates it is planted into a copy of the tree.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tf_hips

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {".py", ".cc", ".h", ".cu", ".cuh", ".bzl", ".sh", ".pse", ".lds"}
SOURCE_NAMES = {"BUILD", "WORKSPACE", "Makefile", ".ci/run"}
MAX_LINES = 600
VAGUE_NAMES = {"util", "utils", "common", "core", "helper", "helpers", "misc"}
# Written so that they do not match themselves.
HOSTS = re.compile(r"pypi[.]org|python[h]osted|deb[.]debian|npmjs[.]|mirror[.]bazel|index-ur[l]")
MACHINE_PATHS = re.compile(r"/(?:work|farm)[/]|/ro[o]t/|/home[/][a-z]|/tmp/b[g]")
UNFINISHED = re.compile(r"\b(?:TOD[O]|FIXM[E]|XX[X])\b|NotImplemented[E]rror")
# They hold input of the compiler as others wrote it, or output of it.
GIVEN_TEXT = re.compile(r"^tests/.*(?:(?:cases|errors|golden)/|_listing\.)")
# They are imported by a server process or by a command line, which must start at once and stay
# small.
WITHOUT_TENSORFLOW = [
    "compll",
    "tf_hips",
    "tf_hips.cluster.fleet",
    "tf_hips.comm.planner",
    "tf_hips.config",
    "tf_hips.errors",
    "tf_hips.esync.pacer",
    "tf_hips.log",
    "tf_hips.ops.algorithms",
    "tf_hips.ops.compressor",
    "tf_hips.ops.jit",
    "tf_hips.ops.native",
    "tf_hips.ps.client.client",
    "tf_hips.ps.client.shards",
    "tf_hips.ps.server.server",
    "tf_hips.ps.server.state_server",
    "tf_hips.report",
    "tf_hips.robust",
    "tf_hips.simulation",
    "tf_hips.cli",
]
# Packages outside `ps` whose docstring lists their modules.
LISTED = ["comm", "trainer"]
LINTER = Path(sys.executable).with_name("lint-imports")


def our_files() -> list[str]:
    """Paths, relative to the root, of files that git knows or would add."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    names = listing.stdout.decode().split("\0")
    return [name for name in sorted(set(names)) if name and (ROOT / name).is_file()]


FILES = our_files()
SOURCE_FILES = [
    name
    for name in FILES
    if (Path(name).suffix in SOURCES or name in SOURCE_NAMES or Path(name).name in SOURCE_NAMES)
    and not GIVEN_TEXT.match(name)
]
TEXTS = {
    name: (ROOT / name).read_bytes()
    for name in FILES
    if Path(name).suffix not in {".png", ".npy", ".npz", ".gz"}
}


def offenders(pattern: re.Pattern[str], names: list[str]) -> list[str]:
    """`file:line: text` of every line of the named files that matches."""
    return [
        f"{name}:{number}: {line.strip()[:120]}"
        for name in names
        for number, line in enumerate(TEXTS[name].decode(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def test_there_is_something_to_check() -> None:
    assert {"tf_hips/__init__.py", "Makefile", "tests/test_architecture.py"} <= set(SOURCE_FILES)


def test_files_stay_short() -> None:
    lengths = {name: TEXTS[name].count(b"\n") for name in SOURCE_FILES}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}


def test_names_say_what_is_inside() -> None:
    vague = [
        name
        for name in FILES
        if {part.split(".")[0].lower() for part in Path(name).parts} & VAGUE_NAMES
    ]
    assert not vague


def test_every_source_file_names_its_licence() -> None:
    bare = []
    for name in SOURCE_FILES:
        lines = TEXTS[name].decode(errors="replace").splitlines()[:2]
        first = lines[1:] if lines and lines[0].startswith("#!") else lines[:1]
        if not first or not re.fullmatch(
            r"(?:#|//|/\*) SPDX-License-Identifier: Apache-2\.0(?: \*/)?", first[0]
        ):
            bare.append(name)
    assert not bare


def test_source_files_are_ascii() -> None:
    assert not [name for name in SOURCE_FILES if not TEXTS[name].isascii()]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [(HOSTS, list(TEXTS)), (MACHINE_PATHS, list(TEXTS)), (UNFINISHED, SOURCE_FILES)],
    ids=["registry hosts", "machine paths", "unfinished work"],
)
def test_nothing_that_does_not_belong_here(pattern: re.Pattern[str], names: list[str]) -> None:
    assert not offenders(pattern, names)


def test_generated_files_are_not_committed() -> None:
    assert not [
        name
        for name in FILES
        if re.search(r"\.so$|_pb2|_build_info\.py$|\.codec\.cc$|\.tf\.cc$", name)
    ]


def test_public_names_are_documented() -> None:
    documented = set(
        re.findall(r"`tf_hips\.(\w+)`", (ROOT / "docs/api.md").read_text(encoding="utf-8"))
    )
    assert {*tf_hips.__all__} <= documented
    assert len(tf_hips.__all__) <= 45  # half of them are compressors


def test_packages_list_their_modules() -> None:
    """Each docstring has an indented line for each module that is there, and for no other."""
    ps = (ROOT / "tf_hips/ps").rglob("__init__.py")
    others = (ROOT / "tf_hips" / name / "__init__.py" for name in LISTED)
    for package in sorted([*ps, *others]):
        here = package.parent
        modules = {path.stem for path in here.glob("*.py")} - {"__init__", "__main__"}
        modules |= {path.parent.name for path in here.glob("*/__init__.py")}
        text = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8")), clean=False) or ""
        assert sorted(re.findall(r"^    (\w+)  ", text, re.MULTILINE)) == sorted(modules), here


def test_benchmark_targets_name_verbs_that_exist() -> None:
    verbs = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    targets = tomllib.loads((ROOT / "benchmarks/targets.toml").read_text(encoding="utf-8"))[
        "target"
    ]
    assert targets
    for target in targets:
        assert re.fullmatch(r"make ([a-z-]+)", target["command"]).group(1) in verbs, target["id"]


def test_build_machine_runs_make_test() -> None:
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "make test"
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_imports_without_tensorflow() -> None:
    """One after the other in one process: the first that needs it is named."""
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'tensorflow', 'keras', 'horovod.tensorflow'} & sys.modules.keys()\n"
        "    if heavy:\n"
        "        sys.exit(f'{name} imports {sorted(heavy)}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *WITHOUT_TENSORFLOW],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr


def test_what_scripts_use_of_other_modules_needs_one_import() -> None:
    """As the pages write it, after `import tf_hips` alone, and still without TensorFlow."""
    program = (
        "import sys, tf_hips\n"
        "before = {'tf_hips.config', 'tf_hips.data', 'yaml', 'numpy'} & sys.modules.keys()\n"
        "assert not before, before\n"
        "parse = tf_hips.data.splits.parse\n"
        "print(tf_hips.config.role(), parse('class').kind, callable(tf_hips.data.sets.load),\n"
        "      tf_hips.errors.PeerError.__name__, 'data' in dir(tf_hips))\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TF_HIPS_")
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "worker class True PeerError True\n"


def liberties(text: str) -> list[str]:
    """Where a module takes a strategy for anything, or reads what is the strategy's own."""
    found = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=owner, attr=name):
                is_private = name.startswith("_") and not name.startswith("__")
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=str()), *_]
            ):
                is_private = True
            case ast.arg(arg=owner, annotation=ast.Name(id="Any")):
                is_private = True
            case ast.AnnAssign(target=owner, annotation=ast.Name(id="Any")):
                is_private = True
            case _:
                continue
        last = owner if isinstance(owner, str) else ast.unparse(owner)
        if is_private and last.endswith("strategy"):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_who_asks_a_strategy_asks_by_names_that_it_gives() -> None:
    above = [
        name
        for name in SOURCE_FILES
        if name.startswith("tf_hips/")
        and name.endswith(".py")
        and not name.startswith("tf_hips/strategies/")
    ]
    texts = {name: TEXTS[name].decode() for name in above}
    asking = [name for name, text in texts.items() if "strategy." in text]
    assert {"tf_hips/loops/engine.py", "tf_hips/callbacks/peers.py"} <= set(asking)
    found = {name: liberties(text) for name, text in texts.items() if "strategy" in text}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        "x = strategy._rule",
        "x = self._strategy._loan.level",
        "way.strategy._events.listen(f)",
        "x = getattr(strategy, '_welcome', None)",
        "hasattr(self._strategy, 'sample_group')",
        "def f(strategy: Any): pass",
        "class Way:\n    strategy: Any",
    ],
)
def test_a_liberty_is_seen(line: str) -> None:
    assert len(liberties(line)) == 1
    assert not liberties("def f(strategy: Party, *, model: Any): return strategy.rule.__class__")


def lint(folder: Path) -> str:
    """Output of the import linter on the tree in `folder`."""
    done = subprocess.run(
        [LINTER, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=50, check=False
    )
    return done.stdout + done.stderr


def test_import_contracts_are_kept() -> None:
    output = lint(ROOT)
    assert re.search(r"Contracts: \d+ kept, 0 broken", output), output


PLANTED = [
    ("compll: stages meet only in the IR", "compll/ir/planted.py", "import compll.cli"),
    ("compll: stages meet only in the IR", "compll/unplaced.py", ""),
    ("compll is a plain Python compiler", "compll/ir/planted.py", "import tf_hips.errors"),
    ("tf_hips: one direction", "tf_hips/ps/planted.py", "import tf_hips.comm"),
    ("tf_hips: one direction", "tf_hips/ops/planted.py", "import tf_hips.strategies"),
    ("tf_hips: one direction", "tf_hips/unplaced.py", ""),
    ("tf_hips.ps: one direction", "tf_hips/ps/rules/planted.py", "import tf_hips.ps.rounds"),
    ("tf_hips.ps: one direction", "tf_hips/ps/client/planted.py", "import tf_hips.ps.session"),
    ("tf_hips.ps: one direction", "tf_hips/ps/unplaced.py", ""),
    ("the compiler has one door", "tf_hips/ops/planted.py", "import compll"),
    ("Horovod has one door", "tf_hips/strategies/planted.py", "import horovod.tensorflow"),
    ("gRPC has one door", "tf_hips/strategies/planted.py", "import grpc"),
    (
        "what serves or describes starts without TensorFlow",
        "tf_hips/ps/planted.py",
        "import tensorflow",
    ),
    (
        "what serves or describes starts without TensorFlow",
        "tf_hips/cli/planted.py",
        "import tf_hips.strategies",
    ),
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the linter says of a tree in which all of them are planted."""
    folder = tmp_path_factory.mktemp("planted")
    for package in ("compll", "tf_hips"):
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    for _, file, line in PLANTED:
        with (folder / file).open("a", encoding="utf-8") as text:
            text.write(f"{line}\n")
    return lint(folder)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("contract", "file", "line"),
    PLANTED,
    ids=lambda value: value.removesuffix(".py") if value.endswith(".py") else None,
)
def test_a_planted_violation_breaks_its_contract(
    contract: str, file: str, line: str, planted: str
) -> None:
    assert f"\n{contract} BROKEN" in planted, planted
    module = file.removesuffix(".py").replace("/", ".")
    imported = line.removeprefix("import ").removesuffix(".tensorflow")  # Horovod as a whole
    _, _, section = planted.partition(f"\n{contract}\n-----")
    section = re.split(r"\n.+\n-----", section)[0]
    breach = (
        rf"-\s+{re.escape(module)} -> {re.escape(imported)} \("
        if line
        else rf"- {re.escape(module)}$"
    )
    assert re.search(breach, section, re.MULTILINE), planted
