# SPDX-License-Identifier: Apache-2.0
"""Lists of gradients behind a run's first one, with a server: a GAN, two models, layers thawed.

    first list    rounds: the server merges the packets of all parties, by its rule
    all others    gathers: the packets of all parties come to each party, which decodes and adds
                  them up, in the order of the parties

A server's rounds are of one model, on whose shapes all have agreed. A gather carries any bytes, and
is repeated, recorded and closed without absent parties as a round is; so more lists need nothing
new on the way. What it costs is the way down: as many packets as there are parties. There is no
encoding on it, so nothing is lost there.

Only a sum or a mean can be added up by everyone: whatever else a rule makes of gradients (steps,
robust means) is the server's, and such a run has one list.

Invariant: all parties add up the same bytes in the same order, so replicas stay bit-identical.
"""

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tf_hips import log
from tf_hips.comm import primitives
from tf_hips.comm.parts import cut
from tf_hips.errors import ProtocolError
from tf_hips.ps.client.welcome import Welcome
from tf_hips.strategies import lying
from tf_hips.strategies.gradients import Gradient, Summing
from tf_hips.strategies.replicas import FirstSync
from tf_hips.strategies.rules import some, unlike
from tf_hips.strategies.uplink import SlowTier, Uplink, make_uplink

if TYPE_CHECKING:
    from tf_hips.strategies.hierarchical_ps import HierarchicalPS

_ADDED = ("sum", "mean")


def why_not(strategy: "HierarchicalPS") -> str | None:
    """Why a run has one list of gradients only; None: it may have more.

    Args:
        strategy: of a party with a server, no loop being in a local step.
    """
    if strategy.loan is not None:
        return "a loop (FedAvg) may have several, as a GAN has, in its local steps only"
    rule, welcome = strategy.rule, strategy.welcome
    is_added = rule is not None and rule.name in _ADDED and not rule.is_robust
    if not is_added or welcome is None or welcome.bears_liars:
        guard = "" if welcome is None or not welcome.bears_liars else ", and robust servers"
        return (
            "several can be summed below the rules `sum` and `mean` without robust servers, and "
            f"in the local steps of a loop (FedAvg). Here the rule is {rule}{guard}"
        )
    return None


def names(strategy: "HierarchicalPS", variables: Sequence[tf.Variable]) -> dict[str, str]:
    """Names of those of `variables` that are trained, by their ids; not of layers' statistics."""
    moved = {one._unique_id for made in strategy._statistics.values() for one in made.variables}
    return {
        one._unique_id: one.name.removesuffix(":0")
        for one in variables
        if one._unique_id not in moved
    }


def check(strategy: "HierarchicalPS", variables: Sequence[tf.Variable]) -> None:
    """Looks at a list of gradients behind the first one; says how it is summed.

    Args:
        strategy: of a party with a server.
        variables: whose gradients these are.

    Raises:
        ValueError: the run has one list only.
    """
    first, trained = strategy._first_list, names(strategy, variables)
    # What sums a list goes with its model.
    is_gone = bool(first) and not any(key[: len(first)] == tuple(first) for key in strategy._sums)
    told = some(list(trained.values()))
    gone = f"the model of the first step ({some(list(first.values()))}) is gone"
    reason = why_not(strategy)
    if reason is not None:
        now = f"gradients of {told}, and {gone}; start another run for another model"
        raise ValueError(
            f"This run trains one model with one optimizer: {reason}. "
            f"Received: {now if is_gone else unlike(first, trained)}"
        )
    if primitives.rank() != 0:
        return
    how = "come down as packets of all parties, and do not go in rounds, as those of the first step"
    if is_gone:
        log.info("Gradients of %s %s did: %s, and no other list takes its place.", told, how, gone)
    elif any(one in first for one in trained):
        log.warning("These %s: %s", how, unlike(first, trained))
    else:
        log.info("Gradients of %s %s.", told, how)


def summing(strategy: "HierarchicalPS", gradients: Sequence[Gradient], label: str) -> Summing:
    """How what is summed in each party is summed over the parties, by gathers.

    Args:
        strategy: for which `why_not` knows no reason.
        gradients: of the list.
        label: of the list.
    """
    welcome = strategy.welcome
    if welcome is None:
        raise ProtocolError(f"Nothing goes up without an uplink. Received: {label}")
    sizes = [gradient.num_elements for gradient in gradients]
    # A party's own server decodes nothing of it, so it is encoded once, for the links above that.
    up, _ = strategy._for_model(gradients, strategy.above)
    exchange = _Exchange(strategy, welcome, _title(gradients, label))
    site = strategy.config.uplink.site if strategy.config.uplink else ""
    reducer = make_uplink(
        SlowTier(
            lying.exchanging(strategy, exchange, up, sizes),
            len(welcome.parties),
            up.encoder_seed(strategy.config.seed, f"party/{site}/{label}"),
            strategy.failures,
        ),
        up,
        up,
        sizes,
        label,
        strategy.make_variable,
        _Gathered,
    )
    return Summing(reducer, only_float32=True)


def meeting(strategy: "HierarchicalPS") -> FirstSync | None:
    """What makes weights equal over parties that came after the first meeting; None: nothing."""
    welcome = strategy._together()
    if welcome is None or strategy._apart is not None or why_not(strategy) is not None:
        return None

    def meet(values: list[np.ndarray]) -> list[np.ndarray]:
        if strategy._is_resumed:
            raise ProtocolError(
                "A process that has come back to its run cannot make weights equal that its backup "
                "has not: build all models and their optimizers before the first step. Received: "
                f"{len(values)} variables that came later"
            )
        kinds = ", ".join(f"{one.dtype.name}{list(one.shape)}" for one in values)
        digest = hashlib.sha256(kinds.encode()).hexdigest()[:8]
        # Who waits here alone reads this, and nothing else.
        title = (
            f"weights that came later, {len(values)} variables ({kinds[:80]}; {digest}), which all "
            "parties make before the same step; those of one party alone belong outside of the "
            "strategy's scope"
        )
        own = b"".join(one.tobytes() for one in values)
        # Only the first party's are wanted; all know how many bytes, so all make as many gathers.
        told = b"".join(
            _present(strategy.from_party(0, title, piece), title)
            for piece in _pieces(own, strategy.most_gather_bytes())
        )
        found, begin = [], 0
        for one in values:
            part = told[begin : begin + one.nbytes]
            found.append(np.frombuffer(part, one.dtype).reshape(one.shape))
            begin += one.nbytes
        return found

    return meet


def _present(payload: bytes | None, title: str) -> bytes:
    if payload is None:
        raise ProtocolError(
            f"`{title}` are the first party's, and the server's quorum has gone on without it."
        )
    return payload


def _title(gradients: Sequence[Gradient], label: str) -> str:
    """What the parties compare before they add up."""
    shapes = ", ".join(str(list(gradient.shape)) for gradient in gradients)
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:8]
    return f"{label}, {len(gradients)} gradients of shapes {shapes[:80]} ({digest})"


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


class _Exchange:
    """The packets of one party in; the factors and the packets of all parties out. On rank 0."""

    def __init__(self, strategy: "HierarchicalPS", welcome: Welcome, title: str) -> None:
        self._strategy = strategy
        self._welcome = welcome
        self._title = title

    def __call__(self, number: np.int64, packets: np.ndarray, spoilt: np.int64) -> np.ndarray:
        del spoilt  # it is an error on the way here, or zeros
        strategy, workers = self._strategy, self._welcome.workers
        title = f"{self._title}, step {int(number)}"
        began = time.monotonic()
        rows: list[list[bytes | None]] = [[] for _ in workers]
        for piece in _pieces(packets.tobytes(), strategy.most_gather_bytes()):
            for row, part in zip(rows, strategy._gather_bytes(title, piece), strict=True):
                row.append(part)
        joined = [None if None in row else b"".join(part or b"" for part in row) for row in rows]
        strategy._seconds_in_rounds += time.monotonic() - began
        sizes = [packets.size if row is None else len(row) for row in joined]
        if any(size != packets.size for size in sizes):
            raise ProtocolError(
                f"All parties must send as many bytes of `{title}`. Received: "
                f"{', '.join(map(str, sizes))} bytes, by party"
            )
        # As in rounds that close without some: what adds up to a mean is that of those present.
        there = sum(count for count, row in zip(workers, joined, strict=True) if row is not None)
        share = 1.0 if there == sum(workers) else sum(workers) / max(1, there)
        factors = np.array([0.0 if row is None else share for row in joined], np.float32)
        filled = [packets.tobytes() if row is None else row for row in joined]
        return np.frombuffer(factors.tobytes() + b"".join(filled), np.uint8)


class _Gathered(Uplink):
    """One stage: what comes down are packets of all parties."""

    def _reply_bytes(self) -> int:
        return self._tier.num_parties * (4 + sum(self._up_bytes))

    def _merged(self, reply: tf.Tensor) -> list[tf.Tensor]:
        num_parties, one = self._tier.num_parties, sum(self._up_bytes)
        told, *rows = cut(reply, [4 * num_parties, *[one] * num_parties])
        factors = tf.bitcast(tf.reshape(told, [num_parties, 4]), tf.float32)
        sums: list[tf.Tensor] = []
        for place, row in enumerate(rows):
            factor = factors[place]
            parts = [
                tf.where(factor > 0, factor * part, tf.zeros_like(part))
                for part in self._decoded(self._up, row, self._up_bytes)
            ]
            sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        return sums
