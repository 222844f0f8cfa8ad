# SPDX-License-Identifier: Apache-2.0
"""What a party says that lies below a robust rule: in a meeting, and between two `fit`s."""

import types

import numpy as np
import pytest

from tf_hips.errors import ProtocolError

pytestmark = pytest.mark.tf

SITES = tuple("abcde")
NAMES = [[f"party `{site}`"] for site in SITES]
VOCABULARY: dict = {}


def _doubted(sites=SITES, workers=(1,) * 5):
    from tf_hips.strategies.agreeing import Doubted

    events: list = []

    class Writer:
        def write(self, event, **values):
            events.append((event, values["sites"]))

    return Doubted(sites, workers, Writer().write), events


def _fields(**more):
    from tf_hips.loops.meeting import Told

    return Told(2, 16, **more).fields


def _read(gathered, parties, own_round=4):
    from tf_hips.loops.hearing import read_all

    return read_all(gathered, "abcde", VOCABULARY, 0, parties, own_round)


@pytest.mark.parametrize(
    "lie",
    [3, [4], [4, None], ["4", {}], [5, _fields], [4, {"steps": -1}], [4, {"words": {"x": 1}}],
     [4, {"statistics": [1]}], [4, {"steps": 1 << 31}], [4, {"samples": 10**5000}],
     [4, {"samples": 2 * 10**15}]],
)  # fmt: skip
def test_a_party_that_says_what_no_worker_says_is_absent_and_named(lie):
    if isinstance(lie, list) and lie[1:] == [_fields]:
        lie = [5, _fields()]
    elif isinstance(lie, list) and len(lie) == 2 and lie[1]:
        lie = [4, _fields() | lie[1]]
    parties, events = _doubted()
    gathered = [[4, _fields()] for _ in SITES]
    gathered[2] = lie
    told = _read(gathered, parties)
    assert [one.is_absent for one in told] == [False, False, True, False, False]
    assert events == [("parties_differ", ["c"])]
    with pytest.raises(ProtocolError):
        _read(gathered, None)


def test_who_is_in_another_round_than_most_hears_it_alone():
    parties, _ = _doubted()
    gathered = [[4, _fields()] for _ in SITES]
    with pytest.raises(ProtocolError, match="most parties: 4; this worker: 5"):
        _read(gathered, parties, own_round=5)
    gathered = [[4 + place // 2, _fields()] for place in range(5)]
    for own in (4, 5, 6):
        with pytest.raises(ProtocolError, match=r"party a: 4; .*party e: 6; this worker"):
            _read(gathered, parties, own_round=own)


def test_a_party_of_several_workers_is_absent_as_a_whole():
    parties, events = _doubted(("a", "b", "c"), (1, 2, 2))
    gathered = [[4, _fields()] for _ in SITES]
    gathered[4] = [3, _fields()]
    told = _read(gathered, parties)
    assert [one.is_absent for one in told] == [False, False, False, True, True]
    assert events == [("parties_differ", ["c"])]


def _check_samples(idle, party, parties):
    from tf_hips.loops.hearing import check_samples
    from tf_hips.loops.meeting import Told, met

    told = [Told(0, 0, ends=True) if place in idle else Told(2, 16) for place in range(5)]
    meeting = met(told, [1] * 5, "samples", True, None)
    check_samples(meeting, NAMES, party, parties)


def test_who_has_no_rows_at_first_ends_nobody_elses_training():
    parties, events = _doubted()
    _check_samples((4,), 0, parties)
    assert events == [("parties_differ", ["e"])]
    with pytest.raises(ValueError, match=r"none of party `e`$"):
        _check_samples((4,), 4, parties)
    with pytest.raises(ValueError, match=r"none of party `a`, party `b`, party `e`$"):
        _check_samples((0, 1, 4), 2, parties)
    with pytest.raises(ValueError, match=r"none of party `e`$"):
        _check_samples((4,), 0, None)


class Run:
    """A loop that has trained alone, and is then told that it is party 1 of five."""

    def __init__(self, monkeypatch):
        import keras

        from tests.strategies import training
        from tf_hips.loops import FedAvg
        from tf_hips.loops.bearing import Bearing
        from tf_hips.strategies import CompressedRing

        self.strategy = CompressedRing()
        with self.strategy.scope():
            self.model = training.build(keras.optimizers.SGD(0.05))
        self.loop = FedAvg(self.model, self.strategy, local_steps=2)
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        self.loop.fit(*training.data(32), **options)
        self.ended = self.model.get_weights()
        self.events: list = []
        self.lies: dict = {}
        welcome = types.SimpleNamespace(
            parties=SITES, workers=(1,) * 5, child=1, paths=SITES, bears_liars=True,
            guards=(("", "median(f=1)", None),), robust=None, looks_at_leaves=False,
        )  # fmt: skip
        self.loop._bearing = Bearing(welcome)
        for name, value in (
            ("_together", lambda: welcome),
            ("write_event", lambda event, **values: self.events.append((event, values))),
            ("reduce_exactly", lambda *_, **__: pytest.fail("nothing may be summed")),
            ("gather_objects", lambda mine, label: [self.lies.get(n, mine) for n in range(5)]),
        ):
            monkeypatch.setattr(self.strategy, name, value)

    def differ(self):
        return [values["sites"] for event, values in self.events if event == "parties_differ"]


@pytest.fixture(name="run")
def _run(monkeypatch):
    return Run(monkeypatch)


def test_one_liar_ends_no_meeting(run):
    run.loop.round = 0
    run.lies = {4: [0, _fields() | {"steps": 0, "samples": 0, "ends": True, "words": {"loss": 1}}]}
    meeting, _ = run.loop.talk(ends=False)
    assert [party[0].is_absent for party in meeting.parties] == [False] * 4 + [True]
    run.lies = {4: [0, _fields() | {"steps": 0, "samples": 0, "ends": True}]}
    run.loop._counter.assign([16, 2])
    run.loop.talk(ends=False)
    assert run.differ() == [["e"], ["e"]]


def _set(run, value):
    run.model.set_weights([np.full_like(one, value) for one in run.ended])


@pytest.mark.parametrize("lie", [[True, [1, 2, 3, 4]], [False, []], [True, "x"], 3, [1, []]])
def test_one_liar_undoes_nothing_that_all_others_have_set(run, lie):
    _set(run, 7.0)
    run.lies = {3: lie}
    run.loop.agree()
    for one in (*run.model.get_weights(), *(each.numpy() for each in run.loop.reference)):
        assert (one == 7.0).all()
    assert {site for sites in run.differ() for site in sites} == {"d"}


def test_who_has_set_other_weights_than_most_hears_it_alone(run):
    from tf_hips.strategies.logs import digests

    others = [True, digests(run.model.trainable_variables)]
    run.lies = dict.fromkeys((0, 2, 3, 4), others)
    _set(run, 7.0)
    with pytest.raises(ProtocolError, match="those of this worker are not those of most parties"):
        run.loop.agree()


@pytest.mark.parametrize("num_others", [2, 3, 4])
def test_where_more_differ_than_may_lie_all_go_back(run, num_others):
    run.lies = {place: [True, [place] * 4] for place in (0, 2, 3, 4)[:num_others]}
    _set(run, 7.0)
    run.loop.agree()
    for one, before in zip(run.model.get_weights(), run.ended, strict=True):
        np.testing.assert_array_equal(one, before)


def test_in_the_middle_of_a_round_members_differ(run):
    run.lies = {place: [False, [place] * 4] for place in (0, 2, 3)}
    _set(run, 7.0)
    run.loop.agree()
    assert (run.model.get_weights()[0] == 7.0).all()
    for one, before in zip(run.loop.reference, run.ended, strict=True):
        np.testing.assert_array_equal(one.numpy(), before)
