# SPDX-License-Identifier: Apache-2.0
"""The strategy that all of tf_hips builds on.

One process is one replica on one device. Keras 3 hands an optimizer's gradients to the strategy
once per trace, as `_batch_reduce_to(SUM, gradients)`, already divided by the number of replicas;
here they meet those of the other workers. What else is reduced (synchronised batch normalisation,
`strategy.reduce`) is summed exactly, over all replicas of all parties (`exact`).

    scope()   variables are recorded as they are created
    run()     before an eager step the replicas are compared and made equal
    reduce    an optimizer's gradients go through `GradientSum`, everything else through `exact`;
              while a step is traced, this is where the replicas are made equal

Invariant: all ranks build the same collectives in the same order; nothing here depends on names
that Keras makes up.

Which variables are made equal, and when, is `beginning`'s; what Keras does not pass comes from
`hooks`, and what surrounds the steps of a `fit` is `fitting`'s.
"""

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips import config as configuration
from tf_hips import log
from tf_hips.callbacks.party import Backups, Party
from tf_hips.comm import primitives
from tf_hips.comm.allreduce import plain
from tf_hips.comm.compressed import Complain
from tf_hips.data.seats import Seats
from tf_hips.errors import ConfigError, NonFiniteError, ProtocolError
from tf_hips.ops import placement
from tf_hips.ops.compressor import Compressor
from tf_hips.ps.client.shards import Connection
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.rules import UpdateRule
from tf_hips.strategies import hooks
from tf_hips.strategies.base import Extended, Strategy, check_not_compiled, device
from tf_hips.strategies.beginning import STEP, Beginning
from tf_hips.strategies.born import functions_being_traced
from tf_hips.strategies.exact import ExactSums
from tf_hips.strategies.failures import Failures
from tf_hips.strategies.fitting import Fitting
from tf_hips.strategies.gradients import (
    Gradient,
    GradientSum,
    Summing,
    check_nonfinite,
    large_tables,
    nonfinite_text,
    sparse_places,
    without,
)
from tf_hips.strategies.groups import Groups
from tf_hips.strategies.loan import WORKER, Loan
from tf_hips.strategies.logs import digests
from tf_hips.strategies.rounding import settle
from tf_hips.strategies.state import StrategyState
from tf_hips.strategies.turns import Turns
from tf_hips.strategies.without_server import WithoutServer

_NOT_CONVERTED = {"do_not_convert": True}  # the mark that AutoGraph looks for


class PartyStrategy(ExactSums, WithoutServer, Strategy, Party):
    """One replica per process, gradients summed over a party; base of the public strategies.

    What begins without an underscore and is not in docs/api.md is for tf_hips itself: for loops,
    callbacks and the trainer.

    Attributes:
        config: what this process is told about its run.
        welcome: what the server above the party has said; None: there is none.
        rule: of that server.
        client: the connection to it, on rank 0.
        above: how the party's own server sends to it; None: workers meet by Horovod.
        groups: where parties vote in groups.
        is_robust: whether a robust rule stands in place of the mean of the ranks.
        loan: while a loop decides when replicas meet.
        backups: how a party comes back to a run that goes on; None: no server waits for one.
        beginning: which variables are equal on all replicas.
        failures: where exceptions raised in a step are kept.
        events: the log of this process.
    """

    config: configuration.Run
    welcome: Welcome | None = None
    rule: UpdateRule | None = None
    client: Connection | None = None
    above: Compressor | None = None
    groups: Groups | None = None
    is_robust = False
    loan: Loan | None = None
    backups: Backups | None = None

    def __init__(self, nonfinite: str, run: configuration.Run | None) -> None:
        """Starts Horovod.

        Args:
            nonfinite: what to do about NaN and infinities in gradients: "raise", "zero" or
                "propagate".
            run: what this process is told about its run; None reads `TF_HIPS_CONFIG`.

        Raises:
            ValueError: `nonfinite` is none of these.
            ConfigError: Keras does not run on TensorFlow.
        """
        check_nonfinite(nonfinite)
        _check_backend()
        primitives.init()
        self.config = run if run is not None else configuration.current()
        self._nonfinite = nonfinite
        self.failures = Failures()
        self.events = log.EventLog(
            self.config.log_dir,
            run=self.config.run,
            role=configuration.role(),
            site=self.config.uplink.site if self.config.uplink else "local",
            rank=primitives.rank(),
        )
        weakref.finalize(self, self.events.close)
        self.beginning = Beginning()
        self._fitting = Fitting(self, self.failures)
        self._sums: dict[tuple[str, ...], GradientSum] = {}
        self._num_sums = 0
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._state = StrategyState(self)
        self._num_reductions = 0
        self._num_handed = 0  # of these, lists of gradients by an optimizer of Keras
        self._is_making_own = False
        self._model: keras.Model | None = None
        self._is_running = False
        self._reduced: tuple[list[Any], Any] | None = None
        super().__init__(Extended(self, device()))
        self._turns = Turns(self.make_variable)
        hooks.register(self)

    # What a strategy decides.

    def _num_workers(self) -> int:
        """Workers over which gradients are summed."""
        return 1 if self._apart == WORKER else primitives.size()

    def sample_group(self) -> tuple[int, int]:
        """Which group of workers this one shares its noise and its batches with, and of how many.

        Every worker is a group of its own here. Dropout's seeds and `tf_hips.shard` ask this and
        nothing else, so a strategy that gives several workers the same batch overrides it.
        """
        return self.global_rank, primitives.size()

    def _row_group(self) -> tuple[int, int]:
        """Like `sample_group`, for evaluation: every row comes exactly once."""
        return self.sample_group()

    def noise_group(self) -> tuple[int, int]:
        """Which group of workers this one shares the noise of its model with, and of how many."""
        return self.sample_group()

    def replica(self) -> int:
        """Number of this worker among those over which gradients are summed."""
        return 0 if self._apart == WORKER else self.global_rank

    @property
    def _apart(self) -> str | None:
        """In a local phase of a loop, within what replicas stay equal; else None."""
        return None if self.loan is None else self.loan.apart

    def _together(self) -> Any:
        """What is known of the other parties, if this one keeps step with them."""
        return None

    @property
    def has_server(self) -> bool:
        """Whether there is a server above the party."""
        return self.welcome is not None

    @property
    def seats(self) -> Seats | None:
        """In which group this worker sits in each round; None: nobody votes, or groups stay."""
        return self.groups.seats if self.groups is not None else None

    def may_write(self) -> bool:
        """Whether this process is the one that saves models: rank 0 of a party that does."""
        return primitives.rank() == 0 and bool(self.config.saves)

    def gather_objects(self, value: Any, label: str) -> list[Any]:
        """JSON values of all workers of all parties, by global rank, on all of them. Eager.

        None where a party is absent: a server with a quorum has gone on without it. That may be
        this one; all parties hear the same.

        Args:
            value: this worker's.
            label: what it is, for messages.
        """
        return primitives.gather_objects(value, label)

    def settle(self, variables: Sequence[Any], what: str, *, in_party: bool) -> str:
        """Makes equal what differs by rounding alone; see `rounding`."""
        mine = digests(variables)
        gather = primitives.gather_objects if in_party else self.gather_objects
        told_by_all = gather(mine, f"digests of {what}")
        return settle(self, variables, told_by_all, mine, what, in_party=in_party)

    def _is_statistic(self, variable: tf.Variable) -> bool:
        """Whether what is summed for `variable` is how far it has moved, and no gradient."""
        del variable
        return False

    def _make_summing(self, gradients: Sequence[Gradient], label: str) -> Summing:
        """How one list of gradients is summed; called once per list, eagerly, on all ranks."""
        del gradients
        return Summing(lambda vectors, step: plain(vectors, label))

    def _party_summing(self, tensors: Sequence[Gradient], label: str) -> Summing:
        """How what differs between the workers of a party is summed over them."""
        return self._make_summing(tensors, label)

    def _uplink_summing(self, tensors: Sequence[Gradient], label: str) -> Summing:
        """How what is equal in each party is merged over the parties.

        Raises:
            ProtocolError: there is no server.
        """
        raise ProtocolError(f"Nothing goes up without an uplink. Received: {label}")

    def _begin_sum(self, made: GradientSum) -> None:
        """Called once for each list of gradients, on all ranks, before its first step."""

    def _is_alone(self) -> bool:
        """Whether gradients of this worker are the sum already."""
        return primitives.size() == 1 or self._apart == WORKER

    def _counts_steps(self) -> bool:
        """Whether steps are numbered here, not by a server."""
        return True

    def _check_optimizer(self, optimizer: Any) -> None:
        """Raises if an optimizer cannot have gradients that are summed here."""

    def _has_kept_rule(self) -> bool:
        """Whether a server keeps something from round to round that decides about steps."""
        return False

    def _check_new_sum(self, variables: Sequence[tf.Variable]) -> None:
        """Raises if gradients of one more list, of these variables, cannot be summed."""

    def _note_failure(self, error: BaseException) -> None:
        """Called when a method of a model, or an eager step, ends with `error` on this worker."""

    # What Keras and users call.

    @property
    def global_rank(self) -> int:
        """Number of this worker among all, from 0."""
        return primitives.rank()

    @property
    def state(self) -> StrategyState:
        """Residuals and numbers of steps of this worker, for `tf.train.Checkpoint`."""
        return self._state

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Runs `fn` on this replica; before the first step, replicas are compared and made equal.

        In a `tf.function` that is when it first reduces. Where steps keep what they compute before
        one reduces, all ranks call `strategy.run(lambda: None)` before them, outside of it.

        Raises:
            ProtocolError: the ranks have different models; or steps have computed something with
                weights that differed; or `fn` is a training step of Keras that reduces nothing.
            ConfigError: what has become of an optimizer does not go with the rule of a server.
        """
        owner = getattr(fn, "__self__", None)
        model = owner if isinstance(owner, keras.Model) else None
        if hooks.only_reads(fn, model):
            self.beginning.note_used()
            return super().run(fn, args, kwargs, options)
        outer = self._model, self._is_running
        if not self._is_running:
            self.beginning.begin_step((args, kwargs))
        self._model, self._is_running = model, True
        before, handed = self._num_reductions, self._num_handed
        if self.loan is not None:
            self.loan.count(fn, args)
        try:
            if not tf.executing_eagerly():
                result = super().run(fn, args, kwargs, options)
                if model is None and not outer[1]:
                    self._meet_over_sums(before, handed)
                if model is None or fn.__name__ != "train_step":  # which must reduce
                    self.beginning.look_at_new()
                self.beginning.note_used()
            else:
                if model is not None:
                    self.beginning.of_model(model)
                elif not hooks.is_local():  # there one worker may evaluate alone
                    self.beginning.of_loop(STEP)
                    for optimizer in self._optimizers:
                        self._check_optimizer(optimizer)
                self.beginning.look_at_new()
                result = self.failures.translated(super().run)(fn, args, kwargs, options)
        finally:
            self._model, self._is_running = outer
            if not self._is_running:
                self.beginning.end_step()
        self.beginning.check_met()
        is_step = model is not None and fn.__name__ == "train_step" and model.trainable_weights
        if is_step and not tf.executing_eagerly():
            # A trace passes through all branches; a step that runs eagerly may rightly reduce
            # nothing, while it accumulates gradients or skips one that overflowed.
            self._check_reduced(model, self._num_reductions - before)
        return result

    # `run` calls the user's function under the conversion status it finds, so it must not be
    # converted itself, and must not switch conversion off for what it calls, as
    # tf.autograph.experimental.do_not_convert would.
    run.autograph_info__ = _NOT_CONVERTED  # type: ignore[attr-defined]

    def write_event(self, event: str, **values: Any) -> None:
        """Writes one event to the log of this process (`log_dir` of the configuration)."""
        self.events.write(event, **values)

    # Reductions.

    def _reduce_gradients(
        self, values: Sequence[Any], variables: Sequence[tf.Variable], optimizer: Any
    ) -> list[tf.Tensor]:
        if not self._is_alone() or self._nonfinite == "raise":
            check_not_compiled()  # else nothing is in there that XLA lacks
        self._num_reductions += 1
        self._num_handed += 1
        key = tuple(variable._unique_id for variable in variables)
        graphs, handed = functions_being_traced(), self.beginning.handed(values, variables)
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise ProtocolError(
                    "Strategies of tf_hips need TensorFlow 2 behaviour: eager outside tf.function. "
                    "Received: a graph around it"
                )
            self._check_optimizer(optimizer)  # a list may have another one than before
            if key not in self._sums:
                if self.loan is not None:
                    self.loan.check(variables)
                self._check_new_sum(variables)
            if self._model is not None:
                self.beginning.of_model(self._model, variables, optimizer, handed)
            else:
                if optimizer not in self._optimizers:  # an id would be used again
                    self._optimizers[optimizer] = next(self._numbers)
                occasion = (key, self._optimizers[optimizer])
                if not self._is_running:  # nobody looks behind it
                    graphs = graphs[:1]
                self.beginning.of_loop(occasion, variables, optimizer, graphs=graphs, handed=handed)
            if key not in self._sums:
                with self._state.new_list(variables):
                    made = self._make_sum(values, variables, optimizer)
                try:
                    self._begin_sum(made)  # what was restored is there now
                except BaseException:
                    self._num_sums -= 1
                    raise
                self._sums[key] = made
                # The residuals are as large as the model: they go when it goes.
                weakref.finalize(variables[0], self._sums.pop, key, None)
            self._sums[key].check_sparse(values, optimizer)
        corrects = self.loan is not None and self.loan.corrects()
        is_own = self._is_alone() and not corrects
        with contextlib.nullcontext() if is_own else tf.device(self._sum_device()):
            sums = self._sums[key].in_turn(self._turns, values, optimizer)
        if self.loan is not None and corrects:
            sums = self.loan.corrected(sums, variables)
        # Keras would have clipped before; see `hooks`.
        return list(hooks.original(keras.optimizers.Optimizer, "_clip_gradients")(optimizer, sums))

    def _meet_over_sums(self, num_reductions: int, num_handed: int) -> None:
        """Behind the trace of a step of one's own, before which so much had been reduced.

        A step may train by sums alone: by hand, or by an optimizer that is none of Keras.
        """
        is_of_sums = self._num_reductions > num_reductions and self._num_handed == num_handed
        if not is_of_sums or self.loan is not None or self._together() is None:
            return
        with tf.init_scope():
            if tf.executing_eagerly():
                self.beginning.of_sums()

    def _sum_device(self) -> str:
        """Where sums are computed: this replica's GPU, if its gradients are encoded there.

        Horovod's collectives are on the host in any case; with a codec only packets go there.
        """
        codecs = [codec for codec in self._codecs().values() if codec is not None]
        if codecs and all(placement.has_gpu_kernels(codec) for codec in codecs):
            return str(device())
        return "/cpu:0"

    def _make_sum(
        self, values: Sequence[Any], variables: Sequence[tf.Variable], optimizer: Any
    ) -> GradientSum:
        gradients = [
            Gradient(
                variable.name.removesuffix(":0"),
                tuple(variable.shape),
                variable.dtype,
                self._is_statistic(variable),
            )
            for variable in variables
        ]
        label = f"gradients{self._num_sums}"
        sparse, apart = self._sparse_gradients(values, gradients)
        as_rows = {*apart, *sparse_places(values, gradients, sparse, optimizer)}
        gradients = [
            dataclasses.replace(one, is_sparse=place in as_rows)
            for place, one in enumerate(gradients)
        ]
        if self._is_alone():
            summing = Summing(lambda vectors, step: list(vectors))
        else:
            summing = self._make_summing(without(gradients, apart), label)
        made = GradientSum(
            gradients,
            summing,
            label=label,
            is_alone=self._is_alone(),
            sparse=sparse,
            apart=apart,
            nonfinite=self._nonfinite_in_a_step(),
            make_variable=self.make_variable,
            failures=self.failures,
            rank=primitives.rank(),
        )
        self._num_sums += 1  # what cannot be summed is no list: the next one may be the first
        return made

    def _complaint(self, gradients: Sequence[Gradient]) -> Complain | None:
        """What a reducer calls where a gradient is not finite; None if it may pass."""
        if self._nonfinite_in_a_step() != "raise":
            return None

        def complain(step: np.int64, position: int, rank: int) -> np.int64:
            text = nonfinite_text(gradients, [position], "of rank", rank)
            raise NonFiniteError(f"{text}{int(step)}")

        return self.failures.kept(complain)

    def _nonfinite_in_a_step(self) -> str:
        """What to do about gradients that are not finite; a loop refuses what they come to."""
        is_refused_later = self._apart is not None and self._nonfinite == "raise"
        return "propagate" if is_refused_later else self._nonfinite

    def _sparse_gradients(
        self, values: Sequence[Any], gradients: Sequence[Gradient]
    ) -> tuple[Collection[int], Collection[int]]:
        """Which gradients may stay sparse, and which a reducer never sees (see `GradientSum`)."""
        if not self._counts_steps():
            return (), ()  # what a server sums is dense
        if all(codec is None for codec in self._codecs().values()):
            return range(len(gradients)), ()
        large = large_tables(values, gradients)
        return large, large

    @contextlib.contextmanager
    def _reducing(self, variables: list[Any], optimizer: Any) -> Iterator[None]:
        """While `optimizer` hands over the gradients of `variables`."""
        outer, self._reduced = self._reduced, (variables, optimizer)
        try:
            yield
        finally:
            self._reduced = outer

    # Variables.

    def make_variable(self, value: tf.Tensor, name: str) -> tf.Variable:
        """A variable of the strategy itself: not trained, not synchronised."""
        self._is_making_own = True
        try:
            # What a codec keeps lies where it encodes; whatever else there is, is a number or two.
            place = self._sum_device() if value.dtype == tf.float32 else "/cpu:0"
            # Lifting would end the trace that this may happen in, and trace the step once more.
            with tf.init_scope(), tf.device(place):
                variable = tf.Variable(
                    value,
                    trainable=False,
                    name=f"tf_hips_{name}",
                    experimental_enable_variable_lifting=False,
                )
        finally:
            self._is_making_own = False
        self._state.keep(name, variable)
        return variable

    def _record(self, variable: tf.Variable, is_local: bool) -> None:
        if self._is_making_own:
            return
        if is_local:
            self.beginning.record_local(variable, in_step=self._is_running)
        else:
            self.beginning.record(variable, in_step=self._is_running)

    # Checks.

    def _check_reduced(self, model: keras.Model, num_reductions: int) -> None:
        if num_reductions == 0:
            raise ProtocolError(
                f"The training step of `{model.name}` must reduce its gradients. Received: a step "
                "that passed none to the strategy; build and compile the model inside "
                "`strategy.scope()`, and apply gradients with its optimizer."
            )


def _check_backend() -> None:
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise ConfigError(
            "Strategies of tf_hips need Keras on TensorFlow: set KERAS_BACKEND=tensorflow before "
            "Keras is imported, or `backend` in ~/.keras/keras.json. Received: Keras on "
            f"`{backend}`"
        )
