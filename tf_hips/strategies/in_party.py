# SPDX-License-Identifier: Apache-2.0
"""How gradients are summed over the ranks of a party: exactly, compressed, or as a plan says.

What strategies are told about it is checked and kept here, and compared between the ranks before
the first sum: packets of different kinds would otherwise meet in a collective.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf_hips import config, log
from tf_hips.comm import primitives
from tf_hips.comm.allreduce import plain
from tf_hips.comm.auto import auto_plan
from tf_hips.comm.compressed import Complain, MakeVariable
from tf_hips.comm.plan import AUTO, COMPRESSED, EXACT, PS, Choice, Plan, best_topology
from tf_hips.comm.planned import PlannedSum
from tf_hips.comm.planner import DEFAULT_CANDIDATES
from tf_hips.comm.reducers import make_reducer
from tf_hips.comm.staged import Reducer
from tf_hips.errors import ProtocolError
from tf_hips.ops.compressor import Compressor, check_unmixed, parse
from tf_hips.ops.native import derive_seed
from tf_hips.strategies.gradients import Gradient, Summing, check_order, check_sparse
from tf_hips.strategies.kept_plans import Keeper, plan_of, text_of


class InParty:
    """What a strategy was told, and the sums that come of it."""

    def __init__(
        self,
        compression: Compressor | None,
        plan: Plan | str | Path | None,
        topology: str | None,
        comp_threshold: int,
        name: str = "compression",
    ) -> None:
        """Checks it.

        Args:
            compression: how gradients are encoded; None sums them exactly.
            plan: what is done with each gradient, the file that says so, or "auto".
            topology: which way packets take; None chooses.
            comp_threshold: gradients of fewer elements are summed exactly.
            name: of the argument `compression`, for messages.

        Raises:
            ValueError: they do not go together.
            TypeError: `comp_threshold` is no integer, or `plan` nothing of that.
            ConfigError: the file is no plan.
        """
        if plan is not None and (compression is not None or topology is not None or comp_threshold):
            raise ValueError(
                "a `plan` says what is compressed, how, and which way it takes, so it must be "
                f"given without `{name}`, `topology` and `comp_threshold`. Received: "
                f"{name}={compression and compression.text}, topology={topology}, "
                f"comp_threshold={comp_threshold}"
            )
        if topology is not None and topology not in COMPRESSED:
            raise ValueError(
                f"`topology` must be one of {', '.join(COMPRESSED)}. Received: {topology!r}"
            )
        if isinstance(comp_threshold, bool) or not isinstance(comp_threshold, int):
            raise TypeError(
                "`comp_threshold` must be a number of elements. "
                f"Received: comp_threshold={comp_threshold!r}"
            )
        if comp_threshold < 0:
            raise ValueError(
                f"`comp_threshold` must be at least 0. Received: comp_threshold={comp_threshold}"
            )
        if compression is None and plan is None and (topology is not None or comp_threshold):
            raise ValueError(
                f"`topology` and `comp_threshold` must come with `{name}`: exact sums have "
                f"neither. Received: topology={topology}, comp_threshold={comp_threshold}"
            )
        has_way = topology not in (None, PS) or comp_threshold > 0
        if compression is not None and not compression.makes_packets and has_way:
            raise ValueError(
                f"`topology` and `comp_threshold` must be left out with {compression.codec.name}, "
                "which makes no packets, and sums exactly what is too small for it. Received: "
                f"{name}={compression.text}, topology={topology}, comp_threshold={comp_threshold}"
            )
        if compression is not None and compression.is_budget:
            raise ValueError(
                f"`{name}` must be a compressor: a budget is for the way to a server. "
                f"Received: {name}={compression.text}"
            )
        self.compression = None if compression is None else check_unmixed(compression, name)
        self._is_auto = plan == AUTO
        self._plan = None
        if not self._is_auto:
            self._plan = Plan.read(plan) if isinstance(plan, str | Path) else plan
            if not isinstance(self._plan, Plan | None):
                raise TypeError(
                    f'`plan` must be a plan, the file of one, or "{AUTO}". '
                    f"Received: plan={config.shown(plan)}"
                )
        self._topology = topology
        self._comp_threshold = comp_threshold
        self._name = name

    def codecs(self) -> dict[str, Compressor | None]:
        """How gradients are encoded, by the name of what says so."""
        if self._is_auto:
            texts = set(DEFAULT_CANDIDATES)
        elif self._plan is not None:
            texts = {choice.compression for choice in self._plan.choices if choice.compression}
        else:
            return {self._name: self.compression}
        found: dict[str, Compressor | None] = {
            f"`{text}` of the plan": parse(text) for text in sorted(texts)
        }
        return found or {self._name: None}

    def facts(self) -> dict[str, Any]:
        """What decides about sums beside the codecs, as JSON values by name."""
        if self._is_auto:
            # What it will be is not known before the first step: it is kept with what it decides
            # about, see `kept_plans`.
            return {"the plan": AUTO}
        if self._plan is not None:
            choices = [
                (one.num_elements, one.compression, one.topology) for one in self._plan.choices
            ]
            return {"the plan": hashlib.sha256(repr(choices).encode()).hexdigest()[:16]}
        if self.compression is None or not self.compression.makes_packets:
            return {}
        return {"topology": self._chosen_topology(), "comp_threshold": self._comp_threshold}

    def summing(
        self,
        gradients: Sequence[Gradient],
        label: str,
        *,
        seed: int,
        worker: int,
        make_variable: MakeVariable,
        complain: Complain | None,
        nonfinite: str = "propagate",
        keeper: Keeper | None = None,
    ) -> Summing:
        """How one list of gradients is summed; called eagerly, once per list, on all ranks.

        Args:
            gradients: what comes; statistics, which are summed exactly beside the others, last.
            label: part of the collectives' names.
            seed: of the run, the same on all ranks.
            worker: number of this worker among those of all parties.
            make_variable: makes a non-trainable variable from an initial value and a name.
            complain: called where a gradient is not finite, on all ranks.
            nonfinite: what the caller does about such gradients; the same on all ranks.
            keeper: where a measured plan is kept, and may have been restored; None: it is not.

        Raises:
            ProtocolError: the ranks were told different things, or have different gradients.
            ConfigError: the plan is for another model, or another number of ranks.
            ValueError: the topology does not go with the compressor or the number of ranks.
        """
        kept = keeper.kept_plan() if keeper is not None and self._is_auto else None
        self._compare(gradients, nonfinite, seed, kept)
        trained = [gradient for gradient in gradients if not gradient.is_statistic]
        plan, compression = self._plan_of(trained, kept), self.compression
        if plan is not None and keeper is not None and self._is_auto:
            keeper.keep_plan(text_of(plan))
        shapes = [gradient.shape for gradient in trained]
        rank = primitives.rank()

        def make(
            shapes: Sequence[Sequence[int]],
            compressor: Compressor,
            topology: str,
            partitions: Mapping[int, int],
            label: str,
        ) -> Reducer:
            return make_reducer(
                shapes,
                compressor,
                label=label,
                worker_seed=compressor.encoder_seed(seed, f"worker/{worker}"),
                owner_seed=compressor.for_sums.encoder_seed(seed, f"owner/{rank}"),
                common_seed=derive_seed(seed, "everyone"),
                make_variable=make_variable,
                topology=topology,
                partitions=partitions,
                complain=complain,
            )

        if plan is not None:
            is_exact = all(choice.compression is None for choice in plan.choices)
            planned = PlannedSum(
                shapes, plan, label, lambda shapes, text, *more: make(shapes, parse(text), *more)
            )
            whole = _beside_statistics(planned, trained, gradients, label)
            return Summing(whole, only_float32=not is_exact, complains=True)
        if compression is None:
            return Summing(lambda vectors, step: plain(vectors, label))
        reducer = make(shapes, compression, self._chosen_topology(), {}, label)
        reducer = _beside_statistics(reducer, trained, gradients, label)
        return Summing(reducer, only_float32=True, complains=True)

    def _chosen_topology(self) -> str:
        if self._topology is None and self.compression is not None:
            return best_topology(primitives.size(), self.compression)
        return self._topology or PS

    def _plan_of(self, gradients: Sequence[Gradient], kept: str | None) -> Plan | None:
        """What is done with each gradient, if not the same with all of them."""
        if kept is not None:
            plan = plan_of(kept)
            plan.check([(one.name, one.num_elements) for one in gradients], primitives.size())
            return plan
        if self._is_auto:
            return automatic_plan(gradients)
        if self._plan is not None:
            self._plan.check([(one.name, one.num_elements) for one in gradients], primitives.size())
            return self._plan
        if not self._comp_threshold or self.compression is None:
            return None
        return Plan(
            primitives.size(),
            tuple(
                Choice(
                    gradient.name,
                    gradient.num_elements,
                    self.compression.text,
                    self._chosen_topology(),
                )
                if gradient.num_elements >= self._comp_threshold
                else Choice(gradient.name, gradient.num_elements, None, EXACT)
                for gradient in gradients
            ),
        )

    def _compare(
        self, gradients: Sequence[Gradient], nonfinite: str, seed: int, kept: str | None = None
    ) -> None:
        """Raises on all ranks if they were told different things."""
        own = {name: None if codec is None else codec.text for name, codec in self.codecs().items()}
        own |= {**self.facts(), "`nonfinite`": nonfinite}
        own["the seed"] = str(seed)  # of what all draw alike: groups of a rule, places of `randomk`
        if kept is not None:
            own["the plan of the saved state"] = hashlib.sha256(kept.encode()).hexdigest()[:16]
        if self._plan is not None:  # they decide about collectives, and not about what is kept
            own |= {
                f"the number of partitions of gradient {place}": f"{choice.partitions}"
                for place, choice in enumerate(self._plan.choices)
            }
        own |= {
            f"gradient {place}": f"{gradient.dtype.name}{list(gradient.shape)}"
            for place, gradient in enumerate(gradients)
        }
        names = [gradient.name for gradient in gradients]
        sparse = [place for place, gradient in enumerate(gradients) if gradient.is_sparse]
        found = primitives.gather_objects((own, names, sparse), "how gradients are summed")
        check_order([names for _, names, _ in found])
        # Before their shapes: one that comes as rows may be apart from the others, and has none.
        count = min(len(names) for _, names, _ in found)
        check_sparse(names[:count], [sparse for *_, sparse in found])
        everyone = [told for told, *_ in found]
        for rank, told in enumerate(everyone):
            for name in sorted({*told, *everyone[0]}):
                first, other = (one.get(name, "nothing") for one in (everyone[0], told))
                if first == other:
                    continue
                place = int(name.split()[1]) if name.startswith("gradient ") else len(gradients)
                known = f" ({gradients[place].name} here)" if place < len(gradients) else ""
                raise ProtocolError(
                    "All ranks of a party must sum the same gradients in the same way. Received: "
                    f"{name}{known} is {first} on rank 0 and {other} on rank {rank}"
                )


def _beside_statistics(
    reducer: Reducer, trained: Sequence[Gradient], gradients: Sequence[Gradient], label: str
) -> Reducer:
    """Sums `trained`, the first of `gradients`, by `reducer` and the rest exactly."""
    count = len(trained)
    if count == len(gradients):
        return reducer

    def reduce(vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        exact = plain(vectors[count:], f"{label}.statistics")
        return [*reducer(vectors[:count], step), *exact]

    return reduce


def automatic_plan(gradients: Sequence[Gradient]) -> Plan:
    """A plan from measurements of some seconds, or of an earlier run, and a line about it.

    Eager; called by all ranks alike.
    """
    plan = auto_plan([(gradient.name, gradient.num_elements) for gradient in gradients])
    if primitives.rank() == 0:
        chosen = [choice for choice in plan.choices if choice.compression is not None]
        share = sum(one.num_elements for one in chosen) / max(
            1, sum(one.num_elements for one in plan.choices)
        )
        log.info(
            "The plan of these %d ranks compresses %d of %d gradients (%.0f %% of the elements).",
            plan.num_ranks, len(chosen), len(plan.choices), 100 * share,
        )  # fmt: skip
    return plan
