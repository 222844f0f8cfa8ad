# SPDX-License-Identifier: Apache-2.0
"""Servers with a server above them: rounds, gathers, first weights, and how a tree ends."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.ps.parties import DEADLINE_S, FEEDBACK, Party, serving, together, train_all
from tests.ps.trees import SHAPES, Node, addresses_of, expected, leaves_of, serving_tree
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import cli
from tf_hips.config import Uplink
from tf_hips.errors import ConfigError, PeerError, ProtocolError, TfHipsError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.client.client import Client
from tf_hips.ps.client.passage import Batch
from tf_hips.ps.server.server import Server, ServerConfig
from tf_hips.ps.terms import tree
from tf_hips.ps.terms.model import Model

pytestmark = pytest.mark.heavy  # servers start in most of these

TWO = Node("", (Node("west", ("a", "b")), Node("east", ("c", "d"))), sends=FEEDBACK)
MIXED = Node("", (Node("west", ("a", "b")), "c"), sends=FEEDBACK)
NOISE = "error_feedback(terngrad(bitwidth=2))"
DEEP = Node(
    "",
    ("a", Node("region", (Node("west", ("b", "c"), up=NOISE), "d"), sends=NOISE, up=FEEDBACK)),
    sends=FEEDBACK,
    up=NOISE,
)


@pytest.mark.parametrize(
    ("node", "insecure"),
    [(TWO, False), (MIXED, True), (DEEP, False)],
    ids=["two", "mixed without TLS", "deep"],
)
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


@pytest.mark.parametrize("node", [TWO, DEEP], ids=["two", "deep"])
def test_gathers_bring_the_payloads_of_all_leaves(certificates: Certificates, node: Node) -> None:
    with (
        serving_tree(certificates, node) as servers,
        leaves_of(certificates, node, addresses_of(servers)) as members,
    ):
        for number in range(3):
            # Of one leaf nothing, which is a payload too.
            payloads = [b"%d of %d" % (number, place) * place for place in range(len(members))]
            payloads[-1] *= 300_000
            results = together(
                *(
                    lambda m=m, p=p, n=number: m.client.gather(n, "loss", p)
                    for m, p in zip(members, payloads, strict=True)
                )
            )
            assert results == [payloads] * len(members)
        with pytest.raises(TfHipsError, match=r"different calls: site `.*` waits in exact"):
            together(
                *(
                    lambda m=m, label=label: m.client.gather(3, label, b"")
                    for m, label in zip(members, ("x", "x", "y", "y"), strict=True)
                )
            )


def test_payloads_that_are_too_long_together_end_the_run_in_words(
    certificates: Certificates,
) -> None:
    with (
        serving_tree(certificates, TWO, max_gather_bytes=100) as servers,
        leaves_of(certificates, TWO, addresses_of(servers)) as members,
    ):
        first = [b"x" * 40] * 4
        results = together(*(lambda m=m: m.client.gather(0, "loss", first[0]) for m in members))
        assert results == [first] * 4
        with pytest.raises(
            TfHipsError,
            match=r"at most 100 bytes, .* 120 bytes: `loss` of the leaves \w, \w in one",
        ):
            together(*(lambda m=m: m.client.gather(1, "loss", b"x" * 50) for m in members))


def first_weights(members: list[Party], weights: list[list[np.ndarray]]) -> None:
    synced = together(
        *(lambda m=m, w=w: m.client.first_sync(w) for m, w in zip(members, weights, strict=True))
    )
    for one in synced:
        for got, sent in zip(one, weights[0], strict=True):
            np.testing.assert_array_equal(got, sent)


@pytest.mark.parametrize("node", [TWO, MIXED, DEEP], ids=["two", "mixed", "deep"])
def test_all_begin_with_the_weights_of_the_first_leaf(
    certificates: Certificates, node: Node
) -> None:
    with (
        serving_tree(certificates, node) as servers,
        leaves_of(certificates, node, addresses_of(servers)) as members,
    ):
        generator = np.random.default_rng(0)
        weights = [
            [generator.standard_normal(700_000, np.float32), np.full((3, 2), place)]
            for place in range(len(members))
        ]
        first_weights(members, weights)
        assert train_all(members, 0, 0) == expected(node, 1)


def test_other_weights_are_refused_with_the_names(certificates: Certificates) -> None:
    with (
        serving_tree(certificates, TWO) as servers,
        leaves_of(certificates, TWO, addresses_of(servers)) as members,
        pytest.raises(TfHipsError, match=r"Site `west` .there. and site `east` .here. dif"),
    ):
        first_weights(members, [[np.zeros(3)]] * 2 + [[np.zeros(4)]] * 2)


def test_another_model_is_refused_with_the_names(certificates: Certificates) -> None:
    with (
        serving_tree(certificates, TWO) as servers,
        leaves_of(certificates, TWO, addresses_of(servers), joins=False) as members,
    ):
        for member in members[2:]:
            member.shapes = ((3,), *member.shapes[1:])
        together(*(member.join for member in members))
        with pytest.raises(TfHipsError, match=r"Site `.*east.*` \(.*here.* differ: tensor 0"):
            together(*(lambda m=m: m.train(0, 0) for m in members[:2]))


def test_a_lost_leaf_ends_the_tree_with_its_name(certificates: Certificates) -> None:
    with (
        serving_tree(certificates, DEEP, lost_after_s=1.0) as servers,
        leaves_of(certificates, DEEP, addresses_of(servers)) as members,
    ):
        merged = train_all(members, 0, 1)
        assert merged == expected(DEEP, 2)
        lost = members.pop(1)
        lost.client.close()
        for member in members:
            with pytest.raises(PeerError, match=r"Site `b` was lost: its connection closed"):
                member.train(2, 3)
        for server in servers.values():
            assert "Site `b` was lost" in str(server._session.ended)


def test_a_leaf_that_leaves_with_a_reason_ends_the_tree(certificates: Certificates) -> None:
    with (
        serving_tree(certificates, TWO) as servers,
        leaves_of(certificates, TWO, addresses_of(servers)) as members,
    ):
        train_all(members, 0, 0)
        members[3].client.leave("its disk is full")
        for member in members[:3]:
            with pytest.raises(PeerError, match="Site `d` left the run: its disk is full"):
                member.train(1, 2)


def test_a_failed_step_ends_the_tree_when_nobody_at_its_server_waits(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf_hips.ps.session.waiting.FAILED_AFTER_S", 0.5)
    node = Node("", (Node("west", ("a",)), "b"), sends=FEEDBACK)
    with (
        serving_tree(certificates, node) as servers,
        leaves_of(certificates, node, addresses_of(servers)) as (a, b),
    ):
        train_all((a, b), 0, 0)
        a.client.failed("ValueError: no more data")
        with pytest.raises(PeerError, match=r"`west` does not come .* Site `a`: ValueError: no mo"):
            b.train(1, 1)


def test_the_end_above_is_the_end_below(certificates: Certificates) -> None:
    with (
        serving_tree(certificates, DEEP) as servers,
        leaves_of(certificates, DEEP, addresses_of(servers)) as members,
    ):
        train_all(members, 0, 0)
        servers[""]._session.end("The server was stopped.")
        for member in members:
            with pytest.raises(PeerError, match=r"The run has ended\. The server was stopped."):
                member.train(1, 2)


def test_a_server_serves_a_run_after_another(certificates: Certificates) -> None:
    with serving_tree(certificates, TWO) as servers:
        for _ in range(2):
            with leaves_of(certificates, TWO, addresses_of(servers)) as members:
                assert train_all(members, 0, 1) == expected(TWO, 2)
                together(*(member.client.leave for member in members))
                for server in servers.values():
                    eventually(lambda s=server: s._session.is_over, DEADLINE_S)
                    assert server._session.ended is None


def test_names_are_those_of_one_leaf_each(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf_hips.ps.calls.wait_limits._MARGIN_S", 0.5)
    twice = Node("", (Node("west", ("a", "b")), "a"), sends=FEEDBACK)
    own = Node("", (Node("west", ("west", "b")), "c"), sends=FEEDBACK)
    for node, name in ((twice, "a"), (own, "west")):
        with (
            serving_tree(certificates, node, join_timeout_s=1.0) as servers,
            leaves_of(certificates, node, addresses_of(servers), joins=False) as members,
            pytest.raises(TfHipsError, match=f"a name of its own.* Received: `{name}` twice"),
        ):
            together(*(member.join for member in members))


def test_wishes_and_orders_for_the_way_up(certificates: Certificates) -> None:
    """What it was told comes before what children wish for, and that before what they send."""
    for told, wish, found in (
        (NOISE, FEEDBACK, NOISE),
        (None, NOISE, NOISE),
        (None, None, FEEDBACK),
    ):
        node = Node("", (Node("west", ("a",), sends=FEEDBACK, up=found),), sends=found)
        with serving_tree(certificates, node, uplink_compression=told) as servers:
            member = Party(
                servers["west"].address, "a", None, shapes=SHAPES, compression=FEEDBACK, above=wish
            )
            member.downlink = node.up
            member.join()
            upper = servers["west"].snapshot()["uplink"]
            assert upper["compression"] == found
            assert member.train(0, 1) == expected(node, 2)
            member.client.close()
    for settings, text in (
        (
            {"downlink": FEEDBACK, "uplink": Uplink("127.0.0.1:1", "w")},
            "`downlink` is what the top",
        ),
        ({"uplink_compression": FEEDBACK}, "`uplink_compression` needs `uplink`"),
    ):
        with pytest.raises(ConfigError, match=text):
            ServerConfig(("a",), insecure=True, **settings)


def test_status_of_a_party_server_names_its_way_up(
    certificates: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = certificates.identity("operator", "alice")
    options = ["--authority", operator.authority, "--certificate", operator.certificate]
    options += ["--key", operator.key]
    with serving_tree(certificates, MIXED, insecure=False) as servers:

        def said(site: str, role: str) -> str:
            command = ["status", "--server", servers[site].address, "--server-role", role]
            with pytest.raises(SystemExit) as ended:
                cli.main([*command, *options])
            assert ended.value.code == 0
            return " ".join(capsys.readouterr().out.split())  # lines are broken

        top = servers[""].address
        assert f"above: {top}, as `west`, not joined yet" in said("west", "server")
        with leaves_of(certificates, MIXED, addresses_of(servers), insecure=False) as members:
            train_all(members, 0, 1)
            text = said("west", "server")
            assert f"above: {top}, as `west`, by {FEEDBACK}; 3 leaves in the tree" in text
            assert "its way up has missed" in text
            assert "above:" not in said("", "global-server")


def test_a_server_tells_where_it_stands(certificates: Certificates) -> None:
    with (
        serving_tree(certificates, MIXED) as servers,
        leaves_of(certificates, MIXED, addresses_of(servers)) as members,
    ):
        train_all(members, 0, 1)
        told = servers["west"].snapshot()
        assert told["uplink"] == {
            "server": servers[""].address,
            "site": "west",
            "is_joined": True,
            "compression": FEEDBACK,
            "leaves": 3,
        }
        assert [child["site"] for child in told["children"]] == ["a", "b"]
        assert servers[""].snapshot()["uplink"] is None
        assert [one["workers"] for one in servers[""].snapshot()["children"]] == [3, 3]


def test_roles_are_checked_on_every_level(certificates: Certificates) -> None:
    uplink = Uplink("127.0.0.1:1", "west", certificates.party("west"))
    parts = {"parties": ("a",), "uplink": uplink}
    with pytest.raises(ConfigError, match="must be one of role server"):
        Server(ServerConfig(**parts, tls=certificates.server())).start()
    with pytest.raises(ConfigError, match="`server_role` must be one of"):
        Uplink("127.0.0.1:1", "west", server_role="party")
    with serving_tree(certificates, MIXED, insecure=False) as servers:
        for site, role in (("", "server"), ("west", "global-server")):
            member = Party(servers[site].address, "c", certificates.party("c"), server_role=role)
            said = f"must be one of role {role}: .* --server-role, .* --uplink-role"
            with pytest.raises(PeerError, match=said):
                member.join()


def decoded(results: list[bytes], shapes: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    """The values of float32 packets, round after round."""
    model, codec = Model(shapes), compressors.parse("fp32")
    lengths = model.packet_bytes(codec)
    values = []
    for result in results:
        at = 0
        for chunk, length in zip(model.chunks, lengths, strict=True):
            values.append(native.decode(codec, result[at : at + length], chunk.size))
            at += length
    return values


@pytest.mark.parametrize("rule", ["mean", "momentum(learning_rate=0.1)", "fedavgm"])
def test_the_rule_is_that_of_the_topmost_server(certificates: Certificates, rule: str) -> None:
    """Sums of sums, and means by what all leaves stand for, are those of one level."""
    shapes = ((40, 7), (8,))
    tree = Node("", (Node("west", ("a", "b"), up="fp32"), "c"), sends="fp32", up="fp32")
    flat = Node("", ("a", "b", "c"), sends="fp32", up="fp32")
    results = []
    for node in (tree, flat):
        with (
            serving_tree(certificates, node, rule=rule) as servers,
            leaves_of(certificates, node, addresses_of(servers), shapes=shapes) as members,
        ):
            assert all(one.client._welcome.rule.startswith(rule[:6]) for one in members)
            merged = []
            for number in range(3):
                weights = (1.0, 2.0, 5.0) if "fed" in rule or rule == "mean" else [None] * 3
                got = together(
                    *(
                        lambda m=m, w=w, n=number: m.client.exchange(n, m.packets(n), w).tobytes()
                        for m, w in zip(members, weights, strict=True)
                    )
                )
                assert all(one == got[0] for one in got)
                merged.append(got[0])
            results.append(decoded(merged, shapes))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_several_servers_above_give_the_same_bits(certificates: Certificates) -> None:
    with contextlib.ExitStack() as stack:
        tops = [
            stack.enter_context(
                serving(certificates, parties=TWO.names, insecure=True, shard=(place, 3))
            )
            for place in range(3)
        ]
        above = ",".join(top.address for top in tops)
        addresses = {}
        for node in TWO.children:
            assert isinstance(node, Node)
            uplink = Uplink(above, node.site, None, DEADLINE_S)
            server = stack.enter_context(
                serving(certificates, parties=node.names, insecure=True, uplink=uplink)
            )
            addresses[node.site] = server.address
        members = stack.enter_context(leaves_of(certificates, TWO, addresses))
        first_weights(members, [[np.full(5, place)] for place in range(4)])
        assert train_all(members, 0, 2) == expected(TWO, 3)
        gathered = together(*(lambda m=m: m.client.gather(0, "x", b"y") for m in members))
        assert gathered == 4 * [4 * [b"y"]]
        members[0].client.leave("enough")
        for member in members[1:]:
            with pytest.raises(PeerError, match="Site `a` left the run: enough"):
                member.train(3, 4)


class Slow:
    """A round of which a leaf has only the first packet until the test goes on."""

    def __init__(self, member: Party, number: int) -> None:
        self.whole = member.client.open_round(number, member.packets(number))
        self.number = number
        self.may_go_on = threading.Event()
        self.have: list[int] = []

    def batches(self, chunks: Sequence[int], held: frozenset[int]) -> Iterator[Batch]:
        [batch] = list(self.whole.batches(chunks, held))
        yield batch[:1]
        assert self.may_go_on.wait(DEADLINE_S)
        yield batch[1:]

    def take(self, chunk: int, packet: memoryview) -> None:
        self.whole.take(chunk, packet)
        self.have.append(chunk)
        if chunk == 0:
            self.may_go_on.set()

    def go_on(self) -> None:
        """Others are sending; this one waits for a packet."""


def test_chunks_travel_while_others_are_still_coming_in(certificates: Certificates) -> None:
    """A leaf sends no second packet before it has the result of the first, through two levels."""
    with (
        serving_tree(certificates, DEEP) as servers,
        leaves_of(certificates, DEEP, addresses_of(servers)) as members,
    ):
        rounds = [Slow(member, 0) for member in members]
        together(
            *(
                lambda m=m, one=one: m.client.transfer(one)
                for m, one in zip(members, rounds, strict=True)
            )
        )
        for one in rounds:
            assert one.have[0] == 0
            assert one.whole.result.tobytes() == expected(DEEP, 1)[0]


def test_a_server_that_is_lost_above_is_lost_below(certificates: Certificates) -> None:
    """A party server that is gone without a state ends the run for those beside it."""
    with (
        serving_tree(certificates, MIXED, lost_after_s=1.0) as servers,
        leaves_of(certificates, MIXED, addresses_of(servers)) as members,
    ):
        train_all(members, 0, 0)
        upper = servers["west"]._upper
        assert upper is not None
        assert upper._client is not None
        upper._client.close()
        with pytest.raises(PeerError, match="Site `west` was lost"):
            members[2].train(1, 1)
        with pytest.raises(PeerError, match="this party has left the run"):
            together(*(lambda m=m: m.train(1, 1) for m in members[:2]))


def test_nonsense_from_a_party_server_is_refused(certificates: Certificates) -> None:
    with serving(certificates, parties=("west",), insecure=True) as server:
        for leaves, workers, text in (
            ((("a", 1), ("b", 2)), 2, "`workers` must be those of all leaves"),
            ((("a", 0), ("b", 2)), 2, "`workers` must be from 1 to 2"),
            ((("a//b", 2),), 2, "`leaves` must be 1 to 50 letters"),
            ((("a", "b"),), 2, "A leaf must be a pair of site and workers"),
            ((("a", 1), ("a", 1)), 2, "`a` twice, as west/a and as west/a"),
            (
                tuple((f"{n:0>50}/" * 3 + f"{n:0>45}", 1) for n in range(4000)),
                4000,
                "names of a tree",
            ),
            ((("a", 1), ("b", 1)), 2, None),
        ):
            client = Client(
                Uplink(server.address, "west", None, DEADLINE_S), "local", workers, leaves=leaves
            )
            if text is not None:
                with pytest.raises(ProtocolError, match=text):
                    client.join(FEEDBACK, "same", 7)
                continue
            # Whoever has bundled nothing for its two leaves is found out.
            client.join(FEEDBACK, "same", 7)
            with pytest.raises(ProtocolError, match="must have the payloads of 2 leaves"):
                client.gather(0, "x", b"no bundle")
            assert client.gather(0, "x", tree.bundle([b"one", b"two"])) == [b"one", b"two"]
            client.close()


def test_leaves_wait_while_a_party_above_does_its_rounds_again(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That others go on is heard through the server between them."""
    monkeypatch.setattr("tf_hips.ps.client.client._MARGIN_S", 0.2)
    monkeypatch.setattr("tf_hips.ps.calls.wait_limits._MARGIN_S", 0.2)
    monkeypatch.setattr("tf_hips.ps.session.moves.TELLS_AFTER_S", 0.1)
    shapes = ((40, 7), (8,))
    with (
        serving_tree(certificates, MIXED, round_timeout_s=1.0) as servers,
        leaves_of(certificates, MIXED, addresses_of(servers), shapes=shapes) as (a, b, c),
    ):
        for one in (a, b):
            one.client.wait_s = 2.0
        wanted = expected(MIXED, 8, shapes)
        train_all((a, b, c), 0, 6)
        c.client.close()
        back = Party(
            servers[""].address, "c", None, shapes=shapes, downlink=MIXED.up, deadline_s=1.0
        )
        back.client._workers = 3
        back.join()
        began = time.monotonic()

        def slowly() -> list[bytes]:
            found = []
            for number in range(7):
                threading.Event().wait(0.5)  # it computes
                found += back.train(number, number)
            return found + back.train(7, 7)

        results = together(lambda: a.train(7, 7), lambda: b.train(7, 7), slowly)
        assert time.monotonic() - began > 3.0
        assert results == [wanted[7:], wanted[7:], wanted]
        back.client.close()
