# SPDX-License-Identifier: Apache-2.0
"""Compressed sums of all topologies against the native codecs, bit for bit; exact sums."""

import functools

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

SIZES = [7, 0, 2**20 + 5, 1, 300]


# Three buckets, of which the first is full with a quarter: the last two tensors, the first chunk of
# the large one, and the rest.
BUCKET_ELEMENTS = 4 * 310
# Machines of the ranks: one with a slice for each rank, and two of which one has a rank too many.
TIERED = ("hierarchical", "hierarchical_fp16")
NODES = {2: [[0, 1]], 3: [[1, 2], [0]]}


class _Everyone:
    """The same sums in NumPy, all ranks at once; what each rank keeps is here."""

    def __init__(self, compressor, topology, num_ranks):
        from tf_hips.comm import schedules
        from tf_hips.comm.partition import pieces, spread
        from tf_hips.ops.compressor import CHUNK

        self.topology = topology
        self.num_ranks = num_ranks
        is_hop = topology in ("ring", "butterfly", "blocks")
        self.schedule = getattr(schedules, topology)(num_ranks) if is_hop else None
        self.owners = self.schedule.owners if self.schedule else tuple(range(num_ranks))
        self.nodes = [[rank] for rank in range(num_ranks)]
        if topology in TIERED:
            self.nodes = NODES[num_ranks]
            slices = range(min(map(len, self.nodes)))
            self.owners = [node[one] for one in slices for node in self.nodes]
        self.pieces = pieces(SIZES, CHUNK)
        segments = spread([piece.num_elements for piece in self.pieces], len(self.owners))
        self.segments = dict(zip(self.pieces, segments, strict=True))
        self.residuals = [self._kept(compressor) for _ in range(num_ranks)]
        self.owner_residuals = self._kept(compressor.for_sums)
        self.encoded = [set() for _ in range(num_ranks)]

    def _kept(self, compressor):
        import numpy as np

        if not compressor.has_state:
            return dict.fromkeys(self.pieces)
        return {
            piece: np.zeros(compressor.state_shape([piece.num_elements]), np.float32)
            for piece in self.pieces
        }

    def sums(self, stage, gradients, step):
        """Sums of `gradients`, by rank and tensor."""
        import numpy as np

        totals = [np.zeros(n, np.float32) for n in SIZES]
        for piece in self.pieces:
            where = slice(piece.offset, piece.offset + piece.num_elements)
            values = [of[piece.tensor][where] for of in gradients]
            totals[piece.tensor][where] = self._sum(stage, piece, values, step)
        return totals

    def _sum(self, stage, piece, values, step):
        from tf_hips.ops import native

        owner = self.owners[self.segments[piece]]

        def encode(rank, value):
            self.encoded[rank].add(piece)
            seed = native.derive_seed(3, f"worker/{rank}")
            key = native.Key(seed, step, piece.tensor, piece.offset)
            return native.encode(stage, value, key, kept=self.residuals[rank][piece])

        if self.schedule:
            values = list(values)
            for hop in self.schedule.hops:
                sent = [
                    (one.target, encode(one.source, values[one.source]))
                    for one in hop
                    if self.segments[piece] in one.segments
                ]
                for target, packet in sent:
                    came = native.decode(stage, packet, piece.num_elements)
                    values[target] = came + values[target]
            return native.decode(stage, encode(owner, values[owner]), piece.num_elements)
        # Whoever encodes for a node; every rank does for itself where there are none.
        is_tiered = self.topology in TIERED
        of_slice = self.segments[piece] // len(self.nodes) if is_tiered else 0
        packets = [
            packet
            for _, packet in sorted(
                (node[of_slice], encode(node[of_slice], sum(values[rank] for rank in node)))
                for node in self.nodes
            )
        ]
        merged = native.merge(stage, packets, piece.num_elements)
        if self.topology == "allgather":
            return merged
        key = native.Key(native.derive_seed(3, f"owner/{owner}"), step, piece.tensor, piece.offset)
        packet = native.encode(stage.for_sums, merged, key, kept=self.owner_residuals[piece])
        return native.decode(stage.for_sums, packet, piece.num_elements)

    def waiting(self):
        """What waits in all residuals, by tensor; of a codec with state the last vector."""
        import numpy as np

        total = [np.zeros(n) for n in SIZES]
        for kept in (*self.residuals, self.owner_residuals):
            for piece, value in kept.items():
                where = slice(piece.offset, piece.offset + piece.num_elements)
                if value is not None:
                    total[piece.tensor][where] += np.atleast_2d(value)[-1].astype(np.float64)
        return total


@functools.cache
def _gradients(of, step):
    """What rank `of` gives in a step, by tensor."""
    import numpy as np

    generator = np.random.default_rng([of, step])
    return [generator.standard_normal(n, np.float32) for n in SIZES]


def _compare_with_native_codecs(topology, texts):
    import hashlib

    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import compressed, primitives
    from tf_hips.comm.reducers import make_reducer
    from tf_hips.ops import graph, native
    from tf_hips.ops.compressor import parse

    compressed.BUCKET_ELEMENTS = BUCKET_ELEMENTS
    rank, size = primitives.rank(), primitives.size()
    primitives._nodes = NODES[size]

    for text in texts:
        compressor = parse(text)
        total = make_reducer(
            [[n] for n in SIZES],
            compressor,
            label="".join(letter if letter.isalnum() else "." for letter in text),
            worker_seed=native.derive_seed(3, f"worker/{rank}"),
            owner_seed=native.derive_seed(3, f"owner/{rank}"),
            common_seed=1,
            make_variable=lambda value, name: tf.Variable(value, trainable=False, name=name),
            topology=topology,
            complain=lambda step, position, rank: pytest.fail("all gradients are finite"),
        )
        run = tf.function(total, autograph=False)
        everyone = _Everyone(compressor, topology, size)
        given = [np.zeros(n) for n in SIZES]
        received = [np.zeros(n) for n in SIZES]
        for step in range(3 if compressor.is_warmup else 2):
            stage = compressor.at(step)
            # Eagerly in the first step, then in a graph: one state.
            inputs = [tf.constant(value) for value in _gradients(rank, step)]
            results = (total if step == 0 else run)(inputs, tf.constant(step, tf.int64))
            all_gradients = [
                [value.numpy() for value in graph.clip(stage, _gradients(of, step), size)]
                if compressor.clip_norm
                else _gradients(of, step)
                for of in range(size)
            ]
            if topology == "hierarchical_fp16":
                all_gradients = [
                    [value.astype(np.float16).astype(np.float32) for value in one]
                    for one in all_gradients
                ]
            expected = everyone.sums(stage, all_gradients, step)
            for position, (result, value) in enumerate(zip(results, expected, strict=True)):
                given[position] += sum(of[position].astype(np.float64) for of in all_gradients)
                received[position] += result.numpy()
                if stage != compressor and stage.codec.name == "fp32":
                    # Exact sums, in the order of Horovod's.
                    np.testing.assert_allclose(result.numpy(), value, rtol=1e-5, atol=1e-6)
                    digest = hashlib.sha256(result.numpy().tobytes()).hexdigest()
                    assert len({*primitives.gather_objects(digest)}) == 1
                    continue
                np.testing.assert_array_equal(
                    result.numpy().view(np.uint32), value.view(np.uint32), err_msg=text
                )
        last = total._reducers[-1] if compressor.is_warmup else total
        assert len(last._buckets) == 3
        if not compressor.has_state:
            assert not last.residuals
            assert not last.owner_residuals
            continue
        # Nothing is lost: what was given is what was received and what waits in the residuals (of a
        # codec with state the last vector; its momentum is 0 here).
        for position, waits in enumerate(everyone.waiting()):
            np.testing.assert_allclose(
                received[position] + waits, given[position], atol=1e-4, err_msg=text
            )
        assert set(last.residuals) == everyone.encoded[rank]
        for piece, variable in last.residuals.items():
            np.testing.assert_array_equal(variable.numpy(), everyone.residuals[rank][piece])
        for piece, variable in last.owner_residuals.items():
            np.testing.assert_array_equal(variable.numpy(), everyone.owner_residuals[piece])
        assert (len(last.owner_residuals) > 0) == (
            topology == "ps" or (topology in TIERED and rank in everyone.owners)
        )


ONEBIT = "error_feedback(onebit)"
DGC = "dgc(ratio=0.3, momentum=0, clip_norm=20)"
WARM_DGC = "warmup(dgc(ratio=0.1, momentum=0, clip_norm=20), steps=2, stages=1)"


@ranks(2)
def test_two_ranks_equal_the_native_codecs_in_every_stage():
    _compare_with_native_codecs("ps", ["terngrad(bitwidth=4)", WARM_DGC])
    _compare_with_native_codecs("butterfly", [ONEBIT])
    _compare_with_native_codecs("hierarchical_fp16", [ONEBIT])
    _narrowing()
    _stages_in_graphs()
    _complaints()


def _narrowing():
    """What is finite stays finite, and what is not stays what it is."""
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import hierarchy

    wide = tf.constant([1.0, -7e4, 1e38, np.inf, -np.inf, np.nan])
    narrow = hierarchy._narrowed(wide, tf.float16)
    np.testing.assert_array_equal(narrow, np.float16([1, -65504, 65504, np.inf, -np.inf, np.nan]))


def _stages_in_graphs():
    """Neither folded nor dropped, inside of loops, and with collectives that have names."""
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.comm.reducers import make_reducer
    from tf_hips.comm.staged import StagedSum
    from tf_hips.ops.compressor import parse
    from tf_hips.strategies.turns import Turns

    rank = primitives.rank()

    def make(label, text="warmup(error_feedback(topk(ratio=0.25)), steps=3, stages=2)"):
        return make_reducer(
            [[8], [3]],
            parse(text),
            label=label,
            worker_seed=1,
            owner_seed=2,
            common_seed=1,
            make_variable=lambda value, name: tf.Variable(value, trainable=False),
        )

    def values(step):
        base = tf.cast(step, tf.float32) + rank
        return [tf.range(8.0) - 3.0 + base, tf.fill([3], base)]

    eager = make("eager")
    expected = [
        [total.numpy() for total in eager(values(step), tf.constant(step, tf.int64))]
        for step in range(6)
    ]
    # Stages send half, a third and a quarter of the elements: no two of them are one.
    assert [np.count_nonzero(sums[0]) for sums in expected[:1]] != [8]

    def same(results):
        for sums, each in zip(results, expected, strict=True):
            for total, value in zip(sums, each, strict=True):
                np.testing.assert_array_equal(total.numpy(), value)

    traced = tf.function(make("traced"), autograph=False)
    same([traced(values(step), tf.constant(step, tf.int64)) for step in range(6)])

    # All steps in one call, as `steps_per_execution` makes them; in turns, as strategies do.
    in_loop = make("in_loop")
    turns = Turns(lambda value, name: tf.Variable(value, trainable=False))

    # As in strategies, whose code AutoGraph does not convert: that takes half a minute here.
    @tf.autograph.experimental.do_not_convert
    def in_turns(step):
        return turns(lambda: in_loop(values(step), step), label="the sums")

    @tf.function
    def loop():
        found = [tf.TensorArray(tf.float32, 6), tf.TensorArray(tf.float32, 6)]
        for step in tf.range(6, dtype=tf.int64):
            sums = in_turns(step)
            found = [
                one.write(tf.cast(step, tf.int32), total)
                for one, total in zip(found, sums, strict=True)
            ]
        return [one.stack() for one in found]

    whole = loop()
    same([[total[step] for total in whole] for step in range(6)])
    keys = [name for _, names in turns._labels for name in names.split()]
    assert keys == [
        f"hips.in_loop.stage{stage}.ps.bucket_0.{what}"
        for stage in range(3)
        for what in ("packets", "merged")
    ]

    # Constants and results that one rank does not use: the other rank would wait for ever.
    careless = make("careless", "warmup(error_feedback(onebit), steps=2)")
    constant = make("constant", "warmup(error_feedback(onebit), steps=2)")

    @tf.function(autograph=False)
    def wasteful(step):
        sums = careless([tf.ones([8]), tf.ones([3])], step)
        early = constant([tf.ones([8]), tf.ones([3])], tf.constant(0, tf.int64))
        return tf.reduce_sum(sums[0]) + tf.reduce_sum(early[0]) if rank else step

    for step in range(4):
        found = wasteful(tf.constant(step, tf.int64))
        assert not rank or float(found) == 32.0

    with pytest.raises(ValueError, match="must begin with step 0"):
        StagedSum([(1, careless)])


def _complaints():
    """What one rank cannot send is known to all, with its tensor and its rank, in the same step."""
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import compressed, primitives
    from tf_hips.comm.plan import COMPRESSED
    from tf_hips.ops.compressor import parse

    compressed.BUCKET_ELEMENTS = 16
    told = []

    def complain(step, position, rank):
        told.append((int(step), position, rank))
        raise ValueError("not finite")

    for topology in COMPRESSED:
        total = compressed.CompressedSum(
            [3, 2, 0, 4],
            parse(ONEBIT),
            label=f"watched.{topology}",
            worker_seed=1,
            owner_seed=2,
            make_variable=lambda value, name: tf.Variable(value, trainable=False),
            topology=topology,
            complain=complain,
        )
        values = [np.ones(n, np.float32) for n in (3, 2, 0, 4)]
        bad = [value.copy() for value in values]
        if primitives.rank() == 1:
            bad[3][2] = np.nan
            bad[1][0] = np.inf
        run = tf.function(total, autograph=False)
        for call in (total, run):
            np.testing.assert_allclose(call(values, tf.constant(0, tf.int64))[1].numpy(), [2, 2])
            with pytest.raises((tf.errors.OpError, ValueError), match="not finite"):
                call(bad, tf.constant(7, tf.int64))
        assert told == [(7, 1, 1)] * 2
        told.clear()
        assert all(np.isfinite(one.numpy()).all() for one in total.residuals.values())


@ranks(3)
def test_three_ranks_equal_the_native_codecs_and_plain_sums():
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import allreduce, compressed, primitives, schedules
    from tf_hips.comm.plan import COMPRESSED
    from tf_hips.ops.compressor import parse

    _compare_with_native_codecs("ps", [f"warmup({ONEBIT}, steps=1)"])
    _compare_with_native_codecs("ring", ["error_feedback(terngrad(bitwidth=2))"])
    _compare_with_native_codecs("blocks", [ONEBIT])
    # Also where exchanges go in rounds, which takes larger messages and more hosts.
    has_rounds, schedules.has_rounds = schedules.has_rounds, lambda *_: True
    _compare_with_native_codecs("hierarchical", [DGC])
    schedules.has_rounds = has_rounds
    _compare_with_native_codecs("allgather", [WARM_DGC])

    # More ranks than chunks: some own nothing.
    def make(topology, text="terngrad"):
        return compressed.CompressedSum(
            [5],
            parse(text),
            label=f"few.{topology}",
            worker_seed=1,
            owner_seed=2,
            make_variable=lambda value, name: None,
            topology=topology,
        )

    for topology in COMPRESSED:
        if topology == "butterfly":
            with pytest.raises(ValueError, match="power of two"):
                make(topology)
            continue
        few = make(topology)
        # In a graph one with hops is like the others.
        graphs = [tf.function(few, autograph=False)] if topology in ("ps", "ring") else []
        for run in (few, *graphs):
            for step in range(2):
                [result] = run([tf.fill([5], 2.0)], tf.constant(step, tf.int64))
                np.testing.assert_allclose(result.numpy(), np.full(5, 6.0), rtol=1e-6)
    with pytest.raises(ValueError, match="without momentum"):
        make("ring", "dgc")
    with pytest.raises(ValueError, match="topology='star'"):
        make("star")

    # Plain sums: types are not mixed, buckets split and join again, empty tensors and scalars pass.
    rank = primitives.rank()
    allreduce.BUCKET_BYTES = 64
    tensors = [
        tf.fill([3, 5], rank + 1.0),
        tf.constant(rank, tf.int64),
        tf.zeros([0, 4]),
        tf.fill([40], tf.constant(0.5, tf.float64)),
        tf.constant(10.0),
    ]
    for run in (allreduce.plain, tf.function(allreduce.plain, autograph=False)):
        sums = run(tensors, "mixed")
        assert [total.dtype for total in sums] == [tensor.dtype for tensor in tensors]
        assert [total.shape for total in sums] == [tensor.shape for tensor in tensors]
        np.testing.assert_array_equal(sums[0], np.full([3, 5], 6.0))
        assert int(sums[1]) == 3
        np.testing.assert_array_equal(sums[3], np.full(40, 1.5))
        assert float(sums[4]) == 30.0

    # Types that Horovod does not know.
    kinds = (tf.bfloat16, tf.int16, tf.uint16, tf.uint32, tf.uint64, tf.complex64, tf.complex128)
    largest = tf.constant(2**64 - 1 - rank, tf.uint64)
    for run in (allreduce.plain, tf.function(allreduce.plain, autograph=False)):
        *sums, wrapped = run([*(tf.cast([rank, 1], kind) for kind in kinds), largest], "unknown")
        assert [total.dtype for total in sums] == list(kinds)
        for total in sums:
            np.testing.assert_array_equal(total.numpy().astype(complex), [3, 3])
        assert int(wrapped) == 2**64 - 6
