# SPDX-License-Identifier: Apache-2.0
"""Loops that would train wrongly where a server may go on without some members are refused."""

import contextlib
import types

import pytest

from tf_hips.errors import ConfigError
from tf_hips.ps.rules import parse
from tf_hips.ps.terms.quorum import drops_late, from_options

pytestmark = pytest.mark.tf

FLAT, TREE = ("a", "b", "c"), ("west/a", "west/b", "c")
DROPPED, CARRIED = (
    from_options(3, 2, deadline, None, late, None, None).text
    for deadline, late in ((0.5, "drop"), (None, None))
)


def welcome_of(quorum=None, *, paths=FLAT, child=0, **least):
    """What a child is told: the text of its server's quorum, and of servers how many are enough."""
    guards = tuple((path, None, count) for path, count in least.items())
    if quorum is not None and not least:
        guards = (("", None, 2),)
    return types.SimpleNamespace(
        child=child, parties=("a", "b", "c"), workers=(1, 1, 1), paths=paths, guards=guards,
        quorum=quorum, bears_liars=False, votes=None, voting=None, robust=None,
    )  # fmt: skip


def _refusal(made, told):
    return contextlib.nullcontext() if made else pytest.raises(ConfigError, match=told)


def _make(kind, rule, welcome, **options):
    """Makes a loop of a party that has joined a server of `rule`."""
    import keras

    from tests.strategies import training
    from tf_hips import loops
    from tf_hips.strategies import HierarchicalPS

    strategy = HierarchicalPS("fp32", downlink=None)
    with strategy.scope():
        model = training.build(keras.optimizers.SGD(0.05))
    strategy.rule, strategy.welcome = parse(rule), welcome
    try:
        getattr(loops, kind)(model, strategy, local_steps=4, **options)
    finally:
        strategy.welcome = None  # else it is the strategy of this process


@pytest.mark.parametrize(
    ("rule", "quorum", "made"),
    [
        ("sum", None, True),
        ("sum", CARRIED, False),
        ("momentum(0.1)", DROPPED, False),
        ("mean", CARRIED, True),
        ("fedadam(0.1)", DROPPED, True),
        ("median >> fedavg(1.0)", DROPPED, True),
    ],
)
def test_what_members_send_is_averaged_where_some_may_be_absent(rule, quorum, made):
    with _refusal(made, r"its rule must take a mean: `--rule mean`\. Received: "):
        _make("FedAvg", rule, welcome_of(quorum))


@pytest.mark.parametrize("least", [{}, {"": 2}, {"west": 1}])
def test_all_control_variates_come_in_their_round(least):
    welcome = welcome_of(paths=TREE, **least)
    with _refusal(not least, "SCAFFOLD's control variates must come from all members"):
        _make("FedAvg", "mean", welcome, scaffold=True)


@pytest.mark.parametrize(
    ("quorum", "where", "made"),
    [
        (None, {}, True),
        (DROPPED, {}, True),
        (CARRIED, {}, False),
        (None, {"paths": TREE, "child": 2, "west": 1}, False),
        (DROPPED, {"paths": TREE, "child": 2, "": 1}, True),
        # Below a party's server nobody is told what the one above makes of late updates.
        (None, {"paths": TREE, "child": 0, "": 1}, False),
        (DROPPED, {"paths": TREE, "child": 0, "": 1, "west": 1}, False),
    ],
)
def test_a_late_fragment_counts_nowhere(quorum, where, made):
    with _refusal(made, "one that is late must not count in the next round"):
        _make("StreamingDiLoCo", "mean", welcome_of(quorum, **where), fragments=2)


def test_a_quorum_says_what_becomes_of_late_updates():
    assert drops_late(DROPPED)
    assert not drops_late(CARRIED)


@pytest.mark.parametrize("stops", [False, True])
def test_a_party_that_is_behind_hears_why_it_ends(monkeypatch, stops):
    from tf_hips import log
    from tf_hips.loops import quorums
    from tf_hips.loops.meeting import Meeting, Told

    said = []
    monkeypatch.setattr(log, "warning", lambda text, *values: said.append(text % values))
    ended = Told(0, 0, ends=True, stops=stops)
    meeting = Meeting(((ended,), (Told.read(None),)), "samples", is_equal=True)
    assert meeting.is_last
    for party in range(2):
        quorums.tell_last(7, meeting, party)
    told = "Training ends with round 7, though there are data left here: the server's quorum"
    assert [one[: len(told)] for one in said] == ([] if stops else [told])
