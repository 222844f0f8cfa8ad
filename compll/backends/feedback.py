# SPDX-License-Identifier: Apache-2.0
"""Error feedback in the loops of an encoder, and decoders that can do a part of their elements.

With feedback an encoder is given gradient and residual, encodes their sum, and leaves what decoding
its packet misses of the sum as the next residual (Seide et al. 2014). Where the order of its sweeps
allows, that costs no loops of its own:

    first sweep that reads the gradient   a tile of the sum is formed, and read while it is cached
    last sweep                            a tile that is packed is decoded again, when all scalars
                                          that decoding needs are known; else the chunk is, at the
                                          end

The residual is overwritten by the sum. So an encoder that needs memory for what it keeps finds all
of it before it begins (rooms.py).

While a loop forms the sum, an element of it is there only when its tile has been reached; while a
loop leaves the residual, only until its tile is done, and a tile of the body only from then on. So
neither loop may read the gradient, nor decoding what the last one writes, but for the element or
the block at hand. The steps that share a loop over blocks count as one here.
"""

from dataclasses import dataclass

from compll.backends.beside import FilterBeside
from compll.backends.blocks import (
    Group,
    block_source,
    decode_groups,
    encode_groups,
    is_shared,
    roots,
)
from compll.backends.kept import decode_fails, encode_fails
from compll.backends.rooms import rooms
from compll.backends.tile_feedback import HeldRows, TileFeedback
from compll.ir import nodes
from compll.ir.blocks import block_of
from compll.ir.walk import children, walk

# Operations for an element of one body, where several bodies are decoded in one loop.
_MOST_AT_ONCE = 16
_ADD_TILE = (
    "if constexpr (kFeedback) add_tile(gradient + base, residual + base, count, value + base);",
)
# The same for encoders that can fail; `all_finite` says whether the sums so far are.
_SUM_TILE = (
    "if constexpr (kFeedback) {",
    "  all_finite &= sum_tile(gradient + base, residual + base, count, value + base);",
    "}",
)
_DECODE_RANGES = (
    "if constexpr (kFeedback) {",
    "  for_ranges_back(n, [&](int64_t begin, int64_t end) {",
    "    float* const to = value + begin;",
    "    decode_fields(params, body, layout, to, n, TF_HIPS_RESIDUAL, begin, end);",
    "  });",
    "}",
)
_DECODE_ALL = (
    "if constexpr (kFeedback) {",
    "  decode_fields(params, body, layout, value, n, TF_HIPS_RESIDUAL, 0, n);",
    "}",
)


def has_feedback(plan: nodes.Plan) -> bool:
    """Whether a codec encodes with feedback itself: it decodes what it encodes, and cannot fail.

    One with state keeps a residual of its own, if any. It cannot fail when the memory that it needs
    is known beforehand; else the runtime keeps the old residual until encoding is done.
    """
    program = plan.program
    is_whole = program.encode is not None and program.decode is not None
    return is_whole and not program.state_names and rooms(plan) is not None


def returns_status(plan: nodes.Plan) -> bool:
    """Whether the hot functions of an encoder return a status."""
    return encode_fails(plan) or (has_feedback(plan) and decode_fails(plan))


def has_merge(plan: nodes.Plan) -> bool:
    """Whether a codec sums bodies itself; for one whose decoding can fail the runtime does."""
    return plan.program.decode is not None and not decode_fails(plan)


def has_ranges(plan: nodes.Plan) -> bool:
    """Whether decode makes a range without the others: its one loop is the one that writes.

    A range begins with a tile.
    """
    loops = [group for group in decode_groups(plan) if not isinstance(group[0], nodes.Let)]
    writer = _writer(plan)
    return writer is not None and len(loops) == 1 and _is_as_long(loops[0], writer)


def has_elements(plan: nodes.Plan) -> bool:
    """Whether it makes any elements without the others, and not only those of whole tiles."""
    return has_ranges(plan) and not any(isinstance(step, nodes.Store) for step in plan.decode)


def _is_as_long(group: Group, writer: nodes.Sweep) -> bool:
    """Whether the loop of a group goes over the elements that its last step writes."""
    if not is_shared(group):
        return True
    return all(
        block_source(step)[0].size == writer.size for step in group if isinstance(step, nodes.Store)
    )


def adds_rows(plan: nodes.Plan) -> bool:
    """Whether a merge decodes several bodies in one loop.

    Of long decodes compilers do not keep several at once in registers.
    """
    writer = _writer(plan)
    if writer is None or not has_elements(plan):
        return False
    part = writer.writes[0].value
    if not isinstance(part, nodes.Elementwise):
        return False
    roots = (part.value, *(let.value for let in part.lets))
    found = [e for root in roots for e in walk(root) if not isinstance(e, nodes.Const | nodes.Ref)]
    return len(found) <= _MOST_AT_ONCE


def _writer(plan: nodes.Plan) -> nodes.Sweep | None:
    """The sweep of decode that writes the gradient element by element and computes nothing else."""
    last = plan.decode[-1] if plan.decode else None
    if plan.program.decode is None or not isinstance(last, nodes.Sweep) or last.reduces:
        return None
    is_whole = _is_whole(last.size, plan.program.decode.gradient)
    is_plain = len(last.writes) == 1 and isinstance(last.writes[0].value, nodes.Elementwise)
    return last if is_whole and is_plain else None


@dataclass(frozen=True)
class Fusion:
    """Where the loops of an encoder take care of feedback.

    Attributes:
        first: number of the step whose tiles form the sum; None: a loop before all steps does.
        last: number of the step whose tiles are decoded again; None: a loop behind all steps does.
        is_checked: the function returns a status, and notes whether all sums are finite.
        is_sparse: decoding writes a few elements.
        is_ranged: decoding makes ranges of whole tiles without the others.
    """

    first: int | None
    last: int | None
    is_checked: bool = False
    is_sparse: bool = False
    is_ranged: bool = False

    @staticmethod
    def of(plan: nodes.Plan) -> "Fusion":
        """What the order of the steps of a plan allows."""
        encode = plan.program.encode
        if encode is None or not has_feedback(plan):
            return Fusion(None, None)
        groups, begins = encode_groups(plan), [0]
        for group in groups:
            begins.append(begins[-1] + len(group))
        first: int | None = None
        last: int | None = None
        if groups and _can_decode(plan, groups[-1], encode.gradient):
            last = len(plan.encode) - 1
        for group, begin in zip(groups, begins, strict=False):
            if any(_reads_elements(step, encode.gradient) for step in group):
                is_near = _is_read_in_order(group, encode.gradient)
                # Scalars are stored before the loop that leaves the residual.
                is_late = last is not None and group is groups[-1]
                if is_near and not (is_late and _reads_in_scalars(encode)):
                    first = begin
                break
        return Fusion(first, last, returns_status(plan), _is_sparse(plan), has_ranges(plan))

    def begin_lines(self) -> tuple[str, ...]:
        """What is done before all steps."""
        lines = ["[[maybe_unused]] bool all_finite = true;"] if self.is_checked else []
        if self.first is None:
            add = "all_finite = sum_tile" if self.is_checked else "add_all"
            lines.append(f"if constexpr (kFeedback) {add}(gradient, residual, n, value);")
        return tuple(lines)

    def of_steps(
        self, steps: range, gradient: nodes.Var, held: HeldRows | None = None
    ) -> TileFeedback:
        """What the loop of some steps does; `held` is for the last one."""
        has_last = self.last in steps
        return TileFeedback(
            (_SUM_TILE if self.is_checked else _ADD_TILE) if self.first in steps else (),
            has_last,
            None if self.is_checked else gradient,
            held if has_last else None,
        )

    def end_lines(self, *, decode_fails: bool) -> tuple[str, ...]:
        """What is left to do behind all steps; `decode_fails`: decoding returns a status."""
        if self.last is not None:
            return ()
        if not decode_fails:
            return _DECODE_RANGES if self.is_ranged else _DECODE_ALL
        mode = "TF_HIPS_RESIDUAL"
        if self.is_sparse:
            mode = f"all_finite ? kResidualOfFinite : static_cast<int32_t>({mode})"
        return (
            "if constexpr (kFeedback) {",
            f"  const int32_t how = {mode};",
            "  return decode_fields(params, body, layout, value, n, how, 0, n);",
            "}",
        )


def _expressions(step: nodes.Step) -> list[nodes.Expr]:
    if isinstance(step, nodes.Sweep):
        return [*(reduce for _, reduce in step.reduces), *(write.value for write in step.writes)]
    return [step.value]


def _is_sparse(plan: nodes.Plan) -> bool:
    last = plan.decode[-1] if plan.decode else None
    return isinstance(last, nodes.Sweep) and any(
        isinstance(write.value, nodes.Scatter) for write in last.writes
    )


def reads(expr: nodes.Expr, gradient: nodes.Var, position: nodes.Var | None = None) -> bool:
    """Whether an expression needs elements of the gradient, other than the one at `position`."""
    if isinstance(expr, nodes.Size):
        return False
    if isinstance(expr, nodes.Ref):
        return expr.var is gradient
    if isinstance(expr, nodes.Index) and isinstance(expr.array, nodes.Ref):
        is_here = isinstance(expr.index, nodes.Ref) and expr.index.var is position
        if position is not None and is_here:
            return False
    inside = [*children(expr)]
    if isinstance(expr, nodes.Elementwise):
        inside += [let.value for let in expr.lets]
    return any(reads(part, gradient, position) for part in inside)


def _reads_elements(step: nodes.Step, gradient: nodes.Var) -> bool:
    """Whether a step needs elements of the gradient, and not only their number."""
    return any(reads(root, gradient) for root in _expressions(step))


def _is_whole(size: nodes.Expr, gradient: nodes.Var) -> bool:
    return (
        isinstance(size, nodes.Size)
        and isinstance(size.array, nodes.Ref)
        and size.array.var is gradient
    )


def _parts(sweep: nodes.Sweep) -> list[nodes.Expr]:
    return [reduce.source for _, reduce in sweep.reduces] + [write.value for write in sweep.writes]


def _parts_of(step: nodes.Store | nodes.Sweep) -> list[nodes.Expr]:
    """What a step computes for each element, as far as it goes from one to the next."""
    if isinstance(step, nodes.Sweep):
        return _parts(step)
    value = step.value
    return [value.source] if isinstance(value, nodes.BlockReduce | nodes.Hadamard) else []


def _is_in_order(step: nodes.Step, gradient: nodes.Var) -> bool:
    """Whether a step is a loop over the gradient that reads element i of it for element i only."""
    if isinstance(step, nodes.Store) and isinstance(step.value, nodes.TopK):
        source = step.value.source
        return (
            isinstance(source, nodes.Elementwise)
            and _is_whole(source.size, gradient)
            and not reads(source, gradient, source.position)
            and not reads(step.value.count, gradient)
        )
    if not isinstance(step, nodes.Sweep) or not _is_whole(step.size, gradient):
        return False
    parts = _parts(step)
    return all(
        isinstance(part, nodes.Elementwise) and not reads(part, gradient, part.position)
        for part in parts
    ) and not any(reads(reduce.init, gradient) for _, reduce in step.reduces)


def _reads_in_scalars(encode: nodes.Encode) -> bool:
    """Whether a scalar of the body is computed from elements of the gradient themselves."""
    return any(
        reads(value, encode.gradient)
        for value in encode.fields
        if not isinstance(value, nodes.Elementwise)
    )


def _is_read_in_order(group: Group, gradient: nodes.Var) -> bool:
    """Whether the loop of a group reads the gradient in order."""
    if is_shared(group):
        return all(_is_near(step, gradient) for step in group)
    return _is_in_order(group[0], gradient)


def _is_near(step: nodes.Step, gradient: nodes.Var) -> bool:
    """Whether a step of a loop over blocks reads element i of the gradient for element i only."""
    if isinstance(step, nodes.Store) and isinstance(step.value, nodes.BlockReduce):
        parts, inits = [step.value.source], [step.value.init]
    elif isinstance(step, nodes.Store) and isinstance(step.value, nodes.Hadamard):
        parts, inits = [step.value.source], []
    elif isinstance(step, nodes.Sweep):
        parts, inits = _parts(step), []
    else:
        return False
    return all(
        isinstance(part, nodes.Elementwise)
        and not reads(part, gradient, part.position)
        and (_is_whole(part.size, gradient) or not reads(part, gradient))
        for part in parts
    ) and not any(reads(init, gradient) for init in inits)


def _can_decode(plan: nodes.Plan, group: Group, gradient: nodes.Var) -> bool:
    """Whether the tiles of the last loop can be decoded as soon as they are packed."""
    decode, step = plan.program.decode, group[-1]
    if decode is None or not has_ranges(plan):
        return False
    # A tile of blocks is there when its steps are done.
    if not has_elements(plan) and not is_shared(group):
        return False
    if not isinstance(step, nodes.Sweep) or step.reduces or not _is_in_order(step, gradient):
        return False
    if not _is_read_in_order(group, gradient) or _reads_beside(plan, group):
        return False
    return _needs_own(plan, _fresh(decode, group, step))


def _reads_beside(plan: nodes.Plan, group: Group) -> bool:
    """Whether a loop reads what a filter has kept of the gradient.

    Beyond what was found that is the first element of the gradient, wherever the loop is.
    """
    kept = {
        step.value.beside
        for step in plan.encode
        if isinstance(step, nodes.Store) and isinstance(step.value, FilterBeside)
    }
    roots = [root for step in group for root in _expressions(step)]
    return any(isinstance(e, nodes.Ref) and e.var in kept for root in roots for e in walk(root))


def _fresh(
    decode: nodes.Decode, group: Group, last: nodes.Sweep
) -> dict[nodes.Var, nodes.Expr | None]:
    """The fields that a loop writes; of those with an element per block, the size of the blocks."""
    found: dict[nodes.Var, nodes.Expr | None] = {}
    first = group[0].value if isinstance(group[0], nodes.Store) else None
    block = first.block if isinstance(first, nodes.BlockReduce | nodes.Hadamard) else None
    for step in group:
        if isinstance(step, nodes.Sweep):
            # The last sweep of a loop is as long as the loop.
            is_whole = step.size == last.size
            found |= {
                decode.fields[write.field].var: None if is_whole else block for write in step.writes
            }
    return found


def _needs_own(plan: nodes.Plan, fresh: dict[nodes.Var, nodes.Expr | None]) -> bool:
    """Whether decoding reads fields that are being written for its own element or block only."""
    for step in plan.decode:
        # A let is computed once, for all elements.
        parts = [] if isinstance(step, nodes.Let) else _parts_of(step)
        own = sum(
            _is_own(plan, expr.index, part.position, fresh[var])
            for part in parts
            if isinstance(part, nodes.Elementwise)
            for expr, var in _reads_of(part, fresh)
        )
        if own != sum(len(_reads_of(root, fresh)) for root in roots(step)):
            return False
    return True


def _reads_of(
    expr: nodes.Expr, fresh: dict[nodes.Var, nodes.Expr | None]
) -> list[tuple[nodes.Index, nodes.Var]]:
    """Where elements of some vectors are read, and of which."""
    return [
        (inner, inner.array.var)
        for inner in walk(expr)
        if isinstance(inner, nodes.Index)
        and isinstance(inner.array, nodes.Ref)
        and inner.array.var in fresh
    ]


def _is_own(
    plan: nodes.Plan, index: nodes.Expr, position: nodes.Var | None, block: nodes.Expr | None
) -> bool:
    """Whether an index is that of the loop's own element, or of its block of that size."""
    if block is not None:
        return block_of(index, position, plan.program.blocks) == block
    return isinstance(index, nodes.Ref) and index.var is position
