# SPDX-License-Identifier: Apache-2.0
"""UpdateRule: what a server makes of its children's gradients. A plain value.

It prints as the text that makes it again, `momentum(learning_rate=0.1, momentum=0.9,
nesterov=False, asynchronous=False)`; this text travels between processes, so two rules are the same
if and only if their texts are. Holds no state and does no work.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping

from tf_hips.ops import call_text
from tf_hips.ops.registry import Parameter
from tf_hips.robust import Aggregator
from tf_hips.robust.value import KINDS as ROBUST_KINDS

_MAX_TEXT = 320
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\(([^()]*)\)\s*)?", re.ASCII)

_YES_OR_NO = (("False", 0), ("True", 1))
CONSTANT, POLYNOMIAL, HINGE = range(3)
_STALENESS = (("constant", CONSTANT), ("polynomial", POLYNOMIAL), ("hinge", HINGE))

SUM, MEAN, ROBUST = "sum", "mean", "robust"
# How many children of a robust rule may lie; as many as it bears unless it is said.
_F = Parameter("f", default=-1, minimum=-1, maximum=1024, words=(("auto", -1),))


def _rate(default: float, name: str = "learning_rate") -> Parameter:
    return Parameter(name, default=default, minimum=1e-10, maximum=1e6)


def _decay(name: str, default: float) -> Parameter:
    return Parameter(name, default=default, minimum=0.0, maximum=0.99999)


def _small(name: str, default: float) -> Parameter:
    return Parameter(name, default=default, minimum=1e-12, maximum=1e3)


def _flag(name: str) -> Parameter:
    return Parameter(name, default=0, minimum=0, maximum=1, words=_YES_OR_NO)


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
    "fedbuff": _Kind(
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

    Raises:
        ValueError: there is no such rule, or a parameter is unknown, out of range, or means nothing
            beside the others.
        TypeError: a parameter is not a number of the right kind.
    """

    name: str
    params: tuple[tuple[str, int | float], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            near = difflib.get_close_matches(self.name, _KINDS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"a rule must be one of {', '.join(_KINDS)}{hint} Received: {self.name[:50]!r}"
            )
        known = {parameter.name: parameter for parameter in self._kind.parameters}
        given = dict(self.params)
        for name in given:
            if name not in known:
                takes = ", ".join(known) or "no parameters"
                raise ValueError(f"`{self.name}` takes {takes}. Received: {name}={given[name]!r}")
        values: dict[str, int | float] = {}
        for name, parameter in known.items():
            value = given.get(name, self._default(parameter, values))
            values[name] = parameter.checked(int(value) if isinstance(value, bool) else value)
        unused = _unused(self.name, values)
        for name in unused & given.keys():
            rest = UpdateRule(self.name, tuple(p for p in self.params if p[0] not in unused))
            raise ValueError(f"`{name}` means nothing in {rest}. Received: {name}={given[name]!r}")
        chosen = tuple((name, value) for name, value in values.items() if name not in unused)
        object.__setattr__(self, "params", chosen)

    @classmethod
    def make(cls, name: str, **params: int | float | str) -> "UpdateRule":
        """A rule of Python values: `UpdateRule.make("momentum", learning_rate=0.1)`."""
        known = {parameter.name: parameter for parameter in _parameters(name)}
        numbers = {
            key: known[key].number(value) if key in known else value
            for key, value in params.items()
        }
        return cls(name, tuple(numbers.items()))  # type: ignore[arg-type]

    @property
    def text(self) -> str:
        """The text that `parse` turns into this value; the same for equal values."""
        known = {parameter.name: parameter for parameter in self._kind.parameters}
        arguments = ", ".join(f"{name}={known[name].shown(value)}" for name, value in self.params)
        return f"{self.name}({arguments})" if arguments else self.name

    @property
    def is_asynchronous(self) -> bool:
        """Whether a child's round closes without the others'."""
        return self._kind.merges is None or bool(self.get("asynchronous", 0))

    @property
    def is_mean(self) -> bool:
        """Whether children send their means; else what they send is added up, each its share."""
        return self._kind.merges in (MEAN, ROBUST)

    @property
    def is_robust(self) -> bool:
        """Whether some children may lie: each coordinate is that of most of them."""
        return self._kind.merges == ROBUST

    @property
    def gives_steps(self) -> bool:
        """Whether a step comes down, which workers subtract as it is."""
        return self._kind.gives_steps

    @property
    def keeps_state(self) -> bool:
        """Whether steps depend on rounds before."""
        stateless = self.is_robust or self.name in ("sum", "mean", "sgd", "fedavg")
        return self.is_asynchronous or not stateless

    def __getitem__(self, name: str) -> int | float:
        """The value of a parameter."""
        return dict(self.params)[name]

    def get(self, name: str, other: int | float) -> int | float:
        """The value of a parameter, or `other` for one that this rule does not have."""
        return dict(self.params).get(name, other)

    def __str__(self) -> str:
        return self.text

    @property
    def _kind(self) -> _Kind:
        return _KINDS[self.name]

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
    call = _CALL.fullmatch(text) if len(text) <= _MAX_TEXT else None
    if _names_whole_rows(text if call is None else call.group(1)):
        raise ValueError(
            "a robust rule of a server must look at each coordinate by itself (median, "
            "trimmed_mean, meamed, majority): a server merges chunk by chunk, and by distances "
            f"each chunk would be of other children. Received: {text[:_MAX_TEXT]!r}"
        )
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


def resolve(value: UpdateRule | Aggregator | str) -> UpdateRule:
    """The rule that a user gave: a value, a robust one included, or its text.

    Raises:
        ValueError, TypeError: as for `parse`.
    """
    if isinstance(value, Aggregator):
        return parse(value.text)
    return value if isinstance(value, UpdateRule) else parse(value)


def _names_whole_rows(text: str) -> bool:
    """Whether a text names a robust rule, or several, that no server has."""
    first = text.split(">>")[0].split("(")[0].strip()
    return first in ROBUST_KINDS and (first not in _KINDS or ">>" in text)


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
