# SPDX-License-Identifier: Apache-2.0
"""A real server of children that vote, killed with SIGKILL in the middle of votes."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ps.parties import together
from tests.ps.test_restart import Later, ServerProcess
from tests.ps.test_tree_restart import TreeServer
from tests.ps.trees import Node
from tests.ps.voters import SITES, Voter, gradient, one_round
from tf_hips import robust
from tf_hips.ps.terms.recorder import Kind

pytestmark = pytest.mark.slow

RULE = "detox(r=3) >> median(f=0)"
NUM_GROUPS = 3


class _Voted(ServerProcess):
    """A server of seven children that vote by digest."""

    def command(self, *more: str) -> list[str]:
        found = super().command(*more)
        found[found.index("--parties") + 1] = ",".join(SITES)
        return [*found, "--rule", RULE]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    made = _Voted(tmp_path)
    made.start()
    yield made
    made.end()


def wanted(number: int) -> np.ndarray:
    """The median of all groups, whoever sits in them."""
    return robust.median(f=0)([gradient(number, group) for group in range(NUM_GROUPS)])


def killed_in_the_middle(
    server: ServerProcess, members: list[Voter], number: int, missing: int
) -> list[Any]:
    """A round: ballots of some, and perhaps packets; the others come to another process."""
    early = [Later(functools.partial(one.exchange, number)) for one in members[missing:]]

    def is_there(found: list[dict[str, Any]]) -> bool:
        return sum(one["round"] == number for one in found) == len(early)

    server.wait_for(Kind.VOTED, is_there)
    server.restart()
    late = together(*(functools.partial(one.exchange, number) for one in members[:missing]))
    return [*late, *(one.result() for one in early)]


def test_votes_go_on_with_a_server_that_is_killed(server: ServerProcess) -> None:
    members = [Voter(server.address, site) for site in SITES]
    try:
        together(*(one.join for one in members))
        np.testing.assert_array_equal(one_round(members, 0), wanted(0))
        for number, missing in ((1, 1), (2, 4)):
            for found in killed_in_the_middle(server, members, number, missing):
                np.testing.assert_array_equal(found, wanted(number))
        ballots = [(one["round"], one["child"]) for one in server.accepted(Kind.VOTED)]
        assert sorted(ballots) == [(number, child) for number in range(3) for child in range(7)]
        np.testing.assert_array_equal(one_round(members, 3), wanted(3))
        # Who sits where is what it was before: it may be asked again.
        assert all(one.asks.seat(0).group == one.seats[0] for one in members)
        together(*(one.client.leave for one in members))
    finally:
        for one in members:
            one.client.close()


TREE = Node("", (Node("west", SITES), Node("east", ("x", "y", "z"))))


class _PartyServer(TreeServer):
    """One server of a tree in which those of parties let their children vote."""

    def command(self, *more: str) -> list[str]:
        own = RULE if self.uplink is not None else "mean"
        return [*super().command(*more), "--rule", own]


def test_votes_in_a_party_go_on_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """Seven and three children: a mean of three batches and one."""
    top = _PartyServer(tmp_path, TREE, None)
    servers = [top]
    members: list[Voter] = []
    try:
        top.start()
        for node in TREE.children:
            assert isinstance(node, Node)
            servers.append(_PartyServer(tmp_path, node, top))
            servers[-1].start()
            members += [Voter(servers[-1].address, site) for site in node.names]
        west, east = members[: len(SITES)], members[len(SITES) :]
        together(*(one.join for one in members))

        def merged(number: int) -> np.ndarray:
            rows = wanted(number), gradient(number, NUM_GROUPS)
            return (3.0 * rows[0].astype(np.float64) + rows[1]) / 4.0

        for number, missing in ((0, 0), (1, 1), (2, 4), (3, 0)):
            others = [Later(functools.partial(one.exchange, number)) for one in east]
            if missing:
                found = killed_in_the_middle(servers[1], west, number, missing)
            else:
                found = together(*(functools.partial(one.exchange, number) for one in west))
            found += [one.result() for one in others]
            assert all(one.tobytes() == found[0].tobytes() for one in found)
            np.testing.assert_allclose(found[0], merged(number), rtol=1e-5, atol=1e-6)
        assert all(one.asks.seat(0).group == one.seats[0] for one in members)
        together(*(one.client.leave for one in members))
        for server in reversed(servers):
            server.check_end()
    finally:
        for one in members:
            one.client.close()
        for server in servers:
            server.end()
