# SPDX-License-Identifier: Apache-2.0
"""The targets of `tests.fuzz` on Hypothesis' examples: they run, and decoders keep their word."""

import struct
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.decoders import TARGETS, one_input


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
@given(data=st.binary(max_size=300))
@example(b'{"facts":{"run":"x"},"is_first":1,"mark":"zz"}')
@example(b"[]")
@example(struct.pack("<I", 5000) + 5000 * b"[")
@example(b"\xff\xff\xff\xff" + b"{}")
def test_decoders_raise_nothing_else(target: Callable[[bytes], None], data: bytes) -> None:
    target(data)


def test_no_bytes_are_an_input() -> None:
    one_input(b"")
