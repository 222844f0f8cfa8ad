# SPDX-License-Identifier: Apache-2.0
"""What a server tells its children of their groups, and what it asks them before they vote.

    Seat      where the caller sits in a round: the number of its group, and of how many
    Replica   what decides on the caller's bits, which must be the same where bytes are compared

Nobody hears who else sits in its group, nor where it will sit: a round's seats are told when the
round before it is merged. They are a function of the server's secret and of the round, so a child
that does a round again, as after a crash, hears the same.
"""

import dataclasses

from tf_hips import log
from tf_hips.errors import ENDED, ProtocolError
from tf_hips.ps.client.vote import Seat
from tf_hips.ps.robust import replicas
from tf_hips.ps.rounds.round import MAX_ROUND
from tf_hips.ps.rules.votes import Votes
from tf_hips.ps.session.members import Caller, Members
from tf_hips.ps.session.session import Session
from tf_hips.ps.terms.recorder import Kind
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.wire import Call
from tf_hips.robust import detox

_ADVICE = ". Votes are on equal bytes: make them alike, or take `vote=tolerant` (`--vote tolerant`)"


def seat_of(votes: Votes, secret: int, members: Members, number: int, child: int) -> Seat:
    """Where `child` sits in round `number`: its group among those of the whole tree."""
    seats = detox.groups(len(members.terms.parties), votes.r, secret, number, fixed=votes.fixed)
    group = next(place for place, sitting in enumerate(seats) if child in sitting)
    first, groups = members.groups_of(0)  # where all groups of this server begin
    return Seat(first + group * members.children[child].workers, groups)


def seat(request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
    """Tells the caller where it sits.

    That of round 0 it may hear at once; else it waits until all have agreed on the model, and so
    on their first round.

    Raises:
        ProtocolError: nobody votes, or the round is still to come; or the caller cannot compute
            what most compute.
        PeerError: the others have not agreed on the model in time.
    """
    number = wire.from_json(request, round=int)["round"]
    state = session.state
    with session.changed:
        state.members.known(caller)
        votes = state.electing.votes
        if votes is None:
            raise ProtocolError(
                "Only children that vote have seats. Received: rule "
                f"{state.members.children[caller.child].rule}"
            )
        if not 0 <= number <= MAX_ROUND:
            raise ProtocolError(
                f"`round` must be from 0 to 2^31. Received: round={str(number)[:40]}"
            )
        why_unlike = state.electing.why_unlike(caller.child)
        if why_unlike is not None:
            raise ProtocolError(why_unlike + _ADVICE)
        if number > 0:
            session.wait_agreed(caller, f"the seat of round {number}")
        if state.store is not None and not _is_told(session, number):
            raise ProtocolError(
                "Seats of a round are told when the round before it is over. Received: "
                f"round={number} from site `{call.site}`"
            )
        secret = state.electing.secret or 0
        found = seat_of(votes, secret, state.members, number, caller.child)
    return wire.to_json(**dataclasses.asdict(found))


def replica(request: bytes, call: Call, caller: Caller, session: Session) -> bytes:
    """Compares what decides on the caller's bits with what others have said.

    Where votes are on equal bytes, whoever differs from most is refused; a run ends in which most
    cannot agree. A caller that differs after the first round has come back or lies: the others may
    go on without it.

    Raises:
        ProtocolError: it is no such thing, or differs where votes are on equal bytes.
    """
    facts = replicas.read(wire.from_json(request, facts=str)["facts"])
    electing = session.state.electing
    with session.changed:
        session.state.members.known(caller)
        if session.ended is not None:
            raise session.error(f"{ENDED}{session.ended}")
        electing.check_replica(caller.child, facts)
        differs = (_exactly if electing.is_exact else _tolerantly)(facts, caller, session)
    if differs is not None:
        log.warning("%s", differs)
    return wire.to_json(differs=differs)


def _is_told(session: Session, number: int) -> bool:
    """Whether seats of a round may be told, now that all have agreed on the model."""
    store = session.store
    if store is None or number <= store.round:
        return True
    rounds = store.of(0)
    is_next = number == store.round + 1 and rounds.is_merged(store.round)
    return is_next or number == rounds.first_round


def _exactly(facts: replicas.Facts, caller: Caller, session: Session) -> None:
    """What a child says whose bytes must be those of others, with the lock held."""
    state = session.state
    electing, children = state.electing, len(state.members.terms.parties)
    known, child = electing.replicas, caller.child
    others = {one: said for one, said in sorted(known.items()) if one != child}
    before, said = replicas.most(others, children), others | {child: facts}
    agreed = replicas.most(said, children)
    if agreed is not None and facts != agreed:
        text = electing.told_apart(child, facts, agreed)
        other = next(one for one, said_of in others.items() if said_of == agreed)
        _tell(session, other, child, text)
        raise ProtocolError(text + _ADVICE)
    store = session.store
    is_on = store is not None and store.round > store.of(0).first_round
    differing = next((one for one, said_of in others.items() if said_of != facts), None)
    if agreed is None and differing is not None and (is_on or not replicas.is_open(said, children)):
        text = _apart(session, differing, child, facts)
        _tell(session, differing, child, text)
        if not is_on:
            session.end(text + _ADVICE, ProtocolError)
        raise ProtocolError(text + _ADVICE)
    if known.get(child) != facts:
        electing.hear(child, facts)
        state.recorder.add(Kind.REPLICA, child=child, facts=facts)
    if agreed is not None and before is None:
        for one in others:
            if others[one] != agreed:  # it was heard before it was known what most say
                text = electing.told_apart(one, others[one], agreed)
                _tell(session, child, one, text)
                log.warning("%s", text)


def _tolerantly(facts: replicas.Facts, caller: Caller, session: Session) -> str | None:
    """The same of a child whose rows need only be near those of others; in what they differ."""
    known, child = session.state.electing.replicas, caller.child
    if known.get(child) != facts:
        session.state.electing.hear(child, facts)
        session.state.recorder.add(Kind.REPLICA, child=child, facts=facts)
    differing = next((one for one in sorted(known) if known[one] != facts), None)
    if differing is None:
        return None
    text = _apart(session, differing, child, facts)
    _tell(session, differing, child, text)
    return text


def _apart(session: Session, other: int, child: int, facts: replicas.Facts) -> str:
    members = session.state.members
    return (
        f"Sites `{members.site(other)}` and `{members.site(child)}` cannot compute equal bytes: "
        f"{replicas.difference(session.state.electing.replicas[other], facts)}"
    )


def _tell(session: Session, other: int, child: int, text: str) -> None:
    members = session.state.members
    session.state.electing.tell(
        "replicas_differ", sites=[members.site(other), members.site(child)], reason=text
    )
