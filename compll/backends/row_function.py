# SPDX-License-Identifier: Apache-2.0
"""Functions of rows: where they are written, for which machines, and what of them is only text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from compll.backends.c_common import Lines

# Those with rows (row.h), of one kind the best first.
_MACHINES = ("AVX512", "AVX2", "NEON")
# Blocks of so many rows, and of multiples, are reduced in as many chains: a reduction waits for the
# one before it, and a processor begins several in that time.
_CHAINS = 4


class _Needs(Protocol):
    """What a function is told of the rows that it computes; see RowCode."""

    @property
    def arguments(self) -> Mapping[str, tuple[str, str]]:
        """What is given, and the name and type of the parameter that takes it."""

    @property
    def varied_bits(self) -> str | None:
        """The width of codes that a parameter of a codec gives."""


@dataclass
class Apart:
    """Where functions of rows go, before what calls them; `name` and a number are their names."""

    lines: Lines
    name: str
    number: int = 0


def emit_function(rows: Sequence[_Needs], apart: Apart, body: list[str], target: str) -> str:
    """Writes a function with what several rows need; returns the call of it, but for `target`.

    It is written once for each kind of machine that has rows, and returns false on others.
    """
    name = f"{apart.name}{apart.number}"
    apart.number += 1
    # Parts of one loop may share what they need.
    needs = dict.fromkeys((text, *found) for row in rows for text, found in row.arguments.items())
    parameters = [f"{kind} {parameter}" for _, parameter, kind in needs]
    given = [text for text, _, _ in needs]
    template = ["template <int kBits>"] * any(row.varied_bits is not None for row in rows)
    of_bits = "<kBits>" * len(template)
    lines = apart.lines
    for machine in _MACHINES:
        space = machine.lower()
        lines.add(
            f"#if defined(TF_HIPS_ROWS_{machine})",
            f"namespace {space} {{",
            f"using namespace tf_hips::{space};",
            *template,
            f"TF_HIPS_{machine} bool {name}(",
            *(f"    {text}," for text in ["int64_t count", *parameters]),
            f"    {target}) {{",
            *(f"  {line}" for line in body),
            "}",
            f"}}  // namespace {space}",
            "#endif",
        )
    values = ["int kBits"] * len(template)
    lines.add(
        f"template <{', '.join([*values, 'typename... T'])}>",
        f"TF_HIPS_INLINE bool {name}([[maybe_unused]] T... arguments) {{",
    )
    for machine in _MACHINES:
        call = f"{machine.lower()}::{name}{of_bits}(arguments...)"
        lines.add(
            f"#if defined(TF_HIPS_ROWS_{machine})",
            f"  if (machine() == Machine::k{machine.capitalize()}) return {call};",
            "#endif",
        )
    lines.add("  return false;", "}", "")
    return f"{name}{of_bits}({', '.join(['count', *given])}, "


def blocks_in_chains(body: list[str], first: str, fold: str, combined: str) -> list[str]:
    """Reduces blocks whose elements may be taken in any order, and returns.

    Args:
        body: computes x, the row behind `at`.
        first: what the first row of a chain is reduced to.
        fold: what a chain, `a`, becomes by another row.
        combined: takes what the rows of a block, `a`, came to.
    """
    step = 16 * _CHAINS

    def rows(begin: str, become: str) -> list[str]:
        return [
            f"for (int64_t k = 0; k < {_CHAINS}; ++k) {{",
            f"  const int64_t at = {begin} + 16 * k;",
            *(f"  {line}" for line in body),
            "  Row& a = chains[k];",
            f"  a = {become};",
            "}",
        ]

    return [
        f"if (length % {step} == 0) {{",
        "  for (int64_t begin = 0; begin < count; begin += length) {",
        f"    Row chains[{_CHAINS}];",
        *(f"    {line}" for line in rows("begin", first)),
        f"    for (int64_t next = begin + {step}; next < begin + length; next += {step}) {{",
        *(f"      {line}" for line in rows("next", fold)),
        "    }",
        "    Row a = chains[0];",
        f"    for (int64_t k = 1; k < {_CHAINS}; ++k) {{",
        "      const Row x = chains[k];",
        f"      a = {fold};",
        "    }",
        f"    {combined}",
        "  }",
        "  return true;",
        "}",
    ]
