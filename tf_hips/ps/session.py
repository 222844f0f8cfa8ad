# SPDX-License-Identifier: Apache-2.0
"""One run as a server sees it: who has joined, which model, its rounds, who has left.

    join (all) -> agree_model (all) -> first synchronisation -> rounds -> leave (all)
                                       (child 0 up, the others down)

No gRPC here: `server` turns calls into these methods and their errors into status codes. All
waiting goes through `_wait`, which ends when the predicate holds, the run has ended, the caller is
gone, or its patience is over. Only `watch` waits longer: a child holds it open to show that it is
there, and to hear why the run has ended whatever it is doing.

Invariant: a call that is refused changes nothing, so the children that behave can go on.
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator

from tf_hips.errors import NonFiniteError, PeerError, ProtocolError
from tf_hips.ops import compressor as compressors
from tf_hips.ps import wire
from tf_hips.ps.model import Model, first_difference
from tf_hips.ps.presence import Presence
from tf_hips.ps.store import Packet, Store
from tf_hips.ps.weights import FirstWeights

SAME = "same"


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the server fixes before any child comes; None: what the first child brings."""

    parties: tuple[str, ...]
    compression: str | None
    downlink: str | None
    max_model_bytes: int
    lost_after_s: float = 120.0


@dataclasses.dataclass
class Caller:
    """One call in progress.

    Attributes:
        child: position of the site that calls.
        process: which process of that site calls.
        patience_s: seconds the call may wait while nothing comes that it waits for.
        is_gone: whether its other end has hung up.
    """

    child: int
    process: str
    patience_s: float
    is_gone: bool = False


@dataclasses.dataclass
class _Child:
    process: str
    workers: int
    compression: str
    downlink: str
    seed: int
    model: Model | None = None
    has_left: bool = False
    num_joining: int = 0  # Join calls that wait; one may be a lost connection's

    def terms(self) -> tuple[object, ...]:
        """What two joins of one child must have in common to be one."""
        return self.process, self.workers, self.compression, self.downlink, self.seed


class Session:
    """The state of one run. Thread-safe; one condition guards it and its store."""

    def __init__(self, terms: Terms) -> None:
        """A session that nobody has joined."""
        self.changed = threading.Condition()
        self.store: Store | None = None
        self.ended: str | None = None
        self.last_call = time.monotonic()
        self._terms = terms
        self._children: dict[int, _Child] = {}
        self._is_started = False
        self._presence = Presence(self.changed, terms.lost_after_s, self._lose)
        self._told: set[int] = set()
        self._weights = FirstWeights()
        self._waiting = 0

    @property
    def is_started(self) -> bool:
        """Whether all parties have joined."""
        return self._is_started

    @property
    def is_over(self) -> bool:
        """Whether the run has ended with a reason, or all children have left."""
        with self.changed:
            return self.ended is not None or self.has_emptied()

    def has_emptied(self) -> bool:
        """Whether every child has joined and left again."""
        with self.changed:
            return len(self._children) == len(self._terms.parties) and all(
                child.has_left for child in self._children.values()
            )

    def is_known_to_all(self) -> bool:
        """Whether every child has left, knows why the run has ended, or cannot be told."""
        with self.changed:
            return self.has_emptied() or (
                self.ended is not None
                and (
                    not self._is_started
                    or all(
                        one.has_left or child in self._told for child, one in self._children.items()
                    )
                )
            )

    def idle_s(self) -> float:
        """Seconds since the last call ended or began; 0 while one waits."""
        with self.changed:
            return 0.0 if self._waiting else time.monotonic() - self.last_call

    def hang_up(self, caller: Caller) -> None:
        """Notes that the other end of a call is gone."""
        with self.changed:
            caller.is_gone = True
            self.changed.notify_all()

    def end(self, reason: str) -> None:
        """Ends the run for all; the first reason stands."""
        with self.changed:
            if self.ended is None:
                self.ended = reason
            self._presence.stop()
            self.changed.notify_all()

    def join(
        self, caller: Caller, workers: int, compression: str, downlink: str, seed: int
    ) -> dict[str, object]:
        """Takes in a child and waits for the others; the same process may ask again.

        Returns:
            The fields of the child's `Welcome`.

        Raises:
            ProtocolError: it disagrees with the server or with those before it, or its site is in
                the run already.
            PeerError: the others did not come in time.
        """
        if not 1 <= workers <= 1 << 20:
            raise ProtocolError(f"`workers` must be from 1 to 2^20. Received: workers={workers}")
        if not -(1 << 63) <= seed < 1 << 64:
            raise ProtocolError(
                f"`seed` must have at most 64 bits. Received: seed={str(seed)[:40]}"
            )
        uplink = self._canonical("compression", compression)
        down = uplink if downlink == SAME else self._canonical("downlink", downlink)
        child = _Child(caller.process, workers, uplink, down, seed)
        with self.changed:
            self._check_running(caller)
            known = self._children.get(caller.child)
            if known is None or known.terms() != child.terms():
                if self._is_started:
                    raise self._second_process(caller)
                self._check_terms(caller.child, child)
                self._children[caller.child] = known = child
            if len(self._children) == len(self._terms.parties):
                self._start()
            self.changed.notify_all()
            known.num_joining += 1
            try:
                self._wait(
                    caller,
                    lambda: self._is_started or self._children.get(caller.child) is not known,
                    lambda: f"the parties {self._names(self._absent())} have not joined",
                )
            finally:
                known.num_joining -= 1
                is_known = self._children.get(caller.child) is known
                if is_known and not self._is_started and known.num_joining == 0:
                    # Nobody must wait for a party that has given up. One that has come again over
                    # another connection has not: the end of the first may be noticed late.
                    del self._children[caller.child]
            if not is_known:
                raise self._second_process(caller)
            return {
                "child": caller.child,
                "parties": list(self._terms.parties),
                "workers": [self._children[one].workers for one in sorted(self._children)],
                "compression": child.compression,
                "downlink": child.downlink,
                "seed": child.seed,
                "round": self.store.round if self.store is not None else 0,
            }

    def agree_model(self, caller: Caller, shapes: object) -> None:
        """Compares a child's model with that of the others.

        Raises:
            ProtocolError: it is larger than the server's limit, or differs from that of a child
                before.
        """
        model = Model.from_json(shapes)
        self._check_bytes("model's gradients", model.dense_bytes)
        with self.changed:
            child = self._joined(caller)
            if self.store is not None and child.model == model:
                return
            for position, other in self._children.items():
                if position == caller.child or other.model is None:
                    continue
                text = first_difference(other.model.shapes, model.shapes, "tensor")
                if text is not None:
                    raise ProtocolError(
                        f"All parties must train the same model. Site "
                        f"`{self._site(position)}` (there) and site "
                        f"`{self._site(caller.child)}` (here) differ: {text}"
                    )
            if self.store is not None:
                raise ProtocolError(
                    "The model cannot change: all parties have agreed on another one."
                )
            child.model = model
            if all(one.model is not None for one in self._children.values()):
                self.store = Store(
                    model,
                    self._terms.parties,
                    compressors.parse(child.compression),
                    compressors.parse(child.downlink),
                    child.seed,
                    changed=self.changed,
                )
            self.changed.notify_all()

    def begin_sync(self, caller: Caller, kinds: list[object], num_bytes: int) -> int:
        """Compares a child's description of its weights with that of child 0, once it is there.

        Args:
            caller: the call.
            kinds: for each weight its type and shape in one text.
            num_bytes: bytes of all weights.

        Returns:
            How many of the bytes the server holds.

        Raises:
            ProtocolError: the weights differ or are larger than the server's limit.
        """
        if not all(isinstance(kind, str) for kind in kinds):
            raise ProtocolError("`kinds` must hold texts.")
        weights = tuple(str(kind) for kind in kinds)
        self._check_bytes("model's weights", num_bytes)
        with self.changed:
            self._joined(caller)
            if caller.child == 0:
                self._weights.describe(weights, num_bytes)
                self.changed.notify_all()
                return self._weights.held
            self._wait(
                caller,
                lambda: self._weights.is_described,
                lambda: f"site `{self._site(0)}` has not begun to send the first weights",
            )
            text = self._weights.difference(weights, num_bytes)
            if text is not None:
                raise ProtocolError(
                    f"All parties must begin with the same weights. Site `{self._site(0)}` (there) "
                    f"and site `{self._site(caller.child)}` (here) differ: {text}"
                )
            return self._weights.held

    def upload(self, caller: Caller, position: int, data: wire.Buffer) -> int:
        """Takes bytes `position` ... of the weights from child 0; bytes it has are skipped.

        Returns:
            The position after them.

        Raises:
            ProtocolError: the call comes from another child, leaves a gap or goes beyond the end.
        """
        with self.changed:
            self._joined(caller)
            if caller.child != 0:
                raise ProtocolError(
                    f"Site `{self._site(0)}` sends the first weights. "
                    f"Received: weights of site `{self._site(caller.child)}`"
                )
            end = self._weights.take(position, data)
            self.changed.notify_all()
            return end

    def download(self, caller: Caller, position: int) -> Iterator[bytes]:
        """The weights of child 0 from byte `position`, in messages, as they come in."""
        weights = self._weights
        while True:
            with self.changed:
                self._joined(caller)
                if position > weights.num_bytes:
                    raise ProtocolError(
                        f"The weights have {weights.num_bytes} bytes. Received: byte {position}"
                    )
                if position == weights.num_bytes:
                    return
                self._wait(
                    caller,
                    functools.partial(weights.has_message, position),
                    lambda: (
                        f"site `{self._site(0)}` has sent {weights.held} of {weights.num_bytes} "
                        "bytes of the first weights"
                    ),
                    lambda: weights.held,
                )
                message = weights.message(position)
            yield message
            position += len(message)

    def begin_round(self, caller: Caller, number: int) -> Store:
        """The store, with round `number` ready for packets of the caller.

        Raises:
            ProtocolError: it is not the round's turn.
            PeerError: the other parties have not agreed on the model in time.
        """
        with self.changed:
            self._joined(caller)
            self._wait(
                caller,
                lambda: self.store is not None,
                lambda: (
                    "the parties "
                    f"{self._names({one for one in self._children if self._lacks_model(one)})} "
                    "have not sent their model"
                ),
            )
            if self.store is None:
                raise ProtocolError("The model is not agreed on.")
            self.store.begin(number)
            if number > self.store.first_round and self._weights.held:
                self._weights.forget()  # all have merged a round, so all have the weights
            return self.store

    def wait_results(
        self,
        caller: Caller,
        store: Store,
        number: int,
        after: int,
        stop: Callable[[], bool],
        refused: int,
    ) -> tuple[int, list[tuple[int, Packet]]]:
        """Waits for more than `after` merged chunks, and returns them as the store does.

        Args:
            caller: the call.
            store: the store of the run.
            number: the round.
            after: chunks that were returned before.
            stop: true when the caller's own packets have failed; nothing is returned then.
            refused: refusals the caller knows of; a new one is raised.

        Raises:
            PeerError: a child has left, or did not deliver in time.
            NonFiniteError: the sum of a chunk's packets was refused.
        """
        with self.changed:

            def is_ready() -> bool:
                if stop() or len(store.refusals(number)) > refused:
                    return True
                if store.results(number, after)[0] > after or store.is_merged(number):
                    return True
                gone = [site for site in store.missing(number) if self._has_left(site)]
                if gone:
                    raise PeerError(
                        f"Round {number} needs all parties; site `{gone[0]}` has left the "
                        f"run before it."
                    )
                return False

            self._wait(
                caller,
                is_ready,
                lambda: (
                    f"in round {number} these have not delivered their packets: "
                    + ", ".join(
                        f"site `{site}` ({count} of {len(store.model.chunks)} chunks came)"
                        for site, count in store.missing(number).items()
                    )
                ),
            )
            news = store.refusals(number)[refused:]
            if news and not stop():
                raise NonFiniteError(news[0])
            return store.results(number, after)

    def leave(self, caller: Caller, reason: str | None) -> None:
        """Notes that a child leaves; with a reason, before the others, it ends the run for all."""
        with self.changed:
            child = self._children.get(caller.child)
            if child is None:
                raise ProtocolError(f"Site `{self._site(caller.child)}` has not joined this run.")
            if child.process != caller.process:
                raise self._second_process(caller)
            child.has_left = True
            self.last_call = time.monotonic()
            self._presence.release(caller.child)
            if reason is not None:
                self.end(f"Site `{self._site(caller.child)}` left the run: {reason[:1000]}")
            self.changed.notify_all()

    def watch(self, caller: Caller) -> Iterator[str]:
        """Shows that a child is there, until it leaves or hangs up, or the run ends.

        Yields:
            Why the run has ended, if it has; the child counts as told when it asks for more.

        Raises:
            ProtocolError: the child is not in this run.
        """
        with self.changed:
            if self.ended is None:
                child = self._joined(caller)
                self._presence.arrive(caller.child, caller)
                self.changed.notify_all()
                try:
                    self.changed.wait_for(
                        lambda: self.ended is not None or child.has_left or caller.is_gone
                    )
                finally:
                    self._presence.depart(caller.child, caller)
                    self.changed.notify_all()
            reason = self.ended
        if reason is None:
            return
        try:
            yield reason
        finally:
            with self.changed:
                self._told.add(caller.child)
                self.changed.notify_all()

    def _wait(
        self,
        caller: Caller,
        is_ready: Callable[[], bool],
        missing: Callable[[], str],
        progress: Callable[[], int] = int,
    ) -> None:
        """Waits with the lock held until `is_ready()`; any change of `progress()` buys time."""
        began = time.monotonic()
        seen = progress()
        self._waiting += 1
        try:
            while True:
                self._check_running(caller)
                if is_ready():
                    return
                if progress() != seen:
                    began, seen = time.monotonic(), progress()
                left = began + caller.patience_s - time.monotonic()
                if left <= 0:
                    raise PeerError(f"Waited {time.monotonic() - began:.0f} s; {missing()}.")
                self.changed.wait(left)
        finally:
            self._waiting -= 1
            self.last_call = time.monotonic()

    def _check_running(self, caller: Caller) -> None:
        if self.ended is not None:
            raise PeerError(f"The run has ended. {self.ended}")
        if caller.is_gone:
            raise PeerError(f"Site `{self._site(caller.child)}` has hung up.")

    def _joined(self, caller: Caller) -> _Child:
        self.last_call = time.monotonic()
        self._check_running(caller)
        child = self._children.get(caller.child)
        if child is None or not self._is_started:
            raise ProtocolError(
                f"Site `{self._site(caller.child)}` must join before anything else."
            )
        if child.process != caller.process:
            raise self._second_process(caller)
        if child.has_left:
            raise ProtocolError(f"Site `{self._site(caller.child)}` has left this run.")
        return child

    def _start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._presence.expect(self._children)

    def _lose(self, child: int) -> None:
        self._told.add(child)  # as far as it can be
        self.end(
            f"Site `{self._site(child)}` was lost: its connection closed and it did not come back "
            f"within {self._terms.lost_after_s:g} s."
        )

    def _second_process(self, caller: Caller) -> ProtocolError:
        return ProtocolError(
            f"Site `{self._site(caller.child)}` is in this run already, as another process or on "
            "other terms. A run takes one process of each site; start a new run."
        )

    def _canonical(self, what: str, text: str) -> str:
        try:
            return compressors.parse(text).text
        except ValueError as error:
            raise ProtocolError(f"`{what}` is unknown to the server: {error}") from error

    def _check_terms(self, position: int, child: _Child) -> None:
        here = self._site(position)
        for what in ("compression", "downlink"):
            fixed = getattr(self._terms, what)
            came = getattr(child, what)
            if fixed is not None and fixed != came:
                raise ProtocolError(
                    f"`{what}` must be {fixed}, which the server was told. Received: "
                    f"{what}={came} from site `{here}`"
                )
        for other, known in self._children.items():
            for what in ("compression", "downlink", "seed"):
                if other != position and getattr(known, what) != getattr(child, what):
                    raise ProtocolError(
                        f"All parties must agree on `{what}`. Site `{self._site(other)}` has "
                        f"{getattr(known, what)}. Received: {what}={getattr(child, what)} "
                        f"from site `{here}`"
                    )

    def _check_bytes(self, what: str, num_bytes: int) -> None:
        limit = self._terms.max_model_bytes
        if num_bytes > limit:
            raise ProtocolError(
                f"The {what} must have at most {limit} bytes, the server's `max_model_bytes`. "
                f"Received: {num_bytes} bytes"
            )

    def _absent(self) -> set[int]:
        return set(range(len(self._terms.parties))) - set(self._children)

    def _lacks_model(self, child: int) -> bool:
        return self._children[child].model is None

    def _site(self, child: int) -> str:
        return self._terms.parties[child]

    def _has_left(self, site: str) -> bool:
        child = self._children.get(self._terms.parties.index(site))
        return child is not None and child.has_left

    def _names(self, children: set[int]) -> str:
        return ", ".join(f"`{self._site(child)}`" for child in sorted(children))
