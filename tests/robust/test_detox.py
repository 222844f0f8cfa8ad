# SPDX-License-Identifier: Apache-2.0
"""Groups, votes and what they bring: beside plain rules, under the worst placement, by digest."""

import collections
import itertools
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tf_hips import robust
from tf_hips.errors import ToleranceError
from tf_hips.robust import attacks, detox
from tf_hips.robust.detox import Detox

Floats = npt.NDArray[np.float32]
SEED = 77


def gradients(count: int, d: int = 200, spread: float = 0.3) -> Floats:
    generator = np.random.default_rng((count, d))
    common = generator.standard_normal(d)
    return (common + spread * generator.standard_normal((count, d))).astype(np.float32)


def seated(of_groups: Floats, seats: tuple[tuple[int, ...], ...]) -> Floats:
    rows = np.empty((sum(len(members) for members in seats), of_groups.shape[1]), np.float32)
    for gradient, members in zip(of_groups, seats, strict=True):
        rows[list(members)] = gradient
    return rows


@pytest.mark.parametrize("vote", detox.VOTES)
def test_few_liars_change_nothing(vote: str) -> None:
    honest = gradients(15)
    seats = detox.groups(45, 3, SEED, 4)
    rows = seated(honest, seats)
    clean = robust.median(f=0)(honest)
    chosen = Detox(3, robust.median(), vote=vote)
    for members in seats[:7]:  # one in each of seven groups
        rows[members[1]] *= -100
    found = chosen.run(rows, seed=SEED, step=4)
    assert found.vector.tobytes() == clean.tobytes()
    assert found.outvoted == tuple(sorted(members[1] for members in seats[:7]))


def test_groups_are_drawn_anew_and_only_the_seed_tells_them() -> None:
    first = detox.groups(45, 3, SEED, 0)
    assert first == detox.groups(45, 3, SEED, 0)
    assert len({detox.groups(45, 3, seed, step) for seed in (1, 2) for step in range(50)}) == 100
    together = collections.Counter(
        1 in members
        for step in range(4000)
        for members in detox.groups(9, 3, SEED, step)
        if 0 in members
    )
    # Two of nine sit together with a probability of 2 / 8: 1000 of 4000, deviation 27.
    assert 880 < together[True] < 1120
    seeds = {detox.sampling_seed(SEED, step, group) for step in range(10) for group in range(15)}
    assert len(seeds) == 150


@pytest.mark.parametrize(
    ("n", "q", "r", "expected", "worst"),
    [(45, 5, 3, 0.43, 2), (45, 5, 5, 0.06, 1), (45, 9, 3, 1.46, 4), (100, 10, 5, 0.13, 3),
     (100, 20, 5, 1.06, 6)],
)  # fmt: skip
def test_groups_that_liars_own(n: int, q: int, r: int, expected: float, worst: int) -> None:
    found = detox.corrupt_groups(n, q, r)
    assert found == (pytest.approx(expected, abs=0.005), worst)
    owned = []
    for step in range(300):
        liars = set(attacks.liars(n, q, 1, step))
        owned.append(sum(len(liars & set(one)) > r / 2 for one in detox.groups(n, r, SEED, step)))
    assert np.mean(owned) == pytest.approx(expected, abs=5 * (expected / 300) ** 0.5)
    known = detox.groups(n, r, 0, 0, fixed=True)
    liars = set(attacks.liars(n, q, 1, placement="worst", r=r))
    assert len(liars) == q
    assert sum(len(liars & set(one)) > r / 2 for one in known) == worst


def test_whoever_knows_the_seed_owns_groups() -> None:
    liars = set(attacks.liars(45, 9, 1, 3, placement="worst", r=3, group_seed=SEED))
    assert sum(len(liars & set(one)) > 1 for one in detox.groups(45, 3, SEED, 3)) == 4


def test_one_vector_of_a_group_travels() -> None:
    honest = gradients(15)
    seats = detox.groups(45, 3, SEED, 0)
    rows = seated(honest, seats)
    liar, silent, second_liar = seats[0][0], seats[1][0], seats[2][0]
    digests: list[bytes | None] = [detox.digest(row) for row in rows]
    digests[silent] = None
    digests[second_liar] = detox.digest(-rows[second_liar])
    asked = []

    def fetch(worker: int) -> Floats | None:
        asked.append(worker)
        return -rows[worker] if worker == liar else rows[worker]

    chosen = Detox(3, robust.median(), vote="digest")
    found = chosen.run_digests(digests, fetch, seed=SEED)
    assert found.vector.tobytes() == robust.median(f=0)(honest).tobytes()
    assert len(asked) == 16  # one of each group, and one more for the liar
    by_first = {vote.members[0]: vote for vote in found.votes}
    assert by_first[liar].proven == (liar,)
    assert liar not in by_first[liar].agreed
    assert by_first[silent].absent == (silent,)
    assert by_first[second_liar].outvoted == (second_liar,)


def test_a_group_that_sends_nothing_right_is_dropped() -> None:
    rows = seated(gradients(3), detox.groups(9, 3, SEED, 0))
    digests = [detox.digest(row) for row in rows]
    bad = set(detox.groups(9, 3, SEED, 0)[1])
    chosen = Detox(3, robust.median(f=1), vote="digest")
    found = chosen.run_digests(digests, lambda who: None if who in bad else rows[who], seed=SEED)
    assert [vote.is_won for vote in found.votes] == [True, False, True]
    assert found.aggregation.f == 0  # the one that the rule could bear
    with pytest.raises(ToleranceError, match=r"bears f=0 bad rows\. Received: 1 .*1 missing"):
        Detox(3, robust.median(f=0), vote="digest").run_digests(
            digests, lambda who: None if who in bad else rows[who], seed=SEED
        )


@pytest.mark.parametrize("length", [7, 300])
def test_a_group_of_liars_with_a_vector_of_another_length_is_dropped(length: int) -> None:
    honest = gradients(5)
    seats = detox.groups(15, 3, SEED, 0)
    rows = list(seated(honest, seats))
    for worker in seats[2][:2]:
        rows[worker] = np.ones(length, np.float32)
    digests = [detox.digest(row) for row in rows]
    chosen = Detox(3, robust.median(f=1), vote="digest")
    found = chosen.run_digests(digests, lambda who: rows[who], seed=SEED)
    assert [vote.is_won for vote in found.votes] == [True, True, False, True, True]
    assert found.aggregation.f == 0
    assert not found.outvoted  # nobody was, in a group that has no vote
    wanted = robust.median(f=0)(np.delete(honest, 2, axis=0))
    assert found.vector.tobytes() == wanted.tobytes()


def test_a_vector_of_another_kind_is_a_proven_fault() -> None:
    rows = seated(gradients(5), detox.groups(15, 3, SEED, 0))
    digests = [detox.digest(row) for row in rows]
    first, second = (members[0] for members in detox.groups(15, 3, SEED, 0)[:2])
    # Their bytes have the right digest.
    sent = {first: rows[first].astype(np.float64), second: rows[second].reshape(1, -1)}
    chosen = Detox(3, robust.median(f=1), vote="digest")
    found = chosen.run_digests(digests, lambda who: sent.get(who, rows[who]), seed=SEED)
    assert {who for vote in found.votes for who in vote.proven} == {first, second}
    assert all(vote.is_won for vote in found.votes)
    assert found.aggregation.f == 1


def test_a_digest_tells_bits_apart() -> None:
    row = gradients(1)[0]
    other = row.copy()
    other[100] = np.nextafter(row[100], np.float32(9))
    zeros = np.zeros(4, np.float32)
    assert len({detox.digest(one) for one in (row, other, row[:-1], zeros, -zeros)}) == 5
    assert len(detox.digest(row)) == 32


def test_replicas_that_round_differently_agree_when_told_so() -> None:
    honest = gradients(1)[0]
    noise = np.random.default_rng(0).standard_normal((3, honest.size)).astype(np.float32)
    near = honest + np.float32(1e-6) * noise
    rows = [near[0], -honest, near[1], near[2]]
    assert not detox.vote_exact(rows, range(4)).is_won
    found = detox.vote_tolerant(rows, range(4))
    assert set(found.agreed) == {0, 2, 3}
    assert found.outvoted == (1,)
    assert not detox.vote_tolerant(rows, range(4), epsilon=1e-9).is_won
    with_nan = [np.full_like(honest, np.nan)] * 2 + [honest]
    assert not detox.vote_tolerant(with_nan, range(3)).is_won
    # Everything is near an infinity; whoever sends one agrees with nobody all the same.
    with_infinity = [np.full_like(honest, np.inf), honest, honest]
    assert detox.vote_tolerant(with_infinity, range(3)).agreed == (1, 2)


def test_a_rule_behind_the_votes_begins_where_it_is_told() -> None:
    rng = np.random.default_rng(3)
    honest = rng.normal(size=(3, 7)).astype(np.float32)
    rule = Detox(r=3, then=robust.centred_clipping(f=1), fixed=True)
    rows = [honest[worker // 3] for worker in range(9)]
    before = np.full(7, 3, np.float32)
    alone = rule.then.run(honest, reference=before).vector
    assert (alone != rule.then.run(honest).vector).any()
    np.testing.assert_array_equal(rule.run(rows, reference=before).vector, alone)
    by_digest = rule.run_digests(
        [detox.digest(one) for one in rows], rows.__getitem__, reference=before
    )
    np.testing.assert_array_equal(by_digest.vector, alone)


def test_draco_is_exact() -> None:
    honest = gradients(5)
    chosen = detox.draco(2)
    seats = detox.groups(25, 5, 0, 0, fixed=True)
    rows = seated(honest, seats)
    clean = robust.mean()(honest)
    for members in seats:
        rows[list(members[:2])] = 1e9
    assert chosen.run(rows).vector.tobytes() == clean.tobytes()
    # 2 of the 4 that would be left could keep their group from agreeing, 2 of 2 would own it.
    for n in (24, 22):
        with pytest.raises(ToleranceError, match=f"r=5 must divide the workers.*Received: {n}"):
            chosen.run(rows[:n])
        with pytest.raises(ToleranceError, match="r=5 must divide the workers"):
            chosen.run_digests([detox.digest(row) for row in rows[:n]], rows.__getitem__)


def test_buckets_are_as_many_as_were_asked_for() -> None:
    honest = gradients(15)
    rows = seated(honest, detox.groups(45, 3, SEED, 0))
    one = detox.approach("detox", "normal", group_size=3, bucket_size=5).run(rows, seed=SEED)
    np.testing.assert_allclose(one.vector, honest.mean(axis=0), rtol=1e-4, atol=1e-6)
    five = detox.approach("detox", "coord-median", group_size=3, bucket_size=5)
    expected = (robust.bucketing(3) >> robust.median())(honest, seed=SEED)
    assert five.run(rows, seed=SEED).vector.tobytes() == expected.tobytes()
    # Never more, also where they do not divide the votes.
    for votes, buckets in ((7, 3), (5, 2), (15, 4)):
        bucketed = Detox(1, robust.median(), buckets=buckets).aggregator(votes, votes)
        assert -(-votes // int(bucketed.steps[0]["s"])) <= buckets


def test_options_of_the_authors_code() -> None:
    chosen = detox.approach("draco-lite", "bulyan", group_size=3, worker_fail=5, compat=True)
    assert chosen.then.text == "bulyan(f=auto, compat=True)"
    assert (chosen.r, chosen.fixed, chosen.q) == (3, True, 5)
    assert detox.approach("detox", "bulyan", fixed=True).then == robust.bulyan()
    both = detox.approach("detox", "nnm(f=1) >> trimmed_mean", group_size=3, worker_fail=4)
    assert both.aggregator(15, 5).text == "nnm(f=1) >> trimmed_mean(f=2)"
    assert detox.approach("baseline", "krum", worker_fail=3).then == robust.krum(f=3)
    assert detox.approach("maj_vote", worker_fail=2) == detox.Detox(5, robust.mean())


@pytest.mark.parametrize(
    ("name", "mode", "group_size", "fail", "message"),
    [
        ("maj_vote", "normal", 3, 2, r"2 worker_fail \+ 1. Received: group_size=3, worker_fail=2"),
        ("maj_vote", "normal", 4, 2, r"2 worker_fail \+ 1. Received: group_size=4, worker_fail=2"),
        ("maj_vote", "maj_vote", 5, 3, r"Received: group_size=5, worker_fail=3"),
        ("baseline", "krum(f=1)", 1, 3, r"has none. Received: worker_fail=3 with krum\(f=1\)"),
        ("baseline", "krum(f=1)", 1, 0, r"has none. Received: worker_fail=0 with krum\(f=1\)"),
        ("detox", "normal", 5, 1, "has none. Received: worker_fail=1 with mean"),
        ("draco-lite", "clip >> mean", 3, 1, "has none. Received: worker_fail=1 with clip"),
        *(
            (name, "normal", 5, -1, "must be 0 or more. Received: worker_fail=-1")
            for name in detox.APPROACHES
        ),
    ],
)
def test_liars_that_an_approach_cannot_bear_are_no_option(
    name: str, mode: str, group_size: int, fail: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        detox.approach(name, mode, group_size=group_size, worker_fail=fail)


@pytest.mark.parametrize(
    ("name", "told"), [("detoxx", "; did you mean detox?"), ("cyclic", "."), (None, ".")]
)
def test_an_approach_that_there_is_not_is_answered_with_the_nearest(name: Any, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"maj-vote{told} Received: {name!r}")):
        detox.approach(name)


def test_the_authors_own_defaults_are_enough_for_the_repetition_code() -> None:
    """`maj_vote` of groups of 5, two of whom lie: the mean is exact, wherever they sit."""
    honest = gradients(3)
    chosen = detox.approach("maj_vote", worker_fail=2)
    rows = seated(honest, detox.groups(15, 5, SEED, 0))
    clean = chosen.run(rows, seed=SEED).vector.tobytes()
    for liars in itertools.combinations(range(15), 2):
        spoilt = [-100 * row if worker in liars else row for worker, row in enumerate(rows)]
        assert chosen.run(spoilt, seed=SEED).vector.tobytes() == clean


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("n", "q", "r", "worst"),
    [
        *((45, 5, 3, 2), (45, 1, 3, 0), (45, 2, 3, 1), (45, 45, 3, 15), (6, 0, 1, 0), (6, 4, 1, 4)),
        *((46, 1, 3, 1), (46, 3, 3, 2), (47, 1, 3, 1), (13, 2, 5, 1)),  # the rest is a small group
        *((16, 2, 4, 1), (16, 1, 4, 0), (8, 1, 2, 1), (18, 3, 4, 2)),  # a tie spoils a group, too
    ],
)
def test_groups_that_liars_spoil(n: int, q: int, r: int, worst: int) -> None:
    assert detox.spoilt_groups(n, q, r) == worst
    # As many as that can be reached, by those who seat themselves.
    seats = sorted(detox.groups(n, r, 0, 0, fixed=True), key=len)
    liars = [who for one in seats for who in one[: (len(one) + 1) // 2]][:q]
    said = [b"lie" if worker in liars else b"truth" for worker in range(n)]
    votes = [detox.vote_by_digest([said[w] for w in one], one) for one in seats]
    lost = [vote for vote in votes if not vote.is_won or said[vote.agreed[0]] == b"lie"]
    assert len(lost) == worst


def test_f_of_the_votes_is_what_liars_among_the_workers_can_spoil() -> None:
    honest = gradients(5)
    seats = detox.groups(13, 3, SEED, 0)  # the last group has one worker
    rows = seated(honest, seats)
    liars = [*seats[-1], *seats[0][:2]]
    rows[liars] = 1e3
    chosen = detox.Detox(3, robust.trimmed_mean(), q=3)
    assert chosen.check(13) == 2
    found = chosen.run(rows, seed=SEED)
    assert found.aggregation.f == 2
    assert np.abs(found.vector).max() < 100
    with pytest.raises(ToleranceError, match=r"krum needs n >= 2 f \+ 3 rows. Received: n=5, f=2"):
        detox.Detox(3, robust.krum(), q=3).run(rows, seed=SEED)
    with pytest.raises(ValueError, match=r"Received: q=3 before krum\(f=1\)"):
        detox.Detox(3, robust.krum(f=1), q=3)
    with pytest.raises(ValueError, match="`q` must be 0 or more"):
        detox.Detox(3, robust.krum(), q=-1)


def test_a_rule_that_never_bears_so_many_spoilt_groups_says_which_and_why() -> None:
    chosen = detox.Detox(1, robust.mda(), q=17)
    message = (
        r"^mda\(f=auto\) cannot bear f=17, the groups that q=17 of 40 spoil: .*Received: f=17$"
    )
    for call in (chosen.check, lambda n: chosen.run(np.zeros((n, 3), np.float32))):
        with pytest.raises(ToleranceError, match=message):
            call(40)
    with pytest.raises(ValueError, match=r"^mda\(f=auto\) cannot bear f=17: `f` .*Received: f=17$"):
        detox.approach("baseline", "mda", worker_fail=17)


def test_groups_without_a_majority_count_among_the_f() -> None:
    rows = seated(gradients(5), detox.groups(15, 3, SEED, 0))
    seats = detox.groups(15, 3, SEED, 0)
    for number in range(3):  # three of five groups disagree: more than a median of five bears
        rows[list(seats[number])] = np.arange(3, dtype=np.float32)[:, None]
    with pytest.raises(ToleranceError, match=r"bears f=auto, 2 of 5 rows. Received: 3 .*missing"):
        detox.Detox(3, robust.median()).run(rows, seed=SEED)


def test_a_little_is_enough_for_the_median_and_not_for_detox() -> None:
    # 45 workers, 9 liars; alone the median is off by a share of the deviation, each step.
    honest = gradients(15, d=2000, spread=1.0)
    seats = detox.groups(45, 3, SEED, 0)
    rows = seated(honest, seats)
    liars = list(attacks.liars(45, 9, 2))
    sent = attacks.alie(z=1.5)(honest, len(liars))
    plain = gradients(45, d=2000, spread=1.0)
    clean = robust.median(f=0)(np.delete(plain, liars, axis=0))
    plain[liars] = attacks.alie(z=1.5)(np.delete(plain, liars, axis=0), len(liars))
    rows[liars] = sent
    off_plain = np.linalg.norm(robust.median(f=9)(plain) - clean)
    found = Detox(3, robust.median()).run(rows, seed=SEED)
    off_detox = np.linalg.norm(found.vector - robust.median(f=0)(honest))
    assert len(found.outvoted) >= 6
    assert off_detox < 0.7 * off_plain


@pytest.mark.parametrize("said", [{"group_size": 3}, {"vote": "exact"}, {"fixed": True}])
def test_the_baseline_has_no_groups(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^baseline has no groups that vote. Received: "):
        detox.approach("baseline", "median", **said)
    assert detox.approach("baseline", "median", group_size=1) == detox.Detox(1, robust.median())


@pytest.mark.parametrize(
    ("rule", "workers", "bears"),
    [
        (detox.Detox(3, robust.median()), 9, 3),  # one of three votes: two liars each spoil one
        (detox.Detox(3, robust.median()), 5, 0),  # a group of two, whose vote one of them spoils
        (detox.Detox(3, robust.mean()), 6, 1),
        (detox.Detox(3, robust.mean()), 4, 0),  # the last one is alone
        (detox.Detox(2, robust.median()), 6, 1),
        (detox.Detox(1, robust.median()), 5, 2),
        (detox.Detox(3, robust.krum(f=2)), 21, 5),
        (detox.Detox(3, robust.geometric_median()), 5, 0),
        (detox.Detox(3, robust.clip() >> robust.mean()), 5, None),  # by its influence
        (detox.draco(2), 10, 2),
    ],
)
def test_how_many_may_lie_wherever_they_sit(
    rule: detox.Detox, workers: int, bears: int | None
) -> None:
    assert rule.bears(workers) == bears
    if bears is not None and bears < workers:
        smallest = sorted(len(one) for one in detox.groups(workers, rule.r, 0, 0, fixed=True))
        # So many and one more spoil a vote more than the rule bears, and not fewer.
        votes = -(-workers // rule.r)
        borne = rule.aggregator(workers, votes).check(votes)
        assert sum((size + 1) // 2 for size in smallest[: borne + 1]) == bears + 1
