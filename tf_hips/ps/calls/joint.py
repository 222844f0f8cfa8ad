# SPDX-License-Identifier: Apache-2.0
"""Shards that rule on rounds together: a call from each to shard 0, the lead, in every round.

    shard i   round complete -> measured, durable -> Measure(report) ......... verdict -> merged
    shard 0   round complete -> measured --------> all reports -> verdict, durable -> merged

A report leaves a shard when the packets that were measured are durable there, and a verdict leaves
shard 0 when it is: whoever is killed and restored has measured, or ruled, what others know of.

A call has time as long as bytes of the round come in at the lead. Then whoever knows most gives up
first: the lead, which names the shards that it waits for, then a shard that has no answer of the
lead, then the children.
"""

import abc
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator

import grpc

from tf_hips.config import Uplink
from tf_hips.errors import (
    ENDED,
    NonFiniteError,
    PeerError,
    ProtocolError,
    TfHipsError,
    ToleranceError,
    reason_of_end,
)
from tf_hips.ps.client.link import Link
from tf_hips.ps.client.patience import Patience
from tf_hips.ps.robust.joint import LEAD, JointStore
from tf_hips.ps.rules.joint import Report, Verdict
from tf_hips.ps.security import tls
from tf_hips.ps.session.members import Caller
from tf_hips.ps.session.moves import TELLS_AFTER_S
from tf_hips.ps.session.session import Session
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.terms.assignment import Shard
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.sockets import split_address

MEASURE = "Measure"
"""The call of a shard that brings its measures of a round, and gets the verdict."""

MOVING = "Moving"
"""The call of a shard that says that bytes of a round come in there, while others wait for it; by
the first one it finds out whether that is the lead."""

# Of `round_timeout_s`, after which children give up: how long the lead waits for other shards, and
# how long these wait for the lead, while nothing moves.
_LEAD_SHARE, _SHARD_SHARE = 0.8, 0.9


class _Judge(abc.ABC):
    """What the shards have in common: a thread that does what is due in one session."""

    def __init__(self, config: ServerConfig, session: Session) -> None:
        """Nothing is due."""
        self._config = config
        self._session = session
        self._shard = Shard.from_numbers(config.shard)
        self._is_closed = False
        self._thread = threading.Thread(target=self._drive, name="tf_hips-judge", daemon=True)

    def start(self) -> None:
        """Begins to do what is due."""
        self._thread.start()

    def close(self) -> None:
        """Does nothing more."""
        with self._session.changed:
            self._is_closed = True
            self._session.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _drive(self) -> None:
        try:
            while (store := self._next()) is not None:
                self._rule(store)
        except Exception as error:
            if self._is_done:
                return  # what was going on is cut off, and nobody waits for it
            if not isinstance(error, TfHipsError):
                self._session.end(f"{self._name} has failed: {error!r}")
                raise
            self._end(error)

    def _next(self) -> JointStore | None:
        """The rounds, when one of them is complete; None: nothing is to be done any more."""
        return self._wait(lambda store: store.unruled is not None)

    @abc.abstractmethod
    def _rule(self, store: JointStore) -> None:
        """Brings about the verdict on the round that is complete, and merges by it."""

    def _wait(
        self, is_so: Callable[[JointStore], bool], limit_s: float | None = None
    ) -> JointStore | None:
        """The rounds, when that is so of them; None: nothing is to be done, or time is over."""
        session = self._session

        def is_there() -> bool:
            store = self._store
            return store is not None and is_so(store)

        with session.changed:
            session.changed.wait_for(lambda: self._is_done or is_there(), limit_s)
            return self._store if not self._is_done and is_there() else None

    def _end(self, error: TfHipsError) -> None:
        reason = reason_of_end(str(error))
        kept = (ProtocolError, NonFiniteError, ToleranceError)
        kind = type(error) if isinstance(error, kept) else PeerError
        self._session.end(f"{self._name}: {error}" if reason is None else reason, kind)

    @property
    def _name(self) -> str:
        """Such as `Shard 1 of 3`."""
        return str(self._shard).capitalize()

    @property
    def _is_done(self) -> bool:
        """Whether nothing is to be done any more, or each shard merges by itself."""
        store = self._session.store
        is_needless = store is not None and not isinstance(store, JointStore)
        return self._is_closed or is_needless or self._session.is_over

    @property
    def _store(self) -> JointStore | None:
        """The rounds; None: there are none yet, or each shard merges them by itself."""
        store = self._session.store
        return store if isinstance(store, JointStore) else None


class Lead(_Judge):
    """Rules on the rounds of one session, at shard 0."""

    def answer(
        self, number: int, messages: Iterable[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """The messages of an answer to `MEASURE`: the verdict, and before it signs of life.

        Args:
            number: the round.
            messages: of the call.
            context: of the call.

        Raises:
            ProtocolError: what came is no report, or one of another run or round.
            PeerError: the run has ended, or other shards have not measured the round in time.
        """
        store, session = self._store, self._session
        if store is None:
            raise ProtocolError(
                "The lead must have the round that it is asked for. Received: a call for round "
                f"{number} of a run that has not begun here, or whose rule each shard follows by "
                "itself. A lead that is started again needs the state of its run."
            )
        report = self._read(store, messages)
        if report.shard.index == LEAD:
            raise ProtocolError(f"A report must be of another shard. Received: {report.shard}")
        store.take(number, report)
        caller = Caller(-1, "", _LEAD_SHARE * self._config.round_timeout_s)
        if not context.add_callback(lambda: session.hang_up(caller)):
            caller.is_gone = True
        moved, began = session.moves.count, time.monotonic()
        while (verdict := self._await(store, number, caller)) is None:
            if caller.is_gone:
                return
            if session.moves.count != moved:
                moved, began = session.moves.count, time.monotonic()
                yield b""
            waited_s = time.monotonic() - began
            if waited_s > caller.patience_s:
                why = store.awaited() or f"it is not complete at {self._shard}"
                raise PeerError(f"Waited {waited_s:.0f} s in round {number}; {why}.")
        yield from wire.bundle([(0, verdict.to_bytes())])

    def note_moved(self) -> None:
        """Bytes of a round come in at another shard: who waits here waits on."""
        with self._session.changed:
            self._session.note_moved()
            self._session.changed.notify_all()

    def _rule(self, store: JointStore) -> None:
        number = store.unruled
        if number is None:
            return
        store.take(number, store.report())
        if self._wait(lambda store: not store.lacks(number)) is not None:
            store.rule(number, store.judge())

    def _read(self, store: JointStore, messages: Iterable[bytes]) -> Report:
        model, children = store.model, store.num_children
        try:
            payload = _joined(messages, Report.limit(model, children), "a report")
        except grpc.RpcError as error:
            raise PeerError("A shard was cut off while it sent its measures.") from error
        return Report.from_bytes(payload, model, children)

    def _await(self, store: JointStore, number: int, caller: Caller) -> Verdict | None:
        """The verdict on a round; None: it has not come for a moment, or the caller is gone."""
        session = self._session
        pause_s = min(TELLS_AFTER_S, caller.patience_s / 4)
        with session.changed:
            session.changed.wait_for(
                lambda: (
                    store.verdict(number) is not None or session.ended is not None or caller.is_gone
                ),
                pause_s,
            )
            verdict = store.verdict(number)
            if verdict is None and session.ended is not None:
                raise session.error(f"{ENDED}{session.ended}")
            return verdict


class Follower(_Judge):
    """Asks the lead for the verdicts on the rounds of one session, at the other shards."""

    def __init__(self, config: ServerConfig, session: Session, lead: str) -> None:
        """Nothing is connected.

        Args:
            config: of this server.
            session: whose rounds these are.
            lead: `host:port` of shard 0.

        Raises:
            ConfigError: the certificate cannot be read.
        """
        super().__init__(config, session)
        patience_s = _SHARD_SHARE * config.round_timeout_s
        uplink = Uplink(lead, f"shard-{self._shard.index}", config.tls, patience_s)
        credentials = tls.channel_credentials(config.tls) if config.tls is not None else None
        process = uuid.uuid4().hex[:8]
        self._patience_s = patience_s
        self._link = Link(uplink, split_address(lead), credentials, config.run, process)
        if session.store is not None:
            self._link.expect()  # a run goes on that has had a lead
        self._is_known = False  # whether the lead has answered
        # What is going on over the link ends with the session.
        self._closer = threading.Thread(
            target=self._close_link, name="tf_hips-judge-end", daemon=True
        )

    def start(self) -> None:
        """As of `_Judge`."""
        super().start()
        self._closer.start()

    def close(self) -> None:
        """As of `_Judge`."""
        super().close()
        if self._closer.is_alive():
            self._closer.join()

    def _next(self) -> JointStore | None:
        """As of `_Judge`; the lead hears now and then that a round is on its way."""
        if not self._is_known and self._wait(lambda store: True) is not None:
            with self._naming_lead("cannot be asked"):
                self._link.control(MOVING, b"", self._patience_s)
            self._is_known = True
        moves = self._session.moves
        while not self._is_done:
            moved = moves.count
            pause_s = min(TELLS_AFTER_S, self._patience_s / 4)
            store = self._wait(lambda store: store.unruled is not None, pause_s)
            if store is not None:
                return store
            if self._store is not None and moves.count != moved:
                # It is only for others' patience, and it is said again.
                with contextlib.suppress(grpc.RpcError, TfHipsError):
                    self._link.once(MOVING, b"", 0, pause_s)
        return None

    def _rule(self, store: JointStore) -> None:
        number = store.unruled
        if number is None:
            return
        report = store.report().to_bytes()
        self._session.settle()
        store.rule(number, self._ask(store, number, report))

    def _ask(self, store: JointStore, number: int, report: bytes) -> Verdict:
        def call(attempt: int, patience: Patience) -> Verdict:
            stream = self._link.stub("stream_stream", MEASURE, patience.left_s)(
                wire.bundle([(0, report)]), metadata=self._link.metadata(number, attempt)
            )
            with contextlib.ExitStack() as stack:
                stack.callback(stream.cancel)
                stack.enter_context(patience.bounding(stream))
                limit = Verdict.limit(store.num_children)
                payload = _joined(self._going_on(stream, patience), limit, "a verdict")
            return Verdict.from_bytes(payload, store.num_children)

        with self._naming_lead("has not ruled"):
            return self._link.persist(MEASURE, self._patience_s, call)

    @contextlib.contextmanager
    def _naming_lead(self, what: str) -> Iterator[None]:
        """An error of the connection says whose it is."""
        try:
            yield
        except PeerError as error:
            if reason_of_end(str(error)) is not None:
                raise
            raise PeerError(f"shard {LEAD}, the lead, {what}. {error}") from None

    def _going_on(self, messages: Iterable[bytes], patience: Patience) -> Iterator[bytes]:
        """The messages of the lead; children that wait here hear that others go on."""
        for message in messages:
            patience.renew()
            with self._session.changed:
                self._session.note_moved()
                self._session.changed.notify_all()
            yield message

    def _close_link(self) -> None:
        with self._session.changed:
            self._session.changed.wait_for(lambda: self._is_done)
        self._link.close()


Judge = Lead | Follower


def judge_of(config: ServerConfig, session: Session) -> Judge | None:
    """Who brings about verdicts at a server; None: it has all of the model, or knows no lead.

    Args:
        config: of the server.
        session: whose rounds are ruled on.

    Raises:
        ConfigError: the certificate cannot be read.
    """
    shard = Shard.from_numbers(config.shard)
    if shard.is_whole:
        return None
    if shard.index == LEAD:
        return Lead(config, session)
    return Follower(config, session, config.lead) if config.lead is not None else None


def _joined(messages: Iterable[bytes], limit: int, what: str) -> bytes:
    """The one packet that `messages` carry.

    Raises:
        ProtocolError: they carry something else.
    """
    assembler, found = wire.Assembler([limit]), b""
    for message in messages:
        for _, packet in assembler.feed(message):
            found = bytes(packet)
    assembler.finish()
    if not found:
        raise ProtocolError(f"A call of shards must bring {what}. Received: nothing")
    return found
