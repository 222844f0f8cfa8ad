# SPDX-License-Identifier: Apache-2.0
"""What a party's server does at the server above it, in the name of all its children.

    all children have joined        join there, as one child that stands for their leaves
    all have agreed on the model    agree there
    first weights                   pass them up as they come, or fetch them once for all
    all have come to a gather       one bundle up, the payloads of all leaves down
    a chunk is merged               its packet up; what comes down is the chunk's result
    the run ends, or all leave      leave there with the same reason; and the other way round

One thread does what is due, one thing at a time, and finds that in the state of the session, not in
calls: so a server that was killed goes on above where its own records end. It comes back there as a
party does (`comeback`), with the round that is its newest; packets that it sends again are the same
bytes, because what they are made of was durable before they went.

Invariant: what the server above has heard of, this one has on its disk, where it keeps its run.
"""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from tf_hips import log
from tf_hips.config import Uplink
from tf_hips.errors import (
    NonFiniteError,
    PeerError,
    ProtocolError,
    TfHipsError,
    ToleranceError,
    reason_of_end,
)
from tf_hips.ops import compressor as compressors
from tf_hips.ps import rules
from tf_hips.ps.client.shards import Connection, connect
from tf_hips.ps.robust.sketched_party import SketchingStore
from tf_hips.ps.rounds.gather import too_long
from tf_hips.ps.rounds.periods import PeriodicStore
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.rules.leaves import why_not_below
from tf_hips.ps.rules.way_down import SAME
from tf_hips.ps.server.relays import Passed, PassedWeights, Passing, SketchPassing
from tf_hips.ps.session.members import no_quorum
from tf_hips.ps.session.session import Session
from tf_hips.ps.terms.tree import MAX_LEAVES, Place

# Rounds after which the server above is told what this one cannot need any more: a call each time.
BACKUP_EVERY = 64

_Task = Callable[[], None]


class Upper:
    """Takes one session to the server above, from its first child to its end."""

    def __init__(
        self,
        uplink: Uplink,
        run: str,
        session: Session,
        events: log.EventLog,
        ask: Callable[[], object],
        before: "Upper | None" = None,
    ) -> None:
        """Nothing is connected.

        Args:
            uplink: where the server above is, and as which party this one joins it.
            run: identity of the run, equal on all levels.
            session: of the children.
            events: where joining and leaving are written.
            ask: hears from the server above how long that waits, before it is joined. Children of
                a run that is restored do not ask for it.
            before: of the run before, which must have left above before this one joins there.
        """
        self._uplink = uplink
        self._run = run
        self._session = session
        self._events = events
        self._ask = ask
        self._before = before
        self._client: Connection | None = None
        self._has_joined = False  # above, as this process
        self._has_failed = False
        self._is_synced = False
        self._is_agreed = False
        self._backup = -1
        self._driver = threading.Thread(target=self._drive, name="tf_hips-upper", daemon=True)
        self._leaver = threading.Thread(target=self._leave, name="tf_hips-upper-end", daemon=True)

    def start(self) -> None:
        """Begins to do what is due."""
        self._driver.start()
        self._leaver.start()

    def close(self) -> None:
        """Waits until the server above knows of the session's end; the session must be over."""
        for thread in (self._leaver, self._driver):
            if thread.is_alive():
                thread.join()

    def failed(self, site: str, text: str) -> None:
        """A step of a child ended with an error, which others above may have to wait for."""
        client = self._client
        if client is not None:
            client.failed(f"Site `{site}`: {text}")

    def describe(self) -> dict[str, Any]:
        """Where the way up leads, for a status."""
        place = self._session.state.members.place
        return {
            "server": self._uplink.server,
            "site": self._uplink.site,
            "is_joined": place is not None,
            "compression": place.compression if place is not None else None,
            "leaves": place.num_leaves if place is not None else 0,
        }

    def _drive(self) -> None:
        try:
            while True:
                with self._session.changed:
                    task = self._due()
                    while task is None and not self._is_done:
                        self._session.changed.wait()
                        task = self._due()
                if task is None or self._is_done:
                    return
                task()
        except TfHipsError as error:
            if not self._is_done:  # else `_leave` has ended what was going on
                self._has_failed = True
                self._end(error)
        except Exception as error:
            self._has_failed = True
            self._end(PeerError(f"The server of `{self._uplink.site}` has failed: {error!r}"))
            raise

    def _due(self) -> _Task | None:
        """What is to be done next, if anything; called with the session's lock held."""
        state = self._session.state
        members, store = state.members, self._store
        if self._client is None:
            return self._join if members.are_complete else None
        if self._is_sync_due(store):
            return self._sync
        if store is not None and not self._is_agreed:
            return self._agree
        if state.gathers.due is not None:
            return self._gather
        if store is not None and store.due() is not None:
            return self._exchange
        return None

    def _join(self) -> None:
        """Joins above, for the first time or as the process that comes back."""
        session = self._session
        if self._before is not None:
            self._before.close()
            self._before = None
        self._ask()
        with session.changed:
            members = session.state.members
            if not members.are_complete:
                return  # a child has given up meanwhile
            members.is_sealed = True
            place, leaves = members.place, members.leaves
        client = self._make_client()
        client.on_end(lambda: self._hear(client))
        client.link.on_notice = session.pass_on
        with session.changed:
            if self._is_done:
                return
            self._client = client  # from now on the end of the session closes it
            session.handover.fetch_above = client.backup_messages
        client.offer(lambda one: session.handover.fetch(None, one.held, one.workers))
        terms = self._terms()
        welcome = client.join(*terms)
        self._has_joined = True
        self._check_sketches(welcome.rule)
        if session.state.members.has_own_rule and not rules.parse(welcome.rule).gives_steps:
            raise ProtocolError(
                "A party server with a rule of its own sends how far its children have moved, so "
                "the rule of the server above must give steps, as `fedavg` does. Received: rule "
                f"{welcome.rule} of server {self._uplink.server}"
            )
        self._check_quorum(welcome.rule)
        robust = session.state.members.terms.robust
        if robust is not None and not rules.parse(welcome.rule).is_mean:
            raise ProtocolError(
                "A party server with a robust rule sends what most of its children say, so the "
                "rule of the server above must take means, as `mean` or `fedavg` do. Received: "
                f"rule {welcome.rule} of server {self._uplink.server}, below it {robust}"
            )
        all_leaves = tuple(zip(welcome.parties, welcome.workers, strict=True))
        found = Place(
            welcome.child,
            all_leaves,
            terms[0],
            welcome.downlink,
            welcome.rule,
            welcome.session,
            welcome.first_group,
            welcome.groups,
            welcome.paths,
            welcome.guards,
        )
        if place is None:
            with session.changed:
                if not session.is_over:
                    session.start(found)
        elif place != found:
            raise ProtocolError(
                "The server above goes on with another run than the one that is kept here. Start "
                "both anew, or both with the state of one run."
            )
        self._events.write("joined_above", **dataclasses.asdict(welcome))
        log.info(
            "Joined %s as `%s`, with %d of %d leaves",
            self._uplink.server,
            self._uplink.site,
            len(leaves),
            len(all_leaves),
        )

    def _check_sketches(self, rule: str) -> None:
        members = self._session.state.members
        here = members.terms
        why_not = why_not_below(
            rule,
            own=here.rule if here.rule is not None else here.robust,
            compression=members.children[0].compression,
            quorum=here.quorum,
        )
        if why_not is not None:
            raise ProtocolError(f"{why_not} (the rule of server {self._uplink.server})")

    def _check_quorum(self, rule: str) -> None:
        terms = self._session.state.members.terms
        # Means below an asynchronous server are not scaled for children that are late.
        if terms.quorum is not None and rules.parse(rule).is_asynchronous:
            raise ProtocolError(no_quorum(rule, f"server {self._uplink.server}"))

    def _make_client(self) -> Connection:
        """A client that has not connected; of a run that goes on, if this server has joined one."""
        with self._session.changed:
            members = self._session.state.members
            leaves, groups, guards = members.leaves_by_path, members.num_groups, members.guards
            must_be_back = members.place is not None
        if len(leaves) > MAX_LEAVES:
            raise ProtocolError(f"A tree must have at most {MAX_LEAVES} leaves below one server.")
        workers = sum(count for _, count in leaves)
        return connect(
            self._uplink,
            self._run,
            workers,
            must_be_back=must_be_back,
            leaves=leaves,
            groups=groups,
            guards=guards,
        )

    def _terms(self) -> tuple[str, str, int, str | None]:
        """With what it joins above, the same whenever it does."""
        with self._session.changed:
            members = self._session.state.members
            first, place = members.children[0], members.place
            way_up = place.compression if place is not None else _way_up(self._session)
            rule = None if members.has_own_rule else first.rule or None
            if place is not None:
                return way_up, place.downlink, first.seed, rule
            # What comes down may be steps, of a rule that only a server above knows.
            down = SAME if rule is None and first.asks_same else first.downlink
            return way_up, down, first.seed, rule

    def _agree(self) -> None:
        client, store = self._connected(), self._store
        if store is None:
            raise ProtocolError("The model is not agreed on.")
        client.agree_model(store.model.shapes, _next_up(store))
        self._is_agreed = True

    def _is_sync_due(self, store: Passed | None) -> bool:
        state, first_sync = self._session.state, self._session.first_sync
        weights = state.weights
        first = store.first_round if isinstance(store, Store) else 0
        has_begun = store is not None and _next_up(store) > first
        if self._is_synced or has_begun or weights.is_forgotten:
            return False
        if not first_sync.comes_from_above:
            return weights.is_described
        return not weights.are_whole and (first_sync.wanted is not None or weights.is_described)

    def _sync(self) -> None:
        """Passes the first weights on, up or down."""
        client, first_sync = self._connected(), self._session.first_sync
        with self._session.changed:
            weights = self._session.state.weights
            what = (weights.kinds, weights.num_bytes)
            if not weights.is_described and first_sync.wanted is not None:
                what = first_sync.wanted
        if first_sync.comes_from_above:
            first_sync.describe(*what)
            client.fetch_weights(what, lambda: weights.held, first_sync.take)
        else:
            with contextlib.closing(PassedWeights(self._session)) as reader:
                client.send_weights(what, reader.messages)
        self._is_synced = True

    def _gather(self) -> None:
        session = self._session
        with session.changed:
            number = session.state.gathers.due
            if number is None:
                return
            label, payload = session.state.gathers.up(number)
            leaves = session.state.members.leaves
        session.settle()
        client = self._connected()
        if len(payload) > client.max_gather_bytes:
            names = ", ".join(site for site, _ in leaves)
            raise ProtocolError(
                f"{too_long(len(payload), client.max_gather_bytes)}: `{label}` of the leaves "
                f"{names} in one"
            )
        session.answer_gather(number, client.gather(number, label, payload, self._go_on))

    def _go_on(self) -> None:
        """Children that wait hear that others above go on."""
        with self._session.changed:
            self._session.note_moved()
            self._session.changed.notify_all()

    def _exchange(self) -> None:
        client, store = self._connected(), self._store
        number = store.due() if store is not None else None
        if store is None or number is None:
            return
        if number >= self._backup + BACKUP_EVERY:
            self._session.settle()
            with self._session.changed:
                gathers = self._session.state.gathers
                gather = gathers.newest + gathers.is_over(gathers.newest)
            client.backed_up(number, gather)
            self._backup = number
        passage = Passing(self._session, store, number)
        if isinstance(store, SketchingStore):
            passage = SketchPassing(self._session, store, number)
        with contextlib.closing(passage):
            client.transfer(passage, store.weight(number))

    def _leave(self) -> None:
        """Waits for the end of the session, and tells it above."""
        session = self._session
        with session.changed:
            session.changed.wait_for(lambda: self._is_done)
            client, reason = self._client, session.ended
            owes_leave = session.owes_leave
            is_midway = not self._has_joined and not self._has_failed
        if client is not None and owes_leave and is_midway and client.ended("Join") is None:
            # Above, this process is not known yet: nobody would hear it leave.
            client.close()
            self._driver.join()
            client = None
        try:
            if client is None and owes_leave:
                # The process before this one was killed when the run was over, or nearly so.
                client = self._make_client()
                client.join(*self._terms())
        except TfHipsError as error:
            log.warning("The end of the run was not told above: %s", error)
        if client is not None:
            client.leave(reason)
        with session.changed:
            session.state.leave_above()
        self._events.write("left_above", reason=reason)

    def _hear(self, client: Connection) -> None:
        """The run has ended above."""
        error = client.ended("Watch")
        if error is not None:
            self._end(error)

    def _end(self, error: TfHipsError) -> None:
        """Ends the run below, by the reason that the server above has given, if it has."""
        reason = reason_of_end(str(error))
        kept = (ProtocolError, NonFiniteError, ToleranceError)
        kind = type(error) if isinstance(error, kept) else PeerError
        self._session.end(str(error) if reason is None else reason, kind)

    @property
    def _is_done(self) -> bool:
        """Whether nothing is to be done any more, but to leave."""
        session, store = self._session, self._store
        owes = isinstance(store, PeriodicStore) and store.num_waiting > 0
        return session.ended is not None or (session.is_over and not owes)

    @property
    def _store(self) -> Passed | None:
        store = self._session.state.store
        return store if isinstance(store, Store | PeriodicStore) else None

    def _connected(self) -> Connection:
        if self._client is None:
            raise ProtocolError("The server above must be joined before anything else.")
        return self._client


def _next_up(store: Passed) -> int:
    """The oldest round that the server above has not answered."""
    if isinstance(store, PeriodicStore):
        return store.next_up
    return store.round + store.is_merged(store.round)


def _way_up(session: Session) -> str:
    """What the sums of children go up with: what this server was told, or what they bring.

    Where terms are those of child 0, that may wish for nothing, and others for different things:
    then it is what most of these wish for.
    """
    members = session.state.members
    children = [members.children[one] for one in sorted(members.children)]
    wishes = [child.above for child in children if child.above is not None]
    wish = children[0].above
    if wish is None and wishes:
        [(wish, _)] = collections.Counter(wishes).most_common(1)
    return members.terms.way_up or wish or compressors.parse(children[0].compression).for_sums.text
