# SPDX-License-Identifier: Apache-2.0
"""CompLL: a compiler from short specifications of gradient compression to kernels.

    program = compll.compile_spec("terngrad.pse")
    codec = compll.Reference(program, bitwidth=2)
    packet = codec.encode(gradient, seed=7)
    codec.decode(packet, gradient.size)

`python -m compll --help` lists the commands; docs/compll-language.md describes the language. Python
and NumPy only. Names are loaded on first use (PEP 562), so that the command can be interrupted from
its first moment.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "CHUNK": "compll.packet",
    "CompileError": "compll.errors",
    "PacketError": "compll.packet",
    "Program": "compll.ir.nodes",
    "Reference": "compll.backends.reference",
    "compile_spec": "compll.pipeline",
    "compile_text": "compll.pipeline",
    "generate": "compll.pipeline",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'compll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
