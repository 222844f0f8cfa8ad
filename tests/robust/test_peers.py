# SPDX-License-Identifier: Apache-2.0
"""One test for each known bug of other implementations: whose it is, and that it is not here."""

import numpy as np
import numpy.typing as npt
import pytest

from tests.robust import oracle
from tf_hips import robust
from tf_hips.errors import ToleranceError
from tf_hips.robust import Adversary, attacks
from tf_hips.robust.deciding import secret_order
from tf_hips.robust.detox import approach, groups, sampling_seed, vote_exact, vote_tolerant

pytestmark = pytest.mark.heavy  # one known bug of a peer each, over many rows

Floats = npt.NDArray[np.float32]


def rows_of(n: int, d: int, seed: int = 0) -> Floats:
    return np.random.default_rng((n, d, seed)).standard_normal((n, d)).astype(np.float32)


def seated(of_groups: Floats, n: int, r: int, seed: int) -> Floats:
    """What n honest workers send that have the gradients of their groups."""
    rows = np.empty((n, of_groups.shape[1]), np.float32)
    for gradient, members in zip(of_groups, groups(n, r, seed, 0), strict=True):
        rows[list(members)] = gradient
    return rows


@pytest.mark.parametrize("norm", [1.0, 0.1, 0.01, 1e-6])
def test_byzfl_and_rfa_the_geometric_median_of_small_gradients_is_not_the_mean(norm: float) -> None:
    generator = np.random.default_rng(0)
    direction = generator.standard_normal(200)
    direction *= norm / np.linalg.norm(direction)
    honest = direction + 0.1 * norm * generator.standard_normal((12, 200)) / np.sqrt(200)
    rows = np.concatenate([honest, np.tile(-4 * direction, (3, 1))]).astype(np.float32)
    off = np.linalg.norm(robust.geometric_median(f=3)(rows) - honest.mean(axis=0)) / norm
    of_mean = np.linalg.norm(rows.mean(axis=0) - honest.mean(axis=0)) / norm
    assert off < 0.1 < 0.9 < of_mean


@pytest.mark.parametrize("name", robust.NAMES)
def test_byzfl_and_garfield_one_nan_destroys_nothing(name: str) -> None:
    rows = rows_of(9, 30)
    rows[4, 7] = np.nan
    assert np.isfinite(robust.parse(name)(rows)).all()


def test_garfield_values_behind_a_nan_are_not_skipped() -> None:
    rows = np.array([[np.nan], [np.nan], [1], [2], [3], [4], [5]], np.float32)
    assert robust.median(f=2)(rows)[0] == 3.0


def test_flower_distances_of_models_that_are_near_each_other_are_not_noise() -> None:
    generator = np.random.default_rng(1)
    weights = generator.standard_normal(300_000)
    rows = weights + 1e-4 * generator.standard_normal((9, weights.size))
    rows[6:] += 3e-4 * generator.standard_normal(weights.size)  # three that are farther
    given = rows.astype(np.float32)
    # As there: norms and products in float32, not centred.
    squares = (given**2).sum(axis=1)
    theirs = squares[:, None] + squares[None, :] - 2 * given @ given.T
    assert (theirs[~np.eye(9, dtype=bool)] < 0).any() or theirs.std() > theirs.mean()
    wanted = sorted(oracle.ranked(given.astype(np.float64), 3)[:4])
    assert list(robust.multi_krum(f=3).run(given).selected or ()) == wanted
    assert set(wanted) <= set(range(6))


def test_flower_and_detox_bulyan_is_not_multi_krum_at_once() -> None:
    differing = 0
    for seed in range(50):
        rows = rows_of(15, 20, seed)
        iterated = robust.bulyan(f=3).run(rows).selected
        at_once = tuple(sorted(oracle.ranked(rows.astype(np.float64), 3)[:9]))
        differing += iterated != at_once
    assert differing > 25


def test_garfield_bulyan_takes_the_nearest_values_and_updates_its_scores() -> None:
    rows = rows_of(11, 50)
    rows[:2] = 50.0
    found = robust.bulyan(f=2)(rows)
    exact = rows.astype(np.float64)
    np.testing.assert_allclose(found, oracle.bulyan(exact, 2), rtol=2e-5, atol=1e-6)
    assert np.abs(found).max() <= np.abs(rows[2:]).max()
    differing = 0
    for seed in range(20):
        rows = rows_of(11, 5, seed)
        # As there, and in calicarpa/krum: scores stay those of all rows.
        at_first = sorted(oracle.ranked(rows.astype(np.float64), 2)[:7])
        differing += list(robust.bulyan(f=2).run(rows).selected or ()) != at_first
    assert differing > 5


def test_epfl_krum_returns_a_mean_and_squares_once() -> None:
    differing = 0
    for seed in range(20):
        rows = rows_of(10, 3, seed)
        exact = rows.astype(np.float64)
        wanted = oracle.multi_krum(exact, 2)
        np.testing.assert_allclose(robust.multi_krum(f=2)(rows), wanted, rtol=1e-5, atol=1e-6)
        fourth = np.sort(oracle.distances(exact) ** 2, axis=1)[:, 1:7].sum(axis=1)
        differing += set(np.argsort(fourth)[:6]) != set(oracle.ranked(exact, 2)[:6])
    assert differing > 3  # so the rows tell the two apart


def test_flower_nobody_weighs_itself() -> None:
    # A rule takes rows and nothing else: there is no place for a number of examples.
    with pytest.raises(TypeError):
        robust.krum(f=1).run(rows_of(5, 3), num_examples=[1, 1, 1, 1, 10**9])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("text", "n"), [("krum(f=2)", 5), ("multi_krum(f=1)", 2), ("bulyan(f=2)", 10)]
)
def test_byzfl_flower_and_aggregathor_too_few_rows_are_refused(text: str, n: int) -> None:
    with pytest.raises(ToleranceError, match="needs n >= "):
        robust.parse(text)(rows_of(n, 4))


def test_garfield_more_than_23_rows_are_no_limit() -> None:
    rows = rows_of(120, 600)
    rows[:20] += 40
    for name in ("median", "bulyan", "krum"):
        found = robust.parse(f"{name}(f=20)")(rows)
        wanted = oracle.RULES[name](rows.astype(np.float64), 20)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_garfield_more_than_2_31_elements_are_no_limit() -> None:
    # One row, 45 times: its memory is there once.
    d = 48_000_000
    row = np.random.default_rng(0).standard_normal(d, np.float32)
    low = np.full(d, -9, np.float32)
    rows = [low] * 22 + [row] * 23
    assert len(rows) * d > 2**31
    np.testing.assert_array_equal(robust.median(f=22)(rows), row)


def test_aggregathor_results_repeat() -> None:
    rows = rows_of(15, 200_001)
    for name in robust.NAMES:
        assert robust.parse(name)(rows).tobytes() == robust.parse(name)(rows).tobytes()


def test_byzfl_clipping_leaves_its_caller_s_rows_alone() -> None:
    rows = rows_of(9, 40)
    rows[0] *= 30
    rows.flags.writeable = False
    for text in ("clip(c=0.1) >> mean", "arc(f=4) >> mean", "centred_clipping(tau=0.1)"):
        robust.parse(text)(rows)


def test_qora_all_parts_of_a_row_are_chosen_together() -> None:
    # By parts, each would choose another row; the whole row is that of one worker.
    rows = rows_of(9, 3000)
    chosen = robust.krum(f=2).run(rows)
    assert (rows == chosen.vector).all(axis=1).sum() == 1
    by_parts = {robust.krum(f=2).run(rows[:, i : i + 100]).selected for i in range(0, 3000, 100)}
    assert len(by_parts) > 1


def test_detox_an_attack_changes_what_is_sent_and_its_numbers_matter() -> None:
    # There `random` sends the gradient as it is, and `--adversarial` is read by nobody.
    honest = rows_of(7, 12)
    own = honest[:3]
    made = [getattr(attacks, name)() for name in sorted({*attacks.NAMES} - {"mimic"})]
    made += [attacks.alie(z=1.0), attacks.gaussian(sigma=1.0), attacks.constant(3.0)]
    made += [attacks.reversed_gradient(2.0), attacks.inner_product(0.1)]
    sent = [one(honest, 3, own=own).tobytes() for one in made]
    assert own.tobytes() not in sent
    assert len({*sent}) == len(made)


def test_garfield_and_detox_z_follows_from_how_many_lie() -> None:
    # There it is 1.035 or 1, whatever n and f are.
    honest = rows_of(12, 30)
    few, many = attacks.alie()(honest, 3)[0], attacks.alie()(honest, 9)[0]
    off = [np.linalg.norm(sent - honest.mean(axis=0)) for sent in (few, many)]
    assert off[0] < off[1]


@pytest.mark.parametrize("name", attacks.NAMES)
def test_garfield_every_attack_that_has_a_name_exists(name: str) -> None:
    sent = getattr(attacks, name)()(rows_of(7, 12), 3)
    assert sent.shape == (3, 12)
    assert sent.dtype == np.float32


def test_detox_a_vote_without_majority_is_no_vote() -> None:
    h, a, b = (row.copy() for row in rows_of(3, 5))
    for said in ([h, h, a, b, b], [h, a, b], [h, h, a, a]):
        assert not vote_exact(said, range(len(said))).is_won
    assert vote_exact([a, h, h], (7, 8, 9)).agreed == (8, 9)


def test_detox_a_majority_of_nan_is_no_riddle() -> None:
    # There values are compared: NaN is unlike itself, so that a group with a NaN never agrees with
    # itself, and 0 is -0, whose bytes differ.
    h = rows_of(1, 5)[0]
    h[2] = np.nan
    assert vote_exact([h, h.copy(), h * 2], range(3)).agreed == (0, 1)
    zeros = np.zeros(4, np.float32)
    assert not vote_exact([zeros, -zeros, zeros + 1], range(3)).is_won


def test_detox_replicas_that_round_differently_do_not_just_lose_their_vote() -> None:
    h = rows_of(1, 500)[0]
    near = [h, h * np.float32(1 + 1e-6), h * np.float32(1 - 1e-6)]
    assert not vote_exact(near, range(3)).is_won
    assert set(vote_tolerant(near, range(3)).agreed) == {0, 1, 2}


def test_detox_a_vote_is_on_the_whole_gradient() -> None:
    # By tensors, two liars with one half of theirs right each would splice a gradient of nobody.
    left, right = rows_of(2, 6)
    honest = np.concatenate([left, right])
    first, second = np.concatenate([left, -right]), np.concatenate([-left, right])
    assert not vote_exact([first, second, honest], range(3)).is_won


def test_detox_every_worker_has_a_group() -> None:
    for p in range(1, 50):
        for step in (0, 1):
            drawn = groups(p, 3, 9, step)
            assert sorted(worker for one in drawn for worker in one) == list(range(p))


def test_detox_bucket_size_0_is_no_division() -> None:
    rows = seated(rows_of(5, 8), 15, 3, 1)
    found = approach("draco_lite", "coord-median", group_size=3, bucket_size=0).run(rows, seed=1)
    assert found.vector.shape == (8,)


def test_detox_buckets_need_not_divide_the_groups() -> None:
    honest = rows_of(5, 8)
    rows = seated(honest, 15, 3, 1)
    for buckets in (2, 3, 4, 7):
        chosen = approach("detox", "coord-median", group_size=3, bucket_size=buckets)
        found = chosen.run(rows, seed=1).vector
        assert (found >= honest.min(axis=0)).all() and (found <= honest.max(axis=0)).all()


def test_detox_its_rules_ask_for_enough_votes() -> None:
    rows = seated(rows_of(5, 8), 15, 3, 1)
    for mode, needs in (("multi-krum", "2 f"), ("bulyan", "4 f")):
        chosen = approach("detox", mode, group_size=3, worker_fail=4)  # 2 of 5 groups
        with pytest.raises(ToleranceError, match=f"needs n >= {needs}"):
            chosen.run(rows, seed=1)


def test_detox_a_mode_that_it_does_not_know_is_refused() -> None:
    for name in ("baseline", "detox", "draco_lite"):
        with pytest.raises(ValueError, match="must be one of"):
            approach(name, "middle")


def test_detox_the_seed_draws_groups_and_batches() -> None:
    # There `--seed` is read by nobody, and everything is drawn from 428.
    assert groups(45, 3, 1, 0) != groups(45, 3, 2, 0)
    assert sampling_seed(1, 0, 0) != sampling_seed(2, 0, 0)
    assert attacks.liars(45, 5, 1) != attacks.liars(45, 5, 2)


def test_detox_its_spellings_all_mean_something() -> None:
    rows = seated(rows_of(15, 8), 45, 3, 1)
    for mode in ("coord-median", "multi-krum", "bulyan", "sign-sgd", "geometric_median", "krum"):
        for name in ("draco-lite", "draco_lite", "detox", "baseline"):
            one = approach(name, mode, group_size=1 if name == "baseline" else 3, worker_fail=5)
            assert np.isfinite(one.run(rows, seed=1).vector).all()
    assert approach("maj_vote", "maj_vote", group_size=3).then == robust.mean()


def test_detox_liars_are_counted_from_0() -> None:
    # There, index 0 attacks nobody and the last worker is never drawn.
    drawn = {worker for step in range(300) for worker in attacks.liars(10, 2, 5, step)}
    assert drawn == set(range(10))


@pytest.mark.parametrize(("name", "r"), [("baseline", 1), ("detox", 3)])
def test_detox_a_little_is_enough_is_sent_to_sign_sgd_too(name: str, r: int) -> None:
    # There it goes to a buffer of zeros, and the vote is on gradients without a lie.
    n, workers = 9, 9 * r
    honest = (rows_of(n, 400) + np.float32(0.05)).astype(np.float32)
    rows = seated(honest, workers, r, 1)
    chosen = approach(name, "sign-sgd", group_size=r)
    adversary = Adversary(attacks.alie(z=1.0), 2 * r + 2, seed=3)
    clean = chosen.run(rows, seed=1).vector
    found = chosen.run(adversary.sent(rows, 0), seed=1).vector
    assert set(np.unique(found)) <= {-1, 0, 1}
    # Who would send 1 or -1 in some coordinate now sends mu - sigma, nearly always negative.
    assert found.sum() < clean.sum() - 20


@pytest.mark.parametrize("buckets", [0, 5, 8])
def test_detox_multi_krum_has_as_many_buckets_as_are_asked_for(buckets: int) -> None:
    # There they are two, whatever is asked for, each with a multi-Krum of its own.
    honest = rows_of(15, 40)
    rows = seated(honest, 45, 3, 1)
    chosen = approach("detox", "multi-krum", group_size=3, bucket_size=buckets, worker_fail=2)
    found = chosen.run(rows, seed=1)
    means = honest
    if buckets:
        size = -(-15 // buckets)
        order = secret_order(15, 1, 0, "robust/bucketing")
        means = np.stack(
            [honest[order[first : first + size]].mean(axis=0) for first in range(0, 15, size)]
        )
        assert len(means) == buckets
    rule = robust.multi_krum(f=1)  # the groups that two liars own at worst
    np.testing.assert_allclose(found.vector, rule(means), rtol=1e-5, atol=1e-6)


def test_detox_two_buckets_are_too_few_for_multi_krum() -> None:
    rows = seated(rows_of(15, 40), 45, 3, 1)
    chosen = approach("detox", "multi-krum", group_size=3, bucket_size=2, worker_fail=2)
    with pytest.raises(ToleranceError, match=r"needs n >= 2 f \+ 3 rows. Received: n=2"):
        chosen.run(rows, seed=1)
