# SPDX-License-Identifier: Apache-2.0
"""Rules of whole rounds in a store: beside `robust` itself, with liars, refusals and no rows."""

import itertools
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tf_hips import robust
from tf_hips.errors import NonFiniteError, ProtocolError, ToleranceError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.rules.robust import OWN_REFUSAL, is_refused
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.rules.whole import rule_of
from tf_hips.ps.terms.model import Model
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.wire import REFUSED_WEIGHT
from tf_hips.robust.aggregator import Measures

pytestmark = pytest.mark.heavy  # every rule with every codec

Floats = npt.NDArray[np.float32]
Packet = npt.NDArray[np.uint8]
FP32 = compressors.parse("fp32")
MODEL = Model(((3, 5), (), (70,), (9,)))
CHUNKS = range(len(MODEL.chunks))
SITES = tuple("abcdefg")
SEED = 7
WHOLE = (
    "krum(f=1)",
    "multi_krum(f=1)",
    "bulyan(f=1)",
    "geometric_median(f=2)",
    "mda(f=2)",
    "cge(f=2)",
    "nnm(f=2) >> trimmed_mean(f=2)",
    "clip >> median",
    "clip(c=2) >> mean",
    "arc(f=1) >> mean",
    "bucketing(s=2) >> geometric_median(f=1)",
)
CLIPPING = "centred_clipping(f=2, tau=0.5)"


def store_of(text: str, codec: str = "fp32", sites: tuple[str, ...] = SITES, **more: Any) -> Store:
    rule = rules.parse(text)
    sizes = [chunk.size for chunk in MODEL.chunks]
    updates = Updates(sizes, rule, whole=rule_of(rule, sites, SEED))
    return Store(MODEL, sites, compressors.parse(codec), FP32, SEED, updates=updates, **more)


def gradient(number: int, child: int, chunk: int) -> Floats:
    generator = np.random.default_rng((number, child, chunk))
    return generator.standard_normal(MODEL.chunks[chunk].size, np.float32)


def rows_of(number: int, n: int = len(SITES)) -> list[list[Floats]]:
    return [[gradient(number, child, chunk) for chunk in CHUNKS] for child in range(n)]


def packet(values: Floats) -> Packet:
    return native.encode(FP32, values, native.Key(0, 0, 0))


def deliver(store: Store, number: int, rows: list[list[Floats]]) -> list[Floats]:
    """One round; what comes down, by chunk."""
    store.begin(number)
    for child, row in enumerate(rows):
        for chunk in CHUNKS:
            store.add(number, child, [(chunk, packet(row[chunk]))])
    return results(store, number)


def results(store: Store, number: int) -> list[Floats]:
    found = dict(store.results(number, 0)[1])
    return [native.decode(FP32, found[chunk], MODEL.chunks[chunk].size) for chunk in CHUNKS]


def oracle(
    text: str, number: int, rows: list[list[Floats]], before: list[Floats] | None = None
) -> list[Floats]:
    """What `robust` makes of the rows, measured by chunk."""
    rule = robust.parse(text)
    extra = [[] if before is None else [before[chunk]] for chunk in CHUNKS]
    by_chunk = [[row[chunk] for row in rows] for chunk in CHUNKS]
    parts = [rule.measure(some, reference=more) for some, more in zip(by_chunk, extra, strict=True)]
    measures = parts[0]
    for part in parts[1:]:
        measures = Measures.joined(measures, part)
    decision = rule.decide(
        measures,
        rows=[np.concatenate(row) for row in rows],
        seed=SEED,
        step=number,
        with_reference=before is not None,
    )
    return [
        rule.apply(decision, some, reference=more[0] if more else None).vector
        for some, more in zip(by_chunk, extra, strict=True)
    ]


@pytest.mark.parametrize("text", WHOLE)
def test_a_round_is_what_the_rule_makes_of_whole_rows(text: str) -> None:
    store = store_of(text)
    assert store.weigh(0, 1, 1e15)  # it may say so; nobody looks
    for number in range(2):
        rows = rows_of(number)
        found = deliver(store, number, rows)
        for mine, wanted in zip(found, oracle(text, number, rows), strict=True):
            np.testing.assert_array_equal(mine, wanted)
        whole = robust.parse(text)([np.concatenate(row) for row in rows], seed=SEED, step=number)
        np.testing.assert_allclose(np.concatenate(found), whole, rtol=1e-5, atol=1e-6)
    assert not rules.parse(text).keeps_state


def test_a_round_without_rows_leaves_the_reference() -> None:
    store = store_of(CLIPPING)
    first = deliver(store, 0, rows_of(0))
    store.begin(1)
    for child in range(len(SITES)):
        store.weigh(1, child, 0.0)
    assert not np.concatenate(deliver(store, 1, rows_of(1))).any()
    found = deliver(store, 2, rows_of(2))
    for mine, wanted in zip(found, oracle(CLIPPING, 2, rows_of(2), first), strict=True):
        np.testing.assert_array_equal(mine, wanted)


def test_clipping_begins_where_it_ended() -> None:
    store, before = store_of(CLIPPING), None
    for number in range(3):
        rows = rows_of(number)
        found = deliver(store, number, rows)
        wanted = oracle(CLIPPING, number, rows, before)
        for mine, one in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(mine, one)
        before = wanted
    anew = oracle(CLIPPING, 2, rows_of(2))
    assert not np.array_equal(np.concatenate(anew), np.concatenate(wanted))
    assert rules.parse(CLIPPING).keeps_state
    kept = {chunk: values for chunk, _, _, values in store.slots()}
    for chunk in CHUNKS:
        np.testing.assert_array_equal(kept[chunk], wanted[chunk])


@pytest.mark.parametrize("text", ["median", "krum(f=1)", CLIPPING])
@pytest.mark.parametrize("behind", ["fedavg(0.5)", "fedavgm(0.5, 0.9)", "momentum(0.5, 0.9)"])
def test_a_server_s_optimizer_gets_the_robust_result(text: str, behind: str) -> None:
    plain, chained = store_of(text), store_of(f"{text} >> {behind}")
    velocity = [np.zeros(chunk.size, np.float32) for chunk in MODEL.chunks]
    for number in range(3):
        rows = rows_of(number)
        alone, found = deliver(plain, number, rows), deliver(chained, number, rows)
        for chunk in CHUNKS:
            velocity[chunk] = np.float32(0.9) * velocity[chunk] + alone[chunk]
            gained = alone[chunk] if behind.startswith("fedavg(") else velocity[chunk]
            np.testing.assert_allclose(found[chunk], 0.5 * gained, rtol=1e-5, atol=1e-6)
    rule = rules.parse(f"{text} >> {behind}")
    assert rule.gives_steps and rule.is_mean and rule.is_robust
    assert rules.parse(rule.text) == rule


def test_nothing_is_told_before_all_has_come_and_then_everything() -> None:
    store = store_of("krum(f=1)")
    store.begin(0)
    order = list(itertools.product(range(len(SITES)), CHUNKS))
    random.Random(3).shuffle(order)
    for child, chunk in order[:-1]:
        store.add(0, child, [(chunk, packet(gradient(0, child, chunk)))])
        assert store.results(0, 0) == (0, [])
    child, chunk = order[-1]
    # What was delivered before is taken for the same packet, also if it is another.
    again = order[0]
    store.add(0, again[0], [(again[1], packet(np.full_like(gradient(0, *again), 9.0)))])
    store.add(0, child, [(chunk, packet(gradient(0, child, chunk)))])
    assert store.is_merged(0)
    for mine, wanted in zip(results(store, 0), oracle("krum(f=1)", 0, rows_of(0)), strict=True):
        np.testing.assert_array_equal(mine, wanted)


def test_all_chunks_are_of_the_same_children() -> None:
    # By chunks each would be of the child that is best there; the liar lies in one of them.
    rows = rows_of(0)
    rows[2] = [one.copy() for one in rows[0]]
    rows[2][3] += 100.0
    found = deliver(store_of("krum(f=1)"), 0, rows)
    [chosen] = [
        child
        for child, row in enumerate(rows)
        if all(np.array_equal(one, mine) for one, mine in zip(row, found, strict=True))
    ]
    assert chosen != 2


def test_absurd_norms_are_refused_by_name_and_count_among_f() -> None:
    heard: list[tuple[int, dict[int, str]]] = []
    store = store_of("krum(f=1)", refuse=lambda number, why: heard.append((number, dict(why))))
    rows = rows_of(0)
    rows[4] = [one * np.float32(1e7) for one in rows[4]]
    found = deliver(store, 0, rows)
    rest = [row for child, row in enumerate(rows) if child != 4]
    for mine, wanted in zip(found, oracle("krum(f=0)", 0, rest), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    [(number, why)] = heard
    assert number == 0 and list(why) == [4] and "times the median" in why[4]


def test_a_round_with_more_liars_than_f_can_be_done_again() -> None:
    store = store_of("krum(f=1)")
    rows = rows_of(0)
    bad = [list(row) for row in rows]
    for child in (1, 5):
        bad[child] = [one * np.float32(1e7) for one in rows[child]]
    with pytest.raises(
        NonFiniteError, match=r"bears f=1 bad rows. Received: 2 that were refused.*row 5 is.*`f`"
    ):
        deliver(store, 0, bad)
    assert store.has_refused(0) and store.results(0, 0) == (0, [])
    assert all(store.delivered(0, child) == frozenset() for child in range(len(SITES)))
    found = deliver(store, 0, rows)
    for mine, wanted in zip(found, oracle("krum(f=1)", 0, rows), strict=True):
        np.testing.assert_array_equal(mine, wanted)


def test_who_does_a_round_again_may_stand_for_something_else() -> None:
    store = store_of("krum(f=1)")
    rows = rows_of(0)
    store.begin(0)
    for child in (1, 2, 5):
        assert store.weigh(0, child, 0.0)
    with pytest.raises(ToleranceError, match=r"krum needs n >= 2 f \+ 3 rows. Received: n=4"):
        deliver(store, 0, rows)
    assert store.weigh(0, 1, 2.0) and store.weigh(0, 2, 3.0)
    with pytest.raises(ProtocolError, match=r"must stay what it was, 3. Received: 4"):
        store.weigh(0, 2, 4.0)
    found = deliver(store, 0, rows)  # without one that has said nothing else
    present = [row for child, row in enumerate(rows) if child != 5]
    for mine, wanted in zip(found, oracle("krum(f=1)", 0, present), strict=True):
        np.testing.assert_array_equal(mine, wanted)


def test_a_step_that_is_not_finite_is_final() -> None:
    store = store_of("clip >> mean >> fedavgm(1e6)")
    rows = [[np.full_like(one, 1e17) for one in row] for row in rows_of(0)]
    for number in range(2):
        deliver(store, number, rows)
    for slot in store.slots():
        slot[3].fill(3e38)  # as after many such rounds
    store.begin(2)
    with pytest.raises(NonFiniteError, match="must be finite"):
        deliver(store, 2, rows)
    assert store.is_closed(2) and store.has_refused(2)
    assert store.delivered(2, 0) == frozenset(CHUNKS)  # nothing can be done again


def test_equal_rows_and_ties() -> None:
    for text in (*WHOLE, CLIPPING):
        rows = [rows_of(0)[0]] * len(SITES)
        for mine, one in zip(deliver(store_of(text), 0, rows), rows[0], strict=True):
            np.testing.assert_allclose(mine, one, rtol=1e-6)
    # Two rows of equal scores: the first in order.
    pair = rows_of(0)[:2]
    found = deliver(store_of("krum(f=0)", sites=SITES[:4]), 0, [pair[1], pair[0], *pair])
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(pair[1]))


def test_a_party_s_store_sends_its_result_up_and_goes_on_from_what_it_keeps() -> None:
    first, second = (store_of(CLIPPING, site="west") for _ in range(2))
    wanted: list[Floats] = []
    for number in range(2):
        rows = rows_of(number)
        wanted = oracle(CLIPPING, number, rows, wanted or None)
        store = first
        if number == 1:  # another process, from a snapshot
            store = second
            for chunk, place, count, values in first.slots():
                second.restore_slot(chunk, place, count, values.tobytes())
            second.restore_round(1)
        else:
            store.begin(number)
        for child in range(len(SITES)):
            store.weigh(number, child, 1e9 if child == 2 else 4.0)
            for chunk in CHUNKS:
                store.add(number, child, [(chunk, packet(rows[child][chunk]))])
        assert store.results(number, 0) == (0, []) and store.due() == number
        assert store.weight(number) == 4.0 * len(SITES)
        ups = dict(store.ups(number, 0)[1])
        for chunk in CHUNKS:
            found = native.decode(FP32, ups[chunk], MODEL.chunks[chunk].size)
            np.testing.assert_array_equal(found, wanted[chunk])
            store.finish(number, chunk, ups[chunk])
        assert store.is_merged(number)


@pytest.mark.parametrize("text", ["median", "krum(f=1)"])
def test_who_stands_for_nothing_is_no_row(text: str) -> None:
    store = store_of(text)
    for child in (0, 3):
        store.weigh(0, child, 0.0)
    rows = rows_of(0)
    rows[0] = [np.zeros_like(one) for one in rows[0]]
    rest = [row for child, row in enumerate(rows) if child not in (0, 3)]
    found = deliver(store, 0, rows)
    wanted = robust.parse(text)([np.concatenate(row) for row in rest])
    np.testing.assert_array_equal(np.concatenate(found), wanted)
    store.begin(1)
    for child in range(len(SITES)):
        store.weigh(1, child, 0.0)
    found = deliver(store, 1, rows)
    assert not np.concatenate(found).any()  # nobody has anything to say


@pytest.mark.parametrize("text", ["median(f=2)", "krum(f=1)"])
def test_too_few_rows_are_an_error_of_the_round(text: str) -> None:
    store = store_of(text)
    for child in (0, 3, 4):
        store.weigh(0, child, 0.0)
    # One of them alone can do that: it must not stay unnamed.
    with pytest.raises(
        ToleranceError, match=r"needs n >= 2 f \+ [13] rows. Received: n=4"
    ) as caught:
        deliver(store, 0, rows_of(0))
    absent = ", ".join(f"`{SITES[child]}`" for child in (0, 3, 4))
    assert f"(with weight 0 took no part: {absent})" in str(caught.value)


@pytest.mark.parametrize("text", ["median >> momentum(learning_rate=9)", "sum"])
def test_what_overflows_is_named(text: str) -> None:
    store = store_of(text)
    rows = [[np.full_like(values, 3e38) for values in row] for row in rows_of(0)]
    made = "what rule median.* makes of all" if text != "sum" else "the sum over all sites"
    with pytest.raises(NonFiniteError, match=rf"Site `{SITES[0]}`, round 0.*{made} must be finite"):
        deliver(store, 0, rows)


@pytest.mark.parametrize("text", ["trimmed_mean(f=1)", "krum(f=1)"])
def test_who_refuses_its_own_update_counts_among_f(text: str) -> None:
    heard: list[dict[int, str]] = []
    store = store_of(text, refuse=lambda _, why: heard.append(dict(why)))
    store.weigh(0, 2, REFUSED_WEIGHT)
    store.weigh(0, 3, wire.weight_from_text("0.0"))  # it sits the round out
    store.weigh(0, 4, wire.weight_from_text("0.0"))
    rows = rows_of(0)
    rest = [np.concatenate(row) for child, row in enumerate(rows) if child not in (2, 3, 4)]
    # With f=1 Krum needs five rows, and four are left: one of those that may lie is known.
    wanted = robust.parse(text.replace("f=1", "f=0"))(rest)
    np.testing.assert_array_equal(np.concatenate(deliver(store, 0, rows)), wanted)
    assert heard == ([] if text.startswith("trimmed") else [{2: OWN_REFUSAL}])
    store.begin(1)
    for child in (2, 3):
        store.weigh(1, child, wire.weight_from_text(repr(REFUSED_WEIGHT)))
    with pytest.raises(
        NonFiniteError, match=r"bears f=1 bad rows. Received: 2 that were refused"
    ) as caught:
        deliver(store, 1, rows_of(1))
    assert all(f"`{SITES[child]}`" in str(caught.value) for child in (2, 3))
    assert str(caught.value).count(OWN_REFUSAL) == 2


@pytest.mark.parametrize("text", ["trimmed_mean(f=1)", "krum(f=1)"])
def test_a_round_in_which_all_rows_are_refused_is_an_error(text: str) -> None:
    store = store_of(text)
    for child in range(len(SITES)):
        store.weigh(0, child, 0.0 if child == 3 else REFUSED_WEIGHT)
    with pytest.raises(ToleranceError) as caught:
        deliver(store, 0, rows_of(0))
    assert [f"`{site}`: {OWN_REFUSAL}" in str(caught.value) for site in SITES] == [
        child != 3 for child in range(len(SITES))
    ]
    weight = store.weight(0)  # so is what a server of a party would send of them
    assert weight is not None and is_refused(weight)


FACTORS = (0.0, -1.0, 100.0, 1e12)


@pytest.mark.parametrize("codec", ["onebit", "terngrad(bitwidth=2)", "qsgd", "int8", "fp8"])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("text", [*WHOLE, CLIPPING])
def test_a_lying_scale_is_bounded(text: str, factor: float, codec: str) -> None:
    """One of seven says that its scale is another; the result stays among the honest rows."""
    compressor = compressors.parse(codec)
    store, honest = store_of(text, codec), []
    store.begin(0)
    for child in range(len(SITES)):
        decoded = []
        for chunk, where in enumerate(MODEL.chunks):
            # Honest children have the same direction, and noise of their own.
            values = gradient(9, 0, chunk) + np.float32(0.3) * gradient(0, child, chunk)
            key = native.Key(child, 0, chunk)
            sent = native.encode(compressor, values, key)
            decoded.append(native.decode(compressor, sent, where.size))
            if child == 3:
                sent = robust.attacks.lie_about_scale(compressor, sent, where.size, factor)
            store.add(0, child, [(chunk, np.frombuffer(sent, np.uint8))])
        if child != 3:
            honest.append(np.concatenate(decoded))
    found = np.concatenate(results(store, 0))
    mean = np.mean(honest, axis=0, dtype=np.float64)
    spread = max(float(np.linalg.norm(one - mean)) for one in honest)
    assert np.isfinite(found).all()
    # `clip` bounds a row by the median norm, no more; others keep to the honest ones.
    allowed = 2.0 * np.linalg.norm(mean) / len(SITES) + spread
    assert np.linalg.norm(found - mean) <= allowed, (np.linalg.norm(found - mean), allowed)
    if factor == 100.0:  # and a mean would go beyond
        liar = 100.0 * np.linalg.norm(mean) / len(SITES)
        assert liar > 2.0 * allowed
