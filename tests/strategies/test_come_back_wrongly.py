# SPDX-License-Identifier: Apache-2.0
"""A process that has come back and fails before it has done anything ends no run; nor does one
whose script was changed, which would take the rounds of the old one for its own.
"""

import dataclasses
import sys

import pytest

from tests.support.eventually import eventually
from tf_hips.errors import ConfigError, ProtocolError, TfHipsError

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]


def come(server):
    """The strategy of another process of the only party."""
    from tf_hips import HierarchicalPS, config

    session = server._session
    if session.is_started:  # the one before it must be gone
        eventually(lambda: not session._presence.is_there(0), changed=session.changed)
    uplink = config.Uplink(server=server.address, site="a", deadline_s=20.0)
    return HierarchicalPS(config=config.Run(run="run", uplink=uplink))


def test_who_was_started_wrongly_leaves_the_run_to_the_next(caplog):
    from tests.strategies.test_hierarchical_ps import serving

    with serving("run", parties=("a",)) as server:
        first = come(server)
        assert first.gather_objects(1, "something") == [1]
        first.client.close()  # as one that is killed

        wrong = come(server)
        assert wrong.welcome.is_back
        wrong._note_failure(ValueError("another model"))
        wrong.close("ValueError: another model")
        assert "fails before it has taken its place. The run goes on without it" in caplog.text
        assert server._session.ended is None

        right = come(server)
        assert right.welcome.is_back
        right.backups.come_back({"round": 0, "gathers": 1})
        assert right.gather_objects(2, "more") == [2]
        # It has taken its place, so its error is one of the run.
        right.close("ValueError: a gradient")
        assert server._session.ended == "Site `a` left the run: ValueError: a gradient"


def test_an_error_that_no_restart_heals_ends_the_run_at_once():
    from tests.strategies.test_hierarchical_ps import serving

    def ended(error):
        with serving("run", parties=("a",)) as server:
            strategy = come(server)
            strategy.config = dataclasses.replace(strategy.config, comes_back=True)
            assert strategy.gather_objects(1, "something") == [1]
            try:
                raise error
            except TfHipsError:
                strategy.close()
            return server._session.ended

    assert ended(ConfigError("an option")) == "Site `a` left the run: ConfigError: an option"
    assert ended(ProtocolError("a moment")) is None  # its launcher starts another one


def test_a_script_that_was_changed_does_not_go_on_with_the_rounds_of_the_old_one(caplog):
    import keras
    import numpy as np

    import tf_hips
    from tests.strategies.test_hierarchical_ps import serving

    rows = np.ones((24, 3), np.float32)
    again = "rounds 0 to 2 are done again, with what was sent then"

    def fit(strategy, rate, batch_size=4):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(rate), "mse", run_eagerly=True)
        data = tf_hips.shard((rows, rows[:, :1]), batch_size)
        halves = keras.callbacks.LearningRateScheduler(lambda epoch, before: before / 2)
        steps = {"steps_per_epoch": 3 if batch_size == 4 else None}
        return model.fit(data, verbose=0, callbacks=[halves], **steps).history

    with serving("run", parties=("a",)) as server:
        first = come(server)
        history = fit(first, 0.5)
        first.client.close()

        for rate, batch_size, text in (
            (0.25, 4, "Received: `learning_rate` of optimizer is 0.25 and was 0.5$"),
            (0.5, 12, "Received: number of steps in an epoch is 2 and was 3$"),
        ):
            changed = come(server)
            with pytest.raises(ProtocolError, match=text):
                fit(changed, rate, batch_size)
            changed.close("ProtocolError")
        assert again not in caplog.text

        same = come(server)
        assert fit(same, 0.5) == history
        assert again in caplog.text
        same.close()


def test_who_comes_back_begins_with_the_list_that_began_the_run(tmp_path):
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_hips
    from tests.strategies.test_hierarchical_ps import serving

    class Twins(keras.Model):
        """Two networks of one shape, trained in turns by a number that comes back, too."""

        def __init__(self):
            super().__init__()
            self.networks = [
                keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)]) for _ in range(2)
            ]
            self.turn = self.add_weight(shape=(), dtype="int64", trainable=False)

        def compile(self):
            super().compile(run_eagerly=True)
            self.optimizers = [keras.optimizers.SGD(0.1) for _ in self.networks]

        def call(self, inputs):
            return self.networks[0](inputs) + self.networks[1](inputs)

        def train_step(self, data):
            place = int(self.turn) % 2
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.networks[place](data[0]) - data[1]) ** 2)
            weights = self.networks[place].trainable_variables
            self.optimizers[place].apply(tape.gradient(loss, weights), weights)
            self.turn.assign_add(1)
            return {"loss": loss}

    class Stop(keras.callbacks.Callback):
        def __init__(self, batch):
            super().__init__()
            self.batch = batch

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.batch:
                raise KeyboardInterrupt

    def fit(strategy, *more):
        with strategy.scope():
            model = Twins()
            model.compile()
        backup = tf_hips.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=3)
        data = tf_hips.shard((rows, rows), 4)
        model.fit(data, verbose=0, callbacks=[backup, *more])
        return [int(one.step) for one in strategy._sums.values()]

    rows = np.ones((48, 3), np.float32)
    with serving("run", parties=("a",)) as server:
        first = come(server)
        first.config = dataclasses.replace(first.config, comes_back=True)
        with pytest.raises(KeyboardInterrupt):
            fit(first, Stop(4))
        first.client.close()
        # Three batches are in the backup, so this one begins with the second network.
        wrong = come(server)
        message = r"order in which the run began.*Received: sequential_?\d*/dense_?\d*/kernel \(2 v"
        with pytest.raises(ProtocolError, match=message):
            fit(wrong)
        wrong.close("ProtocolError")


def test_who_was_the_odd_one_may_come_back_with_what_others_do():
    from tf_hips.strategies.same_script import check_same

    old, new = {"optimizer": "SGD"}, {"optimizer": "Adam"}
    check_same(1, new, [new, old, None])
    check_same(1, new, [old, None, old])  # it was absent then
    with pytest.raises(ProtocolError, match="Received: optimizer is Adam and was SGD"):
        check_same(1, new, [old, old, None])


def test_how_a_model_is_trained_is_said_alike_in_each_process():
    import keras

    from tf_hips.strategies.same_script import facts_of

    def loss(y, predicted):
        return keras.ops.mean(y - predicted)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    rate = keras.optimizers.schedules.CosineDecay(0.1, 9)
    model.compile(keras.optimizers.Adam(rate, name="of_this_process"), loss)
    facts = facts_of(model)
    assert facts["loss"] == "loss"
    assert facts["`learning_rate` of optimizer"] == "CosineDecay"
    assert facts["`learning_rate.initial_learning_rate` of optimizer"] == 0.1
    assert "of_this_process" not in str(facts)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), entropy)
    facts = facts_of(model)
    assert facts["`learning_rate` of optimizer"] == 0.05
    told = facts["loss"]
    assert (told["name"], told["from_logits"]) == ("BinaryCrossentropy", True)

    class Silent(keras.optimizers.SGD):
        def get_config(self):
            raise KeyError("scale")

    model.compile(Silent(0.1), "mse")
    assert facts_of(model) == {"loss": "mse", "optimizer": "Silent"}


def test_a_backup_of_before_has_the_number_alone():
    import weakref

    import tensorflow as tf

    from tf_hips.strategies.state import _Rounds

    rounds = _Rounds(tf.Variable(7, dtype=tf.int64), [], weakref.WeakKeyDictionary())
    rounds.deserialize("3")
    assert rounds.restored == 3
    rounds.deserialize(rounds.serialize())
    assert rounds.restored == 7


def refused_behind_the_join(server):
    """The configuration of a strategy that another rule of its server refuses."""
    from tf_hips import HierarchicalPS, config

    uplink = config.Uplink(server=server.address, site="a", deadline_s=20.0)
    run = config.Run(run="run", uplink=uplink)
    with pytest.raises(ConfigError, match="`robust_local` must be what server"):
        HierarchicalPS(intra="ps", robust_local="median", config=run)
    return run


def test_who_is_refused_behind_the_join_says_so():
    """Others wait for whoever has joined, also where its constructor then raises."""
    from tests.strategies.test_hierarchical_ps import serving

    with serving("run", parties=("a",)) as server:
        refused_behind_the_join(server)
        session = server._session
        assert session.ended is not None
        assert session.ended.startswith(
            "Site `a` left the run: ConfigError: `robust_local` must be"
        )


def test_a_notebook_may_try_again_what_is_refused_behind_the_join(monkeypatch):
    from tests.strategies.test_hierarchical_ps import serving
    from tf_hips import HierarchicalPS

    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with serving("run", parties=("a",)) as server:
        run = refused_behind_the_join(server)
        session = server._session
        assert session.ended is None
        assert session._away.reason(0).startswith("ConfigError: `robust_local` must be what")
        eventually(lambda: not session._presence.is_there(0), changed=session.changed)
        strategy = HierarchicalPS(intra="ps", config=run)
        assert strategy.gather_objects(1, "something") == [1]
        strategy.close()
        assert session.ended is None


def test_who_comes_back_and_is_refused_among_votes_leaves_the_run_to_the_next(monkeypatch, caplog):
    from tests.strategies.test_hierarchical_ps import serving
    from tf_hips.strategies import grouped

    def refuse():
        raise ProtocolError("other libraries")

    with serving("run", parties=("a",), rule="detox(r=1) >> mean") as server:
        first = come(server)
        first.client.close()  # as one that is killed
        with monkeypatch.context() as patched:
            patched.setattr(grouped, "replica_facts", refuse)
            with pytest.raises(ProtocolError, match="other libraries"):
                come(server)
        session = server._session
        assert "The run goes on without it" in caplog.text
        assert session.ended is None
        assert not session._members.children[0].has_left
        assert session._away.reason(0) == "ProtocolError: other libraries"
        come(server).close()


def test_who_leaves_its_place_to_another_process_says_why():
    from tests.strategies.test_hierarchical_ps import serving

    with serving("run", parties=("a",)) as server:
        strategy = come(server)
        strategy.config = dataclasses.replace(strategy.config, comes_back=True)
        strategy.close("ValueError: a gradient")
        session = server._session
        assert session.ended is None
        assert session._away.reason(0) == "ValueError: a gradient"
        again = come(server)
        assert session._away.reason(0) is None
        again.close("ValueError: before its first step")
        assert session._away.reason(0) == "ValueError: before its first step"
