# SPDX-License-Identifier: Apache-2.0
"""The memory that a function keeps vectors in, as far as it is known before the function runs.

An encoder that finds all its memory first can overwrite what it is given while it works, because
nothing can fail any more: a residual becomes the sum that is encoded, a state its successor. How
much it needs is known unless a vector's length is computed from data.
"""

from dataclasses import dataclass

from compll.backends.beside import FilterBeside
from compll.backends.blocks import decode_groups, encode_groups, is_shared
from compll.backends.c_common import c_type
from compll.ir import nodes
from compll.ir.sizes import SizeError, blocks_in, scalar_of
from compll.ir.types import FLOAT, INT, Array

# Slots of memory that a TopK takes, and a sort of floats.
SLOTS_OF_TOP_K = 3
SLOTS_OF_SORT = 3


@dataclass(frozen=True)
class Room:
    """A slot of memory.

    Attributes:
        slot: its number in the function.
        kind: C++ type of its elements; None: it and those behind it belong to a TopK.
        count: the most elements that it holds.
    """

    slot: int
    kind: str | None
    count: nodes.Expr


def rooms(plan: nodes.Plan) -> list[Room] | None:
    """The memory of an encoder and of its decoder; None: not known from parameters and n alone."""
    try:
        encode = _rooms(plan, encode_groups(plan), plan.encode, {})
        fields = () if plan.program.decode is None else plan.program.decode.fields
        sizes = {item.var: item.size for item in fields if item.size is not None}
        return encode + _rooms(plan, decode_groups(plan), plan.decode, sizes)
    except SizeError:
        return None


def _rooms(
    plan: nodes.Plan,
    groups: list[tuple[nodes.Step, ...]],
    steps: tuple[nodes.Step, ...],
    sizes: dict[nodes.Var, nodes.Expr],
) -> list[Room]:
    lets = {step.var: step.value for step in steps if not isinstance(step, nodes.Sweep)}
    bounds = _Bounds(lets, frozenset(param.var for param in plan.program.params), sizes)
    found: list[Room] = []
    slot = 0
    for group in groups:
        for kind, count, slots in _needs(plan, group, bounds):
            found.append(Room(slot, kind, count))
            slot += slots
    return found


def _needs(
    plan: nodes.Plan, group: tuple[nodes.Step, ...], bounds: "_Bounds"
) -> list[tuple[str | None, nodes.Expr, int]]:
    """Type, number of elements and slots of what a step keeps, in the order of KeptVectors."""
    step = group[0]
    if isinstance(step, nodes.Sweep):
        written = step.writes[0].value if step.writes else None
        return [_places(written, bounds)] if isinstance(written, nodes.Scatter) else []
    if isinstance(step, nodes.Let) or is_shared(group):
        return []
    value = step.value
    if isinstance(value, nodes.TopK):
        return [(None, bounds.of(value.source), SLOTS_OF_TOP_K)]
    element = value.type.element if isinstance(value.type, Array) else value.type
    kind, count = c_type(element, plan.program.params), bounds.of(value)
    if isinstance(value, nodes.Sort) and element == FLOAT:
        return [(kind, count, 1), *[("uint32_t", count, 1)] * (SLOTS_OF_SORT - 1)]
    if isinstance(value, FilterBeside):
        return [(kind, count, 1), ("float", count, 1)]
    if isinstance(value, nodes.Scatter):
        return [(kind, count, 1), _places(value, bounds)]
    return [(kind, count, 1)]


def _places(value: nodes.Scatter, bounds: "_Bounds") -> tuple[str | None, nodes.Expr, int]:
    return "uint32_t", _least(bounds.of(value.indices), bounds.of(value.values)), 1


def _least(a: nodes.Expr, b: nodes.Expr) -> nodes.Expr:
    return a if a == b else nodes.Math(INT, a.span, "min", (a, b))


@dataclass
class _Bounds:
    """Lengths that vectors of a function do not exceed, over parameters and n alone."""

    lets: dict[nodes.Var, nodes.Expr]
    params: frozenset[nodes.Var]
    sizes: dict[nodes.Var, nodes.Expr]

    def of(self, vector: nodes.Expr) -> nodes.Expr:
        """Raises SizeError."""
        match vector:
            case nodes.Elementwise(size=nodes.Size(array=nodes.Ref(var=var))) if var in self.lets:
                return self.of(self.lets[var])
            case nodes.Elementwise() | nodes.Scatter():
                return self._scalar(vector.size)
            case nodes.Filter(limit=nodes.Expr() as limit):
                return _least(self._scalar(limit), self.of(vector.source))
            case nodes.Filter() | nodes.Sort() | nodes.Hadamard():
                return self.of(vector.source)
            case nodes.TopK():
                return _least(self._scalar(vector.count), self.of(vector.source))
            case nodes.BlockReduce():
                return blocks_in(self.of(vector.source), self._scalar(vector.block))
            case _:
                raise SizeError(vector.span)

    def _scalar(self, value: nodes.Expr) -> nodes.Expr:
        return scalar_of(value, self.lets, self.params, self.sizes)
