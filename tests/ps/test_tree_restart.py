# SPDX-License-Identifier: Apache-2.0
"""Trees of real servers, each of them and leaves killed with SIGKILL: the same bits in the end."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.ps.parties import DEADLINE_S, FEEDBACK, Party, serving, together
from tests.ps.test_comeback import Backup
from tests.ps.test_restart import Later, ServerProcess
from tests.ps.trees import Node, expected, leaves_of
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import log
from tf_hips.ps.terms.recorder import Kind

SHAPES = ((3, 3, 1, 8), (8,), (72, 10), (10,))
TREE = Node("", (Node("west", ("a", "b"), sends=FEEDBACK), "c"), sends=FEEDBACK)
LAST = 59

pytestmark = pytest.mark.heavy  # servers start many times


class TreeServer(ServerProcess):
    """One server of a tree, as a process that keeps its run."""

    def __init__(self, base: Path, node: Node, above: "TreeServer | None") -> None:
        super().__init__(base / (node.site or "top"))
        self.node = node
        self.uplink = above.address if above is not None else None

    def command(self, *more: str) -> list[str]:
        options = ["--parties", ",".join(self.node.names), "--insecure", "--once"]
        options += ["--state", str(self.state), *more]
        if self.uplink is not None:
            options += ["--uplink", self.uplink, "--site", self.node.site]
        if not self.is_eager:
            return [sys.executable, "-m", "tf_hips.cli", "server", *options]
        program = (
            "from tf_hips import cli\n"
            "from tf_hips.ps.disk import durable\n"
            "durable.SNAPSHOT_AFTER_BYTES = durable.SNAPSHOT_AFTER_SNAPSHOTS = 0\n"
            f"cli.main({['server', *options]!r})"
        )
        return [sys.executable, "-c", program]

    def wait_for_round(self, number: int) -> None:
        """Waits until something of a round has been taken in; also where the journal is cut."""
        if self.is_eager:
            eventually(lambda: max(self.snapshots(), default=-1) >= number)
            return
        self.wait_for(Kind.PACKET, lambda found: bool(found) and found[-1]["round"] >= number)

    def snapshots(self) -> list[int]:
        events = log.read_events(self.logs)
        return [event["round"] for event in events if event["event"] == "snapshot"]

    def check_end(self) -> None:
        """It ends by itself, and well."""
        assert self.process is not None
        code = self.process.wait(2 * DEADLINE_S)
        self.end()
        assert code == 0, "".join(self.lines)


@contextlib.contextmanager
def tree(base: Path, node: Node = TREE) -> Iterator[dict[str, TreeServer]]:
    servers: dict[str, TreeServer] = {}

    def start(one: Node, above: TreeServer | None) -> None:
        servers[one.site] = TreeServer(base, one, above)
        servers[one.site].start()
        for child in one.children:
            if isinstance(child, Node):
                start(child, servers[one.site])

    try:
        start(node, None)
        yield servers
    finally:
        for server in servers.values():
            server.end()


def addresses(servers: dict[str, TreeServer]) -> dict[str, str]:
    return {site: server.address for site, server in servers.items()}


@pytest.mark.parametrize(
    ("victims", "is_eager"),
    [
        pytest.param(("west",), False, id="party", marks=pytest.mark.slow),
        pytest.param(("west",), True, id="party-snapshots", marks=pytest.mark.slow),
        pytest.param(("",), False, id="top", marks=pytest.mark.slow),
        pytest.param(("west", ""), True, id="both-snapshots", marks=pytest.mark.slow),
    ],
)
def test_servers_killed_while_rounds_go_on(
    certificates: Certificates, tmp_path: Path, victims: tuple[str, ...], is_eager: bool
) -> None:
    with tree(tmp_path) as servers:
        for site in victims if is_eager else ():
            servers[site].is_eager = True
            servers[site].restart()
        with leaves_of(certificates, TREE, addresses(servers), shapes=SHAPES) as members:
            training = [Later(lambda one=one: one.train(0, LAST)) for one in members]
            for number in (3, 17, 40):
                for site in victims:
                    servers[site].wait_for_round(number)
                    servers[site].kill()
                for site in victims:
                    servers[site].start()
            merged = [one.result() for one in training]
            wanted = expected(TREE, LAST + 1, SHAPES)
            assert all(one == wanted for one in merged)
            together(*(member.client.leave for member in members))
        for server in servers.values():
            server.check_end()


def test_a_party_server_killed_in_every_phase(certificates: Certificates, tmp_path: Path) -> None:
    with (
        tree(tmp_path) as servers,
        leaves_of(certificates, TREE, addresses(servers), shapes=SHAPES, joins=False) as (a, b, c),
    ):
        west = servers["west"]
        early = Later(a.join)
        eventually(lambda: a.client._is_durable)  # it has an answer to its first call, and joins
        west.restart()
        late = Later(b.join)
        eventually(lambda: b.client._is_durable)
        c.join()
        early.result()
        late.result()

        weights = np.arange(3 << 18, dtype=np.float32)
        a.client.first_sync([weights])
        west.restart()
        for member in (b, c):
            np.testing.assert_array_equal(member.client.first_sync([0 * weights])[0], weights)

        gathering = [Later(lambda m=m: m.client.gather(0, "loss", b"here")) for m in (a, b)]
        west.wait_for(Kind.GATHERED, lambda found: len(found) == 2)
        west.restart()
        assert c.client.gather(0, "loss", b"c") == [b"here", b"here", b"c"]
        assert all(one.result() == [b"here", b"here", b"c"] for one in gathering)

        started = [Later(lambda m=m: m.train(0, 0)) for m in (a, b)]
        west.wait_for(Kind.PACKET, lambda found: len(found) == 2 * 4)
        west.restart()
        merged = c.train(0, 0)
        assert all(one.result() == merged for one in started)
        west.restart()
        results = together(*(lambda m=m: m.train(1, 3) for m in (a, b, c)))
        assert [merged + result for result in results] == 3 * [expected(TREE, 4, SHAPES)]

        a.client.leave()
        west.kill()
        leaving = Later(b.client.leave)
        west.start()
        leaving.result()
        c.client.leave()
        for server in servers.values():
            server.check_end()


@pytest.mark.parametrize(
    "is_eager", [pytest.param(False, marks=pytest.mark.slow), True], ids=["journal", "snapshots"]
)
def test_a_leaf_comes_back_below_a_party_server(
    certificates: Certificates, tmp_path: Path, is_eager: bool
) -> None:
    with tree(tmp_path) as servers:
        west = servers["west"]
        west.is_eager = is_eager
        west.restart()
        with leaves_of(certificates, TREE, addresses(servers), shapes=SHAPES) as (a, b, c):
            wanted = expected(TREE, 9, SHAPES)
            together(*(lambda m=m: m.train(0, 2) for m in (a, b, c)))
            backup = Backup.of(b, 3)
            Backup.of(a, 2)
            together(*(lambda m=m: m.train(3, 4) for m in (a, b, c)))
            payloads = [b"of a", b"", b"of c"]
            gathered = together(
                *(
                    lambda m=m, p=p: m.client.gather(0, "loss", p)
                    for m, p in zip((a, b, c), payloads, strict=True)
                )
            )
            assert gathered == 3 * [payloads]
            together(*(lambda m=m: m.train(5, 5) for m in (a, b, c)))
            b.client.close()
            waiting = [Later(lambda m=m: m.train(6, 8)) for m in (a, c)]
            west.restart()  # it keeps what a leaf may come back to
            back = Party(
                west.address,
                "b",
                None,
                shapes=SHAPES,
                compression=FEEDBACK,
                downlink=TREE.up,
                above=FEEDBACK,
                first_round=3,
            )
            back.residuals = [one.copy() for one in backup.residuals]
            back.join()
            assert back.train(3, 4) == wanted[3:5]
            assert back.client.gather(0, "loss", b"") == payloads
            assert back.train(5, 8) == wanted[5:]
            assert [one.result() for one in waiting] == 2 * [wanted[6:]]
            together(*(m.client.leave for m in (a, back, c)))
        for server in servers.values():
            server.check_end()


def test_first_weights_from_above_outlive_the_server(
    certificates: Certificates, tmp_path: Path
) -> None:
    node = Node("", ("c", Node("west", ("a", "b"), sends=FEEDBACK)), sends=FEEDBACK)
    with (
        tree(tmp_path, node) as servers,
        leaves_of(certificates, node, addresses(servers), shapes=SHAPES) as (c, a, b),
    ):
        weights = np.arange(3 << 18, dtype=np.float32)
        early = Later(lambda: a.client.first_sync([0 * weights]))
        west = servers["west"]
        c.client.first_sync([weights])
        west.wait_for(Kind.WEIGHTS, lambda found: bool(found))
        west.restart()
        np.testing.assert_array_equal(early.result()[0], weights)
        west.restart()
        np.testing.assert_array_equal(b.client.first_sync([0 * weights])[0], weights)
        results = together(*(lambda m=m: m.train(0, 2) for m in (c, a, b)))
        assert results == 3 * [expected(node, 3, SHAPES)]
        together(*(m.client.leave for m in (a, b, c)))
        for server in servers.values():
            server.check_end()


def test_a_run_that_is_over_below_is_told_above_by_the_next_process(
    certificates: Certificates, tmp_path: Path
) -> None:
    with (
        tree(tmp_path) as servers,
        leaves_of(certificates, TREE, addresses(servers), shapes=SHAPES) as (a, b, c),
    ):
        together(*(lambda m=m: m.train(0, 1) for m in (a, b, c)))
        servers[""].kill()
        together(a.client.leave, b.client.leave)
        servers["west"].kill()  # it has nobody to tell it to
        servers[""].start()
        servers["west"].start()
        c.client.leave()
        for server in servers.values():
            server.check_end()


@pytest.mark.slow
def test_a_party_server_below_several_comes_back_to_all(
    certificates: Certificates, tmp_path: Path
) -> None:
    """With a mean, which needs to know what the children of the killed server stand for."""
    results = []
    for is_killed in (False, True):
        with contextlib.ExitStack() as stack:
            settings = {"parties": TREE.names, "insecure": True, "rule": "fedavgm"}
            tops = [
                stack.enter_context(serving(certificates, shard=(place, 2), **settings))
                for place in range(2)
            ]
            [node] = [one for one in TREE.children if isinstance(one, Node)]
            west = TreeServer(tmp_path / f"{is_killed}", node, None)
            west.uplink = ",".join(top.address for top in tops)
            stack.callback(west.end)
            west.start()
            places = {"": west.uplink, "west": west.address}
            members = stack.enter_context(leaves_of(certificates, TREE, places, shapes=SHAPES))

            def train(member: Party) -> list[bytes]:
                return [
                    member.client.exchange(n, member.packets(n), member.child + 1.0).tobytes()
                    for n in range(LAST + 1)
                ]

            training = [Later(lambda one=one: train(one)) for one in members]
            for number in (3, 17, 40) if is_killed else ():
                west.wait_for_round(number)
                west.restart()
            merged = [one.result() for one in training]
            assert all(one == merged[0] for one in merged)
            results.append(merged[0])
            together(*(member.client.leave for member in members))
            west.check_end()
    assert results[0] == results[1]
