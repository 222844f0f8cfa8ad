# SPDX-License-Identifier: Apache-2.0
"""Workers of a real run that lie, for tests and studies of robust rules.

    in every step      gradients become lies where Keras hands them to the strategy
    in packets         of a codec with a scale, whole parties lie about it to the server, whatever
                       is sent; gradients and movements stay honest
    in a loop          movements become lies where they are sent; local steps stay honest, so that
                       the liar's model does not run away from it. NaN is the exception: there
                       gradients are NaN, the worker says so itself, and its update is refused;
                       as in the steps of a robust rule

A worker that never lies computes what it would without an adversary, operation for operation.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.errors import ConfigError, ProtocolError
from tf_hips.ops.compressor import Compressor
from tf_hips.robust import attacks
from tf_hips.robust.adversary import Adversary, Lone
from tf_hips.robust.attacks import Attack
from tf_hips.strategies.loan import LEVELS, member

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy

Exchange: TypeAlias = Callable[[np.int64, np.ndarray, np.int64], np.ndarray]
"""Number of a round, all packets, and which gradient has spoilt them (`withheld`)."""

_liars: "weakref.WeakKeyDictionary[Any, Liar]" = weakref.WeakKeyDictionary()


def simulate_liars(
    strategy: "PartyStrategy", adversary: Adversary, *, level: str | None = None
) -> Lone:
    """Lets `adversary.q` of the workers of a run lie; called on all of them, before the first step.

        adversary = tf_hips.robust.Adversary(tf_hips.robust.attacks.reversed_gradient(), q=1)
        tf_hips.simulate_liars(strategy, adversary)

    Where a loop has the uplink and parties keep step inside, whole parties lie, with all of their
    workers. Labels are not flipped here: see `Lone.flips_labels` of what is returned.

    Args:
        strategy: a strategy of tf_hips.
        adversary: the same on all workers.
        level: of a loop that is made later, within what its replicas stay equal: "party" or
            "worker"; None: there will be none. What is returned goes by it. A loop that is there
            has said it.

    Returns:
        What this worker is.

    Raises:
        ConfigError: more would lie than there are, or the attack is not defined for so few, or is
            one on packets and there is no server, or its packets have nothing that could lie.
        ProtocolError: the strategy has summed gradients already.
        ValueError: there is no such level.
    """
    if level not in (None, *LEVELS):
        raise ValueError(f"`level` must be one of {', '.join(LEVELS)}. Received: {level!r}")
    if strategy._sums:
        raise ProtocolError(
            "Who lies must be said before the first step. Received: a strategy that has summed "
            "gradients already"
        )
    liar = Liar(strategy, adversary, level)
    _liars[strategy] = liar
    return liar.lone


class Liar:
    """One worker's lies about its gradients and movements."""

    def __init__(
        self, strategy: "PartyStrategy", adversary: Adversary, level: str | None = None
    ) -> None:
        """Finds out which worker this is; see `simulate_liars`."""
        self._adversary = adversary
        attack = adversary.attack
        self._is_of_packets = attack is not None and attack.is_of_packets
        level = level if strategy.loan is None else strategy.loan.level
        if self._is_of_packets:
            welcome = _check_packets(strategy, adversary)
            self._row = welcome.child, len(welcome.parties)
        else:
            self._row = _row(strategy, level)
        self.lone = _alone(adversary, *self._row)
        self._before: list[tf.Variable] = []
        self._is_nan = attack is not None and attack.name == "nan"

    def gradients(
        self, strategy: "PartyStrategy", gradients: Sequence[Any], step: Any
    ) -> list[Any]:
        """What the optimizer hands over in this worker's place; as operations."""
        if strategy.loan is not None:
            self._join(strategy.loan)
        is_due = (strategy.loan is None or self._is_nan) and not self._is_of_packets
        if not is_due or not self.lone.may_lie:
            return list(gradients)
        if any(isinstance(one, tf.IndexedSlices) for one in gradients):
            raise ConfigError(
                "Simulated liars need dense gradients. Received: sparse ones, of an embedding"
            )
        if self.lone.needs_result and not self._before:
            with tf.init_scope():
                self._before = [
                    strategy.make_variable(tf.zeros(one.shape), f"lie_{place}")
                    for place, one in enumerate(gradients)
                ]
        # Keras has divided by the number of replicas; a lie is about the whole gradient.
        share = 1.0 / strategy.num_replicas_in_sync
        sizes = [int(np.prod(one.shape, dtype=np.int64)) for one in gradients]

        def lie(number: np.int64, *told: np.ndarray) -> list[np.ndarray]:
            own = np.concatenate([one.ravel() for one in told[: len(sizes)]])
            before = [one.ravel() for one in told[len(sizes) :]]
            with np.errstate(all="ignore"):
                whole = np.asarray(own / np.float32(share), np.float32)
                last = np.concatenate(before) if before else None
                sent = self.lone.sent(whole, int(number), before=last)
                if sent is whole:  # no lie in this step: not a rounding either
                    return list(told[: len(sizes)])
                parts = np.split(sent * np.float32(share), np.cumsum(sizes)[:-1])
            return [
                part.reshape(one.shape).astype(np.float32)
                for part, one in zip(parts, told, strict=False)
            ]

        with tf.device("/cpu:0"):
            own = [tf.cast(one, tf.float32) for one in gradients]
            kept = [one.read_value() for one in self._before]
            sent = tf.numpy_function(
                strategy.failures.kept(lie),
                [tf.cast(step, tf.int64), *own, *kept],
                [tf.float32] * len(sizes),
            )
        # Eagerly one array comes without its list.
        sent = sent if isinstance(sent, list | tuple) else [sent]
        lies = []
        for one, value in zip(gradients, sent, strict=True):
            value.set_shape(one.shape)
            lies.append(tf.cast(value, one.dtype))
        return lies

    def hear(self, results: Sequence[Any]) -> None:
        """Remembers what came down, for who rides free."""
        for variable, value in zip(self._before, results, strict=False):
            variable.assign(tf.cast(value, tf.float32), read_value=False)

    def movement(self, loan: Any, moved: Sequence[tf.Tensor], number: int) -> list[tf.Tensor]:
        """What a member of a loop sends as its movement of round `number`; eager."""
        if self._is_nan or self._is_of_packets or self._adversary.attack is None:
            return list(moved)
        self._join(loan)
        if not self.lone.may_lie:
            return list(moved)
        sizes = [int(tf.size(one)) for one in moved]
        own = np.concatenate([np.ravel(tf.cast(one, tf.float32).numpy()) for one in moved])
        parts = np.split(self.lone.sent(own, number), np.cumsum(sizes)[:-1])
        return [
            tf.cast(tf.reshape(part, one.shape), one.dtype)
            for part, one in zip(parts, moved, strict=True)
        ]

    def _join(self, loan: Any) -> None:
        """Goes by what a row of a loop is, also of one that was made later and not told of.

        So there is one draw, which decides on gradients and movements.
        """
        row = loan.member()
        if row != self._row and not self._is_of_packets:
            self._row, self.lone = row, _alone(self._adversary, *row)

    def exchanging(self, exchange: Exchange, up: Compressor, sizes: Sequence[int]) -> Exchange:
        """`exchange`, with packets that lie if this party does; see the function of this name."""
        attack = self._adversary.attack
        if attack is None or not attack.is_of_packets:
            return exchange
        _check_scale(up, attack, [size for size in sizes if size])
        if not self.lone.may_lie:
            return exchange

        def lied(number: np.int64, packets: np.ndarray, spoilt: np.int64) -> np.ndarray:
            if not self.lone.lies(int(number)):
                return exchange(number, packets, spoilt)
            factor, stage = float(attack["factor"]), up.at(int(number))
            parts, at = [], 0
            for size in sizes:
                codec = stage.of_size(size)
                end = at + (codec.wire_bytes(size) if size else 0)
                part = packets[at:end]
                # Small tensors may go without a codec, and all of them while one warms up.
                is_lie = size > 0 and attacks.has_scale(codec)
                parts.append(attacks.lie_about_scale(codec, part, size, factor) if is_lie else part)
                at = end
            return exchange(number, np.concatenate(parts), spoilt)

        return lied


def exchanging(
    strategy: "PartyStrategy", exchange: Exchange, up: Compressor, sizes: Sequence[int]
) -> Exchange:
    """How a party exchanges packets with its server.

    Args:
        strategy: a `HierarchicalPS` with an uplink.
        exchange: does a round.
        up: what encodes gradients.
        sizes: elements of each gradient.
    """
    liar = _liars.get(strategy)
    return exchange if liar is None else liar.exchanging(exchange, up, sizes)


def told(strategy: "PartyStrategy", optimizer: Any, pairs: list[Any]) -> list[Any]:
    """(gradient, variable) as this worker hands them over."""
    liar = _liars.get(strategy)
    if liar is None:
        return pairs
    known = [place for place, (gradient, _) in enumerate(pairs) if gradient is not None]
    lies = liar.gradients(strategy, [pairs[place][0] for place in known], optimizer.iterations)
    changed = list(pairs)
    for place, lie in zip(known, lies, strict=True):
        changed[place] = (lie, pairs[place][1])
    return changed


def heard(strategy: "PartyStrategy", pairs: Any) -> Any:
    """What has come down, as it came."""
    liar = _liars.get(strategy)
    if liar is not None and liar.lone.needs_result:
        liar.hear([gradient for gradient, _ in pairs if gradient is not None])
    return pairs


def movement(
    strategy: "PartyStrategy", loan: Any, moved: list[tf.Tensor], number: int
) -> list[tf.Tensor]:
    """How far a member of a loop says that it has moved."""
    liar = _liars.get(strategy)
    return moved if liar is None else liar.movement(loan, moved, number)


def _check_packets(strategy: Any, adversary: Adversary) -> Any:
    """What the server has said; raises a ConfigError if there is none, or no packet can lie."""
    welcome = strategy.welcome
    if welcome is None:
        raise ConfigError(
            "Packets lie on their way to a server: `tf-hips run`, `tf-hips party --server`. "
            f"Received: {adversary.text} without a server"
        )
    # A budget chooses when the model is known; what it takes may have a scale or none.
    if adversary.attack is not None and not strategy._up.is_budget:
        _check_scale(strategy._up, adversary.attack)
    return welcome


def _check_scale(up: Compressor, attack: Attack, sizes: Sequence[int] | None = None) -> None:
    """Raises a ConfigError if no packet of gradients of these sizes, or of any, has a scale."""
    for _, stage in up.stages:
        codecs = [stage] if sizes is None else [stage.of_size(size) for size in sizes]
        if any(attacks.has_scale(codec) for codec in codecs):
            return
    raise ConfigError(
        f"`compression` must give packets a scale to lie about: {', '.join(attacks.SCALED)}. "
        f"Received: {up.text} with {attack}"
    )


def _row(strategy: "PartyStrategy", level: str | None) -> tuple[int, int]:
    """Index of the member whose row is this worker's, and how many members there are.

    Without a loop each worker is one.
    """
    if level is not None:
        return member(strategy, level)
    welcome = strategy.welcome
    workers = primitives.size() if welcome is None else sum(welcome.workers)
    return strategy.global_rank, workers


def _alone(adversary: Adversary, number: int, n: int) -> Lone:
    try:
        return adversary.alone(number, n)
    except ValueError as error:
        raise ConfigError(f"The adversary does not fit {n} rows: {error}") from error
