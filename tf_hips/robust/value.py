# SPDX-License-Identifier: Apache-2.0
"""Aggregator and PreAggregator: rules as plain values, and the texts that name them.

A value prints as the text that makes it again, "nnm(f=2) >> trimmed_mean(f=2)". Nothing is
evaluated when a text is read. What each rule needs of n and f stands here, in one table.
"""

import dataclasses
import difflib
import re
from typing import Any

from tf_hips.ops import call_text
from tf_hips.ops.native_robust import MAX_ROWS
from tf_hips.ops.registry import YES_OR_NO, Parameter, checked
from tf_hips.robust.selection import MAX_MDA

AUTO = -(1 << 31)
"""f="auto": as many as the rule can bear of all rows, those that are refused among them."""
_MAX_TEXT = 320
_MAX_STEPS = 8
_CALL = re.compile(r"\s*([A-Za-z_][\w-]*)\s*(?:\(([^()]*)\)\s*)?", re.ASCII)


def _count(name: str, least: int, most: int = MAX_ROWS) -> Parameter:
    return Parameter(name, AUTO, least, most, words=(("auto", AUTO),))


_F = _count("f", 0)
_COMPAT = Parameter("compat", 0, 0, 1, words=YES_OR_NO)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is known of a rule without running it.

    Attributes:
        parameters: in the order of its text.
        needs: (a, b): n >= a f + b rows; None: it takes no f.
        is_pre: whether rows come out, and not one.
        is_coordinate: whether each coordinate is a matter of its own, with no look at distances.
        looks_at: "pairs": distances of rows from each other; "norms": of rows alone, which of means
            follow from distances; "": neither.
    """

    parameters: tuple[Parameter, ...] = ()
    needs: tuple[int, int] | None = None
    is_pre: bool = False
    is_coordinate: bool = False
    looks_at: str = ""


_HALF = (2, 1)
PAIRS, NORMS = "pairs", "norms"
KINDS: dict[str, Kind] = {
    "mean": Kind(),
    "median": Kind((_F,), _HALF, is_coordinate=True),
    "trimmed_mean": Kind((_F,), _HALF, is_coordinate=True),
    "meamed": Kind((_F,), _HALF, is_coordinate=True),
    "krum": Kind((_F,), (2, 3), looks_at=PAIRS),
    "multi_krum": Kind((_F, _count("m", 1)), (2, 3), looks_at=PAIRS),
    "bulyan": Kind((_F, _COMPAT), (4, 3), looks_at=PAIRS),
    "geometric_median": Kind((_F, Parameter("nu", 1e-6, 1e-7, 1.0)), _HALF, looks_at=PAIRS),
    "majority": Kind((_F,), _HALF, is_coordinate=True),
    "centred_clipping": Kind(
        (_F, Parameter("tau", 1.0, 1e-6, 1e6), Parameter("iterations", 3, 1, 1000)),
        _HALF,
        looks_at=PAIRS,
    ),
    "mda": Kind((_count("f", 0, MAX_MDA),), _HALF, looks_at=PAIRS),
    "cge": Kind((_F,), _HALF, looks_at=NORMS),
    "clip": Kind((Parameter("c", 1.0, 1e-6, 1e6),), is_pre=True, looks_at=NORMS),
    "arc": Kind((_F,), _HALF, is_pre=True, looks_at=NORMS),
    "bucketing": Kind((Parameter("s", 2, 1, MAX_ROWS),), is_pre=True),
    "nnm": Kind((_F,), _HALF, is_pre=True, looks_at=PAIRS),
}
NAMES = tuple(name for name, kind in KINDS.items() if not kind.is_pre)
"""All aggregators, in the order of docs/aggregators.md."""
PRE_NAMES = tuple(name for name, kind in KINDS.items() if kind.is_pre)
"""All pre-aggregators."""
SHORTENING = ("clip", "arc")
"""Pre-aggregators after which no row is longer than others are."""
ALIASES = {
    "coord-median": "median",
    "coord_median": "median",
    "coordinate_median": "median",
    "multi-krum": "multi_krum",
    "geometric-median": "geometric_median",
    "sign-sgd": "majority",
    "signSGD": "majority",
    "sign_sgd": "majority",
    "normal": "mean",
    "centered_clipping": "centred_clipping",
}
"""Spellings of DETOX and of others."""
_OF_SERVERS = {"sketched": "sketched(rule)", "detox": "detox.Detox(r, rule)"}


@dataclasses.dataclass(frozen=True)
class Step:
    """One rule with its parameters.

    Attributes:
        name: one of NAMES or PRE_NAMES.
        params: (name, value) of each parameter, in the order of the text.

    Raises:
        ValueError: there is no such rule, or a parameter is unknown or out of range.
        TypeError: a parameter is not a number of the right kind.
    """

    name: str
    params: tuple[tuple[str, int | float], ...] = ()

    def __post_init__(self) -> None:
        kind = _kind(self.name)
        values = checked(self.name, kind.parameters, dict(self.params))
        object.__setattr__(self, "params", tuple(values.items()))

    @property
    def kind(self) -> Kind:
        """What is known of the rule."""
        return KINDS[self.name]

    @property
    def text(self) -> str:
        """Such as "krum(f=2)"."""
        known = {parameter.name: parameter for parameter in self.kind.parameters}
        arguments = ", ".join(f"{name}={known[name].shown(value)}" for name, value in self.params)
        return f"{self.name}({arguments})" if arguments else self.name

    def __getitem__(self, name: str) -> int | float:
        """The value of a parameter."""
        return dict(self.params)[name]

    @property
    def f(self) -> int | None:
        """How many bad rows it bears, AUTO included; None: it takes no f."""
        return int(self["f"]) if self.kind.needs is not None else None

    def bearing(self, f: int) -> "Step":
        """This step with f in the place of "auto"."""
        params = dict(self.params)
        if params.get("f") != AUTO:
            return self
        return Step(self.name, tuple((params | {"f": f}).items()))

    def most(self, n: int) -> int:
        """How many bad ones of n rows the rule bears at most; below 0: n rows are too few."""
        if self.kind.needs is None:
            return 0
        slope, least = self.kind.needs
        allowed = next(int(one.maximum) for one in self.kind.parameters if one.name == "f")
        return min((n - least) // slope, allowed)

    @property
    def formula(self) -> str:
        """What it needs, such as "krum needs n >= 2 f + 3"."""
        if self.kind.needs is None:
            return f"{self.name} needs n >= 1"
        return f"{self.name} needs n >= {self.kind.needs[0]} f + {self.kind.needs[1]}"


@dataclasses.dataclass(frozen=True)
class PreAggregator:
    """Rows in, rows out: `nnm(f=2)`. `pre >> rule` is an aggregator, `pre >> pre` another one.

    Attributes:
        steps: in the order in which they are done.
    """

    steps: tuple[Step, ...]

    @property
    def text(self) -> str:
        """The text that `parse` needs to make it, with a rule behind it."""
        return " >> ".join(step.text for step in self.steps)

    def __rshift__(self, other: Any) -> Any:
        """What is done after this one."""
        if isinstance(other, PreAggregator):
            return PreAggregator((*self.steps, *other.steps))
        if hasattr(other, "steps"):
            return type(other)((*self.steps, *other.steps))
        return NotImplemented

    def __repr__(self) -> str:
        return self.text


def make_step(name: str, **params: int | float | str) -> Step:
    """A step of Python values, words such as "auto" among them."""
    known = {parameter.name: parameter for parameter in _kind(name).parameters}
    numbers: dict[str, Any] = {
        key: known[key].number(int(value) if isinstance(value, bool) else value)
        if key in known
        else value
        for key, value in params.items()
    }
    return Step(name, tuple(numbers.items()))


def parse_steps(text: str) -> tuple[Step, ...]:
    """The steps that a text names.

    Raises:
        ValueError: an unknown name, with the known ones and the nearest, a wrong argument, or no
            rule at the end.
        TypeError: `text` is not a string.
    """
    if not isinstance(text, str):
        raise call_text.wrong_kind("text", "a string such as 'krum(f=1)'", text)
    parts = text.split(">>") if len(text) <= _MAX_TEXT else []
    if not 1 <= len(parts) <= _MAX_STEPS:
        raise ValueError(
            "a robust rule must read like 'nnm(f=2) >> trimmed_mean(f=2)'. Received: "
            f"{text[:_MAX_TEXT]!r}"
        )
    return check_steps(tuple(_parse_step(part, text) for part in parts))


def check_steps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Raises ValueError unless one rule stands at the end, and only there."""
    shown = " >> ".join(step.text for step in steps)
    if len(steps) > _MAX_STEPS:
        raise ValueError(f"there must be at most {_MAX_STEPS} steps. Received: {shown}")
    if not steps or steps[-1].kind.is_pre:
        raise ValueError(
            f"a rule must stand at the end, one of {', '.join(NAMES)}. Received: {shown!r}"
        )
    for step in steps[:-1]:
        if not step.kind.is_pre:
            raise ValueError(
                f"before the end there must be one of {', '.join(PRE_NAMES)}. Received: {shown!r}"
            )
    return steps


def needs_pairs(steps: tuple[Step, ...]) -> bool:
    """Whether distances of each two rows decide what the steps make of rows."""
    is_mixed = False
    for step in steps:
        looks_at = step.kind.looks_at
        if looks_at == PAIRS or (looks_at == NORMS and is_mixed):
            return True
        # The norm of a mean is not to be had from norms.
        is_mixed = is_mixed or step.name == "bucketing"
    return False


def _parse_step(part: str, text: str) -> Step:
    call = _CALL.fullmatch(part)
    if call is None:
        raise ValueError(f"a step must read like 'krum(f=1)'. Received: {part!r} in {text!r}")
    name, arguments = ALIASES.get(call.group(1), call.group(1)), (call.group(2) or "").strip()
    known = {parameter.name: parameter for parameter in _kind(name).parameters}
    try:
        return Step(name, tuple(call_text.values(name, known, arguments, text).items()))
    except TypeError as error:
        raise ValueError(str(error)) from error


def _kind(name: str) -> Kind:
    if name in _OF_SERVERS:
        raise ValueError(
            f"`{name}(...)` stands before a rule of servers (`rule=` of a strategy, `--rule`); for "
            f"rows that are here there is `robust.{_OF_SERVERS[name]}`. Received: {name}"
        )
    if name not in KINDS:
        near = difflib.get_close_matches(name, (*KINDS, *ALIASES), 1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ValueError(
            f"a robust rule must be one of {', '.join(KINDS)}{hint} Received: {name[:50]!r}"
        )
    return KINDS[name]
