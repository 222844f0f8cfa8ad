# SPDX-License-Identifier: Apache-2.0
"""From a profile to a plan: what to do with each gradient so that the step ends soonest.

The planner searches among choices and asks the cost model for the time of the whole step: what
compression saves on the link counts only where the link is waited for, and what it costs only where
the cores are. It begins with SeCoPa's own rule (each gradient as if it were alone) and with plain
thresholds, takes the best, and improves it gradient by gradient.

It never invents an algorithm, because algorithms change what a model learns: candidates are what
the user names. Where compression is not clearly faster the sum stays exact.

Deterministic: the same profile and gradients give the same plan, whatever the clock says.

Source: HiPress (SOSP 2021), SeCoPa; what differs stands in docs/plan.md.
"""

import dataclasses
import datetime
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from tf_hips.comm import cost_model, tasks
from tf_hips.comm.cost_model import Backward, Group, Kind, Member, Model
from tf_hips.comm.plan import EXACT, HIERARCHICAL_FP16, PS, TOPOLOGIES, Choice, Plan
from tf_hips.comm.profile import Profile
from tf_hips.comm.schedules import HOPS
from tf_hips.ops.compressor import check_makes_packets, chunk_sizes, parse

DEFAULT_CANDIDATES = ("error_feedback(onebit)",)

MARGIN = 0.05
"""A plan with compression must promise to save at least this share of the exact sums' time, and one
with another topology than `ps` at least this share of the time of the best one without."""

# Topologies that lose more than their codec does, and keep no residual of it: only where named.
_ROUNDING = {HIERARCHICAL_FP16}
# What changes less is the same: the costs are not known better.
_NOTHING = 0.01
_MAX_THRESHOLDS = 10
_MAX_SINGLE = 12  # gradients, the largest ones, that are looked at one by one
_PASSES = 2
# Bounds the improving: tasks that are simulated, some microseconds each.
_MAX_TASKS = 50_000


@dataclasses.dataclass(frozen=True)
class _Option:
    """What can be done with a gradient: compression, topology, partitions."""

    compression: str | None = None
    topology: str = EXACT
    partitions: int = 1

    @property
    def kind(self) -> Kind:
        """What it has in common with those that it travels with."""
        return self.compression, self.topology


_SUM_EXACTLY = _Option()

_Step: TypeAlias = tuple[Group, ...]
"""What is done with all gradients: each is in one group."""


def make_plan(
    profile: Profile,
    gradients: Sequence[tuple[str, int]],
    candidates: Iterable[str] = DEFAULT_CANDIDATES,
    backward: Backward | None = None,
    topologies: Iterable[str] | None = None,
) -> Plan:
    """Chooses for each gradient.

    Args:
        profile: of as many ranks as there will be, with the costs of all candidates.
        gradients: name and number of elements of each, in the order of the trainable variables.
        candidates: texts of the compressors that may be used.
        backward: when gradients become ready; None: all at once.
        topologies: those that may be used; None: all that the profile tells the costs of, but for
            those that round what a codec never sees.

    Returns:
        A plan whose predicted time is at most that of exact sums.

    Raises:
        ConfigError: the profile lacks the costs of a candidate.
        ValueError: a candidate is no compressor, or makes no packets; or a topology is unknown, or
            none for these ranks.
    """
    texts = [check_makes_packets(parse(text), "compression").text for text in candidates]
    for text in texts:
        profile.codec(text)
    chosen = None if topologies is None else set(topologies)
    here = tasks.topologies(profile) or TOPOLOGIES  # alone there is none to choose
    unknown = set() if chosen is None else chosen - set(TOPOLOGIES)
    if unknown or (chosen is not None and chosen.isdisjoint(here)):
        raise ValueError(
            f"`topologies` must be of {', '.join(TOPOLOGIES)}, and have one of {', '.join(here)} "
            f"for {profile.num_ranks} ranks. Received: {', '.join(sorted(unknown or chosen or ()))}"
        )
    kinds = [
        _Option(text, one)
        for text in dict.fromkeys(texts)
        for one in topologies_for(text, profile)
        if (one in chosen if chosen is not None else one not in _ROUNDING)
    ]
    model, alone = Model(profile, backward), Model(profile)
    search = _Search(gradients, model, alone)
    step, seconds = search.run(kinds)
    # Costs are not known so well that a few percent were worth another topology than the usual one.
    usual = [kind for kind in kinds if kind.topology == PS]
    if usual and len(usual) < len(kinds):
        found = _Search(gradients, model, alone).run(usual)
        if seconds > found[1] * (1 - MARGIN):
            step, seconds = found
    facts = {
        **profile.facts,
        "candidates": ", ".join(texts) or "none",
        "exact_seconds": f"{search.exact_seconds:.6g}",
        "planned": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    choices = _with_seconds(search.choices(step), profile)
    return Plan(profile.num_ranks, choices, seconds, facts)


def predicted(plan: Plan, profile: Profile, backward: Backward | None = None) -> Plan:
    """The same choices, with the seconds that this profile promises.

    Raises:
        ConfigError: the profile lacks costs of the plan.
    """
    seconds = cost_model.step_seconds(plan.choices, profile, backward)
    return dataclasses.replace(
        plan, choices=_with_seconds(plan.choices, profile), predicted_seconds=seconds
    )


def _with_seconds(choices: Sequence[Choice], profile: Profile) -> tuple[Choice, ...]:
    alone = cost_model.alone_seconds(choices, profile)
    return tuple(
        dataclasses.replace(one, predicted_seconds=seconds)
        for one, seconds in zip(choices, alone, strict=True)
    )


def topologies_for(compression: str, profile: Profile) -> list[str]:
    """The topologies that a compressor may take, `ps` first.

    Hops encode partial sums, which must not go through a momentum once more.
    """
    compressor = parse(compression)
    return [
        one
        for one in tasks.topologies(profile)
        if one not in HOPS or compressor.for_sums == compressor
    ]


def exact_seconds(
    profile: Profile, gradients: Sequence[tuple[str, int]], backward: Backward | None = None
) -> float:
    """Predicted time of a step whose sums are all exact."""
    return cost_model.step_seconds(
        [Choice(name, size) for name, size in gradients], profile, backward
    )


class _Search:
    """A search for the step of all gradients that ends soonest.

    A trial moves some gradients from their groups to another; all other groups stay what they are.
    """

    def __init__(self, gradients: Sequence[tuple[str, int]], model: Model, alone: Model) -> None:
        """Nothing has been tried.

        Args:
            gradients: name and elements of each.
            model: predicts steps of them; it may have predicted for another search.
            alone: predicts steps of one gradient, at position 0.
        """
        self._names = [name for name, _ in gradients]
        self._sizes = [size for _, size in gradients]
        self._model = model
        self._alone_model = alone
        self._most_tasks = model.num_tasks + _MAX_TASKS
        self._exact = self._step([_SUM_EXACTLY] * len(self._sizes))
        self.exact_seconds = model.seconds_of(self._exact)

    def choices(self, step: _Step) -> list[Choice]:
        """What a step does with each gradient."""
        found = {
            place: Choice(self._names[place], size, *group.kind, partitions)
            for group in step
            for place, size, partitions in group.members
        }
        return [found[place] for place in range(len(self._sizes))]

    def run(self, kinds: Sequence[_Option]) -> tuple[_Step, float]:
        """The best step that was found, and its time."""
        best, seconds = self._exact, self.exact_seconds
        if not kinds:
            return best, seconds
        for options in (self._alone(kinds), *self._thresholds(kinds)):
            tried = self._step(options)
            found = self._model.seconds_of(tried)
            if found < seconds * (1 - _NOTHING):
                best, seconds = tried, found
        for _ in range(_PASSES):
            before = seconds
            best, seconds = self._improved(best, seconds, kinds)
            if seconds > before * (1 - _NOTHING):
                break
        best, seconds = self._with_fewer(best, seconds)
        if seconds > self.exact_seconds * (1 - MARGIN):
            return self._exact, self.exact_seconds
        return best, seconds

    def _step(self, options: Sequence[_Option]) -> _Step:
        """The step that has these options, one for each gradient."""
        members: dict[Kind, list[Member]] = {}
        for place, (option, size) in enumerate(zip(options, self._sizes, strict=True)):
            members.setdefault(option.kind, []).append((place, size, option.partitions))
        return tuple(self._model.group(kind, tuple(found)) for kind, found in members.items())

    def _without(self, step: _Step, places: Collection[int]) -> _Step:
        """The same step of other gradients only."""
        gone = set(places)
        found = []
        for group in step:
            kept = tuple(one for one in group.members if one[0] not in gone)
            if len(kept) == len(group.members):
                found.append(group)
            elif kept:
                found.append(self._model.group(group.kind, kept))
        return tuple(found)

    def _with(self, rest: _Step, places: Iterable[int], option: _Option) -> _Step:
        """A step that does this with gradients that `rest` has not."""
        members = [(place, self._sizes[place], option.partitions) for place in places]
        found = []
        for group in rest:
            if group.kind == option.kind:
                members += group.members
            else:
                found.append(group)
        return *found, self._model.group(option.kind, tuple(sorted(members)))

    def _alone(self, kinds: Sequence[_Option]) -> list[_Option]:
        """SeCoPa's rule: for each gradient what is fastest if there were no other."""
        found: dict[int, _Option] = {}
        for size in set(self._sizes):
            options = [_SUM_EXACTLY, *_with_partitions(kinds, size)]
            found[size] = min(options, key=lambda option, size=size: self._alone_s(option, size))  # type: ignore[misc]
        return [found[size] for size in self._sizes]

    def _alone_s(self, option: _Option, size: int) -> float:
        group = self._alone_model.group(option.kind, ((0, size, option.partitions),))
        return self._alone_model.seconds_of([group])

    def _thresholds(self, kinds: Sequence[_Option]) -> Iterable[list[_Option]]:
        """Everything from a size on compressed in one way."""
        sizes = sorted({size for size in self._sizes if size})
        stride = max(1, -(-len(sizes) // _MAX_THRESHOLDS))
        for kind in kinds:
            for least in sizes[::stride]:
                yield [kind if size >= least else _SUM_EXACTLY for size in self._sizes]

    def _improved(
        self, best: _Step, seconds: float, kinds: Sequence[_Option]
    ) -> tuple[_Step, float]:
        """Changes gradients while that helps: the largest ones one by one, others by their size."""
        for places in self._groups():
            rest = self._without(best, places)
            for option in [_SUM_EXACTLY, *_with_partitions(kinds, self._sizes[places[0]])]:
                if self._model.num_tasks > self._most_tasks:
                    return best, seconds
                tried = self._with(rest, places, option)
                found = self._model.seconds_of(tried)
                if found < seconds * (1 - _NOTHING):
                    best, seconds = tried, found
        return best, seconds

    def _with_fewer(self, best: _Step, seconds: float) -> tuple[_Step, float]:
        """Sums small gradients exactly, as long as that costs nothing."""
        sizes = {
            size
            for group in best
            for _, size, _ in group.members
            if group.kind != _SUM_EXACTLY.kind
        }
        limit = seconds * (1 + _NOTHING)
        for most in sorted(sizes):
            places = [place for place, size in enumerate(self._sizes) if size == most]
            tried = self._with(self._without(best, places), places, _SUM_EXACTLY)
            found = self._model.seconds_of(tried)
            if found > limit:
                break
            best, seconds = tried, found
        return best, seconds

    def _groups(self) -> list[list[int]]:
        """Places of gradients that are changed together."""
        places = sorted(range(len(self._sizes)), key=lambda place: -self._sizes[place])
        groups = [[place] for place in places[:_MAX_SINGLE]]
        by_size: dict[int, list[int]] = {}
        for place in places[_MAX_SINGLE:]:
            by_size.setdefault(self._sizes[place], []).append(place)
        return [*groups, *by_size.values()]


def _with_partitions(kinds: Sequence[_Option], size: int) -> list[_Option]:
    """Each kind in one part, two, four, ... as long as there are chunks."""
    chunks = len(chunk_sizes(size))
    counts = [1]
    while counts[-1] * 2 <= chunks:
        counts.append(counts[-1] * 2)
    return [
        dataclasses.replace(kind, partitions=count) for kind in kinds for count in counts if size
    ]
