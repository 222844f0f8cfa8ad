# SPDX-License-Identifier: Apache-2.0
"""Servers of a tree that is decided on sketches, killed at any moment: the same bits.

The three servers of a tree are sessions in folders, without sockets; what `server.uplink`,
`server.relays` and `calls.service` do between them is done here, one thing at a time, as their
states say that it is due.
"""

import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.parties import together
from tests.ps.test_restart import Later
from tests.ps.test_tree_restart import TreeServer, addresses
from tests.ps.trees import Node, leaves_of
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import log, robust
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native, native_robust
from tf_hips.ps import rules
from tf_hips.ps.disk import durable
from tf_hips.ps.disk.durable import Keeper
from tf_hips.ps.robust.sketched_party import SketchingStore
from tf_hips.ps.robust.sketched_top import WeighingStore
from tf_hips.ps.session.members import Caller, Terms
from tf_hips.ps.session.session import Session
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.tree import Place
from tf_hips.robust.sketches import Sketching, seed_of

PATIENCE_S = 10.0
SECRET = 12
SEED = 7
SHAPES = [[40], [7]]
MODEL = Model.from_json(SHAPES)
FP32 = compressors.parse("fp32")
UP = "error_feedback(onebit)"
PARTIES = {"west": ("a", "b", "c"), "east": ("d", "e", "f")}
LAST = 2
LAST_TRAINED = 23


@pytest.fixture(autouse=True)
def _same_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbits", lambda bits: SECRET)


def row_of(number: int, leaf: int) -> npt.NDArray[np.float32]:
    generator = np.random.default_rng((number, leaf))
    noise = generator.standard_normal(MODEL.num_elements, np.float32)
    found = 1.0 + np.float32(0.2 * (1 + (leaf + number) % 6)) * noise
    return np.full_like(found, -9.0) if leaf == 4 else found


def packets_of(number: int, leaf: int) -> list[npt.NDArray[np.uint8]]:
    parts = np.split(row_of(number, leaf), np.cumsum([one.size for one in MODEL.chunks])[:-1])
    return [native.encode(FP32, part, native.Key(0, 0, 0)) for part in parts]


class Kept:
    """One session in a folder, which can be killed."""

    def __init__(self, base: Path, terms: Terms) -> None:
        self.base, self.terms, self.times = base, terms, 0
        self._open()

    def _open(self) -> None:
        folder = self.base / f"{self.times}"
        self.events = log.EventLog(folder / "events", run="job", role="server", site="x", rank=0)
        self.keeper = Keeper(str(folder / "state"), "job", self.terms, self.events)
        restored = self.keeper.restore()
        assert (restored is not None) == (self.times > 0)
        self.session: Session = restored or self.keeper.begin()

    def kill(self) -> None:
        """Another process goes on with what this one would have left."""
        self.settle()
        before = self.base / f"{self.times}" / "state"
        self.times += 1
        shutil.copytree(before, self.base / f"{self.times}" / "state")
        self.close(self.session, self.keeper, self.events)
        self._open()

    @staticmethod
    def close(session: Session, keeper: Keeper, events: log.EventLog) -> None:
        session._presence.stop()
        keeper.close()
        events.close()

    def settle(self) -> None:
        assert self.session._recorder.settle() is None
        recorder: Any = self.session._recorder
        if recorder._writer is not None:
            recorder._writer.join(PATIENCE_S)
            assert self.session._recorder.settle() is None

    def caller(self, child: int) -> Caller:
        return Caller(child, f"p{child}", PATIENCE_S)


class Tree:
    """A topmost server and two party servers with three leaves each."""

    def __init__(self, base: Path, rule: str) -> None:
        rule = rules.parse(rule).text
        self.top = Kept(base / "top", Terms(tuple(PARTIES), None, None, 1 << 30, 60.0, rule=rule))
        self.parties = [
            Kept(base / site, Terms(names, None, None, 1 << 30, 60.0, site=site, way_up=UP))
            for site, names in PARTIES.items()
        ]
        session = self.top.session
        welcomes = together(
            *(
                lambda k=k, names=names: session.join(
                    self.top.caller(k),
                    3,
                    UP,
                    "fp32",
                    SEED,
                    leaves=tuple((name, 1) for name in names),
                )
                for k, names in enumerate(PARTIES.values())
            )
        )
        for party, welcome in zip(self.parties, welcomes, strict=True):
            self._join_leaves(party, welcome)
        for child in range(2):
            session.agree_model(self.top.caller(child), SHAPES)

    def _join_leaves(self, party: Kept, welcome: dict[str, Any]) -> None:
        session = party.session
        threads = [
            threading.Thread(
                target=session.join, args=(party.caller(leaf), 1, "fp32", "fp32", SEED)
            )
            for leaf in range(3)
        ]
        for thread in threads:
            thread.start()
        leaves = tuple(zip(welcome["parties"], welcome["workers"], strict=True))
        known = [welcome[name] for name in ("rule", "session", "first_group", "groups")]
        place = Place(welcome["child"], leaves, UP, "fp32", *known)
        eventually(lambda: session.state.members.are_complete, PATIENCE_S, changed=session.changed)
        session.start(place)
        for thread in threads:
            thread.join(PATIENCE_S)
        for leaf in range(3):
            session.agree_model(party.caller(leaf), SHAPES)

    def __enter__(self) -> "Tree":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.servers:
            one.close(one.session, one.keeper, one.events)

    @property
    def servers(self) -> list[Kept]:
        return [self.top, *self.parties]

    @property
    def above(self) -> WeighingStore:
        found = self.top.session.store
        assert isinstance(found, WeighingStore)
        return found

    def below(self, party: int) -> SketchingStore:
        found = self.parties[party].session.store
        assert isinstance(found, SketchingStore)
        return found

    def steps(self, number: int) -> Iterator[str]:
        """One round, one thing at a time, each found by what the servers are in want of."""
        while (task := self._due(number)) is not None:
            what, do = task
            do()
            for one in self.servers:
                one.settle()
            yield what

    def _due(self, number: int) -> tuple[str, Callable[[], object]] | None:
        for party in range(2):
            task = self._due_below(number, party)
            if task is not None:
                return task
        for party in range(2):
            task = self._due_between(number, party)
            if task is not None:
                return task
        return None

    def _due_below(self, number: int, party: int) -> tuple[str, Callable[[], object]] | None:
        """A packet of a leaf that has not come."""
        kept = self.parties[party]
        rounds = [kept.session.begin_round(kept.caller(leaf), number) for leaf in range(3)]
        for leaf in range(3):
            for chunk in sorted(set(rounds[leaf].chunks) - rounds[leaf].delivered(number, leaf)):
                packet = packets_of(number, 3 * party + leaf)[chunk]
                return "packet", partial(rounds[0].add, number, leaf, [(chunk, packet)])
        return None

    def _due_between(self, number: int, party: int) -> tuple[str, Callable[[], object]] | None:
        """What a party server and the topmost one owe each other."""
        below = self.below(party)
        if below.due() != number:
            return None
        session = self.top.session
        above = session.begin_round(self.top.caller(party), number)
        assert isinstance(above, WeighingStore)
        above.fix(number, party)
        seed = above.seed(number, party)
        if seed is not None:
            made = below.sketches(number, seed)
            assert made is not None
            return "sketches", partial(above.add, number, party, [(above.sketch_chunk, made)])
        weights = above.weights_of(number, party)
        if weights is not None and not below.is_weighed(number):
            return "weights", partial(below.take_weights, number, weights)
        for chunk, packet in below.ups(number, 0)[1]:
            if below.is_weighed(number) and chunk not in above.delivered(number, party):
                return "sum", partial(above.add, number, party, [(chunk, packet)])
        if above.is_merged(number):
            done = {chunk for chunk, _ in below.results(number, 0)[1]}
            for chunk, packet in above.results(number, 0)[1]:
                if chunk not in done:
                    return "result", partial(below.finish, number, chunk, packet)
        return None

    def result(self, number: int) -> bytes:
        """What all leaves get of a round that is over."""
        found = []
        for party in range(2):
            assert self.below(party).is_merged(number)
            news = sorted(self.below(party).results(number, 0)[1], key=lambda one: one[0])
            found.append(b"".join(packet.tobytes() for _, packet in news))
        assert found[0] == found[1]
        return found[0]


RULES = ("sketched(k=64) >> krum(f=1)", "sketched(k=64) >> geometric_median(f=2) >> fedavgm")


def undisturbed(base: Path, rule: str) -> tuple[list[bytes], list[str]]:
    """Results of all rounds, and the steps of the one before the last."""
    with Tree(base, rule) as tree:
        results, told = [], []
        for number in range(LAST + 1):
            steps = list(tree.steps(number))
            results.append(tree.result(number))
            told = steps if number == LAST - 1 else told
        return results, told


def computed(text: str) -> list[bytes]:
    """What all rounds must give, from rows alone; nothing stands behind the rule."""
    rule = rules.parse(text).sketched
    assert rule is not None
    up = compressors.parse(UP)
    seeds = [native.derive_seed(SEED, f"party/{site}") for site in PARTIES]
    residuals = [[np.zeros(one.size, np.float32) for one in MODEL.chunks] for _ in PARTIES]
    found = []
    for number in range(LAST + 1):
        cuts = np.cumsum([one.size for one in MODEL.chunks])[:-1]
        rows = [np.split(row_of(number, leaf), cuts) for leaf in range(6)]
        making = Sketching(seed_of(SECRET, number), 6, rule.numbers)
        for chunk in range(len(MODEL.chunks)):
            making.add(chunk, [row[chunk] for row in rows])
        decision = rule.decide(making.squares(), making.sketches(), secret=SECRET, step=number)
        weights = np.zeros((1, 6), np.float32)
        weights[0, list(decision.accepted)] = decision.mixing[0]
        packets = []
        for chunk, where in enumerate(MODEL.chunks):
            sent = []
            for party, seed in enumerate(seeds):
                leaves = [leaf for leaf in range(3 * party, 3 * party + 3) if weights[0, leaf]]
                if not weights[0, 3 * party : 3 * party + 3].any():
                    continue
                mixed = native_robust.mix(
                    [rows[leaf][chunk] for leaf in leaves], weights[:, leaves]
                )
                key = native.Key(seed, number, where.tensor, where.offset)
                sent.append(native.encode(up, mixed[0], key, kept=residuals[party][chunk]))
            merged = native.merge(up, sent, where.size)
            packets.append(native.encode(FP32, merged, native.Key(0, 0, 0)).tobytes())
        found.append(b"".join(packets))
    return found


@pytest.mark.parametrize("text", [RULES[0], "sketched(k=64) >> geometric_median(f=2)"])
def test_rounds_are_what_rows_and_residuals_come_to(tmp_path: Path, text: str) -> None:
    assert undisturbed(tmp_path, text)[0] == computed(text)


def killed_after(
    base: Path, rule: str, cut: int, choose: Callable[[Tree], list[Kept]]
) -> list[bytes]:
    """Results of all rounds; servers are killed after `cut` steps of the one before the last."""
    with Tree(base, rule) as tree:
        found = []
        for number in range(LAST + 1):
            for place, _ in enumerate(tree.steps(number)):
                if number == LAST - 1 and place == cut - 1:
                    for victim in choose(tree):
                        victim.kill()
            found.append(tree.result(number))
        return found


@pytest.mark.parametrize(
    "what",
    [
        "weights",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("packet", "sketches", "sum")),
    ],
)
def test_all_servers_killed_in_the_middle_of_a_round(tmp_path: Path, what: str) -> None:
    rule = RULES[0]
    wanted, steps = undisturbed(tmp_path / "whole", rule)
    assert {"packet", "sketches", "weights", "sum", "result"} == set(steps)
    assert steps.index("sketches") > max(k for k, one in enumerate(steps) if one == "packet")
    assert len(set(wanted)) == LAST + 1
    cut = steps.index(what) + 1
    assert killed_after(tmp_path / "cut", rule, cut, lambda tree: tree.servers) == wanted


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_snapshots", [False, True])
def test_servers_killed_between_any_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, has_snapshots: bool
) -> None:
    wanted, steps = undisturbed(tmp_path / "whole", rule)
    if has_snapshots:
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    first = steps.index("sketches")
    # Of the packets one, and then every step.
    for cut in (first // 2, *range(first, len(steps) + 1)):
        chosen = (cut % 3, (cut + 1) % 3)[: 1 + cut % 2]
        found = killed_after(
            tmp_path / f"cut{cut}",
            rule,
            cut,
            lambda tree, chosen=chosen: [tree.servers[one] for one in chosen],  # type: ignore[misc]
        )
        assert found == wanted, f"killed after step {cut} of {steps}"


def test_a_seed_is_the_same_after_a_kill_and_recorded_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Tree(tmp_path, RULES[0]) as tree:
        for what in tree.steps(0):
            if what == "sketches":
                break
        for party in range(2):
            tree.above.fix(0, party)
        seed = tree.above.seed(0, 0)
        assert seed == robust.sketches.seed_of(SECRET, 0)
        monkeypatch.setattr(secrets, "randbits", lambda bits: 1)  # a restored one draws none
        tree.top.kill()
        assert tree.above.seed(0, 0) is None  # west has to say again that its rows are fixed
        tree.above.fix(0, 0)
        assert tree.above.seed(0, 0) == seed
        assert tree.parties[0].session.state.electing.secret is None


def killing(base: Path, is_eager: bool) -> Iterator[dict[str, TreeServer]]:
    """Servers of a tree as processes; the topmost one is told the rule."""
    node = Node(
        "", tuple(Node(site, names, up="fp32") for site, names in PARTIES.items()), up="fp32"
    )

    class Told(TreeServer):
        def command(self, *more: str) -> list[str]:
            told = () if self.uplink is not None else ("--rule", "sketched(k=3000) >> krum(f=1)")
            return super().command(*more, *told)

    servers: dict[str, TreeServer] = {}
    try:
        servers[""] = Told(base, node, None)
        servers[""].is_eager = is_eager
        servers[""].start()
        for one in node.children:
            assert isinstance(one, Node)
            servers[one.site] = Told(base, one, servers[""])
            servers[one.site].is_eager = is_eager
            servers[one.site].start()
        yield servers
    finally:
        for server in servers.values():
            server.end()


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("is_eager", [False, True], ids=["journal", "snapshots"])
def test_real_servers_killed_while_rounds_go_on(
    certificates: Certificates, tmp_path: Path, is_eager: bool
) -> None:
    for servers in killing(tmp_path, is_eager):
        node = servers[""].node
        shapes = ((73, 10),)  # one block in each half of a sketch, which is exact then
        with leaves_of(certificates, node, addresses(servers), shapes=shapes) as members:
            training = [Later(partial(one.train, 0, LAST_TRAINED)) for one in members]
            for number, victims in ((2, ("west",)), (8, ("",)), (15, ("east", "", "west"))):
                for site in victims:  # of the topmost not one more comes when one is gone
                    servers[site].wait_for_round(number)
                for site in victims:
                    servers[site].kill()
                for site in victims:
                    servers[site].start()
            merged = [one.result() for one in training]
            assert all(one == merged[0] for one in merged)
            for number in (0, 9, 16, LAST_TRAINED):
                sent = [one.packets(number) for one in members]
                rows = [native.decode(FP32, one, 730) for one in sent]
                chosen = robust.krum(f=1).run(rows).selected
                assert chosen is not None
                assert merged[0][number] == sent[chosen[0]].tobytes()
            together(*(member.client.leave for member in members))
        for server in servers.values():
            server.check_end()


def test_who_is_where_by_which_rules_outlives_the_server(tmp_path: Path) -> None:
    terms = Terms(("a", "region"), None, None, 1 << 30, 60.0, rule="median(f=0)")
    top = Kept(tmp_path / "top", terms)
    region = {
        "workers": 3,
        "leaves": (("west/b", 1), ("west/c", 1), ("d", 1)),
        "guards": (("", None, 1), ("west", "median", None)),
    }
    told = together(
        lambda: top.session.join(top.caller(0), 1, "fp32", "fp32", SEED),
        lambda: top.session.join(
            top.caller(1), compression="fp32", downlink="fp32", seed=SEED, **region
        ),
    )
    assert told[0]["paths"] == ["a", "region/west/b", "region/west/c", "region/d"]
    assert told[0]["guards"] == [
        ["", "median(f=0)", None],
        ["region", None, 1],
        ["region/west", "median(f=auto)", None],
    ]
    known = top.session._members.tree
    top.kill()
    assert top.session._members.tree == known == (
        tuple(told[0]["paths"]),
        tuple(map(tuple, told[0]["guards"])),
    )  # fmt: skip
    top.close(top.session, top.keeper, top.events)
