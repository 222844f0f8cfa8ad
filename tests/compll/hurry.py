# SPDX-License-Identifier: Apache-2.0
"""Codecs compiled in a hurry: not optimised, nothing inlined, and headers are read once for all."""

import functools
import hashlib
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from compll import commands
from compll.backends import cache, toolchain

# What is optimised takes twice as long; tests of ops run that, and so do some of these.
FLAGS = ("-DTF_HIPS_NO_CLONES", "-O0")
# The parts of C++ that take long to read, and what is included of ours, but for what depends on the
# name of a codec (codec.h).
_HEADERS = ("<algorithm>", "<cmath>", "<cstdint>", "<cstring>", "<limits>", "<vector>")
_OURS = ("bits.h", "blocks.h", "denormals.h", "functions.h", "reduce.h", "row.h", "scratch.h")
# Functions that are inlined wherever they are called are compiled again each time, without
# optimisation, too: half of what a codec takes. Results are the same where they are called.
_CALLED = """
#include "tf_hips/cc/runtime/machine.h"
#include "tf_hips/cc/runtime/target.h"
#undef TF_HIPS_INLINE
#define TF_HIPS_INLINE inline
#ifdef TF_HIPS_HAS_AVX
#undef TF_HIPS_AVX512_INLINE
#define TF_HIPS_AVX512_INLINE \\
  inline __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi2")))
#undef TF_HIPS_AVX2_INLINE
#define TF_HIPS_AVX2_INLINE inline __attribute__((target("avx2")))
#endif
"""


@functools.cache
def flags() -> tuple[str, ...]:
    """Flags for `cache.build`, with the headers in the compiler's own form.

    For the registers of this machine alone: those of others are never called here, and a sixth of
    the code.
    """
    root = toolchain.include_folder()
    compiler = toolchain.compiler()
    ours = (*FLAGS, *toolchain.machine_flags(compiler))
    text = _CALLED + "".join(f"#include {name}\n" for name in _HEADERS)
    text += "".join(f'#include "tf_hips/cc/runtime/{name}"\n' for name in _OURS)
    command = (*compiler, *toolchain.FLAGS, *ours, f"-I{root}")
    return (*ours, *read_once(text, command, (root / "tf_hips/cc/runtime").glob("*.h")))


def read_once(text: str, command: Sequence[str], files: Iterable[Path]) -> tuple[str, ...]:
    """Flags that include headers which the compiler has read before.

    Most of the time of a short program goes into reading them. They lie beside the codecs, under
    a name that changes with them; a compiler that cannot use them reads the text, which is there.

    Args:
        text: what includes them.
        command: the compiler and the flags it is used with.
        files: all of them that may change.
    """
    digest = hashlib.sha256("\0".join([*command, text]).encode())
    digest.update(toolchain.version(toolchain.compiler()))
    for file in sorted(files):
        digest.update(file.read_bytes())
    folder = cache.BUILT.folder / f"headers-{digest.hexdigest()[:24]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            made.joinpath("all.h").write_text(text, encoding="ascii")
            subprocess.run(
                [*command, "-x", "c++-header", "all.h", "-o", "all.h.gch"],
                check=True,
                cwd=made,
                timeout=toolchain.BUILD_DEADLINE_S,
            )
            try:
                made.replace(folder)
            except OSError:
                # Another process was faster.
                if not folder.is_dir():
                    raise
    return ("-include", str(folder / "all.h"))


def the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `compll run --backend cpp` compiles in this process is compiled in a hurry, too."""
    monkeypatch.setattr(
        commands, "build", lambda source, name, _: cache.build(source, name, flags())
    )
