# SPDX-License-Identifier: Apache-2.0
"""Several bodies decoded and added in one loop: what a merge is made of.

    for each tile:   unpack each row  ->  sum = value of row 0; sum += value of row 1; ...

Sums stay in registers from row to row. They are formed in the order of the rows, so they are those
of decoding row by row.
"""

from compll.backends.block_loops import BlockLoops
from compll.backends.c_common import Lines
from compll.backends.row_code import Apart
from compll.backends.row_results import sum_of_rows
from compll.ir import nodes
from compll.ir.types import FLOAT

ROWS = 4


def emit_rows(lines: Lines, rows: list[BlockLoops], sweep: nodes.Sweep, apart: Apart) -> None:
    """The loop of decode_rows.

    Args:
        lines: where it is written to.
        rows: the loops of one row each; their fields and scalars are there.
        sweep: what decode does for each element.
        apart: where functions of rows go.
    """
    part = sweep.writes[0].value
    if not isinstance(part, nodes.Elementwise):
        raise TypeError(f"a decode must be elementwise to be merged by rows. Received: {part!r}")
    # Long tiles: unpacking a row is a call.
    head = "for_tiles<kTile>(begin, end, [&](int64_t base, auto count)"
    lines.open(f"{head} TF_HIPS_INLINED {{")
    for row in rows:
        row.prepare(sweep)
    lines.add("float* const to = out + (base - begin);")
    codes = [row.row_code(part, tag) for row, tag in zip(rows, "abcdefgh", strict=False)]
    found = [code for code in codes if code is not None]
    if len(found) == len(rows):
        for row, code in zip(rows, found, strict=True):
            row.run_before(code)
        late = "late == nullptr ? late : late + (base - begin)"
        lines.add(f"if ({sum_of_rows(apart, found)}is_first, to, {late})) return;")
    for row in rows:
        row.run_spreads()
    statements = [row.statements(part, _add, FLOAT) for row in rows]
    others = [line for row in statements[1:] for line in row]
    lines.open("if (is_first) {")
    lines.open("for (int64_t j = 0; j < count; ++j) {")
    lines.add(*rows[0].statements(part, _set, FLOAT), *others, "to[j] = sum;")
    lines.close()
    lines.turn("} else {")
    lines.open("for (int64_t j = 0; j < count; ++j) {")
    lines.add("float sum = to[j];", *statements[0], *others, "to[j] = sum;")
    lines.close()
    lines.close()
    lines.add("if (late != nullptr) stream_tile(to, count, late + (base - begin));")
    lines.close("});")


def _add(text: str) -> str:
    return f"sum += {text};"


def _set(text: str) -> str:
    return f"float sum = {text};"
