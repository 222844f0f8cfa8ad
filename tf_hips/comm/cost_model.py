# SPDX-License-Identifier: Apache-2.0
"""How long the sums of a step take under a plan: its buckets' tasks, simulated together.

All ranks do the same at the same time, so one rank stands for all of them: it has one queue for its
cores and one for its link, first come, first served. What overlaps on the same cores slows each
other down: while more is asked of them than there is, everything runs proportionally slower.

Follows SeCoPa of HiPress (SOSP 2021), whose cost of a gradient is a straight sum over its own
tasks; here the time of the whole step counts, with overlap and contention.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from tf_hips.comm.overlap import Chain, Task, simulate
from tf_hips.comm.plan import Choice
from tf_hips.comm.profile import Profile
from tf_hips.comm.tasks import Load, buckets_of, decoding_of, tasks_of

Kind: TypeAlias = tuple[str | None, str]
"""Text of a compressor, or None, and a topology."""
Member: TypeAlias = tuple[int, int, int]
"""Position of a gradient in the model, its elements, its partitions."""


@dataclasses.dataclass(frozen=True)
class Backward:
    """When a backward pass makes gradients ready.

    Attributes:
        ready: seconds for each gradient, in the order of the model, if nothing else ran.
        on_cores: whether it computes on the cores that encode, too.
    """

    ready: tuple[float, ...]
    on_cores: bool = True

    @classmethod
    def even(cls, num_gradients: int, seconds: float, on_cores: bool = True) -> "Backward":
        """A backward pass that makes gradients ready one by one, the last one first, evenly."""
        return cls(
            tuple(seconds * (num_gradients - i) / num_gradients for i in range(num_gradients)),
            on_cores,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Gradients of one compression and topology: chains of tasks, and what ends all of them.

    A `Model` makes one of the same gradients once, so two that are equal are the same.

    Attributes:
        kind: their compression and topology.
        members: the gradients, in the order of the model.
        chains: position of the gradient that is ready last, and tasks, of each bucket.
        decoding: what is decoded when all of them have travelled.
    """

    kind: Kind
    members: tuple[Member, ...]
    chains: tuple[tuple[int, tuple[Task, ...]], ...]
    decoding: tuple[Task, ...]

    @functools.cached_property
    def num_tasks(self) -> int:
        """All that is simulated of it."""
        return sum(len(tasks) for _, tasks in self.chains) + len(self.decoding)


class Model:
    """Predicts steps of one model on one profile; remembers what it has computed."""

    def __init__(self, profile: Profile, backward: Backward | None = None) -> None:
        """Predicts for the ranks of `profile`.

        Args:
            profile: with the costs of all that will be asked for.
            backward: when gradients become ready; None: all at once.
        """
        self.num_tasks = 0
        self._profile = profile
        self._backward = backward
        self._groups: dict[tuple[Kind, tuple[Member, ...]], Group] = {}
        self._seconds: dict[tuple[Group, ...], float] = {}

    def seconds(self, choices: Sequence[Choice]) -> float:
        """Predicts when the last sum of a step is there.

        Args:
            choices: one for each gradient, in the order of the model.

        Returns:
            Seconds from the beginning of the backward pass, or from when all gradients are ready.

        Raises:
            ConfigError: the profile lacks costs, or a topology does not take so many ranks.
        """
        members: dict[Kind, list[Member]] = {}
        for place, one in enumerate(choices):
            kind = one.compression, one.topology
            members.setdefault(kind, []).append((place, one.num_elements, one.partitions))
        return self.seconds_of(self.group(kind, tuple(found)) for kind, found in members.items())

    def seconds_of(self, groups: Iterable[Group]) -> float:
        """As `seconds`, of groups of this model that together have each gradient once."""
        ordered = tuple(sorted(groups, key=lambda one: one.members[0]))
        # Also of what is known: what a search ends by must not depend on what was asked before.
        self.num_tasks += sum(one.num_tasks for one in ordered)
        found = self._seconds.get(ordered)
        if found is None:
            found = self._seconds[ordered] = self._simulated(ordered)
        return found

    def group(self, kind: Kind, members: tuple[Member, ...]) -> Group:
        """Gradients, at least one, that are all summed in one way.

        Raises:
            ConfigError: the profile lacks costs, or a topology does not take so many ranks.
        """
        key = kind, members
        found = self._groups.get(key)
        if found is None:
            sizes = [0] * (1 + members[-1][0])
            for place, size, _ in members:
                sizes[place] = size
            parts = {place: count for place, _, count in members if count > 1}
            made = buckets_of(*kind, sizes, parts, self._profile)
            whole = Load(sum(sizes), sum(size > 0 for _, size, _ in members))
            found = self._groups[key] = Group(
                kind,
                members,
                tuple((one.first, tuple(tasks_of(one, self._profile))) for one in made),
                decoding_of(*kind, whole, self._profile),
            )
        return found

    def _simulated(self, groups: Sequence[Group]) -> float:
        backward = self._backward
        chains: list[Chain] = []
        for group in groups:
            start = len(chains)
            for first, tasks in group.chains:
                chains.append(Chain(tasks, backward.ready[first] if backward else 0.0))
            if group.decoding:
                chains.append(Chain(group.decoding, after=tuple(range(start, len(chains)))))
        total = max(backward.ready, default=0.0) if backward else 0.0
        return simulate(chains, total, backward is not None and backward.on_cores)


def step_seconds(
    choices: Sequence[Choice], profile: Profile, backward: Backward | None = None
) -> float:
    """Predicts one step; see `Model`."""
    if profile.num_ranks == 1:
        return max(backward.ready, default=0.0) if backward else 0.0
    return Model(profile, backward).seconds(choices)


def alone_seconds(choices: Iterable[Choice], profile: Profile) -> list[float]:
    """Predicts for each choice a step of its gradient alone."""
    if profile.num_ranks == 1:
        return [0.0 for _ in choices]
    model = Model(profile)
    return [model.seconds([one]) for one in choices]
