# SPDX-License-Identifier: Apache-2.0
"""Chains of rules beside float64, of any sizes; which distances they take, and which f they get."""

import functools
import itertools
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from tests.robust import oracle
from tf_hips import robust
from tf_hips.robust import selection
from tf_hips.robust.deciding import secret_order

pytestmark = pytest.mark.heavy  # many chains of rules

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
SEED = 11


def rows_of(n: int, d: int, seed: int = 0) -> Floats:
    generator = np.random.default_rng((n, d, seed))
    common = generator.standard_normal(d)
    lengths = generator.uniform(0.3, 3.0, (n, 1))
    return ((common + generator.standard_normal((n, d))) * lengths).astype(np.float32)


def bucketed(x: Doubles, s: int) -> Doubles:
    """Means of s rows each, in the order that the seed draws."""
    order = secret_order(len(x), SEED, 0, "robust/bucketing")
    return np.stack([x[order[i : i + s]].mean(axis=0) for i in range(0, len(x), s)])


PRES = {
    "nnm(f=1)": lambda x: oracle.nnm(x, 1),
    "clip(c=0.9)": lambda x: oracle.clip(x, 0.9),
    "arc(f=2)": lambda x: oracle.arc(x, 2),
    "bucketing(s=2)": lambda x: bucketed(x, 2),
    "bucketing(s=3)": lambda x: bucketed(x, 3),
}


def has_ties(pres: Sequence[str], name: str) -> bool:
    """Whether several rows do equally well, of which rounding chooses."""
    if name == "cge" or "arc(f=2)" in pres[1:]:  # rows that were shortened have equal norms
        return any(one.startswith(("clip", "arc")) for one in pres)  # here up to rounding
    # Rows that have the same neighbours become equal.
    return name in ("bulyan", "mda", "multi_krum") and "nnm(f=1)" in pres


CHAINS = [(), *((one,) for one in PRES), *itertools.permutations(PRES, 2)]


@pytest.mark.parametrize("name", robust.NAMES)
def test_any_chain_is_what_its_definitions_say(name: str) -> None:
    sizes = np.random.default_rng(len(name))
    for pres in CHAINS:
        if has_ties(pres, name):
            continue
        n, d, exponent = sizes.integers((24, 20, -20), (31, 700, 21))
        rows = rows_of(int(n), int(d)) * np.float32(2.0**exponent)
        exact = functools.reduce(lambda x, pre: PRES[pre](x), pres, rows.astype(np.float64))
        f = 0 if len(exact) < 5 or (name == "bulyan" and len(exact) < 7) else 1
        rule = robust.parse(" >> ".join([*pres, name if name == "mean" else f"{name}(f={f})"]))
        found, wanted = rule(rows, seed=SEED), oracle.RULES[name](exact, f)
        if name == "majority":
            # Signs of sums that are almost 0 are rounding's.
            assert (found != wanted).mean() < 0.02, rule.text
            continue
        tolerance = 2e-4 if name == "geometric_median" else 2e-5
        assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max(), rule.text


@pytest.mark.parametrize("pre", ["clip", "arc(f=2)", "clip(c=0.7) >> clip(c=0.9)"])
def test_of_rows_that_were_shortened_to_one_norm_the_first_are_taken(pre: str) -> None:
    rule = robust.parse(f"{pre} >> cge(f=1)")
    for seed in range(60):
        rows = np.random.default_rng(seed).standard_normal((5, 20))
        rows *= (np.arange(1, 6) / np.linalg.norm(rows, axis=1))[:, None]
        found = rule.run(rows)
        assert found.selected == (0, 1, 2, 3)
        # As parts of rows, which shards have, too.
        parts = [np.ascontiguousarray(one, np.float32) for one in np.split(rows, [7], axis=1)]
        first, second = (rule.measure(list(one)) for one in parts)
        decision = rule.decide(first.joined(second), rows=[])
        assert decision.selected == (0, 1, 2, 3)


@pytest.mark.parametrize("text", ["cge(f=1)", "clip(c=0.5) >> mean", "arc(f=1) >> mean"])
def test_norms_of_buckets_are_those_of_their_means(text: str) -> None:
    # Rows that cancel each other are long, and their mean is short.
    rows = rows_of(1, 50)[0] * np.float32([[1], [-1], [0.3], [0.3], [0.4], [0.4], [0.2], [0.2]])
    order = secret_order(8, SEED, 0, "robust/bucketing")
    shuffled = np.empty_like(rows)
    shuffled[order] = rows
    means = bucketed(shuffled.astype(np.float64), 2).astype(np.float32)
    found = (robust.bucketing(2) >> robust.parse(text))(shuffled, seed=SEED)
    np.testing.assert_allclose(found, robust.parse(text)(means), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("mean", False),
        ("clip >> median", False),
        ("clip >> bucketing >> median", False),
        ("bucketing >> trimmed_mean", False),
        ("arc >> cge", False),
        ("bucketing >> cge", True),
        ("bucketing >> clip >> mean", True),
        ("nnm >> median", True),
        ("clip >> krum", True),
        ("geometric_median", True),
    ],
)
def test_distances_are_taken_where_something_looks_at_them(text: str, wanted: bool) -> None:
    rule = robust.parse(text)
    assert bool(rule.measure(list(rows_of(9, 30))).pairs.size) == wanted
    assert np.isfinite(rule(rows_of(9, 30))).all()


def test_auto_before_a_rule_without_f_is_what_it_bears_itself() -> None:
    rows = rows_of(9, 40)
    rows[:2] *= 50
    for pre, exact in (("arc", oracle.arc), ("nnm", oracle.nnm)):
        found = robust.parse(f"{pre} >> mean")(rows)
        wanted = exact(rows.astype(np.float64), 4).mean(axis=0)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
        assert np.abs(found - robust.mean()(rows)).max() > 0.1


@pytest.mark.parametrize("nu", [1e-6, 1e-2, 0.1])
@pytest.mark.parametrize(("n", "f"), [(15, 7), (15, 5), (9, 4), (4, 1), (3, 1)])
def test_liars_do_not_choose_how_smooth_a_geometric_median_is(nu: float, n: int, f: int) -> None:
    # More than half of all distances may be to liars that are far away.
    honest = rows_of(n - f, 60)
    rows = np.concatenate([honest, np.full((f, 60), 300, np.float32)])
    found = robust.geometric_median(f=f, nu=nu)(rows)
    middle = honest.mean(axis=0)
    radius = np.linalg.norm(honest - middle, axis=1).max()
    # The bound of any geometric median: 2 (n - f) / (n - 2 f) times how far honest rows are apart.
    assert np.linalg.norm(found - middle) <= 2 * (n - f) / (n - 2 * f) * radius
    assert selection.spread(oracle.distances(rows.astype(np.float64))) <= 2.001 * radius


def test_liars_that_are_equal_do_not_take_all_smoothing_away() -> None:
    points = np.concatenate([np.zeros((7, 3)), rows_of(8, 3).astype(np.float64)])
    assert selection.spread(oracle.distances(points)) > 0
    # More than half of all pairs are equal, and no value has half of the rows.
    points = np.repeat(np.arange(3.0), [7, 4, 4])[:, None] * np.ones((1, 3))
    weights = selection.geometric_median(oracle.distances(points), 1e-6)
    assert np.isfinite(weights).all()
    assert (weights @ points)[0] == pytest.approx(1.0, abs=1e-3)


def test_a_geometric_median_of_many_rows_is_one() -> None:
    # Liars of one voice, as many as may be: Weiszfeld's iteration needs some 6 steps for each row.
    n, f = 401, 200
    rows = np.concatenate([rows_of(n - f, 60), np.full((f, 60), 300, np.float32)]).astype(
        np.float64
    )
    middle = selection.geometric_median(oracle.distances(rows), 1e-6) @ rows
    away = middle - rows
    pull = (away / np.linalg.norm(away, axis=1)[:, None]).sum(axis=0)
    assert np.linalg.norm(pull) < 1e-4  # of n unit vectors


def test_pairs_of_liars_do_not_make_mda_search_for_ever() -> None:
    # 17 pairs, of each of which one must go, and f = 16: there are 2^16 ways to find that out.
    apart = np.ones((35, 35)) - np.eye(35)
    for one in range(0, 34, 2):
        apart[one, one + 1] = apart[one + 1, one] = 4.0
    began = time.process_time()
    assert selection.mda(apart, 16) == list(range(19))
    assert time.process_time() - began < 0.2
