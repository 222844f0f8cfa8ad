# SPDX-License-Identifier: Apache-2.0
"""Who is in a run: the terms it was begun on, and the children that have joined.

All must join on the same terms: each on those of all that are there, or below a robust rule that
the server was told, where one that comes first may lie, on those of child 0, which is trusted
anyway. Who is there on other terms when that comes is put out.

Invariant: a child that is refused changes nothing.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from tf_hips.errors import ProtocolError
from tf_hips.ops import compressor as compressors
from tf_hips.ps import rules
from tf_hips.ps.rules import leaves as leaf_rules
from tf_hips.ps.rules.votes import Votes
from tf_hips.ps.rules.way_down import SAME, as_up
from tf_hips.ps.session.alike import why_unlike
from tf_hips.ps.terms.assignment import WHOLE, Shard
from tf_hips.ps.terms.model import Model, first_difference
from tf_hips.ps.terms.past import MOST_IN_MEMORY
from tf_hips.ps.terms.quorum import Quorum
from tf_hips.ps.terms.tree import (
    BETWEEN,
    MAX_LEAVES,
    Guard,
    Guards,
    Leaf,
    Leaves,
    Paths,
    Place,
    check_names,
    path_of,
)
from tf_hips.ps.transport.wire import MESSAGE_BYTES

# Of paths, names and guards in a `Welcome`, each with the number beside it.
_MOST_TREE_BYTES = MESSAGE_BYTES - (64 << 10)
_TEXT_BYTES = 16
ABOVE = ""  # the rule of a child that leaves it to the topmost server

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the server fixes before any child comes; None: what the first child brings."""

    parties: tuple[str, ...]
    compression: str | None
    downlink: str | None
    max_model_bytes: int
    lost_after_s: float = 120.0
    max_gather_bytes: int = 64 << 20
    shard: Shard = WHOLE
    past_bytes: int = MOST_IN_MEMORY
    rule: str | None = None
    site: str | None = None  # by which it is known to the server above it; None: there is none
    way_up: str | None = None  # compression of its way up; None: what the children bring
    quorum: Quorum | None = None  # None: rounds wait for all
    period: int | None = None  # updates of a chunk between ways up; None: one of each child
    robust: str | None = None  # by which it merges for the server above; None: by sums or means
    is_led: bool = False  # whether shards can decide together: it is shard 0, or knows it

    def check_bytes(self, what: str, num_bytes: int) -> None:
        """Raises ProtocolError if a model's gradients or weights have more bytes than allowed."""
        if num_bytes > self.max_model_bytes:
            raise ProtocolError(
                f"The {what} must have at most {self.max_model_bytes} bytes, the server's "
                f"`max_model_bytes`. Received: {num_bytes} bytes"
            )


@dataclasses.dataclass
class Caller:
    """One call in progress.

    Attributes:
        child: position of the site that calls.
        process: which process of that site calls.
        patience_s: seconds the call may wait while nothing comes that it waits for.
        is_gone: whether its other end has hung up.
        number: later calls have greater ones.
    """

    child: int
    process: str
    patience_s: float
    is_gone: bool = False
    number: int = dataclasses.field(default_factory=_numbers.__next__)


@dataclasses.dataclass
class Child:
    """A site that has joined, or is joining."""

    process: str
    workers: int
    compression: str
    downlink: str
    seed: int
    rule: str = "sum"
    leaves: Leaves = ()
    above: str | None = None  # compression of its server's own way up, if it wishes for one
    paths: Paths = ()  # of its leaves, from there
    guards: Guards = ()  # of the servers there, from there
    model: Model | None = None
    first_round: int = 0
    has_left: bool = False
    is_lost: bool = False  # others go on without it, and it may come back
    num_joining: int = 0  # Join calls that wait; one may be a lost connection's
    groups: int = 0  # of its workers with batches of their own; 0: each worker has
    num_returns: int = 0  # processes that have taken over from one before them
    why_out: str | None = None  # why it was put out, or has left, while it waited for others
    backup: tuple[int, int] | None = None  # round and gather that it can come back to
    asks_same: bool = False  # whether `downlink` is what `same` stands for here

    def __post_init__(self) -> None:
        self.groups = self.groups or self.workers

    def terms(self) -> tuple[object, ...]:
        """What two joins of one child must have in common to be one."""
        return (
            self.process,
            self.workers,
            self.compression,
            self.downlink,
            self.seed,
            self.rule,
            self.leaves,
            self.above,
            self.groups,
        )


class Members:
    """The children of one run, by position. Not thread-safe: the session's lock guards it."""

    def __init__(self, terms: Terms) -> None:
        """Nobody has joined."""
        self.terms = terms
        self.children: dict[int, Child] = {}
        self.is_started = False
        self.session = ""  # what tells this run from others of its name, once it is started
        self.is_sealed = False  # the server above is being told of these children
        self.place: Place | None = None  # what it has answered

    @property
    def are_complete(self) -> bool:
        """Whether nobody is missing."""
        return len(self.children) == len(self.terms.parties)

    @property
    def has_own_rule(self) -> bool:
        """Whether the children go on by a rule of this server, though there is one above it."""
        return self.terms.site is not None and self.terms.rule is not None

    @property
    def votes(self) -> Votes | None:
        """How the children vote here, all of whom have joined; None: they do not."""
        text = self.children[0].rule if self.terms.site is None else self.terms.robust
        return None if text is None else rules.parse(text).votes

    @property
    def doubting_rule(self) -> str | None:
        """The robust rule by which some of the children here may lie; None: all are believed."""
        if self.terms.site is not None and self.terms.robust is not None:
            return self.terms.robust
        text = self.children[0].rule if 0 in self.children else None
        rule = None if text is None else rules.parse(text)
        if rule is None or not rule.is_robust:
            return None
        # Over parties a rule bears whole parties: below a party's server all stand for one another.
        return text if self.terms.site is None or rule.sketch is not None else None

    @property
    def _doubts(self) -> bool:
        """Whether terms are those of child 0: others may lie, by the rule that was told here."""
        told = self.terms.rule if self.terms.site is None else self.terms.robust
        return told is not None and rules.parse(told).is_robust

    @property
    def has_sketches(self) -> bool:
        """Whether rounds are decided here on sketches of leaves; all children have joined."""
        if self.terms.site is not None or not self.children[0].rule:
            return False
        return rules.parse(self.children[0].rule).sketch is not None

    @property
    def num_groups(self) -> int:
        """Groups of workers below with batches of their own; all children have joined."""
        votes = self.votes
        if votes is None:
            return sum(child.groups for child in self.children.values())
        return votes.num_groups(len(self.children)) * self.children[0].workers

    def groups_of(self, position: int) -> tuple[int, int]:
        """Where a child's groups of workers with batches of their own begin, among how many.

        Of children whose groups change it is where those of all of them begin.
        """
        votes, place = self.votes, self.place
        if votes is None:
            before = sum(self.children[one].groups for one in range(position))
        else:
            before = position // votes.r * self.children[0].workers if votes.fixed else 0
        if place is None:
            return before, self.num_groups
        return place.first_group + before, place.groups

    def shares(self) -> dict[int, float]:
        """What children stand for without being asked: their workers."""
        return {place: float(child.workers) for place, child in self.children.items()}

    @property
    def have_left(self) -> bool:
        """Whether every child has joined and left again, but for those that are lost.

        Fewer than a quorum have ended no run by leaving: others may come back for its rest.
        """
        children = self.children.values()
        num_left = sum(child.has_left for child in children)
        least = self.terms.quorum.least if self.terms.quorum is not None else 1
        return (
            self.are_complete
            and all(child.has_left or child.is_lost for child in children)
            and num_left >= least
        )

    @property
    def lost(self) -> list[int]:
        """The children that others go on without, and that may come back."""
        return [place for place, child in sorted(self.children.items()) if child.is_lost]

    @property
    def living(self) -> set[int]:
        """The children that are neither lost nor have left."""
        children = self.children.items()
        return {place for place, child in children if not (child.is_lost or child.has_left)}

    def num_present(self) -> int:
        """How many children have not left, as far as it is recorded."""
        return sum(not child.has_left for child in self.children.values())

    def site(self, child: int) -> str:
        """The name of a child."""
        return self.terms.parties[child]

    def is_leaf(self, child: int) -> bool:
        """Whether a child stands for itself alone; else it is the server of a party."""
        one = self.children[child]
        return one.leaves == ((self.site(child), one.workers),)

    def names(self, children: Iterable[int]) -> str:
        """The names of children, for messages."""
        return ", ".join(f"`{self.site(child)}`" for child in sorted(children))

    def absent(self) -> set[int]:
        """The children that have not joined."""
        return set(range(len(self.terms.parties))) - set(self.children)

    def without_model(self) -> set[int]:
        """The children that have not sent their model."""
        return {place for place, child in self.children.items() if child.model is None}

    def gone(self, children: Iterable[int]) -> list[int]:
        """Those of `children` that have left."""
        return [place for place in children if self.children[place].has_left]

    @property
    def leaves(self) -> Leaves:
        """The leaves of all children, in order."""
        return tuple(leaf for one in sorted(self.children) for leaf in self.children[one].leaves)

    @property
    def leaves_by_path(self) -> Leaves:
        """The same, each by its path from this server."""
        found: list[Leaf] = []
        for one, child in sorted(self.children.items()):
            counts = [count for _, count in child.leaves]
            found += zip(self._paths(one, child), counts, strict=True)
        return tuple(found)

    @property
    def guards(self) -> Guards:
        """Robust rules and quorums of this server and those below it; all children have joined."""
        terms = self.terms
        rule = terms.robust if terms.site is not None else self.children[0].rule
        is_robust = bool(rule) and rules.parse(rule or "").is_robust
        least = terms.quorum.least if terms.quorum is not None else None
        found: list[Guard] = []
        if is_robust or least is not None:
            found.append(("", rule if is_robust else None, least))
        for one, child in sorted(self.children.items()):
            site = self.site(one)
            found += (
                (f"{site}{BETWEEN}{path}" if path else site, below, count)
                for path, below, count in child.guards
            )
        return tuple(found)

    @property
    def tree(self) -> tuple[Paths, Guards]:
        """Paths of all leaves, and guards of all servers, of the whole tree."""
        if self.place is not None:
            known = tuple(site for site, _ in self.place.leaves)
            return self.place.paths or known, self.place.guards
        return tuple(path for path, _ in self.leaves_by_path), self.guards

    @property
    def why_too_few(self) -> str | None:
        """Why a topmost server cannot begin with the leaves of all children; None: it can."""
        rule = self.children[0].rule
        return leaf_rules.why_too_few(rule, len(self.leaves)) if rule != ABOVE else None

    @property
    def paths_by_child(self) -> list[list[str]]:
        """Paths of the leaves of each child, from this server."""
        return [self._paths(one, child) for one, child in sorted(self.children.items())]

    def _paths(self, position: int, child: Child) -> list[str]:
        paths = child.paths or tuple(site for site, _ in child.leaves)
        return [path_of(self.site(position), path) for path in paths]

    def whole(self, position: int) -> tuple[int, Leaves]:
        """The number of a child's first leaf in the whole tree, and all leaves of that."""
        before = sum(len(self.children[one].leaves) for one in range(position))
        place = self.place
        return (before, self.leaves) if place is None else (place.first + before, place.leaves)

    def admit(self, position: int, child: Child) -> Child:
        """Takes in `child`, or finds that it is in already; the one that is in.

        Raises:
            ProtocolError: it disagrees with the server or with those before it, or its site is in
                the run already.
        """
        known = self.children.get(position)
        if known is None or known.terms() != child.terms():
            is_other = known is not None and known.terms()[1:] != child.terms()[1:]
            if self.is_started or (self.is_sealed and is_other):
                raise self.second_process(position)
            self._check_terms(position, child)
            self.children[position] = known = child
            if position == 0 and self._doubts:
                self._put_out_unlike(child)
        return known

    def known(self, caller: Caller) -> Child:
        """The child that calls.

        Raises:
            ProtocolError: it is not in the run, or another process is.
        """
        child = self.children.get(caller.child)
        if child is None or not self.is_started:
            raise ProtocolError(f"Site `{self.site(caller.child)}` must join before anything else.")
        if child.process != caller.process:
            raise self.second_process(caller.child)
        return child

    def check_return(self, position: int, child: Child) -> None:
        """Raises ProtocolError unless `child`, another process, may take over from the one before.

        It must be the same in all but the process.
        """
        known = self.children[position]
        if known.has_left:
            raise ProtocolError(
                f"Site `{self.site(position)}` has left this run. A run that is over for a site "
                "is over; start a new run."
            )
        if known.terms()[1:] != child.terms()[1:]:
            raise ProtocolError(
                f"A process that comes back to a run must be as the one before it. Site "
                f"`{self.site(position)}` had {_told(known)}. Received: {_told(child)}"
            )

    def needed(self) -> tuple[int, int]:
        """The oldest round and gather that a child may come back to."""
        backups = [
            child.backup or (child.first_round, 0)
            for child in self.children.values()
            if not child.has_left
        ]
        return (
            min((number for number, _ in backups), default=0),
            min((gather for _, gather in backups), default=0),
        )

    def second_process(self, position: int) -> ProtocolError:
        """The error for a child that is in already, but not as this one."""
        return ProtocolError(
            f"Site `{self.site(position)}` is in this run already, as another process that is "
            "there, or on other terms. A run takes one process of each site at a time."
        )

    def check_model(self, position: int, model: Model, first_round: int) -> None:
        """Raises ProtocolError if a child's model or first round differs from that of another."""
        for place, other in self.children.items():
            if place == position or other.model is None:
                continue
            is_apart = rules.parse(other.rule).is_asynchronous  # and counts rounds of its own
            is_apart &= self.terms.site is None or self.has_own_rule
            there, here = self.site(place), self.site(position)
            if other.first_round != first_round and not is_apart:
                raise ProtocolError(
                    f"All parties must go on from the same step. Received: site `{there}` begins "
                    f"with round {other.first_round}, and site `{here}` with round {first_round}"
                )
            text = first_difference(other.model.shapes, model.shapes, "tensor")
            if text is not None:
                raise ProtocolError(
                    f"All parties must train the same model. Site `{there}` (there) and site "
                    f"`{here}` (here) differ: {text}"
                )

    def _check_terms(self, position: int, child: Child) -> None:
        here = self.site(position)
        is_apart = child.rule != ABOVE and rules.parse(child.rule).is_asynchronous
        if self.terms.quorum is not None and is_apart:
            raise ProtocolError(no_quorum(child.rule, f"site `{here}`"))
        for what in ("compression", "downlink", "rule"):
            fixed = getattr(self.terms, what)
            came = getattr(child, what)
            if what == "downlink" and fixed == SAME:
                rule = None if child.rule == ABOVE else rules.parse(child.rule)
                fixed = as_up(compressors.parse(child.compression), rule).text
            if fixed is not None and fixed != came:
                raise ProtocolError(
                    f"`{what}` must be {fixed}, which the server was told. Received: "
                    f"{what}={came} from site `{here}`"
                )
        others = {one: known for one, known in self.children.items() if one != position}
        merging = child.rule if self.terms.site is None else self.terms.robust
        if merging is not None:
            is_leaf = child.leaves == ((here, child.workers),)
            why_not = leaf_rules.why_not_child(merging, here, is_leaf, child.paths)
            if why_not is not None:
                raise ProtocolError(why_not)
        num_leaves = sum(len(known.leaves) for known in others.values()) + len(child.leaves)
        if num_leaves > MAX_LEAVES:
            raise ProtocolError(
                f"A tree must have at most {MAX_LEAVES} leaves. Received: {num_leaves} with those "
                f"of site `{here}`"
            )
        everyone = others | {position: child}
        paths = [path for pair in everyone.items() for path in self._paths(*pair)]
        names = (path.rpartition(BETWEEN)[2] for path in paths)
        guards = (f"{path}{text}" for one in everyone.values() for path, text, _ in one.guards)
        texts = [*paths, *names, *guards]
        if (num_bytes := sum(len(text) + _TEXT_BYTES for text in texts)) > _MOST_TREE_BYTES:
            raise ProtocolError(
                f"The names of a tree must have at most {_MOST_TREE_BYTES} bytes, as all of it is "
                f"told in one message. Received: {num_bytes} with those of site `{here}`"
            )
        # Nor may a leaf have the name of a party that has yet to come, which would be refused then.
        awaited = [self.site(one) for one in self.absent() - {position}]
        check_names([*sorted(awaited), *paths], self.terms.site)
        if self._doubts:
            others = {0: others[0]} if 0 in others else {}
        why_not = self._why_unlike(position, child, others)
        if why_not is not None:
            raise ProtocolError(why_not)

    def _why_unlike(self, position: int, child: Child, others: Mapping[int, Child]) -> str | None:
        """How a child differs from `others` in what all must have in common; None: in nothing."""
        merging = child.rule if self.terms.site is None else self.terms.robust
        named = {self.site(one): known for one, known in others.items()}
        is_leaf = child.leaves == ((self.site(position), child.workers),)
        return why_unlike(self.site(position), child, named, merging, is_leaf=is_leaf)

    def _put_out_unlike(self, first: Child) -> None:
        """Child 0 has come: who is there on other terms than `first` must go."""
        for position, child in list(self.children.items()):
            if position != 0:
                child.why_out = self._why_unlike(position, child, {0: first})
                if child.why_out is not None:
                    del self.children[position]


def no_quorum(rule: str, source: str) -> str:
    """What is said where a quorum means nothing."""
    return (
        "`quorum` and `close_at` are of synchronous rounds, and asynchronous rules have none. "
        f"Received: rule={rule} from {source}"
    )


def _told(child: Child) -> str:
    return (
        f"workers={child.workers} compression={child.compression} downlink={child.downlink} "
        f"seed={child.seed} rule={child.rule}"
        + (f" above={child.above}" if child.above is not None else "")
    )
