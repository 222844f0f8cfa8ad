# SPDX-License-Identifier: Apache-2.0
"""From a checked program to loops.

inline   lambdas and vectors into elementwise form: nothing is stored between loops but what must be
fold     constants, and conversions that change nothing
blocks   reads of a value per block of elements, as such
dead     values that nobody reads
fuse     reductions and writes that can share a read of the data, in one sweep
pack     the body: fields, widths, element counts
specialise  the same for each value of a parameter that codes' width depends on, if it has few

Each pass is one function, and the verifier looks at what it made before the next one starts.
"""

from collections.abc import Iterator
from dataclasses import replace

from compll.ir import nodes
from compll.ir.printer import spec_hash
from compll.ir.verify import verify
from compll.ir.verify_plan import verify_plan
from compll.passes.blocks import blocks
from compll.passes.dead import dead
from compll.passes.fold import fold
from compll.passes.fuse import fuse
from compll.passes.inline import inline
from compll.passes.pack import pack
from compll.passes.specialise import specialise

NAMES = ("inline", "fold", "blocks", "dead", "fuse", "pack", "specialise")
"""The passes in the order in which they run."""


def stages(program: nodes.Program) -> Iterator[tuple[str, nodes.Program | nodes.Plan]]:
    """What each pass makes of a checked program, with the pass's name."""
    carried = spec_hash(program)
    passes = (("inline", inline), ("fold", fold), ("blocks", blocks), ("dead", dead))
    for name, change in passes:
        program = change(program)
        verify(program, is_inlined=True)
        yield name, program
    plan = fuse(program, carried)
    verify_plan(plan)
    yield "fuse", plan
    plan = pack(plan)
    verify_plan(plan, is_packed=True)
    yield "pack", plan
    plan = replace(plan, specialised=_specialised(program, carried))
    yield "specialise", plan


def _specialised(program: nodes.Program, carried: int) -> nodes.Specialised | None:
    """Plans of a program for each value of a parameter."""
    found = specialise(program)
    if found is None:
        return None
    plans = {}
    for value, known in found.programs.items():
        verify(known, is_inlined=True)
        plans[value] = pack(fuse(known, carried))
        verify_plan(plans[value], is_packed=True)
    return nodes.Specialised(found.param, plans)


def optimise(program: nodes.Program) -> nodes.Plan:
    """The loops of a checked program, for back ends that emit loops."""
    *_, (_, plan) = stages(program)
    if not isinstance(plan, nodes.Plan):
        raise TypeError(f"the last pass must make a plan. Received: {type(plan).__name__}")
    return plan
