# SPDX-License-Identifier: Apache-2.0
"""One run as a server sees it: who has joined, which model, its rounds, who has left.

    join (all) -> agree_model (all) -> first synchronisation -> rounds -> leave (all)
                                       (child 0 up, the others down)
                  gathers, any time

No gRPC here: `server` turns calls into these methods and their errors into status codes. Who has
joined is kept by `members`, payloads by `gather`, packets by `store`. All waiting goes through
`waiting`. Only `watch` waits longer: a child holds it open to show that it is there, and to hear
why the run has ended whatever it is doing.

Invariant: a call that is refused changes nothing, so the children that behave can go on.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator

from tf_hips.errors import NonFiniteError, PeerError, ProtocolError, TfHipsError
from tf_hips.ops import compressor as compressors
from tf_hips.ps import wire
from tf_hips.ps.gather import Gathers, Upload
from tf_hips.ps.members import Caller, Child, Members, Terms
from tf_hips.ps.model import Model
from tf_hips.ps.presence import Presence
from tf_hips.ps.store import Packet, Store
from tf_hips.ps.waiting import Wait, Waiting
from tf_hips.ps.weights import FirstWeights

# Numbers of rounds are steps of keys, which have 32 bits.
MAX_ROUND = 1 << 31
_FIRST_WEIGHTS = "the first weights"


class Session:
    """The state of one run. Thread-safe; one condition guards it and its store."""

    def __init__(self, terms: Terms) -> None:
        """A session that nobody has joined."""
        self.changed = threading.Condition()
        self.store: Store | None = None
        self._terms = terms
        self._members = Members(terms)
        self._presence = Presence(self.changed, terms.lost_after_s, self._lose)
        self._waiting = Waiting(self.changed, self._members, self._presence.stop)
        self._told: set[int] = set()
        self._weights = FirstWeights()
        self._gathers = Gathers(len(terms.parties), terms.max_gather_bytes)

    @property
    def is_started(self) -> bool:
        """Whether all parties have joined."""
        return self._members.is_started

    @property
    def ended(self) -> str | None:
        """Why the run has ended, if it has."""
        return self._waiting.ended

    @property
    def is_over(self) -> bool:
        """Whether the run has ended with a reason, or all children have left."""
        with self.changed:
            return self.ended is not None or self._members.have_left

    def is_known_to_all(self) -> bool:
        """Whether every child has left, knows why the run has ended, or cannot be told."""
        with self.changed:
            return self._members.have_left or (
                self.ended is not None
                and (
                    not self.is_started
                    or all(
                        one.has_left or child in self._told
                        for child, one in self._members.children.items()
                    )
                )
            )

    def idle_s(self) -> float:
        """Seconds since the last call ended or began; 0 while one waits."""
        with self.changed:
            return self._waiting.idle_s()

    def hang_up(self, caller: Caller) -> None:
        """Notes that the other end of a call is gone."""
        with self.changed:
            caller.is_gone = True
            self.changed.notify_all()

    def end(self, reason: str) -> None:
        """Ends the run for all; the first reason stands."""
        with self.changed:
            self._waiting.end(reason)

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
        child = self._members.describe(caller.process, workers, compression, downlink, seed)
        members = self._members
        with self.changed:
            self._waiting.check(caller)
            known = members.admit(caller.child, child)
            if members.are_complete and not members.is_started:
                members.is_started = True
                self._presence.expect(members.children)
            self.changed.notify_all()
            known.num_joining += 1
            try:
                self._waiting.until(
                    caller,
                    Wait(
                        "join",
                        lambda: self.is_started or members.children.get(caller.child) is not known,
                        lambda: f"the parties {members.names(members.absent())} have not joined",
                    ),
                )
            finally:
                known.num_joining -= 1
                is_known = members.children.get(caller.child) is known
                if is_known and not self.is_started and known.num_joining == 0:
                    # Nobody must wait for a party that has given up. One that has come again over
                    # another connection has not: the end of the first may be noticed late.
                    del members.children[caller.child]
            if not is_known:
                raise members.second_process(caller.child)
            return {
                "child": caller.child,
                "parties": list(self._terms.parties),
                "workers": [members.children[one].workers for one in sorted(members.children)],
                "compression": child.compression,
                "downlink": child.downlink,
                "seed": child.seed,
                "round": self.store.round if self.store is not None else 0,
            }

    def agree_model(self, caller: Caller, shapes: object, first_round: int = 0) -> None:
        """Compares a child's model, and the round that it begins with, with those of the others.

        Raises:
            ProtocolError: it is larger than the server's limit, or differs from that of a child
                before.
        """
        model = Model.from_json(shapes)
        if not 0 <= first_round <= MAX_ROUND:
            raise ProtocolError(
                f"`round` must be from 0 to 2^31. Received: round={str(first_round)[:40]}"
            )
        self._check_bytes("model's gradients", model.dense_bytes)
        with self.changed:
            child = self._joined(caller)
            told = (child.model, child.first_round)
            if self.store is not None and told == (model, first_round):
                return
            self._members.check_model(caller.child, model, first_round)
            if self.store is not None:
                raise ProtocolError(
                    "The model cannot change: all parties have agreed on another one."
                )
            child.model, child.first_round = model, first_round
            if not self._members.without_model():
                self.store = Store(
                    model,
                    self._terms.parties,
                    compressors.parse(child.compression),
                    compressors.parse(child.downlink),
                    child.seed,
                    first_round=first_round,
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
            self._waiting.until(
                caller,
                Wait(
                    _FIRST_WEIGHTS,
                    lambda: self._weights.is_described,
                    lambda: f"site `{self._site(0)}` has not begun to send the first weights",
                    lambda: [0],
                ),
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
                self._waiting.until(
                    caller,
                    Wait(
                        _FIRST_WEIGHTS,
                        functools.partial(weights.has_message, position),
                        lambda: (
                            f"site `{self._site(0)}` has sent {weights.held} of "
                            f"{weights.num_bytes} bytes of the first weights"
                        ),
                        lambda: [0],
                        lambda: weights.held,
                    ),
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
            members = self._members
            self._waiting.until(
                caller,
                Wait(
                    _round(number),
                    lambda: self.store is not None,
                    lambda: (
                        f"the parties {members.names(members.without_model())} have not sent their "
                        "model"
                    ),
                    members.without_model,
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
                self._check_there(_round(number), needs())
                return False

            def needs() -> list[int]:
                return [self._terms.parties.index(site) for site in store.missing(number)]

            self._waiting.until(
                caller,
                Wait(
                    _round(number),
                    is_ready,
                    lambda: (
                        f"in round {number} these have not delivered their packets: "
                        + ", ".join(
                            f"site `{site}` ({count} of {len(store.model.chunks)} chunks came)"
                            for site, count in store.missing(number).items()
                        )
                    ),
                    needs,
                ),
            )
            news = store.refusals(number)[refused:]
            if news and not stop():
                raise NonFiniteError(news[0])
            return store.results(number, after)

    def begin_gather(self, caller: Caller, number: int) -> Upload:
        """What takes in the caller's payload for gather `number`.

        Raises:
            ProtocolError: it is not the gather's turn.
        """
        with self.changed:
            self._joined(caller)
            return self._gathers.begin(caller.child, number)

    def has_payload(self, caller: Caller, number: int) -> bool:
        """Whether the caller's payload for gather `number` is there."""
        with self.changed:
            return self._gathers.has(caller.child, number)

    def wait_gather(
        self, caller: Caller, number: int, upload: Upload, have: Iterable[int] = ()
    ) -> list[tuple[int, wire.Buffer]]:
        """Delivers the caller's payload, and waits for those of all others.

        Args:
            caller: the call.
            number: the gather.
            upload: what came in; nothing, if the payload came before.
            have: children whose payloads the caller has.

        Returns:
            Pairs of child and payload, in child order, but those in `have` and empty ones.

        Raises:
            ProtocolError: what came is no payload, or not the one that came before; or the children
                gather different things, which ends the run for all.
            PeerError: a child has left, or did not come in time.
        """
        with self.changed:
            gathers = self._gathers
            self._joined(caller)
            try:
                came = upload.finish()
            finally:
                gathers.end(caller.child, upload)
            if came is not None:
                label, payload = came
                others = {
                    child: other
                    for child, other in gathers.labels(number).items()
                    if child != caller.child
                }
                if any(other != label for other in others.values()):
                    whats = {child: _gather(number, other) for child, other in others.items()}
                    self._waiting.end_differing({**whats, caller.child: _gather(number, label)})
                gathers.deliver(caller.child, number, label, payload)
                self.changed.notify_all()
            elif not gathers.has(caller.child, number):
                raise ProtocolError("A gather has one packet of each site. Received: none")
            label = gathers.labels(number).get(caller.child, "")

            def is_ready() -> bool:
                missing = gathers.missing(number)
                self._check_there(_gather(number, label), missing)
                return not missing

            self._waiting.until(
                caller,
                Wait(
                    _gather(number, label),
                    is_ready,
                    lambda: (
                        f"these have not sent their values of `{label}`: "
                        + self._members.names(gathers.missing(number))
                    ),
                    lambda: gathers.missing(number),
                ),
            )
            return gathers.answer(number, have)

    def fail(self, caller: Caller, text: str) -> None:
        """Notes that a child's last step ended with an error; its next call is the end of that.

        If others wait for it and it does not come soon, the run ends for all.
        """
        with self.changed:
            self._joined(caller)
            self._waiting.note_failure(caller.child, text)

    def leave(self, caller: Caller, reason: str | None) -> None:
        """Notes that a child leaves; with a reason, before the others, it ends the run for all."""
        with self.changed:
            child = self._members.children.get(caller.child)
            if child is None:
                raise ProtocolError(f"Site `{self._site(caller.child)}` has not joined this run.")
            if child.process != caller.process:
                raise self._members.second_process(caller.child)
            child.has_left = True
            self._waiting.note_call(caller.child)
            self._presence.release(caller.child)
            if reason is not None:
                self.end(f"Site `{self._site(caller.child)}` left the run: {reason[:1000]}")
            self.changed.notify_all()

    def watch(self, caller: Caller) -> Iterator[tuple[str, type[TfHipsError]]]:
        """Shows that a child is there, until it leaves or hangs up, or the run ends.

        Yields:
            Why the run has ended, if it has, and the error of it; the child counts as told when it
            asks for more.

        Raises:
            ProtocolError: the child is not in this run.
        """
        with self.changed:
            if self.ended is None:
                child = self._member(caller)
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
            yield reason, self._waiting.error
        finally:
            with self.changed:
                self._told.add(caller.child)
                self.changed.notify_all()

    def _member(self, caller: Caller) -> Child:
        self._waiting.check(caller)
        child = self._members.known(caller)
        if child.has_left:
            raise ProtocolError(f"Site `{self._site(caller.child)}` has left this run.")
        return child

    def _joined(self, caller: Caller) -> Child:
        child = self._member(caller)
        self._waiting.note_call(caller.child)
        return child

    def _check_there(self, what: str, children: Iterable[int]) -> None:
        gone = self._members.gone(children)
        if gone:
            raise PeerError(
                f"{what[0].upper()}{what[1:]} needs all parties; site `{self._site(gone[0])}` has "
                "left the run before it."
            )

    def _lose(self, child: int) -> None:
        self._told.add(child)  # as far as it can be
        self.end(
            f"Site `{self._site(child)}` was lost: its connection closed and it did not come back "
            f"within {self._terms.lost_after_s:g} s."
        )

    def _check_bytes(self, what: str, num_bytes: int) -> None:
        limit = self._terms.max_model_bytes
        if num_bytes > limit:
            raise ProtocolError(
                f"The {what} must have at most {limit} bytes, the server's `max_model_bytes`. "
                f"Received: {num_bytes} bytes"
            )

    def _site(self, child: int) -> str:
        return self._members.site(child)


def _round(number: int) -> str:
    return f"round {number} of the gradients"


def _gather(number: int, label: str) -> str:
    return f"exact value {number} (`{label}`)"
