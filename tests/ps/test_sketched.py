# SPDX-License-Identifier: Apache-2.0
"""Trees that are decided on sketches of all leaves' rows, over real sockets."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.parties import DEADLINE_S, Party, raw_channel, raw_exchange, serving, together
from tests.ps.test_restart import Later
from tests.ps.trees import Node, addresses_of, leaves_of, serving_tree
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import robust
from tf_hips.config import Uplink
from tf_hips.errors import ConfigError, PacketError, ProtocolError, TfHipsError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.ps.client.passage import Batch, WayUp
from tf_hips.ps.robust.sketch import (
    NONE,
    REFUSED,
    ROW,
    PartyRows,
    most_bytes,
    weights_from_bytes,
    weights_to_bytes,
)
from tf_hips.ps.robust.sketched_party import SketchingStore
from tf_hips.ps.robust.sketched_top import AddingUpdates, WeighingStore
from tf_hips.ps.rules import leaves as leaf_rules
from tf_hips.ps.server.server import Server
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.quorum import Quorum
from tf_hips.ps.transport.wire import REFUSED_WEIGHT, Call

pytestmark = pytest.mark.heavy  # many rounds of two levels

SHAPES = ((36, 8),)
FP32 = compressors.parse("fp32")
Floats = npt.NDArray[np.float32]
# Of one chunk that is not longer a half has one block, in which no two elements meet: it is exact.
ENOUGH = 600


def tree(west: int = 3, east: int = 3, up: str = "fp32") -> Node:
    counts = {"west": west, "east": east}
    parties = tuple(
        Node(site, tuple(f"{site}{n}" for n in range(count)), up=up)
        for site, count in counts.items()
    )
    return Node("", parties, up="fp32")


def packets_of(vector: Floats, model: Model) -> npt.NDArray[np.uint8]:
    sizes = [chunk.size for chunk in model.chunks]
    parts = np.split(vector, np.cumsum(sizes)[:-1])
    return np.concatenate([native.encode(FP32, part, native.Key(0, 0, 0)) for part in parts])


def vector_of(packets: npt.NDArray[np.uint8], model: Model) -> Floats:
    cuts = np.cumsum(model.packet_bytes(FP32))[:-1]
    parts = zip(np.split(packets, cuts), model.chunks, strict=True)
    return np.concatenate([native.decode(FP32, part, chunk.size) for part, chunk in parts])


def one_round(
    members: Sequence[Party],
    number: int,
    rows: Sequence[Floats],
    weights: Sequence[float | None] | None = None,
) -> Floats:
    """What all leaves got, which is the same for all."""
    model = Model(tuple(tuple(shape) for shape in members[0].shapes))
    said = weights if weights is not None else [1.0] * len(rows)
    got = together(
        *(
            lambda m=m, row=row, weight=weight: m.client.exchange(
                number, packets_of(row, model), weight
            )
            for m, row, weight in zip(members, rows, said, strict=True)
        )
    )
    assert all(np.array_equal(one, got[0]) for one in got)
    return vector_of(got[0], model)


def rows_of(number: int, count: int, size: int = 288) -> list[Floats]:
    """Honest rows; of some the noise is less, so that a rule has something to choose."""
    generator = np.random.default_rng((number, count))
    lengths = generator.permutation(np.linspace(0.1, 1.0, count))
    noise = generator.standard_normal((count, size))
    return list((1.0 + lengths[:, None] * noise).astype(np.float32))


def children(server: Server) -> dict[str, dict[str, Any]]:
    return {one["site"]: one for one in server.snapshot()["children"]}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "behind"),
    [
        ("krum(f=2)", ""),
        pytest.param("multi_krum(f=2)", "fedavg(0.5)", marks=pytest.mark.slow),
        pytest.param("nnm(f=2) >> multi_krum(f=2, m=2)", "", marks=pytest.mark.slow),
        pytest.param("geometric_median(f=2)", "momentum(0.5, 0.9)", marks=pytest.mark.slow),
    ],
)
def test_a_tree_is_what_one_server_makes_of_all_rows(
    certificates: Certificates, text: str, behind: str
) -> None:
    """Two of three liars own a party by itself, and two of seven own nothing."""
    node, rule, liars = tree(3, 4), robust.parse(text), (0, 2)
    told = f"sketched(k={ENOUGH}) >> {text}" + (f" >> {behind}" if behind else "")
    with (
        serving_tree(certificates, node, rule=told) as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES) as members,
    ):
        velocity = np.zeros(288, np.float32)
        for number in range(3):
            rows = rows_of(number, 7)
            for liar in liars:
                rows[liar] = np.full(288, -20.0, np.float32)
            said = [1e12 if leaf in liars else 1.0 for leaf in range(7)]
            found, wanted = one_round(members, number, rows, said), rule(rows)
            assert wanted.mean() > 0.0
            # A rule of west alone says what its liars say, and a mean above it is theirs.
            by_party = [robust.median(f=1)(rows[:3]), robust.median(f=1)(rows[3:])]
            assert np.mean(by_party, axis=0).mean() < -9.0
            if behind.startswith("fedavg"):
                wanted = np.float32(0.5) * wanted
            elif behind:
                velocity = np.float32(0.9) * velocity + wanted
                wanted = np.float32(0.5) * velocity
            if text.startswith("krum"):
                np.testing.assert_array_equal(found, wanted)
            else:
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        assert members[0].client._welcome.rule == rules.parse(told).text
        assert servers["west"].snapshot()["rule"] == rules.parse(told).text
        assert servers["west"].snapshot()["children"][0]["refused_rows"] == 0


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "senders"),
    [
        ("krum(f=1)", 1),
        pytest.param("geometric_median(f=1)", 2, marks=pytest.mark.slow),
        pytest.param("cge(f=1)", 2, marks=pytest.mark.slow),
    ],
)
def test_one_row_of_each_party_and_sketches_cross_the_slow_link(
    certificates: Certificates, text: str, senders: int
) -> None:
    size, k = 30000, 0 if text.startswith("cge") else 64
    node = tree()
    sketches = 3 * (1 + 8 + 4 * k) + 100  # and headers
    head = f"sketched(k={k})" if k else "sketched"
    with (
        serving_tree(certificates, node, rule=f"{head} >> {text}") as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=((size,),)) as members,
    ):
        before = [one["received_bytes"] for one in children(servers[""]).values()]
        one_round(members, 0, rows_of(0, 6, size))
        after = [one["received_bytes"] for one in children(servers[""]).values()]
        came = [now - then for then, now in zip(before, after, strict=True)]
        row = 4 * size
        # Whose rows have no weight sends none.
        assert sum(one > row for one in came) == senders
        assert sum(came) <= senders * (row + 100) + 2 * sketches < 6 * row / 2
        below = [one["received_bytes"] for one in children(servers["west"]).values()]
        assert all(one >= row for one in below)


@pytest.mark.heavy
def test_who_is_refused_is_told_by_name_and_counts_among_f(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    node = tree()
    with (
        serving_tree(certificates, node, rule=f"sketched(k={ENOUGH}) >> krum(f=1)") as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES) as members,
    ):
        rows = rows_of(0, 6)
        rows[4] *= np.float32(1e7)
        found = one_round(members, 0, rows)
        rest = [row for k, row in enumerate(rows) if k != 4]
        np.testing.assert_array_equal(found, robust.krum(f=0)(rest))
        assert "`east/east1`: norm" in caplog.text
        assert children(servers[""])["east"]["refused_rows"] == 1
        assert [one["refused_rows"] for one in children(servers["east"]).values()] == [0, 1, 0]
        # One sits the round out, another has refused its own update.
        said = [1.0, 0.0, 1.0, REFUSED_WEIGHT, 1.0, 1.0]
        rows = rows_of(1, 6)
        found = one_round(members, 1, rows, said)
        rest = [row for k, row in enumerate(rows) if k not in (1, 3)]
        np.testing.assert_array_equal(found, robust.krum(f=0)(rest))
        assert [one["refused_rows"] for one in children(servers["east"]).values()] == [1, 1, 0]
        assert not one_round(members, 2, rows_of(2, 6), [0.0] * 6).any()
        # More than f, and the run is over for all.
        rows = rows_of(3, 6)
        for liar in (1, 4):
            rows[liar] *= np.float32(1e7)
        with pytest.raises(TfHipsError, match=r"bears f=1 bad rows. Received: 2.*`west/west1`"):
            one_round(members, 3, rows)


@pytest.mark.parametrize("said", [3e38, 60.0])
def test_a_sketch_that_no_row_has_is_refused_by_name(
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    said: float,
) -> None:
    honest = SketchingStore.sketches

    def lying(store: SketchingStore, number: int, seed: bytes) -> bytes | None:
        data = honest(store, number, seed)
        if data is None or "east0" not in store._sites:
            return data
        told = PartyRows.from_bytes(data, 3, ENOUGH)
        told.sketches[1] = said  # of a row whose norm is some 16, in one block
        return told.to_bytes()

    monkeypatch.setattr(SketchingStore, "sketches", lying)
    node, text = tree(west=4), "nnm(f=1) >> multi_krum(f=1)"
    with (
        serving_tree(certificates, node, rule=f"sketched(k={ENOUGH}) >> {text}") as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES) as members,
    ):
        rows = rows_of(0, 7)
        found = one_round(members, 0, rows)
        rest = [row for k, row in enumerate(rows) if k != 5]
        wanted = robust.parse("nnm(f=0) >> multi_krum(f=0)")(rest)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert "`east/east1`: a sketch of norm" in caplog.text
        assert children(servers[""])["east"]["refused_rows"] == 1


def test_a_round_in_which_all_leaves_refuse_their_rows_is_an_error(
    certificates: Certificates,
) -> None:
    node = tree()
    with (
        serving_tree(certificates, node, rule=f"sketched(k={ENOUGH}) >> krum(f=1)") as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES) as members,
        pytest.raises(TfHipsError, match=r"needs a row. Received: none \(`west/.*`east/"),
    ):
        one_round(members, 0, rows_of(0, 6), [REFUSED_WEIGHT] * 6)


def store_of(
    names: Sequence[Sequence[str]] = (("a", "b"), ("c", "d", "e")),
    text: str = "sketched(k=16) >> krum(f=1)",
) -> WeighingStore:
    model = Model(((5,), (3,)))
    rule = rules.parse(text)
    assert rule.sketched is not None
    return WeighingStore(
        model,
        ("west", "east"),
        FP32,
        FP32,
        7,
        sketched=rule.sketched,
        leaves=[[f"{site}/{one}" for one in some] for site, some in zip("we", names, strict=True)],
        secret=5,
        updates=AddingUpdates([5, 3], rule),
    )


def sketches_of(count: int) -> bytes:
    made = 1e-3 * np.arange(16 * count, dtype=np.float32).reshape(count, 16)
    return PartyRows(np.full(count, ROW, np.uint8), np.ones(count), made).to_bytes()


def test_nobody_hears_the_seed_before_all_rows_are_fixed() -> None:
    store = store_of()
    store.begin(0)
    assert store.seed(0, 0) is None
    assert store.fix(0, 0) and not store.fix(0, 0)
    assert store.seed(0, 0) is store.seed(0, 1) is None
    assert store.missing(0) == {"east": 0}
    row = native.encode(FP32, np.ones(5, np.float32), native.Key(0, 0, 0))
    assert store.add(0, 0, [(0, row)]) == 0  # nobody has a weight yet
    assert store.fix(0, 1)
    seed = store.seed(0, 0)
    assert seed == store.seed(0, 1) == robust.sketches.seed_of(5, 0)
    assert store.weights_of(0, 0) is None
    assert store.add(0, 0, [(2, sketches_of(2))]) == 1
    assert store.add(0, 0, [(2, sketches_of(2))]) == 0
    assert store.seed(0, 0) is None and store.weights_of(0, 0) is None
    assert store.missing(0) == {"east": 0}
    assert store.add(0, 1, [(2, sketches_of(3))]) == 1
    weights = np.concatenate(
        [weights_from_bytes(store.weights_of(0, child) or b"", 2 + child) for child in (0, 1)]
    )
    assert weights.sum() == 1.0 and (weights == 1.0).sum() == 1
    chosen = int(np.argmax(weights) >= 2)
    assert store.missing(0) == {["west", "east"][chosen]: 0}
    assert store.delivered(0, 1 - chosen) == {0, 1}
    other = native.encode(FP32, np.full(3, 2.0, np.float32), native.Key(0, 0, 0))
    assert store.add(0, 1 - chosen, [(0, row)]) == 0
    assert store.add(0, chosen, [(0, row)]) == 1
    assert len(store.results(0, 0)[1]) == 1  # a chunk does not wait for the others
    assert store.add(0, chosen, [(1, other)]) == 1
    assert store.is_merged(0) and store.missing(0) == {}
    # Of the next round it is another one.
    store.begin(1)
    for child in (0, 1):
        store.fix(1, child)
    assert store.seed(1, 0) not in (None, seed)


def test_one_leaf_that_goes_on_when_the_others_have_ended_owns_nothing() -> None:
    store = store_of(text="sketched(k=16) >> krum")
    store.begin(0)
    for child in (0, 1):
        store.fix(0, child)
    there = np.array([ROW, NONE], np.uint8), np.ones(1), np.full((1, 16), 0.1, np.float32)
    nobody = np.full(3, NONE, np.uint8), np.ones(0), np.ones((0, 16), np.float32)
    store.add(0, 0, [(2, PartyRows(*there).to_bytes())])
    store.add(0, 1, [(2, PartyRows(*nobody).to_bytes())])
    told = r"f=auto bears 1 of 5, and none of those that have come. Received: n=1 .*`w/a`\)"
    told += r" \(with weight 0 took no part: `w/b`, "
    [refusal] = store.refusals(0)
    assert re.search(told, str(refusal))


@pytest.mark.heavy
def test_a_caller_must_say_that_its_rows_are_fixed_and_waits_for_the_seed(
    certificates: Certificates,
) -> None:
    node = tree(1, 4)
    with (
        serving_tree(certificates, node, rule="sketched >> krum(f=1)") as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES) as members,
    ):
        upper = servers["west"]._upper
        assert upper is not None and upper._client is not None
        client: Any = upper._client
        with raw_channel(servers[""].address, None) as channel:
            call = Call("local", "west", client._process, 0)
            code, text = raw_exchange(channel, call, [])
        assert "must say that its rows are fixed" in text, code
        rows, model = rows_of(0, 5), Model(SHAPES)
        early = Later(lambda: members[0].client.exchange(0, packets_of(rows[0], model)))
        top = servers[""]._session
        store = top.store
        assert isinstance(store, WeighingStore)
        eventually(lambda: store.missing(0) == {"east": 0}, DEADLINE_S, changed=top.changed)
        # West has all its rows and has said so; east's leaves have sent nothing.
        assert store.seed(0, 0) is store.weights_of(0, 0) is None
        late = together(
            *(
                lambda m=m, row=row: m.client.exchange(0, packets_of(row, model))
                for m, row in zip(members[1:], rows[1:], strict=True)
            )
        )
        assert all(np.array_equal(one, early.result()) for one in late)


def test_who_begins_to_send_when_its_attempt_is_over_takes_no_turn() -> None:
    begun = []

    def batches(held: frozenset[int]) -> Iterator[Batch]:
        begun.append(held)
        yield [(0, b"packet")]

    late = WayUp(batches, resumes=True)
    late.resume({1})
    late.resume(None)  # before gRPC's thread has come to it
    assert not [*late.messages()] and not begun
    next_one = WayUp(batches, resumes=True)
    next_one.resume({1})
    assert [*next_one.messages()] and begun == [frozenset({1})]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "one byte for each of 2 leaves"),
        (bytes([ROW, 9]) + bytes(72), "2 at most"),
        (bytes([ROW, NONE]) + bytes(71), "must have 74 bytes. Received: 73"),
        (bytes([ROW, REFUSED]) + np.float64(-1).tobytes() + bytes(64), "Norms must be >= 0"),
        (bytes([ROW, NONE]) + np.float64(np.nan).tobytes() + bytes(64), "Norms must be >= 0"),
        (
            bytes([ROW, NONE]) + np.float64(1).tobytes() + np.float32(np.nan).tobytes() * 16,
            "16 numbers that are not finite",
        ),
    ],
)
def test_sketches_that_are_none_are_refused(data: bytes, told: str) -> None:
    with pytest.raises(PacketError, match=told):
        PartyRows.from_bytes(data, 2, 16)
    store = store_of()
    store.begin(0)
    with pytest.raises(PacketError, match=told):
        store.add(0, 0, [(2, data)])
    assert store.add(0, 0, [(2, sketches_of(2))]) == 1


def test_what_travels_comes_as_it_was() -> None:
    known = np.array([ROW, NONE, ROW, REFUSED], np.uint8)
    one = PartyRows(known, np.array([1.5, np.inf]), np.ones((2, 16), np.float32))
    data = one.to_bytes()
    assert len(data) == 4 + 2 * 72 and most_bytes(4, 16) == 4 + 4 * 72
    found = PartyRows.from_bytes(data, 4, 16)
    np.testing.assert_array_equal(found.leaves, known)
    np.testing.assert_array_equal(found.squares, one.squares)
    np.testing.assert_array_equal(found.sketches, one.sketches)
    weights = np.array([0.25, -0.0, 0.0], np.float32)
    again = weights_from_bytes(weights_to_bytes(weights), 3)
    np.testing.assert_array_equal(again, weights)
    np.testing.assert_array_equal(np.signbit(again), [False, True, False])
    for bad in (b"\0" * 11, np.full(3, np.inf, np.float32).tobytes()):
        with pytest.raises(PacketError, match="Weights"):
            weights_from_bytes(bad, 3)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("sketched>>krum(1)", "sketched(k=512) >> krum(f=1)"),
        ("sketched(64) >> nnm(f=1) >> krum(f=1)>>fedavg", None),
        ("sketched >> clip >> mean", "sketched >> clip(c=1) >> mean"),
        ("sketched >> cge(f=1) >> fedadam(0.1)", None),
    ],
)
def test_a_rule_on_sketches_is_its_text(text: str, canonical: str | None) -> None:
    rule = rules.parse(text)
    assert rule.is_robust and rule.is_mean and rule.is_whole
    assert rules.parse(rule.text) == rule == rules.resolve(rule)
    assert canonical is None or rule.text == canonical
    assert rule.sketched is not None
    if rule.name == "mean":
        assert rules.resolve(rule.sketched) == rule


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sketched >> median", "sorted values"),
        ("sketched >> trimmed_mean >> fedavg", "sorted values"),
        ("sketched >> mean >> fedavg", "without sketches"),
        ("sketched >> fedavg", "there must be a robust rule"),
        ("sketched >> sketched >> krum", "once"),
        ("sketched >> detox(r=3) >> krum", "exclude each other"),
        ("detox(r=3) >> sketched >> krum", "exclude each other"),
        ("sketched >> krum >> asgd", "must be a synchronous one"),
        ("krum >> sketched", "`sketched` must stand at the beginning"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        rules.parse(text)


def test_what_servers_cannot_do_is_refused() -> None:
    common: dict[str, Any] = {"insecure": True, "parties": ("west", "east")}
    text = "sketched >> krum(f=1)"
    ServerConfig(**common, rule=text, compression="topk(ratio=0.01)")  # of the weighted sum
    for more, told in (
        ({"quorum": 1, "late": "drop"}, "needs all parties.*Received: a quorum of 1"),
        ({"shard": (0, 2)}, "one server must have all"),
        ({"uplink": Uplink("127.0.0.1:1", "west", None)}, "the topmost server decides"),
    ):
        with pytest.raises(ConfigError, match=told):
            ServerConfig(**common, rule=text, **more)
    below: dict[str, Any] = {"own": None, "compression": "fp32", "quorum": None}
    assert leaf_rules.why_not_below(text, **below) is None
    assert leaf_rules.why_not_below("krum(f=1)", **below | {"own": "median"}) is None
    for change, told in (
        ({"own": "median"}, "it can have no rule. Received: median"),
        ({"quorum": Quorum(2, 1.0)}, "waits for all its children"),
        ({"compression": "dgc"}, "needs packets of all elements"),
    ):
        assert told in str(leaf_rules.why_not_below(text, **below | change))
    assert "has two levels" in str(leaf_rules.why_not_child(text, "north", False, ["a/b"]))
    assert leaf_rules.why_too_few(text, 5) is None
    assert "bears 1024 leaves" in str(leaf_rules.why_too_few(text, 1025))


@pytest.mark.heavy
def test_who_cannot_be_in_such_a_tree_does_not_join(certificates: Certificates) -> None:
    text = "sketched >> krum(f=1)"
    with serving(certificates, insecure=True, parties=("a", "west"), rule=text) as top:
        leaf = Party(top.address, "a", None, shapes=SHAPES, compression="fp32")
        with pytest.raises(ProtocolError, match="children must be the servers of parties"):
            leaf.join()


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize(
    ("below", "f", "told"),
    [
        ({"rule": "median"}, 1, "it can have no rule"),
        ({"rule": "asgd(1.0)"}, 1, "it can have no rule"),
        ({"quorum": 2, "late": "drop"}, 1, "waits for all its children"),
        ({}, 2, r"cannot work with 6 leaves: krum needs n >= 2 f \+ 3 rows"),
    ],
)
def test_servers_that_cannot_make_sketches_do_not_join(
    certificates: Certificates, below: dict[str, Any], f: int, told: str
) -> None:
    node = tree()
    with (
        serving_tree(certificates, node, rule=f"sketched >> krum(f={f})", below=below) as servers,
        pytest.raises(TfHipsError, match=told),
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES),
    ):
        pass
