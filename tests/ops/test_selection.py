# SPDX-License-Identifier: Apache-2.0
"""What sparsifiers select, of gradients that are hard to select from.

Machine code guesses from a sample of a chunk what belongs to the largest elements: such inputs lead
it to too many candidates, to too few, or to ties. The packets are those of the reference anyway.
"""

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.ops.codecs import Floats, bits, reference
from tf_hips.ops import Compressor, Key, error_feedback, native, parse

pytestmark = pytest.mark.heavy  # every selection at every size

ROOT = Path(__file__).resolve().parents[2]
KEY = Key(seed=3, step=5, tensor_id=7)
# Of more than 2^16 elements a sample is taken, the last groups of which are not at the end.
SIZE = (1 << 16) + 77
CODECS = ("topk(ratio=0.01)", "topk(ratio=0.4)", "graddrop", "bisparse", "randomk")


def _normal(n: int) -> Floats:
    return np.random.default_rng(n).standard_normal(n, np.float32)


def _ascending(n: int) -> Floats:
    return np.sort(np.abs(_normal(n)))


def _misleading(n: int, seen: float, x: Floats) -> Floats:
    """What the groups of a sample (top_k.h) see is one number."""
    for group in range(512):
        part, shift = n // 512, group * 0x9E3779B9 % (1 << 32) >> 8
        first = (part * group + shift % (part - 16)) // 16 * 16
        x[first : first + 16] = seen
    return x


def _broken(n: int) -> Floats:
    x = _normal(n)
    x[::7], x[5::11], x[6::13] = np.nan, np.inf, -np.inf
    return x


def _outliers(n: int) -> Floats:
    x = _normal(n)
    x[::1000] *= np.float32(1e30)
    return x


def _rows(n: int) -> Floats:
    """As of an embedding: most rows are zero, of both signs."""
    x = _normal(n)
    row = np.arange(n) // 64
    return np.where(np.random.default_rng(1).random(n // 64 + 1)[row] < 0.97, x * np.float32(0), x)


INPUTS = {
    "normal": _normal,
    "equal": lambda n: np.full(n, -1.5, np.float32),
    "zero": lambda n: np.zeros(n, np.float32),
    "two values": lambda n: np.where(_normal(n) > 0, np.float32(1), np.float32(-2)),
    "few values": lambda n: np.round(_normal(n) * 4),
    "ascending": _ascending,
    "descending": lambda n: _ascending(n)[::-1].copy(),
    "sample too small": lambda n: _misleading(n, 0.0, _ascending(n)),
    "sample too large": lambda n: _misleading(n, 5.0, _normal(n) * np.float32(1e-3)),
    "large at the end": lambda n: np.where(np.arange(n) < n - 300, _normal(n) / 100, _normal(n)),
    "outliers": _outliers,
    "rows": _rows,
    "broken": _broken,
    "denormal": lambda n: _normal(n) * np.float32(1e-41),
}

each_input = pytest.mark.parametrize("kind", INPUTS)
each_codec = pytest.mark.parametrize("text", CODECS)


@functools.cache
def _input(kind: str) -> Floats:
    return INPUTS[kind](SIZE).astype(np.float32)


def _expected(compressor: Compressor, x: Floats) -> bytes:
    made = reference(compressor).encode(x, seed=KEY.seed, step=KEY.step, tensor_id=KEY.tensor_id)
    return made.tobytes()


@each_input
@each_codec
def test_packets_are_those_of_the_reference(text: str, kind: str) -> None:
    compressor, x = parse(text), _input(kind)
    packet = native.encode(compressor, x, KEY)
    assert packet.tobytes() == _expected(compressor, x)
    decoded = reference(compressor).decode(packet, SIZE)
    np.testing.assert_array_equal(bits(native.decode(compressor, packet, SIZE)), bits(decoded))
    # Sums begin with what there is, and a zero adds nothing to it.
    added = native.decode(compressor, packet, SIZE, out=np.ones(SIZE, np.float32), add=True)
    np.testing.assert_array_equal(bits(added), bits(np.float32(1) + decoded))


@each_input
@each_codec
def test_feedback_is_the_sum_without_what_is_sent(text: str, kind: str) -> None:
    compressor, x = parse(text), _input(kind)
    residual = np.where(np.isfinite(x), x, 0)[::-1] / np.float32(3)
    kept = residual.copy()
    with np.errstate(all="ignore"):
        total = x + residual
    packet = native.encode(error_feedback(compressor), x, KEY, kept)
    assert packet.tobytes() == _expected(compressor, total)
    with np.errstate(all="ignore"):
        left = total - reference(compressor).decode(packet, SIZE)
    np.testing.assert_array_equal(kept, np.where(np.isfinite(left), left, 0))


@each_input
def test_state_in_place(kind: str) -> None:
    compressor, x = parse("dgc(ratio=0.01, momentum=0.5)"), _input(kind)
    state = np.zeros(compressor.state_shape((SIZE,)), np.float32)
    expected = state.copy()
    for step in range(2):
        with np.errstate(all="ignore"):
            packet = reference(compressor).encode(x, step=step, state=expected)
        made = native.encode(compressor, x, Key(0, step, 0), state)
        assert made.tobytes() == packet.tobytes()
        np.testing.assert_array_equal(bits(state), bits(expected))


@pytest.mark.parametrize("n", [1 << 20, (1 << 20) + (1 << 16)])
def test_whole_chunks(n: int) -> None:
    compressor, x = parse("topk(ratio=0.01)"), _normal(n)
    assert native.encode(compressor, x, KEY).tobytes() == _expected(compressor, x)


def digest() -> str:
    """Of the packets, residuals and values of all codecs and inputs."""
    found = hashlib.sha256()
    for kind in INPUTS:
        x = _input(kind)
        for text in CODECS:
            residual = np.zeros(SIZE, np.float32)
            packet = native.encode(parse(f"error_feedback({text})"), x, KEY, residual)
            found.update(packet.tobytes() + residual.tobytes())
            found.update(native.decode(parse(text), packet, SIZE).tobytes())
    return found.hexdigest()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("machine", ["avx2", "base"])
def test_capped_vectors_select_the_same(machine: str) -> None:
    command = "from tests.ops import test_selection as here; print(here.digest())"
    result = subprocess.run(
        [sys.executable, "-c", command],
        cwd=ROOT,
        env={**os.environ, "TF_HIPS_CPU": machine},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == digest()
