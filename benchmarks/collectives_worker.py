# SPDX-License-Identifier: Apache-2.0
"""One rank of `make bench-collectives`: sums gradients of given shapes when the driver says so.

A way of summing has a name, is made once, and then makes steps. All ranks begin a step together.

    sum      what our strategies do: each gradient as a plan says
    codecs   only the encoding, merging and decoding of such a sum: nothing travels, what would come
             from others is there before, and no packet is copied
    packets  only its collectives, on packets of the same sizes
    horovod  Horovod's own allreduce, as a script without tf_hips calls it
"""

import math
import sys
import time
from typing import Any

from benchmarks import obedience, shapes

SEED = 5
SPAN = 1 << 20  # elements of random numbers, which gradients repeat


class Worker:
    """What this rank has made so far."""

    def __init__(self) -> None:
        self._rank = 0
        self._shapes: list[shapes.Shape] = []
        self._vectors: list[Any] = []
        self._ways: dict[str, Any] = {}
        self._reducers: dict[str, Any] = {}
        self._profile: Any = None
        self._step = 0

    def start(self, ours: bool) -> dict[str, Any]:
        """Starts Horovod, as our strategies do or as its users do."""
        if ours:
            from tf_hips.comm import primitives

            primitives.init()
            self._rank = primitives.rank()
            self._meet = primitives.barrier
        else:
            import horovod.tensorflow as hvd
            import tensorflow as tf

            hvd.init()
            self._rank = hvd.rank()
            self._meet = lambda: hvd.allreduce(tf.zeros([1]), name="barrier")
        return {}

    def stop(self) -> dict[str, Any]:
        """Ends Horovod, which closes its timeline."""
        import horovod.tensorflow as hvd

        hvd.shutdown()
        return {}

    def load(self, model: str, scale: int) -> dict[str, Any]:
        """Makes the gradients of a model, instead of those of the one before."""
        import numpy as np
        import tensorflow as tf

        self._ways.clear()
        self._reducers.clear()
        self._vectors.clear()
        self._shapes = shapes.MODELS[model](scale)
        random = np.random.default_rng([SEED, self._rank])
        span = random.standard_normal(SPAN, dtype=np.float32)
        for shape in self._shapes:
            values = np.resize(span, math.prod(shape))
            self._vectors.append(tf.constant(values))
        return {"elements": shapes.num_elements(self._shapes)}

    def make(self, name: str, kind: str, **how: Any) -> dict[str, Any]:
        """Makes a way of summing; its first step is not counted by anyone."""
        import tensorflow as tf

        way = getattr(self, f"_{kind}")(name.replace("/", "."), **how)
        self._ways[name] = tf.function(way)
        return self.block(name, 1)

    def drop(self, name: str) -> dict[str, Any]:
        """Forgets a way, and what belongs to it."""
        self._ways.pop(name, None)
        self._reducers.pop(name, None)
        return {}

    def block(self, name: str, steps: int) -> dict[str, Any]:
        """Makes steps; the seconds of each, and the processor's of all of them."""
        import tensorflow as tf

        way, seconds = self._ways[name], []
        used = time.process_time()
        for _ in range(steps):
            self._step += 1
            step = tf.constant(self._step, tf.int64)
            self._meet()
            began = time.perf_counter()
            way(self._vectors, step)[-1].numpy()
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "cpu": time.process_time() - used}

    def measure(self, candidates: list[str], seconds: float | None = None) -> dict[str, Any]:
        """Measures the profile that predictions and plans are made from.

        Args:
            candidates: of the plans.
            seconds: what it may take; None: as long as with `plan="auto"`.
        """
        from tf_hips.comm import auto, profiling

        began = time.perf_counter()
        self._profile = profiling.measure(candidates, seconds or auto.BUDGET_S)
        return {"seconds": time.perf_counter() - began}

    def predict(self, choices: list[list[Any]] | None = None) -> dict[str, Any]:
        """The predicted seconds of a step in which all is summed in one way."""
        from tf_hips.comm import cost_model

        return {"seconds": cost_model.step_seconds(self._plan(choices).choices, self._profile)}

    def plan(self, candidates: list[str]) -> dict[str, Any]:
        """What the planner chooses for these gradients."""
        from tf_hips.comm import planner

        sizes = [(f"{place}", math.prod(shape)) for place, shape in enumerate(self._shapes)]
        made = planner.make_plan(self._profile, sizes, candidates)
        return {
            "choices": [
                [choice.compression, choice.topology, choice.partitions] for choice in made.choices
            ],
            "seconds": made.predicted_seconds,
        }

    def _plan(self, choices: list[list[Any]] | None) -> Any:
        from tf_hips.comm.plan import EXACT, Choice, Plan

        if choices is None:
            choices = [[None, EXACT, 1]]
        if len(choices) == 1:
            choices = choices * len(self._shapes)
        return Plan(
            1,
            tuple(
                Choice(f"{place}", math.prod(shape), *choice)
                for place, (shape, choice) in enumerate(zip(self._shapes, choices, strict=True))
            ),
        )

    def _sum(self, name: str, choices: list[list[Any]] | None = None) -> Any:
        """As a plan says: [compression, topology, partitions] of each gradient, or of all alike."""
        from tf_hips.comm.planned import PlannedSum

        made = []

        def make_group(
            of_group: Any, text: str, topology: str, partitions: dict[int, int], label: str
        ) -> Any:
            made.append(self._reducer(of_group, text, topology, partitions, label))
            return made[-1]

        way = PlannedSum(self._shapes, self._plan(choices), name, make_group)
        self._reducers[name] = made
        return way

    def _reducer(
        self, of_group: Any, text: str, topology: str, partitions: dict[int, int], label: str
    ) -> Any:
        import tensorflow as tf

        from tf_hips.comm.reducers import make_reducer
        from tf_hips.ops.compressor import parse

        return make_reducer(
            of_group,
            parse(text),
            label=label,
            worker_seed=self._rank,
            owner_seed=self._rank,
            common_seed=SEED,
            make_variable=lambda value, title: tf.Variable(value, trainable=False, name=title),
            topology=topology,
            partitions=partitions,
        )

    def _codecs(self, name: str, of: str) -> Any:
        """Of the sum `of`, whose only group is one of `ps` and keeps something of every piece."""
        import tensorflow as tf

        from tf_hips.comm import primitives
        from tf_hips.comm.compressed import cut
        from tf_hips.ops import graph

        del name
        [reducer] = self._reducers[of]
        sums = reducer.compressor.for_sums
        packets: dict[int, list[Any]] = {}
        rows = {}
        for piece in reducer.residuals:
            value = cut(self._vectors[piece.tensor], piece)
            packet = reducer.encode(piece, value, tf.constant(0, tf.int64))
            packets.setdefault(piece.tensor, []).append(packet)
            if piece in reducer.owner_residuals:
                rows[piece] = tf.stack([packet] * primitives.size())
        summed = {tensor: tf.concat(of_tensor, 0) for tensor, of_tensor in packets.items()}

        def run(vectors: list[Any], step: Any) -> list[Any]:
            encoded = [
                reducer.encode(piece, cut(vectors[piece.tensor], piece), step)
                for piece in reducer.residuals
            ]
            merged = [reducer.recode(piece, of_piece, step) for piece, of_piece in rows.items()]
            decoded = [
                graph.decode(sums, summed[tensor], math.prod(shape))
                for tensor, shape in enumerate(self._shapes)
            ]
            return [*encoded, *merged, *decoded]

        return run

    def _packets(self, name: str, text: str) -> Any:
        """The collectives of `ps` on bytes that stand for packets."""
        import tensorflow as tf

        from tf_hips.comm import partition, primitives
        from tf_hips.ops.compressor import CHUNK, parse

        compressor, size = parse(text), primitives.size()
        everything = partition.pieces([math.prod(shape) for shape in self._shapes], CHUNK)
        segments = partition.spread([piece.num_elements for piece in everything], size)
        buckets = []
        limit = partition.BUCKET_ELEMENTS
        for places in partition.piece_buckets(everything, limit, {}, segments):
            lengths, merged = [0] * size, 0
            for place in places:
                elements = everything[place].num_elements
                lengths[segments[place]] += compressor.chunk_packet_bytes(elements)
                if segments[place] == primitives.rank():
                    merged += compressor.for_sums.chunk_packet_bytes(elements)
            buckets.append((lengths, merged))

        def run(vectors: list[Any], step: Any) -> list[Any]:
            del vectors, step
            results = []
            for number, (lengths, merged) in enumerate(buckets):
                parts = [tf.zeros([length], tf.uint8) for length in lengths]
                received = primitives.exchange(parts, lengths, f"{name}.{number}.packets")
                with tf.control_dependencies([received]):
                    own = tf.zeros([merged], tf.uint8)
                everyone = primitives.allgather(own, f"{name}.{number}.merged")
                results.append(everyone[:1])
            return results

        return run

    def _horovod(self, name: str, precision: str, grouped: bool) -> Any:
        """Each gradient by itself, which Horovod fuses, or all as a group."""
        import horovod.tensorflow as hvd

        compression = hvd.Compression.fp16 if precision == "fp16" else hvd.Compression.none

        def run(vectors: list[Any], step: Any) -> list[Any]:
            del step
            if grouped:
                return hvd.grouped_allreduce(vectors, op=hvd.Sum, compression=compression)
            return [
                hvd.allreduce(vector, op=hvd.Sum, compression=compression, name=f"{name}.{place}")
                for place, vector in enumerate(vectors)
            ]

        return run


if __name__ == "__main__":
    obedience.obey(Worker())
    sys.exit(0)
