# SPDX-License-Identifier: Apache-2.0
"""What a run keeps of the votes of its children, beside their rounds (`voted`).

The secret from which groups are drawn, or seeds of sketches (`sketched_top`), is made when all have
joined, and recorded with them: a server that is restored draws the same. It never leaves the
server.
"""

import contextlib
import dataclasses
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tf_hips.errors import ProtocolError
from tf_hips.log import Tell
from tf_hips.ps.robust import replicas
from tf_hips.ps.robust.choices import Choices
from tf_hips.ps.robust.rejections import Rejections
from tf_hips.ps.robust.tally import Counts, Winners
from tf_hips.ps.robust.voted import VotingStore
from tf_hips.ps.rules import UpdateRule
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.rules.votes import TOLERANT, Votes
from tf_hips.ps.terms.quorum import Clock, SystemClock
from tf_hips.ps.terms.recorder import Entry, Kind

# Of processes that come back on other machines; each time is a record.
_MOST_TOLD = 64


class Electing:
    """Votes of one run. The session's lock guards it.

    Attributes:
        votes: how children vote; None: they do not.
        secret: what groups are drawn from, or seeds of sketches; None: nothing is.
        replicas: what children have said that decides on their bits, by child.
        tell: writes an event: its name, and fields.
    """

    def __init__(self, sites: Sequence[str], rejections: Rejections, choices: Choices) -> None:
        """Nobody has joined."""
        self.votes: Votes | None = None
        self.secret: int | None = None
        self.replicas: dict[int, dict[str, str]] = {}
        self.tell: Tell = _tell_nobody
        self._sites = tuple(sites)
        self._rejections = rejections
        self._choices = choices
        self._clock: Clock = SystemClock()
        self._store: VotingStore | None = None
        self._is_restoring = False
        self._agreed: replicas.Facts | None = None  # what most say
        self._num_told: Counter[int] = Counter()  # how often a child has said something new

    def use(self, tell: Tell | None, clock: Clock | None) -> None:
        """Events go to `tell`, None: nowhere; `clock` calls later, None: the system's."""
        self.tell = tell if tell is not None else _tell_nobody
        self._clock = clock if clock is not None else self._clock

    def begin(
        self, votes: Votes | None, secret: int | None = None, *, has_sketches: bool = False
    ) -> None:
        """All have joined.

        Args:
            votes: how they vote.
            secret: that of the run, if it goes on.
            has_sketches: whether rounds are decided on sketches here, whose seeds are secret, too.
        """
        self.votes = votes
        if votes is not None or has_sketches:
            self.secret = secret if secret is not None else secrets.randbits(63)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Tells nothing meanwhile: rounds are done again."""
        self._is_restoring = True
        try:
            yield
            if self._store is not None:
                self._store.resume()
        finally:
            self._is_restoring = False

    def make_store(
        self,
        rule: UpdateRule,
        *model: Any,
        sizes: Sequence[int],
        gives_up: bool,
        **options: Any,
    ) -> VotingStore:
        """The rounds of children that vote before `rule`; arguments as for `VotingStore`.

        Raises:
            ValueError: nobody votes by it.
        """
        then = rule.robust
        if self.votes is None or self.secret is None or then is None:
            raise ValueError(f"the rule {rule} has no votes")
        winners = Winners(self.votes, then, self._sites, self.secret)
        store = VotingStore(
            *model,
            votes=self.votes,
            winners=winners,
            secret=self.secret,
            tell=lambda event, **fields: self.tell(event, **fields),
            clock=self._clock,
            gives_up=gives_up,
            why_unlike=self.why_unlike,
            updates=Updates(sizes, rule, None, winners),
            refuse=self._refuse,
            choose=self._choose,
            **options,
        )
        store.is_restoring = self._is_restoring
        self._store = store
        return store

    @property
    def is_exact(self) -> bool:
        """Whether children vote on equal bytes."""
        return self.votes is not None and self.votes.vote != TOLERANT

    def why_unlike(self, child: int) -> str | None:
        """Why a child cannot compute the bytes that most compute; None: nothing is known of that.

        Where votes are tolerant there are none that it must compute.
        """
        own, wanted = self.replicas.get(child), self._agreed
        if own is None or wanted is None or own == wanted or not self.is_exact:
            return None
        return self.told_apart(child, own, wanted)

    def hear(self, child: int, facts: replicas.Facts) -> None:
        """A child says what decides on its bits."""
        self.replicas[child] = facts
        self._agreed = replicas.most(self.replicas, len(self._sites))

    def check_replica(self, child: int, facts: replicas.Facts) -> None:
        """Raises ProtocolError where nobody asks for what a child says, or for so much of it."""
        if self.replicas.get(child) == facts:
            return
        self._num_told[child] += 1
        if self._num_told[child] > _MOST_TOLD:
            raise ProtocolError(
                f"A child may say at most {_MOST_TOLD} times that it computes other bits than "
                f"before. Received: another time from site `{self._sites[child]}`"
            )

    def told_apart(self, child: int, own: replicas.Facts, wanted: replicas.Facts) -> str:
        """How a child differs from most, in words."""
        said = sorted(self.replicas.items())
        other = next(one for one, facts in said if one != child and facts == wanted)
        return (
            f"Site `{self._sites[child]}` cannot compute the bytes of most sites, as "
            f"`{self._sites[other]}` does: {replicas.difference(wanted, own)}"
        )

    def counts(self, child: int) -> dict[str, int]:
        """What was seen of a child since the server began, by name."""
        found = self._store.counts[child] if self._store is not None else Counts()
        return dataclasses.asdict(found)

    def entries(self) -> Iterator[Entry]:
        """What a snapshot keeps of it beside the rounds."""
        for child, facts in sorted(self.replicas.items()):
            yield Kind.REPLICA, {"child": child, "facts": facts}, b""

    def _refuse(self, number: int, refused: Mapping[int, str]) -> None:
        """Rows of votes were refused; a group that is dropped has been told of."""
        store = self._store
        if store is not None:
            self._rejections.note(number, store.who_agreed(number, refused))

    def _choose(self, number: int, chosen: Sequence[int], among: Sequence[int]) -> None:
        """Rows of votes were chosen: they are those of all who have agreed on them."""
        store = self._store
        if store is not None:
            self._choices.note(number, store.behind(number, chosen), store.behind(number, among))


def _tell_nobody(event: str, **fields: object) -> None:
    """Where events of a session without a server go."""
