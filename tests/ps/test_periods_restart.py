# SPDX-License-Identifier: Apache-2.0
"""A party server whose children go on by themselves, killed with SIGKILL: nothing lost or twice.

What children send are small whole numbers, which float32 adds exactly in any order, and the global
server adds up what comes. So its total tells whether each update has gone up once.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.ps.parties import DEADLINE_S, serving, together
from tests.ps.test_periods import DENSE, SHAPES, step, values_of, whole
from tests.ps.test_restart import Later
from tests.ps.test_tree_restart import TreeServer
from tests.ps.trees import Node, leaves_of
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.ps.terms.recorder import Kind

LAST = 27
NODE = Node("", (Node("west", ("a", "b"), **DENSE),), **DENSE)

pytestmark = pytest.mark.heavy


class Periodic(TreeServer):
    """With a rule of its own."""

    def command(self, *more: str) -> list[str]:
        return super().command("--rule", "asgd(1.0)", "--period", "2", *more)


@pytest.mark.parametrize(
    ("is_eager", "top"),
    [(True, "asgd(1.0)"), pytest.param(False, "fedavg", marks=pytest.mark.slow)],
    ids=["snapshots", "journal"],
)
def test_each_update_goes_up_once(
    certificates: Certificates, tmp_path: Path, is_eager: bool, top: str
) -> None:
    with serving(
        certificates, parties=("west",), insecure=True, rule=top, downlink="fp32"
    ) as above:
        [node] = [one for one in NODE.children if isinstance(one, Node)]
        west = Periodic(tmp_path, node, None)
        west.uplink = above.address
        west.is_eager = is_eager
        try:
            west.start()
            places = {"": above.address, "west": west.address}
            with leaves_of(certificates, NODE, places, shapes=SHAPES) as members:
                training = [
                    Later(lambda m=m: [step(m, number) for number in range(LAST + 1)])
                    for m in members
                ]
                for number in (2, 13):
                    west.wait_for_round(number)
                    west.restart()
                received = [sum(one.result()) for one in training]
                expected = sum(
                    values_of(whole(one, number)) for one in members for number in range(LAST + 1)
                )
                together(*(one.client.leave for one in members))
            west.check_end()
        finally:
            west.end()
        session = above._session
        eventually(lambda: session.is_over, DEADLINE_S, changed=session.changed)
        assert session.ended is None
        assert session.store is not None
        if top == "asgd(1.0)":
            total = np.concatenate([one.total for _, one in sorted(session.store._moved.items())])
            np.testing.assert_array_equal(total, expected)
            assert session.store.round == LAST
        # Whoever sends a chunk's last update has all of that chunk: not one child for all chunks.
        cuts = np.cumsum(members[0].sizes)[:-1]
        parts = [np.split(one, cuts) for one in (expected, *received)]
        for wanted, *theirs in zip(*parts, strict=True):
            assert any(np.array_equal(wanted, one) for one in theirs)
        if not is_eager:
            came = Counter(
                (one["round"], one["child"], one["chunk"]) for one in west.accepted(Kind.PACKET)
            )
            down = Counter((one["round"], one["chunk"]) for one in west.accepted(Kind.PASSED_DOWN))
            assert set(came.values()) == set(down.values()) == {1}
            assert len(came) == 2 * len(down) == 2 * (LAST + 1) * len(SHAPES)
