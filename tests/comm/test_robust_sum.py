# SPDX-License-Identifier: Apache-2.0
"""Robust rules over ranks against the same in NumPy, bit for bit; who is refused, and by whom."""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

# The second has no elements, the third two chunks.
LARGE = [7, 0, 2**20 + 5, 1, 300]
SMALL = [3, 2, 0, 40, 5]
EF = "error_feedback(onebit)"
CHAIN = "nnm(f=1) >> trimmed_mean(f=1)"


class _Everyone:
    """The same results in NumPy, all ranks at once; what each rank keeps is here."""

    def __init__(self, sizes, rule, compressor, topology, num_ranks):
        import numpy as np

        from tf_hips.comm.partition import pieces, spread
        from tf_hips.comm.robust_wire import Values
        from tf_hips.ops.compressor import CHUNK

        self.sizes, self.rule, self.topology = sizes, rule, topology
        self.pieces = pieces(sizes, Values.grain if compressor.text == "fp32" else CHUNK)
        self.owners = dict(
            zip(
                self.pieces,
                spread([piece.num_elements for piece in self.pieces], num_ranks),
                strict=True,
            )
        )

        def kept(of):
            return {
                piece: np.zeros(of.state_shape([piece.num_elements]), np.float32)
                if of.has_state
                else None
                for piece in self.pieces
            }

        self.residuals = [kept(compressor) for _ in range(num_ranks)]
        self.owner_residuals = kept(compressor.for_sums)

    def results(self, stage, gradients, step):
        """Results of `gradients`, by rank and tensor; and the rows that they are made of."""
        import functools
        import math

        import numpy as np

        from tf_hips import robust
        from tf_hips.ops import native

        rows = {}
        for piece in self.pieces:
            where = slice(piece.offset, piece.offset + piece.num_elements)
            rows[piece] = []
            for rank, of in enumerate(gradients):
                seed = native.derive_seed(3, f"worker/{rank}")
                packet = native.encode(
                    stage,
                    np.ascontiguousarray(of[piece.tensor][where]),
                    native.Key(seed, step, piece.tensor, piece.offset),
                    kept=self.residuals[rank][piece] if stage.has_state else None,
                )
                rows[piece].append(native.decode(stage, packet, piece.num_elements))
        if self.rule.is_coordinate:
            found = {
                piece: self.rule.run(one, limits=robust.Limits(max_ratio=math.inf)).vector
                for piece, one in rows.items()
            }
        else:
            measures = functools.reduce(
                lambda one, other: one.joined(other), map(self.rule.measure, rows.values())
            )
            nothing = [np.zeros(0, np.float32)] * len(gradients)
            decision = self.rule.decide(measures, rows=nothing, seed=11, step=step)
            found = {piece: self.rule.apply(decision, one).vector for piece, one in rows.items()}
        totals = [np.zeros(n, np.float32) for n in self.sizes]
        for piece, vector in found.items():
            where = slice(piece.offset, piece.offset + piece.num_elements)
            if self.topology == "ps":
                seed = native.derive_seed(3, f"owner/{self.owners[piece]}")
                packet = native.encode(
                    stage.for_sums,
                    vector,
                    native.Key(seed, step, piece.tensor, piece.offset),
                    kept=self.owner_residuals[piece] if stage.for_sums.has_state else None,
                )
                vector = native.decode(stage.for_sums, packet, piece.num_elements)
            totals[piece.tensor][where] = vector
        return totals


def _make(sizes, rule, text, topology, tell, label, tell_chosen=None):
    import tensorflow as tf

    from tf_hips import robust
    from tf_hips.comm import primitives
    from tf_hips.comm.robust_sum import make_robust_reducer
    from tf_hips.ops import native
    from tf_hips.ops.compressor import parse

    rank = primitives.rank()
    letters = "".join(one if one.isalnum() else "." for one in f"{label}{rule}{text}{topology}")
    return make_robust_reducer(
        [[n] for n in sizes],
        parse(text),
        robust.parse(rule),
        label=letters,
        worker_seed=native.derive_seed(3, f"worker/{rank}"),
        owner_seed=native.derive_seed(3, f"owner/{rank}"),
        rule_seed=11,
        make_variable=lambda value, name: tf.Variable(value, trainable=False, name=name),
        tell=tell,
        tell_chosen=tell_chosen,
        topology=topology,
    )


def _compare(sizes, rule, text, topology, steps=3):
    import numpy as np
    import tensorflow as tf

    from tf_hips import robust
    from tf_hips.comm import primitives
    from tf_hips.ops.compressor import parse

    rank, size = primitives.rank(), primitives.size()

    def gradients(of, step):
        generator = np.random.default_rng([of, step])
        return [generator.normal(size=n).astype(np.float32) for n in sizes]

    total = _make(
        sizes, rule, text, topology, lambda *told: pytest.fail(f"nobody lies: {told}"), "same."
    )
    run = tf.function(total, autograph=False)
    compressor, chosen = parse(text), robust.parse(rule)
    everyone = _Everyone(sizes, chosen, compressor, topology, size)
    for step in range(steps):
        inputs = [tf.constant(value) for value in gradients(rank, step)]
        results = (total if step == 0 else run)(inputs, tf.constant(step, tf.int64))
        given = [gradients(of, step) for of in range(size)]
        expected = everyone.results(compressor.at(step), given, step)
        for result, value in zip(results, expected, strict=True):
            np.testing.assert_array_equal(
                result.numpy().view(np.uint32), value.view(np.uint32), err_msg=f"{rule} {text}"
            )
        if text == "fp32":
            whole = chosen.run([np.concatenate(one) for one in given], seed=11, step=step).vector
            mine = np.concatenate([one.numpy() for one in results])
            if chosen.is_coordinate or chosen.rule.name == "krum":
                np.testing.assert_array_equal(mine.view(np.uint32), whole.view(np.uint32))
            else:  # weights may differ in the last bit: chunks are cut elsewhere
                np.testing.assert_allclose(mine, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@ranks(3)
def test_all_kinds_of_rules_equal_those_in_numpy():
    from tf_hips.comm.robust_wire import Packets, Values

    Values.bucket_elements = 4 * 310  # several buckets
    _compare(LARGE, "median", "fp32", "ps", steps=2)
    _compare(LARGE, "krum(f=0)", "fp32", "ps", steps=2)
    Packets.bucket_elements = Values.bucket_elements = 16
    for rule in ("median", "geometric_median", CHAIN, "bucketing(s=2) >> mean"):
        _compare(SMALL, rule, "fp32", "ps", steps=2)
        _compare(SMALL, rule, EF, "allgather", steps=2)
    for rule in ("trimmed_mean(f=1)", "majority", "cge(f=1)"):
        _compare(SMALL, rule, EF, "ps")
    _compare(SMALL, "median", "warmup(error_feedback(onebit), steps=1)", "ps")
    _compare(SMALL, "centred_clipping", "dgc(ratio=0.5, momentum=0, clip_norm=0)", "ps")
    _compare(SMALL, "krum(f=0)", "warmup(dgc(ratio=0.5, momentum=0), steps=1, stages=1)", "ps")


def _attacked(rule, text, topology, attack, own):
    """A result where rank 3 of 4 sends what `attack` says, and the honest rows."""
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives

    rank = primitives.rank()
    honest = [
        np.random.default_rng(of).normal(1.0, 0.1, sum(SMALL)).astype(np.float32) for of in range(3)
    ]
    sent = honest[rank] if rank < 3 else attack(honest, 1, own=[honest[0]])[0]
    told = []
    total = _make(SMALL, rule, text, topology, lambda *one: told.append(one), f"{attack}")
    parts = [tf.constant(one) for one in np.split(sent, np.cumsum(SMALL)[:-1])]
    results = tf.function(total, autograph=False)(parts, tf.constant(own, tf.int64))
    vector = np.concatenate([one.numpy() for one in results])
    bits = primitives.gather_objects(vector.tobytes().hex())
    assert len(set(bits)) == 1, "all ranks end with the same bits"
    return vector, np.stack(honest), told


def _liars(ways):
    """A liar among four moves the result no further than honest rows lie apart."""
    import numpy as np

    from tf_hips.robust import attacks

    for attack, rule, topology in ways:
        vector, honest, told = _attacked(rule, "fp32", topology, attack, 0)
        assert (vector <= honest.max(axis=0)).all(), (attack, rule)
        assert (vector >= honest.min(axis=0)).all(), (attack, rule)
        assert not told, "what is wrong with such a row is for the rule to find"
    # The mean of the same rows is the liar's.
    attack = attacks.constant(-1e3)
    mean, honest, told = _attacked("mean", "fp32", "ps", attack, 0)
    assert np.abs(mean - honest.mean(axis=0)).max() > 5
    # Beside the others this row is absurd, whatever rule there is behind.
    _, honest, told = _attacked("geometric_median", "fp32", "ps", attacks.constant(-1e6), 5)
    [(step, [refused], error)] = told
    assert (step, refused.rank, refused.tensors, error) == (5, 3, (), None)
    assert "times the median" in refused.reason


def _refusals(ways):
    """Rows with NaN take no part, count among the f, and are named on all ranks alike."""
    import numpy as np
    import tensorflow as tf

    from tf_hips import robust
    from tf_hips.comm import primitives
    from tf_hips.errors import ToleranceError

    rank, size = primitives.rank(), primitives.size()
    rows = np.random.default_rng(0).normal(size=(size, sum(SMALL))).astype(np.float32)
    cuts = np.cumsum(SMALL)[:-1]

    def step_of(total, number, bad):
        """`bad` rank: (tensor, element, value)."""
        parts = np.split(rows[rank].copy(), cuts)
        if rank in bad:
            tensor, element, value = bad[rank]
            parts[tensor][element] = value
        return [one.numpy() for one in total(parts, tf.constant(number, tf.int64))]

    with pytest.raises(ToleranceError, match=r"n >= 2 f \+ 3 rows. Received: n=4, f=1"):
        _make(SMALL, "krum(f=1)", "fp32", "ps", None, "small")
    for rule, text, topology in ways:
        told = []

        def tell(step, refused, error, told=told):
            told.append((step, [(one.rank, one.reason, one.tensors) for one in refused]))
            if error is not None:
                raise error

        total = tf.function(_make(SMALL, rule, text, topology, tell, "nan"), autograph=False)
        assert np.isfinite(np.concatenate(step_of(total, 0, {}))).all()
        assert told == []
        found = step_of(total, 1, {2: (3, 1, np.nan)})
        assert np.isfinite(np.concatenate(found)).all()
        assert told == [(1, [(2, "NaN or infinity", (3,))])]
        if text == "fp32":
            without = robust.parse(rule).run(np.delete(rows, 2, axis=0), missing=1).vector
            np.testing.assert_array_equal(found[3], np.split(without, cuts)[3])
        # What is over the f is an error on all ranks alike, and the next step begins anew.
        with pytest.raises(tf.errors.OpError, match=r"bears f=1 bad rows\. Received: 2 that were"):
            step_of(total, 2, {0: (4, 0, np.inf), 2: (4, 4, -np.inf)})
        assert told[1:] == [(2, [(0, "NaN or infinity", (4,)), (2, "NaN or infinity", (4,))])]
        del told[:]
        assert np.isfinite(np.concatenate(step_of(total, 3, {}))).all()
        assert told == []


@pytest.mark.heavy
@ranks(3)
def test_all_ranks_hear_whose_rows_the_rule_has_chosen():
    import numpy as np
    import tensorflow as tf

    from tf_hips import robust
    from tf_hips.comm import primitives

    rank, size = primitives.rank(), primitives.size()
    rows = np.random.default_rng(0).normal(size=(size, sum(SMALL))).astype(np.float32)
    parts = [tf.constant(one) for one in np.split(rows[rank], np.cumsum(SMALL)[:-1])]
    for rule, text, topology in (("krum(f=0)", "fp32", "ps"), ("median", "fp32", "allgather")):
        heard = []
        total = _make(
            SMALL, rule, text, topology, None, "chosen", lambda *told, to=heard: to.append(told)
        )
        run = tf.function(total, autograph=False)
        for step in range(2):
            run(parts, tf.constant(step, tf.int64))
        selected = robust.parse(rule).run(rows).selected
        told = [(step, selected, (0, 1, 2)) for step in range(2)]
        assert heard == (told if selected is not None else []), rule


@ranks(4)
def test_four_ranks_one_of_whom_lies():
    from tf_hips.comm.robust_wire import Packets, Values
    from tf_hips.robust import attacks

    Packets.bucket_elements = Values.bucket_elements = 16
    _compare(SMALL, "median", "fp32", "ps", steps=2)
    _compare(SMALL, CHAIN, EF, "ps", steps=2)
    _liars([(attacks.reversed_gradient(1e3), CHAIN, "allgather")])
    _refusals([("median(f=1)", "fp32", "ps"), ("cge(f=1)", EF, "ps")])


@pytest.mark.slow
@ranks(4)
def test_liars_and_rows_that_are_refused_in_all_ways():
    from tf_hips.robust import attacks

    _liars(
        [
            (attack, rule, topology)
            for attack in (
                attacks.reversed_gradient(1e3),
                attacks.constant(-1e3),
                attacks.gaussian(),
            )
            for rule, topology in (
                ("median", "ps"),
                ("nnm(f=1) >> median(f=1)", "ps"),
                ("mda(f=1)", "allgather"),
            )
        ]
    )
    _refusals(
        [
            (rule, text, topology)
            for rule in ("median(f=1)", "cge(f=1)")
            for text in ("fp32", EF)
            for topology in ("ps", "allgather")
        ]
    )
