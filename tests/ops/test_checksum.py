# SPDX-License-Identifier: Apache-2.0
"""Checksums are zlib's, for any length, place in memory and value before."""

import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_hips.ops import checksum

BYTES = np.random.default_rng(0).bytes(1 << 20)
HEAD = checksum._SMALL


@settings(max_examples=300)
@given(
    st.integers(0, 300),
    st.one_of(st.integers(0, 300), st.integers(HEAD, 3 * HEAD)),
    st.integers(0, (1 << 32) - 1),
)
def test_it_is_that_of_zlib(start: int, size: int, before: int) -> None:
    data = memoryview(BYTES)[start : start + size]
    expected = zlib.crc32(data, before)
    assert checksum.crc32(data, before) == expected
    # Small ones are left to zlib, so ask the function for them as well.
    view = np.frombuffer(data, np.uint8)
    assert checksum._function()(before, view.ctypes.data, view.size) == expected


def test_parts_make_the_whole() -> None:
    value = 0
    for start in range(0, len(BYTES), 5 * HEAD + 7):
        value = checksum.crc32(BYTES[start : start + 5 * HEAD + 7], value)
    assert value == checksum.crc32(bytearray(BYTES)) == zlib.crc32(BYTES)
