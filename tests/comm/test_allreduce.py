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

    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.comm.allreduce import CompressedSum, segments
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
    ):
        compressor = parse(text)
        sums = compressor.for_sums
        total = CompressedSum(
            SIZES,
            compressor,
            label="".join(letter if letter.isalnum() else "." for letter in text),
            worker_seed=native.derive_seed(3, f"worker/{rank}"),
            owner_seed=native.derive_seed(3, f"owner/{rank}"),
            make_variable=make_variable,
        )
        run = tf.function(lambda values, step, total=total: total(values, step))
        plan = segments(SIZES, compressor, size)
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
            # Eagerly in the first step, then in a graph: one state.
            inputs = [tf.constant(value) for value in gradients(rank, step)]
            results = (total if step == 0 else run)(inputs, tf.constant(step, tf.int64))
            everyone = [
                [value.numpy() for value in graph.clip(compressor, gradients(of, step), size)]
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
                            compressor,
                            value,
                            native.Key(seed, step, position),
                            residual=residuals[of][position] if feedback else None,
                        )
                        for position, value in enumerate(everyone[of])
                    ]
                )
            expected = [np.zeros(n, np.float32) for n in SIZES]
            for owner, owned in enumerate(plan):
                seed = native.derive_seed(3, f"owner/{owner}")
                for index, part in enumerate(owned):
                    begin = compressor.wire_bytes(part.offset) if part.offset else 0
                    window = slice(begin, begin + part.num_bytes)
                    merged = native.merge(
                        compressor,
                        [packets[part.tensor][window] for packets in sent],
                        part.num_elements,
                    )
                    packet = native.encode(
                        sums,
                        merged,
                        native.Key(seed, step, part.tensor, part.offset),
                        residual=owner_residuals[owner][index] if feedback else None,
                    )
                    where = slice(part.offset, part.offset + part.num_elements)
                    expected[part.tensor][where] = native.decode(sums, packet, part.num_elements)
            for position, (result, value) in enumerate(zip(results, expected, strict=True)):
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
            for position, variable in total.residuals.items():
                np.testing.assert_array_equal(variable.numpy(), residuals[rank][position])
        else:
            assert not total.residuals
            assert not total.owner_residuals


@ranks(2)
def test_two_ranks_equal_the_native_codecs():
    _compare_with_native_codecs()


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
