# SPDX-License-Identifier: Apache-2.0
"""Majorities of packets of onebit: beside decoded signs, and with packets of nothing."""

import numpy as np
import pytest

from tf_hips import robust
from tf_hips.errors import PacketError, ToleranceError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ops.compressor import CHUNK
from tf_hips.ps.rules.robust import Rows
from tf_hips.robust import attacks
from tf_hips.robust.votes import can_be_counted

ONEBIT = compressors.parse("onebit")
KEY = native.Key(0, 0, 0)


@pytest.mark.parametrize("voters", [1, 2, 3, 4, 5, 8, 15, 16, 33])
@pytest.mark.parametrize("n", [1, 63, 64, 1000])
def test_votes_are_those_of_signs(voters: int, n: int) -> None:
    values = np.random.default_rng((voters, n)).standard_normal((voters, n)).astype(np.float32)
    values[values == 0] = 1
    packets = [native.encode(ONEBIT, row, native.Key(0, 0, 0)) for row in values]
    found = robust.onebit_majority(packets, n)
    np.testing.assert_array_equal(found, np.sign(np.sign(values).sum(axis=0)))
    np.testing.assert_array_equal(found, robust.majority(f=0)(values))


def test_several_chunks() -> None:
    n = 2 * CHUNK + 77
    values = np.random.default_rng(1).standard_normal((3, n)).astype(np.float32)
    values[values == 0] = 1
    packets = [native.encode(ONEBIT, row, native.Key(0, 0, 0)) for row in values]
    np.testing.assert_array_equal(
        robust.onebit_majority(packets, n), np.sign(np.sign(values).sum(axis=0))
    )


def test_who_lies_about_the_scale_has_one_vote() -> None:
    values = np.random.default_rng(2).standard_normal((5, 200)).astype(np.float32)
    packets = [native.encode(ONEBIT, row, native.Key(0, 0, 0)) for row in values]
    honest = robust.onebit_majority(packets, 200)
    for factor in (1e30, -1.0, np.nan):
        packets[0] = attacks.lie_about_scale(ONEBIT, packets[0], 200, factor)
        np.testing.assert_array_equal(robust.onebit_majority(packets, 200), honest)


def test_what_is_no_packet_is_refused_and_its_sender_named() -> None:
    row = np.ones(200, np.float32)
    packet = native.encode(ONEBIT, row, native.Key(0, 0, 0))
    wrong = (
        packet[:-1],
        np.append(packet, 0).astype(np.uint8),
        b"",
        native.encode(compressors.parse("fp16"), row, native.Key(0, 0, 0)),
        native.encode(ONEBIT, row[:199], native.Key(0, 0, 0)),
    )
    for one in wrong:
        with pytest.raises(PacketError, match="child 1: "):
            robust.onebit_majority([packet, one, packet], 200)
    with pytest.raises(ValueError, match="at least one child"):
        robust.onebit_majority([], 200)
    assert (
        robust.onebit_majority([native.encode(ONEBIT, row[:0], native.Key(0, 0, 0))], 0).size == 0
    )


def test_servers_count_signs_where_each_packet_has_some() -> None:
    def of(rows: object) -> list[np.ndarray]:
        return [native.encode(ONEBIT, np.asarray(row, np.float32), KEY) for row in rows]

    rule, n = robust.majority(f=1), 300
    generator = np.random.default_rng(4)
    values = generator.standard_normal((5, n)).astype(np.float32)
    silent = np.zeros((5, n), np.float32)  # of a layer that is not used, say
    one_sided = np.abs(values)
    for rows in (values, [*values[:3], *silent[:2]], silent, [*values[:4], one_sided[4]]):
        packets = of(rows)
        served = Rows(rule, ONEBIT, {})
        served.begin(n)
        for child, packet in enumerate(packets):
            served.add(child, packet)
        decoded = [native.decode(ONEBIT, packet, n) for packet in packets]
        np.testing.assert_array_equal(served.finish(), rule(decoded))
    assert can_be_counted(of(values), n)
    assert not can_be_counted(of([*values[:4], one_sided[4]]), n)
    assert not can_be_counted([attacks.lie_about_scale(ONEBIT, of(values)[0], n, -1.0)], n)
    assert not can_be_counted([native.encode(compressors.parse("fp32"), values[0], KEY)], n)
    served.begin(n)
    for child, packet in enumerate(of(values[:2])):
        served.add(child, packet)
    with pytest.raises(ToleranceError, match="majority needs"):
        served.finish()  # counted packets need as many voters
