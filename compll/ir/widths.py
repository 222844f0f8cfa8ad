# SPDX-License-Identifier: Apache-2.0
"""Which parameter says how wide codes are."""

from compll.ir import nodes
from compll.ir.types import FLOAT, Array, UInt
from compll.ir.walk import free_vars


def width_param(program: nodes.Program, most: int) -> nodes.Param | None:
    """A parameter that a field's width depends on, of at most `most` values, none below 0."""
    kinds = [] if program.encode is None else [value.type for value in program.encode.fields]
    if program.decode is not None:
        kinds += [item.var.type for item in program.decode.fields]
    for kind in kinds:
        element = kind.element if isinstance(kind, Array) else kind
        if not isinstance(element, UInt) or not isinstance(element.bits, nodes.Expr):
            continue
        for param in program.params:
            is_few = param.low >= 0 and param.high - param.low < most
            if is_few and param.var.type != FLOAT and param.var in free_vars(element.bits):
                return param
    return None
