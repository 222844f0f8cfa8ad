# SPDX-License-Identifier: Apache-2.0
"""What every plan must satisfy: each value is computed once, where its inputs are known.

Run after fuse and after pack. A violation is a mistake of the compiler and raises IrError.
"""

from compll.ir import nodes
from compll.ir.types import Array
from compll.ir.verify import IrError
from compll.ir.walk import free_vars


def verify_plan(plan: nodes.Plan, is_packed: bool = False) -> None:
    """Checks a plan; `is_packed`: the pack pass has run."""
    program = plan.program
    params = {param.var for param in program.params}
    if program.encode is not None:
        encode = program.encode
        vectors = {k: v for k, v in enumerate(encode.values) if isinstance(v.type, Array)}
        states = {update.state for update in encode.updates}
        _verify_steps(plan.encode, params | {encode.gradient} | states, encode.lets, vectors)
    if program.decode is not None:
        decode = program.decode
        known = params | {decode.gradient} | {item.var for item in decode.fields}
        _verify_steps(plan.decode, known, decode.lets, {0: decode.result})
    if is_packed:
        _verify_body(plan)


def _verify_steps(
    steps: tuple[nodes.Step, ...],
    known: set[nodes.Var],
    lets: tuple[nodes.Let, ...],
    vectors: dict[int, nodes.Expr],
) -> None:
    made = dict.fromkeys((let.var for let in lets), False)
    left = dict(vectors)
    known = set(known)

    def make(var: nodes.Var) -> None:
        if made.get(var, True):
            raise IrError(f"`{var.name}` is computed twice, or nobody asked for it")
        made[var] = True
        known.add(var)

    def need(value: nodes.Expr) -> None:
        missing = free_vars(value) - known
        if missing:
            names = ", ".join(sorted(var.name for var in missing))
            raise IrError(f"a step needs {names}, not computed before it")

    for step in steps:
        if not isinstance(step, nodes.Sweep):
            need(step.value)
            make(step.var)
            continue
        need(step.size)
        for _, reduce in step.reduces:
            need(reduce)
            _check_size(reduce.source, step.size)
        for write in step.writes:
            need(write.value)
            _check_size(write.value, step.size)
            if left.pop(write.field, None) != write.value:
                raise IrError(f"field {write.field} is written twice, or as something else")
        for var, _ in step.reduces:
            make(var)
    lost = [var.name for var, is_made in made.items() if not is_made]
    if lost or left:
        raise IrError(f"never computed: {', '.join([*lost, *map(str, left)])}")


def _check_size(value: nodes.Expr, size: nodes.Expr) -> None:
    if not isinstance(value, nodes.Elementwise | nodes.Scatter) or value.size != size:
        raise IrError(f"what a sweep holds must have its size. Received: {value!r}")


def _verify_body(plan: nodes.Plan) -> None:
    encode, decode = plan.program.encode, plan.program.decode
    kinds = [item.type for item in plan.body]
    written = kinds if encode is None else [value.type for value in encode.fields]
    read = kinds if decode is None else [item.var.type for item in decode.fields]
    if kinds != written or kinds != read:
        raise IrError(f"a body must have the fields of both functions. Received: {kinds}")
    for item in plan.body:
        if (item.size is None) == isinstance(item.type, Array):
            raise IrError(f"field `{item.name}` must have a size if and only if it is a vector")
