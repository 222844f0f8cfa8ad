# SPDX-License-Identifier: Apache-2.0
"""Whether a field that Encode concatenates is the value of a parameter, whatever the call.

Decode refuses a packet in which a field that it extracts into a parameter is anything else. So an
Encode that puts something else there makes packets that no Decode takes, and with error feedback a
residual that leaves out what was never received: this is told before any packet is made.
"""

from collections.abc import Sequence

from compll.ir import nodes
from compll.ir.types import FLOAT, INT, Type, UInt

# Integers up to there are binary32 numbers.
_MAX_EXACT = 2**24


def parameter_of(
    value: nodes.Expr, lets: Sequence[nodes.Let], params: Sequence[nodes.Param]
) -> nodes.Var | None:
    """The parameter whose value a scalar always has; None where that is not seen.

    Seen through are variables, lambdas that return what they take, and conversions that keep every
    value in the parameter's range.
    """
    values: dict[nodes.Var, nodes.Expr] = {let.var: let.value for let in lets}
    known = {param.var: param for param in params}
    kinds: list[Type] = []
    while True:
        if isinstance(value, nodes.Convert):
            kinds.append(value.type)
            value = value.operand
        elif isinstance(value, nodes.Apply):
            function = value.function
            values |= zip(function.params, value.arguments, strict=True)
            values |= {let.var: let.value for let in function.lets}
            value = function.result
        elif isinstance(value, nodes.Ref) and value.var in values:
            value = values[value.var]
        else:
            break
    param = known.get(value.var) if isinstance(value, nodes.Ref) else None
    if param is None or not all(_keeps(kind, param) for kind in kinds):
        return None
    return param.var


def _keeps(kind: Type, param: nodes.Param) -> bool:
    """Whether a type holds every value of a parameter."""
    if param.var.type == FLOAT or kind == FLOAT:
        return kind == param.var.type or (
            kind == FLOAT and -_MAX_EXACT <= param.low <= param.high <= _MAX_EXACT
        )
    if isinstance(kind, UInt) and isinstance(kind.bits, int):
        return param.high < 1 << kind.bits  # no integer in a packet is negative
    return kind == INT
