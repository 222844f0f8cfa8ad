# SPDX-License-Identifier: Apache-2.0
"""Servers that share a model, as processes: killed, and started again or never."""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ps.parties import SHAPES, SITES, Party, expected_rounds, together, train_all
from tests.ps.test_restart import Later, ServerProcess
from tests.support.eventually import eventually
from tf_hips import log
from tf_hips.errors import PeerError
from tf_hips.ps.terms.assignment import Shard
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Kind

pytestmark = pytest.mark.heavy  # servers start in most of these


class ShardProcess(ServerProcess):
    """`tf-hips server --shard --state`, which can be killed and started again."""

    def __init__(self, base: Path, index: int, count: int) -> None:
        super().__init__(base)
        self.index = index
        self._shard = f"{index}/{count}"

    def command(self, *more: str) -> list[str]:
        return super().command("--shard", self._shard, *more)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[ShardProcess]]:
    made = [ShardProcess(tmp_path / str(index), index, 3) for index in range(3)]
    try:
        for one in made:
            one.start()
        yield made
    finally:
        for one in made:
            one.end()


def test_shards_killed_while_rounds_go_on(processes: list[ShardProcess]) -> None:
    address = ",".join(one.address for one in processes)
    a, b = (Party(address, site, None) for site in SITES)
    joining = Later(a.join)
    eventually(lambda: a.client._clients[1]._is_durable)  # it has its terms, and joins
    processes[1].restart()
    b.join()
    joining.result()
    last = 39
    training = [Later(lambda one=one: one.train(0, last)) for one in (a, b)]
    for number, victim in ((2, processes[1]), (12, processes[0]), (25, processes[2])):
        victim.wait_for(
            Kind.PACKET, lambda found, number=number: bool(found) and found[-1]["round"] >= number
        )
        victim.restart()
    merged = [one.result() for one in training]
    assert merged[0] == merged[1] == expected_rounds(last + 1)
    together(a.client.leave, b.client.leave)
    for one in processes:
        assert one.process is not None
        assert one.process.wait(20) == 0
        came = Counter(
            (found["round"], found["child"], found["chunk"]) for found in one.accepted(Kind.PACKET)
        )
        chunks = Shard(one.index, 3).chunks(Model(SHAPES))
        assert came == Counter(itertools.product(range(last + 1), range(2), chunks))
        events = log.read_events(one.logs)
        restored = [event["round"] for event in events if event["event"] == "restored"]
        assert len(restored) == 1
        assert 2 <= restored[0] < last


@pytest.mark.slow  # `make test-faults` does more of it
def test_shards_killed_while_they_make_snapshots(processes: list[ShardProcess]) -> None:
    """Of residuals and results of their own chunks; the first two make one in every round."""
    for one in processes[:2]:
        one.is_eager = True
        one.restart()
    address = ",".join(one.address for one in processes)
    a, b = (Party(address, site, None) for site in SITES)
    together(a.join, b.join)
    last = 39
    training = [Later(lambda one=one: one.train(0, last)) for one in (a, b)]

    def snapshots(one: ShardProcess) -> list[int]:
        events = log.read_events(one.logs)
        return [event["round"] for event in events if event["event"] == "snapshot"]

    for number, victim in ((3, processes[0]), (20, processes[1])):
        eventually(
            lambda number=number, victim=victim: max(snapshots(victim), default=-1) >= number
        )
        victim.restart()
    merged = [one.result() for one in training]
    assert merged[0] == merged[1] == expected_rounds(last + 1)
    together(a.client.leave, b.client.leave)
    for one in processes:
        assert one.process is not None
        assert one.process.wait(20) == 0


def test_leaving_is_heard_where_it_can_be(
    processes: list[ShardProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf_hips.ps.client.client._LEAVE_DURABLE_S", 0.5)
    address = ",".join(one.address for one in processes)
    a, b = (Party(address, site, None, deadline_s=0.5) for site in SITES)
    together(a.join, b.join)
    assert train_all((a, b), 0, 1) == expected_rounds(2)
    processes[1].kill()
    together(a.client.leave, b.client.leave)
    for one in (processes[0], processes[2]):
        assert one.process is not None
        assert one.process.wait(20) == 0


def test_a_dead_shard_ends_the_run_when_patience_is_over(
    processes: list[ShardProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it, the others are told, and nobody waits for what they would wait for."""
    address = ",".join(one.address for one in processes)
    a, b = (Party(address, site, None, deadline_s=0.5) for site in SITES)
    together(a.join, b.join)
    train_all((a, b), 0, 0)
    processes[2].kill()
    monkeypatch.setattr(a.client._clients[2], "wait_s", 1.0)
    with pytest.raises(PeerError, match=f"Exchange: Nothing listens at {processes[2].address}"):
        a.train(1, 1)
    monkeypatch.setattr("tf_hips.ps.client.client._LEAVE_DURABLE_S", 0.5)
    a.client.leave(f"server {processes[2].address} is gone")
    for one in processes[:2]:
        one.end()
        assert any("is gone" in line for line in one.lines)
    b.client.close()
