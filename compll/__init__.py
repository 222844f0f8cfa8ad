# SPDX-License-Identifier: Apache-2.0
"""CompLL: a compiler from short specifications of gradient compression to kernels.

    program = compll.compile_spec("terngrad.pse")
    codec = compll.Reference(program, bitwidth=2)
    packet = codec.encode(gradient, seed=7)
    codec.decode(packet, gradient.size)

`python -m compll --help` lists the commands; docs/compll-language.md describes the language. Python
and NumPy only.
"""

from compll.backends.reference import Reference
from compll.errors import CompileError
from compll.ir.nodes import Program
from compll.packet import CHUNK, PacketError
from compll.pipeline import compile_spec, compile_text, generate

__version__ = "0.1.0"  # that of tf_hips: one wheel has both

__all__ = [
    "CHUNK",
    "CompileError",
    "PacketError",
    "Program",
    "Reference",
    "__version__",
    "compile_spec",
    "compile_text",
    "generate",
]
