# SPDX-License-Identifier: Apache-2.0
"""UpdateRule: what a server makes of its children's gradients. A plain value.

It prints as the text that makes it again, `momentum(learning_rate=0.1, momentum=0.9,
nesterov=False, asynchronous=False)`; this text travels between processes, so two rules are the same
if and only if their texts are. Holds no state and does no work.

    krum(f=1)                                     what is robust, and comes down as it is
    nnm(f=1) >> trimmed_mean(f=1)                 the same, with what is done to rows before
    krum(f=1) >> fedadam(learning_rate=0.1)       and what is made of it
    krum(f=1) >> fedbuff(k=5)                     of children that wait for nobody
    detox(r=3, vote=digest) >> median             of the votes of groups (`votes`)
    sketched(k=512) >> krum(f=2)                  of sketches of all leaves' rows, in a tree
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence

from tf_hips.ops import call_text
from tf_hips.ops.registry import YES_OR_NO, Parameter, check_names
from tf_hips.ps.rules.votes import NAME as VOTES
from tf_hips.ps.rules.votes import Votes, split
from tf_hips.robust import Aggregator, Sketched, sketches
from tf_hips.robust import parse as parse_robust
from tf_hips.robust.detox import Detox
from tf_hips.robust.value import ALIASES as ROBUST_ALIASES
from tf_hips.robust.value import KINDS as ROBUST_KINDS

_MAX_TEXT = 320
_CALL = re.compile(r"\s*([A-Za-z_][\w-]*)\s*(?:\(([^()]*)\)\s*)?", re.ASCII)

CONSTANT, POLYNOMIAL, HINGE = range(3)
_STALENESS = (("constant", CONSTANT), ("polynomial", POLYNOMIAL), ("hinge", HINGE))

SUM, MEAN, ROBUST = "sum", "mean", "robust"
FEDBUFF = "fedbuff"  # the one asynchronous rule that looks at several updates at once
# How many children of a robust rule may lie; as many as it bears unless it is said.
_F = ROBUST_KINDS["median"].parameters[0]


def _rate(default: float, name: str = "learning_rate") -> Parameter:
    return Parameter(name, default=default, minimum=1e-10, maximum=1e6)


def _decay(name: str, default: float) -> Parameter:
    return Parameter(name, default=default, minimum=0.0, maximum=0.99999)


def _small(name: str, default: float) -> Parameter:
    return Parameter(name, default=default, minimum=1e-12, maximum=1e3)


def _flag(name: str) -> Parameter:
    return Parameter(name, default=0, minimum=0, maximum=1, words=YES_OR_NO)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What is known of a rule without running it.

    Attributes:
        parameters: in the order of its text.
        merges: "sum", "mean" or "robust", of what all children send for a round; None: children
            never wait for each other.
        gives_steps: whether a step comes down, which workers subtract as it is; else the merged
            gradient.
    """

    parameters: tuple[Parameter, ...] = ()
    merges: str | None = SUM
    gives_steps: bool = True


_ADAPTIVE = (_decay("beta_1", 0.9), _decay("beta_2", 0.99), _small("tau", 1e-3))
_KINDS: dict[str, _Kind] = {
    "sum": _Kind(gives_steps=False),
    "mean": _Kind(merges=MEAN, gives_steps=False),
    "sgd": _Kind((_rate(0.01),)),
    "momentum": _Kind(
        (_rate(0.01), _decay("momentum", 0.9), _flag("nesterov"), _flag("asynchronous"))
    ),
    "adam": _Kind(
        (
            _rate(0.001),
            _decay("beta_1", 0.9),
            _decay("beta_2", 0.999),
            _small("epsilon", 1e-7),
            _flag("asynchronous"),
        )
    ),
    "fedavg": _Kind((_rate(1.0),), merges=MEAN),
    "fedavgm": _Kind((_rate(1.0), _decay("momentum", 0.9)), merges=MEAN),
    "fedadam": _Kind((_rate(0.1), *_ADAPTIVE), merges=MEAN),
    "fedyogi": _Kind((_rate(0.01), *_ADAPTIVE), merges=MEAN),
    "fedadagrad": _Kind((_rate(0.1), _small("tau", 1e-3)), merges=MEAN),
    "diloco": _Kind((_rate(0.7), _decay("momentum", 0.9)), merges=MEAN),
    "median": _Kind((_F,), merges=ROBUST, gives_steps=False),
    "trimmed_mean": _Kind((_F,), merges=ROBUST, gives_steps=False),
    "meamed": _Kind((_F,), merges=ROBUST, gives_steps=False),
    "majority": _Kind((_F,), merges=ROBUST, gives_steps=False),
    "asgd": _Kind((_rate(0.01),), merges=None),
    "dc_asgd": _Kind(
        (
            _rate(0.01),
            _rate(0.04, "compensation"),
            _flag("adaptive"),
            _decay("decay", 0.95),
            _flag("compat"),
        ),
        merges=None,
    ),
    "fedasync": _Kind(
        (
            Parameter("alpha", default=0.6, minimum=1e-6, maximum=1.0),
            Parameter("staleness", POLYNOMIAL, CONSTANT, HINGE, words=_STALENESS),
            Parameter("a", default=0.5, minimum=0.0, maximum=1e3),
            Parameter("b", default=4.0, minimum=0.0, maximum=1e6),
        ),
        merges=None,
    ),
    FEDBUFF: _Kind(
        (
            Parameter("k", default=10, minimum=1, maximum=1 << 16),
            _rate(1.0),
            Parameter("exponent", default=0.5, minimum=0.0, maximum=1.0),
        ),
        merges=None,
    ),
}

NAMES = tuple(_KINDS)
"""All rules, in the order of docs/rules.md."""


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """A rule by name, with its parameters.

    Attributes:
        name: one of NAMES.
        params: (name, value) of each parameter that means something here, in the order of the text.
        before: the robust rule whose result this one gets; None: this one merges by itself.
        votes: of groups of children, which all this gets in place of what children send; or None.
        sketch: numbers of a sketch, where the robust rule is decided on sketches of the rows of all
            leaves; 0: as many as it needs. None: it looks at rows of children.

    Raises:
        ValueError: there is no such rule, or a parameter is unknown, out of range, or means nothing
            beside the others; or nothing robust can stand before it, or be decided on sketches.
        TypeError: a parameter is not a number of the right kind.
    """

    name: str
    params: tuple[tuple[str, int | float], ...] = ()
    before: Aggregator | None = None
    votes: Votes | None = None
    sketch: int | None = None

    def __post_init__(self) -> None:
        before = self.before
        is_plain = before is not None and len(before.steps) == 1
        if before is not None and is_plain and self.name == MEAN and before.rule.name in _KINDS:
            # `median >> mean` is `median`: one value for one text.
            object.__setattr__(self, "name", before.rule.name)
            object.__setattr__(self, "params", before.rule.params)
            object.__setattr__(self, "before", None)
        if self.name not in _KINDS:
            names = dict.fromkeys((*_KINDS, *ROBUST_KINDS, sketches.NAME, VOTES))
            near = difflib.get_close_matches(self.name, (*names, *ROBUST_ALIASES), 1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ValueError(
                f"a rule must be one of {', '.join(names)}{hint} Received: {self.name[:50]!r}"
            )
        given = dict(self.params)
        check_names(self.name, self._kind.parameters, given)
        values: dict[str, int | float] = {}
        for parameter in self._kind.parameters:
            value = given.get(parameter.name, self._default(parameter, values))
            held = int(value) if isinstance(value, bool) else value
            values[parameter.name] = parameter.checked(held)
        unused = _unused(self.name, values)
        for name in unused & given.keys():
            rest = UpdateRule(self.name, tuple(p for p in self.params if p[0] not in unused))
            raise ValueError(f"`{name}` means nothing in {rest}. Received: {name}={given[name]!r}")
        chosen = tuple((name, value) for name, value in values.items() if name not in unused)
        object.__setattr__(self, "params", chosen)
        may_stand_behind = not self.is_asynchronous or self.name == FEDBUFF
        if self.before is not None and (self._kind.merges == ROBUST or not may_stand_behind):
            raise ValueError(
                "Behind a robust rule there must be a synchronous one that is not robust itself, "
                f"such as `fedavg`, or `fedbuff`. Received: {self.text}"
            )

        if self.votes is not None and (self.is_asynchronous or self._kind.merges == SUM):
            is_sum = self.before is None
            if is_sum or self.is_asynchronous:
                raise ValueError(
                    "Behind votes there must be a synchronous rule of means, such as `median` or "
                    f"`mean >> momentum`. Received: {self.text}"
                )
        if self.votes is not None and self.robust is not None:
            self.votes.with_rule(self.robust)  # raises where the two do not go together
        if self.sketch is not None:
            object.__setattr__(self, "sketch", self._checked_sketch())

    @property
    def text(self) -> str:
        """The text that `parse` turns into this value; the same for equal values."""
        known = {parameter.name: parameter for parameter in self._kind.parameters}
        arguments = ", ".join(f"{name}={known[name].shown(value)}" for name, value in self.params)
        own = f"{self.name}({arguments})" if arguments else self.name
        if self.before is not None:
            own = self.before.text if self.name == MEAN else f"{self.before.text} >> {own}"
        if self.sketch is not None:
            own = f"{sketches.head(self.sketch)} >> {own}"
        return own if self.votes is None else f"{self.votes.text} >> {own}"

    @property
    def is_asynchronous(self) -> bool:
        """Whether a child's round closes without the others'."""
        return self._kind.merges is None or bool(self.get("asynchronous", 0))

    @property
    def is_mean(self) -> bool:
        """Whether children send their means; else what they send is added up, each its share.

        Children that wait for nobody send what they have, whatever is made of it.
        """
        if self.is_asynchronous:
            return False
        return self.is_robust or self._kind.merges == MEAN

    @property
    def is_plain(self) -> bool:
        """Whether it is a sum or a mean, and nothing before or behind it."""
        return self.name in (SUM, MEAN) and not self.is_robust

    @property
    def robust(self) -> Aggregator | None:
        """What merges where some children may lie; None: a sum or a mean."""
        if self._kind.merges == ROBUST:
            return parse_robust(dataclasses.replace(self, votes=None).text)
        return parse_robust(MEAN) if self.votes is not None and not self.before else self.before

    @property
    def sketched(self) -> Sketched | None:
        """What decides on sketches of all leaves' rows; None: rows of children are looked at."""
        if self.sketch is None or self.before is None:
            return None
        return Sketched(self.before, self.sketch or None)

    @property
    def is_robust(self) -> bool:
        """Whether some children may lie."""
        is_one = self.before is not None or self._kind.merges == ROBUST
        return is_one or self.votes is not None

    @property
    def is_whole(self) -> bool:
        """Whether it looks at whole rows, so that a round is merged when all of it has come."""
        if self.before is None:
            return self.votes is not None
        is_coordinate = len(self.before.steps) == 1 and self.before.rule.kind.is_coordinate
        return self.votes is not None or not is_coordinate

    @property
    def keeps_reference(self) -> bool:
        """Whether the robust rule begins where it ended in the round before."""
        return self.before is not None and self.before.rule.name == "centred_clipping"

    @property
    def gives_steps(self) -> bool:
        """Whether a step comes down, which workers subtract as it is."""
        return self._kind.gives_steps

    @property
    def keeps_state(self) -> bool:
        """Whether steps depend on rounds before."""
        is_robust = self._kind.merges == ROBUST
        stateless = is_robust or self.name in ("sum", "mean", "sgd", "fedavg")
        return self.is_asynchronous or not stateless or self.keeps_reference

    def __getitem__(self, name: str) -> int | float:
        """The value of a parameter."""
        return dict(self.params)[name]

    def get(self, name: str, other: int | float) -> int | float:
        """The value of a parameter, or `other` for one that this rule does not have."""
        return dict(self.params).get(name, other)

    def __repr__(self) -> str:
        return self.text

    @property
    def _kind(self) -> _Kind:
        return _KINDS[self.name]

    def _checked_sketch(self) -> int:
        """Numbers of a sketch; raises ValueError where there can be none."""
        if self.is_asynchronous:
            raise ValueError(
                f"`{sketches.NAME}` needs rounds in which all wait for each other: seeds are told "
                f"when the rows of all are fixed. Received: {self.text}"
            )
        if self.votes is not None:
            raise ValueError(
                f"`{sketches.NAME}` and votes exclude each other: groups vote at one server, which "
                f"has all rows. Received: {self.text}"
            )
        if self.before is not None:
            return Sketched(self.before, self.sketch or None).numbers
        if self.name in ROBUST_KINDS:
            raise ValueError(sketches.why_not(parse_robust(self.name)))
        raise ValueError(
            f"Behind `{sketches.NAME}` there must be a robust rule, as in 'sketched(k=512) >> "
            f"krum(f=1) >> fedavg'. Received: {self.text}"
        )

    def _default(
        self, parameter: Parameter, values: Mapping[str, int | float]
    ) -> int | float | None:
        if self.name == "dc_asgd" and parameter.name == "compensation":
            # lambda of DC-ASGD-a is divided by the root of a mean square, that of -c is not.
            return 2.0 if dict(self.params).get("adaptive") else parameter.default
        if self.name == "fedasync" and parameter.name == "a" and values["staleness"] == HINGE:
            return 10.0  # of the authors' experiments, as the 0.5 of the polynomial
        return parameter.default


def parse(text: str) -> UpdateRule:
    """Turns a text such as "momentum(learning_rate=0.1)" into what it names; nothing is evaluated.

    Args:
        text: what a user or another process wrote; arguments by name or by position.

    Raises:
        ValueError: an unknown name, with the known ones and the nearest, or a wrong argument.
        TypeError: `text` is not a string.
    """
    if not isinstance(text, str):
        raise TypeError(f"`text` must be a string such as 'sum'. Received: {text!r}")
    votes, rest = split(text) if len(text) <= _MAX_TEXT else (None, "")
    if votes is not None:
        then = parse(rest)
        if then.votes is not None:
            raise ValueError(f"`{VOTES}` must stand there once. Received: {text!r}")
        return dataclasses.replace(then, votes=votes)
    looked = sketches.split(text) if len(text) <= _MAX_TEXT else None
    if looked is not None:
        behind = parse(looked[1])
        if behind.sketch is not None:
            raise ValueError(f"`{sketches.NAME}` must stand there once. Received: {text!r}")
        return dataclasses.replace(behind, sketch=looked[0] or 0)
    parts = text.split(">>") if len(text) <= _MAX_TEXT else []
    for part in parts[1:]:
        if _named(part) in (VOTES, sketches.NAME):
            raise ValueError(f"`{_named(part)}` must stand at the beginning. Received: {text!r}")
    count = _num_robust(parts)
    if count and (count > 1 or len(parts) > 1 or not _is_known(parts[0])):
        return _behind(parse_robust(">>".join(parts[:count])), parts[count:], text)
    if len(parts) > 1:
        _parameters(_named(parts[0]))  # a name that is none is told as such
        raise ValueError(
            "before another rule there must be a robust one, as in 'krum(f=1) >> fedavg'. "
            f"Received: {text!r}"
        )
    call = _CALL.fullmatch(text) if parts else None
    if call is None:
        raise ValueError(
            f"a rule must read like 'momentum(learning_rate=0.1)'. Received: {text[:_MAX_TEXT]!r}"
        )
    name, arguments = call.group(1), (call.group(2) or "").strip()
    known = {parameter.name: parameter for parameter in _parameters(name)}
    try:
        return UpdateRule(name, tuple(call_text.values(name, known, arguments, text).items()))
    except TypeError as error:
        raise ValueError(str(error)) from error


def resolve(
    value: UpdateRule | Aggregator | Sketched | Detox | str, name: str = "rule"
) -> UpdateRule:
    """The rule that a user gave: a value, a robust one included, or its text.

    Args:
        value: what was given.
        name: of the argument, for the message.

    Raises:
        ValueError: as for `parse`.
        TypeError: it is neither.
    """
    if isinstance(value, Aggregator | Sketched):
        return parse(value.text)
    if isinstance(value, Detox):
        return dataclasses.replace(parse(value.then.text), votes=Votes.of(value))
    if isinstance(value, UpdateRule):
        return value
    if not isinstance(value, str):
        raise call_text.wrong_kind(name, "a rule such as robust.krum(f=1), or its text", value)
    return parse(value)


def _named(part: str) -> str:
    """The name in one part of a text, of those that have several that of this package."""
    name = part.split("(")[0].strip()
    return ROBUST_ALIASES.get(name, name)


def _is_known(part: str) -> bool:
    return part.split("(")[0].strip() in _KINDS


def _num_robust(parts: Sequence[str]) -> int:
    """How many parts of a text, from its beginning, make up one robust rule."""
    for place, part in enumerate(parts):
        kind = ROBUST_KINDS.get(_named(part))
        if kind is None:
            return 0 if place == 0 else place  # what stands there is no rule, or stands too early
        if not kind.is_pre:
            return place + 1
    return len(parts)


def _behind(before: Aggregator, rest: Sequence[str], text: str) -> UpdateRule:
    """The rule that is made of a robust one, and of what stands behind it."""
    last = parse(rest[0]) if len(rest) == 1 else UpdateRule(MEAN)
    # One robust rule behind another would get a single row; nothing is dropped without a word.
    if len(rest) > 1 or last.before is not None:
        raise ValueError(
            "behind a robust rule there must be one rule that is not robust itself, as in "
            f"'krum(f=1) >> fedavg'. Received: {text!r}"
        )
    return dataclasses.replace(last, before=before)


def _parameters(name: str) -> tuple[Parameter, ...]:
    return _KINDS[name].parameters if name in _KINDS else UpdateRule(name)._kind.parameters


def _unused(name: str, values: Mapping[str, int | float]) -> set[str]:
    """Parameters that mean nothing beside the values of the others."""
    if name == "dc_asgd":
        if values["adaptive"] and values["compat"]:
            raise ValueError(
                "`adaptive` and `compat` exclude each other: MXNet's form has a constant strength. "
                "Received: both"
            )
        return set() if values["adaptive"] else {"decay"}
    if name == "fedasync":
        return {CONSTANT: {"a", "b"}, POLYNOMIAL: {"b"}}.get(int(values["staleness"]), set())
    return set()
