# SPDX-License-Identifier: Apache-2.0
"""A party whose gradient is not finite, below a robust rule: no row in that round, and no end."""

import contextlib
import queue
import threading

import numpy as np
import pytest

from tests.strategies.test_hierarchical_ps import serving
from tests.support.ranks import ranks
from tf_hips import config, log, robust
from tf_hips.errors import NonFiniteError, ToleranceError
from tf_hips.ops import compressor, native
from tf_hips.ps.client.client import Client
from tf_hips.ps.rules.robust import OWN_REFUSAL
from tf_hips.ps.transport.wire import REFUSED_WEIGHT

pytestmark = pytest.mark.tf

OTHERS = ("b", "c", "d", "e")
SHAPES = [(2, 3), (3,)]
SIZES = [6, 3]
SPOILT = 1  # the round in which it is so
ROUNDS = 3
RATE = 0.5
WAIT_S = 60.0


def _row(child, number):
    """What a child sends; those that vote sit in one group, and send the same."""
    generator = np.random.default_rng((child, number))
    return generator.standard_normal(sum(SIZES)).astype(np.float32)


def _whole(row):
    """`row`, rounded as a strategy does that gets a share of it for the mean over all parties."""
    parties = np.float32(1 + len(OTHERS))
    return row / parties * parties


class _Child(threading.Thread):
    """One of the others, without Keras: sends its row of each round, keeps what comes down."""

    def __init__(self, address, place, codec, refuses=(), *, votes=False):
        super().__init__(daemon=True)
        self._place = place
        self._codec = compressor.parse(codec)
        self._client = Client(config.Uplink(address, OTHERS[place]), "withheld", 1)
        self._refuses = refuses
        self._row_of = 0 if votes else place
        self._like = queue.SimpleQueue()
        self.received = []
        self.error = None

    def begin(self, weights):
        """The model of the others has weights like these; their values count for nothing."""
        self._like.put(weights)

    def run(self):
        try:
            self._client.join(self._codec.text, "fp32", 7)
            self._client.first_sync(self._like.get(timeout=WAIT_S))
            self._client.agree_model(SHAPES)
            for number in range(ROUNDS):
                self.received.append(self._exchange(number))
            self._client.leave()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        finally:
            self._client.close()

    def _exchange(self, number):
        parts = np.split(_whole(_row(self._row_of, number)), np.cumsum(SIZES)[:-1])
        packets = [
            native.encode(
                self._codec,
                part,
                native.Key(self._place, number, tensor),
                kept=np.zeros(part.size, np.float32) if self._codec.has_residual else None,
            )
            for tensor, part in enumerate(parts)
        ]
        weight = REFUSED_WEIGHT if number in self._refuses else None
        came = self._client.exchange(number, np.concatenate(packets), weight)
        fp32 = compressor.parse("fp32")
        lengths = [fp32.wire_bytes(size) for size in SIZES]
        return np.concatenate(
            [
                native.decode(fp32, packet, size)
                for packet, size in zip(np.split(came, np.cumsum(lengths)[:-1]), SIZES, strict=True)
            ]
        )


def _kept(strategy):
    """What the strategy keeps of its sums: pairs of name and variable."""
    lists = strategy.state._books.lists.values()
    return [pair for made, _ in lists for pair in vars(made).items()]


@contextlib.contextmanager
def _run(folder, rule, codec="fp32", refuses=()):
    """A strategy as party `a`, its variables, and the others."""
    import tensorflow as tf

    from tf_hips.strategies import HierarchicalPS

    parties = ("a", *OTHERS)
    with serving("withheld", parties, rule=rule, log_dir=str(folder)) as server:
        address = f"127.0.0.1:{server.port}"
        others = [
            _Child(address, place, codec, refuses if place == 0 else (), votes="detox" in rule)
            for place in range(len(OTHERS))
        ]
        for one in others:
            one.start()
        uplink = config.Uplink(address, "a")
        run = config.Run(run="withheld", seed=7, uplink=uplink, log_dir=str(folder))
        strategy = HierarchicalPS(codec, downlink=None, config=run)
        with strategy.scope():
            variables = [tf.Variable(tf.ones(shape)) for shape in SHAPES]
        try:
            yield strategy, variables, others
        finally:
            strategy.close()
            for one in others:
                one.join(WAIT_S)
            assert not any(one.is_alive() for one in others), "a party hangs"


def _train(strategy, variables, others, *, is_eager=False, bad=np.inf, look=lambda: None):
    """Takes a step in each round; the weights before each, and at the end."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        optimizer = keras.optimizers.SGD(RATE)
        optimizer.build(variables)

    def step(values):
        gradients = tf.split(values, SIZES)
        shaped = [tf.reshape(one, shape) for one, shape in zip(gradients, SHAPES, strict=True)]
        # As Keras does with a loss: a share of the mean over all replicas.
        shares = [one / strategy.num_replicas_in_sync for one in shaped]
        optimizer.apply_gradients(zip(shares, variables, strict=True))

    def run(values):
        strategy.run(step, (values,))

    taken = run if is_eager else tf.function(run)
    for one in others:
        one.begin([variable.numpy() for variable in [*variables, *optimizer.variables]])
    held = []
    for number in range(ROUNDS):
        held.append(np.concatenate([one.numpy().ravel() for one in variables]))
        look()
        votes = strategy.welcome.votes is not None
        values = _row(0 if votes else len(OTHERS), number)
        if number == SPOILT:
            values[2] = bad
        taken(tf.constant(values))
    look()
    return [*held, np.concatenate([one.numpy().ravel() for one in variables])]


@pytest.mark.parametrize("is_eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("rule", ["krum(f=1)", "trimmed_mean(f=1)"])
def test_a_round_goes_on_without_a_gradient_that_is_not_finite(tmp_path, rule, is_eager):
    with _run(tmp_path, rule) as run:
        held = _train(*run, is_eager=is_eager)
    others = run[-1]
    # One of the five that may lie is known: the four rows that are left bear none more.
    rows = [_whole(_row(place, SPOILT)) for place in range(len(OTHERS))]
    wanted = robust.parse(rule.replace("f=1", "f=0"))(rows)
    for one in others:
        assert one.error is None
        np.testing.assert_array_equal(one.received[SPOILT], wanted)
    for number in range(ROUNDS):  # it takes the steps that all take
        step = np.float32(RATE) * others[0].received[number]
        np.testing.assert_array_equal(held[number + 1], held[number] - step)
    events = log.read_events(tmp_path)
    refused = [one for one in events if one["event"] == "row_refused"]
    assert [(one["round"], one["child_site"], one["reason"]) for one in refused] == [
        (SPOILT, "a", OWN_REFUSAL)
    ]
    [own] = [one for one in events if one["event"] == "update_refused"]
    assert (own["number"], own["who"]) == (SPOILT, "party `a`")
    assert own["reason"].startswith("NaN, infinity or overflow in gradient 0 (")


@pytest.mark.parametrize("vote", ["digest", "exact"])
def test_it_is_the_ballot_of_who_votes(tmp_path, vote):
    with _run(tmp_path, f"detox(r=5, fixed=1, vote={vote}) >> mean") as run:
        held = _train(*run, is_eager=True)
    for one in run[-1]:
        assert one.error is None
        np.testing.assert_array_equal(one.received[SPOILT], _whole(_row(0, SPOILT)))
    step = np.float32(RATE) * _whole(_row(0, SPOILT))
    np.testing.assert_array_equal(held[SPOILT + 1], held[SPOILT] - step)
    told = [one for one in log.read_events(tmp_path) if one["event"] == "outvoted"]
    assert [(one["round"], one["sites"]) for one in told] == [(SPOILT, ["a"])]


@pytest.mark.parametrize(
    ("codec", "bad"), [("error_feedback(onebit)", np.nan), ("error_feedback(fp16)", 1e6)]
)
def test_what_an_encoder_keeps_stays_in_a_round_without_a_row(tmp_path, codec, bad):
    residuals = []

    with _run(tmp_path, "krum(f=1)", codec) as run:

        def look():
            found = [one for name, one in _kept(run[0]) if name.startswith("uplink_residual")]
            residuals.append([one.numpy() for one in found])

        _train(*run, bad=bad, look=look)
    assert [one.error for one in run[-1]] == [None] * len(OTHERS)
    told = [one["round"] for one in log.read_events(tmp_path) if one["event"] == "row_refused"]
    assert told == [SPOILT]
    before, after = residuals[SPOILT], residuals[SPOILT + 1]
    assert len(before) == len(SIZES) and any(one.any() for one in before)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    changed = zip(after, residuals[SPOILT + 2], strict=True)
    assert any((one != other).any() for one, other in changed)


@pytest.mark.parametrize("rule", ["krum(f=1)", "trimmed_mean(f=1)"])
def test_more_than_f_are_an_error_with_all_names(tmp_path, rule):
    with _run(tmp_path, rule, refuses=(SPOILT,)) as run, pytest.raises(ToleranceError) as caught:
        _train(*run, is_eager=True)
    told = str(caught.value)
    assert f"Round {SPOILT}" in told and "bears f=1 bad rows. Received: 2 that were refused" in told
    assert all(f"site `{site}`" in told for site in "ab") and told.count(OWN_REFUSAL) == 2
    assert all(str(one.error) for one in run[-1])


def test_without_a_robust_rule_it_is_an_error_as_before(tmp_path):
    told = r"Gradient 0 \(.*of rank 0 must be finite"
    with _run(tmp_path, "mean") as run, pytest.raises(NonFiniteError, match=told):
        _train(*run, is_eager=True)
    assert all(one.error is not None for one in run[-1])


@ranks(2)
def test_a_codec_of_a_party_does_not_hide_it():
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.strategies.gradients import Summing
    from tf_hips.strategies.withheld import NONE, find, shown

    given = []

    def hiding(vectors, step):
        given.append(vectors)
        clean = [tf.where(tf.math.is_finite(one), one, 0.0) for one in vectors]
        return [primitives.allreduce(one, f"sum{place}") for place, one in enumerate(clean)]

    reduce = shown(Summing(hiding, only_float32=True), "test")

    @tf.function
    def traced(vectors):
        sums = reduce(vectors, tf.constant(0))
        return [find(sums), *sums]

    for call in (traced, traced.python_function):
        first, *sums = call([tf.fill([2], 1.0), tf.fill([3], 2.0), tf.zeros([0])])
        assert int(first) == NONE
        assert [one.numpy().tolist() for one in sums] == [[2.0] * 2, [4.0] * 3, []]
        bad = np.array([2.0, np.nan if primitives.rank() == 1 else 2.0, 2.0], np.float32)
        first, *sums = call([tf.fill([2], 1.0), tf.constant(bad), tf.zeros([0])])
        assert int(first) == 1 and np.isnan(sums[1].numpy()).all()
        # Nothing of a worker that has something to hide goes through the codec.
        assert sums[0].numpy().tolist() == [1.0] * 2
    last = np.concatenate([one.numpy() for one in given[-1]])
    assert last.any() == (primitives.rank() == 0)
