# SPDX-License-Identifier: Apache-2.0
"""What a loop makes of another party's backup, and of a meeting that loses those with a share."""

import types

import numpy as np
import pytest

pytestmark = pytest.mark.tf


def _scaffold(at_begin):
    """A loop with control variates; `at_begin` is called when its first step begins."""
    import keras

    from tests.strategies import training
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        keras.utils.set_random_seed(5)
        model = training.build(keras.optimizers.SGD(0.05))
    loop = FedAvg(model, strategy, local_steps=2, scaffold=True)

    class Begins(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                at_begin(loop)

    return strategy, model, lambda: loop.fit(
        *training.data(32), batch_size=8, shuffle=False, verbose=0, callbacks=[Begins()]
    )  # fmt: skip


@pytest.mark.parametrize("is_of_others", [False, True])
def test_control_variates_of_another_party_are_not_taken(tmp_path, is_of_others):
    import tensorflow as tf

    def mark(loop):
        for number, controls in enumerate((loop._controls.common, loop._controls.own)):
            for one in controls:
                one.assign(tf.fill(one.shape, 1.0 + number))
        state = strategy.state.of_model(model)
        tf.train.Checkpoint(state=state).write(str(tmp_path / "state"))

    strategy, model, fit = _scaffold(mark)
    fit()
    found = []

    def look(loop):
        controls = loop._controls
        found.append(({float(np.ptp(one)) for one in controls.own}, float(controls.own[0][0, 0])))
        assert float(controls.common[0][0, 0]) == 1.0

    strategy, model, fit = _scaffold(look)
    if is_of_others:
        strategy.state.take_from_others()
    tf.train.Checkpoint(state=strategy.state.of_model(model)).read(str(tmp_path / "state"))
    fit()
    assert found == [({0.0}, 1.0 if is_of_others else 2.0)]


def test_statistics_stay_equal_where_all_that_have_a_share_go_absent():
    """The meeting heard of party 0 alone, and the sum behind it goes on without it."""
    import tensorflow as tf

    from tf_hips.loops.exchange import Exchange
    from tf_hips.loops.meeting import Meeting, Told

    strategy = types.SimpleNamespace(
        rule=None, reduce_exactly=lambda values, is_mean: [tf.zeros_like(one) for one in values]
    )
    loan = types.SimpleNamespace(has_server=False)
    exchange = Exchange(None, strategy, loan, None, has_milestone=False, averages_statistics=True)
    exchange._statistics = [tf.Variable([3.0]), tf.Variable([4.0])]
    exchange._measured = [tf.Variable([1.0]), tf.Variable([2.0])]
    present = Told(2, 16, statistics=(1, 2))
    meeting = Meeting(((present,), (Told.read(None),)), "samples", is_equal=True)
    exchange._average_statistics(meeting, (0, 0))
    assert [float(one[0]) for one in exchange._statistics] == [1.0, 2.0]


def test_statistics_of_a_party_that_counts_for_earlier_meetings_alone():
    """Its workers have had no data since they met among themselves, or their weights are NaN."""
    import tensorflow as tf

    from tf_hips.loops.exchange import Exchange
    from tf_hips.loops.meeting import Meeting, Told

    nan = float("nan")
    told = (
        (Told(0, 0, 12, statistics=(1,)), Told(2, 4, 12, is_finite=False, statistics=(2,))),
        (Told(2, 8, statistics=(3,)),),
    )
    meeting = Meeting(told, "samples", is_equal=False)
    here = {(0, 0): (3.0, 3.0), (0, 1): (nan, 3.0), (1, 0): (7.0, 5.0)}
    totals = np.zeros(2)
    for is_known in (False, True):
        for place, (statistic, measured) in here.items():

            def reduce(values, is_mean, is_known=is_known):
                own = np.array([float(one[0]) for one in values])
                totals[:] += 0.0 if is_known else own
                return [tf.constant([one], tf.float64) for one in (totals if is_known else own)]

            strategy = types.SimpleNamespace(rule=None, reduce_exactly=reduce)
            loan = types.SimpleNamespace(has_server=True)
            options = {"has_milestone": True, "averages_statistics": True}
            exchange = Exchange(None, strategy, loan, None, **options)
            exchange._statistics = [tf.Variable([statistic])]
            exchange._measured = [tf.Variable([measured])]
            exchange._average_statistics(meeting, place)
            if is_known:
                assert float(exchange._statistics[0][0]) == 4.0  # 24 rows of 3, 8 of 7


def test_statistics_that_a_liar_makes_nan_stay_what_they_were():
    """It has said that they are finite, and sends others."""
    import tensorflow as tf

    from tf_hips.loops.exchange import Exchange
    from tf_hips.loops.meeting import Meeting, Told

    nan, inf = float("nan"), float("inf")
    sums = [[4.0, nan], [1e300, -inf], [1.0]]
    strategy = types.SimpleNamespace(
        rule=None,
        reduce_exactly=lambda *args, **more: [tf.constant(one, tf.float64) for one in sums],
    )
    loan = types.SimpleNamespace(has_server=False)
    exchange = Exchange(None, strategy, loan, None, has_milestone=False, averages_statistics=True)
    exchange._statistics = [tf.Variable([3.0, 3.0]), tf.Variable([5.0, -inf])]
    exchange._measured = [tf.Variable([1.0, 2.0]), tf.Variable([6.0, -inf])]
    told = tuple((Told(2, 16, statistics=(number, number)),) for number in range(2))
    meeting = Meeting(told, "samples", is_equal=True)
    exchange._average_statistics(meeting, (0, 0))
    assert [one.numpy().tolist() for one in exchange._statistics] == [[4.0, 2.0], [6.0, -inf]]


@pytest.mark.parametrize("keeps_step", [False, True])
def test_frozen_weights_do_not_travel_where_nobody_waits(keeps_step):
    import keras

    from tf_hips.loops.exchange import Exchange

    frozen = keras.layers.Dense(4, trainable=False)
    layers = [keras.Input((3,)), frozen, keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    meetings = types.SimpleNamespace(is_equal=lambda variables: True)
    beginning = types.SimpleNamespace(meetings=meetings)
    strategy = types.SimpleNamespace(rule=None, beginning=beginning)
    loan = types.SimpleNamespace(keeps_step=keeps_step)
    exchange = Exchange(None, strategy, loan, None, has_milestone=False, averages_statistics=True)
    exchange.find(keras.Sequential(layers))
    # Members that keep step compare them, too.
    assert len(exchange._statistics) == (4 if keeps_step else 2)


def test_a_void_meeting_sends_nothing_and_goes_back():
    """The one that never ends has a row; those who have ended do not wait for what it makes."""
    import tensorflow as tf

    from tf_hips.loops.bearing import Bearing
    from tf_hips.loops.exchange import Exchange
    from tf_hips.loops.meeting import Meeting, Told
    from tf_hips.ps import rules

    rule = rules.parse("median >> fedavg(1.0)")
    strategy = types.SimpleNamespace(
        rule=rule,
        reduce_exactly=lambda values, is_mean: pytest.fail("nothing may be summed"),
    )
    loan = types.SimpleNamespace(has_server=True)
    exchange = Exchange(None, strategy, loan, None, has_milestone=False, averages_statistics=True)
    exchange._over_parties = lambda *args, **kwargs: pytest.fail("nothing may be sent")
    exchange._statistics, exchange._measured = [tf.Variable([3.0])], [tf.Variable([1.0])]
    welcome = types.SimpleNamespace(
        paths=("a", "b", "c"), guards=(("", "median", None),), bears_liars=True
    )
    ended = Told(0, 0, ends=True, statistics=(1,))
    liar = Told(2, 16, statistics=(2,))
    meeting = Meeting(((ended,), (ended,), (liar,)), "samples", True, Bearing(welcome))
    for party in range(3):
        assert exchange._final(meeting, [tf.constant([5.0])], (party, 0)) is None
    exchange._average_statistics(meeting, (0, 0))
    assert float(exchange._statistics[0][0]) == 1.0


@pytest.mark.parametrize("bears_liars", [False, True])
def test_whose_weights_are_taken_is_the_same_in_all_parties_of_a_tree(bears_liars):
    """Where a party's own server has a robust rule and the topmost one takes a mean."""
    from tf_hips.loops.exchange import Exchange
    from tf_hips.ps import rules

    welcome = types.SimpleNamespace(bears_liars=bears_liars, robust=None)
    strategy = types.SimpleNamespace(rule=rules.parse("mean"), welcome=welcome, is_robust=False)
    loan = types.SimpleNamespace(has_server=True)
    exchange = Exchange(None, strategy, loan, None, has_milestone=False, averages_statistics=True)
    assert exchange._bears_liars() == bears_liars


def _members(count, size=2):
    """Loops whose c is the mean of the c_i of all: 2, of 1, 2, ..."""
    import keras
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    made = []
    for number in range(count):
        strategy = CompressedRing()
        with strategy.scope():
            model = training.build(keras.optimizers.SGD(0.5))
        loop = FedAvg(model, strategy, local_steps=2, scaffold=True)
        loop._controls.make([[size]], lambda value, name: tf.Variable(value))
        loop._controls.common[0].assign([2.0] * size)
        loop._controls.own[0].assign([float(number) + 1.0] * size)
        made.append(loop)
    return made


@pytest.mark.parametrize("shares", [(1, 1, 1), (1, 0, 1)])
def test_a_control_variate_that_is_lost_goes_out_of_the_common_one(shares):
    """Once all members count: it is the mean of theirs again, and not off by the lost one."""
    import tensorflow as tf

    from tf_hips.loops.meeting import Meeting, Told

    made = _members(3)
    made[0].forget_own()

    def meet(counts):
        told = [
            Told(2 * one, 16, words=loop.words()) for loop, one in zip(made, counts, strict=True)
        ]
        meeting = Meeting(tuple((one,) for one in told), "uniform", is_equal=True)
        sent = []
        for party, loop in enumerate(made):
            loop._controls.rates = (2, 1.0)
            moved = [tf.constant([float(party), 3.0])]
            sent.append(loop.outgoing(moved, meeting, (party, 0))[1])
        mean = tf.add_n([s * one for s, one in zip(meeting.party_shares(), sent, strict=True)])
        for party, loop in enumerate(made):
            loop.incoming([tf.zeros([2]), mean], meeting, (party, 0))

    def is_mean():
        own = np.mean([loop._controls.own[0].numpy() for loop in made], 0)
        common = [loop._controls.common[0].numpy() for loop in made]
        assert all(np.array_equal(one, common[0]) for one in common)
        return np.allclose(common[0], own, atol=1e-6)

    meet(shares)
    assert is_mean() == all(shares)
    meet((1, 1, 1))
    assert is_mean()
    meet((1, 0, 1))  # in which only differences go up again
    assert is_mean()
    assert not any(loop.words()["odd"] for loop in made)


def test_what_encoding_kept_of_control_variates_does_not_go_into_a_new_common_one():
    """c and what encoding keeps of all c_i are their mean: before one is lost, and behind that."""
    import tensorflow as tf

    from tf_hips.loops.meeting import Meeting, Told
    from tf_hips.ops import compressor, graph
    from tf_hips.strategies.loan import LoopSum

    made, up = _members(3, 4), compressor.parse("error_feedback(onebit)")
    kept = []
    for loop in made:
        of_list = types.SimpleNamespace(
            uplink_residual_0=tf.Variable([7.0] * 4), uplink_residual_1=tf.Variable([0.0] * 4)
        )
        summed = LoopSum.__new__(LoopSum)
        summed._kept = of_list
        loop._exchange._over_parties = summed
        kept.append(of_list)

    def meet(number):
        told = [Told(2, 16, words=loop.words()) for loop in made]
        meeting = Meeting(tuple((one,) for one in told), "uniform", is_equal=True)
        arrived = []
        for party, loop in enumerate(made):
            loop._controls.rates = (2, 1.0)
            moved = [tf.constant([float(party * number), 3.0 - party, 1.0, 0.5 * number])]
            _, sent = loop.outgoing(moved, meeting, (party, 0))
            residual = kept[party].uplink_residual_1
            packet, left = graph.encode(
                up, sent, seed=1, step=number, tensor_id=1, kept=residual.read_value()
            )
            residual.assign(left)
            arrived.append(graph.decode(up, packet, 4))
        for party, loop in enumerate(made):
            loop.incoming([tf.zeros([4]), tf.add_n(arrived) / 3.0], meeting, (party, 0))

    def error():
        held = [
            loop._controls.own[0].numpy() + one.uplink_residual_1.numpy()
            for loop, one in zip(made, kept, strict=True)
        ]
        return np.abs(made[0]._controls.common[0].numpy() - np.mean(held, 0)).max()

    for number in range(3):
        meet(number)
        assert error() < 1e-5
    assert any(one.uplink_residual_1.numpy().any() for one in kept)
    made[0].forget_own()
    kept[0].uplink_residual_1.assign([0.0] * 4)  # as `take_from_others` does
    assert error() > 1e-2
    for number in range(3, 6):
        meet(number)
        assert error() < 1e-5
    # What is kept of weights is sent as ever.
    assert all(one.uplink_residual_0.numpy().tolist() == [7.0] * 4 for one in kept)


@pytest.mark.parametrize(
    ("downlink", "paths", "told"),
    [
        ("error_feedback(onebit)", ("a", "b"), r"Received: downlink=error_feedback\(onebit"),
        ("fp32", ("west/a", "b"), "Received: a tree"),
        ("fp32", ("a", "b"), None),
    ],
)
def test_where_servers_keep_some_of_control_variates_no_backup_is_taken(downlink, paths, told):
    """c could not be made anew there, and would stay wrong for ever."""
    from tf_hips.errors import ConfigError
    from tf_hips.ops import compressor
    from tf_hips.strategies.backups import PartyBackups

    [loop] = _members(1)
    down = compressor.parse(downlink)
    fetched = []
    strategy = types.SimpleNamespace(
        welcome=types.SimpleNamespace(paths=paths),
        loan=types.SimpleNamespace(owner=loop),
        _codecs=lambda: {"compression": down, "downlink": down},
        _connected=lambda: types.SimpleNamespace(fetch_backup=fetched.append),
        write_event=lambda *args, **kwargs: None,
    )
    loop._strategy = loop._loan._strategy = strategy
    intake = types.SimpleNamespace(name="one", held=types.SimpleNamespace(num_bytes=1))
    backups = PartyBackups(strategy)
    if told is None:
        backups.fetch(intake)
    else:
        with pytest.raises(ConfigError, match=told):
            backups.fetch(intake)
    assert fetched == [intake] * (told is None)
