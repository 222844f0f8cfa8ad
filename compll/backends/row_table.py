# SPDX-License-Identifier: Apache-2.0
"""Values of codes looked up: what a decode computes of a code alone has few results.

Of codes of up to 4 bits there are at most 16 values, as many as a row has lanes. They are computed
once, by the operations that would compute each element's, so that their bits are the same; then an
element costs a shift and a permutation (row_looked_up in row_avx512.h and its like).
"""

from dataclasses import replace

from compll.backends.row_code import RowCode
from compll.ir import nodes
from compll.ir.walk import walk

# Every machine that has rows has tables for codes of as many bits.
_ALWAYS_BITS = 2


def look_up_values(rows: RowCode) -> bool:
    """Makes a decode in rows look its values up; False: they are not of one code and of scalars.

    Machines have tables for codes of up to kTableBits; for wider ones the arithmetic remains.
    """
    read = _only_codes(rows)
    if read is None:
        return False
    [codes] = rows.packed
    table = replace(rows, body=[], packed=[], letter="w", looked_up=read)
    if not table.prepare_value():
        raise RuntimeError(f"values that rows compute must be there for a table: {rows.part!r}")
    name, bits = f"{rows.tag}_values", codes.width
    made = [f"const RowCodes held = row_every_code<{bits}>();", *table.body, f"{name} = x;"]
    at = rows.argument("const uint8_t*", codes.name)
    shape, table_name = f"{bits}, {codes.mirror}", f"{rows.tag}_table"
    found = f"row_looked_up<{shape}>({table_name}, {at}, at);"
    rows.setup = [f"Row {name};", "{", *(f"  {line}" for line in made), "}"]
    rows.setup.append(f"const auto {table_name} = row_table<{shape}>({name});")
    if bits.isdigit() and int(bits) <= _ALWAYS_BITS:
        rows.body = [f"const Row x = {found}"]
        return True
    has_table = f"if constexpr ({bits} <= kTableBits) {{"
    rows.setup[0:2] = [f"Row {name} = row_of(0.0f);", has_table]
    *lets, last = rows.body
    rows.body = ["Row x;", has_table, f"  x = {found}", "} else {"]
    rows.body += [*(f"  {line}" for line in (*lets, last.replace("const Row x", "x"))), "}"]
    return True


def _only_codes(rows: RowCode) -> nodes.Var | None:
    """The vector of codes that is all that a decode reads; None: it reads more, or noise."""
    part = rows.part
    # A byte has more values than a row has lanes.
    if len(rows.packed) != 1 or rows.packed[0].width == "8" or rows.uses_blocks:
        return None
    exprs = [e for root in (part.value, *(let.value for let in part.lets)) for e in walk(root)]
    if any(isinstance(e, nodes.Random) for e in exprs):
        return None
    arrays = {e.array for e in exprs if isinstance(e, nodes.Index)}
    found = arrays.pop()
    return found.var if not arrays and isinstance(found, nodes.Ref) else None
