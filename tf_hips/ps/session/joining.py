# SPDX-License-Identifier: Apache-2.0
"""The calls with which a child begins: it joins, and says which model it trains.

    join           on the terms that it brings, which `described` checks; then it waits for the
                   others, and hears who they are
    agree_model    the model, and the round that it goes on with; with the last one's there are
                   rounds

A process that comes back to a run makes the same calls (`comeback`). Part of a session, and under
its lock.
"""

from collections.abc import Callable

from tf_hips.errors import LibraryError, ProtocolError
from tf_hips.ops import compressor as compressors
from tf_hips.ps import rules
from tf_hips.ps.rounds.round import MAX_ROUND
from tf_hips.ps.rules.way_down import SAME, as_up
from tf_hips.ps.session.ahead import Ahead
from tf_hips.ps.session.comeback import Comeback
from tf_hips.ps.session.members import ABOVE, Caller, Child, Terms
from tf_hips.ps.session.state import State
from tf_hips.ps.session.waiting import Wait, Waiting
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.tree import BETWEEN, Guards, Leaves, Place, check_above, check_workers


class Joining:
    """How children come into one run."""

    def __init__(
        self,
        state: State,
        ahead: Ahead,
        waiting: Waiting,
        comeback: Comeback,
        check: Callable[[Caller], Child],
        find: Callable[[int], None],
        start: Callable[[], None],
    ) -> None:
        """Nobody has joined.

        Args:
            state: of the run.
            ahead: knows whether a child is further than what was restored.
            waiting: the session's waiting calls.
            comeback: lets another process of a site take over.
            check: called first by each call of who has joined, with the lock held; raises if the
                caller may not.
            find: called with the lock held: a child that may have been lost calls again.
            start: all have joined, and nobody above has to be asked.
        """
        self.changed = state.changed
        self._state = state
        self._members = state.members
        self._ahead = ahead
        self._waiting = waiting
        self._comeback = comeback
        self._joined = check
        self._find = find
        self._start = start

    def join(
        self,
        caller: Caller,
        workers: int,
        compression: str,
        downlink: str,
        seed: int,
        rule: str | None = None,
        leaves: Leaves = (),
        above: str | None = None,
        groups: int | None = None,
        guards: Guards = (),
    ) -> dict[str, object]:
        """Takes in a child and waits for the others; the same process may ask again.

        Returns:
            The fields of the child's `Welcome`.

        Raises:
            ProtocolError: it disagrees with the server or with those before it, or its site is in
                the run already.
            PeerError: the others did not come in time.
        """
        members = self._members
        leaves = leaves or ((members.site(caller.child), workers),)
        child = described(
            members.terms,
            members.place,
            caller.process,
            workers,
            compression,
            downlink,
            seed,
            rule,
            leaves,
            above,
            groups,
            guards,
        )
        with self.changed:
            self._waiting.check(caller)
            if members.is_started and members.children[caller.child].process != caller.process:
                self._comeback.join(caller, child)
                self._find(caller.child)
            known = members.admit(caller.child, child)
            if members.are_complete and not members.is_started and members.terms.site is None:
                too_few = members.why_too_few
                if too_few is None:
                    self._start()
                else:
                    self._waiting.end(too_few, ProtocolError)
            self.changed.notify_all()
            known.num_joining += 1
            try:
                self._waiting.until(
                    caller,
                    Wait(
                        "join",
                        lambda: (
                            members.is_started or members.children.get(caller.child) is not known
                        ),
                        lambda: (
                            "the server above has not answered"
                            if members.are_complete
                            else f"the parties {members.names(members.absent())} have not joined"
                        ),
                        progress=lambda: int(members.are_complete),
                    ),
                )
            finally:
                known.num_joining -= 1
                is_known = members.children.get(caller.child) is known
                is_waited_for = members.is_started or members.is_sealed
                if is_known and not is_waited_for and known.num_joining == 0:
                    # Nobody must wait for a party that has given up. One that has come again over
                    # another connection has not: the end of the first may be noticed late.
                    del members.children[caller.child]
            if not is_known:
                out = known.why_out
                raise ProtocolError(out) if out else members.second_process(caller.child)
            return self._welcome(caller.child, child)

    def agree_model(self, caller: Caller, shapes: object, first_round: int = 0) -> None:
        """Compares a child's model, and the round that it begins with, with those of the others.

        Raises:
            ProtocolError: it is larger than the server's limit, or differs from that of a child
                before.
            StateError: the session was restored from a state that is older than the run.
        """
        model = Model.from_json(shapes)
        if not 0 <= first_round <= MAX_ROUND:
            raise ProtocolError(
                f"`round` must be from 0 to 2^31. Received: round={str(first_round)[:40]}"
            )
        self._members.terms.check_bytes("model's gradients", model.dense_bytes)
        with self.changed:
            child, store = self._joined(caller), self._state.store
            if store is not None and child.num_returns > 0:
                rounds = store.of(caller.child)
                self._ahead.checked(
                    caller.child,
                    lambda: self._comeback.check_model(caller, rounds, model, first_round),
                )
                return
            told = (child.model, child.first_round)
            if store is not None and told == (model, first_round):
                return
            self._members.check_model(caller.child, model, first_round)
            if store is not None:
                raise ProtocolError(
                    "The model cannot change: all parties have agreed on another one."
                )
            self._state.agree(caller.child, model, first_round)
            self.changed.notify_all()

    def _welcome(self, position: int, child: Child) -> dict[str, object]:
        """What a child hears that has joined, and has said this."""
        members = self._members
        known = members.children[position]
        first, all_leaves = members.whole(position)
        first_group, num_groups = members.groups_of(position)
        place = members.place
        paths, all_guards = members.tree
        store = self._state.store
        rounds = store.of(position) if store is not None else None
        oldest = rounds.oldest if rounds is not None else 0
        return {
            "child": first,
            "parties": [leaf for leaf, _ in all_leaves],
            "workers": [count for _, count in all_leaves],
            "compression": child.compression,
            "downlink": child.downlink if place is None else place.downlink,
            "seed": child.seed,
            "rule": known.rule,
            "round": known.first_round,
            "newest": rounds.round if rounds is not None else 0,
            "session": members.session,
            "is_back": known.num_returns > 0,
            "oldest": oldest,
            "keeps_all": oldest <= known.first_round and self._state.gathers.are_whole,
            "votes": members.votes.text if members.votes is not None else None,
            "first_group": first_group,
            "groups": num_groups,
            "robust": members.terms.robust,
            "quorum": quorum.text if (quorum := members.terms.quorum) is not None else None,
            "paths": list(paths),
            "guards": [list(one) for one in all_guards],
        }


def described(
    terms: Terms,
    place: Place | None,
    process: str,
    workers: int,
    compression: str,
    downlink: str,
    seed: int,
    rule: str | None = None,
    leaves: Leaves = (),
    above: str | None = None,
    groups: int | None = None,
    guards: Guards = (),
) -> Child:
    """A child as it says that it is, checked and made canonical.

    Args:
        terms: what the server was told.
        place: what the server above has answered; None: nothing yet, or there is none.
        process: which process of its site it is.
        workers: of it, and of those below it.
        compression: of its way up.
        downlink: of what comes down; `same` is what suits `compression`.
        seed: of the run.
        rule: None: the server's, or "sum".
        leaves: paths and workers of those below it.
        above: compression of its server's own way up, if it wishes for one.
        groups: of its workers with batches of their own; None: each has one.
        guards: robust rules and quorums of the servers below it.

    Raises:
        ProtocolError: a value is out of range, or a compressor or the rule is unknown.
    """
    check_workers([("", workers)])
    if not -(1 << 63) <= seed < 1 << 64:
        raise ProtocolError(f"`seed` must have at most 64 bits. Received: seed={str(seed)[:40]}")
    uplink = _canonical("compression", compression)
    if above is not None:
        above = _canonical("above", above)
    told = rule if rule is not None else terms.rule
    if told is None and terms.site is not None:
        rule = ABOVE if place is None else place.rule
    else:
        try:
            rule = rules.parse(told or "sum").text
        except ValueError as error:
            raise ProtocolError(f"`rule` is unknown to the server: {error}") from error
        if terms.site is None:
            _check_bears(terms, rule, uplink)
    if terms.robust is not None:
        _check_bears(terms, terms.robust, uplink)
    asks_same = downlink == SAME
    if asks_same:
        way_up = terms.way_up if terms.site is not None else None
        encoded = compressors.parse(way_up or above or uplink)
        downlink = as_up(encoded, None if told is None else rules.parse(rule)).text
    down = _canonical("downlink", downlink)
    paths = tuple(path for path, _ in leaves)
    guards = tuple((one, _robust(text), least) for one, text, least in guards)
    check_above(guards, paths)
    leaves = tuple((path.rpartition(BETWEEN)[2], count) for path, count in leaves)
    count = groups if groups is not None else workers
    return Child(
        process,
        workers,
        uplink,
        down,
        seed,
        rule,
        leaves,
        above,
        paths,
        guards,
        groups=count,
        asks_same=asks_same,
    )


def _check_bears(terms: Terms, rule: str, uplink: str) -> None:
    """Raises ProtocolError where these children cannot merge by a rule."""
    why_not = rules.why_not(
        rule, len(terms.parties), uplink, terms.quorum, terms.shard, is_led=terms.is_led
    )
    if why_not is not None:
        raise ProtocolError(why_not)


def _robust(text: str | None) -> str | None:
    """The canonical text of a robust rule that a server below says that it has."""
    try:
        rule = None if text is None else rules.parse(text)
    except ValueError as error:
        raise ProtocolError(f"`guards` has an unknown rule: {error}") from error
    if rule is not None and not rule.is_robust:
        raise ProtocolError(f"`guards` must have robust rules. Received: {str(text)[:80]}")
    return None if rule is None else rule.text


def _canonical(what: str, text: str) -> str:
    try:
        found = compressors.check_makes_packets(compressors.parse(text), what, may_be_mixed=True)
        return (found if what == "compression" else compressors.check_for_sums(found)).text
    except (ValueError, LibraryError) as error:  # no compiler here for a codec of theirs
        raise ProtocolError(f"`{what}` is unknown to the server: {error}") from error
