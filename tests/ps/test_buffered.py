# SPDX-License-Identifier: Apache-2.0
"""Robust rules before FedBuff, without a server: beside NumPy, with children that lie or leave."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.ps.buffering import Floats, Oracle, Packet, schedule
from tests.ps.parties import Party, serving, together
from tests.ps.trees import Node, addresses_of, leaves_of, serving_tree
from tests.support.certs import Certificates
from tf_hips import robust
from tf_hips.config import Uplink
from tf_hips.errors import ConfigError, NonFiniteError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.ps.robust.buffered import BufferedStore
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.terms.assignment import Shard
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Kind, Recorder

pytestmark = pytest.mark.heavy  # many rounds with every codec

FEEDBACK = "error_feedback(onebit)"
NOISE = "error_feedback(terngrad(bitwidth=2))"
WARMUP = "warmup(error_feedback(onebit), steps=2)"
MODEL = Model(((3, 5), (), (0,), (70,), (9,)))
CHUNKS = range(len(MODEL.chunks))
SITES = tuple("abcdef")
SEED = 7
SMALL = ((3, 3, 1, 8), (8,))
K = 5
COORDINATES = ("median", "trimmed_mean(f=1)", "meamed(f=1)", "majority")
WHOLE = (
    "mean",
    "krum(f=1)",
    "multi_krum(f=1)",
    "geometric_median(f=1)",
    "mda(f=1)",
    "cge(f=2)",
    "clip >> mean",
    "nnm(f=1) >> trimmed_mean(f=1)",
    "bucketing(s=2) >> geometric_median(f=1)",
    "centred_clipping(f=1, tau=0.5)",
)


def store_of(
    text: str, k: int = K, rate: float = 0.8, up: str = "fp32", down: str = "fp32", **more: Any
) -> BufferedStore:
    rule = rules.parse(f"{text} >> fedbuff({k}, {rate}, 0.5)")
    sites = more.pop("sites", SITES)
    codecs = compressors.parse(up), compressors.parse(down)
    return BufferedStore(MODEL, sites, *codecs, SEED, rule, **more)


def oracle_of(
    text: str, k: int = K, rate: float = 0.8, up: str = "fp32", down: str = "fp32"
) -> Oracle:
    return Oracle(text, k, rate, 0.5, MODEL, SITES, up, down, SEED)


def values_of(child: int, number: int, chunk: int) -> Floats:
    generator = np.random.default_rng((child, number, chunk))
    return generator.standard_normal(MODEL.chunks[chunk].size, np.float32)


def packet(values: Floats, text: str = "fp32", number: int = 0) -> Packet:
    codec = compressors.parse(text).at(number).codec
    return native.encode(codec, values, native.Key(0, 0, 0))


def packet_of(text: str, child: int, number: int, chunk: int) -> Packet:
    return packet(values_of(child, number, chunk), text, number)


def push(store: BufferedStore, child: int, number: int, chunk: int, sent: Packet) -> bytes:
    """Delivers one packet; the answer, which is there at once."""
    lane = store.of(child)
    lane.begin(number)
    after = len(lane.results(number, 0)[1])
    assert lane.add(number, child, [(chunk, sent)]) == 1
    [(place, answer)] = lane.results(number, after)[1]
    assert place == chunk
    return answer.tobytes()


def send(store: BufferedStore, child: int, number: int, factor: float = 1.0) -> None:
    """A whole update of one child."""
    for chunk in CHUNKS:
        values = np.float32(factor) * values_of(child, number, chunk)
        push(store, child, number, chunk, packet(values))


def moved(store: BufferedStore) -> Floats:
    return np.concatenate([store._moved[chunk].total for chunk in CHUNKS])


def steps(store: BufferedStore) -> set[int]:
    return {store._moved[chunk].version for chunk in CHUNKS}


def row_of(child: int, number: int) -> Floats:
    return np.concatenate([values_of(child, number, chunk) for chunk in CHUNKS])


def whole(member: Party, number: int) -> Floats:
    draw = np.random.default_rng((member.child, number))
    return draw.standard_normal(sum(member.sizes), np.float32)


def exchanged(member: Party, number: int, factor: float = 1.0) -> Floats:
    """What comes down for one update, in one row."""
    row = np.float32(factor) * whole(member, number)
    sent = [packet(part) for part in np.split(row, np.cumsum(member.sizes)[:-1])]
    down = member.client.exchange(number, np.concatenate(sent))
    found = np.split(down, np.cumsum([len(one) for one in sent])[:-1])
    fp32 = compressors.parse("fp32")
    return np.concatenate(
        [native.decode(fp32, one, n) for one, n in zip(found, member.sizes, strict=True)]
    )


@pytest.mark.parametrize(
    ("text", "up", "down"),
    [
        *((text, FEEDBACK, NOISE) for text in (*COORDINATES, *WHOLE)),
        *(
            (text, *both)
            for text in ("median", WHOLE[-1])
            for both in (("fp32",) * 2, (WARMUP,) * 2)
        ),
    ],
)
def test_answers_equal_numpy_bit_for_bit(text: str, up: str, down: str) -> None:
    order = schedule(len(SITES), len(CHUNKS), 180)
    store, oracle = store_of(text, up=up, down=down), oracle_of(text, up=up, down=down)
    for child, number, chunk in order:
        sent = packet_of(up, child, number, chunk)
        answer = push(store, child, number, chunk, sent)
        assert answer == oracle.push(child, number, chunk, sent)
    for chunk in CHUNKS:
        held = store._moved[chunk]
        np.testing.assert_array_equal(held.total, -oracle.w[chunk])
        assert held.version == oracle.steps[chunk] >= 3
        # Nobody has more than one row, and one that is coming.
        assert len(held.rows) < K and set(held.coming) <= set(range(len(SITES)))
        assert len(held.slots.arrays) == int(text.startswith("centred"))
    assert text in COORDINATES or len(steps(store)) == 1


@pytest.mark.parametrize("text", ["trimmed_mean(f=1)", "krum(f=1)"])
def test_a_child_that_sends_ten_times_has_one_row(text: str) -> None:
    store = store_of(text, rate=1.0)
    for number in range(10):
        send(store, 5, number, factor=50.0)
        if number % 3 == 2:
            send(store, number // 3, 0)
    assert steps(store) == {0} and not moved(store).any()
    send(store, 3, 0)
    rows = [row_of(child, 0) for child in range(4)]
    wanted = robust.parse(text)([*rows, np.float32(50.0) * row_of(5, 9)])
    assert steps(store) == {1}
    np.testing.assert_allclose(moved(store), wanted, rtol=1e-6, atol=1e-6)
    assert np.abs(moved(store)).max() <= np.abs(np.stack(rows)).max()
    # The buffer is empty: all begin again, the one that sends often, too.
    for number in range(10, 30):
        send(store, 5, number)
    assert steps(store) == {1}


def test_an_older_row_is_replaced_when_all_of_the_newer_one_is_there() -> None:
    store = store_of("mean", rate=1.0)
    for child in range(4):
        send(store, child, 0)
    for chunk in list(CHUNKS)[:-1]:
        push(store, 0, 1, chunk, packet_of("fp32", 0, 1, chunk))
    send(store, 4, 0)  # child 0 is in by its first row, and goes on with the second
    rows = [row_of(child, 0) for child in range(5)]
    np.testing.assert_allclose(moved(store), np.mean(rows, axis=0), rtol=1e-5, atol=1e-6)
    last = CHUNKS[-1]
    push(store, 0, 1, last, packet_of("fp32", 0, 1, last))
    for child in (1, 2, 3):
        send(store, child, 1)
    assert steps(store) == {1}
    send(store, 4, 1)
    assert steps(store) == {2}
    # All have made their second rows without the first step; child 4 had heard of its last chunk.
    second = 2**-0.5 * np.mean([row_of(child, 1) for child in range(5)], axis=0)
    np.testing.assert_allclose(moved(store), np.mean(rows, axis=0) + second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["median", "krum(f=1)"])
def test_nan_is_refused_by_name_and_others_go_on(text: str) -> None:
    store = store_of(text, rate=1.0)
    bad = values_of(2, 0, 2).copy()
    bad[3] = np.nan
    lane = store.of(2)
    for chunk in (0, 1, 3):
        push(store, 2, 0, chunk, packet_of("fp32", 2, 0, chunk))
    with pytest.raises(NonFiniteError, match=r"Site `c`, round 0, tensor 3 .* must be finite"):
        lane.add(0, 2, [(2, packet(bad))])
    assert lane.delivered(0, 2) == frozenset({0, 1, 3})
    for child in (0, 1, 3, 4):
        send(store, child, 0)
    assert store._moved[2].version == 0  # of the NaN nothing is in it
    send(store, 5, 0)
    rows = [row_of(child, 0) for child in (0, 1, 3, 4, 5)]
    where = slice(16, 86)  # the chunk of the NaN
    if text == "median":
        np.testing.assert_array_equal(moved(store)[where], np.median(rows, axis=0)[where])
    else:
        np.testing.assert_allclose(moved(store), robust.parse(text)(rows), rtol=1e-6)
    push(store, 2, 0, 2, packet_of("fp32", 2, 0, 2))  # a better one


def test_who_makes_a_step_overflow_is_named_and_not_who_comes_last() -> None:
    """Three of five send what has no sum in float32, one more than the rule bears."""
    heard: list[tuple[int, dict[int, str], dict[int, int]]] = []
    store = store_of(
        "trimmed_mean(f=1)",
        rate=1.0,
        refuse=lambda step, why, rounds: heard.append((step, dict(why), dict(rounds))),
    )
    size = MODEL.chunks[0].size
    huge = {1: 3.0e38, 2: 3.3e38, 4: 3.1e38}
    for child, value in huge.items():
        push(store, child, 0, 0, packet(np.full(size, value, np.float32)))
    push(store, 0, 0, 0, packet_of("fp32", 0, 0, 0))
    push(store, 3, 0, 0, packet_of("fp32", 3, 0, 0))  # it gets its answer
    [(step, why, rounds)] = heard
    assert step == 0 and list(why) == [2] and rounds == {2: 0}
    assert "would not be finite, and its largest value, 3.3e+38" in why[2]
    assert store._moved[0].version == 0 and set(store._moved[0].rows) == {0, 1, 3, 4}
    push(store, 5, 0, 0, packet_of("fp32", 5, 0, 0))
    assert store._moved[0].version == 1 and np.isfinite(store._moved[0].total).all()
    # Who brings the largest value itself, and comes last, hears of it.
    store = store_of("trimmed_mean(f=1)", rate=1.0)
    for child, value in {0: 1.0, 1: 3.0e38, 3: 1.0, 4: 3.1e38}.items():
        push(store, child, 0, 0, packet(np.full(size, value, np.float32)))
    with pytest.raises(NonFiniteError, match=r"Site `c`, round 0.*of which this is the last"):
        push(store, 2, 0, 0, packet(np.full(size, 3.3e38, np.float32)))
    assert set(store._moved[0].rows) == {0, 1, 3, 4}


def test_absurd_norms_are_refused_by_name_and_the_step_is_made() -> None:
    heard: list[tuple[int, dict[int, str], dict[int, int]]] = []

    def refuse(step: int, why: Mapping[int, str], rounds: Mapping[int, int]) -> None:
        heard.append((step, dict(why), {child: rounds[child] for child in why}))

    store = store_of("krum(f=1)", rate=1.0, refuse=refuse)
    for number in range(3):
        send(store, 5, number, factor=1e7)
    for child in range(4):
        send(store, child, 0)
    rows = [row_of(child, 0) for child in range(4)]
    np.testing.assert_allclose(moved(store), robust.parse("krum(f=0)")(rows), rtol=1e-6)
    [(step, why, rounds)] = heard
    assert step == 0 and list(why) == [5] and "times the median" in why[5]
    assert rounds == {5: 2}


def test_more_absurd_rows_than_the_rule_bears_go_and_others_wait_for_better_ones() -> None:
    heard: list[dict[int, str]] = []
    store = store_of("krum(f=1)", rate=1.0, refuse=lambda _, why, __: heard.append(dict(why)))
    for child in (1, 4):
        send(store, child, 0, factor=1e7)
    for child in (0, 2, 3):
        send(store, child, 0)
    assert steps(store) == {0} and not moved(store).any()
    assert [sorted(why) for why in heard] == [[1, 4]]
    assert set(store._moved[0].rows) == {0, 2, 3}
    send(store, 4, 1)
    assert steps(store) == {0}
    send(store, 5, 0)
    rows = [row_of(child, 0) for child in (0, 2, 3)] + [row_of(4, 1), row_of(5, 0)]
    assert steps(store) == {1}
    np.testing.assert_allclose(moved(store), robust.parse("krum(f=1)")(rows), rtol=1e-6)
    assert len(heard) == 1


def test_with_fewer_children_a_step_needs_fewer_rows_if_the_rule_bears_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = [6]
    store = store_of("trimmed_mean(f=1)", rate=1.0, present=lambda: left[0])
    for child in range(4):
        send(store, child, 0)
    assert steps(store) == {0}
    left[0] = 3
    send(store, 0, 1)  # four rows are there, and three would do
    assert steps(store) == {1}
    for child in (0, 1):
        send(store, child, 2 - child)
    assert steps(store) == {1}
    send(store, 2, 1)
    assert steps(store) == {2}
    left[0] = 2
    assert not caplog.records
    for number in range(3, 6):
        for child in (0, 1):
            send(store, child, number - child)
    assert steps(store) == {2}
    [record] = caplog.records
    assert "needs rows of 3 children, and 2 are left" in record.getMessage()


def test_who_was_there_when_an_update_was_recorded_counts() -> None:
    left = [3]
    store = store_of("mean", k=2, present=lambda: left[0])
    entries = store.capture()  # from now on updates are recorded, and wait
    lane = store.of(0)
    assert lane.add(0, 0, [(chunk, packet_of("fp32", 0, 0, chunk)) for chunk in CHUNKS]) == 4
    left[0] = 1
    assert len(list(entries)) == len(SITES) + len(CHUNKS)  # rounds and totals
    store.release()
    assert len(lane.results(0, 0)[1]) == 4
    assert steps(store) == {0}
    send(store, 0, 1)
    assert steps(store) == {1}


@pytest.mark.parametrize(
    "text", ["median(f=2)", "krum(f=1)", "krum", "median", "nnm >> mean", "arc >> mean"]
)
def test_a_buffer_is_never_less_than_what_bears_f_of_k(text: str) -> None:
    store = store_of(text, present=lambda: 1)
    for number in range(9):
        for child in range(4):
            send(store, child, number)
    assert steps(store) == {0}


@pytest.mark.parametrize("text", COORDINATES)
def test_shards_of_a_rule_of_coordinates_are_the_whole(text: str) -> None:
    order = schedule(len(SITES), len(CHUNKS), 160)
    whole = store_of(text, up=FEEDBACK, down=NOISE)
    shards = [Shard(0, 2), Shard(1, 2)]
    parts = [store_of(text, up=FEEDBACK, down=NOISE, shard=shard) for shard in shards]
    assert sorted(chunk for part in parts for chunk in part.chunks) == list(CHUNKS)
    for child, number, chunk in order:
        sent = packet_of(FEEDBACK, child, number, chunk)
        answer = push(whole, child, number, chunk, sent)
        [part] = [part for part in parts if chunk in part.chunks]
        assert push(part, child, number, chunk, sent) == answer
    assert min(steps(whole)) > 1


@pytest.mark.parametrize("text", ["trimmed_mean(f=1)", "nnm(f=1) >> krum(f=1)"])
def test_threads_decide_in_the_order_of_records(text: str) -> None:
    """Many threads; what was recorded explains every bit."""
    records: list[tuple[int, int, int]] = []

    class Listening(Recorder):
        is_keeping = True

        def add(self, kind: Kind, data: Any = b"", **fields: Any) -> int:
            if kind == Kind.PACKET:
                records.append((fields["child"], fields["round"], fields["chunk"]))
            return 0

    num_rounds, together_now = 6, threading.Barrier(len(SITES))
    store = store_of(text, up=FEEDBACK, down=NOISE, recorder=Listening())
    answers: dict[tuple[int, int, int], bytes] = {}

    def train(child: int) -> None:
        lane = store.of(child)
        for number in range(num_rounds):
            together_now.wait(30)
            lane.begin(number)
            for chunk in CHUNKS:
                lane.add(number, child, [(chunk, packet_of(FEEDBACK, child, number, chunk))])
            for chunk, answer in lane.results(number, 0)[1]:
                answers[child, number, chunk] = answer.tobytes()

    threads = [threading.Thread(target=train, args=(child,)) for child in range(len(SITES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(records) == len(answers) == len(SITES) * num_rounds * len(CHUNKS)
    oracle = oracle_of(text, up=FEEDBACK, down=NOISE)
    for one in records:
        assert answers[one] == oracle.push(*one, packet_of(FEEDBACK, *one))
    assert min(oracle.steps) > 2


@pytest.mark.parametrize(
    ("text", "canonical", "is_whole"),
    [
        ("krum(1)>>fedbuff(5)", "krum(f=1) >> fedbuff(k=5, learning_rate=1, exponent=0.5)", True),
        (
            "median >> fedbuff",
            "median(f=auto) >> fedbuff(k=10, learning_rate=1, exponent=0.5)",
            False,
        ),
        ("mean >> fedbuff(3)", "mean >> fedbuff(k=3, learning_rate=1, exponent=0.5)", True),
        (
            "nnm(1) >> median(1) >> fedbuff(k=5)",
            "nnm(f=1) >> median(f=1) >> fedbuff(k=5, learning_rate=1, exponent=0.5)",
            True,
        ),
    ],
)
def test_a_chain_is_its_text(text: str, canonical: str, is_whole: bool) -> None:
    rule = rules.parse(text)
    assert rule.text == canonical and rules.parse(rule.text) == rule == rules.resolve(rule)
    assert rule.is_asynchronous and rule.is_robust and rule.gives_steps and rule.keeps_state
    assert (rule.is_whole, rule.is_mean) == (is_whole, False)
    assert rule != rules.parse(f"fedbuff(k={rule['k']})")


FIVE = ("a", "b", "c", "d", "e")


@pytest.mark.parametrize(
    ("rule", "more", "message"),
    [
        (
            "krum(f=1) >> fedbuff(k=4)",
            {},
            r"cannot work with 4 rows in a buffer: krum needs n >= 2 f \+ 3 rows\. "
            r"Received: n=4, f=1",
        ),
        ("median(f=2) >> fedbuff(4)", {}, r"needs k >= 2 f \+ 1 rows in a buffer.*k=4, f=2"),
        ("bucketing(s=2) >> krum(f=1) >> fedbuff(5)", {}, r"krum needs n >= 2 f \+ 3.*n=3"),
        ("krum(f=1) >> fedbuff", {}, r"`k` must be at most.*Received: k=10, 5 children"),
        ("median >> fedbuff(6)", {}, r"one row of each child.*Received: k=6, 5 children"),
        ("krum(f=1) >> fedbuff(5)", {"shard": (0, 2)}, "one server must have all of the model"),
        ("krum(f=1) >> fedbuff(5)", {"compression": "dgc"}, "packets of all elements"),
        ("median >> fedbuff(5)", {"quorum": 4, "late": "drop"}, "asynchronous rules have none"),
        ("detox(r=1) >> median >> fedbuff(5)", {}, "Behind votes there must be a synchronous"),
        ("sketched >> krum(f=1) >> fedbuff(5)", {}, "needs rounds in which all wait"),
        ("krum(f=1) >> fedasync", {}, "that is not robust itself, such as `fedavg`, or `fedbuff`"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    rule: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(parties=FIVE, insecure=True, rule=rule, **more)


def test_what_can_work_is_not_refused() -> None:
    for rule, more in (
        ("krum(f=1) >> fedbuff(5)", {}),
        ("median >> fedbuff(3)", {"shard": (1, 2)}),
        ("geometric_median >> fedbuff(3)", {"compression": "dgc"}),
    ):
        assert ServerConfig(parties=FIVE, insecure=True, rule=rule, **more).rule == rule


def test_a_party_server_has_no_buffer_of_rows() -> None:
    above = Uplink("127.0.0.1:1", "west", None)
    with pytest.raises(ConfigError, match="Rows wait for each other at the topmost server"):
        ServerConfig(parties=FIVE, insecure=True, rule="median >> fedbuff(5)", uplink=above)


def test_children_over_sockets_wait_for_nobody_and_a_liar_is_named(
    certificates: Certificates,
) -> None:
    sites = ("a", "b", "c", "d", "e", "f")
    codecs = {"compression": "fp32", "downlink": "fp32"}
    rule = "krum(f=1) >> fedbuff(k=5, learning_rate=0.5)"
    with serving(certificates, parties=sites, rule=rule, **codecs) as server:
        members = [
            Party(server.address, site, certificates.party(site), **codecs) for site in sites
        ]
        together(*(one.join for one in members))

        # Nobody else has sent anything, and it is answered all the same.
        for number in range(3):
            assert not exchanged(members[0], number, factor=1e9).any()
        for one in members[1:4]:
            assert not exchanged(one, 0).any()
        exchanged(members[4], 0)
        rows = [whole(one, 0) for one in members[1:5]]
        wanted = np.float32(0.5) * robust.krum(f=0)(rows)
        np.testing.assert_allclose(exchanged(members[5], 0), wanted, rtol=1e-5)
        children = server.snapshot()["children"]
        assert [one["refused_rows"] for one in children] == [1, 0, 0, 0, 0, 0]
        assert server.snapshot()["rule"].startswith("krum(f=1) >> fedbuff(k=5")
        for one in members:
            one.client.close()


def test_a_party_server_without_a_rule_is_one_row(certificates: Certificates) -> None:
    """It averages its children by their workers, which are 1 and 2 here."""
    west = Node("west", ("a", "b"), sends="fp32", up="fp32")
    node = Node("", (west, "c", "d"), sends="fp32", up="fp32")
    with (
        serving_tree(certificates, node, rule="median(f=1) >> fedbuff(3, 0.5)") as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SMALL) as (a, b, c, d),
    ):
        down = together(*(lambda one=one: exchanged(one, 0) for one in (a, b)))
        assert not np.concatenate(down).any()
        assert not exchanged(c, 0).any()
        first, second, third, fourth = (whole(one, 0) for one in (a, b, c, d))
        mean = np.float32(1 / 3) * first + np.float32(2 / 3) * second
        wanted = np.float32(0.5) * np.median([mean, third, fourth], axis=0)
        np.testing.assert_array_equal(exchanged(d, 0), wanted)
        together(*(one.client.leave for one in (a, b, c, d)))
