# SPDX-License-Identifier: Apache-2.0
"""Threads of a server's process share two arenas of glibc."""

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from tf_hips.ps.server.memory import limit_arenas

if sys.argv[1] == "limited":
    limit_arenas()
ready = threading.Barrier(9)

def hold():
    kept = [bytearray(100_000) for _ in range(10)]
    ready.wait()
    ready.wait()

for _ in range(8):
    threading.Thread(target=hold).start()
ready.wait()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
ready.wait()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="not glibc")
@pytest.mark.parametrize(("how", "least", "most"), [("limited", 1, 2), ("free", 3, 64)])
def test_threads_share_arenas(how: str, least: int, most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True
    )
    assert least <= done.stdout.count("<heap nr=") <= most
