# SPDX-License-Identifier: Apache-2.0
"""Kernels of CUDA that are compiled for each value of a parameter: a width of codes, of few values.

Choices between levels, which depend on it, are then made by nvcc. A small call's one kernel is
compiled once, where the parameter is kAnyWidth and read from the call.
"""

from compll.backends.c_common import param_names
from compll.ir import nodes
from compll.ir.widths import width_param

_MAX_WIDTHS = 4
# Blocks of threads that a multiprocessor must have room for at a time: as many as registers allow.
_BLOCKS = {("EncodeCall", ""): 12, ("EncodeCall", "_rest"): 10, ("DecodeCall", ""): 10}


def width_of(program: nodes.Program) -> nodes.Param | None:
    """A parameter that says how wide codes are, if it has few values; kAnyWidth is none of them."""
    param = width_param(program, _MAX_WIDTHS)
    return param if param is not None and param.low >= 1 else None


def width_in(program: nodes.Program, width: nodes.Param) -> str:
    """C++ for its value in a kernel."""
    name = param_names(program)[width.var]
    return f"kWidth != kAnyWidth ? kWidth : call.params.{name}"


def grids_of(
    name: str, call: str, program: nodes.Program, width: nodes.Param, opening: str, *, leaves: bool
) -> list[str]:
    """The kernels, and a function that launches the one that a call needs.

    Args:
        name: of the function of a block of threads.
        call: the struct that it is given.
        program: has the parameter.
        width: the parameter.
        opening: a statement before it.
        leaves: it may leave a residual; a call without one has no registers for it.
    """
    lines: list[str] = []
    launches: list[str] = []
    value = f"call.params.{param_names(program)[width.var]}"
    for kind, inner in (("_rest", "kWidth, true"), ("", "kWidth, false" if leaves else "kWidth")):
        if kind and not leaves:
            continue
        lines += [
            "template <int kWidth>",
            f"TF_HIPS_TILE_KERNEL({_BLOCKS[call, kind]}) {name}{kind}_grid(const {call} call) {{",
            f"  {opening}",
            f"  {name}<{inner}>(call, blockIdx.x);",
            "}",
        ]
        sign = "!=" if kind else "=="
        has_rest = f" && call.residual {sign} nullptr" if leaves else ""
        for number in range(int(width.low), int(width.high) + 1):
            launches += [
                f"  if ({value} == {number}{has_rest}) {{",
                f"    TF_HIPS_FOLLOW({name}{kind}_grid<{number}>, blocks, kThreads, stream, call);",
                "  }",
            ]
    head = f"inline void launch_{name}("
    return [
        *lines,
        f"{head}const {call}& call, int64_t blocks,",
        f"{' ' * len(head)}cudaStream_t stream) {{",
        *launches,
        "}",
        "",
    ]
