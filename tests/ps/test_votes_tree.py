# SPDX-License-Identifier: Apache-2.0
"""Party servers whose children vote, each in groups of its own, with other batches in each."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.ps.parties import together
from tests.ps.test_votes import reverse
from tests.ps.trees import Node, serving_tree
from tests.ps.voters import Behaviour, Floats, Voter, children, gradient, one_round, secret_of
from tests.support.certs import Certificates
from tf_hips import robust
from tf_hips.config import Uplink
from tf_hips.errors import ConfigError, PeerError, ProtocolError
from tf_hips.ps import rules
from tf_hips.ps.client.client import Client
from tf_hips.ps.server.server import Server, ServerConfig
from tf_hips.robust import detox
from tf_hips.robust.detox import Detox, Result

pytestmark = pytest.mark.heavy  # servers start in most of these


def party(site: str, count: int) -> Node:
    return Node(site, tuple(f"{site}{number}" for number in range(count)), up="fp32")


TREE = Node("", (party("west", 3), party("east", 3)), up="fp32")
UNEVEN = Node("", (party("west", 5), party("east", 3)), up="fp32")


@contextlib.contextmanager
def voting_tree(
    certificates: Certificates,
    node: Node,
    rule: str,
    behaviours: Mapping[str, Behaviour],
    *,
    above: str = "mean",
    **below: Any,
) -> Iterator[tuple[dict[str, Server], list[Voter]]]:
    """The servers of a tree, those of parties with a rule, and its leaves, joined."""
    with serving_tree(certificates, node, rule=above, below={"rule": rule, **below}) as servers:
        members = [
            Voter(servers[server.site].address, name, behaviour=behaviours.get(name))
            for name, server in node.leaves
        ]
        try:
            together(*(one.join for one in members))
            yield servers, members
        finally:
            for one in members:
                one.client.close()


def sent(one: Voter, number: int) -> Floats:
    """What a child that does not encode has sent in a round."""
    return one.does.gradient(number, gradient(number, one.seats[number]))


def votes_of(
    servers: Mapping[str, Server], node: Node, members: Sequence[Voter], chosen: Detox, number: int
) -> list[Result]:
    """What the function makes of the rows of each party."""
    results, first = [], 0
    for one in node.children:
        assert isinstance(one, Node)
        rows = [sent(member, number) for member in members[first : first + len(one.children)]]
        first += len(one.children)
        results.append(chosen.run(rows, seed=secret_of(servers[one.site]), step=number))
    return results


@pytest.mark.parametrize(
    "vote",
    ["digest", *(pytest.param(one, marks=pytest.mark.slow) for one in ("exact", "tolerant"))],
)
def test_a_liar_in_each_party_changes_nothing(certificates: Certificates, vote: str) -> None:
    chosen = Detox(3, robust.mean(), vote)
    liars = {"west1": Behaviour(reverse), "east2": Behaviour(reverse)}
    with voting_tree(certificates, TREE, rules.resolve(chosen).text, liars) as (servers, members):
        for number in range(3):
            found = one_round(members, number)
            west, east = votes_of(servers, TREE, members, chosen, number)
            # Halves are exact, so it does not matter how a mean of two is computed.
            mean = (west.vector + east.vector) * np.float32(0.5)
            np.testing.assert_array_equal(found, mean)
            np.testing.assert_array_equal(west.vector, gradient(number, 0))
            np.testing.assert_array_equal(east.vector, gradient(number, 1))
        told = {**children(servers["west"]), **children(servers["east"])}
        assert {site: one["outvoted"] for site, one in told.items() if one["outvoted"]} == {
            "west1": 3,
            "east2": 3,
        }
        assert secret_of(servers["west"]) != secret_of(servers["east"])
        assert servers[""]._session.state.electing.secret is None


def test_a_party_stands_for_as_many_batches_as_groups_have_a_vote(
    certificates: Certificates,
) -> None:
    """Groups of 3 and 2 in one party, of 3 in the other; a liar in the first, in 1 of 5 places."""
    chosen = Detox(3, robust.mean(), "digest")
    rule = rules.resolve(chosen).text
    with voting_tree(certificates, UNEVEN, rule, {"west4": Behaviour(reverse)}) as found:
        servers, members = found
        batches = set()
        for number in range(4):
            merged = one_round(members, number)
            results = votes_of(servers, UNEVEN, members, chosen, number)
            counts = [sum(vote.is_won for vote in one.votes) for one in results]
            assert counts[0] in (1, 2) and counts[1] == 1
            weighted = sum(
                count * one.vector.astype(np.float64)
                for count, one in zip(counts, results, strict=True)
            )
            np.testing.assert_allclose(merged, weighted / sum(counts), rtol=1e-5, atol=1e-6)
            seats = [one.seats[number] for one in members]
            # Every group of the tree has a batch, and no two of different parties the same.
            assert set(seats[:5]) == {0, 1} and set(seats[5:]) == {2}
            batches.add(tuple(seats))
            drawn = detox.groups(5, 3, secret_of(servers["west"]), number)
            assert all(place in drawn[seats[place]] for place in range(5))
        assert len(batches) > 1
        assert all(one.asks.seat(0).groups == 3 for one in members)


def test_a_tree_in_which_only_some_vote(certificates: Certificates) -> None:
    """Votes beside a leaf of the topmost server: batches of all of them are distinct."""
    node = Node("", ("alone", party("west", 4)), up="fp32")
    rule = "detox(r=2, fixed=True) >> mean"
    with serving_tree(certificates, node, rule="mean", below={"rule": rule}) as servers:
        leaf = Client(Uplink(servers[""].address, "alone", None, 20.0), "local", 3)
        members = [Voter(servers["west"].address, f"west{number}") for number in range(4)]
        try:
            welcome, *_ = together(
                lambda: leaf.join("fp32", "fp32", 7),
                *(lambda one=one: one.join(is_agreed=False) for one in members),
            )
            assert (welcome.votes, welcome.first_group, welcome.groups) == (None, 0, 5)
            told = [one.client._joined() for one in members]
            assert [one.first_group for one in told] == [3, 3, 4, 4]
            assert all(one.groups == 5 and one.rule == "mean" for one in told)
            assert all(one.voting == rules.parse(rule).votes for one in told)
            together(
                lambda: leaf.agree_model(members[0].shapes),
                *(lambda one=one: one.client.agree_model(one.shapes) for one in members),
            )
            packets = members[0].packets(0)
            assert members[0].seats == {0: 3}
            voted = [lambda one=one: one.exchange(0) for one in members]
            together(lambda: leaf.exchange(0, packets, 3.0), *voted)
        finally:
            leaf.close()
            for one in members:
                one.client.close()


@pytest.mark.slow
def test_buckets_and_a_rule_of_whole_rows_in_a_party(certificates: Certificates) -> None:
    """Six groups of two: the liar's is dropped, and Krum takes one of what the others say."""
    node = Node("", (party("west", 12),), up="fp32")
    chosen = Detox(2, robust.krum(f=1), "digest")
    rule = rules.resolve(chosen).text
    with voting_tree(
        certificates, node, rule, {"west7": Behaviour(reverse)}, above="fedavg(0.5)"
    ) as (servers, members):
        found = one_round(members, 0)
        [west] = votes_of(servers, node, members, chosen, 0)
        assert sum(vote.is_won for vote in west.votes) == 5
        np.testing.assert_array_equal(found, west.vector * np.float32(0.5))
        status = servers["west"].snapshot()
        assert (status["rule"], status["robust"]) == ("fedavg(learning_rate=0.5)", rule)


@pytest.mark.slow
def test_a_quorum_of_a_party_goes_on_without_who_says_nothing(certificates: Certificates) -> None:
    """Its group has two of three left, which are enough; the party stands for as many batches."""
    chosen = Detox(3, robust.mean(), "digest")
    away = {"west1": Behaviour(is_silent=lambda number: number == 1)}
    quorum: dict[str, Any] = {"quorum": 6, "late": "drop", "round_deadline": 0.3}
    node = Node("", (party("west", 7),), up="fp32")
    rule = rules.resolve(chosen).text
    with voting_tree(certificates, node, rule, away, **quorum) as (servers, members):
        one_round(members, 0)
        found = one_round(members, 1)
        drawn = detox.groups(7, 3, secret_of(servers["west"]), 1)
        # Who sits alone and says nothing is a group less.
        groups = [group for group, sitting in enumerate(drawn) if sitting != (1,)]
        mean = np.mean([gradient(1, group).astype(np.float64) for group in groups], axis=0)
        np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-6)
        one_round(members, 2)
        assert children(servers["west"])["west1"]["absent"] == 1


def test_what_cannot_vote_in_a_party_is_refused(certificates: Certificates) -> None:
    uplink = Uplink("127.0.0.1:1", "west", None)
    common: dict[str, Any] = {"insecure": True, "uplink": uplink, "parties": ("a", "b", "c")}
    for rule, message in (
        ("detox(r=3) >> median >> fedavg", "a synchronous `rule` must be a robust one alone"),
        ("detox(r=3) >> krum(f=1)", r"krum needs n >= 2 f \+ 3 rows. Received: n=1"),
        ("detox(r=1) >> median(f=2)", r"n >= 2 f \+ 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServerConfig(**common, rule=rule)
    with pytest.raises(ConfigError, match="without error feedback"):
        ServerConfig(**common, rule="detox(r=3) >> median", compression="error_feedback(onebit)")
    ServerConfig(**common, rule="detox(r=3, fixed=True) >> median")
    deep = Node("", (Node("region", (party("west", 2),), up="fp32"),), up="fp32")
    with (
        serving_tree(certificates, deep, rule="mean", below={"rule": "detox(r=2) >> mean"}) as all_,
        pytest.raises((PeerError, ProtocolError), match="not servers of others"),
    ):
        members = [Voter(all_["west"].address, f"west{number}") for number in range(2)]
        try:
            together(*(one.join for one in members))
        finally:
            for one in members:
                one.client.close()


@pytest.mark.slow
def test_the_topmost_server_must_take_means(certificates: Certificates) -> None:
    node = Node("", (party("west", 3),), up="fp32")
    with (
        serving_tree(certificates, node, rule="sum", below={"rule": "detox(r=3) >> mean"}) as all_,
        pytest.raises((PeerError, ProtocolError), match="server above must take means"),
    ):
        members = [Voter(all_["west"].address, f"west{number}") for number in range(3)]
        try:
            together(*(one.join for one in members))
        finally:
            for one in members:
                one.client.close()
