# SPDX-License-Identifier: Apache-2.0
"""The typed IR.

    program  = name, prefix, params: param*, encode: encode?, decode: decode?
    param    = var, default?, low, high
    encode   = gradient: var, lets: let*, fields: (expr, size?)*, updates: update*
                                                                     a body is its fields, in order
    update   = state: var, value: expr       a vector that outlives the call, before and after it
    decode   = gradient: var, fields: field*, lets: let*, result: expr   field = var, size?, equals?
    let      = var, value: expr
    expr     = Const | Ref | Size(array) | Unary(op, x) | Binary(op, x, y) | Select(c, x, y)
             | Convert(x) | Bitcast(x) | Math(fn, x*) | Index(array, i) | KeyPart(name)
             | Random(low, high, position, site) | Range(count) | Map(position, fn, source)
             | Reduce(reducer, init, source) | Apply(fn, x*)
             | Elementwise(position, size, lets, value) | Sample(source, count, site)
             | Filter(source, flags, limit?) | Sort(source) | TopK(source, count)
             | Scatter(size, indices, values, used?) | BlockReduce(reducer, block, init, source)
             | Hadamard(block, source)
    lambda   = params: var*, lets: let*, result: expr

and what the passes make of it for back ends that emit loops:

    schedule = let | store | sweep, in order
    store    = var, value: Filter | Sort | TopK | ...                    a vector that is kept
    sweep    = size, reduces: (var, Reduce)*, writes: write*             one loop over 0 .. size - 1
    write    = field (number in the packet, then one for each update; or 0 for the gradient of a
               decode), value: Elementwise

Every node carries `span` (where it was written) and every expr its `type`. Nodes are immutable; a
pass returns new ones with `dataclasses.replace`. A name is a `Var` object, not a string: passes
never capture. Every var is given a value once. All expressions are pure and total (a division by
zero has a value), so both arms of a Select may be evaluated and any expression may be evaluated
again.

After check: Map, Range, Apply, Sample, vector-valued lets. After inline: none of these; the source
of a Reduce, a vector field and a vector result are Elementwise. What is stored between loops is the
value of a let: a Filter, Sort, TopK, Scatter, BlockReduce or Hadamard whose sources are
Elementwise. The result of a decode may be a Scatter too.

Every vector has a capacity, which is known from the parameters and the size of the gradient
(ir/sizes.py), and a size, which may depend on data: that of a Filter, and of what is made from one.

Two expressions are equal when they compute the same thing in the same way, wherever they were
written.
"""

from dataclasses import dataclass, field, replace

from compll.ir.types import Array, Type, UInt
from compll.source import Span


@dataclass(frozen=True, slots=True, eq=False)
class Var:
    """A variable; compared by identity."""

    name: str
    type: Type
    span: Span = field(repr=False)


@dataclass(frozen=True, slots=True)
class Expr:
    """Any expression."""

    type: Type
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Const(Expr):
    """A number of type Float (already rounded to binary32), Int, UInt or Bool.

    Zeros of both signs differ: 1 / 0 and 1 / -0 do.
    """

    value: int | float | bool

    def __eq__(self, other: object) -> bool:
        """Whether it is the same number of the same type."""
        if not isinstance(other, Const):
            return NotImplemented
        # `repr` tells zeros apart, and is one text for each number of a type.
        return self.type == other.type and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        """Of type and number."""
        return hash((self.type, self.value))


@dataclass(frozen=True, slots=True)
class Ref(Expr):
    """The value of a variable."""

    var: Var


@dataclass(frozen=True, slots=True)
class Size(Expr):
    """Number of elements of a vector."""

    array: Expr


@dataclass(frozen=True, slots=True)
class Unary(Expr):
    """`-` on Float or Int, `~` on Int, `!` on Bool."""

    op: str
    operand: Expr


@dataclass(frozen=True, slots=True)
class Binary(Expr):
    """Operands of one type: Float or Int; Bool for `&&` and `||`.

    Int wraps; x / 0 and x % 0 are 0; shifts count modulo 64.
    """

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """`condition ? yes : no`, both evaluated."""

    condition: Expr
    yes: Expr
    no: Expr


@dataclass(frozen=True, slots=True)
class Convert(Expr):
    """`operand` as `type`.

    Float to UInt or Int truncates after clamping to the range, NaN is 0; Int to UInt keeps the low
    bits; to Bool is `!= 0`; to Float rounds to nearest even.
    """

    operand: Expr


@dataclass(frozen=True, slots=True)
class Bitcast(Expr):
    """A Float's bits as UInt(32), every NaN as one; or the Float with an Int's low 32 bits."""

    operand: Expr


@dataclass(frozen=True, slots=True)
class KeyPart(Expr):
    """`seed` or `step` of the call, an Int; in an Encode alone."""

    name: str


@dataclass(frozen=True, slots=True)
class Math(Expr):
    """abs, sign, sqrt, exp2, log2, floor, ceil, round (half away from zero), min, max."""

    function: str
    arguments: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Index(Expr):
    """Element `index` of a vector; 0 where there is none."""

    array: Expr
    index: Expr


@dataclass(frozen=True, slots=True)
class Random(Expr):
    """Noise of call site `site` (from 0) for element `position`, plus the key's offset.

    `bits`: 16, or 32 in what becomes of a Sample.
    """

    low: Expr
    high: Expr
    position: Expr
    site: int
    bits: int = 16


@dataclass(frozen=True, slots=True)
class Range(Expr):
    """0, 1, .. count - 1; empty when count is negative."""

    count: Expr


@dataclass(frozen=True, slots=True)
class Let:
    """Gives `var` its value."""

    var: Var
    value: Expr
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Lambda:
    """A scalar function; captured variables are plain references."""

    params: tuple[Var, ...]
    lets: tuple[Let, ...]
    result: Expr
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Map(Expr):
    """`function` of every element of `source`, which is converted to the type of its parameter.

    `position` is the element's number, for Random.
    """

    position: Var
    function: Lambda
    source: Expr


@dataclass(frozen=True, slots=True)
class Apply(Expr):
    """A lambda called with scalars."""

    function: Lambda
    arguments: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Reduce(Expr):
    """`init` combined with all elements of `source` by a reducer of ir/reducers.py."""

    reducer: str
    init: Expr
    source: Expr


@dataclass(frozen=True, slots=True)
class Elementwise(Expr):
    """The vector whose element `position` is `value`, for 0 <= position < size."""

    position: Var
    size: Expr
    lets: tuple[Let, ...]
    value: Expr


@dataclass(frozen=True, slots=True)
class Sample(Expr):
    """`count` elements of `source`, each drawn by 32 bits of noise; 0 where there is none."""

    source: Expr
    count: Expr
    site: int


@dataclass(frozen=True, slots=True)
class Filter(Expr):
    """The elements of `source` whose flag (a Bool) holds, in order; at most the first `limit`."""

    source: Expr
    flags: Expr
    limit: Expr | None


@dataclass(frozen=True, slots=True)
class Sort(Expr):
    """The elements of `source` in order, NaN last; -0 counts as less than 0."""

    source: Expr
    is_descending: bool


@dataclass(frozen=True, slots=True)
class TopK(Expr):
    """The indices, ascending, of the min(count, size) largest of a vector of Float.

    Of equal elements the first ones count, -0 equals 0, and NaN is less than anything.
    """

    source: Expr
    count: Expr


@dataclass(frozen=True, slots=True)
class Scatter(Expr):
    """`size` floats: values[k] + 0 at indices[k], for all k < `used`, and 0 elsewhere.

    Only in a decode: a packet whose indices do not ascend strictly from 0 to size - 1, or whose
    `used` is more than there are, is refused. `used` None: as many as both vectors have.
    """

    size: Expr
    indices: Expr
    values: Expr
    used: Expr | None


# Elements that a block can have: tiles of 1024 hold whole ones.
BLOCKS = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class BlockReduce(Expr):
    """Element k is `init` combined with elements k * block .. of `source`, as many as `block`.

    `block`: a power of two from 16 to 1024, made of numbers and parameters. The last block may be
    shorter.
    """

    reducer: str
    block: Expr
    init: Expr
    source: Expr


@dataclass(frozen=True, slots=True)
class Hadamard(Expr):
    """The orthonormal Walsh-Hadamard transform of each `block` elements of a vector of Float.

    `block`: as for BlockReduce. What the last block lacks is not made up: it has a transform of
    its own length (ir/transforms.py).
    """

    block: Expr
    source: Expr


# Vectors that are kept in memory, because their elements cannot be computed one by one.
Kept = Filter | Sort | TopK | Scatter | BlockReduce | Hadamard


@dataclass(frozen=True, slots=True)
class Param:
    """A scalar parameter; bounds are allowed values, `default` None means that it must be given."""

    var: Var
    low: float
    high: float
    default: float | None


@dataclass(frozen=True, slots=True)
class Update:
    """A vector of Float as long as the gradient that outlives a call of Encode.

    `state` stands for what it was before the call: zeros at first, always finite; `value` is what
    it is after a call that succeeds.
    """

    state: Var
    value: Expr


@dataclass(frozen=True, slots=True)
class Encode:
    """The encode function: vector `gradient` to the fields of a packet's body.

    `sizes`: capacities of the vectors among the fields, None for scalars. A vector that has fewer
    elements is followed by zeros.
    """

    name: str
    gradient: Var
    lets: tuple[Let, ...]
    fields: tuple[Expr, ...]
    sizes: tuple[Expr | None, ...]
    span: Span = field(compare=False, repr=False)
    updates: tuple[Update, ...] = ()

    @property
    def values(self) -> tuple[Expr, ...]:
        """What the function makes: fields, then the values of updates."""
        return (*self.fields, *(update.value for update in self.updates))

    def with_values(self, lets: tuple[Let, ...], values: tuple[Expr, ...]) -> "Encode":
        """This function with other lets, and with `values` in the order of `self.values`."""
        number = len(self.fields)
        pairs = zip(self.updates, values[number:], strict=True)
        updates = tuple(replace(update, value=value) for update, value in pairs)
        return replace(self, lets=lets, fields=values[:number], updates=updates)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a decode: `size` for vectors; `equals` is the parameter that it must equal."""

    var: Var
    size: Expr | None
    equals: Var | None


@dataclass(frozen=True, slots=True)
class Decode:
    """The decode function; `gradient` stands for the output, whose size is known."""

    name: str
    gradient: Var
    fields: tuple[Field, ...]
    lets: tuple[Let, ...]
    result: Expr
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Program:
    """One codec: `name` is the stem of its file, `prefix` what its functions' names share.

    `widths`: every type of the text whose width depends on parameters, used or not. A call checks
    them all, so that what a program accepts does not depend on what a pass removes. `blocks`: sizes
    of blocks that depend on parameters, checked in the same way.
    """

    name: str
    prefix: str
    params: tuple[Param, ...]
    encode: Encode | None
    decode: Decode | None
    widths: tuple[UInt, ...] = ()
    blocks: tuple[Expr, ...] = ()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the vectors that outlive a call of Encode, in the order of the text."""
        return () if self.encode is None else tuple(u.state.name for u in self.encode.updates)


@dataclass(frozen=True, slots=True)
class Write:
    """A vector that leaves: number `field` of an Encode's values, or the gradient of a decode.

    A Scatter is the gradient of a decode, and alone in its sweep.
    """

    field: int
    value: Elementwise | Scatter


@dataclass(frozen=True, slots=True)
class Store:
    """Makes a vector and keeps it: one of Kept, in a loop of its own."""

    var: Var
    value: Expr


@dataclass(frozen=True, slots=True)
class Sweep:
    """One loop over `size` elements that feeds several reductions and writes."""

    size: Expr
    reduces: tuple[tuple[Var, Reduce], ...]
    writes: tuple[Write, ...]


@dataclass(frozen=True, slots=True)
class BodyField:
    """A field of a packet's body: `size` is the number of elements of a vector, None for a scalar.

    A float takes 32 bits and a UInt its width; the field starts at a byte.
    """

    name: str
    type: Type
    size: Expr | None

    @property
    def element(self) -> Type:
        """The type of the scalar, or of the vector's elements."""
        return self.type.element if isinstance(self.type, Array) else self.type


@dataclass(frozen=True, slots=True)
class Plan:
    """A program with the order of its loops, and the layout of its packets' body.

    `spec_hash` is that of the program as it was checked: passes do not change what packets carry.
    """

    program: Program
    spec_hash: int
    encode: tuple["Step", ...]
    decode: tuple["Step", ...]
    body: tuple[BodyField, ...] = ()
    specialised: "Specialised | None" = None


@dataclass(frozen=True, slots=True)
class Specialised:
    """Plans of a program by value of a parameter, which these do not read.

    Each computes what the program does with that value, and its packets are the same.
    """

    param: Param
    plans: dict[int, Plan]


Step = Let | Store | Sweep
