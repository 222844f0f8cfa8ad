# SPDX-License-Identifier: Apache-2.0
"""docs/api.md names every argument of strategies and compressors, with its default and range."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import tf_hips
from tf_hips.ops import registry

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/api.md").read_text(encoding="utf-8")


def rows(heading: str, columns: str) -> list[list[str]]:
    """Cells of the table whose head begins with `columns`, in the section with the heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = section.partition(columns)[2].partition("\n\n")[0]
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert found, heading
    return found


def arguments(file: str, kind: str) -> dict[str, str]:
    """Names and defaults of a class's constructor, from its source: no import of TensorFlow."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    [cls] = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == kind]
    [made] = [
        one for one in cls.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"
    ]
    plain = made.args.args[1:]
    pairs = [
        *zip(plain, made.args.defaults, strict=True),
        *zip(made.args.kwonlyargs, made.args.kw_defaults, strict=True),
    ]
    return {one.arg: ast.unparse(value) for one, value in pairs if value is not None}


def test_every_argument_of_a_strategy_is_listed() -> None:
    strategies = {
        "HierarchicalPS": arguments("tf_hips/strategies/hierarchical_ps.py", "HierarchicalPS"),
        "CompressedRing": arguments("tf_hips/strategies/ring.py", "CompressedRing"),
    }
    listed: dict[str, set[str]] = {name: set() for name in strategies}
    for names, of, values in rows("Arguments of the strategies", "| argument | of | values (the"):
        for name in re.findall(r"`(\w+)`", names):
            for kind in strategies if of == "both" else [of.strip("`")]:
                listed[kind].add(name)
                default = strategies[kind][name]
                shown = default.strip("'").removeprefix("_").lower()  # a constant is named for it
                assert values.lower().startswith((shown, f'"{shown}"')), (name, values, default)
    assert listed == {name: {*found} for name, found in strategies.items()}


def test_every_argument_of_a_compressor_is_listed_with_its_range() -> None:
    listed = set()
    for names, given, _ in rows("Which compressor", "| compressor | arg"):
        for name in re.findall(r"`(\w+)(?:\(\))?`", names):
            listed.add(name)
            parts = [] if given == "none" else given.split("; ")
            parameters = registry.find(name).parameters
            assert len(parts) == len(parameters), name
            for text, one in zip(parts, parameters, strict=True):
                assert text.startswith(f"`{one.name}="), (name, text)
                shown = re.match(r"`\w+=([^`]*)`", text)
                if one.words:
                    assert {*re.findall(r'"(\w+)"', text)} == {word for word, _ in one.words}
                    continue
                assert shown and one.default is not None and float(shown[1]) == one.default, text
                span = re.search(r", ([\d.e-]+) to ([\d.e]+)", text)
                if one.is_codec:
                    assert span, text
                    assert [float(span[1]), float(span[2])] == [one.minimum, one.maximum], text
                assert ("power of two" in text) == one.is_power_of_two, text
    assert listed == {*registry.REGISTRY, "powersgd"} - {"fp32"}


@pytest.mark.parametrize("name", ["error_feedback", "momentum", "warmup", "mixed", "budget"])
def test_every_argument_of_a_wrapper_is_listed(name: str) -> None:
    found = {cells[0].strip("`"): cells[1] for cells in rows("Which compressor", "| wrapper | arg")}
    names = [*inspect.signature(getattr(tf_hips, name)).parameters]
    assert [one for one in re.findall(r"`(\w+)(?:=[^`]*)?`", found[name]) if one in names] == names
