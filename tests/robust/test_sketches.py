# SPDX-License-Identifier: Apache-2.0
"""Sketches of rows: their definition, their error, and rules that are decided on them."""

import hashlib

import numpy as np
import numpy.typing as npt
import pytest

from tf_hips import robust
from tf_hips.errors import ToleranceError
from tf_hips.ops import native_robust
from tf_hips.ops.compressor import CHUNK
from tf_hips.ps import rules
from tf_hips.robust import sketches
from tf_hips.robust.rows import Limits
from tf_hips.robust.sketches import Sketched, Sketching, seed_of, sketched

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


def sketch(rows: Floats, k: int, seed: bytes, chunk: int = 0) -> Floats:
    making = Sketching(seed, len(rows), k)
    making.add(chunk, list(rows))
    return making.sketches()


def matrix(d: int, k: int, seed: bytes, chunk: int = 0) -> Doubles:
    """What sketches are multiplied by, element by element from the definition."""
    digest = hashlib.sha256(seed + chunk.to_bytes(8, "little")).digest()
    stream = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    found = np.zeros((k, d))
    first = 0
    for width in (k // 2, k - k // 2):
        words = [int(word) for word in stream.random_raw(-(-d // 64))]
        turns = [int(word) % width for word in stream.random_raw(-(-d // width))]
        for i in range(d):
            sign = -1.0 if words[i // 64] >> (i % 64) & 1 else 1.0
            found[first + (i + turns[i // width]) % width, i] = sign / np.sqrt(2.0)
        first += width
    return found


@pytest.mark.parametrize(("d", "k"), [(1, 16), (100, 16), (333, 33), (1000, 64), (130, 512)])
def test_a_sketch_is_its_definition(d: int, k: int) -> None:
    rows = np.random.default_rng((d, k)).standard_normal((3, d)).astype(np.float32)
    found = sketch(rows, k, b"0123456789abcdef", chunk=5)
    wanted = rows.astype(np.float64) @ matrix(d, k, b"0123456789abcdef", 5).T
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("d", "k"), [(1, 16), (64, 17), (4097, 50), (20_011, 512)])
def test_the_native_pass_has_the_bits_of_numpy(d: int, k: int) -> None:
    rows = np.random.default_rng((d, k)).standard_normal((3, d)).astype(np.float32)
    rows[0, :: max(d // 3, 1)] = 1e-40 if d > 1 else -0.0  # denormals count
    making = Sketching(b"k" * 16, 3, k)
    making.add(2, list(rows))
    making.add(2, list(rows))  # what is added is one number for each call
    digest = hashlib.sha256(b"k" * 16 + (2).to_bytes(8, "little")).digest()
    stream = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    halves = []
    for width in (k // 2, k - k // 2):
        words = stream.random_raw(-(-d // 64))
        bits = np.unpackbits(words.view(np.uint8), count=d, bitorder="little")
        turns = (stream.random_raw(-(-d // width)) % np.uint64(width)).astype(np.int64)
        places = (turns[:, None] + np.arange(width)).reshape(-1)[:d]
        sums = np.array([np.bincount(places, row * (1.0 - 2.0 * bits), 2 * width) for row in rows])
        twice = sums + sums
        halves.append(twice[:, :width] + twice[:, width:])
    wanted = (np.concatenate(halves, axis=1) / np.sqrt(2.0)).astype(np.float32)
    np.testing.assert_array_equal(making.sketches(), wanted)


def test_a_row_that_no_rule_takes_has_a_sketch_of_zeros() -> None:
    rows = np.ones((4, 100), np.float32)
    rows[1] *= np.float32(3e18)
    rows[2, 7], rows[3, 9] = np.inf, np.nan
    made = sketch(rows, 16, b"s" * 16)
    assert made[0].any() and not made[1:].any()


def test_what_does_not_fit_a_row_is_refused() -> None:
    rows = [np.zeros(100, np.float32)]
    signs, turns, sums = np.zeros(2, np.uint64), np.zeros(4, np.int64), np.zeros((1, 64))
    native_robust.add_sketches(rows, [(signs, turns, sums)])
    for half, told in (
        ((signs[:1], turns, sums), "1 words of signs"),
        ((signs, turns[:3], sums), "3 turns"),
        ((signs, turns, np.zeros((2, 64))), r"sums of shape \[2, 64\]"),
        ((signs, turns, np.zeros((1, 64), np.float32)), "contiguous float64"),
        ((signs, turns.astype(np.int32), sums), "contiguous int64"),
        ((signs, turns + 32, sums), r"turns must be in \[0, width\)"),
        ((signs, turns - 1, sums), r"turns must be in \[0, width\)"),
    ):
        with pytest.raises(ValueError, match=told):
            native_robust.add_sketches(rows, [half])


def test_of_several_chunks_it_is_the_sum_in_whatever_order_they_come() -> None:
    rows = np.random.default_rng(1).standard_normal((2, 5000)).astype(np.float32)
    whole = sketch(rows, 64, b"s" * 16)
    both = Sketching(b"s" * 16, 2, 64)
    both.add(1, list(rows[:, :700]))
    both.add(0, list(rows))
    one = sketch(rows[:, :700].copy(), 64, b"s" * 16, chunk=1)
    np.testing.assert_allclose(both.sketches(), whole + one, rtol=1e-5, atol=1e-5)
    wanted = np.square(rows, dtype=np.float64).sum(axis=1)
    wanted += np.square(rows[:, :700], dtype=np.float64).sum(axis=1)
    np.testing.assert_allclose(both.squares(), wanted, rtol=1e-6)


def test_distances_are_unbiased_and_as_wrong_as_is_said() -> None:
    """For a vector of noise, two large elements, and one of all blocks' same places."""
    d, k, trials = 1024, 64, 600
    width = k // 2
    vectors = np.zeros((3, d), np.float32)
    vectors[0] = np.random.default_rng(3).standard_normal(d)
    vectors[1, [17, 900]] = 1.0, -1.0
    vectors[2, ::width] = 1.0
    squares = np.square(vectors, dtype=np.float64).sum(axis=1)
    blocks = np.square(vectors, dtype=np.float64).reshape(3, -1, width).sum(axis=2)
    variance = 2.0 / k * (1.0 - np.square(blocks).sum(axis=1) / squares**2)
    assert (variance <= 2.0 / k).all()
    found = np.empty((trials, 3))
    for trial in range(trials):
        made = sketch(vectors, k, seed_of(trial, 0))
        found[trial] = np.square(made, dtype=np.float64).sum(axis=1) / squares
    z = (found.mean(axis=0) - 1.0) / np.sqrt(variance / trials)
    assert (np.abs(z) < 4.5).all(), z
    centred = found - found.mean(axis=0)
    kurtosis = (centred**4).mean(axis=0) / (centred**2).mean(axis=0) ** 2
    error = np.sqrt((kurtosis - 1.0) / trials)  # of a sample's variance, relative
    z = (centred**2).mean(axis=0) / variance - 1.0
    assert (np.abs(z) < 4.5 * error).all(), (z, error)


def test_enough_numbers_are_exact() -> None:
    rows = np.random.default_rng(4).standard_normal((4, 100)).astype(np.float32)
    made = sketch(rows, 200, seed_of(9, 2)).astype(np.float64)
    for i in range(4):
        for j in range(i):
            wanted = np.square(rows[i].astype(np.float64) - rows[j]).sum()
            assert np.square(made[i] - made[j]).sum() == pytest.approx(wanted, rel=1e-5)


def test_rows_that_are_near_each_other_beside_their_length_keep_their_distances() -> None:
    common = 1e3 * np.random.default_rng(5).standard_normal(20000)
    rows = (common + np.random.default_rng(6).standard_normal((2, 20000))).astype(np.float32)
    made = sketch(rows, 512, seed_of(1, 1)).astype(np.float64)
    wanted = np.square(rows[0].astype(np.float64) - rows[1]).sum()
    assert np.square(made[0] - made[1]).sum() == pytest.approx(wanted, rel=0.3)
    equal = sketch(rows[[0, 0]], 512, seed_of(1, 1))
    np.testing.assert_array_equal(equal[0], equal[1])


def test_seeds_are_of_secret_and_round() -> None:
    seeds = {seed_of(secret, step) for secret in range(5) for step in range(5)}
    assert len(seeds) == 25 and {len(seed) for seed in seeds} == {sketches.SEED_BYTES}


def cluster(n: int = 9, d: int = 3000) -> Floats:
    """Rows of which the first is by far the nearest to the others, and the last three lie."""
    generator = np.random.default_rng((n, d))
    lengths = np.linspace(0.1, 1.0, n)[:, None]
    rows = 1.0 + lengths * generator.standard_normal((n, d))
    rows[-3:] = -3.0 + 0.1 * generator.standard_normal((3, d))
    return rows.astype(np.float32)


@pytest.mark.parametrize(
    "text",
    ["krum(f=3)", "multi_krum(f=3, m=2)", "mda(f=3)", "cge(f=3)", "nnm(f=3) >> krum(f=3)"],
)
def test_a_rule_on_sketches_chooses_the_same_rows(text: str) -> None:
    rows, rule = cluster(), robust.parse(text)
    if text.startswith("cge"):
        rows[-3:] *= np.float32(2)
    for step in range(3):
        found = sketched(rule).run(rows, secret=77, step=step)
        wanted = rule.run(rows, step=step)
        assert found.selected == wanted.selected
        np.testing.assert_array_equal(found.vector, wanted.vector)


def test_weights_that_are_not_equal_are_nearly_those_of_rows() -> None:
    rows = cluster()
    wanted = robust.geometric_median(f=3)(rows)
    found = sketched(robust.geometric_median(f=3), k=1024)(rows, secret=5)
    honest = np.linalg.norm(rows[:-3] - wanted, axis=1).mean()
    assert np.linalg.norm(found - wanted) < 0.1 * honest
    buckets = robust.parse("bucketing(s=2) >> krum(f=0)")
    by_secret = {sketched(buckets)(rows[:-3], secret=one).tobytes() for one in range(8)}
    assert len(by_secret) > 1  # what is drawn comes from the secret


def test_who_knows_the_seed_is_not_seen_but_by_its_norm() -> None:
    d, k, secret = 400, 32, 11
    rule = Sketched(robust.krum(f=1), k)
    rows = np.ones((6, d), np.float32)
    rows += 0.1 * np.random.default_rng(8).standard_normal((6, d)).astype(np.float32)
    mean = rows[:5].mean(axis=0)
    projection = matrix(d, k, seed_of(secret, 0))
    # What of the mean the sketch does not see, turned over: a row of the same norm.
    unseen = mean - np.linalg.lstsq(projection, projection @ mean, rcond=None)[0]
    rows[5] = mean - 2.0 * unseen
    made = sketch(rows, k, seed_of(secret, 0)).astype(np.float64)
    told = np.square(made[5] - made[:5].mean(axis=0)).sum()
    assert told < 1e-6 * np.square(rows[5] - mean).sum()
    assert rule.run(rows, secret=secret).selected == (5,)
    # In rounds whose seed was not known before it is seen.
    chosen = {rule.run(rows, secret=secret, step=step).selected for step in range(1, 60)}
    assert (5,) not in chosen
    # A row that is far too long is far, whatever the sketch says.
    rows[5] = mean + 30.0 * unseen
    assert rule.run(rows, secret=secret).selected != (5,)


def test_absurd_norms_and_rows_that_are_not_finite_are_refused() -> None:
    rows = cluster(8)
    rows[2] *= np.float32(1e7)
    rows[4, 17] = np.nan
    found = sketched(robust.krum(f=2)).run(rows[:7], secret=3)
    assert [one.row for one in found.rejected] == [2, 4]
    assert "times the median" in found.rejected[0].reason
    assert "NaN at element 17" in found.rejected[1].reason
    with pytest.raises(ToleranceError, match=r"krum needs n >= 2 f \+ 3 rows. Received: n=4, f=1"):
        sketched(robust.krum(f=3)).run(rows[:6], secret=3)
    with pytest.raises(ToleranceError, match=r"bears 1024 rows at most. Received: n=1025"):
        sketched(robust.krum(f=1)).decide(np.ones(1025), np.ones((1025, 512), np.float32))


@pytest.mark.parametrize(("d", "k"), [(1, 16), (333, 33), (5000, 64)])
def test_no_row_has_a_longer_sketch_than_is_said(d: int, k: int) -> None:
    seed = seed_of(3, d)
    most = sketches.most_stretch([d], k)
    _, lengths, rows = np.linalg.svd(matrix(d, k, seed), full_matrices=False)
    stretched = lengths[0] ** 2
    assert 0.5 * most <= stretched <= most * (1 + 1e-9)
    # The row of which it is the longest is taken, and so are rows whose squares float32 has not.
    longest = rows[0]
    for row in (longest, 1e-20 * longest, 1e-24 * longest):
        making = Sketching(seed, 1, k)
        making.add(0, [row.astype(np.float32)])
        rule = Sketched(robust.geometric_median(f=0), k)
        assert rule.decide(making.squares(), making.sketches(), most=most).accepted == (0,)


@pytest.mark.parametrize(
    "text",
    [
        "krum(f=2)",
        "multi_krum(f=2)",
        "geometric_median(f=2)",
        "mda(f=2)",
        "nnm(f=2) >> krum(f=2)",
        "nnm(f=2) >> cge(f=2)",
        "bucketing(s=1) >> geometric_median(f=2)",
        "nnm(f=2) >> mean",
    ],
)
@pytest.mark.parametrize("said", [3e38, -3e38, 1e20, 40.0])
def test_a_sketch_that_no_row_has_is_refused(text: str, said: float) -> None:
    rows, rule = cluster(7, 288), sketched(robust.parse(text), k=64)
    making = Sketching(seed_of(1, 0), 7, 64)
    making.add(0, list(rows))
    made, squares = making.sketches(), making.squares()
    made[3] = np.sign(said) * min(abs(said) * np.sqrt(squares[3] / 64), 3e38)
    made[5] = said
    most = sketches.most_stretch([288], 64)
    decision = rule.decide(squares, made, most=most)
    told = [str(one) for one in decision.rejected]
    assert [one.row for one in decision.rejected] == [3, 5]
    assert told[0].startswith("row 3: a sketch of norm ") and " of a row of norm " in told[0]
    assert np.isfinite(decision.mixing).all()
    # Also where a sketch is as long as it may be, or nobody says how long that is, all is finite.
    made[[3, 5]] = np.float32(said)
    squares[5] = 1e35
    loose = rule.decide(squares, made, limits=Limits(max_ratio=np.inf))
    assert not loose.rejected and np.isfinite(loose.mixing).all()


def test_several_chunks_of_one_row() -> None:
    rows = np.ones((5, CHUNK + 9), np.float32)
    for i in range(5):
        rows[i, -5:] += np.float32(1 + i)
    rows[4] = 0.0
    found = sketched(robust.krum(f=1), k=2048).run(rows, secret=1)
    assert found.selected is not None and found.selected != (4,)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (sketched(robust.krum(f=2)), "sketched(k=512) >> krum(f=2)"),
        (sketched(robust.krum(f=2), k=64), "sketched(k=64) >> krum(f=2)"),
        (
            sketched(robust.nnm(f=1) >> robust.mean(), 100),
            "sketched(k=100) >> nnm(f=1) >> mean",
        ),
        (sketched(robust.cge(f=1)), "sketched >> cge(f=1)"),
    ],
)
def test_a_value_is_its_text(value: Sketched, text: str) -> None:
    assert str(value) == value.text == text
    assert rules.parse(text).sketched == value


def test_spellings() -> None:
    assert rules.parse("sketched>>krum(1)").sketched == sketched(robust.krum(f=1))
    assert rules.parse(" sketched(64) >> krum(1)").sketch == 64
    assert sketches.split("krum(f=1)") is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sketched >> median", "sorted values of each coordinate"),
        ("sketched >> nnm(f=1) >> trimmed_mean(f=1)", "sorted values of each coordinate"),
        ("sketched >> bulyan(f=1)", "sum of w_i x_i"),
        ("sketched >> centred_clipping", "the result of the round before"),
        ("sketched >> clip >> krum(f=1)", "of a row that was shortened no distance is known"),
        ("sketched >> arc(f=1) >> nnm(f=1) >> mean", "of a row that was shortened"),
        ("sketched >> clip >> bucketing(s=2) >> cge(f=1)", "of a row that was shortened"),
        ("sketched >> mean", "the mean of all leaves without sketches"),
        ("sketched(k=8) >> krum", r"`k` must be in \[16, 65536\]"),
        ("sketched(k=64.5) >> krum", "`k` must be an integer"),
        ("sketched(s=4) >> krum", "`sketched` takes k"),
        ("sketched(k=64) >> cge(f=1)", "`k` means nothing"),
        ("sketched", "a rule must stand behind `sketched`"),
    ],
)
def test_what_means_nothing_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        rules.parse(text)


def test_no_rule_is_no_rule() -> None:
    with pytest.raises(TypeError, match="`then` must be a rule"):
        sketched("krum(f=1)")  # type: ignore[arg-type]
