# SPDX-License-Identifier: Apache-2.0
"""Who lies in a run, and what those who lie send: an attack, a number of liars, and a seed.

    Adversary.sent   all rows are here, as where one process plays all workers: liars know all
    Lone             a worker of a distributed run: a liar knows its own rows and no others

Attacks of NEEDS_OTHERS are made from what honest workers send. A lone liar takes its own rows of
the last HISTORY steps for theirs: their mean and deviation estimate those of all workers as far as
batches are drawn alike, and liars do not collude.
"""

import collections
import dataclasses
import difflib
import inspect
import re

import numpy as np

from tf_hips.ops.native import Floats
from tf_hips.robust import attacks
from tf_hips.robust.aggregator import parse as parse_rule
from tf_hips.robust.attacks import Attack
from tf_hips.robust.rows import Rows, as_rows

LABEL_FLIP = "label_flip"
"""Instead of an attack: labels y of liars are num_classes - 1 - y, and gradients honest."""
ALIASES = {
    "rev_grad": "reversed_gradient",
    "random": "gaussian",
    "little": "alie",
    "ipm": "inner_product",
    "foe": "inner_product",
}
"""Spellings of DETOX and of others."""
NEEDS_OTHERS = ("alie", "inner_product", "mimic", "min_max", "min_sum")
HISTORY = 8
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\((.*)\)\s*)?", re.ASCII)
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(.*\S)\s*", re.ASCII)
# Outside of the parentheses of a rule that is an argument.
_COMMA = re.compile(r",(?![^()]*\))")
_MAX_TEXT = 400


def parse(text: str) -> Attack:
    """The attack that a text names: `alie(z=1.5)`, `rev_grad`; nothing is evaluated.

    A rule in it is written as everywhere: `optimal(base=alie, rule=nnm(f=3) >> krum(f=3))`.

    Raises:
        ValueError: there is no such attack, it does not take an argument, or it is one on data.
        TypeError: `text` is not a string.
    """
    if not isinstance(text, str):
        raise TypeError(f"an attack must be told as a string. Received: {text!r}")
    if text.partition("(")[0].strip() == LABEL_FLIP:
        raise ValueError(
            f"an attack must change what is sent, and {LABEL_FLIP} changes data: it is `tf-hips "
            f"train --err-mode {LABEL_FLIP}`, `Adversary(None, q)` and `attacks.flip_labels`. "
            f"Received: {text[:_MAX_TEXT]!r}"
        )
    text = ALIASES.get(text.strip(), text)
    call = _CALL.fullmatch(text) if len(text) <= _MAX_TEXT else None
    name = ALIASES.get(call[1], call[1]) if call else ""
    if call is None or name not in (*attacks.NAMES, *attacks.PACKET_NAMES):
        known = (*attacks.NAMES, *attacks.PACKET_NAMES, *ALIASES, LABEL_FLIP)
        near = difflib.get_close_matches(name or text[:_MAX_TEXT], known, 1)
        hint = f"; did you mean {near[0]}?" if near else "."
        head = text.partition("(")[0].strip()
        if call is None and ALIASES.get(head, head) in attacks.NAMES + attacks.PACKET_NAMES:
            raise ValueError(
                f"an attack must read like `alie(z=1.5)`, in {_MAX_TEXT} characters at most. "
                f"Received: {text[:_MAX_TEXT]!r}"
            )
        raise ValueError(
            f"an attack must be one of {', '.join(known)}{hint} Received: {text[:_MAX_TEXT]!r}"
        )
    factory = getattr(attacks, name)
    known_types = {
        key: type(one.default) for key, one in inspect.signature(factory).parameters.items()
    }
    values: dict[str, int | float | str] = {}
    for argument in _COMMA.split(call[2]) if (call[2] or "").strip() else []:
        match = _ARGUMENT.fullmatch(argument)
        if match is None or match[1] not in known_types or match[1] in values:
            takes = ", ".join(known_types)
            raise ValueError(
                f"`{name}` takes {takes}, as `{name}({takes.split(',')[0]}=...)`. Received: "
                f"{argument.strip()!r} in {text!r}"
            )
        values[match[1]] = _value(match[2])
    try:
        found: Attack = factory(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error} in {text!r}") from error
    return found


@dataclasses.dataclass(frozen=True)
class Adversary:
    """What liars do in a run; a plain value, the same on all workers.

    Attributes:
        attack: what they send; None: their labels are flipped, and what they send is honest.
        q: how many lie.
        seed: of the draw of who lies, and of noise.
        is_redrawn: whether others lie in each step; else the same for ever.
        placement: "random", or "worst": in as many groups that vote as they can own.
        r: with "worst", workers of a group.
        group_seed: with "worst", the seed of the groups of each step, which liars then know; None:
            groups of neighbours, which stay.

    Raises:
        ValueError: `q` is not positive, labels would be flipped by the step, or there is no such
            placement, or one with what means nothing in it.
        TypeError: `attack` is a text, which `parse` reads, or anything else; or a number is no
            integer.
    """

    attack: Attack | None
    q: int
    seed: int = 0
    is_redrawn: bool = False
    placement: str = attacks.RANDOM
    r: int = 1
    group_seed: int | None = None

    def __post_init__(self) -> None:
        if self.attack is not None and not isinstance(self.attack, Attack):
            raise TypeError(
                "`attack` must be an Attack, such as `tf_hips.robust.adversary.parse('rev_grad')` "
                f"makes, or None for flipped labels. Received: attack={self.attack!r}"
            )
        seeds = ("seed",) if self.group_seed is None else ("seed", "group_seed")
        for name in ("q", *seeds, "r"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}")
        if self.q < 1:
            raise ValueError(f"`q` must be 1 or more. Received: q={self.q}")
        self._check_placement()
        if self.attack is None and not self.stays:
            changes = "is_redrawn=True" if self.is_redrawn else f"group_seed={self.group_seed}"
            raise ValueError(
                "labels are flipped before training: who lies must stay the same. Received: "
                f"{changes} with flipped labels"
            )

    def _check_placement(self) -> None:
        if self.placement not in attacks.PLACEMENTS:
            raise ValueError(
                f"`placement` must be one of {', '.join(attacks.PLACEMENTS)}. Received: "
                f"placement={self.placement!r}"
            )
        if self.r < 1:
            raise ValueError(f"`r` must be 1 or more. Received: r={self.r}")
        if self.placement == attacks.WORST and self.is_redrawn:
            raise ValueError(
                "the worst placement says itself who lies in a step: leave out `is_redrawn`. "
                "Received: is_redrawn=True"
            )
        if self.placement == attacks.RANDOM and (self.r > 1 or self.group_seed is not None):
            raise ValueError(
                "`r` and `group_seed` are of the worst placement. Received: "
                f"r={self.r}, group_seed={self.group_seed} with placement={self.placement}"
            )

    @property
    def stays(self) -> bool:
        """Whether the same workers lie in all steps."""
        return not self.is_redrawn and self.group_seed is None

    @property
    def text(self) -> str:
        """Of the attack."""
        return LABEL_FLIP if self.attack is None else str(self.attack)

    def liars(self, n: int, step: int = 0) -> tuple[int, ...]:
        """Numbers of those of n workers who lie in a step.

        Raises:
            ValueError: more would lie than there are.
        """
        return attacks.liars(
            n,
            self.q,
            self.seed,
            step,
            fixed=not self.is_redrawn,
            placement=self.placement,
            r=self.r,
            group_seed=self.group_seed,
        )

    def sent(self, rows: Rows, step: int, *, before: Floats | None = None) -> Floats:
        """What n workers send, [n, d]: the given rows, and lies in the places of liars.

        Args:
            rows: what all would send if nobody lied; not changed.
            step: of the run.
            before: the result of the step before; None: there is none.

        Raises:
            ValueError: nobody is honest.
        """
        sent = np.stack(as_rows(rows))
        if self.attack is None:
            return sent
        who = list(self.liars(len(sent), step))
        honest = np.delete(sent, who, axis=0)
        if not len(honest):
            raise ValueError(
                f"somebody must be honest. Received: {self.q} liars of {len(sent)} workers"
            )
        sent[who] = self.attack(
            honest, len(who), own=sent[who], before=before, seed=self.seed, step=step
        )
        return sent

    def check(self, n: int) -> None:
        """Looks whether the attack can be made by liars who know the rows of all n workers.

        Raises:
            ValueError: nobody would be honest, or the attack (or its rule) is not defined for so
                few, or is one on packets, which nobody makes there.
        """
        if self.q >= n:
            raise ValueError(f"somebody must be honest. Received: {self.q} liars of {n} workers")
        if self.attack is None:
            return
        if self.attack.is_of_packets:
            raise ValueError(f"rows that are at hand were never packets. Received: {self.attack}")
        _of_own_rows(self, n)
        if self.q < 2 and ("statistics", "own") in self.attack.params:
            raise ValueError(
                f"`q` must be 2 or more for {self.attack}: the row of one liar has no deviation. "
                f"Received: q={self.q}"
            )
        if self.attack.name == "optimal":
            parse_rule(str(self.attack["rule"])).check(n)
        if self.attack.name == "mimic" and int(self.attack["target"]) >= n - self.q:
            raise ValueError(
                f"`target` of mimic must be less than the {n - self.q} honest rows. Received: "
                f"{self.attack}"
            )

    def alone(self, number: int, n: int) -> "Lone":
        """Worker `number` of n, which sees no other's rows.

        Raises:
            ValueError: more would lie than there are, or the attack's deviations are not defined
                for so few workers, or it takes the rows of all.
        """
        if self.attack is not None and self.attack.name == "optimal":
            raise ValueError(
                "an attack must be made of the rows that a liar knows; `optimal` takes those of "
                "all, as with --simulated-workers and in `Adversary.sent`. Received: "
                f"{self.attack}"
            )
        return Lone(self, number, n)


class Lone:
    """One worker of a distributed run, as far as it lies."""

    def __init__(self, adversary: Adversary, number: int, n: int) -> None:
        """Has sent nothing yet; see `Adversary.alone`."""
        self._adversary = adversary
        self._number, self._n = number, n
        self._attack = None if adversary.attack is None else _of_own_rows(adversary, n)
        self._rows: collections.deque[Floats] = collections.deque(maxlen=HISTORY)
        self._is_fixed_liar = adversary.stays and number in adversary.liars(n)

    @property
    def may_lie(self) -> bool:
        """Whether it sends a lie in any step."""
        return self._attack is not None and (not self._adversary.stays or self._is_fixed_liar)

    @property
    def flips_labels(self) -> bool:
        """Whether its rows have wrong labels."""
        return self._adversary.attack is None and self._is_fixed_liar

    @property
    def needs_result(self) -> bool:
        """Whether what comes down in a step must be told in the next one."""
        return self.may_lie and self._attack is not None and self._attack.name == "free_riding"

    def lies(self, step: int) -> bool:
        """Whether it sends a lie in this step."""
        if self._adversary.stays:
            return self._is_fixed_liar and self._attack is not None
        return self._number in self._adversary.liars(self._n, step)

    def sent(self, own: Floats, step: int, *, before: Floats | None = None) -> Floats:
        """What it sends, [d].

        Args:
            own: what it would send if it did not lie; not changed.
            step: of the run; each once, in order.
            before: what came down in the step before; None: not known.
        """
        if self._attack is None or self._attack.is_of_packets:
            return own
        if self._attack.name in NEEDS_OTHERS:
            self._rows.append(np.array(own, np.float32))
        if not self.lies(step):
            return own
        # The lie of each liar has noise of its own.
        seed = self._adversary.seed + self._number
        known = list(self._rows) or [own]
        attack = self._attack
        if attack.name == "mimic":  # of rows that it does not have yet its last one
            # It has no other worker's row to keep to: of its own the farthest, as of no fixed one.
            target = int(attack["target"]) or -1
            attack = attacks.mimic(min(target, len(known) - 1))
        lie = attack(known, 1, own=[own], before=before, seed=seed % 2**63, step=step)
        return np.asarray(lie[0])


def _of_own_rows(adversary: Adversary, n: int) -> Attack | None:
    """The attack with what must be known of the others put in: of `alie` its z and its rows."""
    adversary.liars(n)
    attack = adversary.attack
    if attack is None or attack.name != "alie":
        return attack
    given = dict(attack.params)
    z = given["z"]
    given["z"] = attacks.alie_z(n, adversary.q, z) if isinstance(z, str) else z
    given["statistics"] = "honest"  # the rows that it knows, which are its own
    return dataclasses.replace(attack, params=tuple(given.items()))


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
