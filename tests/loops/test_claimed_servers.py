# SPDX-License-Identifier: Apache-2.0
"""A liar below a robust rule says that it is a party server with leaves, and with a rule.

It ends, moves and outvotes no more than a liar that is a party does.
"""

import types

import pytest

pytestmark = pytest.mark.tf

HONEST = tuple(f"h{n}" for n in range(7))
CLAIMED = tuple(f"evil/x{n}" for n in range(8))
RULE = "multi_krum(f=1)"


def _welcome(paths, **guards):
    """Of a tree in which servers have rules, by their paths; that of `top` is the topmost one's."""
    guards = {"" if path == "top" else path: rule for path, rule in guards.items()}
    return types.SimpleNamespace(
        paths=paths,
        workers=(1,) * len(paths),
        guards=tuple((path, rule, None) for path, rule in guards.items()),
        bears_liars=True,
    )


def _bearing(paths, **guards):
    from tf_hips.loops.bearing import Bearing

    return Bearing(_welcome(paths, **guards))


def _met(bearing, count, idle=(), **said):
    from tf_hips.loops.meeting import Told, met

    told = [Told(0, 0, ends=True) if n in idle else Told(2, 16, **said) for n in range(count)]
    return met(told, [1] * count, "samples", True, bearing)


def test_a_claimed_rule_ends_nobodys_training():
    """Two of three claimed leaves have ended: only the liar's own row is void."""
    bearing = _bearing((*HONEST, *CLAIMED[:3]), top=RULE, evil="median(f=1)")
    meeting = _met(bearing, 10, idle=(8, 9), is_finite=True)
    assert not meeting.is_last and not meeting.is_short and not meeting.is_void
    assert meeting.void == {7}
    assert [meeting.weight(party) > 0 for party in range(10)] == [True] * 7 + [False] * 3
    refused = _met(bearing, 10, idle=(8, 9), is_finite=False)
    assert not any(refused.is_refused(party) for party in (7, 8, 9)) and refused.is_refused(0)


def test_a_rule_that_is_claimed_where_leaves_are_the_rows_is_nobodys():
    evil = "detox(r=3, q=1) >> median(f=auto)"
    bearing = _bearing((*HONEST, *CLAIMED[:2]), top="sketched >> krum(f=1)", evil=evil)
    assert len(bearing.children) == 9
    assert not _met(bearing, 9).is_last


def test_a_server_that_has_too_few_is_a_row_less_above():
    """West is honest, and two of its three workers have ended; the training ends by the top."""
    paths = (*HONEST[:5], "west/a", "west/b", "west/c")
    bearing = _bearing(paths, top=RULE, west="median(f=1)")
    assert _met(bearing, 8, idle=(5,)).void == {6, 7}
    assert not _met(bearing, 8, idle=(5,)).is_last
    assert not _met(bearing, 8).void
    short = _met(bearing, 8, idle=(0, 5))
    assert short.is_last and short.is_short and short.is_void  # four rows of the five it needs
    # Nothing of theirs counts: not what they had exchanged among themselves either.
    assert _met(bearing, 8, idle=(5,), before=16).weight(6) == 0


@pytest.mark.parametrize("top", ["mean", RULE])
def test_a_worker_that_claims_a_rule_is_a_row_less_of_its_server(top):
    front = HONEST[:5] if top == RULE else ()
    paths = (*front, *(f"west/{name}" for name in "abcd"), *(f"west/{one}" for one in CLAIMED[:3]))
    guards = {"west": "median(f=1)", "west/evil": "median(f=1)"}
    bearing = _bearing(paths, **guards, **({"top": top} if top == RULE else {}))
    first = len(front)
    meeting = _met(bearing, len(paths), idle=(first + 5, first + 6))
    assert not meeting.is_last and meeting.void == {first + 4}
    # West itself has too few: below means it ends all, below a robust rule it is one row less.
    meeting = _met(bearing, len(paths), idle=(first, first + 1, first + 5, first + 6))
    assert meeting.is_last == (top == "mean")
    assert meeting.void == ({first + 4} if top == "mean" else {first + 2, first + 3, first + 4})


def test_claimed_leaves_of_a_worker_stop_nobody():
    paths = ("west/a", "west/b", *(f"west/{one}" for one in CLAIMED), "c", "d")
    wants = [False] * 2 + [True] * 8 + [False] * 2
    assert not _bearing(paths, west="median(f=1)").stops(wants)
    assert _bearing(paths, west="median(f=1)").stops([True, *wants[1:]])


def test_claimed_leaves_move_no_median_and_no_pace():
    from tf_hips.loops.esync import most_gain
    from tf_hips.loops.meeting import Told, met

    bearing = _bearing(("a", "b", "c", *CLAIMED), top="median(f=1)")
    told = [Told(2, 16, words={"loss": loss}) for loss in (1.0, 1.1, 1.2)]
    told += [Told(2, 16, words={"loss": 1e-9})] * 8
    meeting = met(told, [1] * 11, "uniform", True, bearing)
    assert meeting.middle([1.0, 1.1, 1.2, *[1e-9] * 8]) == 1.0
    assert most_gain(meeting.members, 2, middle=meeting.middle) == pytest.approx(1.2)
    assert bearing.most(["p", "p", "p", *["q"] * 8]) == "p"


def _drawing(paths, participation, level="party", **guards):
    from tf_hips.loops import FedAvg
    from tf_hips.loops.bearing import Bearing
    from tf_hips.ps import rules

    welcome = _welcome(paths, **guards)
    loop = FedAvg.__new__(FedAvg)
    loop._participation, loop._controls, loop._normalises = participation, None, False
    loop._loan = types.SimpleNamespace(level=level, member=lambda: (0, sum(welcome.workers)))
    rule = rules.parse(guards.get("top", "mean"))
    loop._strategy = types.SimpleNamespace(
        rule=rule, has_server=True, welcome=welcome, config=types.SimpleNamespace(seed=7)
    )
    loop._bearing = Bearing(welcome)
    loop._check_rule(loop._strategy)
    return loop


@pytest.mark.parametrize("claim", [{}, {"evil": "krum(f=400)"}])
def test_claimed_leaves_are_drawn_as_one_and_refuse_no_participation(claim):
    loop = _drawing((*HONEST, *CLAIMED), 0.65, top=RULE, **claim)
    for number in range(50):
        drawn = loop.drawn(number)
        honest = drawn & set(range(7))
        assert len(honest) in (4, 5) and len(drawn - honest) == (8 if len(honest) == 4 else 0)
    assert loop.drawn(0) != loop.drawn(1) or loop.drawn(1) != loop.drawn(2)
    assert not loop._all_take_part()
    assert _drawing((*HONEST, *CLAIMED), 8, top=RULE)._all_take_part()
    assert _drawing((*HONEST, *CLAIMED), 1.0, top=RULE).drawn(0) is None


def test_a_draw_of_too_few_children_is_refused():
    from tf_hips.errors import ConfigError

    with pytest.raises(ConfigError, match="4 parties in a round at least"):
        _drawing((*HONEST, *CLAIMED), 4, top=RULE)
    _drawing(("west/a", "west/b", "west/c", "d"), 1, west="median(f=1)")
