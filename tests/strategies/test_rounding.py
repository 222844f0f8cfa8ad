# SPDX-License-Identifier: Apache-2.0
"""Workers whose machines round unlike stay one model; what is no rounding is an error on all."""

import json
import math
import os
import types

import numpy as np
import pytest

from tests.strategies.test_hierarchical_ps import party_environments, serving, write_configs
from tests.support import sites
from tests.support.ranks import ranks, run_parties
from tf_hips import config, log
from tf_hips.errors import ProtocolError

pytestmark = pytest.mark.tf

SITES = ("north", "south")


def test_what_rounding_makes_and_what_it_does_not():
    from tf_hips.strategies import nearness

    draw = np.random.default_rng(3)
    own = draw.standard_normal((700, 500)).astype(np.float32)  # more than a block
    near = np.nextafter(own, np.float32(np.inf))
    found = nearness.measure(own, near)
    assert found.is_rounding and 0 < found.share < 1e-7
    assert nearness.measure(own, own) == nearness.Gap(0.0, is_rounding=True)
    far = own.copy()
    far[-1, -1] += 700.0
    found = nearness.measure(own, far)
    assert not found.is_rounding and found.share > 0.5
    assert nearness.measure(far, own) == found
    halved = nearness.measure(own, own / 2)
    assert halved == nearness.Gap(pytest.approx(0.5), is_rounding=False)
    assert nearness.measure(own, own * np.float32(1 + 0.9 * nearness.TOLERANCE)).is_rounding
    assert not nearness.measure(own, own * np.float32(1 + 1.1 * nearness.TOLERANCE)).is_rounding

    # What is not finite must be the same.
    odd = np.array([np.nan, np.inf, 1.0, -np.inf, 0.0], np.float32)
    assert nearness.measure(odd, odd.copy()) == nearness.Gap(0.0, is_rounding=True)
    assert nearness.measure(odd, np.where(odd == 1.0, np.float32(1.0000001), odd)).is_rounding
    for place, value in ((0, 1.0), (1, np.nan), (1, -np.inf), (2, np.inf), (2, np.nan)):
        other = odd.copy()
        other[place] = value
        assert nearness.measure(odd, other) == nearness.Gap(math.inf, is_rounding=False)

    # Numbers next to 0: among others like them; flushed to 0; all 0.
    one, other = np.array([1e-9], np.float32), np.array([-3e-8], np.float32)
    assert not nearness.measure(one, other).is_rounding
    assert nearness.measure(one, other, scale=0.01).is_rounding
    assert not nearness.measure(one, np.float32([0.5]), scale=0.01).is_rounding
    zero = np.zeros(5, np.float32)
    assert nearness.measure(zero, np.full(5, 1e-39, np.float32)).is_rounding
    assert nearness.measure(zero, -zero).is_rounding
    assert not nearness.measure(zero, np.full(5, 1e-6, np.float32)).is_rounding
    assert nearness.measure(np.zeros((0, 3)), np.zeros((0, 3))).is_rounding
    # Without a square in float64.
    huge = np.array([1e200, -1e200])
    assert nearness.measure(huge, -huge) == nearness.Gap(math.inf, is_rounding=False)

    # A unit in the last place of bfloat16 is more than `TOLERANCE`.
    bfloat16 = np.float32(own).astype("bfloat16")
    next_one = (bfloat16.view(np.uint16) + np.uint16(1)).view(bfloat16.dtype)
    assert not nearness.measure(bfloat16, next_one).is_rounding
    assert nearness.measure(bfloat16, next_one, distance=2.0**-7).is_rounding


class Party:
    """As much of a strategy as is asked, of a party `child` of three of one worker."""

    loan = None
    bears_liars = False
    workers = (1, 1, 1)

    def __init__(self, child, from_party, told=None):
        self.child, self._from_party, self._told = child, from_party, told
        self.asked, self.events = [], []

    def _together(self):
        return self

    def most_gather_bytes(self):
        return 12

    def from_party(self, party, label, payload):
        self.asked.append((party, label, payload))
        return self._from_party(len(self.asked) - 1, payload)

    def gather_objects(self, value, label):
        del label
        return self._told(value) if self._told else [value] * 3

    def write_event(self, event, **values):
        self.events.append({"event": event, **values})


def _settled(strategy, told_by_all, variables, mine=None):
    from tf_hips.comm import primitives
    from tf_hips.strategies import rounding
    from tf_hips.strategies.logs import digests

    primitives.init()
    own = digests(variables)
    told = [own if one is ... else one for one in told_by_all]
    return rounding.settle(strategy, variables, told, own if mine is None else mine, "it")


def _variables():
    import keras

    values = [np.float32([1.0, 2.0, 3.0, 4.0, 5.0]), np.float32([7.0]), np.int64([3])]
    return [
        keras.Variable(value, dtype=value.dtype.name, name=f"v{place}")
        for place, value in enumerate(values)
    ]


def test_only_what_differs_travels_in_pieces_that_may_be_sent():
    variables = _variables()
    theirs = np.nextafter(variables[0].numpy(), np.float32(9))
    sent = [theirs.tobytes()[begin : begin + 12] for begin in (0, 12)]
    strategy = Party(1, lambda number, payload: sent[number])
    [first, second, third] = _digests(variables)
    assert _settled(strategy, [[first + 1, second, third], ..., ...], variables) == ""
    assert [(party, payload) for party, _, payload in strategy.asked] == [(0, b"")] * 2
    np.testing.assert_array_equal(variables[0].numpy(), theirs)
    [event] = strategy.events
    assert (event["event"], event["what"], event["variables"]) == ("made_equal", "it", 1)
    assert (event["bytes"], event["first"]) == (20, 0)
    assert 0 < event["share"] < 1e-6

    # The first one gives what it has, and keeps it.
    variables = _variables()
    strategy = Party(0, lambda number, payload: payload)
    assert _settled(strategy, [..., [first + 1, second, third], ...], variables) == ""
    own = variables[0].numpy().tobytes()
    assert [payload for *_, payload in strategy.asked] == [own[:12], own[12:]]
    # Where another one may send more at a time, its pieces are longer.
    variables = _variables()
    strategy = Party(1, lambda number, payload: theirs.tobytes())
    assert _settled(strategy, [[first + 1, second, third], ..., ...], variables) == ""
    np.testing.assert_array_equal(variables[0].numpy(), theirs)
    for made in (b"", bytes(24)):  # of another model, and nobody waits for ever
        strategy = Party(1, lambda number, payload, made=made: made)
        with pytest.raises(ProtocolError, match=r"must have 1 to 20 bytes. Received: (0|24)$"):
            _settled(strategy, [[1, second, third], ..., ...], variables)
    # With the first party absent it is the next one.
    strategy = Party(1, lambda number, payload: payload)
    assert _settled(strategy, [None, ..., [first + 1, second, third]], variables) == ""
    assert [party for party, *_ in strategy.asked] == [1, 1]


def test_all_hear_of_a_mistake_also_where_it_is_none_here():
    variables = _variables()
    [first, second, third] = _digests(variables)
    others = [[first + 1, second, third], ..., ...]
    strategy = Party(1, lambda number, payload: variables[0].numpy().tobytes()[12 * number :][:12])
    strategy._told = lambda value: [value, [0, 0.25], [0, 0.5]]
    told = _settled(strategy, others, variables)
    assert told == "`v0` of worker 1 is not that of worker 0, by 0.25 of its norm"
    assert not strategy.events
    # Integers are not rounded, and lists of other lengths are of another model: nothing travels.
    for odd in ([first + 1, second, third + 1], [first + 1, second], [first + 1, second, None]):
        strategy = Party(1, pytest.fail)
        assert "of worker 1 is not that of worker 0" in _settled(
            strategy, [odd, ..., ...], variables
        )


def test_where_a_party_is_absent_the_others_go_on():
    variables = _variables()
    before = [one.numpy() for one in variables]
    [first, second, third] = _digests(variables)
    # It has gone since.
    strategy = Party(1, lambda number, payload: None)
    assert _settled(strategy, [[first + 1, second, third], ..., ...], variables) == ""
    # This one was absent, so the others do not know that it differs.
    strategy = Party(1, pytest.fail)
    others = [first + 1, second, third]
    assert _settled(strategy, [others, None, others], variables) == ""
    assert not strategy.events
    for one, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(one.numpy(), value)


@pytest.mark.parametrize("is_robust", [False, True])
def test_what_nobody_has_yet_is_not_compared(is_robust):
    """After another `compile` slots are new, and get the first worker's values later."""
    variables = _variables()
    [first, second, _] = _digests(variables)
    sent = variables[0].numpy().tobytes()
    strategy = Party(1, lambda number, payload: sent[12 * number :][:12])
    strategy.bears_liars, strategy.looks_at_leaves = is_robust, False
    strategy.paths = strategy.parties = ("a", "b", "c")
    own = [first, second, None]
    others = [[first + 1, second, None], own]
    assert _settled(strategy, [others[0], own, others[1]], variables, mine=own) == ""
    assert len(strategy.asked) == (0 if is_robust else 2)
    # A liar may tell None of others, and one that has come back knows none.
    if is_robust:
        assert _settled(strategy, [others[0], own, [None] * 3], variables, mine=[]) == ""
    # None of one worker alone is a mistake.
    else:
        strategy = Party(1, pytest.fail)
        assert "`v2` of worker 2 is not" in _settled(
            strategy, [own, own, [first, second, 1]], variables, mine=own
        )


@pytest.mark.parametrize("size", [1, 2, 7, 1000, 300_000])
def test_sketches_tell_how_far_values_are_apart(size):
    from tf_hips.strategies import nearness

    draw = np.random.default_rng(size)
    own = draw.standard_normal(size).astype(np.float32)
    one = nearness.sketch(own)
    assert one == nearness.sketch(own.copy())
    assert json.loads(json.dumps(one)) == one
    assert one[0] == pytest.approx(np.linalg.norm(own), rel=1e-5)

    def is_near(other, scale=0.0):
        return nearness.are_sketches_near(one, nearness.sketch(other), size, scale, 0.0)

    assert is_near(np.nextafter(own, np.float32(9)))
    assert is_near(own * np.float32(1 + 0.3 * nearness.TOLERANCE))
    assert not is_near(own * np.float32(1.02))
    assert not is_near(own + 0.02 * draw.standard_normal(size).astype(np.float32))
    assert not is_near(draw.permutation(own) if size > 2 else -own)
    odd = own.copy()
    odd[-1] += np.float32(0.1 * np.linalg.norm(own))
    assert not is_near(odd)
    # A mean of 8 squares of a chi-square distribution, 400 times.
    gaps = []
    for _ in range(400):
        apart = draw.standard_normal(size)
        sums = np.array(nearness.sketch(own + apart)[1:]) - np.array(one[1:])
        gaps.append(np.mean(sums**2) / np.sum(apart**2))
        if size > 1000:
            break
    assert np.mean(gaps) == pytest.approx(1.0, abs=0.2 if size <= 1000 else 0.9)
    assert nearness.sketch(np.float32([np.nan, np.inf, 3.0]))[0] == 3.0
    assert nearness.are_sketches_near([0.0] * 9, [0.0] * 9, 0, 0.0, 0.0)


def _times(factor):
    """What a worker tells whose floating variables are so much larger."""
    return lambda value: [value[0], [[factor * one for one in row] for row in value[1]]]


_MOST = "`v0` of this worker is not that of most parties"


@pytest.mark.parametrize(
    ("others", "told", "named"),
    [
        ((_times(1 + 1e-6), _times(1 - 1e-6)), "", None),
        ((_times(1 + 1e-6), _times(1.5)), "", "c"),
        ((_times(1.5), _times(1.5)), _MOST, "b"),
        ((_times(1.5), _times(2.0)), "`v0` of party b is not that of party a", None),
        ((_times(1.0), lambda value: [[5], value[1]]), "", "c"),
        (
            (lambda value: [[5], value[1]], lambda value: [[5], value[1]]),
            "`v2` of this worker is not that of most parties",
            "b",
        ),
        ((_times(1.0), lambda value: None), "", None),
        *(
            ((_times(1.0), lambda value, made=made: made), "", "c")
            for made in (3, [], [[3]], [[3], []], [["3"], [[1.0] * 9] * 2])
        ),
        ((_times(1.0), lambda value: [value[0], [[math.nan] * 9] * 2]), "", "c"),
        ((_times(1.0), lambda value: [value[0], [["x"] * 9] * 2]), "", "c"),
        *(  # without squares in float64; no float at all
            ((_times(1.0), lambda value, made=made: [value[0], [[made] * 9] * 2]), "", "c")
            for made in (1e308, -1e308, 10**400, True)
        ),
        ((_times(1.0), lambda value: [value[0], [[1.0] * 8] * 2]), "", "c"),
    ],
)
def test_below_a_robust_rule_nobody_takes_what_another_has(others, told, named):
    """The second of three parties; each keeps what it has."""
    variables = _variables()
    before = [one.numpy() for one in variables]
    [first, second, third] = _digests(variables)
    strategy = Party(1, pytest.fail)
    strategy.bears_liars, strategy.looks_at_leaves = True, False
    strategy.paths = strategy.parties = ("a", "b", "c")
    strategy._told = lambda value: [others[0](value), value, others[1](value)]
    unlike = [first + 1, second, third]
    assert _settled(strategy, [unlike, ..., unlike], variables) == told
    for one, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(one.numpy(), value)
    assert [site for event in strategy.events for site in event["sites"]] == [*(named or "")]
    # Digests that are those of most are enough, and what is no list of them is another's lie.
    assert _settled(Party(1, pytest.fail), [..., ..., ...], variables) == ""


def test_of_a_liar_whose_digests_alone_are_odd_others_compare_sketches():
    variables = _variables()
    strategy = Party(1, pytest.fail)
    strategy.bears_liars, strategy.looks_at_leaves = True, False
    strategy.paths = strategy.parties = ("a", "b", "c")
    for odd in ([1, 2], [1, 2, None], [1, 2, 3]):
        assert _settled(strategy, [..., ..., odd], variables) == ""
    assert [event["sites"] for event in strategy.events] == [["c"]]  # for the lists of others
    # What is no list of digests ends nobody's run, either.
    strategy.events.clear()
    for made in (5, "abc", [[1], 2, 3], [{}, 2, 3], [1.5, 2, 3]):
        assert _settled(strategy, [..., ..., made], variables) == ""
    assert {event["reason"] for event in strategy.events} == {
        "it is none of the values that workers tell"
    }


def _digests(variables):
    from tf_hips.strategies.logs import digests

    return digests(variables)


def test_what_was_made_equal_is_none_of_what_a_server_has_not_heard_of():
    import keras

    from tf_hips.ps import rules
    from tf_hips.strategies.logs import digests
    from tf_hips.strategies.untold import Untold

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    untold = Untold(types.SimpleNamespace(rule=rules.parse("asgd(0.1)"), loan=None, _sums={}))
    untold.remember(model)
    before = digests(model.weights)
    kernel, bias = model.weights
    kernel.assign(kernel + 1.0)
    untold.follow(model.weights, before)
    untold.check(model)
    bias.assign(bias + 1.0)  # by a callback, before they are made equal
    before = digests(model.weights)
    bias.assign(bias + 1e-7)
    untold.follow(model.weights, before)
    with pytest.raises(ProtocolError, match=r"`sequential.*/bias`, set since the last epoch"):
        untold.check(model)


@ranks(2, deadline_s=150.0)
def test_ranks_with_another_number_of_threads(tmp_path):
    """A norm is added up in an order that depends on it: the smaller sums of the field's clips."""
    import keras
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.callbacks import BackupAndRestore
    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing, HierarchicalPS
    from tf_hips.strategies.logs import digests

    rank = int(os.environ["HOROVOD_RANK"])
    tf.config.threading.set_intra_op_parallelism_threads(8 if rank else 1)  # before anything runs
    draw = np.random.default_rng(0)
    x, y = (draw.standard_normal((32, width)).astype(np.float32) for width in (64, 10))
    own = training.shard([x, y], rank, 2)
    told = []

    class Look(keras.callbacks.Callback):
        """What workers have at the end of an epoch, before they are made equal."""

        def on_epoch_end(self, epoch, logs=None):
            told.append(primitives.gather_objects(digests(self.model.weights), "look"))

    class Stop(Exception):
        pass

    class At(keras.callbacks.Callback):
        def __init__(self, batch):
            super().__init__()
            self.place = batch

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.place:
                raise Stop

    def made(kind, **options):
        keras.utils.set_random_seed(5)
        strategy = kind(config=config.Run(log_dir=str(tmp_path)), **options)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((64,)),
                    # Two kernels that are cut for threads: the sum of each is another one in 3 to
                    # 5 of 10 steps, so in 16 steps it is.
                    keras.layers.Dense(1024, activation="relu"),
                    keras.layers.Dense(512, activation="relu"),
                    keras.layers.Dense(1024, activation="relu"),
                    keras.layers.Dense(10),
                ]
            )
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.01), "mse")
        return strategy, model

    strategy, model = made(CompressedRing)
    rows = training.rows(own, 1)
    model.fit(rows, epochs=2, callbacks=[Look()], verbose=0)
    assert len(told) == 2 and all(one != other for one, other in told), "they round alike"
    training.assert_same_on_all_ranks(model)
    strategy.close()
    primitives.barrier()
    events = [one for one in log.read_events(tmp_path) if one["event"] == "made_equal"]
    assert [one["what"] for one in events] == [f"the model after epoch {n}" for n in (1, 2)]
    assert all(0 < one["share"] < 1e-6 and one["bytes"] > 2**20 for one in events)

    # A backup in the middle of an epoch has what each worker had.
    backup = BackupAndRestore(tmp_path / "backup", save_freq=14)
    _, model = made(HierarchicalPS)
    with pytest.raises(Stop):
        model.fit(rows, callbacks=[backup, At(14)], verbose=0)
    odd = digests(model.trainable_weights)
    assert odd != primitives.gather_objects(odd, "odd")[1 - rank]
    _, model = made(HierarchicalPS)
    backup = BackupAndRestore(tmp_path / "backup", save_freq=14)
    history = model.fit(rows, callbacks=[backup], verbose=0)
    assert history.epoch == [0]
    assert int(model.optimizer.iterations) == 16
    training.assert_same_on_all_ranks(model)
    made_equal = [one["what"] for one in log.read_events(tmp_path) if one["event"] == "made_equal"]
    assert "weights that were restored" in made_equal

    # As in another run's: not the same model.
    class Alone(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank == 1:
                kernel = self.model.layers[0].kernel
                kernel.assign(kernel * 1.01)

    with pytest.raises(
        ProtocolError, match=r"`sequential.*/kernel` of worker 1 is not .* 0, by 0.0099 of its norm"
    ):
        model.fit(rows.take(2), callbacks=[Alone()], verbose=0)


def _train_unlike(folder):
    import keras
    import tensorflow as tf

    from tests.strategies import training
    from tests.strategies.test_hierarchical_ps import _configs
    from tf_hips.comm import primitives
    from tf_hips.strategies import HierarchicalPS, fingerprint, rounding

    [run] = _configs()
    site = run.uplink.site
    rounding.SPREAD_BYTES = 100  # in pieces, whose ends lie within variables
    strategy = HierarchicalPS("error_feedback(onebit)", config=run)
    worker = strategy.global_rank
    own = training.shard(training.data(48), worker, 3)
    keras.utils.set_random_seed(worker)

    def nudge():
        """What another machine may have made of the same steps; here of all that it can."""
        for one in [*model.trainable_weights, *model.optimizer.variables]:
            if worker and one.dtype == "float32" and len(one.shape):
                one.assign(tf.math.nextafter(tf.convert_to_tensor(one), 9.0 * worker))

    class Nudge(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            nudge()

    with strategy.scope():
        model = training.build(keras.optimizers.Adam(0.01))
    rows = training.rows(own)
    model.fit(rows, epochs=2, verbose=0, callbacks=[Nudge()])
    told = [fingerprint(model)]
    slots = [slot.numpy().tobytes().hex() for slot in model.optimizer.variables]
    # A loop of one's own has no epochs; what is evaluated is one model.
    nudge()
    loss = model.evaluate(rows, verbose=0)
    told += [loss, fingerprint(model), slots]
    nudge()
    model.fit(rows, verbose=0)
    told.append(fingerprint(model))
    (folder / f"{worker}.json").write_text(json.dumps(told))
    if site == "south":
        model.set_weights([1.01 * one for one in model.get_weights()])
    with pytest.raises(
        ProtocolError, match=r"same weights of .* of worker 2 is not .* 0, by 0.0099"
    ):
        model.evaluate(rows, verbose=0)
    strategy.close()
    primitives.shutdown()


@pytest.mark.timeout(180)
def test_parties_whose_machines_round_unlike(tmp_path):
    with serving("unlike") as server:
        run_parties(
            _train_unlike,
            {"folder": tmp_path},
            [2, 1],
            party_environments(
                write_configs(tmp_path, "unlike", server.address, log_dir=str(tmp_path / "log"))
            ),
            deadline_s=150,
        )
    results = [json.loads((tmp_path / f"{worker}.json").read_text()) for worker in range(3)]
    assert results[0] == results[1] == results[2]
    for site in SITES:
        events = log.read_events(tmp_path / "log")
        made = [one for one in events if one["event"] == "made_equal" and one["site"] == site]
        assert [one["what"] for one in made] == [
            "the model after epoch 1",
            "the model after epoch 2",
            "weights to be evaluated",
            "the weights before `fit`",
        ]
        weights = 4 * (6 * 16 + 16 + 16 * 3 + 3)
        assert [one["bytes"] for one in made] == [3 * weights, 3 * weights, weights, 3 * weights]
        assert all(0 < one["share"] < 1e-6 and one["first"] == 0 for one in made)


def _train_doubted(folder):
    import keras
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.strategies import HierarchicalPS

    run = config.load(os.environ["TEST_CONFIG"])
    strategy = HierarchicalPS(config=run)
    worker = strategy.global_rank
    own = training.shard(training.data(64), worker, 4)

    class Nudge(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for one in self.model.trainable_weights:
                one.assign(tf.math.nextafter(tf.convert_to_tensor(one), worker - 1.5))

    class Spoil(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if run.uplink.site == "south":
                kernel = self.model.layers[0].kernel
                kernel.assign(1.1 * kernel)

    with strategy.scope():
        model = training.build(keras.optimizers.SGD(0.01))
    rows = training.rows(own)
    model.fit(rows, epochs=2, callbacks=[Nudge()], verbose=0)
    told = [value.ravel().tolist() for value in model.get_weights()]
    # One that alone differs by rounding is not named, either.
    events = []
    strategy.write_event = lambda event, **values: events.append(event)
    model.set_weights([np.full_like(value, 0.1) for value in model.get_weights()])
    if worker == 3:
        kernel = model.layers[0].kernel
        kernel.assign(tf.math.nextafter(tf.convert_to_tensor(kernel), 9.0))
    model.evaluate(rows, verbose=0)
    assert "parties_differ" not in events
    if run.uplink.site == "south":
        told_so = r"`.*/kernel` of this worker is not that of most parties"
        with pytest.raises(ProtocolError, match=told_so):
            model.fit(rows, callbacks=[Spoil()], verbose=0)
    else:
        model.fit(rows, callbacks=[Spoil()], verbose=0)
    (folder / f"{worker}.json").write_text(json.dumps(told))
    strategy.close()
    primitives.shutdown()


@pytest.mark.timeout(180)
def test_unlike_parties_of_which_some_may_lie_keep_what_they_have(tmp_path):
    names = ("north", "south", "east")
    with sites.trained(
        tmp_path, _train_doubted, names, sizes=(2, 1, 1), rule="median(f=1)", deadline_s=150
    ):
        pass
    results = [json.loads((tmp_path / f"{worker}.json").read_text()) for worker in range(4)]
    assert results[0] == results[1], "a party is one model"
    assert results[1] != results[2] != results[3]
    for result in results:
        for one, other in zip(result, results[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-8)
