# SPDX-License-Identifier: Apache-2.0
"""Whether an expression has the type that its parts give it (nodes.py says which that is).

A violation is a mistake of the compiler. What is bound where, and which nodes a pass leaves, says
verify.py.
"""

import numpy as np

from compll.ir import nodes
from compll.ir.types import BOOL, FLOAT, INT, Array, Type, UInt

_COMPARISONS = frozenset(("<", "<=", ">", ">=", "==", "!="))
_OF_NUMBERS = frozenset("+-*/")
_OF_INTS = frozenset(("%", "<<", ">>", "&", "|", "^"))
_OF_BOOLS = frozenset(("&&", "||"))
_UNARY = {"-": (FLOAT, INT), "~": (INT,), "!": (BOOL,)}
# Arguments of each function, and of which types they may be.
_MATH: dict[str, tuple[int, tuple[Type, ...]]] = {
    **dict.fromkeys(("sqrt", "exp2", "log2", "floor", "ceil", "round"), (1, (FLOAT,))),
    **dict.fromkeys(("abs", "sign"), (1, (FLOAT, INT))),
    **dict.fromkeys(("min", "max"), (2, (FLOAT, INT))),
}


class IrError(Exception):
    """The compiler made an illegal program."""


def check_types(expr: nodes.Expr) -> None:
    """Looks at one expression, and at its direct parts no further than their types.

    Raises:
        IrError: they do not belong together.
    """
    problem = _problem(expr)
    if problem:
        raise IrError(problem)


def _problem(expr: nodes.Expr) -> str:
    match expr:
        case nodes.Const():
            is_right = _holds(expr.type, expr.value)
            return "" if is_right else f"{expr.value!r} is no constant of type {expr.type}"
        case nodes.Ref():
            is_right = expr.type == expr.var.type
            return "" if is_right else f"`{expr.var.name}` is {expr.var.type}, read as {expr.type}"
        case nodes.KeyPart():
            is_right = expr.type == INT and expr.name in ("seed", "step")
            return "" if is_right else f"`{expr.name}` of type {expr.type} is not known"
        case nodes.Unary() | nodes.Binary() | nodes.Select() | nodes.Math():
            return _operation(expr)
        case nodes.Convert() | nodes.Bitcast():
            return _conversion(expr)
        case nodes.Random():
            return _random(expr)
        case nodes.Size() | nodes.Index() | nodes.Reduce():
            return _of_a_vector(expr)
        case _:
            return _vector(expr)


def _holds(kind: Type, value: object) -> bool:
    """Whether a constant is one of its type: a float one that binary32 has."""
    if kind == FLOAT:
        if not isinstance(value, float):
            return False
        with np.errstate(over="ignore"):
            rounded = float(np.float32(value))
        return rounded == value or value != value
    if kind == BOOL:
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    if kind == INT:
        return -(2**63) <= value < 2**63
    if not isinstance(kind, UInt) or value < 0:
        return False
    return not isinstance(kind.bits, int) or value < 2**kind.bits


def _operation(expr: nodes.Unary | nodes.Binary | nodes.Select | nodes.Math) -> str:
    match expr:
        case nodes.Unary():
            kind = expr.operand.type
            is_right = kind in _UNARY.get(expr.op, ()) and expr.type == kind
            return "" if is_right else f"`{expr.op}` on {kind} gives {expr.type}"
        case nodes.Binary():
            left, right = expr.left.type, expr.right.type
            is_right = left == right and expr.type == _result(expr.op, left)
            return "" if is_right else f"`{expr.op}` on {left} and {right} gives {expr.type}"
        case nodes.Select():
            arms = (expr.yes.type, expr.no.type)
            is_right = expr.condition.type == BOOL and arms == (expr.type, expr.type)
            return "" if is_right else "a Select needs a Bool and two arms of its own type"
    kinds = [argument.type for argument in expr.arguments]
    number, known = _MATH.get(expr.function, (0, ()))
    is_right = kinds == [expr.type] * number and expr.type in known
    shown = ", ".join(map(str, kinds))
    return "" if is_right else f"`{expr.function}` of ({shown}) gives {expr.type}"


def _result(op: str, kind: Type) -> Type | None:
    """What an operation on two values of a type gives; None: there is no such operation."""
    if op in _COMPARISONS:
        return BOOL if kind in (FLOAT, INT, BOOL) else None
    known = {INT: _OF_NUMBERS | _OF_INTS, FLOAT: _OF_NUMBERS, BOOL: _OF_BOOLS}
    return kind if op in known.get(kind, ()) else None


def _conversion(expr: nodes.Convert | nodes.Bitcast) -> str:
    source, target = expr.operand.type, expr.type
    if isinstance(expr, nodes.Bitcast):
        is_right = (target, source) in ((FLOAT, INT), (UInt(32), FLOAT))
        return "" if is_right else f"a Bitcast of {source} to {target}"
    is_right = not isinstance(source, Array) and not isinstance(target, Array)
    return "" if is_right else f"a conversion of {source} to {target}"


def _random(expr: nodes.Random) -> str:
    ends = (expr.low.type, expr.high.type)
    is_right = expr.type in (FLOAT, INT) and ends == (expr.type, expr.type)
    if not is_right or expr.position.type != INT or expr.bits not in (16, 32):
        where = f"at a position of {expr.position.type}, by {expr.bits} bits"
        return f"a Random of {expr.type} from {ends[0]} to {ends[1]} {where}"
    return ""


def _of_a_vector(expr: nodes.Size | nodes.Index | nodes.Reduce) -> str:
    match expr:
        case nodes.Size():
            is_right = expr.type == INT and isinstance(expr.array.type, Array)
            return "" if is_right else f"a Size of {expr.array.type} of type {expr.type}"
        case nodes.Index():
            is_right = expr.array.type == Array(expr.type) and expr.index.type == INT
            what = f"element {expr.index.type} of {expr.array.type}"
            return "" if is_right else f"{what} is read as {expr.type}"
    is_right = expr.type in (FLOAT, INT) and expr.init.type == expr.type
    if not is_right or not isinstance(expr.source.type, Array):
        return f"a reduction of {expr.source.type} of type {expr.type} from {expr.init.type}"
    return ""


def _vector(expr: nodes.Expr) -> str:
    """The same of what makes a vector."""
    name = type(expr).__name__
    if not isinstance(expr.type, Array) and not isinstance(expr, nodes.Apply):
        return f"{name} must give a vector. Received: {expr.type}"
    counts = _counts(expr)
    if any(count.type != INT for count in counts):
        return f"{name} counts elements by {', '.join(str(count.type) for count in counts)}"
    match expr:
        case nodes.Range():
            is_right, what = expr.type == Array(INT), f"a Range of type {expr.type}"
        case nodes.Apply():
            function = expr.function
            given = [argument.type for argument in expr.arguments]
            is_right = given == [var.type for var in function.params]
            is_right = is_right and expr.type == function.result.type
            what = f"a lambda of type {function.result.type} is called with {given}"
        case nodes.Map():
            function = expr.function
            is_right = expr.position.type == INT and len(function.params) == 1
            # An element is converted to what the lambda takes.
            is_right = is_right and not isinstance(function.params[0].type, Array)
            is_right = is_right and isinstance(expr.source.type, Array)
            is_right = is_right and expr.type == Array(function.result.type)
            what = f"a Map of {expr.source.type} by a lambda of type {function.result.type}"
        case nodes.Elementwise():
            is_right = expr.position.type == INT and expr.type == Array(expr.value.type)
            what = f"each element is {expr.value.type}, the vector {expr.type}"
        case nodes.Sample() | nodes.Sort():
            is_right, what = expr.source.type == expr.type, f"a {name} of {expr.source.type}"
        case nodes.Filter():
            is_right = expr.flags.type == Array(BOOL) and expr.source.type == expr.type
            what = "a Filter needs flags of Bool and a source of its own type"
        case nodes.TopK():
            is_right = expr.source.type == Array(FLOAT) and expr.type == Array(INT)
            what = f"a TopK of {expr.source.type}"
        case nodes.BlockReduce():
            is_right = expr.type == Array(expr.init.type) and expr.init.type in (FLOAT, INT)
            is_right = is_right and isinstance(expr.source.type, Array)
            what = f"a block reduction of {expr.source.type} from {expr.init.type}"
        case nodes.Hadamard():
            is_right = expr.source.type == expr.type == Array(FLOAT)
            what = f"a Hadamard of {expr.source.type}"
        case nodes.Scatter():
            is_right = expr.indices.type == Array(INT) and expr.type == Array(FLOAT)
            is_right = is_right and expr.values.type == Array(FLOAT)
            what = f"a Scatter of {expr.values.type} to {expr.indices.type}"
        case _:
            is_right, what = False, f"there is no {name}"
    return "" if is_right else what


def _counts(expr: nodes.Expr) -> list[nodes.Expr]:
    """The parts that are numbers of elements."""
    match expr:
        case nodes.Range() | nodes.Sample() | nodes.TopK():
            return [expr.count]
        case nodes.Elementwise():
            return [expr.size]
        case nodes.BlockReduce() | nodes.Hadamard():
            return [expr.block]
        case nodes.Filter():
            return [] if expr.limit is None else [expr.limit]
        case nodes.Scatter():
            return [expr.size] if expr.used is None else [expr.size, expr.used]
    return []
