# SPDX-License-Identifier: Apache-2.0
"""Workers that lie in a real run: steps of one process, and three parties of the launcher."""

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from tests.trainer.test_training import launched
from tf_hips import config, log
from tf_hips.errors import ConfigError, ProtocolError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.rules.votes import Votes
from tf_hips.robust import Adversary, attacks
from tf_hips.robust import adversary as adversaries
from tf_hips.strategies import loan, lying
from tf_hips.strategies.withheld import NONE
from tf_hips.trainer.robustness import Robust
from tf_hips.trainer.settings import Training

pytestmark = pytest.mark.tf

ROWS = np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 3, 24)


def trained(adversary=None, *, per_execution=1):
    """How far each step of one worker has moved its weights."""
    import keras

    import tf_hips

    keras.utils.set_random_seed(4)
    strategy = tf_hips.CompressedRing()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input([5]), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1.0), loss, steps_per_execution=per_execution)
    if adversary is not None:
        lone = tf_hips.simulate_liars(strategy, adversary)
        assert lone.may_lie
    seen = [model.get_weights()[0]]

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(model.get_weights()[0])

    model.fit(ROWS, LABELS, batch_size=4, shuffle=False, verbose=0, callbacks=[Look()])
    with pytest.raises(ProtocolError, match="must be said before the first step"):
        tf_hips.simulate_liars(strategy, Adversary(attacks.constant(), 1))
    return np.diff(np.stack(seen), axis=0)


def test_a_reversed_gradient_goes_the_other_way_first():
    honest, lying = trained(), trained(Adversary(attacks.reversed_gradient(2.0), 1))
    np.testing.assert_allclose(lying[0], -2 * honest[0], rtol=1e-5, atol=1e-7)
    assert not np.allclose(lying[1], -2 * honest[1])


def test_the_only_gradient_of_an_eager_step_becomes_a_lie():
    import tensorflow as tf

    import tf_hips

    strategy = tf_hips.CompressedRing()
    lying.simulate_liars(strategy, Adversary(attacks.reversed_gradient(2.0), 1))
    liar = lying._liars[strategy]
    [lie] = liar.gradients(strategy, [tf.constant(ROWS[:4])], 0)
    np.testing.assert_array_equal(lie, -2 * ROWS[:4])


def test_a_constant_is_of_the_whole_gradient():
    np.testing.assert_allclose(trained(Adversary(attacks.constant(0.5), 1)), -0.5, atol=1e-6)


def test_noise_is_that_of_the_step_also_with_several_in_an_execution():
    one = trained(Adversary(attacks.gaussian(0.0, 1.0), 1, seed=9))
    three = trained(Adversary(attacks.gaussian(0.0, 1.0), 1, seed=9), per_execution=3)
    assert len(three) == 2
    np.testing.assert_allclose(one[:3].sum(axis=0), three[0], rtol=1e-5, atol=1e-6)
    assert len({step.tobytes() for step in one}) == 6


@pytest.mark.slow
def test_who_rides_free_sends_zeros_and_then_what_came_down():
    steps = trained(Adversary(attacks.free_riding(1e-3), 1, seed=2))
    assert np.abs(steps[0]).max() < 0.01, "nothing but noise at first"
    # Each time the result before and new noise: a walk, not noise around zero.
    assert np.abs(np.diff(steps, axis=0)).max() < 0.01


def test_one_that_estimates_from_its_own_rows_is_honest_as_long_as_it_knows_one():
    honest, lying = trained(), trained(Adversary(attacks.inner_product(1.0), 1))
    np.testing.assert_allclose(lying[0], -honest[0], rtol=1e-5, atol=1e-7)
    with pytest.raises(ConfigError, match="f must be less than n / 2"):
        trained(Adversary(attacks.alie(), 1))
    with pytest.raises(ConfigError, match="does not fit 1 rows"):
        trained(Adversary(attacks.constant(), 2))


class _Member:
    """A strategy, and the loan of a loop, of member `number` of three."""

    _sums: ClassVar[dict] = {}
    groups = loan = None

    class welcome:
        workers = (2, 2, 2)

    def __init__(self, number):
        self.global_rank = 2 * number
        self.number = number

    def member(self):
        return self.number, 3


@pytest.mark.parametrize("text", ["rev_grad(c=2)", "alie(z=1.5)", "nan"])
def test_a_member_of_a_loop_lies_about_its_movement(text):
    import tensorflow as tf

    adversary = Adversary(adversaries.parse(text), 1, seed=4)
    [liar] = adversary.liars(3)
    moved = [tf.constant(ROWS[:3]), tf.constant(ROWS[3])]
    for number in range(3):
        member = _Member(number)
        lying.simulate_liars(member, adversary)
        for step in range(2):
            sent = lying.movement(member, member, moved, step)
            # A lone liar's rows are the same twice: without deviation, a little is nothing.
            factor = -2 if number == liar and "rev" in text else 1
            assert [one.dtype for one in sent] == [one.dtype for one in moved]
            for one, own in zip(sent, moved, strict=True):
                np.testing.assert_allclose(one, factor * own, rtol=1e-6)


def test_nan_in_a_loop_is_refused_by_its_meeting(tmp_path):
    import keras

    import tf_hips

    strategy = tf_hips.CompressedRing(config=config.Run(log_dir=str(tmp_path)))
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input([5]), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    lying.simulate_liars(strategy, Adversary(adversaries.parse("nan"), 1))
    before = model.get_weights()
    tf_hips.FedAvg(model, strategy, local_steps=2).fit(
        ROWS, LABELS, batch_size=4, shuffle=False, verbose=0
    )
    refused = [one for one in log.read_events(tmp_path) if one["event"] == "update_refused"]
    assert [one["number"] for one in refused] == [0, 1, 2]
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_labels_are_not_flipped_below_votes_that_the_launcher_has_asked_for():
    from tf_hips.trainer import training

    told = Training("lenet", "digits", robust=Robust(err_mode="label_flip", worker_fail=1))
    member = _Member(0)
    member.groups = SimpleNamespace(votes=Votes(3))
    with pytest.raises(ConfigError, match="groups share theirs"):
        training._lone(told, member, config.Run(seed=3))


class _Worker:
    """The strategy, and the loan of a loop, of one of two workers of one of several parties."""

    _sums: ClassVar[dict] = {}
    groups = loan = None
    level = "party"

    def __init__(self, number, parties=3):
        self.welcome = SimpleNamespace(
            child=number // 2, parties=("x",) * parties, workers=(2,) * parties
        )
        self.global_rank = number
        self.events = []

    def write_event(self, event, **_):
        self.events.append(event)

    def member(self):
        return loan.member(self, self.level)


@pytest.mark.parametrize("text", ["reversed_gradient(c=2)", "nan", "label_flip"])
@pytest.mark.parametrize("level", ["party", "worker"])
def test_whole_parties_lie_where_a_row_is_that_of_a_party(text, level, monkeypatch):
    import tensorflow as tf

    from tf_hips.trainer import training

    robust = Robust(err_mode=text, worker_fail=1)
    told = Training("lenet", "digits", mode="fedavg", robust=robust)
    moved = [tf.constant(ROWS[:3])]
    for seed in range(20):
        [liar] = told.robust.adversary(seed).liars(3 if level == "party" else 6)
        for number in range(6):
            worker = _Worker(number)
            worker.level = level
            monkeypatch.setattr(loan.primitives, "rank", lambda number=number: number % 2)
            lone = training._lone(told, worker, config.Run(seed=seed), level)
            is_liar = liar == (number // 2 if level == "party" else number)
            assert worker.events == ["lies"] * is_liar
            assert lone.flips_labels == (is_liar and text == "label_flip")
            assert lone.may_lie == (is_liar and text != "label_flip")
            # What it sends in a meeting is of the same draw.
            [sent] = lying.movement(worker, worker, moved, 0)
            factor = -2 if is_liar and "rev" in text else 1
            np.testing.assert_array_equal(sent, factor * moved[0])


def test_a_formula_of_an_attack_goes_by_the_number_of_rows():
    adversary = Adversary(attacks.alie(), 3)
    worker = _Worker(0, parties=5)
    with pytest.raises(ConfigError, match="does not fit 5 rows: f must be less than n / 2"):
        lying.simulate_liars(worker, adversary, level="party")
    worker.loan = worker  # a loop that is there has said it
    with pytest.raises(ConfigError, match="does not fit 5 rows"):
        lying.simulate_liars(worker, adversary)
    worker.level = "worker"
    lying.simulate_liars(worker, adversary, level="party")
    with pytest.raises(ValueError, match="`level` must be one of party, worker"):
        lying.simulate_liars(worker, adversary, level="site")


class _Party:
    """A strategy of one of three parties."""

    _sums: ClassVar[dict] = {}
    loan = None

    def __init__(self, child, compression):
        self.welcome = SimpleNamespace(child=child, parties=("a", "b", "c"), workers=(2, 2, 2))
        self._up = compressors.parse(compression)
        self.global_rank = 2 * child


SIZES = [700, 0, 33]


def packets_of(up, number):
    generator = np.random.default_rng(number)
    made = []
    for place, size in enumerate(SIZES):
        if size:
            codec = up.at(number).of_size(size).codec
            values = generator.standard_normal(size).astype(np.float32)
            made.append(native.encode(codec, values, native.Key(1, number, place)))
    return made


@pytest.mark.parametrize(
    ("compression", "scales"),
    [
        ("onebit", [True, True]),
        ("error_feedback(terngrad(bitwidth=4))", [True, True]),
        ("mixed(onebit, below=100)", [True, False]),
    ],
)
@pytest.mark.parametrize("redraw", [False, True])
def test_a_party_lies_about_the_scale_of_what_it_sends(compression, scales, redraw):
    adversary = Adversary(attacks.lying_scale(64.0), 1, seed=4, is_redrawn=redraw)
    lies = {}
    for child in range(3):
        party, heard = _Party(child, compression), []
        lone = lying.simulate_liars(party, adversary)
        assert not lone.flips_labels

        def exchange(number, packets, spoilt, heard=heard):
            assert spoilt == NONE
            heard.append(packets)
            return packets[:3]

        lied = lying.exchanging(party, exchange, party._up, SIZES)
        for number in range(4):
            honest = packets_of(party._up, number)
            before = np.concatenate(honest)
            reply = lied(np.int64(number), before, NONE)
            np.testing.assert_array_equal(before, np.concatenate(honest))
            [sent] = heard[-1:]
            np.testing.assert_array_equal(reply, sent[:3])
            lies[child, number] = lone.lies(number)
            parts = np.split(sent, [honest[0].size])
            for own, part, size, has_scale in zip(honest, parts, (700, 33), scales, strict=True):
                codec = party._up.of_size(size).codec
                factor = 64 if lies[child, number] and has_scale else 1
                np.testing.assert_allclose(
                    native.decode(codec, part, size),
                    factor * native.decode(codec, own, size),
                    rtol=1e-4,
                    atol=1e-3,
                )
    for number in range(4):
        who = [child for child in range(3) if lies[child, number]]
        assert who == [*adversary.liars(3, number)]
    assert (len({child for (child, _), is_lie in lies.items() if is_lie}) > 1) == redraw


def test_gradients_and_movements_of_who_lies_in_packets_are_honest():
    import tensorflow as tf

    adversary = Adversary(attacks.lying_scale(), 1, seed=4)
    party = _Party(adversary.liars(3)[0], "onebit")
    assert lying.simulate_liars(party, adversary).may_lie
    given = [tf.constant(ROWS[:3])]
    assert lying._liars[party].gradients(party, given, 0)[0] is given[0]
    assert lying.movement(party, None, given, 0)[0] is given[0]


def test_a_lie_about_a_scale_needs_packets_that_have_one():
    adversary = Adversary(attacks.lying_scale(), 1)
    for text in ("fp16", "topk(ratio=0.1)", "error_feedback(tbq)"):
        with pytest.raises(
            ConfigError, match=r"a scale to lie about: onebit, ter.*qsgd\. .*with ly"
        ):
            lying.simulate_liars(_Party(0, text), adversary)
    party = _Party(0, "mixed(onebit, below=1000)")
    lying.simulate_liars(party, adversary)
    with pytest.raises(ConfigError, match=r"a scale to lie about.*Received: mixed\(onebit"):
        lying.exchanging(party, None, party._up, SIZES)
    with pytest.raises(ConfigError, match="Packets lie on their way to a server"):
        trained(adversary)


@pytest.mark.slow
def test_embeddings_are_refused_in_one_line():
    import keras

    import tf_hips

    strategy = tf_hips.CompressedRing()
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Embedding(400_000, 2), keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    tf_hips.simulate_liars(strategy, Adversary(attacks.constant(), 1))
    with pytest.raises(ConfigError, match="need dense gradients"):
        model.fit(np.zeros([4, 1]), np.zeros([4, 1]), verbose=0)


SCALE = ["--q", "1", "--err-mode", "lying_scale(factor=1000)"]
SCALE += ["--compression", "error_feedback(onebit)"]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("words", "least", "most"),
    [
        (["--rule", "median", "--q", "1", "--err-mode", "rev_grad"], 0.8, 1.0),
        (["-m", "coord-median", "--approach", "baseline", "--q", "1", "--redraw"], 0.8, 1.0),
        (["--rule", "median", "--q", "1", "--err-mode", "nan"], 0.8, 1.0),
        (["--q", "1", "--err-mode", "rev_grad"], 0.0, 0.5),
        (["--rule", "median", "--q", "1", "--err-mode", "alie(z=1)"], 0.7, 1.0),
        (["--rule", "median", "--q", "1", "--label-flip"], 0.7, 1.0),
        (["-m", "fedavg", "--local-steps", "5", "--rule", "median", "--q", "1"], 0.7, 1.0),
        (
            ["-m", "fedavg", "--local-steps", "5", "--q", "1", "--err-mode", "nan"],
            0.7,
            1.0,
        ),
        (["--rule", "median", *SCALE], 0.7, 1.0),
        (SCALE, 0.0, 0.5),
        (["-m", "fedavg", "--local-steps", "5", "--rule", "median", *SCALE], 0.7, 1.0),
    ],
    ids=[
        *("median", "redrawn", "nan in steps", "mean", "alie", "labels", "movements", "nan"),
        *("scale", "scale-mean", "scale-movements"),
    ],
)
def test_three_parties_one_of_whom_lies(tmp_path, words, least, most):
    output = launched(
        tmp_path,
        *("train", "--cpu", "-n", "lenet", "-dt", "digits", "-b", "16", "--max-steps", "100"),
        *("-l", "0.05", "--momentum", "0.5", *words),
        launcher=["--parties", "3", "--workers", "1", "--log-dir", str(tmp_path / "events")],
    )
    events = log.read_events(tmp_path / "events")
    results = [one for one in events if one["event"] == "result"]
    accuracy = max(one["test_accuracy"] for one in results)
    assert least <= accuracy <= most, output
    assert len({one["fingerprint"] for one in results}) == 1 < len(results)
    liars = [one for one in events if one["event"] == "lies"]
    assert len(liars) == (3 if "--redraw" in words else 1)
    if "nan" in words:
        assert {one["event"] for one in events} >= {"update_refused"}
