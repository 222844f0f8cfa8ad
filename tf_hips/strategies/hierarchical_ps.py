# SPDX-License-Identifier: Apache-2.0
"""`HierarchicalPS`: parties of workers, joined over slow links by a server.

    in the party   gradients are summed over its ranks (plain, or by `local_compression`)
    uplink         rank 0 encodes the sum, sends the packets to the server, and gets the merged
                   packets of all parties
    in the party   rank 0 broadcasts the packets, and every rank decodes the same bytes

What is no gradient is reduced exactly instead (see `over_parties`).

The server's rule may be an optimizer, whose steps come down (see `rules`). With an asynchronous one
each party is a world of its own between its rounds: it waits for no other, and what is no gradient
stays inside of it.

Error feedback keeps what encoding drops, on rank 0 for the way up and on the server for the way
down; rank 0 commits its residual when the server has answered.

Invariant: a round ends on all ranks of all parties with the same bytes decoded, so all replicas
stay bit-identical; in asynchronous runs all replicas of a party.

Follows HiPS (hierarchical parameter server); Horovod and rank 0 play the party's server.
"""

import atexit
import dataclasses
import functools
import os
import sys
import time
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_hips import config as configuration
from tf_hips import log
from tf_hips.comm import primitives
from tf_hips.comm.plan import Plan
from tf_hips.errors import ConfigError, PeerError, ProtocolError
from tf_hips.ops import algorithms
from tf_hips.ops.compressor import (
    Compressor,
    check_for_sums,
    check_makes_packets,
    parse,
    resolve,
)
from tf_hips.ps import rules as update_rules
from tf_hips.ps.client import exits
from tf_hips.ps.client.shards import connect
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.rules import UpdateRule
from tf_hips.ps.rules.way_down import SAME
from tf_hips.ps.transport.wire import REFUSED_WEIGHT
from tf_hips.strategies import further, lying, places
from tf_hips.strategies.agreeing import doubted
from tf_hips.strategies.backups import PartyBackups
from tf_hips.strategies.chosen import chosen_compression, chosen_intra
from tf_hips.strategies.computed import Handed
from tf_hips.strategies.connected import ConnectedStrategy, waiting_for_round
from tf_hips.strategies.gradients import Gradient, GradientSum, Summing
from tf_hips.strategies.in_party import InParty
from tf_hips.strategies.loan import WORKER
from tf_hips.strategies.over_parties import ExactReduction
from tf_hips.strategies.replicas import on_rank_0
from tf_hips.strategies.rules import (
    Robust,
    as_mean,
    check_local,
    check_optimizer,
    chosen_local,
    chosen_rule,
    rule_of_both,
    weight_of,
)
from tf_hips.strategies.statistics import Statistics, factor_for, moving_statistics
from tf_hips.strategies.uplink import SlowTier, make_uplink
from tf_hips.strategies.withheld import NONE, Withheld, shown


class HierarchicalPS(ConnectedStrategy):
    """Training over several parties, as if all workers of all parties were one job.

    The number of replicas is that of all workers of all parties, so losses and learning rates mean
    what they mean in one big job. Without an uplink in the configuration it is one party on its
    own.

        strategy = tf_hips.HierarchicalPS(compression="error_feedback(onebit)")
        with strategy.scope():
            model = ...; model.compile(...)
        model.fit(dataset)

    What is not a gradient (`strategy.reduce`, synchronised batch normalisation, metrics, whether a
    loss scale overflowed) is never encoded: it is summed exactly over all workers of all parties.
    Each such sum costs one round trip to the server; inside a step, that is time.

    With an asynchronous rule, `rule="dc_asgd(learning_rate=0.1)"`, parties begin with the same
    weights and then go on without each other. Replicas are the workers of this party: losses,
    metrics, averages and `strategy.reduce` are over them, and parties may take different numbers of
    steps. `tf_hips.shard` still gives each worker of all parties rows of its own.
    """

    def __init__(
        self,
        compression: Compressor | str | None = None,
        *,
        downlink: Compressor | str | None = SAME,
        local_compression: Compressor | str | None = None,
        intra: str | None = None,
        nonfinite: str = "raise",
        config: configuration.Run | None = None,
        plan: Plan | str | Path | None = None,
        topology: str | None = None,
        comp_threshold: int = 0,
        rule: UpdateRule | Robust | None = None,
        robust_global: Robust | None = None,
        robust_local: Robust | None = None,
    ) -> None:
        """Starts Horovod; rank 0 joins the server and waits for the other parties.

        Args:
            compression: encoding of the way up; None takes what the run's configuration names, and
                sends float32 values if it names nothing.
            downlink: encoding of the way down: "same" as up (`Compressor.for_sums` of it;
                float32 values where that has a threshold and `rule` makes smaller steps), another
                one, or None for float32 values.
            local_compression: encoding inside the party; None sums exactly, which is right for fast
                links. With `intra="ps"` that of the way to the party's server, None float32 values.
            intra: how the workers of a party meet: by "horovod", or "ps": each speaks to a server
                of the party (docs/tree.md), which goes on to the one above it by `compression`.
                None takes what the configuration says, else "horovod".
            nonfinite: what to do about NaN and infinities in gradients: "raise" a `NonFiniteError`,
                replace them by "zero", or "propagate" them. Below a synchronous robust rule "raise"
                is about what comes down: a row that is not finite is refused and named, and the
                others go on (docs/robustness.md).
            config: what this process is told about its run; None reads `TF_HIPS_CONFIG`.
            plan: instead of `local_compression`, what is done with each gradient inside the party:
                the file that `tf-hips plan` wrote, its value, or "auto": measured in some seconds
                before the first step, and kept for the next run.
            topology: which way packets take inside the party; see `CompressedRing`.
            comp_threshold: gradients of fewer elements are summed exactly inside the party.
            rule: what the server makes of gradients, a text such as "adam(learning_rate=0.001)"
                (docs/rules.md), `tf_hips.robust.multi_krum(f=1)`, `tf_hips.robust.sketched(...)` of
                one, or a `tf_hips.robust.detox.Detox` (docs/robustness.md); None takes what the
                configuration or the server says, else the mean over all workers. Rules with an
                optimizer make the steps themselves, and want
                keras.optimizers.SGD(learning_rate=1.0) here.
            robust_global: a `rule` that must be robust, so that nothing else is taken for it.
            robust_local: with `intra="ps"`, the robust rule that the party's own server must have
                been started with; None: whatever it has.

        Raises:
            ValueError: an argument is unknown, or a plan came with what it decides.
            ConfigError: the run's configuration names another compression or rule, there is no
                server to apply the rule, or the party's server has another `robust_local`.
            ProtocolError: the server wants something else; or this process is in the run already,
                or was, and its server has ended with it.
            PeerError: the server cannot be reached, or a party did not come in time.
        """
        config = config if config is not None else configuration.current()
        is_single = chosen_intra(intra, config) == "ps"
        self._up = chosen_compression(compression, config) or algorithms.fp32()
        check_makes_packets(self._up, "compression", may_be_mixed=True)
        # What the same is the server says, who knows the rule.
        self._has_same_down = downlink == SAME
        self._down = (
            self._up.for_sums if self._has_same_down else check_for_sums(_downlink(downlink))
        )
        check_makes_packets(self._down, "downlink", may_be_mixed=True)
        wanted = chosen_rule(rule_of_both(rule, robust_global), config)
        self._robust_local = chosen_local(robust_local, config, has_servers=is_single)
        local = (
            None if local_compression is None else resolve(local_compression, "local_compression")
        )
        if is_single:
            if plan is not None or topology is not None or comp_threshold:
                raise ValueError(
                    "`plan`, `topology` and `comp_threshold` are about sums by Horovod, and "
                    f'`intra="ps"` makes none. Received: plan={plan!r}, topology={topology!r}, '
                    f"comp_threshold={comp_threshold!r}"
                )
            self.above = check_for_sums(self._up)
            self._up = check_makes_packets(
                local or algorithms.fp32(), "local_compression", may_be_mixed=True
            )
            local = None
        self._in_party = InParty(local, plan, topology, comp_threshold, "local_compression")
        codecs = [codec for codec in self._in_party.codecs().values() if codec is not None]
        if any(codec.for_sums != codec for codec in codecs):
            check_for_sums(self._up)
        self._statistics: dict[tuple[str, ...], Statistics] = {}
        self._is_further = False  # whether the list that is being made is not the run's first
        self._first_list: dict[str, str] = {}  # names of its variables, by their ids
        self._process = os.getpid()
        super().__init__(nonfinite, config)
        self._exact = ExactReduction(
            self._gather_bytes,
            self.failures,
            lambda: self.welcome.workers if self.welcome is not None else (),
            lambda: doubted(self),
        )
        try:
            self._check_process(nonfinite, is_single=is_single)
            if self.config.uplink is not None:
                self._join(wanted)
                self._sit_down(self.welcome, self._connected)
        except BaseException as error:
            self._give_up(error)
            raise
        if self.config.uplink is not None:
            self.beginning.meetings.first_sync = self._first_sync
            self.beginning.meetings.next_sync = functools.partial(further.meeting, self)
            exits.watch()
            atexit.register(self.close)
        elif primitives.rank() == 0:
            log.info("No uplink is configured: gradients are summed inside this party only.")

    def close(self, reason: str | None = None) -> None:
        """Leaves the run; a reason, or an error that is on its way out, ends it for all parties.

        Not where this process has come back and has not begun to do its part: then the run goes on,
        and waits for another one. Called at the exit of the process; later calls do nothing.
        """
        if self._is_closed or os.getpid() != self._process:
            return  # a child of a fork ends, and not this worker
        self._is_closed = True
        atexit.unregister(self.close)
        if self.client is not None:
            # In a notebook the last error may be long over; in a script it is what ended it.
            last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
            error = sys.exc_info()[1] or last
            if isinstance(error, tf.errors.OpError):
                error = self.failures.first or error
            if reason is None:
                reason = exits.reason(error)
            self._leave(self.client, reason, error)
            sent, received = self._read_bytes()
            self.write_event(
                "left",
                reason=reason,
                sent=sent,
                received=received,
                gathers=self._num_gathers,
                gathered_bytes=self._gathered_bytes,
            )
        self.events.close()

    def _check_process(self, nonfinite: str, *, is_single: bool) -> None:
        """Raises ValueError for what does not go with this process's place in the run."""
        if is_single and primitives.size() > 1:
            raise ValueError(
                'With `intra="ps"` each worker is a process of its own for Horovod: start it alone '
                f"(`tf-hips run --intra ps`, `tf-hips party -np 1`). Received: "
                f"{primitives.size()} of them"
            )
        if self.config.uplink is not None and nonfinite == "propagate":
            raise ValueError(
                '`nonfinite` must be "raise" or "zero" with an uplink: a server refuses what '
                "is not finite. Received: nonfinite='propagate'"
            )

    def _give_up(self, error: BaseException) -> None:
        """Says why nothing came of this strategy, if it has joined: the others wait for it."""
        self._is_closed = True  # an error that somebody keeps, as a notebook does, keeps it, too
        if self.client is None:
            return
        reason = f"{type(error).__name__}: {error}"
        if hasattr(sys, "ps1"):  # whoever types may put it right, and the run has not begun here
            self.client.away(reason)
        else:
            self._leave(self.client, reason, error)

    def _join(self, wanted: UpdateRule | None) -> None:
        facts = on_rank_0(lambda: self._join_server(wanted))
        # Tuples become lists on the way, so rank 0 goes the same way as the others.
        facts = primitives.broadcast_object(facts)
        self.welcome = Welcome.from_fields(facts)
        self._down = parse(self.welcome.downlink)
        self.rule = update_rules.parse(self.welcome.rule)
        self.backups = PartyBackups(self)

    def _join_server(self, wanted: UpdateRule | None) -> dict[str, Any]:
        uplink = self.config.uplink
        if uplink is None:
            raise ProtocolError("A party joins a server only with an uplink in its configuration.")
        places.check(self.config)
        began = time.monotonic()
        client = connect(
            uplink, self.config.run, primitives.size(), must_be_back=self.config.attempt > 0
        )
        try:
            rule = None if wanted is None else wanted.text
            above = None if self.above is None else self.above.text
            down = SAME if self._has_same_down else self._down.text
            welcome = client.join(self._up.text, down, self.config.seed, rule, above)
        except BaseException as error:
            client.close()  # gRPC waits for a channel left open when the process ends, for ever
            was_there = places.told_of(self.config)
            if was_there and isinstance(error, PeerError):
                raise PeerError(f"{error}{was_there}") from error
            raise
        self.client, self.welcome = client, welcome
        places.take(self.config, client)
        check_local(self._robust_local, welcome, uplink.server)
        facts = dataclasses.asdict(welcome)
        self.write_event("joined", seconds=time.monotonic() - began, **facts)
        return facts

    def _num_workers(self) -> int:
        welcome = self._together()
        return sum(welcome.workers) if welcome is not None else super()._num_workers()

    def replica(self) -> int:
        """Number of this worker among those over which gradients are summed."""
        if self._apart == WORKER:
            return 0
        return self.global_rank if self._together() is not None else primitives.rank()

    def sample_group(self) -> tuple[int, int]:
        """Which group of workers this one shares its noise and its batches with, and of how many.

        Over all parties, also where they train apart: each has data of its own. Of groups that
        are drawn for each step `shard` asks by itself.
        """
        if self.welcome is None or self.seats is not None:
            return self._row_group()
        return self.welcome.first_group + primitives.rank(), self.welcome.groups

    def _row_group(self) -> tuple[int, int]:
        number = sum(self.welcome.workers) if self.welcome is not None else primitives.size()
        return self.global_rank, number

    @property
    def global_rank(self) -> int:
        """Number of this worker among those of all parties, from 0, in the order of the parties."""
        before = self.welcome.workers[: self.welcome.child] if self.welcome is not None else ()
        return sum(before) + primitives.rank()

    def _is_alone(self) -> bool:
        is_in_party = self.welcome is None or self._apart is not None
        return is_in_party and super()._is_alone()

    def _codecs(self) -> dict[str, Compressor | None]:
        if self.welcome is None:
            return self._in_party.codecs()
        if self.above is not None:
            return {"compression": self._up, "downlink": self._down}
        return {"compression": self._up, "downlink": self._down, **self._in_party.codecs()}

    def _way_facts(self) -> dict[str, Any]:
        facts = self._in_party.facts()
        if self.rule is not None and self.rule.gives_steps:
            facts["rule"] = str(self.rule)
        if self.above is not None:
            facts["above"] = self.above.text
        return facts

    def _settings(self) -> dict[str, Any]:
        chosen = {"compression": self._up, "downlink": self._down, "rule": self.rule}
        return {**chosen, **super()._settings()}

    def _has_kept_rule(self) -> bool:
        is_above = self.above is not None and self.above.has_state  # at the party's server
        return is_above or (self.rule is not None and self.rule.keeps_state)

    def _check_optimizer(self, optimizer: Any) -> None:
        if self.rule is not None and self.loan is None:
            check_optimizer(self.rule, optimizer)
        self._check_rounds(optimizer)

    def _counts_rounds(self) -> bool:
        """Whether gradients go to the server, and not only around in the party."""
        return self.welcome is not None and self._apart is None

    def _counts_steps(self) -> bool:
        return not self._counts_rounds() or self._is_further

    def _sparse_gradients(
        self, values: Sequence[Any], gradients: Sequence[Gradient]
    ) -> tuple[Collection[int], Collection[int]]:
        if self._counts_rounds():
            return (), ()  # what is encoded for the other parties is dense
        return super()._sparse_gradients(values, gradients)

    def _check_new_sum(self, variables: Sequence[tf.Variable]) -> None:
        self._is_further = False
        if self._counts_rounds() and self._num_sums > 0:
            further.check(self, variables)
            self._is_further = True
        elif self._counts_rounds():
            self._first_list = further.names(self, variables)

    def _note_failure(self, error: BaseException) -> None:
        client = None if self._is_closed or self.config.comes_back else self.client
        if client is not None and self._has_place():
            client.failed(f"{type(error).__name__}: {error}")

    def _reduce_gradients(
        self, values: Sequence[Any], variables: Sequence[tf.Variable], optimizer: Any
    ) -> list[tf.Tensor]:
        handed = self.beginning.handed(values, variables)
        with tf.init_scope():
            statistics = self._statistics_of(variables, optimizer, handed)
        if statistics is None:
            return super()._reduce_gradients(values, variables, optimizer)
        count = len(values)
        with tf.device("/cpu:0"):
            values = [*values, *statistics.moved()]
        sums = super()._reduce_gradients(values, [*variables, *statistics.variables], optimizer)
        statistics.take(sums[count:])
        return sums[:count]

    def _statistics_of(
        self,
        variables: Sequence[tf.Variable],
        optimizer: Any,
        handed: Handed,
    ) -> Statistics | None:
        """What of a model goes up beside its gradients, where parties do not wait."""
        model = self._model
        if model is None or self.loan is not None:
            return None
        factor = factor_for(self)
        chosen = [] if factor is None else moving_statistics(model)
        if factor is None or not chosen or not tf.executing_eagerly():
            return None
        key = tuple(variable._unique_id for variable in variables)
        if key not in self._statistics:
            self.beginning.of_model(model, variables, optimizer, handed)
            self._statistics[key] = Statistics(
                chosen, factor / primitives.size(), self.make_variable
            )
            weakref.finalize(variables[0], self._statistics.pop, key, None)
        return self._statistics[key]

    def _is_statistic(self, variable: tf.Variable) -> bool:
        known = (one for made in self._statistics.values() for one in made.variables)
        return any(variable is one for one in known)

    def _make_summing(self, gradients: Sequence[Gradient], label: str) -> Summing:
        local = self._party_summing(gradients, label)
        if self.welcome is None or self.rule is None or self._apart is not None:
            return local
        if self._is_further:
            above = further.summing(self, gradients, label)
            uplink = above.reducer
        else:
            above = self._uplink_summing(gradients, label)
            uplink = as_mean(self.rule, self.welcome, above.reducer)
        in_party = shown(local, label) if self._may_withhold() else local.reducer

        def reduce(vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
            return uplink(in_party(vectors, step), step)

        return dataclasses.replace(above, reducer=reduce)

    def _party_summing(self, tensors: Sequence[Gradient], label: str) -> Summing:
        return self._in_party.summing(
            tensors,
            label,
            seed=self.config.seed,
            worker=self.global_rank,
            make_variable=self.make_variable,
            # On its way to a server a sum is encoded in any case: see below.
            complain=self._complaint(tensors) if self.welcome is None else None,
            nonfinite=self._nonfinite,
            keeper=self._state,
        )

    def _uplink_summing(self, tensors: Sequence[Gradient], label: str) -> Summing:
        if self.welcome is None:
            return super()._uplink_summing(tensors, label)
        site = self.config.uplink.site if self.config.uplink else ""
        up, down = self._for_model(tensors)
        withheld = Withheld(tensors, site, self.write_event)
        sizes = [tensor.num_elements for tensor in tensors]
        exchange = functools.partial(self._exchange, withheld)
        uplink = make_uplink(
            SlowTier(
                lying.exchanging(self, exchange, up, sizes),
                len(self.welcome.parties) if self._together() is not None else 1,
                self._codec_seed(up),
                self.failures,
                self._may_withhold(),
            ),
            up,
            down,
            sizes,
            label,
            self.make_variable,
        )
        # Encoding for the server hides what is not finite, so it is looked for before: by whoever
        # refuses its own row, or else by an error.
        return Summing(
            uplink,
            only_float32=True,
            first_step=self.welcome.round,
            complains=self._may_withhold(),
        )

    def _may_withhold(self) -> bool:
        """Whether a step goes on without this party where its gradient is not finite."""
        if self.welcome is None or self.loan is not None:
            return False  # a loop looks at what it sends by itself
        return self.welcome.bears_refusals

    def _for_model(
        self, gradients: Sequence[Gradient], up: Compressor | None = None
    ) -> tuple[Compressor, Compressor]:
        """How gradients go up, `up` or as all do, and come down, now that they are known."""
        wanted = self._up if up is None else up
        sizes = [gradient.num_elements for gradient in gradients]
        try:
            up, down = (one.for_sizes(sizes) for one in (wanted, self._down))
        except ValueError as error:
            raise ConfigError(f"`compression` must fit the model: {error}") from error
        if wanted.is_budget and primitives.rank() == 0:
            log.info("For %s, gradients are encoded by %s.", wanted.text, up.text)
        return up, down

    def _begin_sum(self, made: GradientSum) -> None:
        if self.welcome is None or not self._counts_rounds() or self._is_further:
            return
        first = self._state.restored_step(made.step) or self.welcome.round
        on_rank_0(lambda: self._agree_model(made.gradients, first))
        made.step.assign(first)
        self._open_round(first)
        self.round_step = made.step
        self._takes_part = True

    def _agree_model(self, gradients: Sequence[Gradient], first_round: int) -> None:
        self._connected().agree_model([gradient.shape for gradient in gradients], first_round)
        self._tell_repeated(first_round)
        num_elements = sum(gradient.num_elements for gradient in gradients)
        self.write_event(
            "model", num_elements=num_elements, num_tensors=len(gradients), round=first_round
        )

    def _exchange(
        self, withheld: Withheld, number: np.int64, packets: np.ndarray, spoilt: np.int64
    ) -> np.ndarray:
        weight = self._weight()
        if spoilt != NONE:
            weight = REFUSED_WEIGHT
            withheld(int(number), int(spoilt))
        with waiting_for_round():
            merged, seconds = self._send(int(number), packets, weight)
        self._note_round(int(number), seconds)
        return merged

    @property
    def seconds_in_rounds(self) -> float:
        """Seconds that rounds with the other parties have taken so far; counted on rank 0."""
        return self._seconds_in_rounds

    def _weight(self) -> float | None:
        if self.rule is None or self.welcome is None:
            return None
        if self.loan is not None:
            return self.loan.weight if self.rule.is_mean else None
        return weight_of(self.rule, self.welcome)


def _downlink(value: Compressor | str | None) -> Compressor:
    return algorithms.fp32() if value is None else resolve(value, "downlink")
