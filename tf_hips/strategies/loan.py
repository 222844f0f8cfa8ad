# SPDX-License-Identifier: Apache-2.0
"""What a strategy does while a loop decides when replicas meet (`tf_hips.loops`).

    local phase    `level="party"`: gradients are summed over the workers of the party in each
                   step, and nothing goes up; `level="worker"`: each worker trains on its own
    meeting        inside `whole()` the strategy is what it is without a loop: gathers and exact
                   sums are over all workers of all parties, where these keep step

Sums of the loop's own go the ways of gradients: in the party by its compression, over the parties
by the codecs, residuals and rounds of the uplink.

Invariant: whatever is traced in a local phase contains no collective beyond its level.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.errors import ConfigError, ProtocolError
from tf_hips.ops import registry
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.repeats import times_sent
from tf_hips.strategies.gradients import Gradient, GradientSum, Summing

if TYPE_CHECKING:
    from tf_hips.strategies.closing import Closing
    from tf_hips.strategies.party import PartyStrategy

PARTY, WORKER = "party", "worker"
LEVELS = (PARTY, WORKER)

# Gradients of a step, summed, and their variables in; what the optimizer gets out.
Correction = Callable[[Sequence[tf.Tensor], Sequence[tf.Variable]], list[tf.Tensor]]
# Raises if the loop does not exchange what a step trains.
CheckStep = Callable[[Sequence[tf.Variable]], None]

# How often a codec may send a movement: a residual sends it once, or overshoots a little.
_MOST_TIMES = 1.5

# What an encoder keeps of its own input, and not of what it merges for others.
_OF_THE_SENDER = ("residual", "state", "uplink_")


def member(strategy: "PartyStrategy", level: str) -> tuple[int, int]:
    """Index of the member whose row is this worker's, and how many members a loop has.

    Args:
        strategy: of the worker.
        level: within what replicas stay equal in a local phase; "party": a row is a party's.
    """
    welcome = strategy.welcome
    if welcome is None:
        return primitives.rank(), primitives.size()
    if level == WORKER:
        return sum(welcome.workers[: welcome.child]) + primitives.rank(), sum(welcome.workers)
    return int(welcome.child), len(welcome.parties)


def _check_momentum(strategy: "PartyStrategy", level: str) -> None:
    """Raises a ConfigError where a movement would be sent as a mean of movements, or many times."""
    codecs = strategy._codecs()
    if strategy.has_server and level == PARTY:
        # What is summed in the party are the gradients of each step.
        name = "compression" if strategy.above is None else "local_compression"
        codecs = {name: codecs.get("compression")}
    for name, codec in codecs.items():
        if codec is None:
            continue
        has_own = dict(codec.codec.params).get("momentum", 0) > 0  # as dgc has
        is_tried = registry.holds(codec.codec.name) and codec.codec.has_state
        times = times_sent(codec.codec) if is_tried else 1.0
        if codec.has_momentum or has_own or not times <= _MOST_TIMES:  # nor no number
            others = "; `dgc(momentum=0)` and `error_feedback(topk(...))` have none"
            if not times <= _MOST_TIMES:
                others += f". This codec sends a movement {times:.3g} times over"
            raise ConfigError(
                f"`{name}` must be without momentum under a loop of tf_hips.loops, which sends how "
                "far local steps have moved the weights, and not gradients: give the optimizer of "
                "the local steps a momentum, or the rule of the server"
                f"{'' if codec.has_momentum else others}. Received: {name}={codec.text}"
            )


class Loan:
    """The uplink of one strategy, and its sums, in the hands of a loop."""

    def __init__(self, strategy: "PartyStrategy", owner: Any, level: str) -> None:
        """Takes the uplink; for the life of the strategy.

        Args:
            strategy: a `PartyStrategy` that has trained nothing yet.
            owner: the loop, a Keras callback; not kept alive.
            level: within what replicas stay equal in a local phase, "party" or "worker".

        Raises:
            ProtocolError: another loop has it, or gradients have crossed the uplink already.
            ConfigError: what the loop sends would get a momentum.
        """
        if level not in LEVELS:
            raise ValueError(f"`level` must be one of {', '.join(LEVELS)}. Received: {level!r}")
        if strategy.loan is not None:
            raise ProtocolError(
                "A strategy serves one loop: make another strategy for another loop. Received: a "
                "second one"
            )
        if strategy._sums:
            raise ProtocolError(
                "A loop must be made before the first step of its model. Received: a strategy "
                "that has summed gradients already"
            )
        _check_momentum(strategy, level)
        self._strategy = strategy
        self._owner = weakref.ref(owner)
        self.level = level
        strategy.beginning.meetings.have_own_optimizers = level == WORKER
        self.is_open = False
        self.closing: Closing | None = None  # of the `fit` that runs, until its callbacks end
        self._apart: str | None = None
        self.correction: Correction | None = None
        self.check_step: CheckStep | None = None
        self.counter: tf.Variable | None = None
        self.weight: float | None = None
        self.is_busy = False  # whether a thread has the uplink
        self.round_step: tf.Variable | None = None  # the next round of the uplink

    @property
    def owner(self) -> Any:
        """The loop; None when it is gone."""
        return self._owner()

    @property
    def apart(self) -> str | None:
        """Within what replicas stay equal right now: a level in a local phase, else None."""
        return self._apart

    @property
    def is_at_end(self) -> bool:
        """Whether the epochs of a `fit` are over, and not yet its callbacks."""
        return self.is_open and self.closing is not None and self.closing.is_over

    @contextlib.contextmanager
    def training(self, callbacks: Sequence[Any]) -> Iterator[None]:
        """While `fit` runs with `callbacks`.

        Raises:
            ProtocolError: the loop is not among them.
        """
        if not any(callback is self.owner for callback in callbacks):
            raise ProtocolError(
                "A model whose strategy serves a loop is trained by it: call the loop's `fit`, or "
                "give the loop to `fit` as a callback. Received: a `fit` without it"
            )
        self.is_open, self._apart = True, self.level
        try:
            yield
        finally:
            self.is_open, self.closing, self._apart = False, None, None

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """While all replicas meet: the strategy reduces and gathers over all of them."""
        return self._being(None)

    def in_party(self) -> contextlib.AbstractContextManager[None]:
        """While those of this party meet: the strategy reduces and gathers over them."""
        return self._being(PARTY)

    @contextlib.contextmanager
    def _being(self, apart: str | None) -> Iterator[None]:
        outer, self._apart = self._apart, apart
        try:
            yield
        finally:
            self._apart = outer

    def count(self, function: Any, args: Any) -> None:
        """Adds the rows of a training step's batch, and the step, to the loop's counter."""
        # What a script runs may have no name, as a `functools.partial`.
        is_training = getattr(function, "__name__", "") == "train_step"
        if self.counter is None or self._apart is None or not is_training:
            return
        rows = next(
            (one for one in tf.nest.flatten(args) if tf.is_tensor(one) and one.shape.rank), None
        )
        if isinstance(rows, tf.RaggedTensor):
            number = rows.nrows(tf.int64)
        elif isinstance(rows, tf.SparseTensor):
            number = rows.dense_shape[0]
        else:
            number = tf.constant(1, tf.int64) if rows is None else tf.shape(rows, tf.int64)[0]
        self.counter.assign_add(tf.stack([number, tf.constant(1, tf.int64)]), read_value=False)

    def check(self, variables: Sequence[tf.Variable]) -> None:
        """Raises a ValueError if a local step trains what the loop does not exchange."""
        if self._apart is not None and self.check_step is not None:
            self.check_step(variables)

    def corrects(self) -> bool:
        """Whether the gradients of a local step are corrected."""
        return self._apart is not None and self.correction is not None

    def corrected(self, sums: Sequence[Any], variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """What the optimizer gets for the gradients of a local step."""
        if self.correction is None:
            return list(sums)
        return self.correction([tf.convert_to_tensor(one) for one in sums], variables)

    # The loop's own sums.

    @property
    def has_server(self) -> bool:
        """Whether there is a server above the party."""
        return self._strategy.has_server

    @property
    def downlink(self) -> Compressor | None:
        """How a server encodes what comes down; None: there is none."""
        return self._strategy._codecs().get("downlink")

    @property
    def keeps_step(self) -> bool:
        """Whether those who exchange with a server wait for each other."""
        with self.whole():
            return not self.has_server or self._strategy._together() is not None

    @property
    def is_over(self) -> bool:
        """Whether all have met for the last time in this `fit`."""
        return bool(self.owner.is_over)

    @property
    def has_equal_steps(self) -> bool:
        """Whether members make equally many steps in a round, however many an epoch of each has."""
        return bool(self.owner.has_equal_steps())

    def forgotten_steps(self, optimizer: Any) -> int:
        """Steps of an optimizer that it counts no longer, as the loop let its slots begin anew."""
        return int(self.owner.forgotten_steps(optimizer))

    def sizes(self) -> tuple[int, ...]:
        """Workers of each party that meets now, inside `whole()` or `in_party()`."""
        welcome = self._strategy._together()
        return (primitives.size(),) if welcome is None else tuple(welcome.workers)

    def place(self) -> tuple[int, int]:
        """This worker among those that meet now: its party, and its number in there."""
        welcome = self._strategy._together()
        return (0 if welcome is None else welcome.child), primitives.rank()

    def member(self) -> tuple[int, int]:
        """Number of what this worker belongs to in a mean over all, and how many there are."""
        return member(self._strategy, self.level)

    def names(self) -> list[list[str]]:
        """What the workers that meet now are called, by party; a lone one as its party is."""
        welcome, uplink = self._strategy._together(), self._strategy.config.uplink
        if welcome is not None:
            parties = [f"party `{name}`" for name in welcome.parties]
        else:
            parties = ["this party" if uplink is None else f"party `{uplink.site}`"]
        return [
            [f"worker {number} of {name}" for number in range(size)] if size > 1 else [name]
            for name, size in zip(parties, self.sizes(), strict=True)
        ]

    def make_sum(
        self, tensors: Sequence[Gradient], variables: Sequence[tf.Variable], *, over_parties: bool
    ) -> "LoopSum":
        """A sum of the loop's own; made eagerly, once, in the same order on all workers.

        Args:
            tensors: what is summed.
            variables: those of the model; their life is that of what is kept here.
            over_parties: whether what is equal in each party goes over the uplink; else what is
                each worker's is summed in the party.
        """
        strategy = self._strategy
        # What is summed in the party is counted here; rounds over parties by their server.
        with self.whole() if over_parties else self.in_party():
            label = f"loop{strategy._num_sums}"
            with strategy.state.new_list(variables) as kept:
                make = strategy._uplink_summing if over_parties else strategy._party_summing
                is_alone = not over_parties and primitives.size() == 1
                summing = (
                    Summing(lambda vectors, step: list(vectors))
                    if is_alone
                    else make(tensors, label)
                )
                strategy._num_sums += 1
                made = GradientSum(
                    tensors,
                    summing,
                    label=label,
                    is_alone=is_alone,
                    sparse=(),
                    apart=(),
                    # The loop has looked at what it sends; only a sum may overflow.
                    nonfinite="raise",
                    make_variable=strategy.make_variable,
                    failures=strategy.failures,
                    rank=primitives.rank(),
                )
            if over_parties:
                strategy._begin_sum(made)
                self.round_step = made.step
        return LoopSum(strategy, self, made, kept, over_parties=over_parties)


class LoopSum:
    """A sum over the workers of a party, or over parties."""

    def __init__(
        self,
        strategy: "PartyStrategy",
        loan: Loan,
        made: GradientSum,
        kept: Any,
        *,
        over_parties: bool,
    ) -> None:
        self._strategy = strategy
        self._loan = loan
        self._made = made
        self._kept = kept
        self._being = loan.whole if over_parties else loan.in_party

    @property
    def step(self) -> tf.Variable:
        """What the next sum is numbered by: its noise, and the stage of a warm-up."""
        return self._made.step

    def __call__(
        self, values: Sequence[tf.Tensor], weight: float | None = None, *, is_sent: bool = True
    ) -> list[tf.Tensor]:
        """Sums `values`; eager, on all workers that meet.

        Args:
            values: tensors like those that the sum was made for.
            weight: what this party stands for, where a server takes a mean.
            is_sent: False where the receiver drops what is sent: then what the encoder keeps stays
                as it was.

        Returns:
            What comes down, equal on all that meet.
        """
        kept = [] if is_sent else [(one, one.read_value()) for one in self._own_state()]
        strategy = self._strategy
        with self._being(), tf.device(strategy._sum_device()):
            self._loan.weight = weight
            call = strategy.failures.translated(self._made.in_turn)
            sums = call(strategy._turns, list(values), None)
        for variable, value in kept:
            variable.assign(value, read_value=False)
        return [tf.convert_to_tensor(total) for total in sums]

    def forget_dropped(self, places: Iterable[int]) -> None:
        """Sets to 0 what encoding has kept of tensors, by their places, on their way up."""
        for place in places:
            for kind in ("residual", "state"):
                variable = getattr(self._kept, f"uplink_{kind}_{place}", None)
                if variable is not None:
                    variable.assign(tf.zeros_like(variable), read_value=False)

    def _own_state(self) -> list[tf.Variable]:
        return [
            variable
            for name, variable in vars(self._kept).items()
            if isinstance(variable, tf.Variable) and name.startswith(_OF_THE_SENDER)
        ]
