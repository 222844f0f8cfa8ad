# SPDX-License-Identifier: Apache-2.0
"""Bad rows, too few rows, odd groups, ties: what is defined for each, and that nothing is NaN."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tf_hips import robust
from tf_hips.errors import NonFiniteError, ToleranceError
from tf_hips.ops import compressor as compressors
from tf_hips.robust import Limits
from tf_hips.robust.detox import VOTES, Detox, approach, check_compressor, draco, groups

pytestmark = pytest.mark.heavy  # every rule over bad rows

Floats = npt.NDArray[np.float32]


def rows_of(n: int, d: int = 40) -> Floats:
    return np.random.default_rng((n, d)).standard_normal((n, d)).astype(np.float32)


@pytest.mark.parametrize("name", robust.NAMES)
def test_a_bad_row_is_refused_and_named(name: str) -> None:
    rows = rows_of(19)
    rows[2, 17], rows[5, 3] = np.nan, -np.inf
    rows[7] *= np.float32(1e7)
    rows[8] *= np.float32(1e30)
    found = robust.parse(name).run(rows)
    told = [str(one) for one in found.rejected]
    assert told[:2] == ["row 2: NaN at element 17", "row 5: an infinity at element 3"]
    assert "times the median" in told[2]
    assert told[3] == "row 8: a norm whose square float32 does not hold"
    assert found.accepted == (0, 1, 3, 4, 6, *range(9, 19))
    # f="auto" is of all 19 rows, and 4 of it are gone: not as many as 15 rows would bear.
    left = robust.parse(name)
    borne = {"bulyan": 4, "krum": 8, "multi_krum": 8}.get(name, 9) - 4
    expected = left if name == "mean" else left.bearing(borne)
    assert found.f == (0 if name == "mean" else borne)
    np.testing.assert_array_equal(found.vector, expected(rows[list(found.accepted)]))


def test_auto_does_not_bear_a_liar_more_for_each_that_was_refused() -> None:
    rows = rows_of(15)
    rows[:7] = np.nan
    assert robust.median().run(rows).f == 0
    rows[7] = np.nan
    with pytest.raises(ToleranceError, match=r"bears f=auto, 7 of 15 rows. Received: 8 .*row 0"):
        robust.median()(rows)
    with pytest.raises(ToleranceError, match=r"bears f=auto, 7 of 15 rows. Received: 8 .*8 miss"):
        robust.median().run(rows[8:], missing=8)


@pytest.mark.parametrize("name", robust.NAMES)
def test_rows_that_were_refused_count_among_the_f(name: str) -> None:
    rows = rows_of(11)
    rows[0, 0], rows[10, 9] = np.nan, np.inf
    if name == "mean":
        assert robust.mean().run(rows).f == 0
        return
    assert robust.parse(f"{name}(f=2)").run(rows).f == 0
    with pytest.raises(
        ToleranceError,
        match=rf"{name}\(f=1.*bears f=1 bad rows. Received: 2 .*row 0: NaN at element 0; row 10",
    ):
        robust.parse(f"{name}(f=1)")(rows)


def test_the_formula_counts_the_rows_that_are_left() -> None:
    rows = rows_of(9)
    assert robust.krum().run(rows).f == 3
    rows[:3] = np.nan
    assert robust.krum().run(rows).f == 0
    with pytest.raises(ToleranceError, match=r"krum needs n >= 2 f \+ 3 rows. Received: n=2, f=0"):
        robust.krum()(rows[7:])
    with pytest.raises(ToleranceError, match=r"Received: n=4, f=2 \(4 refused: 4 missing"):
        robust.krum(f=6).run(rows[5:], missing=4)


LEAST = {"krum": (2, 3), "multi_krum": (2, 3), "bulyan": (4, 3)}


@pytest.mark.parametrize(
    "text",
    [
        *(f"{name}(f=2)" for name in robust.NAMES if name != "mean"),
        "nnm(f=2) >> trimmed_mean(f=2)",
        "arc(f=2) >> mean",
        "nnm(f=2) >> krum(f=2)",
    ],
)
def test_f_means_the_same_to_every_rule_once_rows_were_refused(text: str) -> None:
    """f is said of whom there are: k of them refused leave f - k, and the formula is of the rest.

    So it is whether a row is here and refused, or known to be missing.
    """
    slope, least = LEAST.get(text.split(" >> ")[-1].split("(")[0], (2, 1))
    rule = robust.parse(text)
    for given in (slope * 2 + least, slope * 2 + least + 3):
        for k in range(4):
            rows = rows_of(given)
            rows[1 : 1 + k] = np.nan
            left = rows[[0, *range(1 + k, given)]]
            if k > 2:
                with pytest.raises(ToleranceError, match=f"Received: {k} that were refused"):
                    rule.run(rows)
                with pytest.raises(ToleranceError, match=f"Received: {k} that were refused"):
                    rule.run(left, missing=k)
                continue
            found, missed = rule.run(rows), rule.run(left, missing=k)
            wanted = robust.parse(text.replace("f=2", f"f={2 - k}")).run(left)
            if rule.rule.f is not None:
                assert found.f == missed.f == wanted.f == 2 - k
            assert found.vector.tobytes() == missed.vector.tobytes() == wanted.vector.tobytes()
    # One row less than the formula asks for is refused, unless one that lies is found out.
    rows = rows_of(slope * 2 + least - 1)
    with pytest.raises(ToleranceError, match=f"needs n >= .*Received: n={len(rows)}, f=2$"):
        rule.run(rows)
    rows[0] *= np.float32(1e8)
    assert [one.row for one in rule.run(rows).rejected] == [0]
    few = rows[: slope + least]  # one of them goes, and one more may lie
    with pytest.raises(ToleranceError, match=f"Received: n={len(few) - 1}, f=1 .1 refused: row 0"):
        rule.run(few)


@pytest.mark.parametrize("text", [*robust.NAMES, "nnm >> median", "clip >> mean"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_where_all_rows_are_refused_there_is_no_result(text: str, value: float) -> None:
    with pytest.raises(ToleranceError, match=r"n=0 \(5 refused: row 0: "):
        robust.parse(text)(np.full((5, 300), value, np.float32))


@pytest.mark.parametrize(
    "text", [*robust.NAMES, "nnm >> krum", "bucketing >> median", "arc >> mda"]
)
@pytest.mark.parametrize("value", [0.0, 2.5, -1e-30])
def test_equal_rows_are_the_result(text: str, value: float) -> None:
    wanted = np.full(33, np.sign(value) if "majority" in text else value, np.float32)
    found = robust.parse(text)(np.full((9, 33), value, np.float32))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("text", robust.NAMES)
def test_zeros_of_most_rows_refuse_nobody(text: str) -> None:
    rows = np.zeros((7, 20), np.float32)
    rows[0] = 1e9  # beside a median of 0 there is no ratio
    found = robust.parse(text).run(rows)
    assert not found.rejected
    if text not in ("mean", "multi_krum", "majority"):
        assert not found.vector.any()


@pytest.mark.parametrize("text", robust.NAMES)
def test_few_rows(text: str) -> None:
    least = {"krum": 3, "multi_krum": 3, "bulyan": 3}.get(text, 1)
    rows = rows_of(least)
    assert robust.parse(text).run(rows).f == 0
    if least > 1:
        with pytest.raises(ToleranceError, match=f"Received: n={least - 1}, f=0"):
            robust.parse(text)(rows[: least - 1])


def test_rows_of_other_length_or_kind_are_refused() -> None:
    rows = list(rows_of(5))
    with pytest.raises(ValueError, match=r"shape \[40\]. Received: row 2 of shape \[39\]"):
        robust.median()([*rows[:2], rows[2][:39]])
    with pytest.raises(ValueError, match=r"row 0 of shape \[5, 40\]"):
        robust.median()([np.stack(rows)])
    with pytest.raises(ValueError, match="at least one row"):
        robust.median()([])
    with pytest.raises(TypeError, match=r"must hold floats\. Received: int64 in row 1"):
        robust.median()([rows[0], np.arange(40)])


def test_what_is_no_rows_is_refused() -> None:
    with pytest.raises(TypeError, match=r"rows must be an array \[n, d\].*Received: None"):
        robust.median().run(None)


def test_rows_of_other_precision_are_taken() -> None:
    rows = rows_of(5)
    for kind in (np.float16, np.float64):
        given = rows.astype(kind)
        before = given.copy()
        found = robust.median()(given)
        np.testing.assert_array_equal(found, np.median(given.astype(np.float32), axis=0))
        np.testing.assert_array_equal(given, before)
    # What float32 does not hold is an infinity, and refused.
    wide = rows.astype(np.float64)
    wide[3] *= 1e200
    assert [one.row for one in robust.median().run(wide).rejected] == [3]


def test_no_elements() -> None:
    for name in robust.NAMES:
        assert robust.parse(name)(np.zeros((5, 0), np.float32)).shape == (0,)


def test_limits_say_what_is_absurd() -> None:
    rows = np.ones((7, 4), np.float32)
    for factor, absurd in ((0.9e4, []), (1.1e4, [3])):  # ten thousand times the median
        rows[3] = factor
        assert [one.row for one in robust.median().run(rows).rejected] == absurd
    rows[3] = 100
    assert not robust.median().run(rows).rejected
    found = robust.median().run(rows, limits=Limits(max_ratio=10))
    assert [one.row for one in found.rejected] == [3]
    found = robust.median().run(rows, limits=Limits(max_norm=100, max_ratio=np.inf))
    assert [one.row for one in found.rejected] == [3]
    for wrong in ({"max_norm": 0.0}, {"max_norm": 1e19}, {"max_ratio": 0.5}, {"max_ratio": np.nan}):
        with pytest.raises(ValueError, match="must be"):
            Limits(**wrong)


def test_of_two_rows_none_is_absurd() -> None:
    rows = rows_of(2)
    rows[1] *= np.float32(1e6)
    assert not robust.median().run(rows).rejected
    assert [one.row for one in robust.median().run(np.vstack([rows, rows[:1]])).rejected] == [1]


def test_a_reference_that_is_not_finite_is_refused() -> None:
    rows = rows_of(5)
    for value in (np.nan, np.inf, 1e30):
        with pytest.raises(NonFiniteError, match="reference must be finite and its norm at most"):
            robust.centred_clipping()(rows, reference=np.full(40, value, np.float32))
    with pytest.raises(ValueError, match=r"row 1 of shape \[3\]"):
        robust.centred_clipping()(rows, reference=np.zeros(3, np.float32))


def test_a_rest_forms_a_smaller_group() -> None:
    assert [len(one) for one in groups(47, 3, 1, 0)] == [3] * 15 + [2]
    assert [len(one) for one in groups(8, 3, 1, 0)] == [3, 3, 2]
    assert groups(7, 3, 0, 0, fixed=True) == ((0, 1, 2), (3, 4, 5), (6,))
    assert groups(2, 5, 1, 0) == ((0, 1),)


def test_groups_of_one_say_what_their_worker_says() -> None:
    rows = rows_of(7)
    found = Detox(1, robust.median()).run(rows, seed=3)
    np.testing.assert_array_equal(found.vector, np.median(rows, axis=0))
    assert all(vote.agreed == vote.members for vote in found.votes)


@pytest.mark.parametrize("vote", VOTES)
def test_a_tie_in_a_vote_drops_the_group(vote: str) -> None:
    rows = np.repeat(rows_of(3), 4, axis=0)
    rows[2:4] += 1  # two and two
    rows[4:7] += np.arange(3)[:, None]  # all differ
    chosen = Detox(4, robust.mean(), vote=vote, fixed=True)
    found = chosen.run(rows)
    assert [vote.is_won for vote in found.votes] == [False, False, True]
    np.testing.assert_array_equal(found.vector, rows[8])
    with pytest.raises(ToleranceError, match="at least one of 1 groups must agree"):
        chosen.run(rows[:4])


def test_a_vote_of_nan_is_refused_by_the_rule() -> None:
    rows = np.repeat(rows_of(5), 3, axis=0)
    rows[3:6, 0] = np.nan  # a whole group agrees on it
    found = Detox(3, robust.median(f=1), fixed=True).run(rows)
    assert [str(one) for one in found.aggregation.rejected] == ["row 1: NaN at element 0"]
    assert np.isfinite(found.vector).all()


def test_wrong_settings_of_detox_are_refused() -> None:
    for wrong, message in (
        ({"r": 0}, "`r` must be 1"),
        ({"vote": "loud"}, "digest, exact, tolerant"),
        ({"buckets": -1}, "`buckets`"),
        ({"epsilon": 0.0}, "`epsilon`"),
        (
            {"vote": "tolerant", "epsilon": 0.7},
            r"`epsilon` must be in .*, 0.5\]. Received: epsilon=",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Detox(**{"r": 3, "then": robust.mean(), **wrong})
    with pytest.raises(ValueError, match="baseline, maj_vote, detox, draco_lite, draco-lite"):
        approach("cyclic")
    with pytest.raises(ValueError, match="did you mean"):
        approach("detox", "krumm")
    with pytest.raises(ValueError, match="mean of the votes"):
        approach("maj_vote", "krum")
    with pytest.raises(ValueError, match="`s` must be 0"):
        draco(-1)
    with pytest.raises(ValueError, match="must be 1 or more"):
        groups(0, 3, 1, 0)
    for odd, name in ((2.5, "r"), (True, "r"), (1.0, "buckets"), (None, "buckets"), ("3", "q")):
        with pytest.raises(TypeError, match=rf"`{name}` must be an integer. Received: {name}="):
            Detox(**{"r": 3, "then": robust.median(), name: odd})
    assert Detox(np.int64(3), robust.median()).r == 3
    for odd, name in (("False", "fixed"), (1, "fixed"), (None, "full")):
        with pytest.raises(TypeError, match=rf"`{name}` must be True or False. Received: {name}="):
            Detox(**{"r": 3, "then": robust.median(), name: odd})
    numpys: Any = np.bool_(True)
    assert Detox(3, robust.median(), fixed=numpys) == Detox(3, robust.median(), fixed=True)
    with pytest.raises(TypeError, match=r"`epsilon` must be a number. Received: epsilon='1'"):
        Detox(3, robust.median(), vote="tolerant", epsilon="1")


def test_residuals_and_groups_that_change_exclude_each_other() -> None:
    feedback = compressors.parse("error_feedback(onebit)")
    with pytest.raises(ValueError, match=r"without error feedback.*error_feedback\(onebit\)"):
        check_compressor(Detox(3, robust.median()), feedback)
    check_compressor(Detox(3, robust.median(), fixed=True), feedback)
    check_compressor(Detox(1, robust.median()), feedback)
    check_compressor(Detox(3, robust.median()), compressors.parse("terngrad"))
