# SPDX-License-Identifier: Apache-2.0
"""The planner: when it compresses, that it never promises worse, and that SeCoPa decides alike."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.comm.profiles import DGC, ONEBIT, VGG19, codec, named, profile
from tf_hips.comm import planner
from tf_hips.comm.cost_model import Backward, step_seconds
from tf_hips.comm.plan import EXACT, Choice, Plan
from tf_hips.comm.planner import MARGIN, exact_seconds, make_plan, predicted, topologies_for
from tf_hips.comm.profile import Collective, Cost, MergeCost, Profile, Tiers
from tf_hips.errors import ConfigError

MBIT = 1e6 / 8
SMALL_MODEL = [300, 2**21, 64, 2**23 + 5, 1000]


def compressed(plan: Plan) -> list[int]:
    """Elements of the gradients that are compressed."""
    return [choice.num_elements for choice in plan.choices if choice.compression is not None]


def test_a_slow_link_is_worth_compressing() -> None:
    costs = profile(4, 100 * MBIT)
    plan = make_plan(costs, named(VGG19))
    exact = exact_seconds(costs, named(VGG19))
    assert plan.predicted_seconds is not None
    assert plan.predicted_seconds < exact / 20
    assert sum(compressed(plan)) > 0.99 * sum(VGG19)
    # Small gradients are not worth an encoding, and large ones all are.
    assert min(compressed(plan)) > 4096
    assert [choice.num_elements for choice in plan.choices] == VGG19
    assert all(choice.predicted_seconds for choice in plan.choices)
    assert float(plan.facts["exact_seconds"]) == pytest.approx(exact, rel=1e-4)
    assert plan.facts["candidates"] == ONEBIT


@pytest.mark.heavy
def test_a_fast_link_is_not() -> None:
    costs = profile(4, 50e9)
    plan = make_plan(costs, named(VGG19))
    assert compressed(plan) == []
    assert plan.predicted_seconds == exact_seconds(costs, named(VGG19))


@pytest.mark.heavy
def test_a_backward_pass_that_hides_the_sums_leaves_nothing_to_gain() -> None:
    costs = profile(4, 2e9)
    assert compressed(make_plan(costs, named(VGG19)))
    # All gradients but the last are ready early: the link has all the time it needs.
    ready = tuple(0.0 if place else 2.0 for place in range(len(VGG19)))
    assert compressed(make_plan(costs, named(VGG19), backward=Backward(ready))) == []


def test_one_rank_sums_exactly() -> None:
    plan = make_plan(profile(1, 1e8), named([5, 2**24]))
    assert compressed(plan) == []
    assert plan.predicted_seconds == 0


def test_models_without_anything() -> None:
    for sizes in ([], [0], [0, 0, 1]):
        plan = make_plan(profile(2, 1e8), named(sizes))
        assert [choice.num_elements for choice in plan.choices] == sizes
        assert compressed(plan) == []


def test_the_plan_of_equal_input_is_equal() -> None:
    costs = profile(3, 1000 * MBIT)
    plans = [make_plan(costs, named(SMALL_MODEL)).choices for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.heavy
def test_hosts_of_several_ranks() -> None:
    """Where links inside of hosts are fast and those between are slow, sums inside are exact."""
    flat = profile(8, 100 * MBIT)
    fast, slow = Collective(per_byte=1e-9), Collective(per_byte=1 / (25 * MBIT))
    tiers = Tiers(2, 4, 4, fast, slow)
    tiered = dataclasses.replace(flat, ranks_per_host=4, tiers=tiers)
    used = {choice.topology for choice in make_plan(tiered, named(VGG19)).choices}
    assert "hierarchical" in used
    # What rounds gradients before they are encoded is never chosen unasked, were it faster.
    assert "hierarchical_fp16" not in used
    asked = make_plan(tiered, named(VGG19), topologies=["hierarchical_fp16"]).choices
    assert {choice.topology for choice in asked} - {EXACT} == {"hierarchical_fp16"}
    # Not where all links are alike: inside it sends whole floats.
    alike = Collective(per_byte=1 / (100 * MBIT))
    tiered = dataclasses.replace(tiered, tiers=Tiers(2, 4, 4, alike, alike))
    used = {choice.topology for choice in make_plan(tiered, named(VGG19)).choices}
    assert "hierarchical" not in used


def test_another_way_must_promise_more_than_predictions_err(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = profile(4, 100 * MBIT, latency=2e-3)

    def best(topologies: list[str] | None = None) -> tuple[float, set[str]]:
        plan = make_plan(costs, named(SMALL_MODEL), topologies=topologies)
        assert plan.predicted_seconds is not None
        return plan.predicted_seconds, {choice.topology for choice in plan.choices} - {EXACT}

    gain = 1 - best(["butterfly"])[0] / best(["ps"])[0]
    assert MARGIN < gain < 2 * MARGIN
    assert best()[1] == {"butterfly"}
    # Were it asked to promise more than that, the usual way would stay.
    monkeypatch.setattr(planner, "MARGIN", gain + 0.01)
    assert best() == best(["ps"])


def test_compression_must_promise_more_than_predictions_err() -> None:
    for speed, kinds in ((1.5e9, {ONEBIT}), (1.56e9, {None})):  # 6.1 % are saved, and 3.3 %
        costs, gradients = profile(4, speed), named([2**20])
        exact = exact_seconds(costs, gradients)
        gain = 1 - step_seconds([Choice("a", 2**20, ONEBIT, "ps")], costs) / exact
        assert 0.5 * MARGIN < gain < 1.5 * MARGIN
        plan = make_plan(costs, gradients, topologies=["ps"])
        assert {choice.compression for choice in plan.choices} == kinds
        assert plan.predicted_seconds == pytest.approx(exact * (1 - gain * (None not in kinds)))


def test_candidates_are_what_was_named() -> None:
    both = profile(4, 100 * MBIT, codecs=(codec(ONEBIT, 1 / 8), codec(DGC, 0.065)))
    unasked = make_plan(both, named(SMALL_MODEL))
    assert compressed(unasked)
    assert {choice.compression for choice in unasked.choices} <= {ONEBIT, None}
    chosen = make_plan(both, named(SMALL_MODEL), [DGC])
    assert compressed(chosen)
    assert {choice.compression for choice in chosen.choices} <= {DGC, None}
    # Half the bytes at the same cost.
    freely = make_plan(both, named(SMALL_MODEL), [ONEBIT, "dgc"])
    assert DGC in {choice.compression for choice in freely.choices}
    # A momentum must not be applied again at every hop.
    assert topologies_for(DGC, both) == ["ps", "allgather"]
    assert topologies_for(ONEBIT, both) == ["ps", "ring", "allgather", "butterfly"]
    assert {choice.topology for choice in chosen.choices} <= {"ps", "allgather", EXACT}
    only = make_plan(both, named(SMALL_MODEL), [ONEBIT], topologies=["ring"])
    assert "ring" in {choice.topology for choice in only.choices}
    assert {choice.topology for choice in only.choices} <= {"ring", EXACT}


def test_candidates_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="must have the costs of terngrad"):
        make_plan(profile(2, 1e8), named([5]), ["terngrad"])
    with pytest.raises(ValueError, match="must make packets"):
        make_plan(profile(2, 1e8), named([5]), ["powersgd"])
    with pytest.raises(ValueError, match="did you mean 'onebit'"):
        make_plan(profile(2, 1e8), named([5]), ["onebti"])
    known = r"have one of ps, ring, allgather, blocks for 3 ranks\. Received:"
    for chosen, wrong in ((["rign", "ps", "butterfly"], "rign"), (["butterfly"], "butterfly")):
        with pytest.raises(ValueError, match=f"{known} {wrong}$"):
            make_plan(profile(3, 1e8), named([5]), topologies=chosen)
    make_plan(profile(3, 1e8), named([5]), [ONEBIT], topologies=["ps", "butterfly"])


def test_large_gradients_are_cut_where_that_hides_their_encoding() -> None:
    # Encoding takes as long as the link does, so half of either can be hidden.
    costs = profile(2, 1e8, codecs=(codec(ONEBIT, 1 / 8, cost=2.0),), latency=1e-5)
    size = 4 * 2**20  # one bucket, if nothing cuts it
    plan = make_plan(costs, named([size]), topologies=["ps"])
    [choice] = plan.choices
    assert choice.partitions > 1
    whole = step_seconds([Choice("a", size, ONEBIT, "ps")], costs)
    assert plan.predicted_seconds is not None
    assert plan.predicted_seconds < 0.95 * whole


def test_given_choices_get_their_seconds() -> None:
    costs = profile(4, 100 * MBIT)
    given_plan = Plan(4, (Choice("a", 2**20, ONEBIT, "ps"), Choice("b", 300)))
    plan = predicted(given_plan, costs)
    assert plan.predicted_seconds == step_seconds(given_plan.choices, costs)
    assert [choice.predicted_seconds for choice in plan.choices] == [
        step_seconds([choice], costs) for choice in given_plan.choices
    ]


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 2**23), min_size=1, max_size=6),
    num_ranks=st.integers(1, 6),
    speed=st.floats(1e5, 1e11),
    cost=st.floats(0.1, 100),
    backward_s=st.none() | st.floats(0, 2),
)
def test_a_plan_never_promises_worse_than_exact_sums(
    sizes: list[int], num_ranks: int, speed: float, cost: float, backward_s: float | None
) -> None:
    costs = profile(num_ranks, speed, cpu=0.2, codecs=(codec(ONEBIT, 1 / 8, cost),))
    backward = None if backward_s is None else Backward.even(len(sizes), backward_s)
    plan = make_plan(costs, named(sizes), backward=backward)
    exact = exact_seconds(costs, named(sizes), backward)
    assert plan.predicted_seconds == step_seconds(plan.choices, costs, backward)
    assert plan.predicted_seconds <= exact
    if compressed(plan):
        assert plan.predicted_seconds <= exact * (1 - MARGIN)
    else:
        assert plan.predicted_seconds == exact
    plan.check(named(sizes), num_ranks)


# SeCoPa as HiPress released it (src/SeCoPa/SeCoPa.py): milliseconds are A x + B, x in elements.
SECOPA_ENCODE = (1.4133e-8, 0.058938)
SECOPA_DECODE = (6.2041e-9, 0.13956)
SECOPA_GATHER = {4: (2.7156e-6, 0.4193), 8: (6.1167e-6, 0.80768), 16: (1.2937e-5, 1.4406)}
SECOPA_SPREAD = {4: (2.7157e-6, 0.22156), 8: (6.1172e-6, 0.27285), 16: (1.2915e-5, 0.45538)}
SECOPA_RATIO = 1 / 16
MIB = 2**20 // 4  # elements of a MiB


def line(constants: tuple[float, float], x: float) -> float:
    return constants[0] * x + constants[1]


def secopa(size: float, ranks: int) -> tuple[bool, int, float, float]:
    """SeCoPa's decision for `ps`: whether to compress, partitions; milliseconds without, with."""

    def exact(parts: int) -> float:
        share = size / parts
        return line(SECOPA_GATHER[ranks], share) + line(SECOPA_SPREAD[ranks], share)

    def coded(parts: int) -> float:
        share = size / parts
        small = share * SECOPA_RATIO
        return (
            line(SECOPA_GATHER[ranks], small)
            + line(SECOPA_SPREAD[ranks], small)
            + min(parts + 1, ranks) * line(SECOPA_ENCODE, share)
            + min(ranks - 1 + parts, 2 * (ranks - 1)) * line(SECOPA_DECODE, small)
        )

    parts = range(1, ranks + 1)
    best_exact, best_coded = min(parts, key=exact), min(parts, key=coded)
    is_compressed = coded(best_coded) < exact(best_exact)
    return (
        is_compressed,
        best_coded if is_compressed else best_exact,
        exact(best_exact),
        coded(best_coded),
    )


@pytest.mark.parametrize(
    ("ranks", "mib", "expected", "milliseconds"),
    [
        (4, 4, (True, 1), (2.06, 1.70)),
        (4, 16, (True, 4), (6.34, 2.13)),
        (4, 392, (True, 4), (140.2, 11.95)),
        (8, 16, (True, 4), (7.49, 3.79)),
        (8, 392, (True, 8), (158.2, 14.85)),
        (16, 16, (True, 6), (8.67, 6.44)),
        (16, 392, (True, 16), (167.9, 18.93)),
    ],
)
def test_the_reference_is_secopas(
    ranks: int, mib: float, expected: tuple[bool, int], milliseconds: tuple[float, float]
) -> None:
    *decision, exact, coded = secopa(mib * MIB, ranks)
    assert tuple(decision) == expected
    assert (exact, coded) == pytest.approx(milliseconds, rel=0.01)


def of_hipress(ranks: int) -> Profile:
    """A profile with the constants of HiPress, in the terms of this cost model.

    Their gather and broadcast of m / K elements each, with K = N, are our alltoall and allgather of
    a bucket of m elements, or an allreduce of it.
    """
    milli = 1e-3
    (gather, gather_fixed), (spread, spread_fixed) = SECOPA_GATHER[ranks], SECOPA_SPREAD[ranks]

    def collective(each: float, fixed: float, moved: float) -> Collective:
        # A rank moves `moved` bytes for each element of its part.
        return Collective(fixed=fixed * milli, per_byte=each * milli / moved)

    encode = Cost(SECOPA_ENCODE[1] * milli, SECOPA_ENCODE[0] * milli)
    decode = Cost(SECOPA_DECODE[1] * milli, SECOPA_DECODE[0] * SECOPA_RATIO * milli)
    packet = Cost(0, 4 * SECOPA_RATIO)
    peers = 4 * (ranks - 1)
    plain = profile(ranks, 1.0)
    return dataclasses.replace(
        plain,
        allreduce=collective(gather + spread, gather_fixed + spread_fixed, 4 * ranks),
        # To one receiver in each of N - 1 rounds.
        alltoall=collective(gather, gather_fixed / (ranks - 1), peers),
        allgather=collective(spread, spread_fixed, peers),
        add=Cost(),
        copy=Cost(),
        codecs=(
            dataclasses.replace(
                plain.codecs[0],
                packet=packet,
                sum_packet=packet,
                encode=encode,
                decode=decode,
                decode_sum=decode,
                merge=MergeCost((ranks - 1) * decode.fixed, 0, decode.each),
                recode=MergeCost(
                    encode.fixed + (ranks - 1) * decode.fixed, encode.each, decode.each
                ),
            ),
        ),
    )


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_decisions_are_secopas_where_they_are_clear(ranks: int) -> None:
    costs = of_hipress(ranks)
    seen = set()
    for power in range(-6, 10):
        size = math.floor(2.0**power * MIB)
        is_compressed, _, exact, coded = secopa(size, ranks)
        # Where a third is at stake. Between, chunks and partitions are not counted alike.
        if 2 / 3 < exact / coded < 3 / 2:
            continue
        [choice] = make_plan(costs, [("a", size)], topologies=["ps"]).choices
        assert (choice.compression is not None) == is_compressed, size
        seen.add(is_compressed)
    assert seen == {True, False}
