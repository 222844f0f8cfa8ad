# SPDX-License-Identifier: Apache-2.0
"""Functions of rows that do more than one thing: several results of a step, and several bodies.

What is computed for a row says row_code.py.
"""

from collections.abc import Container
from dataclasses import dataclass

from compll.backends.row_code import FOLDS, Rest, RowCode
from compll.backends.row_function import Apart, emit_function


@dataclass(frozen=True)
class RowResult:
    """What a loop makes of the values of one part.

    Attributes:
        code: computes x, a row of floats or of codes of a bit.
        reducer: that floats are folded by, into a Tree; None: codes are counted, or written.
        target: C++ for the lanes of the Tree, the number of codes, or where they are written.
        is_count: codes are counted.
    """

    code: RowCode
    reducer: str | None
    target: str
    is_count: bool = False


def can_fold(reducer: str) -> bool:
    """Whether rows can be folded by a reducer."""
    return reducer in FOLDS


def results_of_rows(apart: Apart, results: list[RowResult], rest: Rest | None = None) -> str:
    """Writes the function that reduces and writes a step; returns its call, but for the end.

    `rest`: what is done about feedback.
    """
    parameters, given, before, after = [], [], [], []
    each = [f"  {line}" for line in rest.before(results[0].code)] if rest is not None else []
    for number, result in enumerate(results):
        to, a = f"to{number}", f"all{number}"
        given.append(result.target)
        if result.reducer is not None:
            parameters.append(f"float* {to}")
            before.append(f"Row {a} = row_at({to});")
            step = f"{a} = {FOLDS[result.reducer].format(a=a)};"
            after.append(f"row_store({to}, {a});")
        elif result.is_count:
            parameters.append(f"int64_t* {to}")
            before.append(f"int64_t {a} = *{to};")
            step = f"{a} += row_count(x);"
            after.append(f"*{to} = {a};")
        else:
            parameters.append(f"uint8_t* {to}")
            step = f"store_bits(x, {to} + at / 8);"
        each += ["  {", *(f"    {line}" for line in result.code.body), f"    {step}", "  }"]
    lines = ["if (count % 16 != 0) return false;", *before]
    lines += ["for (int64_t at = 0; at < count; at += 16) {", *each, "}", *after, "return true;"]
    rows = [result.code for result in results]
    return f"{emit_function(rows, apart, lines, ', '.join(parameters))}{', '.join(given)})"


def chosen_of_rows(apart: Apart, rows: RowCode, ahead: Container[str]) -> str:
    """Writes the function that says which elements a filter keeps; its call, but for the bits.

    `ahead`: C++ for the vectors of a tile that are asked for while it is read.
    """
    asked = [name for text, (name, _) in rows.arguments.items() if text in ahead]
    each = [f"prefetch_tile({name} + at, 16);" for name in asked]
    each += [*rows.body, "store_bits(x, to + at / 8);"]
    lines = ["if (count % 64 != 0) return false;", "for (int64_t at = 0; at < count; at += 16) {"]
    lines += [*(f"  {line}" for line in each), "}", "return true;"]
    return emit_function([rows], apart, lines, "uint8_t* to")


def sum_of_rows(apart: Apart, rows: list[RowCode]) -> str:
    """Writes the function that adds several decodes; returns its call, but for three arguments.

    These are whether the first value begins the sum, the sum, and where else it goes (merge.h).
    """
    lines = [
        "if (count % 16 != 0 || reinterpret_cast<uintptr_t>(late) % sizeof(float) != 0) {",
        "  return false;",
        "}",
        *(line for row in rows for line in row.setup),
        "LateRows rows(late, count);",
        "for (int64_t at = 0; at < count; at += 16) {",
        "  Row sum = is_first ? row_of(-0.0f) : row_at(to + at);",
    ]
    for row in rows:
        lines += ["  {", *(f"    {line}" for line in row.body), "    sum = sum + x;", "  }"]
    lines += [
        "  if (late == nullptr) {",
        "    row_store(to + at, sum);",
        "  } else {",
        "    rows.put(sum);",
        "  }",
        "}",
        "if (late != nullptr) rows.finish();",
        "return true;",
    ]
    return emit_function(rows, apart, lines, "bool is_first, float* to, float* late")
