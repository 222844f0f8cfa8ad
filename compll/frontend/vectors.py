# SPDX-License-Identifier: Apache-2.0
"""Vector operators: from the tree to typed IR.

    map(v, f)                        range(n)
    reduce(v, init, f)               block_reduce(v, n, init, f)
    filter(v, f)   filter(v, f, k)   sort(v, less)   top_k(v, k)   sample(v, m)
    hadamard(v, n)
    scatter(n, indices, values)      scatter(n, indices, values, used)

The numbers k, m and n decide how large a packet can become, so they may depend on parameters and on
the size of the gradient alone; `used` may depend on data.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from compll.frontend import ast, hints
from compll.frontend.constants import integer_of
from compll.frontend.scalars import SCALAR, check_key
from compll.frontend.scope import POISONED, Function, Refused, both, each, nearest
from compll.ir import nodes
from compll.ir.reducers import REDUCERS, behind_map, order_of, recognise
from compll.ir.sizes import SizeError, capacity_of, scalar_of
from compll.ir.types import BOOL, FLOAT, INT, Array, Type, joined
from compll.ir.walk import walk
from compll.source import Span

if TYPE_CHECKING:
    from compll.frontend.lower import Frame, Lowerer

ORDERS = ("less", "greater")
_SORT_HELP = "help: write `less`, the smallest first, or `greater` in its place"
_REDUCE_HELP = f"help: name one of {', '.join(REDUCERS)} in its place"


def _count(lower: "Lowerer", tree: ast.Expr, frame: "Frame", what: str) -> nodes.Expr:
    """A number that the layout of packets may depend on."""
    count = lower.integer(tree, frame, what)
    try:
        return scalar_of(count, lower.lets, lower.params, lower.sizes)
    except SizeError as error:
        raise lower.refuse_size(error, tree.span, what) from error


def _source(lower: "Lowerer", tree: ast.Expr, frame: "Frame") -> nodes.Expr:
    """A vector that is used more than once: as a variable, so that it is made once."""
    value = lower.vector(tree, frame)
    return value if isinstance(value, nodes.Ref) else lower.bind(frame, "v", value, tree.span)


def _floats(lower: "Lowerer", tree: ast.Expr, frame: "Frame", what: str) -> nodes.Expr:
    value = lower.vector(tree, frame)
    if value.type != Array(FLOAT):
        message = f"{what} must be a vector of `float`, found a `{value.type}`"
        raise lower.refuse("E301", message, tree.span, "help: `map` it to floats first")
    return value


def _checked(lower: "Lowerer", vector: nodes.Expr) -> nodes.Expr:
    """A vector whose capacity can be written down."""
    try:
        capacity_of(vector, lower.lets, lower.params, lower.sizes)
    except SizeError as error:
        raise lower.refuse_size(error) from error
    return vector


def _function(
    lower: "Lowerer", tree: ast.Expr, frame: "Frame", named: Sequence[str] = (), instead: str = ""
) -> Function | str | None:
    """The lambda or the name of a reducer that an argument is.

    `named`: functions that can be named there; `instead`: the line of help where another name
    stands there, empty for one that says how to write a lambda.
    """
    if isinstance(tree, ast.Lambda):
        return Function(tree, "", tree.span, frame.scope)
    if isinstance(tree, ast.Name):
        found = frame.scope.find(tree.name)
        if found is POISONED:
            raise Refused
        if isinstance(found, Function):
            return found
        if tree.name in REDUCERS:
            return tree.name
        if found is None and (tree.name in SCALAR or tree.name in OPERATORS):
            scalar = tree.name if tree.name in SCALAR else "abs"
            help_line = instead or hints.lambda_of(scalar)
            message = f"`{tree.name}` is not a lambda"
            raise lower.refuse("E305", message, tree.span, help_line)
        if found is None:
            lambdas = [
                n for n in frame.scope.all_names() if isinstance(frame.scope.find(n), Function)
            ]
            declare = f"help: declare it before: `lambda_func {tree.name} = [&](float x) ...`"
            help_lines = (
                (hints.reducer_elsewhere(tree.name) if named is REDUCERS else ())
                or nearest(tree.name, lambdas)
                or hints.elsewhere_called(tree.name)
                or nearest(tree.name, named)
                or (instead or declare,)
            )
            raise lower.refuse("E201", f"unknown name `{tree.name}`", tree.span, *help_lines)
    return None


def _map(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    position = nodes.Var("i", INT, tree.span)
    source, lowered = both(
        lambda: lower.vector(tree.arguments[0], frame),
        lambda: _of_elements(lower, tree, frame, position),
    )
    return nodes.Map(Array(lowered.result.type), tree.span, position, lowered, source)


def _of_elements(
    lower: "Lowerer", tree: ast.Call, frame: "Frame", position: nodes.Var
) -> nodes.Lambda:
    """The lambda of a `map` or `filter`; `position`: the element's number."""
    function = _function(lower, tree.arguments[1], frame)
    span = tree.arguments[1].span
    if not isinstance(function, Function):
        help_line = "help: write it there, `map(v, [&](float x) -> float { return x; })`"
        notes = (help_line,) if tree.name == "map" else ()
        raise lower.refuse("E305", f"`{tree.name}` takes a lambda", span, *notes)
    found = len(function.tree.parameters)
    if found != 1:
        message = f"the lambda of a `{tree.name}` takes one argument, this one {found}"
        raise lower.refuse("E305", message, span)
    return lower.lambda_(function, frame, nodes.Ref(INT, tree.span, position))


def _range(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    count = lower.integer(tree.arguments[0], frame, "the argument of `range`")
    try:
        resolved = scalar_of(count, lower.lets, lower.params, lower.sizes)
    except SizeError as error:
        at = tree.arguments[0].span
        raise lower.refuse_size(error, at, "the length of a `range`") from error
    return nodes.Range(Array(INT), tree.span, resolved)


def _filter(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    span = tree.arguments[1].span
    position = nodes.Var("i", INT, tree.span)
    (source, keep), limits = both(
        lambda: both(
            lambda: _source(lower, tree.arguments[0], frame),
            lambda: _of_elements(lower, tree, frame, position),
        ),
        lambda: each(
            tree.arguments[2:], lambda count: _count(lower, count, frame, "the limit of a `filter`")
        ),
    )
    flag = nodes.Var("x", keep.result.type, span)
    flags: nodes.Expr = nodes.Map(Array(keep.result.type), span, position, keep, source)
    test = lower.convert(nodes.Ref(flag.type, span, flag), BOOL)
    truth = nodes.Lambda((flag,), (), test, span)
    flags = nodes.Map(Array(BOOL), span, nodes.Var("i", INT, span), truth, flags)
    filtered = nodes.Filter(source.type, tree.span, source, flags, limits[0] if limits else None)
    return _checked(lower, filtered)


def _sort(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    order = tree.arguments[1]
    is_name = (
        isinstance(order, ast.Name)
        and order.name in ORDERS
        and frame.scope.find(order.name) is None
    )
    source, function = both(
        lambda: lower.vector(tree.arguments[0], frame),
        lambda: None if is_name else _function(lower, order, frame, ORDERS, _SORT_HELP),
    )
    if is_name and isinstance(order, ast.Name):
        return nodes.Sort(source.type, tree.span, source, order.name == "greater")
    if not isinstance(function, Function):
        help_line = f"help: {' or '.join(ORDERS)}, or a lambda (a, b) that compares them"
        raise lower.refuse("E305", "`sort` takes an order", order.span, help_line)
    found = len(function.tree.parameters)
    if found != 2:
        message = f"the lambda of a `sort` takes two arguments, this one {found}"
        raise lower.refuse("E305", message, order.span, _SORT_HELP)
    lowered = lower.lambda_(function, frame, None)
    element = source.type.element if isinstance(source.type, Array) else source.type
    wanted = FLOAT if element == FLOAT else INT
    if any(param.type not in (wanted, element) for param in lowered.params):
        message = f"the lambda of this `sort` must take ({wanted}, {wanted})"
        raise lower.refuse("E305", message, order.span, _SORT_HELP)
    name = order_of(lowered)
    if name is None:
        note = "note: accepted are `less`, `greater`, and lambdas that compute `a < b` or `a > b`"
        message = "this function is not an accepted order"
        raise lower.refuse("E405", message, order.span, note, _SORT_HELP)
    return nodes.Sort(source.type, tree.span, source, name == "greater")


def _top_k(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    source, count = both(
        lambda: _floats(lower, tree.arguments[0], frame, "what `top_k` compares"),
        lambda: _count(lower, tree.arguments[1], frame, "the number of `top_k`"),
    )
    return _checked(lower, nodes.TopK(Array(INT), tree.span, source, count))


def _sample(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    check_key(lower, tree)
    source, count = both(
        lambda: lower.vector(tree.arguments[0], frame),
        lambda: _count(lower, tree.arguments[1], frame, "the number of a `sample`"),
    )
    return nodes.Sample(source.type, tree.span, source, count, lower.site(tree))


def check_scatter(lower: "Lowerer", tree: ast.Call) -> None:
    """Refuses a `scatter` in an Encode."""
    if not lower.is_decode:
        note = "help: move it to the Decode, which refuses a packet with wrong indices"
        raise lower.refuse("E406", "`scatter` outside a Decode", tree.name_span, note)


def _scatter(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    (size, indices), (values, counts) = both(
        lambda: both(
            lambda: _count(lower, tree.arguments[0], frame, "the size of a `scatter`"),
            lambda: _indices(lower, tree.arguments[1], frame),
        ),
        lambda: both(
            lambda: _floats(lower, tree.arguments[2], frame, "the values of a `scatter`"),
            lambda: each(
                tree.arguments[3:],
                lambda at: lower.integer(at, frame, "the number of values of a `scatter`"),
            ),
        ),
    )
    used = counts[0] if counts else None
    return nodes.Scatter(Array(FLOAT), tree.span, size, indices, values, used)


def _indices(lower: "Lowerer", tree: ast.Expr, frame: "Frame") -> nodes.Expr:
    indices = lower.vector(tree, frame)
    if indices.type == Array(FLOAT):
        message = "the indices of a `scatter` must be integers, found `float`"
        help_line = "help: declare them as `int*` or `uint32*`"
        raise lower.refuse("E301", message, tree.span, help_line)
    return lower.as_vector(indices, INT)


def _reduce(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    source, reducer, init = _reduction(lower, tree, frame)
    return nodes.Reduce(init.type, tree.span, reducer, init, source)


def _block_reduce(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    block, (source, reducer, init) = both(
        lambda: _block(lower, tree.arguments[1], frame), lambda: _reduction(lower, tree, frame)
    )
    return nodes.BlockReduce(Array(init.type), tree.span, reducer, block, init, source)


def _hadamard(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    source, block = both(
        lambda: _floats(lower, tree.arguments[0], frame, "what `hadamard` transforms"),
        lambda: _block(lower, tree.arguments[1], frame),
    )
    return nodes.Hadamard(Array(FLOAT), tree.span, block, source)


def _block(lower: "Lowerer", tree: ast.Expr, frame: "Frame") -> nodes.Expr:
    """The number of elements of a block, which a call checks where it depends on parameters."""
    block = lower.integer(tree, frame, "the size of a block")
    note = "help: write 16, 32, 64, 128, 256, 512 or 1024, or a parameter"
    message = "a block must have a power of two of elements, from 16 to 1024"
    try:
        block = scalar_of(block, lower.lets, lower.params, lower.sizes)
    except SizeError as error:
        raise lower.refuse("E407", f"{message}, made of parameters", error.span, note) from error
    if any(isinstance(found, nodes.Size) for found in walk(block)):
        raise lower.refuse("E407", f"{message}, made of parameters", tree.span, note)
    value = integer_of(block)
    if value is None:
        lower.blocks[block] = None
        return block
    if value not in nodes.BLOCKS:
        raise lower.refuse("E407", f"{message}. Received: {value}", tree.span, note)
    return nodes.Const(INT, tree.span, value)


def _reduction(
    lower: "Lowerer", tree: ast.Call, frame: "Frame"
) -> tuple[nodes.Expr, str, nodes.Expr]:
    """What is reduced, the reducer and the initial value, which has the type of the result."""
    (source, init), function = both(
        lambda: both(
            lambda: lower.vector(tree.arguments[0], frame),
            lambda: lower.number(lower.scalar(tree.arguments[-2], frame)),
        ),
        lambda: _function(lower, tree.arguments[-1], frame, REDUCERS, _REDUCE_HELP),
    )
    element = FLOAT if source.type == Array(FLOAT) else INT
    span = tree.arguments[-1].span
    if function is None:
        message = f"`{tree.name}` takes a lambda or the name of a reducer"
        raise lower.refuse("E305", message, span, _REDUCE_HELP)
    if isinstance(function, str):
        reducer = function
        kind = INT if reducer in ("count", "and", "or") else joined(element, init.type)
    else:
        reducer, kind = _reducer(lower, function, element, span, frame)
    if kind == INT and init.type == FLOAT:
        raise lower.refuse(
            "E301",
            "this reduction gives an integer; its initial value is a `float`",
            init.span,
            "help: write an integer, as in `0`",
        )
    return source, reducer, lower.convert(init, kind)


def _reducer(
    lower: "Lowerer", declared: Function, element: Type, span: Span, frame: "Frame"
) -> tuple[str, Type]:
    found = len(declared.tree.parameters)
    if found != 2:
        message = f"the lambda of a `reduce` takes two arguments, this one {found}"
        raise lower.refuse("E305", message, span, _REDUCE_HELP)
    function = lower.lambda_(declared, frame, None)
    kind, value = function.params[0].type, function.params[1].type
    reducer = recognise(function)
    if (
        kind not in (FLOAT, INT)
        or function.result.type != kind
        or (value != kind and (reducer, value) != ("count", FLOAT))
    ):
        message = "the lambda of a `reduce` must be (float, float) -> float or (int, int) -> int"
        raise lower.refuse("E305", message, span, _REDUCE_HELP)
    if value == INT and element == FLOAT:
        message = "this reducer takes integers, and the vector holds `float`"
        raise lower.refuse("E305", message, span, "help: `map` it to integers first")
    if reducer is None:
        note = f"note: accepted are {', '.join(REDUCERS)}, by name or as a lambda"
        notes = [note]
        if (name := behind_map(function)) is not None:
            notes.append(
                "help: `map` first, and then reduce: "
                f"`reduce(map(v, [&]({value} x) -> {value} {{ ... }}), init, {name})`"
            )
        raise lower.refuse("E401", "this function is not an accepted reducer", span, *notes)
    if reducer in ("count", "and", "or") and kind == FLOAT:
        help_line = "help: make its lambda (int, int) -> int"
        raise lower.refuse("E305", f"the reducer `{reducer}` gives an `int`", span, help_line)
    return reducer, kind


_Operator = Callable[["Lowerer", ast.Call, "Frame"], nodes.Expr]
# Name, the numbers of arguments it may have, and what it becomes.
OPERATORS: dict[str, tuple[tuple[int, ...], _Operator]] = {
    "map": ((2,), _map),
    "range": ((1,), _range),
    "reduce": ((3,), _reduce),
    "block_reduce": ((4,), _block_reduce),
    "filter": ((2, 3), _filter),
    "sort": ((2,), _sort),
    "hadamard": ((2,), _hadamard),
    "top_k": ((2,), _top_k),
    "sample": ((2,), _sample),
    "scatter": ((3, 4), _scatter),
}
