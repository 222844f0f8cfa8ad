# SPDX-License-Identifier: Apache-2.0
"""Are the packets of a GPU those of the NumPy reference, byte for byte?

Large tensors are compared with C++ (cpu.py), as NumPy would take minutes: on them a block of
threads of top_k has several tiles (`run_of` of device.cuh), which is the way that is timed.
"""

from typing import Any

import numpy as np

import compll
from benchmarks.gpu.binding import ADD, FINE, SET, Key
from benchmarks.gpu.cpu import Cpu
from benchmarks.gpu.machine import Bytes, Floats, Gpu, GpuCodec, Memory
from compll.packet import CHUNK

SIZES = (0, 1, 17, 1025, 70_001, CHUNK + 1027, 2 * CHUNK)
# From 8 Mi elements on two tiles a block, and from 16 Mi four; the last run is cut short.
LARGE_SIZES = (8 * CHUNK, 16 * CHUNK + 1027)

KEY: dict[str, Any] = {"seed": 2**63 + 5, "step": 3, "tensor_id": 9, "offset": 16}


def tensors(n: int) -> dict[str, Floats]:
    """Vectors that codecs must survive."""
    rng = np.random.default_rng(n)
    plain = rng.normal(size=n).astype(np.float32)
    broken = plain.copy()
    broken[n // 2 : n // 2 + 1] = np.nan
    broken[n // 3 : n // 3 + 1] = np.inf
    broken[n // 5 : n // 5 + 1] = -np.inf
    return {
        "plain": plain,
        "denormal": plain * np.float32(1e-40),
        "broken": broken,
        "constant": np.full(n, np.float32(0.3)),
        # Few values, and zeros of both signs.
        "signed": np.copysign((rng.integers(-3, 4, n) // 2 / 2).astype(np.float32), plain),
    }


def check(gpu: Gpu, program: compll.Program) -> list[str]:
    """What differs, in words; nothing when all is equal."""
    reference = compll.Reference(program)
    wrong = []
    for n, skew in [*((n, 0) for n in SIZES), *((n, 3) for n in SIZES if n < CHUNK)]:
        wrong += _check_size(gpu, program, reference, tensors(n), skew)
    cpu = Cpu(program)
    for n in LARGE_SIZES:
        plain = {"plain": np.random.default_rng(n).standard_normal(n, dtype=np.float32)}
        for skew in (0, 3):
            wrong += _check_size(gpu, program, cpu, plain, skew)
    return wrong


def _check_size(
    gpu: Gpu,
    program: compll.Program,
    reference: compll.Reference | Cpu,
    some: dict[str, Floats],
    skew: int,
) -> list[str]:
    """What differs of tensors of one size."""
    n = len(next(iter(some.values())))
    codec = GpuCodec(gpu, program, n, skew=skew)
    # Floats lie at multiples of 4 bytes, packets anywhere.
    vectors = [Memory(gpu, n, np.float32, skew=4 * skew) for _ in range(3)]
    rows = [Memory(gpu, codec.wire_bytes, skew=row * skew) for row in range(3)]
    state = np.zeros((codec.num_states, n), np.float32) if codec.num_states else None
    wrong = []
    for name, x in some.items():
        where = f"n={n} {name}" + (", not aligned" if skew else "")
        if state is not None:
            wrong += _check_state(codec, reference, x, where, vectors, rows, state)
        else:
            wrong += _check_packets(codec, reference, x, where, vectors, rows)
            wrong += _check_feedback(codec, reference, x, where, vectors)
    codec.free()
    for memory in (*vectors, *rows):
        memory.free()
    return wrong


def _check_packets(
    codec: GpuCodec,
    reference: compll.Reference | Cpu,
    x: Floats,
    where: str,
    vectors: list[Memory],
    rows: list[Memory],
) -> list[str]:
    """Encoding, and all that decodes."""
    gradient, _, out = vectors
    expected = reference.encode(x, **KEY)
    found = codec.encode(gradient.put(x), Key(**KEY))
    wrong = [] if np.array_equal(found, expected) else [f"{where}: encode"]
    return wrong + _check_decode(codec, reference, expected, x, where, out, rows)


def _check_decode(
    codec: GpuCodec,
    reference: compll.Reference | Cpu,
    packets: Bytes,
    x: Floats,
    where: str,
    out: Memory,
    rows: list[Memory],
) -> list[str]:
    """Sums of rows of the same packets, to `out` or added to x there, and of a foreign one."""
    wrong = []
    values = reference.decode(packets, x.size)
    for row in rows:
        row.put(packets)
    out.put(x)
    if codec.decode(rows[:1], out) != FINE or not same(out.get(), values):
        wrong.append(f"{where}: decode")
    total = values
    for _ in rows[1:]:
        total = total + values
    if codec.decode(rows, out, SET) != FINE or not same(out.get(), total):
        wrong.append(f"{where}: sum of {len(rows)}")
    out.put(x)
    if codec.decode(rows[:1], out, ADD) != FINE or not same_sum(out.get(), x + values):
        wrong.append(f"{where}: decode, add")
    bad = packets.copy()
    bad[8] ^= 1
    rows[1].put(bad)
    out.put(x)
    if codec.decode(rows, out) != 1 << 40 | 20 or not same(out.get(), x):
        wrong.append(f"{where}: a foreign packet")
    return wrong


def _check_feedback(
    codec: GpuCodec, reference: compll.Reference | Cpu, x: Floats, where: str, vectors: list[Memory]
) -> list[str]:
    gradient, residual, _ = vectors
    rest = np.random.default_rng(1).normal(size=x.size).astype(np.float32)
    packets = codec.encode(gradient.put(x), Key(**KEY), residual.put(rest))
    with np.errstate(all="ignore"):
        left = x + rest - reference.decode(packets, x.size)
    left = np.where(np.isfinite(left), left, np.float32(0))
    if not np.array_equal(packets, reference.encode(x + rest, **KEY)):
        return [f"{where}: encode with feedback"]
    return [] if same(residual.get(), left) else [f"{where}: residual"]


def _check_state(
    codec: GpuCodec,
    reference: compll.Reference | Cpu,
    x: Floats,
    where: str,
    vectors: list[Memory],
    rows: list[Memory],
    state: Floats,
) -> list[str]:
    wrong = []
    expected = reference.encode(x, seed=7, state=state)
    if not np.array_equal(codec.encode(vectors[0].put(x), Key(7, 0, 0, 0)), expected):
        wrong.append(f"{where}: encode")
    if codec.states and not same(codec.states[0].get(), state.ravel()):
        wrong.append(f"{where}: state")
    return wrong + _check_decode(codec, reference, expected, x, where, vectors[2], rows)


def same_sum(found: Floats, expected: Floats) -> bool:
    """As `same`, but for which zero it is: what a sparse packet lacks isn't added, and -0 stays."""
    return same(found + np.float32(0), expected + np.float32(0))


def same(found: Floats, expected: Floats) -> bool:
    """Equal bit for bit, but for which NaN it is."""
    good = ~np.isnan(expected)
    is_nan = np.array_equal(np.isnan(found), np.isnan(expected))
    return is_nan and np.array_equal(found[good].view("u4"), expected[good].view("u4"))
