# SPDX-License-Identifier: Apache-2.0
"""Rounds whose children sit in groups and vote: one of each group's packets is in the result.

    ballots of all children      who has said nothing when a quorum closes the round is absent
    packets of one of a group    asked for, checked against the digest, else the next is asked
    packets of all groups        --> buckets --> rule --> one packet per chunk, as of any round

Who sits with whom comes from a secret of this server and the round, so it is never stored. A group
whose members do not agree is dropped, and the rule counts it as a bad row.

Whoever is asked and sends nothing for some seconds, hangs up, or has hung up before it could hear
that, is asked beside the next of those who agree. Where rounds wait for all children, a group waits
for one of them; with a quorum it is dropped when all of them are silent or lost, and nobody else of
it can agree any more.

A server of a party sends its result up as the mean of as many batches as groups had a vote.

Invariants:
- A result depends on ballots and packets, and on which groups were dropped; all three are recorded
  before it is told. On who was asked, and when, it does not depend.
- Weights of children are not looked at: whoever lies would say that it stands for much. That an
  update is refused by its own child is a ballot as others are.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tf_hips.errors import NonFiniteError, PacketError
from tf_hips.log import Tell
from tf_hips.ops.native import Floats
from tf_hips.ps.robust.asked import ASK_S, ASK_TIMES, MOST_TIMES, Asked
from tf_hips.ps.robust.ballots import REFUSED, Ballots, Group, digest_of
from tf_hips.ps.robust.tally import Tally, Winners
from tf_hips.ps.rounds.partial import Key
from tf_hips.ps.rounds.round import Packet, TooFewRowsError
from tf_hips.ps.rounds.store import Job, Store
from tf_hips.ps.rules.robust import is_refused
from tf_hips.ps.rules.votes import TOLERANT, Votes
from tf_hips.ps.terms.quorum import RETURN_S, Clock
from tf_hips.ps.terms.recorder import Kind
from tf_hips.ps.transport.wire import Buffer
from tf_hips.robust import detox


class VotingStore(Store):
    """The rounds of one model whose children vote. Thread-safe."""

    def __init__(
        self,
        *model: Any,
        votes: Votes,
        winners: Winners,
        secret: int,
        tell: Tell,
        clock: Clock,
        gives_up: bool,
        workers: int,
        why_unlike: Callable[[int], str | None],
        **options: Any,
    ) -> None:
        """A store in which nothing has come.

        Args:
            model: as for `Store`.
            votes: how children vote.
            winners: the rule of `options["updates"]`.
            secret: what groups are drawn from; no child knows it.
            tell: writes an event: its name, and fields.
            clock: calls later.
            workers: of each child.
            why_unlike: why a child cannot compute what most others do; None: it can.
            gives_up: whether a group is dropped when none of those who agree sends its packets,
                and rounds are closed without some; else they wait.
            options: as for `Store`.
        """
        super().__init__(*model, **options)
        self.votes = votes
        self._why_unlike = why_unlike
        self.is_restoring = False
        self._tally = Tally(self._sites, tell)
        self.counts = self._tally.counts
        self._winners = winners
        self._secret = secret
        self._workers = workers
        self._clock = clock
        self._gives_up = gives_up
        self._ballots: dict[int, Ballots] = {}
        self._newest: dict[int, int] = {}  # position of the newest record, by round
        self._asked = Asked(clock)
        self._refusing: set[Key] = set()  # children that have refused their own update, and rounds
        self._due: list[tuple[int, Group]] = []  # rounds and groups that are to be compared
        self._is_comparing = False

    @property
    def is_by_digest(self) -> bool:
        """Whether children send digests, and packets when they are asked."""
        return self.votes.is_by_digest

    def weigh(self, number: int, child: int, weight: float) -> bool:
        """Nobody looks at what a child says that it stands for, but whether it has no update.

        Returns:
            Whether it is new that it has refused its own.
        """
        with self.changed:
            key = child, number
            if not is_refused(weight) or key in self._refusing or self._is_decided(number):
                return False
            if child in self._of(number).said:
                return False  # its ballot stands
            self._refusing.add(key)
            return True

    def why_unlike(self, child: int) -> str | None:
        """Why a child cannot compute what most others do; None: nothing is known of that."""
        with self.changed:
            return self._why_unlike(child)

    def weight(self, number: int) -> float | None:
        """What those stand for together whose packets are in a round: batches, one of a worker."""
        with self.changed:
            return float(len(self._get(number).counted or ()) * self._workers)

    def vote(self, number: int, child: int, digest: bytes) -> bool:
        """Takes the ballot of a child; whether it is new.

        Raises:
            ProtocolError: the round was not begun.
        """
        with self.changed:
            if self._is_decided(number):
                return False
            ballot = self._ballot(number, child, digest)
            is_new = self._of(number).say(child, ballot)
            if is_new:
                self._record(number, Kind.VOTED, ballot, child=child)
            jobs = self._look(number)
        self._merge_quietly(jobs)
        return is_new

    def who_agreed(self, number: int, refused: Mapping[int, str]) -> dict[int, str]:
        """Of each child that has said what a refused row of a round is the reason.

        Args:
            number: the round.
            refused: why, by the child whose packets the row is; which one of those who agreed that
                is, is chance.
        """
        return {
            child: f"{why}, in the vote of its group"
            for winner, why in refused.items()
            for child in self.behind(number, [winner])
        }

    def behind(self, number: int, winners: Iterable[int]) -> list[int]:
        """All who have said in a round what children have sent whose packets groups have taken."""
        with self.changed:
            ballots = self._ballots.get(number)
            if ballots is None:
                return []
            return sorted(child for winner in winners for child in ballots.behind(winner))

    def asks(self, number: int, child: int) -> bool:
        """Whether packets of `child` are wanted that were asked for."""
        with self.changed:
            return self.is_by_digest and self._takes(number, child)

    def told(self, number: int, child: int, received: Callable[[], int], times: int = 1) -> None:
        """Notes that a child has heard that it is asked.

        Args:
            number: the round.
            child: who was asked.
            received: counts the bytes that come of it.
            times: how often it will have been looked at.
        """
        seen = received()

        def look() -> None:
            is_silent = received() == seen
            is_lost = is_silent or times == MOST_TIMES
            if is_lost or times == ASK_TIMES:
                self.passes_over(number, child, is_lost=is_lost)
            if not is_lost:
                self.told(number, child, received, times + 1)

        with self.changed:
            if self._takes(number, child):
                self._asked.hears((child, number))
                self._asked.look_later((child, number), look)

    def passes_over(self, number: int, child: int, *, is_lost: bool = True) -> None:
        """Asks the next of a group, as `child` does not send what it was asked for.

        Args:
            number: the round.
            child: who was asked.
            is_lost: whether nothing of it is expected any more; else it may come back.
        """
        with self.changed:
            if not self._takes(number, child) or not self.is_by_digest:
                return
            ballots = self._of(number)
            group = ballots.group_of(child)
            self._asked.pass_over((child, number), is_lost=is_lost)
            self._ask(number, ballots, group)
            jobs = self._look(number)
        self._merge_quietly(jobs)

    def lose(self, child: int) -> None:
        """Others go on without a child, with the lock held."""
        number = self.round
        self._clock.after(0.0, lambda: self.passes_over(number, child))

    def whole(self, number: int) -> list[int]:
        """The children that have said something in a round that is not closed."""
        with self.changed:
            return sorted(self._of(number).said)

    def is_closed(self, number: int) -> bool:
        """Whether it is decided whose ballots count in round `number`."""
        with self.changed:
            return self._is_decided(number) or self._of(number).is_closed

    def close(self, number: int, children: Iterable[int], late: Iterable[Key]) -> list[Job]:
        """Who has said nothing is absent; the first decision stands; as of `Store`."""
        del late
        with self.changed:
            if self.is_closed(number):
                return []
            self._of(number).close()
            self._record(number, Kind.CLOSED, children=sorted(children), late=[])
            jobs = self._look(number)
            if self._due and not self.is_restoring:
                self._clock.after(0.0, lambda: self._merge_quietly([]))
            return jobs

    def merge(self, jobs: Iterable[Job]) -> None:
        """As of `Store`; groups are compared before that waited for the end of the round."""
        super().merge([*jobs, *self._compare()])

    def redo(self, kind: Kind, fields: Mapping[str, Any], data: Buffer) -> None:
        """Does what a record of a ballot, or of what was decided, says."""
        number = fields["round"]
        if kind == Kind.VOTED:
            self.vote(number, fields["child"], bytes(data))
            return
        with self.changed:
            if self._is_decided(number):
                return
            winners = {group: child for group, child in fields["winners"]}
            are_alike = self.votes.vote != TOLERANT
            self._of(number).settle(winners, fields["dropped"], are_alike=are_alike)
            jobs = self._decide(number, self._of(number))
        self._merge_quietly(jobs)

    def begin(self, number: int) -> bool:
        """As of `Store`. While a server is restored, the round before may be still to be merged."""
        if self.is_restoring:
            self._catch_up()
        return super().begin(number)

    def resume(self) -> None:
        """All records are done: from now on rounds are decided as they come."""
        self._catch_up()
        self.is_restoring = False
        with self.changed:
            number = self.round
            for group in () if self._is_decided(number) else self._of(number).groups:
                for child in group.asked:  # who hears it now begins anew
                    self._expect(number, child, ASK_S + RETURN_S)

    def _catch_up(self) -> None:
        """Decides the newest round, if that had been done, and the record of it was lost."""
        with self.changed:
            number = self.round
            ballots = self._of(number)
            is_due = ballots.is_settled and not self._is_decided(number)
            jobs = self._decide(number, ballots) if is_due else []
        self._merge_quietly(jobs)

    def delivered(self, number: int, child: int) -> frozenset[int]:
        """The chunks of a child that need not come any more."""
        with self.changed:
            if not self._takes(number, child):
                return self._is_here
            return frozenset(self._get(number).delivered[child])

    def missing(self, number: int) -> dict[str, int]:
        """Children that owe a ballot or chunks of round `number`, with how many have come."""
        with self.changed:
            if self._is_decided(number):
                return {}
            ballots, delivered = self._of(number), self._get(number).delivered
            owing = [
                child
                for child in range(len(self._sites))
                if (child not in ballots.said and not ballots.is_closed)
                or (self.is_by_digest and self._takes(number, child))
            ]
            return {self._sites[child]: len(delivered[child]) for child in owing}

    def progress(self, child: int) -> tuple[int, int]:
        """The newest round in which `child` has said something, and its chunks that need not come.

        The round before the first where it has said nothing.
        """
        with self.changed:
            for number in sorted(self._rounds, reverse=True):
                ballots = self._ballots.get(number)
                if ballots is not None and child in ballots.said:
                    return number, len(self.delivered(number, child))
            return super().progress(child)

    def archive(self) -> None:
        """As of `Store`; ballots of rounds that are over go."""
        super().archive()
        with self.changed:
            first = min(self._rounds)
            for kept in (self._ballots, self._newest):
                for number in [one for one in kept if one < first]:
                    del kept[number]
            self._asked.forget_before(first)
            self._refusing -= {key for key in self._refusing if key[1] < first}

    def _add(self, number: int, child: int, packets: Sequence[tuple[int, Buffer | Packet]]) -> int:
        num_new = 0
        for chunk, data in packets:
            packet = np.frombuffer(data, np.uint8)
            with self.changed:
                if not self._wants(number, child, chunk):
                    continue
                num_new += 1
                self._record(number, Kind.PACKET, packet.data, child=child, chunk=chunk)
                current = self._get(number)
                current.delivered[child].add(chunk)
                current.packets[chunk][child] = packet
                is_whole = len(current.delivered[child]) == len(self.chunks)
                whole = [current.packets[one][child] for one in self.chunks] if is_whole else None
            if whole is not None:
                self._take_whole(number, child, whole)
        return num_new

    def _wants(self, number: int, child: int, chunk: int) -> bool:
        with self.changed:
            takes = self._takes(number, child)
            return takes and chunk not in self._get(number).delivered[child]

    def _takes(self, number: int, child: int) -> bool:
        """Whether packets of a child may count, with the lock held."""
        if self._is_decided(number):
            return False
        ballots = self._of(number)
        if len(self._get(number).delivered[child]) == len(self.chunks):
            return False
        if not self.is_by_digest:
            return not ballots.is_closed  # its packets are its ballot, whatever others said
        group = ballots.group_of(child)
        is_asked = child in group.asked or (self.is_restoring and child in ballots.said)
        return is_asked and not group.is_settled

    def _take_whole(self, number: int, child: int, packets: Sequence[Packet]) -> None:
        """All packets of a child have come."""
        digest = digest_of(packet.data for packet in packets)
        with self.changed:
            if self._is_decided(number):
                return
            digest = self._ballot(number, child, digest)
            if not self.is_by_digest and not self._of(number).say(child, digest):
                return  # the round was closed while the last of them came
        why, is_looked_at = None, False
        while True:
            with self.changed:
                if self._is_decided(number):
                    return
                ballots = self._of(number)
                group = ballots.group_of(child)
                is_true = ballots.said.get(child) == digest
                may_win = is_true and not group.is_settled and child in ballots.agreed(group)
                if is_looked_at or not may_win:
                    jobs = self._take(number, child, digest, why)
                    break
            # The lock is free meanwhile. What has not been looked at never wins.
            why, is_looked_at = self._why_unusable(number, child, packets), True
        self._merge_quietly(jobs)

    def _take(self, number: int, child: int, digest: bytes, why: str | None) -> list[Job]:
        """Takes what is whole and was looked at, with the lock held; `why` it is of no use."""
        ballots = self._of(number)
        if why is not None:
            ballots.group_of(child).drop(why)
        elif self.votes.vote != TOLERANT and not ballots.deliver(child, digest):
            for one in self.chunks:
                self._get(number).packets[one].pop(child, None)
        return self._look(number)

    def _why_unusable(self, number: int, child: int, packets: Sequence[Packet]) -> str | None:
        """What is wrong with what most of a group say, if anything is."""
        for chunk, packet in zip(self.chunks, packets, strict=True):
            try:
                self._combining.check(number, child, chunk, packet)
            except (PacketError, NonFiniteError) as error:
                return str(error)
        return None

    def _look(self, number: int) -> list[Job]:
        """Asks whom there is to ask; what is to be merged where all is settled."""
        ballots = self._of(number)
        for group in ballots.groups:
            if self.votes.vote != TOLERANT:
                ballots.look(group)
            elif ballots.is_complete(group) and not group.is_compared:
                group.is_compared = True
                self._due.append((number, group))
            if self.is_by_digest and not self._awaits(number, ballots, group):
                self._ask(number, ballots, group)
                self._give_up(number, ballots, group)
        self.changed.notify_all()
        # While a server is restored, what was decided is in a record, or nobody was told.
        is_due = ballots.is_settled and not self.is_restoring
        return self._decide(number, ballots) if is_due else []

    def _awaits(self, number: int, ballots: Ballots, group: Group) -> bool:
        """Whether packets may still come of somebody who was asked."""
        return any(
            child not in ballots.proven and not self._asked.is_silent((child, number))
            for child in group.asked
        )

    def _give_up(self, number: int, ballots: Ballots, group: Group) -> None:
        """Drops a group of which all who agree were asked in vain, where rounds go on without some.

        Not before all have said something: who is slower may agree, too, and send.
        """
        is_open = not group.asked or self._awaits(number, ballots, group)
        if self._gives_up and not is_open and ballots.is_complete(group):
            group.drop("none of those who agreed has sent its packets")

    def _compare(self) -> list[Job]:
        """Settles groups by what their rows are, all of which are there.

        The lock is free while they are decoded, by one thread at a time: they take memory. Until
        a group is settled its round is open, so nothing of it goes.

        Returns:
            What is to be merged where all groups of a round are settled.
        """
        jobs: list[Job] = []
        while True:
            with self.changed:
                if self._is_comparing or not self._due:
                    return jobs
                self._is_comparing = True
                number, group = self._due.pop(0)
                said, kept = self._of(number).said, self._get(number).packets
                present = [child for child in group.members if child in said]
                packets = [
                    [] if said[child] == REFUSED else [kept[one].get(child) for one in self.chunks]
                    for child in present
                ]
            try:
                alike = self._alike(number, present, packets)
            finally:
                with self.changed:
                    self._is_comparing = False
            with self.changed:
                if self._is_decided(number):
                    continue  # a server that is restored knows what was decided
                if 2 * len(alike) <= len(group.members):
                    group.drop("no majority")
                elif not group.is_settled:
                    group.near, group.winner = alike, alike[0]
                jobs += self._look(number)

    def _alike(
        self, number: int, children: Sequence[int], packets: Sequence[Sequence[Packet | None]]
    ) -> tuple[int, ...]:
        """Those of `children` whose rows are alike, that in the middle first; without the lock."""
        rows: list[Floats] = []
        for held in packets:
            row = self._combining.row(number, self.chunks, held) if held else None
            rows.append(np.full(1, np.nan, np.float32) if row is None else row)
        return detox.vote_tolerant(rows, children, self.votes.epsilon).agreed if rows else ()

    def _ask(self, number: int, ballots: Ballots, group: Group) -> None:
        child = ballots.next_to_ask(group, self._asked.last)
        if child is not None:
            group.asked.append(child)
            if not self.is_restoring:
                self._expect(number, child, ASK_S)
            self.changed.notify_all()

    def _expect(self, number: int, child: int, seconds: float) -> None:
        """Passes over a child that has no call over which it hears that it is asked."""
        if self._takes(number, child):
            self._asked.look_later(
                (child, number), lambda: self.passes_over(number, child), seconds
            )

    def _decide(self, number: int, ballots: Ballots) -> list[Job]:
        """All groups are settled: who is in the round, with the lock held."""
        current = self._get(number)
        num_chunks = len(self.chunks)
        owing = [one for one, held in enumerate(current.delivered) if len(held) < num_chunks]
        passed_over = self._asked.end(number, owing)
        winners = ballots.winners()
        dropped = [k for k, group in enumerate(ballots.groups) if group.is_dropped]
        self._record(number, Kind.TALLIED, winners=list(winners.items()), dropped=dropped)
        current.counted = tuple(winners.values())
        position = self._newest.get(number, 0)
        current.positions = [position] * len(current.positions)
        if not self.is_restoring:
            self._tally.note(number, ballots, passed_over)
        if not winners:
            why = "; ".join(sorted({group.why for group in ballots.groups}))
            current.refusals.append(
                (
                    position,
                    TooFewRowsError(
                        f"Round {number}: at least one of {len(ballots.groups)} groups must agree. "
                        f"Received: {why}"
                    ),
                )
            )
            return []
        self._winners.dropped[number] = {
            ballots.groups[k].members[0]: f"its group is dropped: {ballots.groups[k].why}"
            for k in dropped
        }
        jobs: list[Job] = []
        for chunk in self.chunks:
            held = current.packets[chunk]
            jobs.append((current, chunk, {child: held[child] for child in current.counted}))
            current.packets[chunk] = {}
        if not self._is_held:
            return jobs
        self._waiting += jobs
        return []

    def _ballot(self, number: int, child: int, digest: bytes) -> bytes:
        """What a child says by the digest of its packets, with the lock held."""
        return REFUSED if (child, number) in self._refusing else digest

    def _of(self, number: int) -> Ballots:
        if number not in self._ballots:
            self._get(number)  # there is such a round
            seats = detox.groups(
                len(self._sites),
                self.votes.r,
                self._secret,
                number,
                fixed=self.votes.fixed,
            )
            self._ballots[number] = Ballots(seats, closes=not self._gives_up)
        return self._ballots[number]

    def _is_decided(self, number: int) -> bool:
        """Whether nothing that comes changes a round any more, with the lock held."""
        if self.is_past(number) or number < min(self._rounds):
            return True
        current = self._get(number)
        return current.counted is not None or current.num_merged == len(self.chunks) > 0

    def _record(self, number: int, kind: Kind, data: Buffer = b"", **fields: Any) -> None:
        if self._recorder.is_keeping:
            self._newest[number] = self._recorder.add(kind, data, round=number, **fields)

    def _merge_quietly(self, jobs: Sequence[Job]) -> None:
        """Merges; who waits is told of a round that is refused."""
        jobs = [*jobs, *self._compare()]
        if jobs:
            with contextlib.suppress(NonFiniteError):
                self._merge_all(jobs)
        with self.changed:
            self.changed.notify_all()
