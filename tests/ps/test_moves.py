# SPDX-License-Identifier: Apache-2.0
"""What buys time for those who wait: bytes that are new, and come at a least rate; no others."""

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from tests.ps.parties import parties, raw_channel, raw_exchange, serving, train_all
from tests.ps.test_restart import Later
from tests.support.certs import Certificates
from tf_hips.errors import PeerError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.session.moves import BACKUP, LEAST_BYTES_PER_S, ROUND, Moves
from tf_hips.ps.transport import wire

pytestmark = pytest.mark.heavy  # servers, and children that wait

PATIENCE_S = 600.0
STEP_BYTES = LEAST_BYTES_PER_S * PATIENCE_S
CHUNK = 1 << 22
FP32 = compressors.parse("fp32").codec


def longest_pause_s(bytes_per_s: float, num_bytes: int, step_bytes: float, lost_at: float) -> float:
    """Between two times at which a child that sends one packet after the other buys time.

    Args:
        bytes_per_s: of its link.
        num_bytes: of its part of a round.
        step_bytes: as of `Moves.brought`.
        lost_at: seconds after which its connection breaks, and a packet begins anew.
    """
    moves, began, at, pauses = Moves(), 0.0, 0.0, []
    sizes = [CHUNK] * (num_bytes // CHUNK) + [num_bytes % CHUNK]
    left = list(enumerate(bytes(size) for size in sizes))
    while left:
        assembler = wire.Assembler(sizes)
        for message in wire.bundle(left):
            arrives = at + len(message) / bytes_per_s
            if at < lost_at < arrives:
                at = lost_at
                break
            at = arrives
            packets = assembler.feed(message)
            left = left[len(packets) :]
            before = moves.count
            pieces = [(chunk, len(packet)) for chunk, packet in packets]
            moves.brought(0, (3, 0), pieces + assembler.begun, step_bytes)
            if moves.count > before:
                pauses.append(at - began)
                began = at
    return max([*pauses, at - began])


@pytest.mark.parametrize(
    ("bytes_per_s", "shards", "patience_s"),
    [(7000, 1, 600), (2800, 1, 600), (2000, 6, 600), (19_000, 1, 60)],
)
def test_a_slow_link_is_given_as_long_as_it_takes(
    bytes_per_s: float, shards: int, patience_s: float
) -> None:
    """A modem; those near the least rate, to each of six servers, and of a short time-out."""
    step_bytes = LEAST_BYTES_PER_S * patience_s / shards
    # Nothing is seen of a message before it is whole.
    least = (step_bytes + wire.MESSAGE_BYTES) / patience_s
    assert least < bytes_per_s
    assert longest_pause_s(bytes_per_s, 10_000_000, step_bytes, 0) < patience_s


@pytest.mark.parametrize("lost_at", range(50, 1000, 50))
def test_a_broken_connection_costs_a_packet_and_a_message(lost_at: float) -> None:
    """What had come of them when the connection broke comes once more, and is no progress."""
    bytes_per_s = (STEP_BYTES + 2 * wire.MESSAGE_BYTES + CHUNK) / PATIENCE_S
    assert longest_pause_s(1.01 * bytes_per_s, 10_000_000, STEP_BYTES, lost_at) < PATIENCE_S


def test_a_byte_now_and_then_buys_time_once() -> None:
    moves = Moves()
    for second in range(1, 5000):
        moves.brought(0, (3, 0), [(0, second)], STEP_BYTES)
    assert moves.count == 1


def test_what_comes_again_buys_nothing() -> None:
    moves = Moves()
    for chunk in range(3):
        moves.brought(0, (3, 0), [(chunk, 10)], 10.0)
    assert moves.count == 3
    moves.brought(0, (3, 0), [(0, 10), (1, 7)], 10.0)  # again, or over another connection
    moves.brought(0, (2, 0), [(0, 10)], 10.0)  # of a round before
    assert moves.count == 3
    moves.brought(1, (3, 0), [(0, 1)], 10.0)
    moves.brought(0, (3, 1), [(0, 10)], 10.0)  # the round was refused: all is delivered anew
    moves.brought(0, (4, 0), [(0, 10)], 10.0)
    assert moves.count == 6


def test_what_is_done_again_buys_time_once_for_each_process_that_has_come_back() -> None:
    moves = Moves()

    def counts(process: int, numbers: Iterable[int], newest: int = 9) -> int:
        before = moves.count
        for number in numbers:
            moves.done_again(0, ROUND, process, number, newest)
        return moves.count - before

    assert counts(0, range(5)) == 0  # it has never been away
    assert counts(1, range(5)) == 5
    assert counts(1, range(5)) == 0
    assert counts(1, range(7)) == 2
    assert counts(2, range(7)) == 7  # killed once more
    assert counts(1, range(9)) == 0
    assert [counts(process, range(3)) for process in range(3, 11)] == [3] * 6 + [0] * 2
    assert counts(11, range(3), newest=10) == 3  # the others have gone on
    moves.done_again(0, BACKUP, 11, 0, 10)
    assert moves.count == 36


@pytest.mark.parametrize("what", ["repeat", "drip", "past"])
def test_a_child_that_brings_nothing_new_is_named(certificates: Certificates, what: str) -> None:
    """It goes on for as long as the others wait; they wait as long as for a silent one."""
    is_over, is_through = threading.Event(), threading.Event()

    def now_and_then() -> Iterator[int]:
        for count in range(300):  # many times as long as a round may stand still
            if is_over.wait(0.05):
                return
            yield count
        is_through.set()

    with (
        serving(certificates, round_timeout_s=1.0) as server,
        parties(server, certificates, compression="fp32") as (a, b),
        raw_channel(server.address, certificates.party("b")) as channel,
    ):
        train_all((a, b), 0, 4)
        packet = native.encode(FP32, np.ones(72, np.float32), native.Key(1, 5, 0))

        def lie() -> None:
            if what == "repeat":
                message = b"".join(wire.bundle([(0, packet)]))
                raw_exchange(channel, b.call(5), (message for _ in now_and_then()))
            elif what == "drip":
                size = len(packet)
                frames = (wire.HEADER.pack(0, size, at, 1) + b"x" for at in now_and_then())
                raw_exchange(channel, b.call(5), frames)
            else:
                for _ in now_and_then():
                    raw_exchange(channel, b.call(0), [])

        lying = Later(lie)
        with pytest.raises(PeerError, match=r"have not delivered their packets: site `b` \("):
            a.train(5, 5)
        assert not is_through.is_set()
        is_over.set()
        lying.result()
