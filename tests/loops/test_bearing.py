# SPDX-License-Identifier: Apache-2.0
"""When loops below robust rules end, and who can stop them: scripted meetings, no sockets."""

import types

import pytest

pytestmark = pytest.mark.tf

FLAT = tuple("abcde")
TREE = ("west/a", "west/b", "west/c", "east/d", "east/e", "east/f", "south/g", "south/h", "south/i")


def _bearing(rule, paths=FLAT, quorum=None, **between):
    """Of a tree whose party servers, by name, have a robust rule and children to wait for."""
    from tf_hips.loops.bearing import Bearing
    from tf_hips.ps import rules

    robust = rule if rules.parse(rule).is_robust else None
    guards = [("", robust, quorum)] if robust or quorum else []
    guards += [(site, *one) for site, one in between.items()]
    is_robust = any(one for _, one, _ in guards)
    welcome = types.SimpleNamespace(paths=paths, guards=tuple(guards), bears_liars=is_robust)
    return Bearing(welcome)


def _meeting(told, bearing, drawn=None):
    from tf_hips.loops.meeting import met

    return met(told, [1] * len(told), "samples", True, bearing, drawn)


def _said(ends=False, steps=2, **more):
    from tf_hips.loops.meeting import Told

    return Told(steps, 8 * steps, ends=ends, **more)


@pytest.mark.parametrize(
    ("rule", "children", "quorum", "rows", "f"),
    [
        ("median", 5, None, 3, 2),
        ("median", 2, None, 1, 0),  # nobody is borne, and none is asked for
        ("median(f=0)", 5, None, 1, 0),
        ("median(f=2)", 5, None, 5, 2),
        ("krum", 9, None, 5, 3),
        ("krum(f=1) >> fedavg(1.0)", 9, None, 5, 1),
        ("nnm >> krum", 9, None, 5, 3),
        ("bucketing(s=2) >> median", 9, None, 5, 2),
        ("clip >> mean", 5, None, 1, 0),
        ("median", 5, 3, 3, 1),
        ("median", 5, 2, 1, 0),
        ("sketched >> krum", 7, None, 5, 2),
        ("detox(r=3) >> median", 9, None, 4, 3),
        ("detox(r=3, q=2) >> median", 9, None, 3, 2),
        ("detox(r=3) >> median", 10, None, 3, 2),  # of a group of one, one liar is the majority
        ("mean", 5, None, 0, 0),
    ],
)
def test_what_a_rule_needs(rule, children, quorum, rows, f):
    from tf_hips.loops.bearing import Need, need_of
    from tf_hips.ps import rules

    assert need_of(rules.parse(rule), children, quorum) == Need(rows, f)


def test_a_quorum_is_that_of_its_server():
    flat, below = _bearing("median", quorum=3), _bearing("median", TREE, west=("median", 2))
    assert (flat.most_rows, flat.top.rows, flat.may_miss) == (3, 3, 2)
    assert (below.most_rows, below.top.rows, below.may_miss) == (3, 3, 0)
    assert below.bears_liars and _bearing("mean", TREE, west=("median", None)).bears_liars
    assert not _bearing("mean", quorum=3).bears_liars
    assert not _bearing("mean", TREE, west=(None, 2)).bears_liars


@pytest.mark.parametrize("rule", ["median", "median(f=1)", "krum", "detox(r=3) >> median"])
def test_who_never_ends_owns_nothing_when_all_others_have_ended(rule):
    """Honest members say 0 when their data are over; the liar claims steps, and no end."""
    names = tuple("abcdefghi") if "detox" in rule else FLAT
    honest = [_said(ends=True, steps=0)] * (len(names) - 1)
    meeting = _meeting([*honest, _said()], _bearing(rule, names))
    assert meeting.is_last and meeting.is_short and meeting.is_void
    assert not _meeting([*honest, _said()], None).is_last


@pytest.mark.parametrize(
    ("rule", "left"), [("median", 3), ("median(f=1)", 3), ("krum", 5), ("trimmed_mean(f=2)", 5)]
)
def test_training_ends_while_those_who_are_left_are_still_enough(rule, left):
    """Members end one after the other, each with a row in the meeting that hears of it."""
    bearing, last = _bearing(rule), []
    for ended in range(len(FLAT) + 1):
        told = [_said(ends=place < ended) for place in range(len(FLAT))]
        meeting = _meeting(told, bearing)
        assert not meeting.is_void  # all have rows
        last.append(meeting.is_last)
    assert last == [len(FLAT) - ended < left for ended in range(len(FLAT) + 1)]


def test_a_last_meeting_with_too_few_rows_exchanges_nothing_and_others_do():
    bearing = _bearing("krum(f=1)")
    done = _meeting([_said(ends=True, steps=0), *[_said()] * 4], bearing)
    assert done.is_last and done.is_void
    # Nobody has ended: it is an error of the server's, which names who has no row.
    idle = _meeting([_said(steps=0), *[_said()] * 4], bearing)
    assert idle.is_short and not idle.is_last and not idle.is_void
    refused = _meeting([_said(is_finite=False), *[_said()] * 4], bearing)
    assert not refused.is_short and not refused.is_last  # it counts among the f
    assert not _meeting([_said()] * 5, bearing).is_void
    assert _meeting([_said(steps=0)] * 5, bearing).is_void  # as without a robust rule


def test_more_must_want_to_stop_than_may_lie():
    for rule, most in (("median", 2), ("median(f=1)", 1), ("mean", 0), ("clip >> mean", 0)):
        for count in range(4):
            told = [_said(stops=place < count) for place in range(5)]
            assert _meeting(told, _bearing(rule)).is_last == (count > most), (rule, count)
    # Who wants it has ended, too: liars who do not cannot hold up the others.
    told = [_said(ends=place > 1, stops=place > 1) for place in range(5)]
    assert _meeting(told, _bearing("median")).is_last


def test_who_is_absent_ends_nothing_alone():
    from tf_hips.loops.meeting import Told

    bearing = _bearing("median(f=1)", quorum=3)
    absent = [Told.read(None)] * 2
    assert not _meeting([*absent, *[_said()] * 3], bearing).is_last
    assert _meeting([*absent, _said(ends=True), *[_said()] * 2], bearing).is_last


def test_a_quorum_may_close_a_round_with_all_who_have_ended_in_it():
    """Three of five are enough for it: one of whom the data have ended is one row too few."""

    for least, rule, most in ((3, "median(f=1)", 0), (4, "median(f=1)", 1), (3, "median(f=0)", 5)):
        bearing = _bearing(rule, quorum=least)
        last = [
            _meeting([_said(ends=place < ended) for place in range(5)], bearing).is_last
            for ended in range(5)
        ]
        assert last == [ended > most for ended in range(5)], (least, rule)


def test_who_is_drawn_next_must_be_enough_and_who_is_not_has_no_row():
    bearing = _bearing("median(f=1)")
    told = [_said(ends=True), *[_said()] * 4]
    now = frozenset(range(1, 4))
    assert not _meeting(told, bearing, (now, frozenset({1, 2, 3}))).is_last
    assert _meeting(told, bearing, (now, frozenset({0, 1, 2}))).is_last
    meeting = _meeting(told, bearing, (now, now))
    assert [one > 0 for one in meeting.party_shares()] == [False, True, True, True, False]


def test_workers_are_drawn_where_they_train_apart():
    from tf_hips.loops.meeting import met

    told = [_said(), _said(), _said()]
    meeting = met(told, (2, 1), "uniform", False, None, (frozenset({1, 2}), frozenset({0})))
    assert meeting.worker_shares(0) == [0.0, 1.0]
    assert meeting.drawn == (True, False)


@pytest.mark.parametrize("top", ["median", "mean"])
def test_servers_between_count_too(top):
    bearing = _bearing(top, TREE, west=("trimmed_mean(f=1)", None))

    def is_last(ended):
        told = [_said(ends=place in ended) for place in range(len(TREE))]
        return _meeting(told, bearing).is_last

    assert not is_last(())
    assert is_last((0,))  # west bears nobody with two
    assert not is_last((3, 4))  # east has no rule
    # A party all of which has ended sends nothing: it is one row less above.
    assert is_last((0, 1, 2)) == is_last((3, 4, 5)) == (top == "median")
    for count in range(1, 7):
        told = [_said(stops=place < count) for place in range(len(TREE))]
        # Of west two of three want it; of east too, above a median of three, which bears one.
        assert _meeting(told, bearing).is_last == (count >= (5 if top == "median" else 2)), count


def test_a_region_has_a_row_if_somebody_far_below_has_one():
    paths = ("a", "region/b", "region/c", "region/west/d", "region/west/e", "f")
    bearing = _bearing("mean", paths, region=("median", None))

    def is_last(*ended):
        told = [_said(ends=paths[place][-1] in ended) for place in range(len(paths))]
        return _meeting(told, bearing).is_last

    assert not is_last("a", "f", "e") and is_last("b") and is_last("d", "e")
    assert _bearing("median", paths).most_rows == 3


def test_a_party_server_with_a_quorum_may_miss_a_row():
    bearing = _bearing("mean", TREE, west=("median(f=0)", 2))
    assert not _meeting([_said(ends=True), *[_said()] * 8], bearing).is_last
    five = tuple(f"west/{name}" for name in FLAT)
    told = [_said(ends=True), *[_said()] * 4]
    assert _meeting(told, _bearing("mean", five, west=("median(f=1)", 3))).is_last
    assert not _meeting(told, _bearing("mean", five, west=("median(f=1)", 4))).is_last
    assert not _meeting(told, _bearing("mean", five, west=("median(f=1)", 3))).is_short


def test_leaves_are_counted_where_they_are_looked_at():
    bearing = _bearing("sketched >> krum(f=1)", TREE)
    assert (bearing.most_rows, bearing.top.rows) == (9, 5)
    told = [_said(ends=place < 4) for place in range(9)]
    assert not _meeting(told, bearing).is_last
    assert _meeting([*told[:8], _said(ends=True)], bearing).is_last


@pytest.mark.parametrize("rule", ["mean", "fedavg(1.0)", "sum"])
def test_without_a_robust_rule_all_is_as_ever(rule):
    bearing = _bearing(rule)
    for told in (
        [_said(ends=True)] * 4 + [_said()],
        [_said(ends=True, steps=0)] * 4 + [_said()],
        [_said(ends=True)] * 5,
        [_said(ends=True, stops=True)] + [_said()] * 4,
    ):
        one, other = _meeting(told, bearing), _meeting(told, None)
        assert (one.is_last, one.is_void) == (other.is_last, other.is_void)


def test_only_a_robust_rule_is_said_to_have_ended_a_training(monkeypatch):
    """Below a mean with a quorum a member that is absent hears that all others have ended."""
    from tf_hips import log
    from tf_hips.loops import bearing
    from tf_hips.loops.meeting import Told

    said = []
    monkeypatch.setattr(log, "warning", lambda text, *values: said.append(text % values))
    absent = [Told.read(None), *[_said(ends=True, steps=0)] * 4]
    for rule in ("mean", "median"):
        meeting = _meeting(absent, _bearing(rule, quorum=3))
        assert meeting.is_last
        bearing.tell_last(4, meeting)
    assert len(said) == 1 and "robust rule of a server, which needs 3 rows" in said[0]


def test_words_are_looked_at_before_others_hear_them():
    from tf_hips.loops.meeting import Word, own_words

    class Mine:
        def __init__(self, **words):
            self.words = lambda: words

        def vocabulary(self):
            return {"effective": Word(least=1)}

    assert own_words(Mine(effective=2)) == {"effective": 2}
    for words in ({}, {"effective": 0}, {"effective": 2, "more": 1}, {"effective": float("nan")}):
        with pytest.raises(ValueError, match=r"`Mine\.words` must say what its `vocabulary`"):
            own_words(Mine(**words))
