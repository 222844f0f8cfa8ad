# SPDX-License-Identifier: Apache-2.0
"""Servers with a server above them: rounds, gathers, first weights, and how a tree ends."""

import pytest

from tests.ps.parties import FEEDBACK, together, train_all
from tests.ps.trees import Node, addresses_of, expected, leaves_of, serving_tree
from tests.support.certs import Certificates

TWO = Node("", (Node("west", ("a", "b")), Node("east", ("c", "d"))), sends=FEEDBACK)
MIXED = Node("", (Node("west", ("a", "b")), "c"), sends=FEEDBACK)
NOISE = "error_feedback(terngrad(bitwidth=2))"
DEEP = Node(
    "",
    ("a", Node("region", (Node("west", ("b", "c"), up=NOISE), "d"), sends=NOISE, up=FEEDBACK)),
    sends=FEEDBACK,
    up=NOISE,
)


@pytest.mark.parametrize("node", [TWO, MIXED, DEEP], ids=["two", "mixed", "deep"])
@pytest.mark.parametrize("insecure", [True, False])
def test_all_leaves_get_what_the_tree_gives(
    certificates: Certificates, node: Node, insecure: bool
) -> None:
    with (
        serving_tree(certificates, node, insecure=insecure) as servers,
        leaves_of(certificates, node, addresses_of(servers), insecure=insecure) as members,
    ):
        assert [member.child for member in members] == list(range(len(members)))
        for member in members:
            welcome = member.client._welcome
            assert welcome is not None
            assert welcome.parties == tuple(name for name, _ in node.leaves)
            assert welcome.workers == tuple(range(1, len(members) + 1))
            assert welcome.downlink == node.up
        assert train_all(members, 0, 3) == expected(node, 4)
        together(*(member.client.leave for member in members))
