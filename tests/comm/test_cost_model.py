# SPDX-License-Identifier: Apache-2.0
"""The cost model: formulae of each topology, the simulation, and profiles as files."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.comm.profiles import DGC, ONEBIT, VGG19, codec, profile
from tf_hips.comm.cost_model import Backward, Model, step_seconds
from tf_hips.comm.overlap import Chain, Task, simulate
from tf_hips.comm.partition import BUCKET_ELEMENTS, piece_buckets, pieces, spread
from tf_hips.comm.plan import EXACT, Choice
from tf_hips.comm.profile import Collective, Cost, MergeCost, Profile, Tiers, fit
from tf_hips.comm.tasks import INSIDE_BYTES, Bucket, Load, buckets_of, tasks_of, topologies
from tf_hips.errors import ConfigError
from tf_hips.ops.compressor import CHUNK

FREE = Collective()


def cores(seconds: float) -> Task:
    return Task(False, seconds)


def link(seconds: float, cpu: float = 0.0, delay: float = 0.0) -> Task:
    return Task(True, seconds, cpu, delay)


@pytest.mark.parametrize(
    ("chains", "expected"),
    [
        ([], 0),
        ([Chain(())], 0),
        ([Chain((cores(1), link(2), cores(3)))], 6),
        # While the first travels the second is encoded; the link is never idle after that.
        ([Chain((cores(1), link(2)))] * 2, 5),
        # The cores are waited for.
        ([Chain((cores(2), link(1)))] * 3, 7),
        # Both at once ask for 1.5 times the cores: the link's two seconds end after three.
        ([Chain((link(2, cpu=0.5),)), Chain((cores(2),))], 3),
        # Two together for 1.5 s, then the link alone.
        ([Chain((link(2, cpu=0.5),)), Chain((cores(1),))], 2.5),
        # A delay keeps nothing busy.
        ([Chain((link(1, delay=4),)), Chain((link(3),))], 5),
        # Who follows waits for all.
        ([Chain((link(1),)), Chain((cores(4),)), Chain((cores(1),), after=(0, 1))], 5),
        ([Chain((), ready=0), Chain((cores(1),), after=(0,)), Chain((link(3),), after=(1,))], 4),
    ],
)
def test_what_overlaps(chains: list[Chain], expected: float) -> None:
    assert simulate(chains) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("on_cores", "chains", "expected"),
    [
        (False, [], 10),
        # Ready after 4 s, encoded beside the backward pass or in its way.
        (False, [Chain((cores(2), link(1)), ready=4)], 10),
        (True, [Chain((cores(2), link(1)), ready=4)], 12),
        (False, [Chain((cores(2), link(1)), ready=10)], 13),
        # 4 s, then both at half speed for 4 s: the last 4 s of the backward pass are left.
        (True, [Chain((cores(2), link(9)), ready=4)], 17),
        # A link without cores disturbs nobody.
        (True, [Chain((link(5),), ready=4)], 10),
    ],
)
def test_a_backward_pass(on_cores: bool, chains: list[Chain], expected: float) -> None:
    assert simulate(chains, 10, on_cores) == pytest.approx(expected)


tasks = st.builds(
    Task,
    is_link=st.booleans(),
    seconds=st.floats(0, 10),
    cpu=st.sampled_from([0.0, 0.3, 1.0]),
    delay=st.sampled_from([0.0, 1.0]),
)


@given(
    st.lists(st.builds(Chain, st.lists(tasks, max_size=4).map(tuple), st.floats(0, 5)), max_size=5),
    st.booleans(),
)
def test_no_simulation_beats_its_resources(chains: list[Chain], on_cores: bool) -> None:
    seconds = simulate(chains, 5.0, on_cores)
    everything = [task for chain in chains for task in chain.tasks]
    busy = [sum(task.seconds for task in everything if task.is_link is one) for one in (0, 1)]
    work = sum(task.seconds * task.cpu for task in everything) + (5.0 if on_cores else 0.0)
    for chain in chains:
        alone = sum(task.seconds + task.delay for task in chain.tasks)
        assert seconds >= chain.ready * bool(chain.tasks) + alone - 1e-6
    assert seconds >= max(*busy, work, 5.0) - 1e-6
    # In the worst case nothing overlaps.
    assert seconds <= 5.0 + sum(task.seconds + task.delay for task in everything) + 1e-6


def test_buckets_are_those_of_the_runtime() -> None:
    sizes, four = [300, CHUNK + 5, 0, 40 * CHUNK, 7], profile(4, 1e8)
    made = buckets_of(ONEBIT, "ps", sizes, {3: 4}, four)
    everything = pieces(sizes, CHUNK)
    segments = spread([piece.num_elements for piece in everything], 4)
    groups = piece_buckets(everything, BUCKET_ELEMENTS, {3: 4}, segments)
    assert len(made) == len(groups) == 6
    assert [bucket.load.pieces for bucket in made] == [len(group) for group in groups]
    assert [bucket.first for bucket in made] == [4, 3, 3, 3, 3, 0]
    assert made[1].load.elements == 10 * CHUNK
    assert max(load.elements for load in made[1].segments) == 3 * CHUNK
    # Exact sums: tensors are never cut, unless the plan says so.
    exact = buckets_of(None, "allreduce", sizes, {3: 4}, four)
    assert [bucket.load.elements for bucket in exact] == [*[10 * CHUNK] * 4, CHUNK + 312]
    exact = buckets_of(None, "allreduce", sizes, {}, four)
    assert sorted(bucket.load.elements for bucket in exact) == [7, CHUNK + 305, 40 * CHUNK]
    # The one that is ready first travels first.
    exact = buckets_of(None, "allreduce", [CHUNK, 7, 4], {0: 2}, four)
    assert [bucket.first for bucket in exact] == [1, 0, 0]
    # Nor into more parts than they have elements.
    exact = buckets_of(None, "allreduce", [3, 0], {0: 8, 1: 8}, four)
    assert [bucket.load.elements for bucket in exact] == [1, 1, 1]


# Costs whose parts can be told apart: encode 1, decode 10, recode 100 + 10 per packet, merge 22 + 2
# per packet, add 1000 (in nanoseconds per element); links in seconds per byte, all different.
_N = 4
_APART = dataclasses.replace(
    profile(_N, 1.0),
    allreduce=Collective(per_byte=1e-3),
    alltoall=Collective(per_byte=2e-3),
    allgather=Collective(per_byte=3e-3),
    add=Cost(0, 1e-6),
    copy=Cost(0, 5e-6),
    codecs=(
        dataclasses.replace(
            codec(ONEBIT, 1),
            packet=Cost(0, 0.5),
            sum_packet=Cost(0, 0.25),
            encode=Cost(0, 1e-9),
            decode=Cost(0, 1e-8),
            decode_sum=Cost(0, 2e-8),
            merge=MergeCost(0, 2.2e-8, 2e-9),
            recode=MergeCost(0, 1e-7, 1e-8),
        ),
    ),
)
_TIERED = dataclasses.replace(
    _APART, tiers=Tiers(2, 2, 2, Collective(per_byte=4e-3), Collective(per_byte=5e-3))
)
_M = 4 * CHUNK  # one bucket
_SHARE = _M // _N


@pytest.mark.parametrize(
    ("topology", "work", "sent"),
    [
        ("ps", [_M * 1e-9, _SHARE * 1.4e-7], [3 * _SHARE * 0.5 * 2e-3, 3 * _SHARE * 0.25 * 3e-3]),
        ("allgather", [_M * 1e-9], [3 * _M * 0.5 * 3e-3]),
        (
            "ring",
            [*[_SHARE * 1e-9, _SHARE * 1.01e-6] * 3, _SHARE * 1e-9],
            [*[_SHARE * 0.5 * 2e-3] * 3, 3 * _SHARE * 0.5 * 3e-3],
        ),
        (
            "butterfly",
            [_M / 2 * 1e-9, _M / 2 * 1.01e-6, _M / 4 * 1e-9, _M / 4 * 1.01e-6, _SHARE * 1e-9],
            [_M / 2 * 0.5 * 2e-3, _M / 4 * 0.5 * 2e-3, 3 * _SHARE * 0.5 * 3e-3],
        ),
        # Half of it to the other rank of the host, a quarter to the other host and back.
        (
            "hierarchical",
            [_M * 5e-6, _M / 2 * 1.001e-6, _SHARE * 1.2e-7],
            [
                _M / 2 * 4 * 4e-3,
                _SHARE * 0.5 * 5e-3,
                _SHARE * 0.25 * 5e-3,
                _M / 2 * 0.25 * 4e-3,
                3 * 8 * 3e-3,
            ],
        ),
        (
            "hierarchical_fp16",
            [_M * 1e-5, _M / 2 * 1.001e-6 + _M * 5e-6, _SHARE * 1.2e-7],
            [
                _M / 2 * 2 * 4e-3,
                _SHARE * 0.5 * 5e-3,
                _SHARE * 0.25 * 5e-3,
                _M / 2 * 0.25 * 4e-3,
                3 * 8 * 3e-3,
            ],
        ),
    ],
)
def test_the_formula_of_a_topology(topology: str, work: list[float], sent: list[float]) -> None:
    costs = _TIERED if topology in INSIDE_BYTES else _APART
    [bucket] = buckets_of(ONEBIT, topology, [_M], {}, costs)
    found = tasks_of(bucket, costs)
    assert [task.seconds for task in found if not task.is_link] == pytest.approx(work)
    assert [task.seconds for task in found if task.is_link] == pytest.approx(sent)
    sums = ("ps", *INSIDE_BYTES)
    decoded = _M * (2e-8 if topology in sums else 3e-8 if topology == "allgather" else 1e-8)
    total = step_seconds([Choice("a", _M, ONEBIT, topology)], costs)
    assert total == pytest.approx(sum(work) + sum(sent) + decoded)


def test_whose_part_is_largest_is_waited_for() -> None:
    parts = tuple(Load(size, 1) for size in (10, 30, 20, 5))
    for topology, last in (
        ("ps", [3 * 30 * 0.5 * 2e-3, 30 * 1.4e-7, 3 * 30 * 0.25 * 3e-3]),
        ("ring", [30 * 1e-9, 3 * 30 * 0.5 * 3e-3]),
    ):
        found = tasks_of(Bucket(ONEBIT, topology, 0, parts), _APART)
        assert [task.seconds for task in found[-len(last) :]] == pytest.approx(last)


def test_what_was_computed_before_is_of_the_same_buckets() -> None:
    costs = profile(4, 1e8)
    kinds = [[Choice("a", 4 * CHUNK, ONEBIT, "ps", number)] for number in (1, 4)]
    model = Model(costs)
    found = [model.seconds(choices) for choices in (*kinds, *kinds)]
    assert found == 2 * [step_seconds(choices, costs) for choices in kinds]
    assert found[0] != found[1]


def test_groups_in_any_order_are_the_step_of_their_choices() -> None:
    """A search counts what it asks for, whether the model knew it or not."""
    costs = profile(4, 1e8)
    choices = [Choice("a", 300), Choice("b", 4 * CHUNK, ONEBIT, "ring", 2), Choice("c", 0)]
    backward = Backward.even(3, 0.1)
    model = Model(costs, backward)
    exact = model.group((None, EXACT), ((0, 300, 1), (2, 0, 1)))
    coded = model.group((ONEBIT, "ring"), ((1, 4 * CHUNK, 2),))
    assert model.seconds_of([coded, exact]) == step_seconds(choices, costs, backward)
    num_tasks = model.num_tasks
    assert model.seconds(choices) == model.seconds_of([exact, coded])
    assert model.num_tasks == 3 * num_tasks > 0


def test_the_formula_of_the_exact_sum() -> None:
    assert step_seconds([Choice("a", _M)], _APART) == pytest.approx(4 * _M * 1e-3)
    joined = step_seconds([Choice("a", 100), Choice("b", 200)], _APART)
    assert joined == pytest.approx(4 * 300 * 1e-3 + 300 * 5e-6)


def test_large_messages_go_in_rounds() -> None:
    """What a collective costs whatever it carries counts once per receiver, or once."""
    costs = dataclasses.replace(_APART, alltoall=Collective(1e-2, 1.0, 2e-3, 0.5))
    for size, rounds in ((_M, 3), (4 * 1000, 1)):
        [bucket] = buckets_of(ONEBIT, "ps", [size] if rounds == 3 else [1000] * 4, {}, costs)
        exchange, _ = [task for task in tasks_of(bucket, costs) if task.is_link]
        assert exchange.seconds == pytest.approx(rounds + 3 * size / _N * 0.5 * 2e-3)
        assert (exchange.cpu, exchange.delay) == (0.5, 1e-2)
    two = costs.for_ranks(2)
    [bucket] = buckets_of(ONEBIT, "ps", [_M], {}, two)
    exchange, _ = [task for task in tasks_of(bucket, two) if task.is_link]
    assert exchange.seconds == pytest.approx(two.alltoall.fixed + _M / 2 * 0.5 * 2e-3)


def test_binary_blocks_of_three_ranks() -> None:
    three = _APART.for_ranks(3)
    [bucket] = buckets_of(ONEBIT, "blocks", [_M], {}, three)
    # Halves inside the pair; meanwhile nobody hands on; then the third rank's half goes to each.
    sent = [task.seconds for task in tasks_of(bucket, three) if task.is_link]
    assert sent[-1] == pytest.approx(2 * _M / 2 * 0.5 * three.allgather.per_byte)
    assert sum(sent[:-1]) >= _M * 0.5 * three.alltoall.per_byte


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7, 8, 16])
def test_any_number_of_ranks_has_costs(num_ranks: int) -> None:
    costs = profile(num_ranks, 1e8)
    for topology in topologies(costs):
        choices = [Choice(str(size), size, ONEBIT, topology, 2) for size in (0, 1, CHUNK * 3)]
        assert 0 < step_seconds(choices, costs) < 10
    if num_ranks == 1:
        assert topologies(costs) == ()
        assert step_seconds([Choice("a", 7), Choice("b", 8, ONEBIT, "ps")], costs) == 0


def test_two_kinds_of_links() -> None:
    flat = profile(4, 1e8)
    tiered = dataclasses.replace(flat, tiers=_TIERED.tiers)
    assert set(topologies(tiered)) - set(topologies(flat)) == {"hierarchical", "hierarchical_fp16"}
    with pytest.raises(ConfigError, match="Received: hierarchical, and a profile of hosts with"):
        step_seconds([Choice("a", 8, ONEBIT, "hierarchical")], flat)
    # Flat ways cross from host to host, too: in `ps` one message inside, two between; the first hop
    # of a butterfly between, both ranks of a host at once, the second inside; a ring leaves a host
    # with one rank at a time.
    expected = {
        "ps": [_SHARE * 0.5 * (4e-3 + 2 * 5e-3), 3 * _SHARE * 0.25 * 3e-3],
        "butterfly": [_M / 2 * 0.5 * 5e-3, _M / 4 * 0.5 * 4e-3, 3 * _SHARE * 0.5 * 3e-3],
        "ring": [*[_SHARE * 0.5 * 2e-3] * 3, 3 * _SHARE * 0.5 * 3e-3],
    }
    for topology, sent in expected.items():
        [bucket] = buckets_of(ONEBIT, topology, [_M], {}, _TIERED)
        found = [task.seconds for task in tasks_of(bucket, _TIERED) if task.is_link]
        assert found == pytest.approx(sent)
    # Of other numbers of ranks: three on two hosts have no second slice, five have 2, 2 and 1.
    assert tiered.for_ranks(3).tiers is None
    assert tiered.for_ranks(5).tiers is None
    assert tiered.for_ranks(2).tiers is None
    assert tiered.for_ranks(1).tiers is None
    six = tiered.for_ranks(6).tiers
    assert six is not None
    assert (six.hosts, six.per_host, six.slices) == (3, 2, 2)
    assert six.between.per_byte == 5e-3
    assert tiered.for_ranks(6).alltoall.delay / flat.alltoall.delay == pytest.approx(5 / 3)
    late = Collective(1.0, 2.0, 5e-3)
    later = dataclasses.replace(tiered, tiers=Tiers(2, 2, 2, late, late)).for_ranks(6).tiers
    assert later is not None
    assert later.inside == later.between == Collective(5 / 3, 10 / 3, 5e-3)
    three = dataclasses.replace(_TIERED.tiers, per_host=3, slices=3)
    five = dataclasses.replace(flat, num_ranks=6, tiers=three).for_ranks(5).tiers
    assert five is not None
    assert (five.hosts, five.per_host, five.slices) == (2, 3, 2)


def test_unknown_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape(f"must have the costs of {DGC}")):
        step_seconds([Choice("a", 8, DGC, "ps")], profile(2, 1e8))
    for topology, num_ranks in (("hierarchical", 2), ("butterfly", 3)):
        with pytest.raises(ConfigError, match=f"must be one of .* Received: {topology}"):
            step_seconds([Choice("a", 8, ONEBIT, topology)], profile(num_ranks, 1e8))


@given(
    size=st.integers(1, 5 * CHUNK),
    num_ranks=st.integers(2, 9),
    speeds=st.tuples(st.floats(1e5, 1e10), st.floats(1e5, 1e10)),
    data=st.data(),
)
def test_a_faster_link_is_never_slower(
    size: int, num_ranks: int, speeds: tuple[float, float], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from([None, *topologies(profile(num_ranks, 1e8))]))
    choice = Choice("a", size) if kind is None else Choice("a", size, ONEBIT, kind)
    slow, fast = (step_seconds([choice], profile(num_ranks, one)) for one in sorted(speeds))
    assert fast <= slow * (1 + 1e-9)


def test_known_magnitudes() -> None:
    """VGG19 at 100 Mbit/s, four ranks: the wire alone needs 69 s exact, and 2.1 s as bits."""
    costs = profile(4, 12.5e6)
    exact = step_seconds([Choice("a", size) for size in VGG19], costs)
    assert exact == pytest.approx(1.5 * 4 * sum(VGG19) / 12.5e6, rel=0.01)
    bits = step_seconds([Choice("a", size, ONEBIT, "ps") for size in VGG19], costs)
    assert 1.5 * sum(VGG19) / 8 / 12.5e6 < bits < 2.4


def test_a_backward_pass_hides_what_is_ready_early() -> None:
    costs = profile(4, 1.25e8)
    choices = [Choice("a", CHUNK, ONEBIT, "ps", 1) for _ in range(40)]
    alone = step_seconds(choices, costs)
    beside = step_seconds(choices, costs, Backward.even(40, 1.0, on_cores=False))
    after = step_seconds(choices, costs, Backward((1.0,) * 40, on_cores=False))
    assert after == pytest.approx(1.0 + alone)
    assert 1.0 < beside < 1.0 + 0.7 * alone
    assert beside < step_seconds(choices, costs, Backward.even(40, 1.0)) < after


def test_profiles_as_files(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    costs = dataclasses.replace(
        profile(3, 1e7, codecs=(codec(ONEBIT, 0.125), codec(DGC, 0.065))),
        facts={"hosts": "a, b"},
        tiers=Tiers(2, 2, 2, Collective(1.0), Collective(2.0)),
    )
    costs.write(path)
    assert Profile.read(path) == costs
    text = path.read_text()
    for old, new, expected in (
        ("num_ranks: 3", "num_ranks: 0", r"yaml: `num_ranks` must be an integer in \[1, "),
        ("delay: 0.0005", "delay: -1.0", r"at `allreduce`: `delay` must be a number >= 0"),
        ("cpu: 0.0", "cpu: 1.5", r"at `allreduce`: `cpu` must be in \[0, 1\]\. Received: 1\.5"),
        ("each: 0.125", "each: .nan", r"at `codecs\[0\]\.packet`: `each` must .* Received: nan"),
        ("each: 0.125", "each: many", r"`codecs\[0\]\.packet\.each` must be of type float"),
        (f"'{DGC}'", ONEBIT, "must have each compressor once"),
        ("slices: 2", "slices: 1", r"at `tiers`: `slices` must be an integer in \[2, "),
        ("version: 3", "version: 9", "`version` must be 3. Received: 9"),
    ):
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ConfigError, match=expected):
            Profile.read(path)


def test_another_number_of_ranks() -> None:
    four = profile(4, 1e8, latency=3e-3)
    eight = four.for_ranks(8)
    assert eight.num_ranks == 8
    assert eight.facts["scaled"] == "from 4 ranks to 8"
    # Bytes cost what they cost; 7 peers instead of 3.
    assert eight.alltoall.per_byte == four.alltoall.per_byte
    assert eight.alltoall.delay == pytest.approx(four.alltoall.delay * 7 / 3)
    assert eight.allreduce.per_byte == pytest.approx(profile(8, 1e8).allreduce.per_byte)
    assert eight.broadcast.delay == pytest.approx(four.broadcast.delay * 3 / 2)
    assert four.for_ranks(4) is four
    assert four.for_ranks(1).allreduce == FREE
    with pytest.raises(ConfigError, match="measured by two ranks at least"):
        four.for_ranks(1).for_ranks(2)


@given(st.integers(2, 8), st.integers(1, 3), st.lists(st.floats(1e-9, 1e3), min_size=3, max_size=3))
def test_lines_are_found_again(count: int, factors: int, truth: list[float]) -> None:
    units = [[float((place + 1) ** power) for power in range(factors)] for place in range(count)]
    points = [
        (row, sum(one * each for one, each in zip(truth, row, strict=False))) for row in units
    ]
    found = fit(points)
    assert len(found) == factors
    assert all(one >= 0 for one in found)
    for row, value in points:
        told = sum(one * each for one, each in zip(found, row, strict=True))
        assert math.isclose(told, value, rel_tol=1e-4)


def test_noise_makes_no_negative_costs() -> None:
    assert fit([([1.0, 10.0], 2.0), ([1.0, 1000.0], 1.0)])[1] == 0
    assert fit([([1.0, 1.0], 1.0), ([1.0, 1000.0], 2000.0)])[0] == 0
