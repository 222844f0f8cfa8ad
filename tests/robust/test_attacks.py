# SPDX-License-Identifier: Apache-2.0
"""Attacks: their formulae, that closed forms are as far as allowed, and that seeds replay them."""

import dataclasses
import inspect
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from tests.robust import oracle
from tf_hips import robust
from tf_hips.errors import ToleranceError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ops.compressor import CHUNK
from tf_hips.ops.registry import REGISTRY
from tf_hips.robust import attack_search, attacks
from tf_hips.robust.attack_params import DIRECTIONS

pytestmark = pytest.mark.heavy  # every attack over many rows

Floats = npt.NDArray[np.float32]
NEAR = {"rtol": 1e-5, "atol": 1e-5}


def rows_from(seed: int) -> Floats:
    generator = np.random.default_rng(seed)
    return (1 + generator.standard_normal((11, 60))).astype(np.float32)


@pytest.fixture(name="honest")
def honest_rows() -> Floats:
    return rows_from(5)


def test_simple_ones(honest: Floats) -> None:
    own = honest[:3] * 2
    mean = honest.mean(axis=0)
    np.testing.assert_allclose(attacks.reversed_gradient()(honest, 3, own=own), -100 * own, **NEAR)
    np.testing.assert_allclose(attacks.reversed_gradient(2)(honest, 2)[1], -2 * mean, **NEAR)
    assert (attacks.constant()(honest, 2) == -100).all()
    np.testing.assert_allclose(attacks.sign_flip()(honest, 3, own=own), -own, **NEAR)
    np.testing.assert_allclose(attacks.sign_flip("mean")(honest, 3, own=own)[2], -mean, **NEAR)
    np.testing.assert_allclose(attacks.inner_product(0.5)(honest, 1)[0], -0.5 * mean, **NEAR)
    noise = attacks.gaussian(3, 2)(honest, 100)
    assert noise.mean() == pytest.approx(3, abs=0.1)
    assert noise.std() == pytest.approx(2, abs=0.1)
    assert not attacks.free_riding()(honest, 2).any()
    np.testing.assert_array_equal(attacks.free_riding()(honest, 2, before=mean)[1], mean)


def test_a_little_is_enough(honest: Floats) -> None:
    mean, deviation = honest.mean(axis=0), honest.std(axis=0)
    sent = attacks.alie(z=1.5)(honest, 4)
    np.testing.assert_allclose(sent[0], mean - 1.5 * deviation, **NEAR)
    assert (sent == sent[0]).all()
    of_detox = attacks.alie(z=1.0, sign=1, statistics="all")
    everyone = np.concatenate([honest, honest[:4]])
    np.testing.assert_allclose(
        of_detox(honest, 4, own=honest[:4])[0], everyone.mean(axis=0) + everyone.std(axis=0), **NEAR
    )
    of_byzfl = attacks.alie(z=1.5, sign=1, ddof=1)
    wanted = mean + 1.5 * honest.std(axis=0, ddof=1)
    np.testing.assert_allclose(of_byzfl(honest, 4)[0], wanted, **NEAR)
    own = honest[:4] * 2
    np.testing.assert_allclose(
        attacks.alie(z=1, statistics="own")(honest, 4, own=own)[0],
        own.mean(axis=0) - own.std(axis=0),
        **NEAR,
    )


@pytest.mark.parametrize(
    ("n", "f", "paper", "other"),
    [(50, 24, 1.426, 1.751), (20, 8, 0.674, 1.036), (45, 5, 0.126, 0.253)],
)
def test_both_formulae_of_z(n: int, f: int, paper: float, other: float) -> None:
    assert attacks.alie_z(n, f) == pytest.approx(paper, abs=1e-3)
    assert attacks.alie_z(n, f, "n") == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize(
    ("n", "f", "formula", "share"),
    [
        (3, 1, "paper", "1/2"),
        (5, 1, "paper", "2/4"),
        (4, 1, "paper", "1/3"),
        (7, 1, "paper", "3/6"),
        (9, 0, "paper", "4/9"),
        (4, 1, "n", "2/4"),
    ],
)
def test_a_formula_that_attacks_nothing_says_so(n: int, f: int, formula: str, share: str) -> None:
    message = rf"\(1/2, 1\) for alie\(z='{formula}'\).*Received: {share}, of n={n}, f={f}"
    with pytest.raises(ValueError, match=message):
        attacks.alie_z(n, f, formula)
    honest = rows_from(3)[: n - f]
    if f:
        with pytest.raises(ValueError, match=message):
            attacks.alie(formula)(honest, f)
        assert (attacks.alie(0.5)(honest, f) != honest.mean(axis=0)).any()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_closed_forms_are_as_far_as_they_may_be(honest: Floats, direction: str) -> None:
    exact = honest.astype(np.float64)
    apart = oracle.distances(exact)
    mean = exact.mean(axis=0)
    sums = {"max": apart.sum(axis=1).max(), "min": apart.sum(axis=1).min()}
    sent = attacks.min_max(direction)(honest, 2)[0].astype(np.float64)
    assert ((exact - sent) ** 2).sum(axis=1).max() == pytest.approx(apart.max(), rel=1e-5)
    for bound, allowed in sums.items():
        sent = attacks.min_sum(direction, bound)(honest, 2)[0].astype(np.float64)
        assert ((exact - sent) ** 2).sum() == pytest.approx(allowed, rel=1e-5)
        assert float((sent - mean) @ mean) < 0


def test_mimic_copies_an_honest_row(honest: Floats) -> None:
    sent = attacks.mimic(target=4)(honest, 2)
    np.testing.assert_array_equal(sent, honest[[4, 4]])
    # Always the same one, whatever is in the rows of a step.
    for rows in (honest, rows_from(6)):
        np.testing.assert_array_equal(attacks.mimic()(rows, 2), rows[[0, 0]])
    chosen = attacks.mimic(-1)(honest, 1)[0]
    along = honest.astype(np.float64) @ attacks.top_direction(honest.astype(np.float64))
    np.testing.assert_array_equal(chosen, honest[int(np.argmax(along))])
    # What came down before has nothing to do with it.
    told = attacks.mimic(-1)(honest, 1, before=-honest.mean(axis=0))
    np.testing.assert_array_equal(told[0], chosen)


RULES = ("mean", "median", "krum(f=3)", "bulyan(f=3)", "nnm(f=3) >> trimmed_mean(f=3)")
RULES += ("centred_clipping(f=3)", "bucketing(s=2) >> median")
FIXED = {
    "alie": lambda factor: attacks.alie(z=factor),
    "inner_product": attacks.inner_product,
}


@pytest.mark.parametrize("text", RULES)
@pytest.mark.parametrize("base", FIXED)
@pytest.mark.parametrize(("seed", "signal"), [(0, 1.0), (1, 1.0), (2, 0.1)])
def test_no_fixed_factor_moves_a_known_rule_farther(
    base: str, text: str, seed: int, signal: float
) -> None:
    rule = robust.parse(text)
    generator = np.random.default_rng(seed)
    honest = (signal + generator.standard_normal((12, 40))).astype(np.float32)
    mean = honest.mean(axis=0, dtype=np.float64)
    direction = -mean if base == "inner_product" else -honest.std(axis=0, dtype=np.float64)
    before = honest[0] * 0

    def sent(attack: attacks.Attack) -> Floats:
        return attack(honest, 3, before=before, seed=5, step=seed)

    def moved(attack: attacks.Attack) -> float:
        rows = np.concatenate([honest, sent(attack)])
        return float((rule(rows, reference=before, seed=5, step=seed) - mean) @ direction)

    worst = attacks.optimal(base, text)
    assert moved(worst) >= max(moved(FIXED[base](one)) for one in attack_search.FACTORS) - 1e-6
    np.testing.assert_array_equal(sent(worst), sent(worst))


def test_a_search_finds_factors_between_those_that_it_begins_with() -> None:
    tried: list[float] = []

    def moved(factor: float) -> float:
        tried.append(factor)
        return -abs(factor - 6.3)

    assert attack_search.worst_factor(moved) == pytest.approx(6.3, abs=0.4)
    assert len(tried) == 20
    # A rule that takes what it is told up to a limit, and nothing more.
    assert 1.9 < attack_search.worst_factor(lambda x: x if x < 2.0 else 0.0) < 2.0
    assert attack_search.worst_factor(lambda x: x) == attack_search.FACTORS[-1]


def test_a_search_gives_the_lie_that_krum_stands_still_under() -> None:
    # Honest rows are farther from each other than from zero.
    generator = np.random.default_rng(1)
    honest = (generator.standard_normal((12, 400)) + 0.1).astype(np.float32)
    mean = honest.mean(axis=0)
    sent = attacks.optimal("inner_product", "krum(f=3)")(honest, 3)
    assert robust.krum(f=3).run(np.concatenate([honest, sent])).selected[0] >= 12
    assert float(sent[0] @ mean) < 0
    assert robust.krum(f=3).run(np.concatenate([honest, 0 * sent])).selected[0] >= 12


def test_a_search_needs_as_many_rows_as_the_rule(honest: Floats) -> None:
    with pytest.raises(ToleranceError, match=r"krum needs n >= 2 f \+ 3 rows. Received: n=13, f=6"):
        attacks.optimal(rule="krum(f=6)")(honest, 2)
    # Factors by which liars would be refused, more than the rule bears, are none.
    honest[:, 0] += 1e3
    assert np.isfinite(attacks.optimal("inner_product", "krum(f=1)")(honest, 3)).all()


def test_top_direction_is_the_first_singular_vector() -> None:
    generator = np.random.default_rng(2)
    rows = generator.standard_normal((30, 8)) * np.array([9, 1, 1, 1, 1, 1, 1, 1])
    found = attacks.top_direction(rows)
    wanted = np.linalg.svd(rows - rows.mean(axis=0))[2][0]
    assert abs(float(found @ wanted)) == pytest.approx(1, abs=1e-6)
    assert not attacks.top_direction(np.ones((3, 4))).any()


@pytest.mark.parametrize("name", attacks.NAMES)
def test_an_attack_is_a_function_of_seed_and_step(honest: Floats, name: str) -> None:
    attack = getattr(attacks, name)()
    before = honest.copy()
    first = attack(honest, 3, seed=1, step=2)
    np.testing.assert_array_equal(first, attack(honest, 3, seed=1, step=2))
    np.testing.assert_array_equal(honest, before)
    assert attack(honest, 0).shape == (0, 60)
    if name == "gaussian":
        assert (first != attack(honest, 3, seed=1, step=3)).any()
        assert (first[0] != first[1]).any()


def test_labels() -> None:
    labels = np.arange(10)
    np.testing.assert_array_equal(attacks.flip_labels(labels, 10), labels[::-1])
    of_bytes = labels.astype(np.uint8)
    np.testing.assert_array_equal(attacks.flip_labels(of_bytes, 256), 255 - labels)
    assert attacks.flip_labels(of_bytes, 256).dtype == np.uint8
    np.testing.assert_array_equal(attacks.flip_labels(of_bytes, 300), 299 - labels)
    np.testing.assert_array_equal(attacks.flip_labels(np.zeros(2, np.int8), 1), [0, 0])
    with pytest.raises(ValueError, match=r"in \[0, 10\). Received: 0 to 10"):
        attacks.flip_labels(np.arange(11), 10)


SCALED = ("onebit", "error_feedback(onebit)", "terngrad(bitwidth=4)", "qsgd(bits=4, bucket=64)")
SCALED += ("int8", "error_feedback(int8(block=1024))", "fp8(format=e4m3)", "fp8(format=e5m2)")
SCALED += ("eden", "eden(bits=4, block=64)")


@pytest.mark.parametrize("text", SCALED)
@pytest.mark.parametrize("n", [1, 100, CHUNK + 33])
def test_a_header_lies_about_the_scale(text: str, n: int) -> None:
    compressor = compressors.parse(text)
    values = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    packets = native.encode(compressor.codec, values, native.Key(1, 0, 0))
    honest = native.decode(compressor.codec, packets, n)
    lying = attacks.lie_about_scale(compressor, packets, n, 1000.0)
    found = native.decode(compressor.codec, lying, n)
    np.testing.assert_allclose(found, 1000 * honest, rtol=1e-4)
    assert packets.size == lying.size


def test_every_codec_with_a_float_for_many_elements_has_a_scale() -> None:
    """As the specifications' headers lay out their packets."""
    without = set(REGISTRY) - set(attacks.SCALED)
    assert without == {
        *("bf16", "fp16", "fp32", "natural"),  # each element by itself
        *("bisparse", "dgc", "graddrop", "randomk", "topk"),  # values of those that are sent
        *("hips2bit", "tbq"),  # the threshold is a parameter, and in the hash of the codec
    }
    for name in without:
        assert not attacks.has_scale(compressors.parse(name))
    with pytest.raises(ValueError, match="must be one of onebit, terngrad, eden, fp8, int8, qsgd"):
        attacks.lie_about_scale(compressors.parse("fp16"), np.zeros(9, np.uint8), 1, 2.0)


def test_a_small_tensor_of_what_is_mixed_has_no_scale() -> None:
    mixed = compressors.parse("mixed(error_feedback(onebit), below=100)")
    for n in (99, 100):
        codec = mixed.of_size(n).codec
        packets = native.encode(codec, np.ones(n, np.float32), native.Key(1, 0, 0))
        if n < 100:
            with pytest.raises(ValueError, match=r"below=100\) for 99 elements$"):
                attacks.lie_about_scale(mixed, packets, n, 8.0)
        else:
            lying = attacks.lie_about_scale(mixed, packets, n, 8.0)
            np.testing.assert_array_equal(native.decode(codec, lying, n), np.full(n, 8.0))


def test_who_lies() -> None:
    assert len(set(attacks.liars(45, 5, 1, 0))) == 5
    assert attacks.liars(45, 5, 1, 0) == attacks.liars(45, 5, 1, 0) != attacks.liars(45, 5, 1, 1)
    assert len({attacks.liars(45, 5, 1, step, fixed=True) for step in range(9)}) == 1
    assert attacks.liars(4, 4, 1) == (0, 1, 2, 3)
    assert attacks.liars(4, 0, 1) == ()


def test_wrong_settings_are_refused(honest: Floats) -> None:
    for make, message in (
        (lambda: attacks.liars(4, 5, 1), r"`q` must be in \[0, n\]"),
        (lambda: attacks.liars(4, 2, 1, placement="best"), "random, worst"),
        (lambda: attacks.alie_z(10, 6), "less than n / 2"),
        (lambda: attacks.alie(z=1, statistics="own")(honest, 3), "`own` must hold.*Received: none"),
        (
            lambda: attacks.alie(z=1, statistics="own")(honest, 1, own=honest[:1]),
            r"`own` must hold 2 rows or more for alie\(z=1, .*\): .*Received: 1",
        ),
        (lambda: attacks.constant()(honest, -1), "0 or more"),
        (lambda: attacks.constant()(honest, 2, own=honest), "must hold 2 rows of 60"),
        (lambda: attacks.constant()([], 2), "at least one row"),
        (lambda: attacks.lying_scale()(honest, 2), r"Received: lying_scale\(factor=1000.0\), of"),
        (lambda: attacks.mimic(11)(honest, 2), "`target` of mimic must be less than the 11 honest"),
        (lambda: attacks.Attack("random"), "`name` must be one of reversed_gradient, "),
    ):
        with pytest.raises(ValueError, match=message):
            make()


NUMBER, ABOVE, SPREAD = (
    [math.nan, math.inf, -math.inf],
    [math.nan, math.inf, -0.5, 0.0],
    [math.nan, math.inf, -1e-9],
)
# Of every parameter of every attack: what is out of range, of another type, and allowed.
PARAMETERS = {
    ("reversed_gradient", "c"): (NUMBER, ["4", None, True], [-3, 0.5, np.float32(2)]),
    ("constant", "c"): (NUMBER, ["nan", None, False], [0, -100.0]),
    ("gaussian", "mean"): (NUMBER, ["0", None, 1j], [-3, 0.5]),
    ("gaussian", "sigma"): (SPREAD, ["1", None, True], [0, 200.0]),
    ("sign_flip", "of"): (["yours", ""], [None, 1], ["own", "mean"]),
    ("alie", "z"): ([*ABOVE, "mine", "PAPER"], [None, True, 1j], [1, 1.5, "paper", "n"]),
    ("alie", "sign"): ([0, 2, -2], [1.0, True, "1", None], [-1, 1]),
    ("alie", "statistics"): (["none", "mine"], [None, 1], ["honest", "own", "all"]),
    ("alie", "ddof"): ([-1, 2], [1.0, False, "0", None], [0, 1]),
    ("inner_product", "epsilon"): (ABOVE, ["2", None, True], [0.1, 20]),
    ("mimic", "target"): ([-2, -100], [0.5, 2.0, "far", None, True], [-1, 0, np.int64(3)]),
    ("min_max", "direction"): (["down", ""], [None, 1], DIRECTIONS),
    ("min_sum", "direction"): (["down", ""], [None, 1], DIRECTIONS),
    ("min_sum", "bound"): (["mean", ""], [None, 1], ["max", "min"]),
    ("optimal", "base"): (["mimic", ""], [None, 1], ["alie", "inner_product"]),
    ("optimal", "rule"): (["krmu", "nnm", ""], [None, 1], ["mean", "nnm >> krum(f=1)"]),
    ("free_riding", "sigma"): (SPREAD, ["1", None, True], [0, 0.5]),
    ("lying_scale", "factor"): (NUMBER, ["9", None, True], [-1, 1e3]),
}


def test_the_table_has_every_parameter_of_every_attack() -> None:
    names = (*attacks.NAMES, *attacks.PACKET_NAMES)
    made = {(name, one) for name in names for one in inspect.signature(of(name)).parameters}
    assert made == {*PARAMETERS}


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_every_parameter_is_looked_at(name: str, parameter: str) -> None:
    out_of_range, of_another_type, allowed = PARAMETERS[name, parameter]
    message = f"`{parameter}` of {name} must be .*. Received: {parameter}="
    for values, error in ((out_of_range, ValueError), (of_another_type, TypeError)):
        for value in values:
            with pytest.raises(error, match=message) as caught:
                of(name)(**{parameter: value})
            assert str(caught.value).endswith(f"Received: {parameter}={value!r}")
            with pytest.raises(error, match=message):
                dataclasses.replace(
                    of(name)(),
                    params=tuple({**dict(of(name)().params), parameter: value}.items()),
                )
    for value in allowed:
        assert of(name)(**{parameter: value})[parameter] == value


def test_an_attack_has_its_own_parameters_and_no_others() -> None:
    for name, params in (("constant", ()), ("nan", (("c", 1.0),)), ("constant", (("d", 1.0),))):
        with pytest.raises(ValueError, match=f"`params` of {name} must be of "):
            attacks.Attack(name, params)


def of(name: str) -> Callable[..., attacks.Attack]:
    made: Callable[..., attacks.Attack] = getattr(attacks, name)
    return made
