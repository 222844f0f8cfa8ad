# SPDX-License-Identifier: Apache-2.0
"""What workers stand for when they meet."""

import pytest

pytestmark = pytest.mark.tf


def _meeting(parties, weighting="samples", *, is_equal=False):
    from tf_hips.loops.meeting import Meeting

    return Meeting(tuple(tuple(party) for party in parties), weighting, is_equal)


def test_what_is_told_arrives():
    import json

    from tf_hips.loops.meeting import Told, split

    told = Told(3, 24, 8, True, False, True, False, (1, 2), {"effective": 2.5})
    assert Told.read(json.loads(json.dumps(told.fields))) == told
    assert split([told] * 3, (2, 1)) == ((told, told), (told,))


@pytest.mark.parametrize(
    "change",
    [{"samples": -8}, {"samples": 10**15 + 1}, {"before": 2 * 10**15}, {"steps": 2.0},
     {"steps": True}, {"before": 1 << 60}, {"ends": 1},
     {"statistics": "x"}, {"words": {"loss": float("nan")}}, {"words": 3}, {"more": 1}],
)  # fmt: skip
def test_what_no_worker_says_is_refused(change):
    from tf_hips.errors import ProtocolError
    from tf_hips.loops.meeting import Told

    fields = Told(3, 24).fields
    with pytest.raises(ProtocolError, match="What worker 2 says in a meeting must have steps,"):
        Told.read(fields | change, "worker 2")
    with pytest.raises(ProtocolError, match="must have steps"):
        Told.read({name: value for name, value in fields.items() if name != "ends"})


def test_a_party_claims_no_more_than_its_server_takes():
    from tf_hips.loops.meeting import Told
    from tf_hips.ps.transport.wire import MAX_WEIGHT, weight_from_text

    most = Told.read(Told(3, 10**15, 10**15).fields)
    meeting = _meeting([[most, most], [Told(3, 24)]])
    assert weight_from_text(repr(meeting.weight(0))) == MAX_WEIGHT
    assert meeting.party_shares() == [MAX_WEIGHT / (MAX_WEIGHT + 24), 24 / (MAX_WEIGHT + 24)]


def _words(loop_of):
    """Fields of a worker that says what its loop declares, and the vocabulary of that."""
    import types

    from tf_hips.esync.rule import Pace
    from tf_hips.loops import ESync, FedAvg
    from tf_hips.loops.meeting import Told

    if loop_of == "fedavg":
        loop, words = FedAvg.__new__(FedAvg), {"effective": 2.0}
        loop._normalises, loop._controls = True, None
    else:
        loop, words = ESync.__new__(ESync), {"effective": 2, "step_s": 0.1, "local_s": 1.0}
        loop._paced = types.SimpleNamespace(pace=Pace())
        words |= {"loss": -3.0, "pace": Pace().text, "span_s": 0.0}
    return Told(3, 24, statistics=(5, 6), words=words).fields, loop.vocabulary()


HUGE = 10**400


@pytest.mark.parametrize(
    ("loop", "change", "told"),
    [
        ("fedavg", {"words": {"effective": "x"}}, "`effective` that is a number from 0 to .*: x"),
        ("fedavg", {"words": {"effective": HUGE}}, "`effective` that is a number .*: 1000"),
        ("fedavg", {"words": {"effective": -1}}, "`effective` that is a number .*: -1"),
        ("fedavg", {"words": {"effective": True}}, "`effective` that is a number .*: True"),
        ("fedavg", {"words": {"effective": None}}, "`effective` that is a number .*: None"),
        ("fedavg", {"words": {}}, "`effective` that is a number .*: nothing"),
        ("fedavg", {"words": {"effective": 1, "loss": 1}}, "one. Received: `loss`"),
        ("fedavg", {"steps": 1 << 31}, "steps below 2.31"),
        ("fedavg", {"samples": 10**5000}, "a number that is too long"),
        ("fedavg", {"statistics": []}, "a digest for each of 2 statistics .*: 0"),
        ("esync", {"loss": HUGE}, "`loss` that is a number .*, or null. Received: 1000"),
        ("esync", {"effective": "x"}, "`effective` that is"),
        ("esync", {"step_s": [1]}, "`step_s` that is"),
        ("esync", {"span_s": -1.0}, "`span_s` that is"),
        ("esync", {"local_s": None}, "`local_s` that is"),
        ("esync", {"pace": 3}, "`pace` that is a text. Received: 3"),
        ("esync", "pace", "`pace` that is a text. Received: nothing"),
    ],
)
def test_words_that_a_loop_does_not_have_are_refused_by_name(loop, change, told):
    from tf_hips.errors import ProtocolError
    from tf_hips.loops.hearing import read_all
    from tf_hips.loops.meeting import Told

    fields, vocabulary = _words(loop)
    assert read_all([[4, fields]] * 2, "ab", vocabulary, 2, None, 4) == [Told.read(fields)] * 2
    said = dict(fields)
    if isinstance(change, str):
        said["words"] = {name: one for name, one in fields["words"].items() if name != change}
    elif loop == "esync":
        said["words"] = fields["words"] | change
    else:
        said |= change
    with pytest.raises(ProtocolError, match=f"(?s)What party `east` says .*{told}"):
        read_all([[4, fields], [4, said]], ["party `west`", "party `east`"], vocabulary, 2, None, 4)


@pytest.mark.parametrize("told", [3, [4], [4, None], ["4", {}], {"4": {}}, [HUGE, 7]])
def test_what_is_no_round_and_its_words_is_refused_by_name(told):
    from tf_hips.errors import ProtocolError
    from tf_hips.loops.between import read_ends
    from tf_hips.loops.hearing import read_all

    fields, vocabulary = _words("fedavg")
    names = ["party `west`", "party `east`"]
    with pytest.raises(ProtocolError, match="What party `east` says in a meeting must"):
        read_all([[4, fields], told], names, vocabulary, 2, None, 4)
    with pytest.raises(ProtocolError, match="What party `east` says between two `fit`s must"):
        read_ends([[True, [1]], told], names, None)
    assert read_ends([[True, [1]], None], names, None) == [(True, [1]), None]
    with pytest.raises(ProtocolError, match=r"in the same round.*\[4, 5\]"):
        read_all([[4, fields], [5, fields]], names, vocabulary, 2, None, 4)


@pytest.mark.parametrize(
    ("weighting", "parties", "workers"),
    [("samples", [0.75, 0.25], [2 / 3, 1 / 3]), ("uniform", [0.5, 0.5], [0.5, 0.5]),
     ("workers", [2 / 3, 1 / 3], [0.5, 0.5])],
)  # fmt: skip
def test_shares(weighting, parties, workers):
    from tf_hips.loops.meeting import Told

    meeting = _meeting([[Told(2, 16), Told(1, 8)], [Told(4, 8)]], weighting)
    assert meeting.party_shares() == pytest.approx(parties)
    assert meeting.worker_shares(0) == pytest.approx(workers)
    assert meeting.worker_shares(1) == [1.0]


@pytest.mark.parametrize(
    ("weighting", "parties"),
    [("samples", [0.875, 0.125]), ("uniform", [0.5, 0.5]), ("workers", [2 / 3, 1 / 3])],
)
def test_rows_of_meetings_of_a_party_alone_count_over_parties(weighting, parties):
    from tf_hips.loops.meeting import Told

    idle = Told(0, 0, before=8)  # since the last meeting of its party
    meeting = _meeting([[Told(2, 16, before=32), idle], [Told(4, 8)]], weighting)
    assert meeting.party_shares() == pytest.approx(parties)
    assert meeting.worker_shares(0) == [1.0, 0.0]


def test_who_stands_for_nothing():
    from tf_hips.loops.meeting import Told

    nan, idle, away = Told(2, 16, is_finite=False), Told(0, 0), Told(2, 16, takes_part=False)
    meeting = _meeting([[nan, Told(1, 8)], [idle], [away], [Told.read(None)]])
    assert meeting.party_shares() == [1.0, 0.0, 0.0, 0.0]
    assert meeting.worker_shares(0) == [0.0, 1.0]
    assert meeting.worker_shares(1) == [0.0]
    assert [meeting.is_refused(party) for party in range(4)] == [False] * 4
    # Workers that are equal are refused together.
    equal = _meeting([[nan, Told(1, 8)], [Told(1, 8)]], is_equal=True)
    assert equal.party_shares() == [0.0, 1.0]
    assert [equal.is_refused(party) for party in range(2)] == [True, False]
    drawn = Told(2, 16, is_finite=False, takes_part=False)  # who is not asked is not refused
    assert not _meeting([[drawn], [idle]], is_equal=True).is_refused(0)
    assert not sum(_meeting([[nan], [idle]]).party_shares())


def test_rows_of_earlier_meetings_in_the_party_count_for_it():
    from tf_hips.loops.meeting import Told

    refused = Told(2, 16, before=32, is_finite=False)
    meeting = _meeting([[refused], [Told(2, 16, before=16)]])
    assert meeting.party_shares() == [0.5, 0.5]
    assert meeting.worker_shares(0) == [0.0]


def test_the_last_meeting():
    from tf_hips.loops.meeting import Told

    ended, going = Told(0, 0, ends=True), Told(1, 8)
    assert not _meeting([[ended], [going]]).is_last
    assert _meeting([[ended], [ended]]).is_last
    assert _meeting([[Told(1, 8, ends=True, stops=True)], [going]]).is_last
    # Who is absent may be gone: nobody waits for its end.
    assert _meeting([[ended], [Told.read(None)]]).is_last


def test_the_last_meeting_is_idle_where_nothing_is_left_to_exchange():
    import dataclasses
    import types

    from tf_hips.loops.meeting import Told

    needs_three = types.SimpleNamespace(
        is_enough=lambda rows: sum(rows) >= 3, void=lambda rows: frozenset()
    )
    ended = Told(0, 0, ends=True)
    for before in (0, 8):  # of a meeting of its party alone
        meeting = _meeting([[ended], [ended], [ended], [dataclasses.replace(ended, before=before)]])
        meeting = dataclasses.replace(meeting, bearing=needs_three)
        assert meeting.is_last and meeting.is_void
        assert meeting.is_idle == (before == 0)
    assert not _meeting([[Told(1, 8, ends=True)], [ended]]).is_idle
