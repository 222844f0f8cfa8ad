# SPDX-License-Identifier: Apache-2.0
"""What the pages name is there: files, headings, options, arguments, variables, commands."""

import argparse
import ast
import functools
import itertools
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import compll
import tf_hips
from compll import commands as compll_commands
from tf_hips import cli, config
from tf_hips.comm.plan import Plan
from tf_hips.simulation.description import Description

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "docs/decisions", "benchmarks/results")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for folder in (".", "benchmarks", *FOLDERS)
    for path in sorted((ROOT / folder).glob("*.md"))
}
# Those that are kept; a decision, or a result, tells what was then.
KEPT = {name: text for name, text in PAGES.items() if not name.startswith(FOLDERS[1:])}
SOURCES = ("tf_hips", "compll", "benchmarks", "examples", "tools", "tests/faults", "tests/fuzz")
# Options of other programs that pages speak of.
FOREIGN = {
    "pip": {"--force-reinstall", "--no-deps"},
    "pytest": {"--hypothesis-profile", "--update-golden"},
    "horovodrun": {"--min-np"},
    "tensorboard": {"--logdir"},
    "HiPress": {
        *("--topo", "--comprplan", "--comp-alg", "--algorithm"),
        *("--numprocess", "--num-iterations", "--input", "--nnodes"),
    },
    "nvcc": {"--expt-relaxed-constexpr"},
    "upstream's tf_cnn_benchmarks": {
        *("--data_format", "--train_dir", "--save_model_steps", "--save_model_secs"),
        *("--eval", "--gradient_clip"),
        *("--use_resource_vars", "--staged_vars", "--horovod_device"),
    },
}
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCED.sub("", text)


def headings(text: str) -> set[str]:
    """What links may name behind `#`, as GitHub makes it of headings."""
    found: list[str] = []
    for line in re.findall(r"^#{1,6} +(.*)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(name if name not in found else f"{name}-{found.count(name)}")
    return {*found}


def broken(page: str) -> list[str]:
    """Links of a page that lead to no file, or to no heading there."""
    found = []
    text = re.sub(r"`[^`\n]*`", "", prose(PAGES[page]))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, heading = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        name = str(path.resolve().relative_to(ROOT))
        if not path.exists() or (heading and heading not in headings(PAGES.get(name, ""))):
            found.append(target)
    return found


def test_links_lead_to_files_and_headings() -> None:
    assert sum(text.count("](") for text in PAGES.values()) > 500
    assert not {page: wrong for page in PAGES if (wrong := broken(page))}


@pytest.mark.parametrize("folder", ["docs", "docs/decisions"])
def test_every_page_is_in_the_list_of_its_folder(folder: str) -> None:
    listed = {*re.findall(r"\]\(([\w-]+\.md)\)", PAGES[f"{folder}/README.md"])}
    assert listed == {path.name for path in (ROOT / folder).glob("*.md")} - {"README.md"}


def blocks(text: str) -> list[str]:
    """What a page shows apart from its lines, between fences or indented."""
    shown = [block for _, _, block in FENCED.findall(text)] + INDENTED.findall(prose(text))
    return [textwrap.dedent(block) for block in shown]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command that a page shows, in a block or in a line."""
    inline = re.findall(r"`([^`\n]+)`", prose(text))
    for line in "\n".join([*blocks(text), *inline]).replace("\\\n", " ").splitlines():
        for part in re.split(r" (?:&&|\|) |;", line):
            try:
                words = shlex.split(part.removeprefix("$ "), comments=True)
            except ValueError:  # not a command
                continue
            yield words


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Those of a command, by name."""
    return {
        name: one
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, one in action.choices.items()
    }


@functools.cache
def programs() -> dict[str, argparse.ArgumentParser]:
    return {"tf-hips": cli.make_parser(), "compll": compll_commands._parser()}


def unknown(words: list[str]) -> Iterator[str]:
    """Options in a command of ours that it does not have, and commands that are none."""
    parser: argparse.ArgumentParser | None = None
    for word, behind in itertools.pairwise([*words, ""]):
        name = Path(word).name
        if name in programs() and (behind in subcommands(programs()[name]) or behind == "--help"):
            parser = programs()[name]
        elif parser is not None and word in subcommands(parser):
            parser = subcommands(parser)[word]
        elif parser is not None and (word == "--" or word.endswith(".py")):
            parser = None if "script" in {one.dest for one in parser._actions} else parser
        elif parser is not None and re.match(r"--?[A-Za-z]", word):
            option = word.partition("=")[0]
            if option not in parser._option_string_actions:
                yield f"{parser.prog} {option}"


def test_commands_have_the_options_that_are_shown() -> None:
    shown = [(page, words) for page, text in KEPT.items() for words in commands(text)]
    of_ours = [words for _, words in shown if {Path(word).name for word in words} & {*programs()}]
    assert len(of_ours) > 150
    assert not [(page, one) for page, words in shown for one in unknown(words)]
    assert [*unknown(shlex.split("x && tf-hips run --state d --rule r t.py --y"))] == [
        "tf-hips run --state"
    ]


def test_options_that_pages_name_are_options_of_something() -> None:
    known = {name for names in FOREIGN.values() for name in names}
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            known |= {*re.findall(r'"(--[a-z][\w-]*)"', path.read_text(encoding="utf-8"))}
    for page, text in KEPT.items():
        named = {*re.findall(r"(?<![\w-])(--[a-z][\w-]*\w)", text)}
        wrong = {one for one in named if not {one, one.replace("--no-", "--", 1)} & known}
        assert not wrong, page


def test_modules_and_verbs_that_pages_name_can_be_called() -> None:
    verbs = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    of_generated = {"tensorflow", "cuda"}  # the Makefile that `compll gen` writes
    for page, text in KEPT.items():
        for words in commands(text):
            for word, behind in itertools.pairwise(words):
                if word == "-m" and behind.startswith(("tf_hips", "compll", "benchmarks", "tests")):
                    path = ROOT / behind.replace(".", "/")
                    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
            if words[:1] == ["make"] and not any(word.startswith("-C") for word in words):
                named = {word for word in words[1:] if re.fullmatch(r"[a-z][a-z-]+", word)}
                assert named <= verbs | of_generated, (page, words)


def test_every_variable_is_told_of() -> None:
    read = set()
    for path in (ROOT / "tf_hips").rglob("*.py"):
        read |= {*re.findall(r'"(TF_HIPS_[A-Z_]+)"', path.read_text(encoding="utf-8"))}
    for path in (ROOT / "tf_hips/cc").rglob("*.h"):
        read |= {*re.findall(r'getenv\("(TF_HIPS_[A-Z_]+)"', path.read_text(encoding="utf-8"))}
    listed = {*re.findall(r"`(TF_HIPS_[A-Z_]+)`", PAGES["docs/settings.md"])}
    assert len(listed) > 10
    assert listed == read


@functools.cache
def signatures() -> dict[str, list[set[str]]]:
    """Arguments of what `tf_hips` offers, by name; read, not imported: TensorFlow takes seconds."""
    found: dict[str, list[set[str]]] = {}
    for path in (ROOT / "tf_hips").rglob("*.py"):
        for one in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(one, ast.ClassDef):
                made = [f for f in one.body if getattr(f, "name", "") == "__init__"]
            else:
                made = [one] if isinstance(one, ast.FunctionDef) else []
            for f in made:
                every = [*f.args.args, *f.args.kwonlyargs]
                found.setdefault(one.name, []).append({arg.arg for arg in every})
    return found


def python(text: str) -> Iterator[ast.Module]:
    """What a page shows of Python: blocks that say so, and others that can be read so."""
    for _, language, block in FENCED.findall(text):
        if language == "python":
            yield ast.parse(textwrap.dedent(block))
    for block in INDENTED.findall(prose(text)):
        for line in textwrap.dedent(block).splitlines():  # a block may begin as a command
            try:
                yield ast.parse(line)
            except SyntaxError:
                continue


def test_names_of_tf_hips_exist() -> None:
    modules = {path.name.partition(".")[0] for path in (ROOT / "tf_hips").iterdir()}
    named = {page: {*re.findall(r"tf_hips\.(\w+)", text)} for page, text in KEPT.items()}
    known = {*tf_hips.__all__} | modules
    assert not {page: wrong for page, names in named.items() if (wrong := names - known)}


def test_python_that_is_shown_gives_arguments_that_exist() -> None:
    looked_at = 0
    for page, text in KEPT.items():
        for call in (one for tree in python(text) for one in ast.walk(tree)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            takes = signatures().get(call.func.attr)
            if takes and re.fullmatch(r"(tf_hips|robust)(\.\w+)+", ast.unparse(call.func)):
                given = {one.arg for one in call.keywords if one.arg is not None}
                assert any(given <= one for one in takes), (page, ast.unparse(call))
                looked_at += 1
    assert looked_at > 50


def test_messages_that_pages_explain_are_said() -> None:
    """The first cells of tables of what one sees, of texts of ours that have several words."""
    pages = {
        "docs/install.md": "When it fails",
        "docs/new-algorithm.md": "When it does not work",
        "docs/trouble.md": "Where to look",
    }
    of_others = ("Connect timeout", "Op type not registered")
    written = {".py", ".sh", ".cc", ".h"}
    sources = [one for folder in SOURCES for one in (ROOT / folder).rglob("*")]
    said = "\n".join(
        re.sub(r'"\s*\n\s*f?"|\\?`', "", path.read_text(encoding="utf-8"))
        for path in sources
        if path.suffix in written
    )
    looked_at = 0
    for page, heading in pages.items():
        section = PAGES[page].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        for cell in re.findall(r"^\| (.*?) \| ", section, re.MULTILINE):
            for one in re.findall(r"``(.+?) ?``|`([^`]+)`", cell):
                text = re.sub(r"^(set-up|build): |`", "", "".join(one))
                if " " not in text or text.startswith(of_others):
                    continue
                parts = re.split(r"\.\.\.|\b[NXY]\b", text)
                assert max(parts, key=len).strip(" :") in said, (page, text)
                looked_at += 1
    assert looked_at > 15


@pytest.mark.parametrize(
    ("page", "begins", "name", "read"),
    [
        ("docs/settings.md", "run: job1\n", "run.yaml", config.load),
        ("docs/plan.md", "version: 1\nnum_ranks", "plan.yaml", Plan.read),
        ("docs/esync.md", "version: 1\nrounds", "sites.yaml", Description.read),
        ("docs/compll-language.md", "param ThreeLevel", "threelevel.pse", compll.compile_spec),
    ],
)
def test_files_that_pages_show_are_taken(
    page: str, begins: str, name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    [shown] = [block for block in blocks(KEPT[page]) if block.startswith(begins)]
    (tmp_path / name).write_text(shown, encoding="utf-8")
    read(tmp_path / name)


def test_targets_that_pages_say_are_met_are_those_of_the_result() -> None:
    said = r"\[?(\d+) of \[?(\d+)(?: targets)?\]\((?:\.\./)?(benchmarks/results/[^)]+)\)"
    found = [one for text in KEPT.values() for one in re.findall(said, text)]
    assert len(found) > 5
    for met, every, file in found:
        verdicts = re.findall(r"\| (yes|no|noisy) \|$", PAGES[file], re.MULTILINE)
        assert (verdicts.count("yes"), len(verdicts)) == (int(met), int(every)), file
