# SPDX-License-Identifier: Apache-2.0
"""What Keras can do, feature by feature, under each of our strategies.

A feature is a small function that all ranks call with a `Job` (see `job`) and that asserts. The
modules of this package hold them; `everything` lists them, `cover` says which of them `make test`
runs in which configuration. docs/keras-tests.md names each one.

Where nothing is compressed the numbers are those of one process on the joined batch; where it is,
ranks are equal bit for bit, the loss falls, and callbacks, files and logs mean the same.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

_MODULES = (
    "models",
    "ways",
    "inputs",
    "loops",
    "optimizers",
    "metrics",
    "noise",
    "precision",
    "saving",
    "callbacks",
    "ours",
    "gan",
    "single",
)


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A strategy with its compression, and the processes it runs on.

    Attributes:
        name: what tests call it.
        strategy: name of the strategy's class.
        compression: its argument of that name.
        sizes: ranks of each party; more than one party meet at a server.
    """

    name: str
    strategy: str
    compression: str | None
    sizes: tuple[int, ...]

    @property
    def is_exact(self) -> bool:
        """Whether gradients are summed as they are."""
        return self.compression is None

    @property
    def has_uplink(self) -> bool:
        """Whether there is a server."""
        return len(self.sizes) > 1


CONFIGURATIONS = (
    Configuration("ring", "CompressedRing", None, (2,)),
    Configuration("ring-onebit", "CompressedRing", "error_feedback(onebit)", (2,)),
    Configuration("ring-powersgd", "CompressedRing", "error_feedback(powersgd(rank=2))", (2,)),
    Configuration("party", "HierarchicalPS", None, (2,)),
    Configuration("parties", "HierarchicalPS", None, (1, 1)),
    Configuration(
        "parties-terngrad", "HierarchicalPS", "error_feedback(terngrad(bitwidth=2))", (1, 1)
    ),
)
ALONE = Configuration("alone", "HierarchicalPS", "error_feedback(onebit)", (1,))
# Configurations that the same processes can go through, one after the other: `make test` starts no
# more than these, as most of a launch is TensorFlow's import.
LAUNCHES = (
    ("ring", "ring-onebit", "ring-powersgd", "party"),
    ("parties", "parties-terngrad"),
    ("alone",),
)

# Each meets both strategies, and gradients that are compressed and that are not.
_PAIRS = (
    ("ring", "parties-terngrad"),
    ("ring-onebit", "parties"),
    ("ring", "parties-terngrad"),
    ("ring-powersgd", "party"),
)
# How many configurations of the pairs a feature meets; `test_all_features_hold_everywhere` (slow)
# shows each in every one.
# Where gradients are summed as they are: the numbers of one process say most about a model.
_EXACT = ("models", "optimizers", "precision")
# What is done around the steps, or in a loop, is the same for every sum of gradients: one
# configuration for each feature, all of them together meet the pairs.
_ONCE = ("ways", "inputs", "loops", "metrics", "noise", "saving", "callbacks", "ours")


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature.

    Attributes:
        name: its function's name, with the parameter in brackets.
        check: runs it on one rank.
        is_alone: whether it is about one worker.
        share: number of the parameter among those of the function; None without parameters.
        shown: which of a pair of configurations the cover shows it in: "twice" in both, "exact" in
            the one that compresses nothing, "once" in one of them by turns, "never" in none.
        elsewhere: what shows it in `make test`, or the most of it that can break, where the cover
            does not: another feature, or a file of tests.
    """

    name: str
    check: Callable[[Any], None]
    is_alone: bool
    share: int | None
    shown: str
    elsewhere: str | None = None


_registry: dict[str, Feature] = {}


def feature(
    *,
    alone: bool = False,
    each: Iterable[str] | None = None,
    first: int | None = None,
    elsewhere: str | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers the decorated function, which takes the job, and one of `each` if given.

    `first`: how many of `each` the cover has; all when None.
    `elsewhere`: the test or feature that shows it in `make test`, or the most of it that can break,
    so that the cover need not.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        module = check.__module__.rpartition(".")[2]
        shown = "exact" if module in _EXACT else "twice"
        if each is not None or module in _ONCE:
            shown = "once"
        shown = "never" if elsewhere else shown
        if each is None:
            features = [Feature(check.__name__, check, alone, None, shown, elsewhere)]
        else:
            features = [
                Feature(
                    f"{check.__name__}[{parameter}]",
                    functools.partial(check, parameter=parameter),
                    alone,
                    share,
                    shown if first is None or share < first else "never",
                    elsewhere,
                )
                for share, parameter in enumerate(each)
            ]
        for one in features:
            if one.name in _registry:
                raise ValueError(f"Two features are called {one.name}.")
            _registry[one.name] = one
        return check

    return decorate


def configurations(names: Iterable[str]) -> list[Configuration]:
    """Configurations by their names."""
    known = {one.name: one for one in (*CONFIGURATIONS, ALONE)}
    return [known[name] for name in names]


def everything() -> dict[str, Feature]:
    """All features by name, in an order that is the same everywhere. Imports TensorFlow."""
    for module in _MODULES:
        importlib.import_module(f"{__name__}.{module}")
    return dict(_registry)


def cover(configuration: Configuration, *, is_full: bool = False) -> list[Feature]:
    """The features that are shown in `configuration`: all, or the pairwise cover's share.

    In the cover a feature is shown in a pair of configurations, or in one of the pair; so all
    parameters of a feature together meet the pairs, and so do all features that look at a kind.
    """
    features = everything().values()
    if configuration == ALONE:
        return [one for one in features if one.is_alone]
    chosen = [one for one in features if not one.is_alone]
    return [
        one
        for place, one in enumerate(chosen)
        if is_full or configuration.name in _configurations(place, one)
    ]


def _configurations(place: int, one: Feature) -> tuple[str, ...]:
    pair = _PAIRS[place % len(_PAIRS)]
    if one.shown == "never":
        return ()
    if one.shown == "exact":
        return tuple(exact.name for exact in configurations(pair) if exact.is_exact)
    if one.shown == "twice":
        return pair
    number = place if one.share is None else one.share
    pair = _PAIRS[number // 2 % len(_PAIRS)]
    return (pair[number % 2],)
