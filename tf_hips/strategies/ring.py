# SPDX-License-Identifier: Apache-2.0
"""`CompressedRing`: one party, no server; gradients are summed by compressed collectives."""

from collections.abc import Sequence

from tf_hips import config as configuration
from tf_hips.comm import primitives
from tf_hips.comm.allreduce import plain
from tf_hips.comm.reducers import complains, make_reducer
from tf_hips.errors import ConfigError
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import derive_seed
from tf_hips.strategies.gradients import Gradient, Summing
from tf_hips.strategies.party import PartyStrategy, chosen_compression


class CompressedRing(PartyStrategy):
    """Data-parallel training over the ranks of one Horovod job, with compressed gradients.

    In this release the packets go through owners on the ranks (the `ps` topology: alltoall, merge,
    allgather); the ring will take its place where it is faster, with the same results in meaning.

    Start one process per worker with `horovodrun` or `tf-hips run --parties 1`; without a launcher
    it is one worker, and training is bit for bit what plain Keras does.

        strategy = tf_hips.CompressedRing(compression="error_feedback(onebit)")
        with strategy.scope():
            model = ...; model.compile(...)
        model.fit(dataset)
    """

    def __init__(
        self,
        compression: Compressor | str | None = None,
        nonfinite: str = "raise",
        config: configuration.Run | None = None,
    ) -> None:
        """Starts Horovod.

        Args:
            compression: how gradients are encoded, as a value or its text; None takes what the
                run's configuration names, and sums them as they are if it names nothing.
            nonfinite: what to do about NaN and infinities in gradients: "raise" a `NonFiniteError`,
                replace them by "zero", or "propagate" them.
            config: what this process is told about its run; None reads `TF_HIPS_CONFIG`.

        Raises:
            ValueError: an argument is unknown.
            ConfigError: the run has a server and other parties, which this strategy never meets; or
                its configuration names another compression.
        """
        run = config if config is not None else configuration.current()
        if run.uplink is not None:  # each party would train a model of its own
            raise ConfigError(
                "CompressedRing must run in one party, without a server: use HierarchicalPS, or "
                f"`tf-hips run --parties 1`. Received: party `{run.uplink.site}` of the server "
                f"{run.uplink.server}"
            )
        self._compression = chosen_compression(compression, run)
        super().__init__(nonfinite, run)

    def _codecs(self) -> dict[str, Compressor | None]:
        return {"compression": self._compression}

    def _make_summing(self, gradients: Sequence[Gradient], label: str) -> Summing:
        if self._compression is None:
            return Summing(lambda vectors, step: plain(vectors, label))
        rank = primitives.rank()
        reducer = make_reducer(
            [gradient.shape for gradient in gradients],
            self._compression,
            label=label,
            worker_seed=derive_seed(self._run.seed, f"worker/{rank}"),
            owner_seed=derive_seed(self._run.seed, f"owner/{rank}"),
            common_seed=derive_seed(self._run.seed, "everyone"),
            make_variable=self._make_variable,
            complain=self._complaint(gradients),
        )
        return Summing(reducer, only_float32=True, complains=complains(self._compression))
