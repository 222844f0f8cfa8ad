# SPDX-License-Identifier: Apache-2.0
"""When loops of real trees end: by what servers tell their leaves, all of which decide alike."""

import contextlib

import pytest

from tests.ps.parties import together
from tests.ps.trees import Node, addresses_of, leaves_of, serving_tree

pytestmark = [pytest.mark.tf, pytest.mark.heavy]  # servers start

SITES = ("west", "east", "north")
TREE = Node(
    "",
    tuple(Node(one, tuple(f"{one}{n}" for n in range(3)), up="fp32") for one in SITES),
    up="fp32",
)
_WEST, _EAST = Node("west", ("b", "c", "d"), up="fp32"), Node("east", ("e", "f"), up="fp32")
MIXED = Node("", ("a", Node("region", (_WEST, _EAST, "g"), up="fp32")), up="fp32")


@contextlib.contextmanager
def welcomes(node, rule, **by_site):
    """What all leaves are told; party servers have other settings."""
    above = by_site.pop("top", {})
    with (
        serving_tree(None, node, rule=rule, by_site={"": above, **by_site}) as servers,
        leaves_of(None, node, addresses_of(servers)) as members,
    ):
        yield [member.client._welcome for member in members]
        together(*(member.client.leave for member in members))


def is_last(told, *ended):
    """Whether training ends when some have no data left; all leaves must say the same."""
    from tf_hips.loops.bearing import Bearing
    from tf_hips.loops.meeting import Told, met

    everyone = [Told(2, 16, ends=site in ended) for site in told[0].parties]
    sizes = [1] * len(everyone)
    found = {met(everyone, sizes, "samples", True, Bearing(one)).is_last for one in told}
    assert len(found) == 1
    return found.pop()


def test_a_party_without_data_is_a_row_less_above():
    with welcomes(TREE, "median") as told:
        assert told[0].paths == tuple(f"{name[:-1]}/{name}" for name in told[0].parties)
        assert {one.guards for one in told} == {(("", "median(f=auto)", None),)}
        assert not is_last(told)
        assert not is_last(told, "west0", "west1", "east0", "north2")
        assert is_last(told, "west0", "west1", "west2")


def test_a_party_server_needs_rows_of_its_leaves():
    with welcomes(TREE, "mean", west={"rule": "median"}) as told:
        assert {one.guards for one in told} == {(("west", "median(f=auto)", None),)}
        assert [one.robust for one in told] == ["median(f=auto)"] * 3 + [None] * 6
        assert all(one.bears_liars for one in told)
        assert not is_last(told, "east0", "east1", "north2")
        assert is_last(told, "west0")
        assert not is_last(told, "west0", "west1", "west2")


@pytest.mark.parametrize("site", ["west", "top"])
def test_a_quorum_counts_where_it_is(site):
    """That of a party server is not taken for the topmost one's."""
    from tf_hips.loops import FedAvg
    from tf_hips.loops.bearing import Bearing, bearing_of
    from tf_hips.ps import rules
    from tf_hips.strategies.loan import PARTY

    quorum = {"quorum": 2, "round_deadline": 10.0, "late": "drop"}
    rule = {"west": "median(f=1)", "top": "median(f=0)"}[site]
    with welcomes(TREE, rule, **{site: quorum}) as told:
        [guards] = {one.guards for one in told}
        assert dict.fromkeys(path for path, _, least in guards if least == 2) == {
            {"west": "west", "top": ""}[site]: None
        }
        bearings = [Bearing(one) for one in told]
        assert {one.may_miss for one in bearings} == {int(site == "top")}
        assert {one.top.rows for one in bearings} == {3 if site == "west" else 1}
        assert not is_last(told) and not is_last(told, "west0", "east0")
        for one in told:
            loop = FedAvg.__new__(FedAvg)
            loop._participation, loop._controls, loop._normalises = 1.0, None, False
            loop._loan = type("Loan", (), {"level": PARTY})
            loop._strategy = type(
                "Strategy",
                (),
                {"rule": rules.parse(one.rule), "has_server": True, "welcome": one},
            )
            loop._bearing = bearing_of(loop._strategy)
            loop._check_rule(loop._strategy)


def test_leaves_of_any_depth_are_told_the_same():
    node = {"region": {"rule": "median"}, "west": {"rule": "median"}}
    with welcomes(MIXED, "mean", **node) as told:
        assert told[0].paths == (
            "a",
            *(f"region/west/{one}" for one in "bcd"),
            *(f"region/east/{one}" for one in "ef"),
            "region/g",
        )
        guards = (("region", "median(f=auto)", None), ("region/west", "median(f=auto)", None))
        assert {one.guards for one in told} == {guards}
        assert not is_last(told, "a", "e")
        assert is_last(told, "b") and is_last(told, "g") and is_last(told, "e", "f")
