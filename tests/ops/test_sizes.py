# SPDX-License-Identifier: Apache-2.0
"""Sizes that 32 bits do not hold, in the C library, in place, within 10 GiB of memory."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 10 << 30

# Bytes of the gradient and of the packet pass 2^32 and 2^29; numbers of elements pass 2^31. A
# pattern of a chunk is repeated; random rounding differs by where a chunk stands, so a packet in
# the wrong place is seen. The gradient's own memory receives what is decoded.
PROGRAM = f"""
import dataclasses, resource
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}))
import numpy as np
from tf_hips.ops import CHUNK, Key, native, terngrad

n = 2**31 + 5
codec, key = terngrad(2), Key(seed=1, step=2, tensor_id=3)
pattern = np.random.default_rng(0).standard_normal(CHUNK, np.float32)
x = np.empty(n, np.float32)
for begin in range(0, n, CHUNK):
    x[begin : begin + CHUNK] = pattern[: n - begin]
packet = native.encode(codec, x, key)
assert packet.size == codec.wire_bytes(n), packet.size
decoded = native.decode(codec, packet, n, out=x)
assert decoded is x or np.shares_memory(decoded, x)
each = codec.chunk_packet_bytes(CHUNK)
checked = [0, 1, 511, 512, 1023, 1024, 2046, 2047, 2048]  # around 2^29, 2^30 and 2^31 elements
different = set()
for chunk in checked:
    begin = chunk * CHUNK
    size = min(CHUNK, n - begin)
    alone = native.encode(codec, pattern[:size], dataclasses.replace(key, offset=begin))
    assert alone.tobytes() == packet[chunk * each : chunk * each + alone.size].tobytes(), chunk
    expected = native.decode(codec, alone, size)
    assert expected.tobytes() == x[begin : begin + size].tobytes(), chunk
    different.add(alone.tobytes())
assert len(different) == len(checked)
# Every chunk was decoded: a level of TernGrad is no normal number of the pattern.
levels = len(np.unique(expected))
assert all(len(np.unique(x[begin : begin + 64])) <= 4 for begin in range(0, n, CHUNK)), levels
print(n, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_elements_than_31_bits_hold() -> None:
    available = psutil.virtual_memory().available
    if available < LIMIT:
        pytest.skip(f"needs {LIMIT >> 30} GiB of memory, {available / 2**30:.1f} GiB are free")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    n, peak = map(int, done.stdout.split())
    assert n > 2**31
    assert 4 * n < peak <= LIMIT
