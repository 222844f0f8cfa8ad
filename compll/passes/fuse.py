# SPDX-License-Identifier: Apache-2.0
"""Loops: which reductions and writes share one sweep over the data.

    max = reduce max(g); min = reduce min(g); ...   -->  sweep { max, min }; ...; sweep { write }
    sum = reduce sum(g); codes = map(g, sign)       -->  sweep { sum, write }

A sweep takes every reduction of one length whose inputs are known, and every write that does not
wait for them, so the gradient is read as few times as the dependences allow. Vectors that are kept
(filter, sort, top_k, scatter, hadamard) have a loop each.
"""

from compll.ir import nodes
from compll.ir.walk import free_vars


def fuse(program: nodes.Program, spec_hash: int) -> nodes.Plan:
    """Orders both functions into lets and sweeps; `spec_hash`: what packets carry."""
    encode: tuple[nodes.Step, ...] = ()
    decode: tuple[nodes.Step, ...] = ()
    params = {param.var for param in program.params}
    if program.encode is not None:
        writes = [
            nodes.Write(number, value)
            for number, value in enumerate(program.encode.values)
            if isinstance(value, nodes.Elementwise)
        ]
        known = params | {program.encode.gradient}
        known |= {update.state for update in program.encode.updates}
        encode = _schedule(program.encode.lets, writes, known)
    if program.decode is not None:
        known = params | {program.decode.gradient} | {item.var for item in program.decode.fields}
        result = program.decode.result
        if not isinstance(result, nodes.Elementwise | nodes.Scatter):
            raise TypeError(f"a decode must be inlined before it is fused. Received: {result!r}")
        decode = _schedule(program.decode.lets, [nodes.Write(0, result)], known)
    return nodes.Plan(program, spec_hash, encode, decode)


def _schedule(
    lets: tuple[nodes.Let, ...], writes: list[nodes.Write], known: set[nodes.Var]
) -> tuple[nodes.Step, ...]:
    steps: list[nodes.Step] = []
    known = set(known)
    waiting = list(lets)
    while waiting or writes:
        waiting = _take_scalars(waiting, known, steps)
        if not waiting and not writes:
            break
        ready = [let for let in waiting if free_vars(let.value) <= known]
        reduces = [(let.var, let.value) for let in ready if isinstance(let.value, nodes.Reduce)]
        sizes = [_size(reduce) for _, reduce in reduces]
        # Writes wait while reductions are left: a later sweep may be needed anyway, and then costs
        # nothing more.
        sizes += [
            write.value.size for write in writes if not reduces and free_vars(write.value) <= known
        ]
        if not sizes:
            raise ValueError(
                "the lets of a function must be in an order in which they can be computed"
            )
        size = sizes[0]
        together = tuple((var, reduce) for var, reduce in reduces if _size(reduce) == size)
        leaving = tuple(
            write
            for write in writes
            if write.value.size == size
            and free_vars(write.value) <= known
            and not (together and isinstance(write.value, nodes.Scatter))
        )
        steps.append(nodes.Sweep(size, together, leaving))
        done = {var for var, _ in together}
        known |= done
        waiting = [let for let in waiting if let.var not in done]
        writes = [write for write in writes if write not in leaving]
    return tuple(steps)


def _take_scalars(
    waiting: list[nodes.Let], known: set[nodes.Var], steps: list[nodes.Step]
) -> list[nodes.Let]:
    """Moves the lets that share no loop and whose inputs are known to `steps`."""
    left = []
    for let in waiting:
        if not isinstance(let.value, nodes.Reduce) and free_vars(let.value) <= known:
            is_kept = isinstance(let.value, nodes.Kept)
            steps.append(nodes.Store(let.var, let.value) if is_kept else let)
            known.add(let.var)
        else:
            left.append(let)
    return left


def _size(reduce: nodes.Reduce) -> nodes.Expr:
    if not isinstance(reduce.source, nodes.Elementwise):
        raise TypeError(
            f"a reduction must be inlined before it is fused. Received: {reduce.source!r}"
        )
    return reduce.source.size
