# SPDX-License-Identifier: Apache-2.0
"""What must be equal on all workers, where some parties lie below a robust rule."""

import json
import types
from typing import Any

import numpy as np
import pytest

from tf_hips.errors import ProtocolError

pytestmark = pytest.mark.tf

SITES = ("a", "b", "c", "d", "e")


class Fake:
    """As much of a strategy as a callback of `fit` asks: five parties of one worker each."""

    def __init__(self, rule: str, told: dict[int, Any]) -> None:
        from tf_hips.ps import rules
        from tf_hips.strategies.meetings import Meetings

        self.rule, self.loan = rules.parse(rule), None
        self._told = told
        self.bears_liars, self.is_back = self.rule.is_robust, False
        self.parties, self.workers = SITES, (1,) * len(SITES)
        self.child = 2
        self.paths, self.looks_at_leaves = SITES, self.rule.sketch is not None
        self.events: list[dict[str, Any]] = []
        meetings: Any = Meetings.__new__(Meetings)
        meetings.is_equal = lambda variables: False
        meetings.first_sync = lambda values: values
        self.beginning = types.SimpleNamespace(meetings=meetings)
        untold = types.SimpleNamespace(check=lambda model: None, follow=lambda *values: None)
        self._fitting = types.SimpleNamespace(untold=untold)

    def _together(self) -> Any:
        return self

    def _is_alone(self) -> bool:
        return False

    def write_event(self, event: str, **values: Any) -> None:
        self.events.append({"event": event, **values})

    def gather_objects(self, value: Any, label: str) -> list[Any]:
        """What this worker says is what all others say, but for those of `told`."""
        if label.startswith("sketches of "):
            return [self._sketch(place, value) for place in range(len(SITES))]
        return [self._told.get(place, value) for place in range(len(SITES))]

    def _sketch(self, place: int, own: Any) -> Any:
        """Those who differ have something else, and as different ones as they have told."""
        other = self._told.get(place)
        if not isinstance(other, list) or len(other) < 2 or not isinstance(other[1], list):
            return own if other is None else other
        return [own[0], [[number + sum(other[1]) for number in row] for row in own[1]]]


def closing_of(rule: str, told: dict[int, Any]) -> Any:
    """The callback of one worker; `{}` in what others have told stands for its own facts."""
    import keras

    from tf_hips.strategies.closing import Closing

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="last")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    closing = Closing(Fake(rule, told), {"epochs": 3}, 1)
    closing.set_model(model)
    closing.set_params({"steps": 7})
    facts = {**closing._facts, "number of steps in an epoch": 7}
    closing._strategy._told = {
        place: [facts if x == {} else x for x in one] if isinstance(one, list) else one
        for place, one in told.items()
    }
    return closing


OTHERS = [False, [1, 2, 3, 4]]
RULE = "median(f=1)"


@pytest.mark.parametrize("liar", [0, 3])
def test_one_that_differs_does_not_end_the_epoch_of_the_others(liar: int) -> None:
    closing = closing_of(RULE, {liar: OTHERS})
    closing.on_epoch_end(1)
    [event] = closing._strategy.events
    assert event["event"] == "parties_differ"
    assert event["sites"] == [SITES[liar]]
    assert event["what"] == "the model after epoch 2"


@pytest.mark.parametrize("garbage", [3, "x", [], [False], [1, []], [False, ["x"]], [False, None]])
def test_what_no_worker_says_does_not_either(garbage: Any) -> None:
    closing = closing_of(RULE, {4: garbage})
    closing.on_epoch_end(0)
    assert [event["sites"] for event in closing._strategy.events] == [["e"]]


def test_who_differs_from_most_hears_it_alone() -> None:
    closing = closing_of(RULE, dict.fromkeys((0, 1, 3), OTHERS))
    with pytest.raises(ProtocolError, match="of this worker is not that of most parties"):
        closing.on_epoch_end(0)


def test_without_a_majority_or_a_robust_rule_it_is_an_error_of_all() -> None:
    closing = closing_of(RULE, {0: OTHERS, 1: OTHERS, 4: [False, [5, 6]]})
    with pytest.raises(ProtocolError, match="of party c is not that of party a"):
        closing.on_epoch_end(0)
    closing = closing_of("mean", {3: OTHERS})
    with pytest.raises(ProtocolError, match="of worker 3 is not that of worker 0"):
        closing.on_epoch_end(0)
    assert not closing._strategy.events


@pytest.mark.parametrize("garbage", [3, "x", [], [False], [1, []], [False, ["x"]], [False, None]])
def test_where_all_are_believed_what_no_worker_says_is_an_error_in_words(garbage: Any) -> None:
    told = r"Of `whether to stop after an epoch` every worker must tell .* of worker 4"
    with pytest.raises(ProtocolError, match=told):
        closing_of("mean", {4: garbage}).on_epoch_end(0)
    told = r"Of `the length of `fit`` every worker must tell .* of worker 4"
    with pytest.raises(ProtocolError, match=told):
        closing_of("mean", {4: garbage}).on_train_begin()


def test_parties_below_servers_without_a_robust_rule_doubt_as_those_below_one() -> None:
    """What a leaf of `west` says reaches those of `east`, which has no such rule, in one gather."""
    closing = closing_of("mean", {3: OTHERS})
    closing._strategy.bears_liars = True  # some server of the tree has a robust rule
    closing._strategy.robust = None  # and this party's own has none
    closing.on_epoch_end(1)
    assert [event["sites"] for event in closing._strategy.events] == [["d"]]


def test_the_length_of_fit_is_that_of_most_parties() -> None:
    other = [[9, 0, 3], None, [], {}]
    closing = closing_of(RULE, {0: other})
    closing._strategy.beginning.meetings.is_equal = lambda variables: True
    weights = [[7, 0, 3], [1, 2], [], {}]  # others have loaded weights, and this worker has not
    with pytest.raises(ProtocolError, match="of this worker is not that of most parties"):
        closing_of(RULE, dict.fromkeys((1, 2, 4), weights)).on_train_begin()
    closing_of(RULE, {1: weights}).on_train_begin()
    closing.on_train_begin()
    assert {event["what"] for event in closing._strategy.events} >= {"the steps of `fit`"}
    with pytest.raises(ValueError, match="this worker: 7 steps"):
        closing_of(RULE, dict.fromkeys((0, 1, 2), other)).on_train_begin()
    with pytest.raises(ValueError, match="worker 0: 9 steps"):
        closing_of("mean", {0: other}).on_train_begin()
    with pytest.raises(ValueError, match="worker 0: epochs 0 to 4"):
        closing_of("mean", {0: [[7, 0, 4], None, [], {}]}).on_train_begin()
    closing = closing_of(RULE, {1: [["x"], None]})
    closing.on_train_begin()
    assert closing._strategy.events[0]["sites"] == ["b"]


def beginning(steps: int | None, last: int = 3) -> list[Any]:
    return [[steps, 0, last], None, [], {}]


@pytest.mark.parametrize(
    ("steps", "odd"),
    [
        ([None, 7, 7, 7, 7], []),
        ([7, 7, None, 7, 9], [("the steps of `fit`", "e")]),
        ([7, None, None, None, 7], []),
        # One liar and one that knows it: which is which nobody can say, and none needs to.
        ([7, None, None, None, 9], []),
        ([9, None, 7, 7, 9], []),
        ([None] * 5, []),
    ],
)
def test_a_number_of_steps_that_is_not_known_differs_from_none(
    steps: list[int | None], odd: list[tuple[str, str]]
) -> None:
    told = {place: beginning(count) for place, count in enumerate(steps)}
    closing = closing_of(RULE, told)
    closing.on_train_begin()
    events = closing._strategy.events
    assert [(event["what"], site) for event in events for site in event["sites"]] == odd


def test_who_trains_other_epochs_is_named_whatever_is_known_of_steps() -> None:
    closing = closing_of(RULE, {0: beginning(None), 1: beginning(None, 4)})
    closing.on_train_begin()
    [event] = closing._strategy.events
    assert (event["what"], event["sites"]) == ("the epochs of `fit`", ["b"])
    with pytest.raises(ValueError, match=r"party a: 9 steps.*party c: 8 steps"):
        closing_of(RULE, dict(enumerate(map(beginning, (9, 9, 8, 8, 7))))).on_train_begin()


def test_who_lies_each_time_is_named_once_and_who_lies_anew_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tf_hips.strategies import agreeing

    lines: list[Any] = []
    monkeypatch.setattr(agreeing.log, "warning", lambda text, *rest: lines.append(rest))
    closing = closing_of(RULE, {})
    strategy = closing._strategy

    def ends(*liars: int) -> None:
        strategy._told = dict.fromkeys(liars, "x")
        closing.on_epoch_end(0)

    for _ in range(5):
        ends(3)
    ends(3, 1)
    assert [event["sites"] for event in strategy.events] == [["d"], ["b"]]
    for _ in range(100):  # rows of their own
        ends()
        ends(3)
    assert [event["sites"] for event in strategy.events[2:]] == [["d"]] * 6  # of rows 2 to 64
    assert len(lines) == len(strategy.events)
    another = closing_of(RULE, {3: "x"})
    another.on_epoch_end(0)
    assert len(another._strategy.events) == 1


def test_a_payload_that_is_no_list_is_named_once_for_a_row() -> None:
    from tf_hips.strategies.agreeing import Doubted, from_texts

    events: list[Any] = []
    parties = Doubted("ab", (1, 1), lambda event, **values: events.append(values["sites"]))
    for text in ("{}", "[]", "[1]", "{}"):
        from_texts([("[1]", 1, "a"), (text, 1, "b")], "x", parties)
    assert events == [["b"], ["b"]]


def test_a_party_has_one_vote_however_many_workers_it_claims() -> None:
    from tf_hips.strategies.agreeing import MOST, Doubted, compared

    events: list[Any] = []
    parties = Doubted("abc", (5, 1, 1), lambda event, **values: events.append(values["sites"]))
    found = compared(parties, [[9]] * 5 + [[1], [1]], [1], lambda one: one[0], "x")
    assert found == [(MOST, 1), ("this worker", 1)]
    # One whose own workers differ has none.
    compared(parties, [[1]] * 4 + [[9], [1], [1]], [1], lambda one: one[0], "x")
    assert events == [["a"]]  # once for a row


def test_a_payload_that_is_no_list_of_its_workers_is_taken_for_absent() -> None:
    from tf_hips.strategies.agreeing import Doubted, as_texts, from_texts

    payloads = [b"[1]", b"\xff", b"[" * 100_000, b"[1, 2]", b"{}", None]
    told = list(zip(as_texts(payloads, None), (1,) * 6, "abcdef", strict=True))
    events: list[Any] = []
    parties = Doubted("abcdef", (1,) * 6, lambda event, **values: events.append(values["sites"]))
    assert from_texts(told, "x", parties) == [1, None, None, None, None, None]
    assert events == [["b", "c", "d", "e"]]
    for place in (1, 2, 3, 4):
        with pytest.raises(ProtocolError, match=f"`x` of party `{told[place][2]}` must be"):
            from_texts([told[0], told[place]], "x", None)
    assert from_texts([(json.dumps([1]), 1, "a"), (None, 2, "b")], "x", None) == [1, None, None]


def test_a_sum_goes_on_without_a_payload_of_another_length() -> None:
    from tf_hips.strategies.agreeing import Doubted
    from tf_hips.strategies.failures import Failures
    from tf_hips.strategies.over_parties import ExactReduction

    events: list[Any] = []
    doubted = Doubted("abc", (2, 1, 1), lambda event, **values: events.append(values["sites"]))

    def combined(payloads: list[bytes | None], parties: Any, operation: str = "mean") -> Any:
        exact = ExactReduction(lambda *_: payloads, Failures(), lambda: (2, 1, 1), lambda: parties)
        kinds = [(np.dtype(np.float32), False, 2)]
        packed = np.zeros(8, np.uint8)
        return exact._combine("x", [operation], kinds, packed).view(np.float32).tolist()

    own = np.array([1.0, 2.0], np.float32).tobytes()
    assert combined([own[:4], own, own], doubted) == [4.0, 8.0]  # two of four workers are present
    combined([own[:4], own, own], doubted)
    assert events == [["a"]]  # once for a row
    with pytest.raises(ProtocolError, match="of 4, 8, 8 bytes"):
        combined([own[:4], own, own], None)
    with pytest.raises(ProtocolError, match="of 4, 4, 8 bytes"):
        combined([own[:4], own[:4], own], doubted)
    with pytest.raises(ProtocolError, match="without 1 of 3"):
        combined([own[:4], own, own], doubted, "whole")
