# SPDX-License-Identifier: Apache-2.0
"""Every rule: beside its definition in float64, under permutations, attacks, shards and texts."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.robust import oracle
from tf_hips import robust
from tf_hips.errors import ToleranceError
from tf_hips.ops.compressor import CHUNK
from tf_hips.robust import value
from tf_hips.robust.aggregator import Measures
from tf_hips.robust.rows import totals

pytestmark = pytest.mark.heavy  # every rule over many rows

Floats = npt.NDArray[np.float32]
BEAR = [name for name in robust.NAMES if name != "mean"]
# Not sign(...): its result says nothing about sizes.
LINEAR = [name for name in robust.NAMES if name != "majority"]


def rows_of(n: int, d: int, seed: int = 0, spread: float = 1.0) -> Floats:
    generator = np.random.default_rng((n, d, seed))
    common = generator.standard_normal(d)
    return (common + spread * generator.standard_normal((n, d))).astype(np.float32)


def with_f(name: str, f: int) -> robust.Aggregator:
    return robust.parse(name if name == "mean" else f"{name}(f={f})")


def close(found: Floats, wanted: npt.NDArray[np.float64], tolerance: float = 2e-6) -> None:
    assert found.dtype == np.float32
    assert np.abs(found - wanted).max() <= tolerance * max(float(np.abs(wanted).max()), 1e-30)


@pytest.mark.parametrize("name", robust.NAMES)
@pytest.mark.parametrize(("n", "f"), [(7, 1), (11, 2), (16, 3), (35, 8)])
def test_a_rule_is_what_its_definition_says(name: str, n: int, f: int) -> None:
    if name == "mda" and n > 16:
        n, f = 18, 4
    rows = rows_of(n, 700)
    rows[: f // 2] *= 3
    before = rows.copy()
    wanted = oracle.RULES[name](rows.astype(np.float64), f)
    close(with_f(name, f)(rows), wanted, 5e-5 if name == "geometric_median" else 2e-6)
    np.testing.assert_array_equal(rows, before)


@pytest.mark.parametrize("name", robust.NAMES)
@pytest.mark.parametrize("pre", ["nnm(f=2)", "clip(c=0.8)", "arc(f=2)"])
def test_a_rule_behind_another_is_what_both_say(name: str, pre: str) -> None:
    rows = rows_of(12, 900)
    rows[0] *= 5
    exact = rows.astype(np.float64)
    mixed = {"nnm": oracle.nnm, "clip": oracle.clip, "arc": oracle.arc}[pre.split("(")[0]](
        exact, 0.8 if pre.startswith("clip") else 2
    )
    if name == "cge" and pre != "nnm(f=2)":
        pytest.skip("rows that are shortened have equal norms, of which the least is rounding's")
    if name == "bulyan" and pre == "nnm(f=2)":
        pytest.skip("rows that have the same neighbours become equal: any of them may be taken")
    rule = robust.parse(f"{pre} >> {with_f(name, 2).text}")
    if name == "majority":
        # Signs of sums that are almost 0 are rounding's.
        found, wanted = rule(rows), oracle.RULES[name](mixed, 2)
        assert (found != wanted).mean() < 0.01
        return
    close(rule(rows), oracle.RULES[name](mixed, 2), 5e-5 if name == "geometric_median" else 5e-6)


def test_buckets_are_means_of_rows_that_the_seed_draws() -> None:
    rows = rows_of(11, 300)
    rule = robust.bucketing(s=3) >> robust.median()
    first = rule(rows, seed=7, step=0)
    np.testing.assert_array_equal(first, rule(rows, seed=7, step=0))
    others = [rule(rows, seed=seed, step=step) for seed, step in ((7, 1), (8, 0))]
    assert all((first != other).any() for other in others)
    one = (robust.bucketing(s=11) >> robust.median())(rows)
    close(one, rows.astype(np.float64).mean(axis=0))


def test_detox_form_of_bulyan() -> None:
    rows = rows_of(15, 400)
    wanted = oracle.bulyan_of_detox(rows.astype(np.float64), 3)
    close(robust.bulyan(f=3, compat=True)(rows), wanted)
    assert (
        robust.bulyan(f=3).run(rows).selected != robust.bulyan(f=3, compat=True).run(rows).selected
    )


def test_centred_clipping_goes_on_from_the_result_before() -> None:
    rows = rows_of(9, 500)
    before = rows_of(1, 500, seed=1)[0]
    wanted = oracle.centred_clipping(
        rows.astype(np.float64), 2, before.astype(np.float64), tau=0.5, iterations=2
    )
    rule = robust.centred_clipping(f=2, tau=0.5, iterations=2)
    close(rule(rows, reference=before), wanted)
    behind = robust.nnm(f=2) >> rule
    mixed = oracle.nnm(rows.astype(np.float64), 2)
    wanted = oracle.centred_clipping(mixed, 2, before.astype(np.float64), tau=0.5, iterations=2)
    close(behind(rows, reference=before), wanted, 5e-6)


# Several sets of rows may have the least diameter: then MDA takes the first, and only then.
@pytest.mark.parametrize("name", sorted({*robust.NAMES} - {"mda"}))
@settings(max_examples=25)
@given(seed=some.integers(0, 1000), n=some.integers(7, 20))
def test_the_order_of_rows_does_not_matter(name: str, seed: int, n: int) -> None:
    rows = rows_of(n, 40, seed)
    order = np.random.default_rng(seed).permutation(n)
    rule = with_f(name, 1)
    first, second = rule.run(rows), rule.run(rows[order])
    if name in ("median", "trimmed_mean", "meamed", "majority", "krum"):
        np.testing.assert_array_equal(first.vector, second.vector)
    close(first.vector, second.vector.astype(np.float64))
    if first.selected is not None and second.selected is not None:
        assert set(first.selected) == {int(order[row]) for row in second.selected}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("factor", [2.0**-30, 2.0**20])
def test_scaled_rows_have_a_scaled_result(name: str, factor: float) -> None:
    rows = rows_of(11, 300)
    rule = with_f(name, 2)
    np.testing.assert_array_equal(
        rule((rows * np.float32(factor)).astype(np.float32)), rule(rows) * np.float32(factor)
    )


@pytest.mark.parametrize("name", sorted(set(LINEAR) - {"cge"}))
def test_moved_rows_have_a_moved_result(name: str) -> None:
    rows = rows_of(11, 300)
    rows = np.round(rows * 256) / np.float32(256)
    rule = with_f(name, 2)
    close(rule(rows + np.float32(4)), rule(rows).astype(np.float64) + 4, 1e-5)


@pytest.mark.parametrize("pre", ["", "nnm(f=3) >> ", "clip(c=1) >> ", "arc(f=3) >> "])
@pytest.mark.parametrize("name", BEAR)
@pytest.mark.parametrize("sent", [9000.0, -9000.0, 1e17, np.nan])
def test_f_liars_cannot_move_the_result_away(name: str, pre: str, sent: float) -> None:
    n, f = 15, 3
    honest = rows_of(n - f, 64, spread=0.1)
    liars = np.full((f, 64), sent, np.float32)
    rule = robust.parse(f"{pre}{with_f(name, f).text}")
    for rows in (np.concatenate([honest, liars]), np.concatenate([liars, honest])):
        found = rule(rows)
        assert np.isfinite(found).all()
        if name == "majority":
            np.testing.assert_array_equal(found[:1], np.sign(honest.mean(axis=0))[:1])
            continue
        worst = np.abs(honest.astype(np.float64)).max()
        assert np.abs(found).max() <= 2.5 * worst


@pytest.mark.parametrize(
    ("pre", "is_bounded"),
    [
        ("nnm(f=1)", False),
        ("bucketing(s=2)", False),
        ("nnm(f=1) >> clip", True),
        ("arc(f=1) >> nnm(f=1)", True),
    ],
)
def test_a_mean_bears_a_liar_only_where_rows_are_shortened(pre: str, is_bounded: bool) -> None:
    honest = rows_of(4, 64, spread=0.1)
    rule = robust.parse(f"{pre} >> mean")
    found = rule(np.concatenate([honest, -1000 * honest[:1]]))  # not absurd
    longest = np.linalg.norm(honest, axis=1).max()
    assert (np.linalg.norm(found) <= longest) == is_bounded == rule.is_bounded
    assert rule.bears(5) == (1 if is_bounded else None)


@pytest.mark.parametrize("name", BEAR)
def test_too_few_rows_are_refused_with_the_formula(name: str) -> None:
    slope, least = value.KINDS[name].needs or (0, 1)
    for f in (0, 1, 2):
        enough = slope * f + least
        assert with_f(name, f)(rows_of(enough, 8)).shape == (8,)
        if enough > 1:
            with pytest.raises(ToleranceError, match=rf"n >= {slope} f \+ {least} rows. Received"):
                with_f(name, f)(rows_of(enough - 1, 8))


@pytest.mark.parametrize("name", BEAR)
@pytest.mark.parametrize("n", [3, 4, 7, 15, 16])
def test_auto_is_the_most_that_n_rows_can_bear(name: str, n: int) -> None:
    rows = rows_of(n, 8)
    f = robust.parse(name).run(rows).f
    assert with_f(name, f)(rows).shape == (8,)
    with pytest.raises(ToleranceError):
        with_f(name, f + 1)(rows)


@pytest.mark.parametrize("name", [*BEAR, "nnm >> krum", "bucketing(s=2) >> median"])
def test_auto_is_never_0_where_all_who_could_have_a_row_bear_one(name: str) -> None:
    rule = robust.parse(name)
    fewest = {"bulyan": 7, "krum": 5, "multi_krum": 5, "nnm >> krum": 5}.get(name, 3)
    fewest = 5 if "bucketing" in name else fewest
    assert rule.bears(fewest) == 1
    assert rule.run(rows_of(fewest, 8), of=9 * fewest).f == 1
    told = rf"f=auto bears \d+ of \d+, and none of those that have come. Received: n={fewest - 1}"
    told = told if "bucketing" not in name else "and none of those that have come"
    for few in range(1, fewest):
        with pytest.raises(ToleranceError, match=told if few == fewest - 1 else "needs n >="):
            rule.run(rows_of(few, 8), of=fewest)
        with pytest.raises(ToleranceError, match="needs n >="):
            rule.check(few, of=fewest)
    if fewest > 3:
        assert rule.run(rows_of(fewest - 1, 8), of=fewest - 1).f == 0  # no more could have come


def test_who_is_refused_has_come_and_an_f_that_is_said_stays() -> None:
    rows = rows_of(3, 8)
    rows[1] = np.nan
    assert robust.median().run(rows, of=5).f == 0  # one of three is known, and none is left
    assert robust.median(f=0).run(rows[:1], of=5).f == 0
    with pytest.raises(ToleranceError, match=r"Received: n=2 \(1 refused: 1 missing\)"):
        robust.krum().run(rows_of(1, 8), missing=1, of=5)


def test_auto_before_another_rule_is_what_that_rule_bears() -> None:
    rows = rows_of(12, 50)
    chained = robust.nnm() >> robust.krum()
    close(chained(rows), oracle.krum(oracle.nnm(rows.astype(np.float64), 4), 4))
    # Five buckets of 2 and 1 of 1: krum bears one of six.
    assert (robust.bucketing(2) >> robust.krum()).run(rows_of(11, 50)).f == 1


def test_multi_krum_takes_no_more_rows_than_are_safe() -> None:
    rows = rows_of(9, 30)
    assert len(robust.multi_krum(f=2).run(rows).selected or ()) == 5
    assert len(robust.multi_krum(f=2, m=3).run(rows).selected or ()) == 3
    with pytest.raises(ToleranceError, match=r"1 <= m <= n - f - 2. Received: m=6, n=9, f=2"):
        robust.multi_krum(f=2, m=6)(rows)


def test_the_geometric_median_of_halves_is_between_them() -> None:
    one = np.ones(4, np.float32)
    zeros = 0 * one
    # Of three pairs of equal rows each, most distances are 0, and so is the one of `spread`.
    np.testing.assert_array_equal(robust.geometric_median()([one, -one]), zeros)
    halves = [one] * 3 + [-one] * 3 + [zeros]
    np.testing.assert_array_equal(robust.geometric_median()(halves), zeros)


def test_mda_finds_the_least_diameter() -> None:
    for seed in range(20):
        rows = rows_of(10, 3, seed)
        for f in (0, 1, 3, 4):
            wanted = oracle.mda(rows.astype(np.float64), f)
            close(robust.mda(f=f)(rows), wanted)
    with pytest.raises(ValueError, match=r"`f` must be in \[0, 16\]. Received: f=17"):
        robust.mda(f=17)
    assert robust.mda().check(45) == 16  # what is asked is what can be searched


def test_a_rule_over_shards_is_the_rule_over_whole_rows() -> None:
    rows = rows_of(9, CHUNK + 3000)
    rows[4] *= 3
    parts = [[row[:CHUNK].copy() for row in rows], [row[CHUNK:].copy() for row in rows]]
    for text in ("krum(f=2)", "nnm(f=2) >> trimmed_mean(f=2)", "geometric_median", "bulyan(f=1)"):
        rule = robust.parse(text)
        shards = [rule.measure(part) for part in parts]
        together = shards[1].joined(shards[0])  # in whatever order they come
        found = []
        for part in parts:
            decision = rule.decide(together, rows=part)
            found.append(rule.apply(decision, part).vector)
        assert np.concatenate(found).tobytes() == rule(rows).tobytes(), text
    assert isinstance(shards[0], Measures)


def test_what_shards_measured_adds_up_alike_in_whatever_order_they_bring_it() -> None:
    measured = np.array([[1e16], [1.0], [-1e16], [1.0]])
    orders = ((0, 1, 2, 3), (1, 3, 0, 2), (0, 2, 1, 3))
    assert [totals(measured[list(order)]) for order in orders] == [[2.0]] * 3


def test_rules_of_servers_are_told_apart() -> None:
    with pytest.raises(ValueError, match=r"there is `robust.sketched\(rule\)`"):
        robust.parse(str(robust.sketched(robust.krum(f=1))))
    with pytest.raises(ValueError, match=r"there is `robust.detox.Detox\(r, rule\)`"):
        robust.parse("detox(r=3) >> median")


@pytest.mark.parametrize("name", robust.NAMES)
def test_a_rule_is_its_text(name: str) -> None:
    rule = robust.parse(name)
    assert robust.parse(rule.text) == rule
    assert getattr(robust, name)() == rule
    longer = robust.parse(f"bucketing(3)>>clip >> nnm(f = 2) >> {rule.text}")
    pres = robust.bucketing(s=3) >> robust.clip() >> robust.nnm(f=2)
    assert pres >> rule == longer == robust.parse(str(longer))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("coord-median", "median(f=auto)"),
        ("sign-sgd", "majority(f=auto)"),
        ("signSGD(f=1)", "majority(f=1)"),
        ("bulyan(1, True)", "bulyan(f=1, compat=True)"),
        ("clip>>normal", "clip(c=1) >> mean"),
    ],
)
def test_other_spellings_are_understood(text: str, canonical: str) -> None:
    assert robust.parse(text).text == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("krumm", r"did you mean krum\? Received"),
        ("average_of_some", r"bucketing, nnm\. Received: 'average_of_some'"),
        ("nnm(f=2)", "must stand at the end"),
        ("krum >> nnm", "must stand at the end"),
        ("krum >> median", "before the end"),
        ("krum(g=2)", "takes f. Received"),
        ("krum(f=-2)", "`f` must be in"),
        ("krum(f=some)", "an integer or auto"),
        ("krum(f=1.5)", "`f` must be an integer"),
        ("", "must read like"),
        ("krum(__import__('os'))", "must read like"),
        ("clip(c=0) >> mean", "`c` must be in"),
        (">> krum", "must read like"),
        ("nnm >> " * 8 + "krum", "must read like"),
        ("a" * 400, "must read like"),
    ],
)
def test_a_wrong_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        robust.parse(text)


def test_what_is_not_a_rule_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a string"):
        robust.parse(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        robust.nnm() >> 3
    with pytest.raises(ValueError, match="`s` must be in"):
        robust.bucketing(s=0)


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("aggregators.md", [*robust.NAMES, *robust.PRE_NAMES]),
        ("attacks.md", robust.attacks.NAMES),
    ],
)
def test_the_pages_name_every_rule_and_attack(page: str, names: list[str]) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text(encoding="utf-8")
    assert not [name for name in names if f"| `{name}" not in text]
