# SPDX-License-Identifier: Apache-2.0
"""The body of the packets: what lies where, one field behind another.

    concat(mean, codes)   -->   field 0: mean, a float of 32 bits; field 1: codes, gradient.size
                                elements of 2 bits, packed

Elements are packed without gaps, least significant bit first, and every field starts at a byte, so
an offset is the bytes of the fields before it. Back ends compute offsets where the number of
elements is known; widths may depend on parameters.
"""

from dataclasses import replace

from compll.ir import nodes


def pack(plan: nodes.Plan) -> nodes.Plan:
    """Lays the body out: the fields that decode reads, or without one, those that encode writes."""
    program = plan.program
    if program.decode is not None:
        body = tuple(
            nodes.BodyField(item.var.name, item.var.type, item.size)
            for item in program.decode.fields
        )
    elif program.encode is not None:
        pairs = zip(program.encode.fields, program.encode.sizes, strict=True)
        body = tuple(
            nodes.BodyField(f"field {k}", value.type, size) for k, (value, size) in enumerate(pairs)
        )
    else:
        raise ValueError(f"{program.name} has no function")
    return replace(plan, body=body)
