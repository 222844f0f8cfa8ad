# SPDX-License-Identifier: Apache-2.0
"""What a server tells its children of their groups, and what it asks them before they vote.

    Seat      where the caller sits in a round: the number of its group, and of how many
    Replica   what decides on the caller's bits, which must be the same where bytes are compared

Nobody hears who else sits in its group, nor where it will sit: a round's seats are told when the
round before it is merged. They are a function of the server's secret and of the round, so a child
that does a round again, as after a crash, hears the same.
"""

import dataclasses
import json
from typing import Any

from tf_hips import log
from tf_hips.errors import ProtocolError
from tf_hips.ps import wire
from tf_hips.ps.asked import Seat
from tf_hips.ps.members import Caller
from tf_hips.ps.recorder import Kind
from tf_hips.ps.rules.votes import TOLERANT, Votes
from tf_hips.ps.session import MAX_ROUND, Session
from tf_hips.ps.wire import Call
from tf_hips.robust import detox

# Rounds that a child may ask for before all have agreed on the first one.
_FIRST_ASKED = 4
_MAX_FACTS = 64
_MAX_FACT = 200


def seat_of(votes: Votes, secret: int, children: int, number: int, child: int) -> Seat:
    """Where `child` of `children` sits in round `number`."""
    seats = detox.groups(children, votes.r, secret, number, is_fixed=votes.is_fixed)
    group = next(place for place, members in enumerate(seats) if child in members)
    return Seat(group, len(seats))


class Seating:
    """Answers the two calls."""

    def __init__(self) -> None:
        """Nobody has asked."""
        self._asked: dict[tuple[str, int], set[int]] = {}

    def seat(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        """Tells the caller where it sits.

        Raises:
            ProtocolError: nobody votes, or the round is still to come.
        """
        number = wire.from_json(request, round=int)["round"]
        state = session.state
        with session.changed:
            state.members.known(caller)
            votes, store = state.electing.votes, state.store
            if votes is None:
                raise ProtocolError(
                    "Only children that vote have seats. Received: rule "
                    f"{state.members.children[caller.child].rule}"
                )
            if not 0 <= number <= MAX_ROUND:
                raise ProtocolError(
                    f"`round` must be from 0 to 2^31. Received: round={str(number)[:40]}"
                )
            if store is None:
                asked = self._asked.setdefault((session.token, caller.child), set())
                is_open = number in asked or len(asked) < _FIRST_ASKED
                if is_open:  # what is refused stays so
                    asked.add(number)
            elif number <= store.round:
                is_open = True
            else:
                is_open = number == store.round + 1 and store.of(0).is_merged(store.round)
                is_open = is_open or number == store.of(0).first_round
            if not is_open:
                raise ProtocolError(
                    "Seats of a round are told when the round before it is over. Received: "
                    f"round={number} from site `{call.site}`"
                )
            children = len(state.members.terms.parties)
            found = seat_of(votes, state.electing.secret or 0, children, number, caller.child)
        return wire.to_json(**dataclasses.asdict(found))

    def replica(self, request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
        """Compares what decides on the caller's bits with what others have said.

        A difference ends a run whose first round is not over. Later it is one of the caller, which
        has come back or lies: the others may go on without it.

        Raises:
            ProtocolError: it is no such thing, or differs where votes are on equal bytes.
        """
        facts = _read(wire.from_json(request, facts=str)["facts"])
        electing = session.state.electing
        with session.changed:
            members = session.state.members
            members.known(caller)
            known = electing.replicas
            others = sorted(set(known) - {caller.child})
            differing = next((one for one in others if known[one] != facts), None)
            is_exact = electing.votes is not None and electing.votes.vote != TOLERANT
            store = session.state.store
            is_on = store is not None and store.round > store.of(0).first_round
            is_refused = is_exact and is_on and differing is not None
            if known.get(caller.child) != facts and not is_refused:
                known[caller.child] = facts
                session.state.recorder.add(Kind.REPLICA, child=caller.child, facts=facts)
            if differing is None:
                return wire.to_json(differs=None)
            text = (
                f"Sites `{members.site(differing)}` and `{call.site}` cannot compute equal bytes: "
                f"{_difference(known[differing], facts)}"
            )
            electing.tell(
                "replicas_differ", sites=[members.site(differing), call.site], reason=text
            )
            if is_exact:
                text += (
                    ". Votes are on equal bytes: make them alike, or take `vote=tolerant` "
                    "(`--vote tolerant`)"
                )
                if not is_refused:
                    session.end(text, ProtocolError)
                raise ProtocolError(text)
        log.warning("%s", text)
        return wire.to_json(differs=text)


def _read(text: str) -> dict[str, str]:
    try:
        facts: Any = json.loads(text)
    except (ValueError, RecursionError):
        facts = None
    is_good = isinstance(facts, dict) and len(facts) <= _MAX_FACTS
    if not is_good or not all(
        isinstance(value, str) and len(name) <= _MAX_FACT and len(value) <= _MAX_FACT
        for name, value in facts.items()
    ):
        raise ProtocolError(
            f"`facts` must be texts by name, at most {_MAX_FACTS} of {_MAX_FACT} characters. "
            f"Received: {text[:80]!r}"
        )
    return dict(facts)


def _difference(here: dict[str, str], there: dict[str, str]) -> str:
    names = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    return "; ".join(
        f"{name} is {here.get(name, 'not said')} and {there.get(name, 'not said')}"
        for name in names
    )
