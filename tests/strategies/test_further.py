# SPDX-License-Identifier: Apache-2.0
"""Lists of gradients behind a run's first one: by gathers, the same at all parties.

A GAN, over parties and against one process, is in `features.gan`; here is what gathers may bring.
"""

import dataclasses
import functools
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.errors import ProtocolError
from tf_hips.ops import native
from tf_hips.ops.compressor import parse
from tf_hips.ps import rules
from tf_hips.ps.terms.tree import bundle
from tf_hips.strategies import further
from tf_hips.strategies.connected import ConnectedStrategy
from tf_hips.strategies.failures import Failures
from tf_hips.strategies.gradients import Gradient
from tf_hips.strategies.hierarchical_ps import HierarchicalPS
from tf_hips.strategies.uplink import SlowTier

pytestmark = pytest.mark.tf

WORKERS = 2, 1, 1
SIZES = [5, 0, 3]
_ABSENT = None
_NUM_BYTES = sum(parse("fp32").wire_bytes(size) for size in SIZES if size)


@dataclasses.dataclass(frozen=True)
class Welcome:
    """As much of what a server says as is looked at."""

    child: int = 0
    parties: tuple[str, ...] = ("north", "east", "south")
    workers: tuple[int, ...] = WORKERS
    bears_liars: bool = False


class Strategy:
    """Party `child` of three; `answer` makes the payloads of all of its own."""

    loan = _apart = None
    _is_resumed = False
    _seconds_in_rounds = 0.0

    def __init__(self, answer, *, child=0, limit=1000, rule="sum", **told):
        self.answer, self.welcome = answer, Welcome(child, **told)
        self.rule = rules.parse(rule)
        self.limit, self.gathers = limit, []

    def _connected(self):
        return types.SimpleNamespace(max_gather_bytes=self.limit)

    def _together(self):
        return self.welcome

    most_gather_bytes = ConnectedStrategy.most_gather_bytes
    from_party = ConnectedStrategy.from_party

    def _gather_bytes(self, label, payload):
        self.gathers.append((label, payload))
        return self.answer(payload)


def _exchange(strategy):
    return further._Exchange(strategy, strategy.welcome, "gradients1")


def _summed(codec, strategy, vectors):
    primitives.init()
    compressor = parse(codec)
    tier = SlowTier(_exchange(strategy), len(WORKERS), 3, Failures())
    stage = further._Gathered(tier, compressor, compressor, SIZES, "further", {})
    return [one.numpy() for one in stage(vectors, tf.constant(4, tf.int64))]


def _vectors():
    generator = np.random.default_rng(1)
    return [tf.constant(generator.normal(size=size), tf.float32) for size in SIZES]


def test_packets_of_all_parties_are_added_up():
    vectors = _vectors()
    strategy = Strategy(lambda payload: [payload] * 3)
    for one, vector in zip(_summed("fp32", strategy, vectors), vectors, strict=True):
        np.testing.assert_array_equal(one, vector + vector + vector)
    [(label, payload)] = strategy.gathers
    assert label == "gradients1, step 4"
    assert len(payload) == _NUM_BYTES
    assert strategy._seconds_in_rounds > 0
    signs = _summed("onebit", Strategy(lambda payload: [payload] * 3), vectors)
    assert len({abs(float(one)) for one in signs[0]}) <= 2  # decoded, each of them


def test_who_is_absent_does_not_count_and_what_is_left_is_a_mean_of_the_others():
    vectors = _vectors()
    strategy = Strategy(lambda payload: [payload, _ABSENT, payload])
    for one, vector in zip(_summed("fp32", strategy, vectors), vectors, strict=True):
        share = np.float32(sum(WORKERS) / (sum(WORKERS) - WORKERS[1]))
        np.testing.assert_allclose(one, share * vector + share * vector, rtol=1e-6)
    # This one is absent, and hears what the others have: its own packets do not matter.
    fp32 = parse("fp32")
    values = [np.arange(size, dtype=np.float32) for size in SIZES]
    theirs = b"".join(
        native.encode(fp32, one, native.Key(0, 0, 0)).tobytes() for one in values if one.size
    )
    others = Strategy(lambda payload: [_ABSENT, theirs, theirs])
    own = [tf.fill([size], np.float32(np.nan)) for size in SIZES]
    for one, value in zip(_summed("fp32", others, own), values, strict=True):
        np.testing.assert_array_equal(one, 4.0 * value)


def test_pieces_fit_what_the_server_takes_and_a_party_is_in_all_or_in_none():
    vectors = _vectors()
    size, front = _NUM_BYTES // 3 - 1, len(bundle([b""] * 3))
    strategy = Strategy(lambda payload: [payload] * 3, limit=front + 3 * size + 2)
    for one, vector in zip(_summed("fp32", strategy, vectors), vectors, strict=True):
        np.testing.assert_array_equal(one, vector + vector + vector)
    pieces = [len(payload) for _, payload in strategy.gathers]
    assert pieces == [size, size, size, _NUM_BYTES - 3 * size]
    # A server above gets those of all in one.
    assert all(len(bundle([one] * 3)) <= strategy.limit for _, one in strategy.gathers)
    missed = iter([False, True, False, False])  # one of them was closed without the second

    def answer(payload):
        return [payload, _ABSENT if next(missed) else payload, payload]

    first, *_ = _summed("fp32", Strategy(answer, limit=front + 3 * size), vectors)
    share = np.float32(4 / 3)
    np.testing.assert_allclose(first, share * vectors[0] + share * vectors[0], rtol=1e-6)


@pytest.mark.parametrize("above", [None, "onebit"])
def test_what_goes_up_is_encoded_for_the_slow_links(above):
    """Also of workers with a server of the party, which decodes what goes in rounds only."""
    primitives.init()
    strategy = Strategy(lambda payload: [payload] * 3)
    strategy.above = None if above is None else parse(above)
    strategy._up = strategy._down = parse("fp32")
    strategy._for_model = functools.partial(HierarchicalPS._for_model, strategy)
    strategy.config, strategy.failures = types.SimpleNamespace(uplink=None, seed=0), Failures()
    strategy.make_variable = None  # neither keeps anything
    gradients = [Gradient("a", (40,), tf.float32), Gradient("b", (8, 2), tf.float32)]
    summing = further.summing(strategy, gradients, "gradients1")
    summing.reducer([tf.ones(40), tf.ones(16)], tf.constant(0, tf.int64))
    [(_, payload)] = strategy.gathers
    codec = strategy.above or strategy._up
    assert len(payload) == codec.wire_bytes(40) + codec.wire_bytes(16)


def test_what_cannot_be_summed_is_no_list():
    strategy = HierarchicalPS()
    with strategy.scope():
        weights = [tf.Variable([1.0 + 0.0j]), tf.Variable([1.0])]
        optimizer = keras.optimizers.SGD(1.0)
    first, second = weights
    with pytest.raises(TypeError, match="must be of a floating type"):
        strategy.run(lambda: optimizer.apply([first + 0.0], [first]))
    assert strategy._num_sums == 0  # so the next one is the first, which goes in rounds
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0)
    strategy.run(lambda: optimizer.apply([second + 0.0], [second]))
    assert strategy._num_sums == 1


def test_parties_that_send_other_lengths_are_told():
    exchange = _exchange(Strategy(lambda payload: [payload, payload[1:], payload]))
    with pytest.raises(ProtocolError, match=r"as many bytes of `gradients1, step 0`.*8, 7, 8"):
        exchange(np.int64(0), np.zeros(8, np.uint8), np.int64(-1))


@pytest.mark.parametrize("child", [0, 1])
def test_what_came_later_is_the_first_partys(child):
    theirs = [np.array([[1.0, 2.0]], np.float32), np.array(7, np.int64)]
    own = theirs if child == 0 else [np.zeros_like(one) for one in theirs]
    data = b"".join(one.tobytes() for one in theirs)
    begun = []

    def answer(payload):
        place = sum(begun)
        begun.append(5)
        assert payload == (data[place : place + 5] if child == 0 else b"")
        return [data[place : place + 5], b"", b""]

    strategy = Strategy(answer, child=child, limit=len(bundle([b""] * 3)) + 15)
    found = further.meeting(strategy)(own)
    for one, expected in zip(found, theirs, strict=True):
        assert one.dtype == expected.dtype
        np.testing.assert_array_equal(one, expected)
    for title, _ in strategy.gathers:
        assert re.search(
            r"later, 2 variables \(float32\[1, 2\], int64\[\].*outside of the str", title
        )
    with pytest.raises(ProtocolError, match="quorum has gone on without it"):
        further.meeting(Strategy(lambda payload: [_ABSENT, b"", b""]))(own)
    strategy._is_resumed = True
    with pytest.raises(ProtocolError, match=r"come back.*Received: 2 variables"):
        further.meeting(strategy)(own)


@pytest.mark.parametrize(
    ("rule", "told", "reason"),
    [
        ("sum", {}, None),
        ("mean", {}, None),
        ("sum", {"bears_liars": True}, "robust servers"),
        ("adam(learning_rate=0.1)", {}, "rule is adam"),
        ("median", {}, "rule is median"),
        ("dc_asgd(learning_rate=0.1)", {}, "rule is dc_asgd"),
    ],
)
def test_rules_that_make_more_than_sums_have_one_list(rule, told, reason):
    strategy = Strategy(None, rule=rule, **told)
    found = further.why_not(strategy)
    assert (found is None) == (reason is None)
    assert (further.meeting(strategy) is None) == (reason is not None)
    if reason is not None:
        assert reason in found
    strategy.loan = object()
    assert "a loop" in further.why_not(strategy)


class _Killed(Exception):
    """Ends a process, as far as the test has several."""


def test_who_comes_back_does_the_gathers_since_its_backup_again(tmp_path):
    import tf_hips
    from tests.strategies.features.ours import Pair
    from tests.strategies.test_come_back_wrongly import come
    from tests.strategies.test_hierarchical_ps import serving

    rows = np.random.default_rng(4).normal(size=(2, 20, 6)).astype(np.float32)

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise _Killed

    def fit(strategy, *more):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Pair()
            model.compile(*(keras.optimizers.Adam(0.01) for _ in range(2)))
            model.run_eagerly = True
        backup = tf_hips.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=3)
        data = tf_hips.shard((rows[0], rows[1][:, :3]), 4)
        model.fit(data, epochs=2, verbose=0, callbacks=[backup, *more])
        # Two steps of each network in a batch, so each list has two steps.
        assert [int(one.step) for one in strategy._sums.values()] == [20, 20]
        return [value.tobytes() for value in model.get_weights()]

    results = []
    for is_killed in (False, True):
        with serving("run", parties=("a",)) as server:
            if is_killed:
                first = come(server)
                first.config = dataclasses.replace(first.config, comes_back=True)
                with pytest.raises(_Killed):
                    fit(first, Kill())
                gathers = first._num_gathers
                first.client.close()
            strategy = come(server)
            assert strategy.welcome.is_back == is_killed
            results.append(fit(strategy))
            if is_killed:
                assert strategy._num_gathers > gathers > 8
            strategy.close()
    assert results[0] == results[1]
