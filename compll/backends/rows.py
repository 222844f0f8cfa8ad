# SPDX-License-Identifier: Apache-2.0
"""Several bodies decoded and added in one loop: what a merge is made of.

    for each tile:   unpack each row  ->  sum = value of row 0; sum += value of row 1; ...

Sums stay in registers from row to row. They are formed in the order of the rows, so they are those
of decoding row by row.
"""

from collections.abc import Sequence

from compll.backends.block_loops import BlockLoops
from compll.backends.c_common import Lines
from compll.backends.feedback import adds_rows
from compll.backends.row_code import RowCode
from compll.backends.row_function import Apart
from compll.backends.row_results import sum_of_rows
from compll.backends.tile_needs import ask_for_packet
from compll.ir import nodes
from compll.ir.types import FLOAT, Array, UInt

ROWS = 4
# Of codes of one bit, whose two values stay in registers: adding them takes less than reading and
# writing the sums.
MOST_ROWS = 8
# Names of the functions that decode as many bodies at a time.
NAMES = {ROWS: "decode_rows", MOST_ROWS: "decode_most_rows"}
# What a function of rows is given last.
_LAST = "is_first, to, late == nullptr ? late : late + (base - begin))"


def rows_at_once(plans: Sequence[nodes.Plan]) -> tuple[int, ...]:
    """How many bodies a merge of what any of the plans encoded decodes in one loop.

    None; ROWS; or ROWS, and MOST_ROWS where there are as many.
    """
    if not all(map(adds_rows, plans)):
        return ()
    return (ROWS, MOST_ROWS) if all(map(_is_of_bits, plans)) else (ROWS,)


def _is_of_bits(plan: nodes.Plan) -> bool:
    """Whether a packet has one vector, of codes of one bit."""
    decode = plan.program.decode
    fields = [] if decode is None else [one.var.type for one in decode.fields]
    found = [kind.element for kind in fields if isinstance(kind, Array)]
    return found == [UInt(1)]


def emit_rows(lines: Lines, rows: list[BlockLoops], sweep: nodes.Sweep, apart: Apart) -> None:
    """The loop of decode_rows, or of decode_most_rows.

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
    tags = "abcdefgh"[: len(rows)]
    packed = [row.row_code(part, tag, is_varied=True) for row, tag in zip(rows, tags, strict=True)]
    found = [code for code in packed if code is not None]
    # Packed codes are for tables: where there is none, bytes take less.
    if len(found) == len(rows) and all(code.setup or code.uses_bits for code in found):
        _emit_packed(lines, rows, found, apart)
    else:
        codes = [row.row_code(part, tag) for row, tag in zip(rows, tags, strict=True)]
        found = [code for code in codes if code is not None]
        if len(found) == len(rows):
            for row, code in zip(rows, found, strict=True):
                row.run_before(code)
            _ask_ahead(lines, found)
            lines.add(f"if ({sum_of_rows(apart, found)}{_LAST}) return;")
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


def _emit_packed(lines: Lines, rows: list[BlockLoops], codes: list[RowCode], apart: Apart) -> None:
    """Rows of codes as they are in memory; those of widths that rows lack, from bytes."""
    call = f"{sum_of_rows(apart, codes)}{_LAST}"
    for row, code in zip(rows, codes, strict=True):
        row.run_before(code)
    _ask_ahead(lines, codes)
    # There may be fewer codes than elements.
    counts = dict.fromkeys(c.count for code in codes for c in code.packed if c.count is not None)
    whole = "".join(f"base + count <= {count} && " for count in counts)
    bits = codes[0].varied_bits
    if bits is None:
        lines.add(f"if ({whole}{call}) return;")
        return
    lines.open(f"if ({whole}with_packed_width({bits}, [&](auto packed_bits) TF_HIPS_INLINED {{")
    lines.add("constexpr int kBits = decltype(packed_bits)::value;", f"return {call};")
    lines.close("})) return;")
    if counts or any(c.mirror for code in codes for c in code.packed):
        return
    for row in rows:
        row.run_unpacks()
    lines.open("{")
    lines.add("constexpr int kBits = 8;")
    for row, code in zip(rows, codes, strict=True):
        row.take_bytes(code)
    lines.add(f"if ({call}) return;")
    lines.close()


def _ask_ahead(lines: Lines, codes: list[RowCode]) -> None:
    """Asks for codes of tiles to come, where rows are left again before a processor sees an order.

    It does see that of the only ones that there are.
    """
    asked = [
        ask_for_packet(packed.name, f"count * {packed.bits} / 8")
        for code in codes
        for packed in code.packed
    ]
    if asked:
        lines.open("if (!is_first || late == nullptr) {")
        lines.add(*asked)
        lines.close()


def _add(text: str) -> str:
    return f"sum += {text};"


def _set(text: str) -> str:
    return f"float sum = {text};"
