# SPDX-License-Identifier: Apache-2.0
"""What numbers and words attacks take: each is looked at when an attack is made."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from tf_hips.robust.aggregator import parse

DIRECTIONS = ("unit", "std", "sign")
STATISTICS = ("honest", "own", "all")
BASES = ("alie", "inner_product")
Z_FORMULAE = ("paper", "n")

Value: TypeAlias = int | float | str


@dataclasses.dataclass(frozen=True)
class Param:
    """What one parameter may be.

    Attributes:
        least: of a number; None: any finite one.
        is_above: whether it must be greater than `least`.
        is_whole: whether it must be an integer.
        words: what it may be instead of a number, or if there is no number.
        is_number: whether it may be a number.
        is_rule: whether it is the text of a robust rule, and nothing else.
    """

    least: float | None = None
    is_above: bool = False
    is_whole: bool = False
    words: tuple[Value, ...] = ()
    is_number: bool = True
    is_rule: bool = False

    @property
    def wanted(self) -> str:
        """In an error."""
        if self.is_rule:
            return "the text of a robust rule such as 'krum(f=1)'"
        said = " or ".join(repr(word) for word in self.words)
        if not self.is_number:
            return said
        what = "an integer" if self.is_whole else "a finite number"
        if self.least is not None:
            what += f" {'>' if self.is_above else '>='} {self.least:g}"
        return f"{said} or {what}" if said else what

    def check(self, attack: str, name: str, value: object) -> None:
        """Refuses what it may not be.

        Raises:
            TypeError: it is of another type.
            ValueError: it is out of range, or another word.
        """
        is_word = any(type(value) is type(word) and value == word for word in self.words)
        if is_word:
            return
        kinds = (int, np.integer) if self.is_whole else (int, float, np.integer, np.floating)
        message = f"`{name}` of {attack} must be {self.wanted}. Received: {name}={value!r}"
        if self.is_rule:
            if not isinstance(value, str):
                raise TypeError(message)
            try:
                parse(value)
            except ValueError as error:
                raise ValueError(message) from error
            return
        is_bool = isinstance(value, bool)
        is_known_type = not is_bool and isinstance(value, tuple(type(one) for one in self.words))
        if is_bool or not isinstance(value, kinds if self.is_number else ()):
            raise (ValueError if is_known_type else TypeError)(message)
        number = float(value)
        is_low = self.least is not None and (
            number <= self.least if self.is_above else number < self.least
        )
        if not math.isfinite(number) or is_low:
            raise ValueError(message)


_ANY = Param()
_SPREAD = Param(least=0)


PACKETS = ("lying_scale",)
"""Attacks on packets, which no row is."""


def _words(*words: Value) -> Param:
    return Param(words=words, is_number=False)


PARAMS: Mapping[str, Mapping[str, Param]] = MappingProxyType(
    {
        "reversed_gradient": {"c": _ANY},
        "constant": {"c": _ANY},
        "nan": {},
        "gaussian": {"mean": _ANY, "sigma": _SPREAD},
        "sign_flip": {"of": _words("own", "mean")},
        "alie": {
            # At 0 the honest mean is sent, which is no attack; the direction is that of `sign`.
            "z": Param(least=0, is_above=True, words=Z_FORMULAE),
            "sign": _words(-1, 1),
            "statistics": _words(*STATISTICS),
            "ddof": _words(0, 1),
        },
        "inner_product": {"epsilon": Param(least=0, is_above=True)},
        "mimic": {"target": Param(least=-1, is_whole=True)},
        "min_max": {"direction": _words(*DIRECTIONS)},
        "min_sum": {"direction": _words(*DIRECTIONS), "bound": _words("max", "min")},
        "free_riding": {"sigma": _SPREAD},
        "optimal": {"base": _words(*BASES), "rule": Param(is_rule=True)},
        "lying_scale": {"factor": _ANY},
    }
)
"""By attack, in the order of its arguments."""


def check(attack: str, given: Sequence[tuple[str, Value]]) -> None:
    """Looks at all parameters of an attack.

    Raises:
        TypeError: one is of another type.
        ValueError: one is out of range, or they are not those of the attack.
    """
    known = PARAMS[attack]
    if [name for name, _ in given] != list(known):
        wanted = ", ".join(known) or "nothing"
        raise ValueError(f"`params` of {attack} must be of {wanted}. Received: {given!r}")
    for name, value in given:
        known[name].check(attack, name, value)
