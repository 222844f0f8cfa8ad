# SPDX-License-Identifier: Apache-2.0
"""The compressed sum against the native codecs, bit for bit, and what error feedback promises."""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

SIZES = [7, 0, 2**20 + 5, 1, 300]


def test_segments_follow_the_chunks():
    from tf_hips.comm.allreduce import Segment, segments
    from tf_hips.ops.compressor import CHUNK, parse

    onebit = parse("onebit")
    small, full, rest = (onebit.chunk_packet_bytes(count) for count in (7, CHUNK, 5))
    assert segments([7, 0, CHUNK + 5], onebit, 1) == [
        [Segment(0, 0, 7, small), Segment(2, 0, CHUNK + 5, full + rest)]
    ]
    # A cut before the large chunk is nearer to one half than a cut after it.
    assert segments([7, 0, CHUNK + 5], onebit, 2) == [
        [Segment(0, 0, 7, small)],
        [Segment(2, 0, CHUNK + 5, full + rest)],
    ]
    assert segments([2 * CHUNK], onebit, 2) == [
        [Segment(0, 0, CHUNK, full)],
        [Segment(0, CHUNK, CHUNK, full)],
    ]
    assert segments([0], onebit, 2) == [[], []]


def _compare_with_native_codecs():
    import functools
    import hashlib

    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.comm.allreduce import segments
    from tf_hips.comm.reducers import make_reducer
    from tf_hips.ops import graph, native
    from tf_hips.ops.compressor import parse

    rank, size = primitives.rank(), primitives.size()

    @functools.cache
    def gradients(of, step):
        generator = np.random.default_rng([of, step])
        return [generator.normal(size=n).astype(np.float32) for n in SIZES]

    def make_variable(value, name):
        return tf.Variable(value, trainable=False, name=name)

    for text in (
        "onebit",
        "error_feedback(onebit)",
        "error_feedback(terngrad(bitwidth=2))",
        "terngrad(bitwidth=4)",
        "dgc(ratio=0.3, momentum=0, clip_norm=20)",
        "warmup(dgc(ratio=0.1, momentum=0, clip_norm=20), steps=2, stages=1)",
        "warmup(error_feedback(onebit), steps=1)",
    ):
        compressor = parse(text)
        total = make_reducer(
            [[n] for n in SIZES],
            compressor,
            label="".join(letter if letter.isalnum() else "." for letter in text),
            worker_seed=native.derive_seed(3, f"worker/{rank}"),
            owner_seed=native.derive_seed(3, f"owner/{rank}"),
            common_seed=1,
            make_variable=make_variable,
        )
        run = tf.function(lambda values, step, total=total: total(values, step))
        plan = segments(SIZES, compressor.at(0), size)
        # The same computation in NumPy, all ranks at once.
        feedback = compressor.has_state
        residuals = [
            [np.zeros(compressor.state_shape([n]) if feedback else n, np.float32) for n in SIZES]
            for _ in range(size)
        ]
        owner_residuals = [
            [np.zeros(part.num_elements, np.float32) for part in owned] for owned in plan
        ]
        given = [np.zeros(n) for n in SIZES]
        received = [np.zeros(n) for n in SIZES]
        for step in range(3):
            stage = compressor.at(step)
            sums, plan = stage.for_sums, segments(SIZES, stage, size)
            # Eagerly in the first step, then in a graph: one state.
            inputs = [tf.constant(value) for value in gradients(rank, step)]
            results = (total if step == 0 else run)(inputs, tf.constant(step, tf.int64))
            everyone = [
                [value.numpy() for value in graph.clip(stage, gradients(of, step), size)]
                if compressor.clip_norm
                else gradients(of, step)
                for of in range(size)
            ]
            sent = []
            for of in range(size):
                seed = native.derive_seed(3, f"worker/{of}")
                sent.append(
                    [
                        native.encode(
                            stage,
                            value,
                            native.Key(seed, step, position),
                            kept=residuals[of][position] if feedback else None,
                        )
                        for position, value in enumerate(everyone[of])
                    ]
                )
            expected = [np.zeros(n, np.float32) for n in SIZES]
            for owner, owned in enumerate(plan):
                seed = native.derive_seed(3, f"owner/{owner}")
                for index, part in enumerate(owned):
                    begin = stage.wire_bytes(part.offset) if part.offset else 0
                    window = slice(begin, begin + part.num_bytes)
                    merged = native.merge(
                        stage,
                        [packets[part.tensor][window] for packets in sent],
                        part.num_elements,
                    )
                    packet = native.encode(
                        sums,
                        merged,
                        native.Key(seed, step, part.tensor, part.offset),
                        kept=owner_residuals[owner][index] if feedback else None,
                    )
                    where = slice(part.offset, part.offset + part.num_elements)
                    expected[part.tensor][where] = native.decode(sums, packet, part.num_elements)
            for position, (result, value) in enumerate(zip(results, expected, strict=True)):
                if stage != compressor and stage.codec.name == "fp32":
                    # Exact sums, in the order of Horovod's.
                    np.testing.assert_allclose(result.numpy(), value, rtol=1e-5, atol=1e-6)
                    digest = hashlib.sha256(result.numpy().tobytes()).hexdigest()
                    assert len({*primitives.gather_objects(digest)}) == 1
                    received[position] += result.numpy()
                    given[position] += sum(one[position].astype(np.float64) for one in everyone)
                    continue
                np.testing.assert_array_equal(
                    result.numpy().view(np.uint32), value.view(np.uint32), err_msg=text
                )
                given[position] += sum(values[position].astype(np.float64) for values in everyone)
                received[position] += result.numpy()
        if feedback:
            # Nothing is lost: what was given is what was received and what waits in the residuals
            # (of a codec with state the last vector; its momentum is 0 here).
            waiting = [
                sum(np.atleast_2d(of[position])[-1].astype(np.float64) for of in residuals)
                for position in range(len(SIZES))
            ]
            for owned, parts in zip(plan, owner_residuals, strict=True):
                for part, value in zip(owned, parts, strict=True):
                    waiting[part.tensor][part.offset : part.offset + part.num_elements] += value
            for position in range(len(SIZES)):
                np.testing.assert_allclose(
                    received[position] + waiting[position], given[position], atol=1e-4, err_msg=text
                )
            last = total._reducers[-1] if compressor.is_warmup else total
            for position, variable in last.residuals.items():
                np.testing.assert_array_equal(variable.numpy(), residuals[rank][position])
        else:
            assert not total.residuals
            assert not total.owner_residuals


@ranks(2)
def test_two_ranks_equal_the_native_codecs_in_every_stage():
    _compare_with_native_codecs()
    _stages_in_graphs()


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

    traced = tf.function(make("traced"))
    same([traced(values(step), tf.constant(step, tf.int64)) for step in range(6)])

    # All steps in one call, as `steps_per_execution` makes them; in turns, as strategies do.
    in_loop = make("in_loop")
    turns = Turns(lambda value, name: tf.Variable(value, trainable=False))

    @tf.function
    def loop():
        found = [tf.TensorArray(tf.float32, 6), tf.TensorArray(tf.float32, 6)]
        for step in tf.range(6, dtype=tf.int64):
            sums = turns(lambda step=step: in_loop(values(step), step), label="the sums")
            found = [
                one.write(tf.cast(step, tf.int32), total)
                for one, total in zip(found, sums, strict=True)
            ]
        return [one.stack() for one in found]

    whole = loop()
    same([[total[step] for total in whole] for step in range(6)])
    keys = [name for _, names in turns._labels for name in names.split()]
    assert keys == [
        f"hips.in_loop.stage{stage}.{what}" for stage in range(3) for what in ("packets", "merged")
    ]

    # Constants and results that one rank does not use: the other rank would wait for ever.
    careless = make("careless", "warmup(error_feedback(onebit), steps=2)")
    constant = make("constant", "warmup(error_feedback(onebit), steps=2)")

    @tf.function
    def wasteful(step):
        sums = careless([tf.ones([8]), tf.ones([3])], step)
        early = constant([tf.ones([8]), tf.ones([3])], tf.constant(0, tf.int64))
        return tf.reduce_sum(sums[0]) + tf.reduce_sum(early[0]) if rank else step

    for step in range(4):
        found = wasteful(tf.constant(step, tf.int64))
        assert not rank or float(found) == 32.0

    with pytest.raises(ValueError, match="must begin with step 0"):
        StagedSum([(1, careless)])


@ranks(3)
def test_three_ranks_equal_the_native_codecs_and_plain_sums():
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import allreduce, primitives

    _compare_with_native_codecs()

    # More ranks than chunks: some own nothing.
    from tf_hips.ops.compressor import parse

    few = allreduce.CompressedSum(
        [5],
        parse("terngrad"),
        label="few",
        worker_seed=1,
        owner_seed=2,
        make_variable=lambda value, name: None,
    )
    for run in (few, tf.function(few)):
        for step in range(2):
            [result] = run([tf.fill([5], 2.0)], tf.constant(step, tf.int64))
            np.testing.assert_allclose(result.numpy(), np.full(5, 6.0), rtol=1e-6)

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
    for run in (allreduce.plain, tf.function(lambda values, label: allreduce.plain(values, label))):
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
    for run in (allreduce.plain, tf.function(lambda values, label: allreduce.plain(values, label))):
        *sums, wrapped = run([*(tf.cast([rank, 1], kind) for kind in kinds), largest], "unknown")
        assert [total.dtype for total in sums] == list(kinds)
        for total in sums:
            np.testing.assert_array_equal(total.numpy().astype(complex), [3, 3])
        assert int(wrapped) == 2**64 - 6
