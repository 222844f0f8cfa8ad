# SPDX-License-Identifier: Apache-2.0
"""Sessions whose rounds close without some children, without sockets, by a clock tests move."""

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.eventually import eventually
from tf_hips import log
from tf_hips.errors import PeerError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.disk.durable import Keeper
from tf_hips.ps.rounds import gather
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.session.members import Caller, Terms
from tf_hips.ps.session.session import Session
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.quorum import Quorum
from tf_hips.ps.transport import wire

SITES = ("a", "b", "c")
WORKERS = (1, 2, 3)
SHAPES = [[3, 5], [], [70], [9]]
MODEL = Model.from_json(SHAPES)
PATIENCE_S = 10.0
Floats = npt.NDArray[np.float32]


class ManualClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        return self._now

    def after(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        entry = (self._now + seconds, action)
        with self._lock:
            self._due.append(entry)

        def cancel() -> None:
            with self._lock:
                if entry in self._due:
                    self._due.remove(entry)

        return cancel

    def advance(self, seconds: float) -> None:
        """Moves on, and calls what is due, the earliest first."""
        end = self._now + seconds
        while True:
            with self._lock:
                due = [entry for entry in self._due if entry[0] <= end]
                if not due:
                    break
                entry = min(due, key=lambda one: one[0])
                self._due.remove(entry)
            self._now = max(self._now, entry[0])
            entry[1]()
        self._now = end


class Run:
    """One session of some children, and what they call; nothing here waits."""

    def __init__(
        self,
        quorum: Quorum | None,
        *,
        base: Path | None = None,
        up: str = "fp32",
        down: str = "fp32",
        rule: str | None = None,
        past_bytes: int = 1 << 20,
        lost_after_s: float = 60.0,
        clock: ManualClock | None = None,
        site: str | None = None,
        sites: Sequence[str] | None = None,
    ) -> None:
        self.sites = SITES if sites is None else tuple(sites)
        self.workers = WORKERS if sites is None else (1,) * len(sites)
        self.up, self.down, self.rule = up, down, rule
        self.clock = clock if clock is not None else ManualClock()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.processes = {child: f"p{child}" for child in range(len(self.sites))}
        self.base = base
        terms = Terms(
            self.sites,
            None,
            None,
            1 << 30,
            lost_after_s=lost_after_s,
            past_bytes=past_bytes,
            quorum=quorum,
            site=site,
        )
        self.keeper: Keeper | None = None
        if base is None:
            self.session = Session(terms, clock=self.clock, tell=self._tell)
            return
        self.log = log.EventLog(base / "events", run="job", role="server", site="x", rank=0)
        self.keeper = Keeper(str(base / "state"), "job", terms, self.log, self.clock)
        try:
            restored = self.keeper.restore()
        except BaseException:
            self.keeper.close()
            raise
        self.is_restored = restored is not None
        self.session = restored or self.keeper.begin()
        if self.session._closing is not None:
            self.session._closing._tell = self.session._closing._below._tell = self._tell

    def _tell(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    def told(self, name: str) -> list[dict[str, Any]]:
        """The events of one name."""
        return [fields for event, fields in self.events if event == name]

    def close(self) -> None:
        self.session._presence.stop()
        if self.session._closing is not None:
            self.session._closing.stop()
        if self.keeper is not None:
            self.keeper.close()
            self.log.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def killed(self, base: Path) -> Path:
        """A copy of what a server that is killed now would leave."""
        assert self.base is not None
        recorder: Any = self.session._recorder
        assert recorder.settle() is None
        if recorder._writer is not None:  # it deletes journals
            recorder._writer.join(PATIENCE_S)
        shutil.copytree(self.base / "state", base / "state")
        return base

    def caller(self, child: int, patience_s: float = PATIENCE_S) -> Caller:
        return Caller(child, self.processes[child], patience_s)

    def begin(self) -> "Run":
        """All children join and agree on the model."""
        children = range(len(self.sites))
        threads = [threading.Thread(target=self.join, args=(child,)) for child in children]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        for child in children:
            self.session.agree_model(self.caller(child), SHAPES)
        return self

    def join(self, child: int) -> dict[str, Any]:
        return self.session.join(
            self.caller(child), self.workers[child], self.up, self.down, 7, self.rule
        )

    def deliver(
        self, child: int, number: int, *, chunks: Sequence[int] | None = None, weight: Any = None
    ) -> Store:
        """A call of a child for a round; it sends its packets, or those of `chunks`."""
        self._await_snapshot()
        store: Any = self.session.begin_round(self.caller(child), number, weight)
        for chunk in range(len(MODEL.chunks)) if chunks is None else chunks:
            if store.add(number, child, [(chunk, packet_of(self.up, child, number, chunk))]):
                self.session.goes_on(child)
        return store

    def _await_snapshot(self) -> None:
        """Waits until merges are not held back."""
        store: Any = self.session.store
        eventually(
            lambda: store is None or not store._is_held, PATIENCE_S, changed=self.session.changed
        )

    def results(self, child: int, number: int) -> list[bytes] | None:
        """What a child gets of a round, all of it; None: it would wait."""
        store: Any = self.session.begin_round(self.caller(child), number)
        self._await_snapshot()
        assert self.session._recorder.settle() is None
        news: list[Any] = []
        after = 0
        while after < len(MODEL.chunks):
            try:
                after, more = self.session.wait_results(
                    self.caller(child, 0.0), store, number, after, lambda: False, 1 << 30
                )
            except PeerError as error:
                assert "Waited" in str(error), error
                return None
            news += more
        return [packet.tobytes() for _, packet in sorted(news, key=lambda one: one[0])]

    def gather(self, child: int, number: int, payload: bytes, label: str = "x") -> Any:
        """What a child gets of a gather, by leaf; None: it would wait."""
        upload = self.session.begin_gather(self.caller(child), number)
        for message in wire.bundle([(0, gather.to_packet(label, payload))]):
            upload.feed(message)
        try:
            told = self.session.wait_gather(self.caller(child, 0.0), number, upload)
        except PeerError as error:
            assert "Waited" in str(error), error
            return None
        assert told is not None
        found = {leaf: bytes(one) for leaf, one in told}
        absent = gather.from_bits(found.get(len(SITES), b""), len(SITES))
        return [None if gone else found.get(leaf, b"") for leaf, gone in enumerate(absent)]

    def rounds(self, first: int, last: int, children: Sequence[int] = (0, 1, 2)) -> None:
        """Rounds in which all of `children` come at once."""
        for number in range(first, last + 1):
            for child in children:
                self.deliver(child, number)


def gradient(child: int, number: int, chunk: int) -> Floats:
    generator = np.random.default_rng((child, number, chunk))
    return generator.standard_normal(MODEL.chunks[chunk].size, np.float32)


def packet_of(text: str, child: int, number: int, chunk: int) -> npt.NDArray[np.uint8]:
    """Children have no residual here: what they send is a function of who, when and what."""
    codec = compressors.parse(text).at(number).codec
    return native.encode(codec, gradient(child, number, chunk), native.Key(child, number, 0))


def decoded(text: str, packets: Sequence[bytes]) -> list[Floats]:
    codec = compressors.parse(text).codec
    pairs = zip(packets, MODEL.chunks, strict=True)
    return [native.decode(codec, packet, chunk.size) for packet, chunk in pairs]


def oracle_sum(
    text: str, number: int, counted: Sequence[int], late: Sequence[tuple[int, int]]
) -> list[Floats]:
    """The sum of a round in NumPy: children in order, late ones by (child, round), one factor."""
    compressor = compressors.parse(text)
    sums = []
    for chunk, where in enumerate(MODEL.chunks):
        total = np.zeros(where.size, np.float32)
        for child, made in [*((one, number) for one in sorted(counted)), *sorted(late)]:
            packet = packet_of(text, child, made, chunk)
            total += native.decode(compressor.at(made).codec, packet, where.size)
        present = sum(WORKERS[child] for child in [*counted, *(child for child, _ in late)])
        if present != sum(WORKERS):
            total *= np.float32(sum(WORKERS) / present)
        sums.append(total)
    return sums


def oracle_mean(
    number: int, weights: Mapping[int, float], late: Mapping[tuple[int, int], float]
) -> list[Floats]:
    """The weighted mean of a round, in float64."""
    parts = {(child, number): weight for child, weight in weights.items()} | dict(late)
    return [
        (
            sum(w * gradient(*key, chunk).astype(np.float64) for key, w in parts.items())
            / sum(parts.values())
        ).astype(np.float32)
        for chunk in range(len(MODEL.chunks))
    ]
