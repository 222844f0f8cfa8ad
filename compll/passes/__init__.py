# SPDX-License-Identifier: Apache-2.0
"""From a checked program to loops.

Each pass is one function from program to program; verify runs after each.

inline   lambdas and vectors into elementwise form: nothing is stored between loops
fold     constants, conversions that change nothing, values nobody reads
fuse     reductions and writes that can share a read of the data into one sweep
"""

from compll.ir import nodes
from compll.ir.printer import spec_hash
from compll.ir.verify import verify
from compll.passes.fold import fold
from compll.passes.fuse import fuse
from compll.passes.inline import inline


def optimise(program: nodes.Program) -> nodes.Plan:
    """The loops of a checked program, for back ends that emit loops."""
    carried = spec_hash(program)
    program = inline(program)
    verify(program, is_inlined=True)
    program = fold(program)
    verify(program, is_inlined=True)
    return fuse(program, carried)
