# SPDX-License-Identifier: Apache-2.0
"""Who lies, and what a liar sends: with all rows at hand, and with none but its own."""

import numpy as np
import pytest

from tf_hips.robust import Adversary, attacks, detox
from tf_hips.robust.adversary import ALIASES, HISTORY, LABEL_FLIP, NEEDS_OTHERS, parse

N, D = 7, 33


def rows(step: int = 0, n: int = N) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((n, D)).astype(np.float32)


@pytest.mark.parametrize(
    ("text", "attack"),
    [
        ("rev_grad", attacks.reversed_gradient()),
        ("rev_grad(c=3)", attacks.reversed_gradient(3)),
        ("constant", attacks.constant()),
        ("random", attacks.gaussian()),
        ("alie", attacks.alie()),
        ("alie(z=1.5, sign=1, statistics=own)", attacks.alie(1.5, 1, "own")),
        ("alie(z=n)", attacks.alie("n")),
        ("foe(epsilon=0.5)", attacks.inner_product(0.5)),
        ("min_max( direction = sign )", attacks.min_max("sign")),
        ("optimal(rule=krum(f=3))", attacks.optimal(rule="krum(f=3)")),
        (
            "optimal(base=inner_product, rule=nnm(f=2) >> multi_krum(f=2, m=1))",
            attacks.optimal("inner_product", "nnm(f=2) >> multi_krum(f=2, m=1)"),
        ),
    ],
)
def test_texts_are_attacks(text: str, attack: attacks.Attack) -> None:
    assert parse(text) == attack
    assert parse(str(attack)) == attack


def test_all_names_are_texts_and_nan_is_one() -> None:
    for name in (*attacks.NAMES, *ALIASES):
        assert parse(name).name in attacks.NAMES
    assert [parse(name).is_of_packets for name in (*attacks.PACKET_NAMES, "alie")] == [True, False]
    assert set(NEEDS_OTHERS) < set(attacks.NAMES)
    assert str(parse("nan")) == "nan" == str(parse(str(parse("nan"))))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("krum", "an attack must be one of reversed_gradient, constant"),
        ("alie(z)", "`alie` takes z, sign, statistics, ddof"),
        ("alie(y=1)", "`alie` takes z, sign, statistics, ddof"),
        ("alie(z=1, z=2)", "`alie` takes"),
        ("alie(sign=2)", "`sign` of alie must be -1 or 1"),
        ("alie(z=q)", "`z` of alie must be 'paper' or 'n' or a finite number > 0"),
        ("rev_grad(c=__import__)", "`c` of reversed_gradient must be a finite number"),
        ("mimic(target=far)", "`target` of mimic must be an integer >= -1"),
        ("constant(c=nan)", "`c` of constant must be a finite number. Received: c=nan"),
        ("optimal(rule=krmu(f=1))", "`rule` of optimal must be the text of a robust rule such as"),
        ("label_flip", "`tf-hips train --err-mode label_flip`"),
        (" label_flip()", "`Adversary(None, q)`"),
        ("alie(" + "z" * 300, "an attack must read like `alie(z=1.5)`"),
        ("little(z=1.5", "an attack must read like `alie(z=1.5)`"),
        ("", "an attack must be one of"),
    ],
)
def test_texts_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"must|takes|is") as caught:
        parse(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("q", [2, 9])
def test_the_worst_liars_own_half_as_many_groups_as_they_are(q: int) -> None:
    def owned(adversary: Adversary, step: int, seed: int | None) -> int:
        groups = detox.groups(45, 3, seed or 0, step, fixed=seed is None)
        liars = set(adversary.liars(45, step))
        assert len(liars) == q
        return sum(len(liars & set(one)) > 1 for one in groups)

    of_neighbours = Adversary(attacks.constant(), q, placement="worst", r=3)
    assert owned(of_neighbours, 0, None) == q // 2
    assert of_neighbours.liars(45, 7) == of_neighbours.liars(45)
    of_drawn = Adversary(attacks.constant(), q, placement="worst", r=3, group_seed=5)
    assert [owned(of_drawn, step, 5) for step in range(5)] == [q // 2] * 5
    assert of_drawn.liars(45, 1) != of_drawn.liars(45, 2)
    alone = [of_drawn.alone(number, 45) for number in range(45)]
    assert all(one.may_lie for one in alone)
    for step in (1, 2):
        lying = tuple(number for number, one in enumerate(alone) if one.lies(step))
        assert lying == of_drawn.liars(45, step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adversary(attacks.alie(), 1, placement="best"), r"worst\. Received: .*best"),
        (lambda: Adversary(attacks.alie(), 1, r=3), r"are of the worst placement\. Received: r=3"),
        (
            lambda: Adversary(attacks.alie(), 1, is_redrawn=True, placement="worst"),
            r"leave out `is_redrawn`",
        ),
        (
            lambda: Adversary(None, 1, placement="worst", r=3, group_seed=1),
            r"must stay the same\. Received: group_seed=1",
        ),
    ],
)
def test_a_placement_goes_with_what_means_something_in_it(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_liars_stay_or_are_drawn_anew() -> None:
    fixed = Adversary(attacks.constant(), 2, seed=3)
    assert len({fixed.liars(N, step) for step in range(20)}) == 1
    redrawn = Adversary(attacks.constant(), 2, seed=3, is_redrawn=True)
    drawn = [redrawn.liars(N, step) for step in range(200)]
    assert {len(set(one)) for one in drawn} == {2}
    counts = np.bincount(np.ravel(drawn), minlength=N)
    assert counts.min() > 0.6 * 400 / N, "every worker has its turn"
    assert fixed.liars(N) != Adversary(attacks.constant(), 2, seed=5).liars(N)


def test_with_all_rows_the_honest_stay_and_liars_know_them() -> None:
    adversary = Adversary(attacks.alie(z=1.5), 2, seed=1, is_redrawn=True)
    for step in range(4):
        given = rows(step)
        sent = adversary.sent(given, step)
        who = list(adversary.liars(N, step))
        honest = np.delete(given, who, axis=0).astype(np.float64)
        assert np.array_equal(np.delete(sent, who, axis=0), np.delete(given, who, axis=0))
        lie = honest.mean(axis=0) - 1.5 * honest.std(axis=0)
        np.testing.assert_allclose(sent[who], np.tile(lie, (2, 1)), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="somebody must be honest"):
        Adversary(attacks.constant(), N).sent(rows(), 0)


def test_flipped_labels_leave_rows_alone() -> None:
    adversary = Adversary(None, 1, seed=2)
    assert adversary.text == LABEL_FLIP
    assert np.array_equal(adversary.sent(rows(), 0), rows())
    [liar] = adversary.liars(N)
    assert [adversary.alone(one, N).flips_labels for one in range(N)].index(True) == liar
    assert not any(adversary.alone(one, N).may_lie for one in range(N))
    with pytest.raises(ValueError, match="must stay the same"):
        Adversary(None, 1, is_redrawn=True)


def test_a_lone_liar_of_its_own_gradient() -> None:
    adversary = Adversary(attacks.reversed_gradient(4.0), 2, seed=3)
    liars = adversary.liars(N)
    for number in range(N):
        lone = adversary.alone(number, N)
        assert lone.may_lie == lone.lies(7) == (number in liars)
        own = rows()[number]
        np.testing.assert_array_equal(lone.sent(own, 0), -4 * own if number in liars else own)


def test_lone_liars_are_drawn_as_all_know_it() -> None:
    adversary = Adversary(attacks.constant(5.0), 2, seed=3, is_redrawn=True)
    workers = [adversary.alone(number, N) for number in range(N)]
    assert all(one.may_lie for one in workers)
    for step in range(10):
        given = rows(step)
        sent = np.stack([one.sent(given[k], step) for k, one in enumerate(workers)])
        assert np.array_equal(sent, adversary.sent(given, step))


@pytest.mark.parametrize("z", ["paper", 1.25])
def test_a_lone_liar_takes_its_last_rows_for_those_of_others(z: str | float) -> None:
    adversary = Adversary(attacks.alie(z, statistics="all"), 2, seed=3)
    lone = adversary.alone(adversary.liars(9)[0], 9)
    factor = attacks.alie_z(9, 2) if z == "paper" else 1.25
    seen = []
    for step in range(HISTORY + 3):
        own = rows(step)[0]
        seen = [*seen, own][-HISTORY:]
        past = np.stack(seen).astype(np.float64)
        lie = past.mean(axis=0) - factor * past.std(axis=0)
        np.testing.assert_allclose(lone.sent(own, step), lie, rtol=1e-5, atol=1e-6)


def test_noise_differs_between_liars_and_steps() -> None:
    adversary = Adversary(attacks.gaussian(), 2, seed=3)
    one, other = (adversary.alone(number, N) for number in adversary.liars(N))
    own = rows()[0]
    first = one.sent(own, 0)
    assert np.array_equal(first, adversary.alone(adversary.liars(N)[0], N).sent(own, 0))
    assert not np.array_equal(first, other.sent(own, 0))
    assert not np.array_equal(first, one.sent(own, 1))


def test_who_rides_free_sends_what_came_down() -> None:
    adversary = Adversary(attacks.free_riding(), 1, seed=3)
    lone = adversary.alone(adversary.liars(N)[0], N)
    assert lone.needs_result
    assert not lone.sent(rows()[0], 0).any()
    assert np.array_equal(lone.sent(rows()[0], 1, before=rows()[1]), rows()[1])


def test_who_lies_in_packets_tells_of_honest_rows() -> None:
    adversary = Adversary(attacks.lying_scale(9.0), 2, seed=3)
    for number in range(N):
        lone = adversary.alone(number, N)
        assert lone.lies(4) == lone.may_lie == (number in adversary.liars(N))
        np.testing.assert_array_equal(lone.sent(rows()[0], 4), rows()[0])


def test_what_does_not_fit_the_workers() -> None:
    with pytest.raises(ValueError, match=r"`q` must be in \[0, n\]"):
        Adversary(attacks.constant(), 3).alone(0, 2)
    with pytest.raises(ValueError, match="f must be less than n / 2"):
        Adversary(attacks.alie(), 2).alone(0, 3)
    with pytest.raises(ValueError, match="`q` must be 1 or more"):
        Adversary(attacks.constant(), 0)
    with pytest.raises(ValueError, match=r"takes those of all.*Received: optimal"):
        Adversary(attacks.optimal(), 1).alone(0, N)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adversary("alie", 1), r"robust\.adversary\.parse.*Received: attack='alie'"),
        (lambda: Adversary(attacks.alie, 1), r"`attack` must be an Attack"),
        (lambda: Adversary(attacks.alie(), 1.5), r"`q` must be an integer. Received: q=1.5"),
        (lambda: Adversary(attacks.alie(), True), r"`q` must be an integer. Received: q=True"),
        (lambda: Adversary(attacks.alie(), 1, None), r"`seed` must be an integer"),
        (lambda: Adversary(attacks.alie(), 1, r=1.5), r"`r` must be an integer"),
        (lambda: parse(attacks.alie()), r"must be told as a string"),
    ],
)
def test_what_is_of_another_type_is_refused_where_it_is_given(make, message) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_liars_who_know_all_rows_must_be_able_to_make_the_attack() -> None:
    for attack, n, message in (
        (attacks.constant(), 2, "somebody must be honest. Received: 2 liars of 2"),
        (attacks.alie(), 6, r"\(n - f - s\) / \(n - f\).*Received: 2/4, of n=6, f=2"),
        (attacks.alie("n"), 4, "f must be less than n / 2"),
        (attacks.lying_scale(), 7, "were never packets"),
        (attacks.mimic(5), 7, "less than the 5 honest rows"),
        (attacks.optimal(rule="krum(f=3)"), 7, r"krum needs n >= 2 f \+ 3 rows. Received: n=7"),
    ):
        with pytest.raises(ValueError, match=message):
            Adversary(attack, 2).check(n)
    for attack in (attacks.constant(), attacks.alie(1.0), attacks.alie("n"), attacks.mimic(4)):
        Adversary(attack, 2).check(7)
    Adversary(None, 2).check(3)


def test_a_lone_mimic_has_no_more_rows_than_it_has_seen() -> None:
    adversary = Adversary(attacks.mimic(2), 1, seed=3)
    lone = adversary.alone(adversary.liars(N)[0], N)
    seen = [rows(step)[0] for step in range(4)]
    sent = [lone.sent(own, step) for step, own in enumerate(seen)]
    for one, copied in zip(sent, (0, 1, 2, 2), strict=True):
        np.testing.assert_array_equal(one, seen[copied])


def test_a_lone_mimic_of_no_row_in_particular_takes_the_farthest_of_its_own() -> None:
    lone, other = (
        Adversary(attack, 1, seed=3).alone(Adversary(attack, 1, seed=3).liars(N)[0], N)
        for attack in (attacks.mimic(), attacks.mimic(-1))
    )
    seen = [rows(step)[0] for step in range(12)]
    sent = [(lone.sent(own, step), other.sent(own, step)) for step, own in enumerate(seen)]
    for one, farthest in sent:
        np.testing.assert_array_equal(one, farthest)
    assert len({one.tobytes() for one, _ in sent}) > 2  # not the oldest of its rows for ever
