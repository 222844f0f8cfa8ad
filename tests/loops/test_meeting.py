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
    [{"samples": -8}, {"steps": 2.0}, {"steps": True}, {"before": 1 << 60}, {"ends": 1},
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
