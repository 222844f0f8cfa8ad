# SPDX-License-Identifier: Apache-2.0
"""What the kernels of one function of CUDA have computed, and what their expressions read."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from compll.backends.c_common import Names
from compll.ir import nodes
from compll.ir.sizes import blocks_in
from compll.ir.types import FLOAT, INT, Array, Type
from compll.ir.walk import free_vars, walk

# What kernels and the functions that they call use themselves.
_OWN = """
before call chunk complain counts fetch find_spot finish first from full head how is_aligned
is_finite is_inside joined k lane lanes last launched least load_code load_float load_word low
high packet part parts philox places places_here placed_here report room rows row scalars shared
spot staged sum taken tensor tiles totals t u value_here wanted_ is_there bins_here block_here turn
run block_index alone zero leaves_rest is_full is_full_tile is_whole is_rest
eight own_sums decoded num sums tile_blocks own_blocks
own_size own_lets own_scalars tile_sizes is_fine_now least_key lowest is_any tiles_here before_here
keys key_at own_tile own_sum own_in own_eight own_eights own_sizes own_made result body whole_spot
"""


class KernelNames(Names):
    """Names that do not hide what a kernel uses itself."""

    def __init__(self) -> None:
        """No names yet."""
        super().__init__()
        self._taken |= set(_OWN.split())


def element(kind: Type) -> Type:
    """The type of a vector's elements; a scalar's own."""
    return kind.element if isinstance(kind, Array) else kind


def part_of(vector: nodes.Expr) -> nodes.Elementwise:
    """A vector whose elements can be computed one by one."""
    if not isinstance(vector, nodes.Elementwise):
        raise TypeError(f"a vector must be inlined before it is emitted. Received: {vector!r}")
    return vector


@dataclass(frozen=True)
class Definition:
    """How a kernel comes by a variable: a let, a result of a reduction, or a vector that is kept.

    Attributes:
        form: "let", "scalar" (a member of Scalars), "kept", or "tile", which is what is kept while
            the kernel that makes it is written, if threads have their own elements.
        value: of a let; the number of elements of a kept vector, None when it is in Scalars.
        member: its name in the struct of the call, or in Scalars.
        most: of a kept vector: the most elements that it can have.
        count: of one whose length only a kernel finds: the member of Scalars that holds it.
        is_picked: only one element of it is read and kept, `member` of Scalars.
        here: C++ for it in the kernel that is being written.
        is_roomy: it begins at 16 bytes and has room for whole eights.
    """

    var: nodes.Var
    form: str
    value: nodes.Expr | None
    member: str = ""
    most: nodes.Expr | None = None
    count: str = ""
    is_picked: bool = False
    here: str = ""
    is_roomy: bool = False


def reads(roots: Iterable[nodes.Expr], vector: nodes.Var) -> bool:
    """Whether elements of a vector are needed, and not only their number."""
    return any(
        isinstance(expr, nodes.Index)
        and isinstance(expr.array, nodes.Ref)
        and expr.array.var is vector
        for root in roots
        for expr in walk(root)
    )


@dataclass
class Side:
    """One function, Encode or Decode, and what its kernels have computed so far.

    Attributes:
        has_read: a kernel reads elements of the gradient.
        reads_anywhere: one reads others than a thread's own.
        sites: calls of random in it, as far as their noise is drawn for eight elements at once.
    """

    program: nodes.Program
    gradient: nodes.Var
    fields: tuple[nodes.Field, ...]
    is_decode: bool
    states: tuple[nodes.Var, ...] = ()
    definitions: list[Definition] = field(default_factory=list)
    members: Names = field(default_factory=KernelNames)
    has_read: bool = False
    reads_anywhere: bool = False
    sites: int = 0

    def leave_kernel(self) -> None:
        """Forgets what is only in a kernel that has been written."""
        for number, made in enumerate(self.definitions):
            form = "kept" if made.form == "tile" else made.form
            self.definitions[number] = replace(made, here="", form=form)

    def known(self) -> set[nodes.Var]:
        """Variables that a kernel can use now."""
        found = {param.var for param in self.program.params} | {self.gradient}
        found |= {item.var for item in self.fields} | set(self.states)
        return found | {made.var for made in self.definitions}

    def needed(self, roots: Iterable[nodes.Expr]) -> list[Definition]:
        """The definitions that expressions need, themselves or through others, in order."""
        need: set[nodes.Var] = set().union(*map(free_vars, roots))
        used: list[Definition] = []
        for made in reversed(self.definitions):
            if made.var in need:
                used.insert(0, made)
                need |= set() if made.value is None else free_vars(made.value)
        return used


def turned_by(index: nodes.Expr, position: nodes.Var | None) -> int | None:
    """K where an index is `position ^ k` and so one of the eight of a thread; None elsewhere."""
    match index:
        case nodes.Ref(var=var) if position is not None and var is position:
            return 0
        case nodes.Binary(op="^", left=nodes.Ref(var=var), right=nodes.Const(value=value)) if (
            position is not None and var is position and isinstance(value, int) and 0 <= value < 8
        ):
            return value
        case _:
            return None


def kept_size(step: nodes.Store) -> nodes.Expr | None:
    """The number of elements of a vector that is kept; None where only a kernel finds it."""
    value = step.value
    match value:
        case nodes.Filter():
            return None
        case nodes.Sort() | nodes.Hadamard():
            return part_of(value.source).size
        case nodes.BlockReduce():
            return blocks_in(part_of(value.source).size, value.block)
        case nodes.Scatter():
            return value.size
        case nodes.TopK():
            size, span = part_of(value.source).size, value.span
            zero = nodes.Const(INT, span, 0)
            wanted = nodes.Math(INT, span, "max", (value.count, zero))
            return nodes.Math(INT, span, "min", (wanted, size))
        case _:
            raise TypeError(f"`step` must keep a vector. Received: {value!r}")


def most_kept(step: nodes.Store) -> nodes.Expr:
    """The most elements that a vector that is kept can have."""
    value = step.value
    if isinstance(value, nodes.Filter):
        size = part_of(value.source).size
        if value.limit is None:
            return size
        wanted = nodes.Math(INT, value.span, "max", (value.limit, nodes.Const(INT, value.span, 0)))
        return nodes.Math(INT, value.span, "min", (wanted, size))
    size_or_none = kept_size(step)
    if size_or_none is None:
        raise TypeError(f"`step` must keep a vector of known size. Received: {value!r}")
    return size_or_none


def neutral(reducer: str, kind: Type) -> str:
    """C++ for a reducer's type on the device."""
    return reducer.capitalize() if kind == FLOAT else f"Int{reducer.capitalize()}"
