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
from collections.abc import Iterable, Sequence

from tf_hips.comm import cost_model
from tf_hips.comm.cost_model import Backward, Model
from tf_hips.comm.plan import EXACT, PS, TOPOLOGIES, Choice, Plan
from tf_hips.comm.profile import Profile
from tf_hips.comm.schedules import HOPS
from tf_hips.ops.compressor import check_makes_packets, chunk_sizes, parse

DEFAULT_CANDIDATES = ("error_feedback(onebit)",)

MARGIN = 0.05
"""A plan with compression must promise to save at least this share of the exact sums' time, and one
with another topology than `ps` at least this share of the time of the best one without."""

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


_SUM_EXACTLY = _Option()


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
    here = cost_model.topologies(profile) or TOPOLOGIES  # alone there is none to choose
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
        if (one in chosen if chosen is not None else one not in cost_model.ROUNDING)
    ]
    search = _Search(profile, gradients, backward)
    options, seconds = search.run(kinds)
    # Costs are not known so well that a few percent were worth another topology than the usual one.
    usual = [kind for kind in kinds if kind.topology == PS]
    if usual and len(usual) < len(kinds):
        simple = _Search(profile, gradients, backward)
        found = simple.run(usual)
        if seconds > found[1] * (1 - MARGIN):
            search, (options, seconds) = simple, found
    facts = {
        **profile.facts,
        "candidates": ", ".join(texts) or "none",
        "exact_seconds": f"{search.exact_seconds:.6g}",
        "planned": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    choices = _with_seconds(search.choices(options), profile)
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
    return tuple(
        dataclasses.replace(one, predicted_seconds=cost_model.step_seconds([one], profile))
        for one in choices
    )


def topologies_for(compression: str, profile: Profile) -> list[str]:
    """The topologies that a compressor may take, `ps` first.

    Hops encode partial sums, which must not go through a momentum once more.
    """
    compressor = parse(compression)
    return [
        one
        for one in cost_model.topologies(profile)
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
    """A search for the options of all gradients with the shortest step."""

    def __init__(
        self,
        profile: Profile,
        gradients: Sequence[tuple[str, int]],
        backward: Backward | None,
    ) -> None:
        self._profile = profile
        self._gradients = list(gradients)
        self._model = Model(profile, backward)
        self.exact_seconds = self._seconds([_SUM_EXACTLY] * len(self._gradients))

    def choices(self, options: Sequence[_Option]) -> list[Choice]:
        """The choices that options stand for."""
        return [
            Choice(name, size, option.compression, option.topology, option.partitions)
            for (name, size), option in zip(self._gradients, options, strict=True)
        ]

    def run(self, kinds: Sequence[_Option]) -> tuple[list[_Option], float]:
        """The best options that were found, and the time of their step."""
        exact = [_SUM_EXACTLY] * len(self._gradients)
        best, seconds = exact, self.exact_seconds
        if not kinds:
            return exact, seconds
        for options in (self._alone(kinds), *self._thresholds(kinds)):
            found = self._seconds(options)
            if found < seconds * (1 - _NOTHING):
                best, seconds = options, found
        for _ in range(_PASSES):
            before = seconds
            best, seconds = self._improved(best, seconds, kinds)
            if seconds > before * (1 - _NOTHING):
                break
        best, seconds = self._with_fewer(best, seconds)
        if seconds > self.exact_seconds * (1 - MARGIN):
            return exact, self.exact_seconds
        return best, seconds

    def _seconds(self, options: Sequence[_Option]) -> float:
        return self._model.seconds(self.choices(options))

    def _alone(self, kinds: Sequence[_Option]) -> list[_Option]:
        """SeCoPa's rule: for each gradient what is fastest if there were no other."""
        found: dict[int, _Option] = {}
        for size in {size for _, size in self._gradients}:
            options = [_SUM_EXACTLY, *_with_partitions(kinds, size)]
            found[size] = min(options, key=lambda option, size=size: self._alone_s(option, size))  # type: ignore[misc]
        return [found[size] for _, size in self._gradients]

    def _alone_s(self, option: _Option, size: int) -> float:
        choice = Choice("", size, option.compression, option.topology, option.partitions)
        return cost_model.step_seconds([choice], self._profile)

    def _thresholds(self, kinds: Sequence[_Option]) -> Iterable[list[_Option]]:
        """Everything from a size on compressed in one way."""
        sizes = sorted({size for _, size in self._gradients if size})
        stride = max(1, -(-len(sizes) // _MAX_THRESHOLDS))
        for kind in kinds:
            for least in sizes[::stride]:
                yield [kind if size >= least else _SUM_EXACTLY for _, size in self._gradients]

    def _improved(
        self, best: list[_Option], seconds: float, kinds: Sequence[_Option]
    ) -> tuple[list[_Option], float]:
        """Changes gradients while that helps: the largest ones one by one, others by their size."""
        for places in self._groups():
            size = self._gradients[places[0]][1]
            for option in [_SUM_EXACTLY, *_with_partitions(kinds, size)]:
                if self._model.num_tasks > _MAX_TASKS:
                    return best, seconds
                tried = list(best)
                for place in places:
                    tried[place] = option
                found = self._seconds(tried)
                if found < seconds * (1 - _NOTHING):
                    best, seconds = tried, found
        return best, seconds

    def _with_fewer(self, best: list[_Option], seconds: float) -> tuple[list[_Option], float]:
        """Sums small gradients exactly, as long as that costs nothing."""
        sizes = sorted(
            {
                size
                for (_, size), option in zip(self._gradients, best, strict=True)
                if option != _SUM_EXACTLY
            }
        )
        limit = seconds * (1 + _NOTHING)
        for most in sizes:
            tried = [
                _SUM_EXACTLY if size == most else option
                for (_, size), option in zip(self._gradients, best, strict=True)
            ]
            found = self._seconds(tried)
            if found > limit:
                break
            best, seconds = tried, found
        return best, seconds

    def _groups(self) -> list[list[int]]:
        places = sorted(range(len(self._gradients)), key=lambda place: -self._gradients[place][1])
        groups = [[place] for place in places[:_MAX_SINGLE]]
        by_size: dict[int, list[int]] = {}
        for place in places[_MAX_SINGLE:]:
            by_size.setdefault(self._gradients[place][1], []).append(place)
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
