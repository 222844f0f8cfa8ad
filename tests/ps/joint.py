# SPDX-License-Identifier: Apache-2.0
"""Shards that rule on rounds together, without sockets: reports and verdicts are passed by hand."""

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ps.quorums import PATIENCE_S, packet_of
from tests.support.eventually import eventually
from tf_hips import log
from tf_hips.ps.disk.durable import Keeper
from tf_hips.ps.robust.joint import JointStore
from tf_hips.ps.rules.joint import Report, Verdict
from tf_hips.ps.session.members import Caller, Terms
from tf_hips.ps.session.session import Session
from tf_hips.ps.terms.assignment import Shard
from tf_hips.ps.terms.model import Model

SITES = ("a", "b", "c", "d", "e")
SHAPES = [[3, 5], [], [70], [9]]
MODEL = Model.from_json(SHAPES)


def bring(stores: Sequence[JointStore], number: int, shards: Sequence[int]) -> None:
    """Reports of `shards`, as they travel, to shard 0."""
    lead = stores[0]
    for index in shards:
        payload = stores[index].report().to_bytes()
        assert len(payload) <= Report.limit(lead.model, lead.num_children)
        lead.take(number, Report.from_bytes(payload, lead.model, lead.num_children))


def tell(stores: Sequence[JointStore], number: int, shards: Sequence[int]) -> Verdict:
    """The verdict of shard 0, as it travels, to `shards`."""
    lead = stores[0]
    found = lead.verdict(number)
    assert found is not None
    payload = found.to_bytes()
    assert len(payload) <= Verdict.limit(lead.num_children)
    for index in shards:
        stores[index].rule(number, Verdict.from_bytes(payload, lead.num_children))
    return found


def rule_on(stores: Sequence[JointStore], number: int) -> Verdict:
    """A round that is complete at all shards, ruled on by all."""
    with_chunks = [index for index, store in enumerate(stores) if store.chunks]
    bring(stores, number, with_chunks)
    stores[0].rule(number, stores[0].judge())
    return tell(stores, number, with_chunks[1:])


def merged(stores: Sequence[JointStore], number: int) -> list[bytes]:
    """The results of a round, by chunk."""
    found = [pair for store in stores for pair in store.results(number, 0)[1]]
    return [packet.tobytes() for _, packet in sorted(found, key=lambda pair: pair[0])]


class Shards:
    """The sessions of one run, one for each shard, kept in folders, and calls of five children."""

    def __init__(self, base: Path, count: int, rule: str, up: str, down: str) -> None:
        self.base, self.count, self.rule = base, count, rule
        self.texts = up, down
        self._num_kills = 0
        self._kept: dict[int, tuple[Keeper, log.EventLog]] = {}
        self.sessions: dict[int, Session] = {}
        for index in range(count):
            self._open(index, base / f"shard{index}")
        for index in range(count):
            threads = [
                threading.Thread(target=self._join, args=(index, child))
                for child in range(len(SITES))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
            for child in range(len(SITES)):
                self.sessions[index].agree_model(self._caller(child), SHAPES)

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *_: object) -> None:
        for index in range(self.count):
            self._close(index)

    @property
    def stores(self) -> list[JointStore]:
        found = [self.sessions[index].store for index in range(self.count)]
        assert all(isinstance(one, JointStore) for one in found)
        return found  # type: ignore[return-value]

    def deliver(
        self,
        number: int,
        shard: int,
        children: Sequence[int] = range(len(SITES)),
        weights: Mapping[int, float] | None = None,
    ) -> None:
        """Children send all of a round to one shard."""
        session = self.sessions[shard]
        for child in children:
            weight = (weights or {}).get(child)
            store: Any = session.begin_round(self._caller(child), number, weight)
            eventually(lambda store=store: not store._is_held, PATIENCE_S, changed=session.changed)
            for chunk in store.chunks:
                packet = packet_of(self.texts[0], child, number, chunk)
                store.add(number, child, [(chunk, packet)])
        session.settle()

    def results(self, number: int) -> list[bytes]:
        """What children get of a round."""
        for session in self.sessions.values():
            session.settle()
        return merged(self.stores, number)

    def train(self, first: int, last: int) -> list[list[bytes]]:
        """Rounds that nothing disturbs."""
        return [self.round(number) for number in range(first, last + 1)]

    def round(self, number: int) -> list[bytes]:
        for index in range(self.count):
            self.deliver(number, index)
        bring(self.stores, number, range(self.count))
        self.stores[0].rule(number, self.stores[0].judge())
        self.sessions[0].settle()
        tell(self.stores, number, range(1, self.count))
        return self.results(number)

    def kill(self, index: int) -> None:
        """One shard goes on as another process that finds what this one has kept."""
        recorder: Any = self.sessions[index]._recorder
        assert recorder.settle() is None
        if recorder._writer is not None:  # it deletes journals
            recorder._writer.join(PATIENCE_S)
        self._num_kills += 1
        after = self.base / f"after{self._num_kills}"
        shutil.copytree(self._folder(index) / "state", after / "state")
        self._close(index)
        self._open(index, after)

    def _folder(self, index: int) -> Path:
        return Path(self._kept[index][0]._base).parent

    def _open(self, index: int, folder: Path) -> None:
        terms = Terms(
            SITES,
            None,
            None,
            1 << 30,
            lost_after_s=60.0,
            shard=Shard(index, self.count),
            is_led=True,
        )
        events = log.EventLog(folder / "events", run="job", role="server", site="x", rank=index)
        keeper = Keeper(str(folder / "state"), "job", terms, events)
        self._kept[index] = keeper, events
        self.sessions[index] = keeper.restore() or keeper.begin()

    def _close(self, index: int) -> None:
        keeper, events = self._kept[index]
        self.sessions[index]._presence.stop()
        keeper.close()
        events.close()

    def _caller(self, child: int) -> Caller:
        return Caller(child, f"p{child}", PATIENCE_S)

    def _join(self, index: int, child: int) -> None:
        self.sessions[index].join(self._caller(child), 2, *self.texts, 7, self.rule)


def mutations(payload: bytes) -> Iterator[bytes]:
    """Bytes that are not what they were: cut, longer, or with one byte another."""
    yield payload + b"\0"
    for end in range(0, len(payload), 7):
        yield payload[:end]
    for at in range(0, len(payload), 11):
        yield payload[:at] + bytes((payload[at] ^ 0x55,)) + payload[at + 1 :]
