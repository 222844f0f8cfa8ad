# SPDX-License-Identifier: Apache-2.0
"""What emulated kernels report of packets: of others' and, with error feedback, of their own."""

import ctypes
import functools
import re

import numpy as np
import pytest

import compll
from compll.backends import cuda
from compll.packet import CHUNK
from compll.passes import optimise
from tests.compll.emulation import FINE, Emulated
from tests.compll.support import OWN, SPECS, assert_same_floats, gradients, spec

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

# Status codes of codec.h and api.h.
TOO_SMALL, CONTRADICTS, BAD_ARGUMENT, BAD_HASH = 1, 3, 16, 20


@functools.cache
def own() -> tuple[Emulated, compll.Reference]:
    """A codec that may refuse its own packets."""
    program = compll.compile_text(OWN, "own")
    return Emulated(program), compll.Reference(program)


@pytest.mark.parametrize(("n", "may_be_alone"), [(20, True), (20, False), (CHUNK + 10, False)])
def test_own_packets_that_are_refused_are_told(n, may_be_alone):
    """Of the last chunk alone; what is left is then the whole sum, in all chunks."""
    kernels, reference = own()
    assert kernels.codec.own_may_fail == 1
    x, residual = np.ones(n, np.float32), np.arange(n, dtype=np.float32) % 50
    kernels.alone(may_be=may_be_alone)
    for value, told in ((1, FINE), (1000, (n // CHUNK) << 8 | CONTRADICTS)):
        x[n // CHUNK * CHUNK] = value
        left_of_it = x + residual
        if told == FINE:
            for first in range(0, n, CHUNK):
                left_of_it[first : first + 4] = 0
        for is_apart in (False, True):
            report = np.zeros(1, np.uint64)
            packets, left = kernels.encode(x, residual, is_apart=is_apart, report=report)
            assert report[0] == told
            np.testing.assert_array_equal(packets, reference.encode(x + residual))
            np.testing.assert_array_equal(left, left_of_it)
            _, left = kernels.encode(x, residual, is_apart=is_apart)  # nobody asks
            np.testing.assert_array_equal(left, left_of_it)
    kernels.alone(may_be=True)


@pytest.mark.parametrize("name", ("onebit", "qsgd", "graddrop"))
def test_own_packets_that_are_in_order_are_told(name):
    """Where what is left is found by a pass of its own, with the codes, and by a scatter."""
    kernels = Emulated(spec(name))
    for may_be_alone in (True, False):
        kernels.alone(may_be=may_be_alone)
        x = gradients(1025)["broken"]
        for residual in (None, gradients(1025)["plain"]):
            report = np.zeros(1, np.uint64)
            packets, left = kernels.encode(x, residual, report=report)
            assert report[0] == FINE
            unasked, same = kernels.encode(x, residual)
            np.testing.assert_array_equal(packets, unasked)
            if left is not None and same is not None:
                assert_same_floats(left, same)
    kernels.alone(may_be=True)


def test_only_what_scatters_may_refuse_its_own():
    """So that no other codec's op waits for a report."""
    names = [path.stem for path in SPECS.glob("*.pse")]
    texts = {name: cuda.emit(optimise(spec(name))) for name in names}
    may_fail = {name for name in names if re.search(r"\b1,  // own_may_fail", texts[name])}
    assert may_fail == {"bisparse", "dgc", "graddrop", "randomk", "topk"}
    assert all("// own_may_fail" in text for text in texts.values())


def test_too_little_memory_for_decoding_is_said_before_anything_is_launched():
    kernels, _ = own()
    n = 5000
    x, residual = np.ones(n, np.float32), np.full(n, 7, np.float32)
    packets = np.zeros(int(kernels.codec.wire_bytes(kernels.values, n)), np.uint8)
    scratch = np.zeros(int(kernels.codec.scratch_bytes(kernels.values, n)), np.uint8)
    kept, before = residual.copy(), kernels.launches()
    status = kernels.codec.encode(
        *(kernels.values, ctypes.create_string_buffer(24), x.ctypes.data, kept.ctypes.data),
        *(kept.ctypes.data, None, n, packets.ctypes.data, packets.size),
        *(scratch.ctypes.data, scratch.size - 1, None),
    )
    assert status == TOO_SMALL
    assert kernels.launches() == before
    np.testing.assert_array_equal(kept, residual)
    assert not packets.any()


def test_the_first_row_that_is_wrong_is_told_and_in_it_the_first_chunk():
    """More rows than a kernel takes, and more packets than a block of threads."""
    kernels, n = Emulated(spec("onebit")), 2 * CHUNK + 5
    good = compll.Reference(spec("onebit")).encode(np.ones(n, np.float32))
    starts = [chunk * (24 + CHUNK // 8) for chunk in range(3)]
    for backwards, places in (
        (True, [(63, 2), (64, 0)]),
        (False, [(69, 0), (68, 2), (68, 1)]),
    ):
        rows = [good] * 70
        for row, chunk in places:
            rows[row] = rows[row].copy()
            rows[row][starts[chunk] + 8] ^= 1
        kernels.order(backwards=backwards)
        values, report = kernels.decode(rows, n)
        row, chunk = min(places)
        assert report == row << 40 | chunk << 8 | BAD_HASH
        assert (values == 7).all()
    kernels.order(backwards=False)


def test_a_small_call_checks_every_row():
    kernels, n = Emulated(spec("onebit")), 100
    good = compll.Reference(spec("onebit")).encode(np.ones(n, np.float32))
    bad = good.copy()
    bad[8] ^= 1
    for row in (0, 31, 63):
        rows = [good] * 64
        rows[row] = bad
        _, report = kernels.decode(rows, n)
        assert report == row << 40 | BAD_HASH


def test_more_rows_than_a_report_can_name_are_refused():
    """Nothing is read of them."""
    kernels, n = Emulated(spec("onebit")), 9
    report, out = np.zeros(1, np.uint64), np.zeros(n, np.float32)
    scratch = np.zeros(int(kernels.codec.scratch_bytes(kernels.values, n)), np.uint8)
    pointers = (ctypes.c_void_p * 1)()
    status = kernels.codec.decode(
        *(kernels.values, pointers, kernels.codec.wire_bytes(kernels.values, n), 2**23 + 1),
        *(out.ctypes.data, n, 0, report.ctypes.data, scratch.ctypes.data, scratch.size, None),
    )
    assert status == BAD_ARGUMENT
