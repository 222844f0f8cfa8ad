# SPDX-License-Identifier: Apache-2.0
"""Rounds that close without some children, over sockets: late ones, killed ones, killed servers."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.job import Spoken
from tests.faults.training import Setting
from tests.ps.parties import DEADLINE_S, SHAPES, Party, noise, parties, serving, together
from tests.ps.trees import SHAPES as TREE_SHAPES
from tests.ps.trees import Node, addresses_of, leaves_of
from tests.support.certs import Certificates
from tests.support.forked import Program
from tf_hips import cli
from tf_hips.config import Uplink
from tf_hips.errors import PeerError, TfHipsError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.rounds.partial import Partial
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.server.server import Server
from tf_hips.ps.terms.model import Model

pytestmark = pytest.mark.heavy  # deadlines are waited for

SITES = ("a", "b", "c")
WORKERS = 2
FEEDBACK = "error_feedback(onebit)"
DEADLINES: dict[str, Any] = {"insecure": True, "parties": SITES, "quorum": 2, "round_deadline": 0.1}


class Expected:
    """What rounds must give, by the store alone; the children have nothing but their packets."""

    def __init__(self, *, carries: bool) -> None:
        self.partial = Partial([WORKERS] * 3, range(len(Model(SHAPES).chunks)), carries=carries)
        up = compressors.parse(FEEDBACK)
        self.store = Store(Model(SHAPES), SITES, up, up.for_sums, 7, partial=self.partial)
        self.members = [Party("127.0.0.1:1", site, None) for site in SITES]
        for child, one in enumerate(self.members):
            one.child = child
        self.packets: dict[tuple[int, int], Any] = {}

    def add(self, child: int, number: int) -> None:
        """A child, whose rounds follow one another, delivers its update."""
        packets, at = self.members[child].packets(number), 0
        for chunk, size in enumerate(self.store.packet_limits(number)):
            self.store.add(number, child, [(chunk, packets[at : at + size])])
            at += size

    def close(self, number: int, children: tuple[int, ...]) -> bytes:
        """The results of a round of these, and of all late updates that are whole."""
        self.store.merge(self.store.close(number, children, self.partial.pending))
        results = sorted(self.store.results(number, 0)[1], key=lambda pair: pair[0])
        return b"".join(packet.tobytes() for _, packet in results)


def test_a_late_party_gets_what_the_others_got(
    certificates: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        serving(certificates, metrics="127.0.0.1:0", **DEADLINES) as server,
        parties(server, certificates, sites=SITES, insecure=True) as (a, b, c),
    ):
        first = together(*(lambda m=one: m.train(0, 0) for one in (a, b, c)))
        assert first[0] == first[1] == first[2]
        early = together(lambda: a.train(1, 4), lambda: b.train(1, 4))
        behind = server.snapshot()["children"][2]
        assert (behind["lag"], behind["absent"], behind["late"]) == (4, 4, 0)
        late = c.train(1, 4)
        assert early[0] == early[1] == late
        told = server.snapshot()
        assert [one["late"] for one in told["children"]] == [0, 0, 4]
        assert [one["absent"] for one in told["children"]] == [0, 0, 4]
        _check_what_is_told(server, capsys)
        last = together(*(lambda m=one: m.train(5, 5) for one in (a, b, c)))
        assert last[0] == last[1] == last[2]
        expected = Expected(carries=True)
        for child in range(3):
            expected.add(child, 0)
        assert first[0] == [expected.close(0, (0, 1, 2))]
        for number in range(1, 5):
            expected.store.begin(number)
            for child in (0, 1):
                expected.add(child, number)
            assert late[number - 1] == expected.close(number, (0, 1))
        for number in range(1, 5):
            expected.add(2, number)
        expected.store.begin(5)
        closing = server._session._closing
        assert closing is not None
        counted = closing._closed[5].counted  # one of them may be late on a busy machine
        for child in counted:
            expected.add(child, 5)
        assert last[0] == [expected.close(5, tuple(counted))]


def _check_what_is_told(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics") as answer:
        metrics = answer.read().decode()
    assert 'tf_hips_child_late_total{run="local",shard="0",site="c"} 4.0' in metrics
    assert 'tf_hips_quorum{run="local",shard="0"} 2.0' in metrics
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", "--server", server.address, "--insecure"])
    assert ended.value.code == 0
    assert "quorum: 2 of 3, after 0.1 s" in capsys.readouterr().out


def test_several_shards_decide_each_for_itself(certificates: Certificates) -> None:
    shapes = ((70,), (8,), (40, 7), (3,))
    options = DEADLINES | {"late": "drop"}
    with contextlib.ExitStack() as stack:
        servers: list[Server] = [
            stack.enter_context(serving(certificates, shard=(place, 2), **options))
            for place in range(2)
        ]
        address = ",".join(one.address for one in servers)
        members = stack.enter_context(
            parties(
                servers[0],
                certificates,
                address=address,
                sites=SITES,
                insecure=True,
                shapes=shapes,
            )
        )
        a, b, c = members
        together(*(lambda m=one: m.train(0, 0) for one in members))
        early = together(lambda: a.train(1, 3), lambda: b.train(1, 3))
        assert early[0] == early[1] == c.train(1, 3)
        assert all(one.snapshot()["children"][2]["late"] == 3 for one in servers)
        last = together(*(lambda m=one: m.train(4, 4) for one in members))
        assert last[0] == last[1] == last[2]


def test_a_party_server_has_a_quorum_of_its_own(certificates: Certificates) -> None:
    west = Node("west", ("a", "b", "d"), up="fp32")
    node = Node("", (west, "e"), up="fp32")
    quorum = {"quorum": 2, "round_deadline": 0.1, "late": "drop"}
    with contextlib.ExitStack() as stack:
        top = stack.enter_context(serving(certificates, insecure=True, parties=("west", "e")))
        uplink = Uplink(top.address, "west", None, DEADLINE_S, "global-server")
        low = stack.enter_context(
            serving(certificates, insecure=True, parties=west.names, uplink=uplink, **quorum)
        )
        addresses = addresses_of({"": top, "west": low})
        a, b, d, e = stack.enter_context(leaves_of(certificates, node, addresses))
        together(*(lambda m=one: m.train(0, 0) for one in (a, b, d, e)))
        early = together(*(lambda m=one: m.train(1, 1) for one in (a, b, e)))
        assert early[0] == early[1] == early[2] == d.train(1, 1)
        # Workers: a 1, b 2, d 3; the sum of a and b stands for six.
        fp32 = compressors.parse("fp32")
        found, at = np.frombuffer(early[0][0], np.uint8), 0
        model = Model(tuple(tuple(shape) for shape in TREE_SHAPES))
        for place, chunk in enumerate(model.chunks):
            size = model.packet_bytes(fp32)[place]
            packet = found[at : at + size]
            rows = []
            for one in (a, b, e):
                tensors = noise(one.child, 1, one.sizes)
                rows.append(tensors[chunk.tensor][chunk.offset :][: chunk.size])
            total = (rows[0] + rows[1]) * np.float32(2.0) + rows[2]
            np.testing.assert_array_equal(native.decode(fp32, packet, chunk.size), total)
            at += size
        together(*(lambda m=one: m.train(2, 2) for one in (a, b, d, e)))


def test_a_party_server_that_is_gone_is_one_child(certificates: Certificates) -> None:
    west = Node("west", ("a", "b"), up="fp32")
    node = Node("", (west, "e"), up="fp32")
    with contextlib.ExitStack() as stack:
        top = stack.enter_context(
            serving(
                certificates, insecure=True, parties=("west", "e"), quorum=1, round_deadline=15.0
            )
        )
        uplink = Uplink(top.address, "west", None, DEADLINE_S, "global-server")
        low = stack.enter_context(
            serving(certificates, insecure=True, parties=west.names, uplink=uplink)
        )
        addresses = addresses_of({"": top, "west": low})
        a, b, e = stack.enter_context(leaves_of(certificates, node, addresses))
        together(*(lambda m=one: m.train(0, 0) for one in (a, b, e)))
        low.stop(0.0)
        [result] = e.train(1, 1)  # what is left of the run goes on
        fp32 = compressors.parse("fp32")
        own = np.concatenate(noise(e.child, 1, e.sizes))
        model = Model(tuple(tuple(shape) for shape in TREE_SHAPES))
        sizes = model.packet_bytes(fp32)
        parts = np.split(np.frombuffer(result, np.uint8), np.cumsum(sizes)[:-1])
        found = [
            native.decode(fp32, part, chunk.size)
            for part, chunk in zip(parts, model.chunks, strict=True)
        ]
        np.testing.assert_array_equal(np.concatenate(found), own * np.float32(6 / 3))
        assert top.snapshot()["children"][0]["state"] == "lost"


def test_a_gather_goes_on_without_a_late_party(certificates: Certificates) -> None:
    with (
        serving(certificates, **DEADLINES) as server,
        parties(server, certificates, sites=SITES, insecure=True) as (a, b, c),
    ):
        together(*(lambda m=one: m.train(0, 0) for one in (a, b, c)))
        told = together(*(lambda m=one: m.client.gather(0, "x", b"1") for one in (a, b)))
        assert told == [[b"1", b"1", None]] * 2
        assert c.client.gather(0, "x", b"late") == [b"1", b"1", None]


@contextlib.contextmanager
def trapped_server(folder: Path, bind: str, trap: Any = None) -> Iterator[tuple[Spoken, str]]:
    """A server process with a quorum and a state, that can be stopped at a place and killed."""
    options = ["--parties", "a,b,c", "--insecure", "--bind", bind, "--state", str(folder / "state")]
    options += ["--quorum", "2", "--round-deadline", "0.2"]
    archive = folder / "archive"
    archive.mkdir(exist_ok=True)
    order = {"options": options, "archive": str(archive), "is_eager": False, "trap": trap}
    spoken = Spoken("tests.faults.trapped", order, folder / "server.log")
    try:
        yield spoken, spoken.wait_for("listens", patience_s=DEADLINE_S)["listens"]
    finally:
        spoken.close()


def test_a_server_is_killed_when_it_has_closed_a_round(tmp_path: Path) -> None:
    expected = Expected(carries=True)
    for child in range(3):
        expected.add(child, 0)
    wanted = [expected.close(0, (0, 1, 2))]
    expected.store.begin(1)
    for child in (0, 1):
        expected.add(child, 1)
    wanted.append(expected.close(1, (0, 1)))
    with contextlib.ExitStack() as stack:
        server, address = stack.enter_context(
            trapped_server(tmp_path, "127.0.0.1:0", ["recorded", 1, 1])
        )
        members = [Party(address, site, None) for site in SITES]
        for one in members:
            stack.callback(one.client.close)
        together(*(one.join for one in members))
        a, b, c = members
        got: dict[str, Any] = {}

        def train(name: str, one: Party) -> None:
            got[name] = one.train(1, 1)

        together(*(lambda m=one: m.train(0, 0) for one in members))

        def kill_and_start_again() -> None:
            server.wait_for("trapped", "recorded", patience_s=DEADLINE_S)
            server.kill()
            stack.enter_context(trapped_server(tmp_path, address))

        together(lambda: train("a", a), lambda: train("b", b), kill_and_start_again)
        assert got["a"] == got["b"] == [wanted[1]]
        assert c.train(1, 1) == [wanted[1]]
        last = together(*(lambda m=one: m.train(2, 2) for one in members))
        assert last[0] == last[1] == last[2]


def test_a_killed_child_is_not_waited_for_and_catches_up(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Processes; the third is killed in the middle of an upload, and ends with equal weights."""
    setting = Setting("quorum", FEEDBACK, FEEDBACK, sites=SITES, rounds=12, has_quorum=True)
    options = DEADLINES | {"round_deadline": 15.0, "lost_after_s": 2.0, "late": "drop"}
    with serving(certificates, **options) as server, contextlib.ExitStack() as stack:

        def start(site: str) -> Spoken:
            order = {
                "setting": dataclasses.asdict(setting),
                "site": site,
                "tls": None,
                "resends": False,
                "server": server.address,
                "run": "local",
                "backup": str(tmp_path / f"{site}.npz"),
            }
            return stack.enter_context(
                contextlib.closing(Spoken("tests.faults.child", order, tmp_path / f"{site}.log"))
            )

        a, b, c = (start(site) for site in SITES)
        for one in (a, b, c):
            one.wait_for("joined")
        c.tell(json.dumps({"place": "mid-upload", "round": 5}))
        c.wait_for("set")
        for one in (a, b, c):
            one.tell("12")
        c.wait_for("trapped")
        c.kill()
        for one in (a, b):
            one.wait_for("round", 11)
        assert server.snapshot()["children"][2]["state"] == "lost"
        again = start("c")
        again.wait_for("joined")
        again.tell("12")
        again.wait_for("round", 11)
        for one in (a, b, again):
            one.tell("")
        digests = {one.wait_for("digest")["digest"] for one in (a, b, again)}
        assert len(digests) == 1
        assert [one.ends() for one in (a, b, again)] == [0, 0, 0]


def test_below_quorum_everybody_hears_it_and_the_server_exits(tmp_path: Path) -> None:
    options = ["--parties", "a,b,c", "--insecure", "--bind", "127.0.0.1:0"]
    options += ["--quorum", "2", "--below-quorum-s", "0.5", "--announce", str(tmp_path / "at")]
    program = [sys.executable, "-m", "tf_hips.cli", "server", *options]
    process = Program(program, stderr=subprocess.PIPE)
    try:
        stream = process.stderr
        assert stream is not None
        line = next(text for text in stream if "listens at" in text)
        address = line.split("listens at ")[1].split()[0]
        members = [Party(address, site, None) for site in SITES]
        try:
            together(*(one.join for one in members))
            together(*(lambda m=one: m.train(0, 0) for one in members))
            for one in members[1:]:
                one.client.leave("OSError: its disk is full")
            with pytest.raises(TfHipsError) as caught:
                members[0].train(1, 1)
            assert isinstance(caught.value, PeerError)
            assert "Below quorum for 0.5 s: 1 of 3 sites are there, 2 are needed" in str(
                caught.value
            )
            assert "Site `b` left the run: OSError: its disk is full" in str(caught.value)
        finally:
            for one in members:
                one.client.close()
        assert process.wait(DEADLINE_S) == 1
        assert "Below quorum" in stream.read()
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        if process.stderr is not None:
            process.stderr.close()
