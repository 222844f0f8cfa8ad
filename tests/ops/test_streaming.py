# SPDX-License-Identifier: Apache-2.0
"""Large tensors are written past the caches: the same floats, wherever they begin and end."""

import functools

import numpy as np
import pytest

from tests.ops.codecs import all_variants, encoded
from tf_hips.ops import CHUNK, Compressor, chunk_sizes, native

pytestmark = pytest.mark.heavy  # packets of many chunks, for every codec

# More than 2^21 floats are written so; the last chunk and the last tile are not whole.
N = 2 * CHUNK + 4099
KEY = native.Key(5, 6, 7)


@functools.cache
def gradient() -> np.ndarray:
    """Normal values, float32 [N]."""
    return np.random.default_rng(1).standard_normal(N, np.float32)


@pytest.mark.parametrize("compressor", all_variants(), ids=lambda one: one.text)
def test_large_decodes_and_merges_are_those_of_their_chunks(compressor: Compressor) -> None:
    x = gradient()
    packets = encoded(compressor, x, KEY)
    expected, at, start = np.empty(N, np.float32), 0, 0
    for size in chunk_sizes(N):
        end = at + compressor.wire_bytes(size)
        expected[start : start + size] = native.decode(compressor, packets[at:end], size)
        at, start = end, start + size
    room = np.full(N + 64, np.float32(np.nan))
    first = -(room.ctypes.data // 4) % 16  # where a line of memory begins
    # Where an output begins is no business of a codec's parameters. Beside the start of a line are
    # also whole lines.
    for skew in (0, 1, 5, 8) if compressor == Compressor(compressor.name) else (5,):
        room[:] = np.nan
        out = room[first + skew : first + skew + N]
        native.decode(compressor, packets, N, out=out)
        np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
        around = np.concatenate([room[: first + skew], room[first + skew + N :]])
        assert np.isnan(around).all()
        total = room[first + skew : first + skew + N]
        # One added by itself, and four that are added in one loop; or only such, or no such loop.
        count = {1: 3, 5: 4}.get(skew, 5)
        native.merge(compressor, [packets] * count, N, out=total)
        np.testing.assert_array_equal(total, sum([expected] * count, start=np.zeros(N, np.float32)))
        around = np.concatenate([room[: first + skew], room[first + skew + N :]])
        assert np.isnan(around).all()
