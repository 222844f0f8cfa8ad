# SPDX-License-Identifier: Apache-2.0
"""A session that is kept in a folder, without sockets, and calls of its two children."""

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tf_hips import log
from tf_hips.errors import PeerError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.ps.disk.durable import Keeper
from tf_hips.ps.disk.file_format import Reader
from tf_hips.ps.rounds import gather
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.session.members import Caller, Terms
from tf_hips.ps.session.session import Session
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Kind, from_payload
from tf_hips.ps.transport import wire

PATIENCE_S = 10.0
SITES = ("a", "b")
SHAPES = [[3, 5], [], [70], [9]]
MODEL = Model.from_json(SHAPES)
FEEDBACK = "error_feedback(onebit)"
NOISE = "error_feedback(terngrad(bitwidth=2))"
TERMS = Terms(SITES, None, None, 1 << 30, lost_after_s=60.0)
Delivery = tuple[int, int, int]


class Served:
    """A session kept in a folder, as a server would hold it, and calls of its children."""

    def __init__(
        self,
        base: Path,
        *,
        texts: tuple[str, str] = (FEEDBACK, FEEDBACK),
        rule: str | None = None,
    ) -> None:
        self.base = base
        self.texts = texts
        self.rule = rule
        self.processes: dict[int, str] = {}  # of children that have come back
        self.events = log.EventLog(base / "events", run="job", role="server", site="x", rank=0)
        self.keeper = Keeper(str(base / "state"), "job", TERMS, self.events)
        try:
            restored = self.keeper.restore()
        except BaseException:
            self.keeper.close()
            raise
        self.is_restored = restored is not None
        self.session: Session = restored or self.keeper.begin()

    def close(self) -> None:
        self.session._presence.stop()
        self.keeper.close()
        self.events.close()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def killed(self, base: Path) -> Path:
        """A copy of what a server that is killed now would leave."""
        assert self.session._recorder.settle() is None
        shutil.copytree(self.base / "state", base / "state")
        return base

    def caller(self, child: int, process: str | None = None) -> Caller:
        return Caller(child, process or self.processes.get(child, f"p{child}"), PATIENCE_S)

    def join(self) -> list[dict[str, Any]]:
        answers: list[Any] = [None] * len(SITES)

        def one(child: int) -> None:
            answers[child] = self.session.join(self.caller(child), 2, *self.texts, 7, self.rule)

        threads = [threading.Thread(target=one, args=(child,)) for child in range(len(SITES))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return answers

    def agree(self) -> None:
        for child in range(len(SITES)):
            self.session.agree_model(self.caller(child), SHAPES)

    def begin(self, number: int) -> Store:
        return self.session.begin_round(self.caller(0), number)

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Each child begins the rounds it delivers in, and delivers what it says."""
        for number, child, chunk in deliveries:
            store = self.session.begin_round(self.caller(child), number)
            store.add(number, child, [(chunk, packet_of(self.texts[0], number, child, chunk))])

    def results(self, number: int) -> list[bytes]:
        """What a child gets that waits for the whole round."""
        store = self.session.store
        assert store is not None
        news: list[Any] = []
        after = 0
        while after < len(MODEL.chunks):
            after, more = self.session.wait_results(
                self.caller(0), store, number, after, lambda: False, 1 << 30
            )
            news += more
        return [packet.tobytes() for _, packet in sorted(news, key=lambda one: one[0])]

    def train(self, first: int, last: int) -> list[list[bytes]]:
        """Rounds `first` to `last`, each after the results of the one before; all results."""
        merged = []
        for number in range(first, last + 1):
            self.deliver(rounds(number, number))
            merged.append(self.results(number))
        return merged

    def gather(self, number: int, child: int, payload: bytes, *, wait: bool) -> list[bytes]:
        caller = self.caller(child)
        upload = self.session.begin_gather(caller, number)
        for message in wire.bundle([(0, gather.to_packet("x", payload))]):
            upload.feed(message)
        if not wait:
            caller.patience_s = 0.0
            with pytest.raises(PeerError, match="have not sent their values"):
                self.session.wait_gather(caller, number, upload)
            return []
        return [bytes(one) for _, one in self.session.wait_gather(caller, number, upload)]


def packet_of(text: str, number: int, child: int, chunk: int) -> npt.NDArray[np.uint8]:
    """Children have no residual here: what they send is a function of who, when and what."""
    values = np.random.default_rng((number, child, chunk)).standard_normal(
        MODEL.chunks[chunk].size, np.float32
    )
    return native.encode(compressors.parse(text).codec, values, native.Key(0, 0, 0))


def rounds(first: int, last: int) -> list[Delivery]:
    """The deliveries of whole rounds; the children take turns."""
    return [
        (number, child, chunk)
        for number in range(first, last + 1)
        for chunk in range(len(MODEL.chunks))
        for child in range(len(SITES))
    ]


def undisturbed(last: int, texts: tuple[str, str], rule: str = "sum") -> list[list[bytes]]:
    """Results of rounds 0 to `last` of a store that nobody records."""
    updates = Updates([chunk.size for chunk in MODEL.chunks], rules.parse(rule))
    store = Store(MODEL, SITES, *map(compressors.parse, texts), 7, updates=updates)
    merged = []
    for number in range(last + 1):
        store.begin(number)
        for _, child, chunk in rounds(number, number):
            store.add(number, child, [(chunk, packet_of(texts[0], number, child, chunk))])
        results = sorted(store.results(number, 0)[1], key=lambda one: one[0])
        merged.append([packet.tobytes() for _, packet in results])
    return merged


def accepted(base: Path) -> list[tuple[Kind, dict[str, Any]]]:
    """What the journals in a folder say, snapshots left out."""
    found = []
    for path in sorted((base / "state" / "job").glob("journal-*")):
        reader = Reader(path)
        found += [(Kind(kind), from_payload(body)[0]) for kind, body in reader.records()]
        reader.close()
    return found
