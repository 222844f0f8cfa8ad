# SPDX-License-Identifier: Apache-2.0
"""Simulated rounds beside what they must be, computed by hand or by a loop over events."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_hips import cli, simulation
from tf_hips.errors import ConfigError
from tf_hips.simulation import events
from tf_hips.simulation.description import Description, Group, Method, Server, Traffic
from tf_hips.simulation.sites import Sites

FP32 = Traffic(parameters=1_000_000)  # 4 MB and a frame, 12 bytes of prefix
PACKET = 4_000_000 + 16 + 16

YAML = """
version: 1
seed: 3
rounds: 6
model: {parameters: 1000000, compression: error_feedback(onebit)}
server: {up_mbps: 1000, down_mbps: 1000}
methods:
  - {name: sync}
  - {name: fedavg, steps: 10}
  - {name: esync}
  - {name: esync-compat, epsilon: 0.5}
  - {name: fedbuff, steps: 10, k: 5}
groups:
  - {name: gpu, count: 30, step_s: 0.05, spread: 0.2, jitter: 0.1, up_mbps: 20, down_mbps: 100, latency_ms: 20}
  - {name: cpu, count: 10, step_s: 1.0, spread: 0.2, jitter: 0.1, up_mbps: 5, down_mbps: 20, latency_ms: 40}
"""  # noqa: E501


def of(*groups: Group, model: Traffic = FP32, **more: Any) -> Description:
    return Description(model, groups, **more)


def play(description: Description, name: str, **more: Any) -> simulation.Result:
    method = Method(name, **more)
    (result,) = simulation.simulate(dataclasses.replace(description, methods=(method,)))
    return result


UNEVEN = of(Group("slow", 1, 2.0), Group("fast", 1, 0.125), rounds=8)


def test_sync_waits_for_the_slowest() -> None:
    found = play(UNEVEN, "sync")
    assert found.round_s == pytest.approx(2.0)
    assert found.compute_share == pytest.approx(2.125 / 4)
    assert found.idle_share == pytest.approx(1.875 / 4)
    assert found.steps_per_s == pytest.approx(1.0)
    assert (found.rounds, found.up_bytes, found.down_bytes) == (5, 2 * PACKET, 2 * PACKET)


def test_fixed_steps_wait_as_long_for_each_step() -> None:
    found = play(UNEVEN, "fedavg", steps=10)
    assert found.round_s == pytest.approx(20.0)
    assert found.idle_share == pytest.approx(1.875 / 4)


def test_esync_keeps_both_at_work() -> None:
    found = play(UNEVEN, "esync", pace="slowest_steps=1,most_slowest_steps=1,margin=0")
    assert (found.least_steps, found.most_steps) == (1, 16)
    assert found.round_s == pytest.approx(2.0)
    assert found.idle_share == pytest.approx(0.0, abs=1e-9)
    compat = play(UNEVEN, "esync-compat", epsilon=0.5)
    assert (compat.least_steps, compat.most_steps) == (1, 12)  # 1.5 / .125
    assert compat.idle_share == pytest.approx(0.5 / 4)


def test_the_paper_s_rule_collapses_with_clocks_and_small_steps() -> None:
    small = of(Group("slow", 1, 0.4), Group("fast", 3, 0.03), rounds=8)
    assert play(small, "esync-compat").most_steps == 1
    assert play(small, "esync").idle_share < 0.03
    right = of(Group("slow", 1, 3.5), Group("fast", 3, 0.03), rounds=8)
    idle_share = play(right, "esync-compat").idle_share
    for seed in range(20):
        slow = Group("slow", 1, 3.5, clock_s=5.0)
        skewed = of(slow, Group("fast", 3, 0.03), rounds=8, seed=seed)
        clock_s = Sites(skewed, 0).clock_s[0]
        found = play(skewed, "esync-compat")
        if clock_s < -3.5:
            assert found.most_steps == 1  # SSGD
        elif clock_s < -0.5:
            assert found.idle_share > 1.5 * idle_share
        assert play(skewed, "esync") == play(right, "esync")


def test_links_are_part_of_a_round() -> None:
    # 4 MB at 32 Mbit/s: 1 s up; at 64 Mbit/s: .5 s down; 10 ms each way.
    group = Group("all", 4, 0.5, up_mbps=32, down_mbps=64, latency_ms=10)
    found = play(of(group, rounds=4), "sync")
    assert found.round_s == pytest.approx(2.02, rel=1e-4)
    assert found.transfer_share == pytest.approx(1.52 / 2.02, rel=1e-4)
    # The server's link carries one after the other: 4 x .25 s up, and down for all of them.
    shared = play(of(group, rounds=4, server=Server(128, 128)), "sync")
    assert shared.round_s == pytest.approx(1.0 + 0.5 + 1.0 + 0.02, rel=1e-4)


def test_links_that_take_no_time_are_not_less_than_nothing() -> None:
    for seed in range(20):  # rounding decides
        group = Group("all", 2, 0.1, spread=0.3)
        assert play(of(group, rounds=9, seed=seed), "sync").transfer_share >= 0


def test_what_is_no_step_and_no_byte_is_part_of_a_round() -> None:
    found = play(of(Group("all", 2, 0.5, overhead_ms=250), rounds=4), "sync")
    assert found.round_s == pytest.approx(0.75)
    assert found.transfer_share == pytest.approx(1 / 3)


def test_a_question_before_every_step_costs_a_journey_each_way() -> None:
    near = of(Group("slow", 1, 3.5), Group("fast", 1, 0.03), rounds=5)
    far = of(Group("slow", 1, 3.5, latency_ms=50), Group("fast", 1, 0.03, latency_ms=50), rounds=5)
    assert play(near, "esync-compat").most_steps in (99, 100)
    assert play(far, "esync-compat").most_steps < 35  # .13 s a step instead of .03
    assert play(far, "esync").idle_share < 0.03


def test_esync_makes_rounds_long_where_links_are_slow() -> None:
    group = Group("all", 4, 0.01, up_mbps=32, down_mbps=64)
    found = play(of(group, rounds=6), "esync")
    assert found.transfer_share <= 0.1011  # of 99 % of the round
    assert found.least_steps == pytest.approx(13.5 / 0.01, rel=0.05)  # 1.5 s is a tenth of 15 s


def test_late_sites_are_told_to_stop() -> None:
    """Steps that vary much: early stops are what bounds a round."""
    wild = of(Group("all", 40, 1.0, jitter=1.0), rounds=30)
    paced = play(wild, "esync", pace="slowest_steps=8,most_slowest_steps=8,deadline=1.05")
    fixed = play(wild, "fedavg", steps=8)
    assert paced.idle_share < 0.7 * fixed.idle_share
    assert paced.steps_per_s > 1.2 * fixed.steps_per_s
    assert paced.least_steps < 8


def test_fedbuff_waits_for_nobody() -> None:
    found = play(UNEVEN, "fedbuff", steps=4, k=2)
    # 16 updates of the fast one to each of the slow one, of .5 s and 8 s.
    assert found.idle_share == 0
    assert found.compute_share == pytest.approx(1.0, abs=0.01)
    assert found.round_s == pytest.approx(2 / (1 / 0.5 + 1 / 8), rel=0.01)
    assert found.up_bytes == 2 * PACKET
    # Two updates of the fast one make a version, which it has; the slow one's is 8 versions old.
    assert found.staleness == pytest.approx(8 / 17, rel=0.1)


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.5])
def test_fedbuff_is_not_judged_by_its_first_burst(jitter: float) -> None:
    """More sites than updates of all counted steps of the server, and all of them equal."""
    found = play(of(Group("all", 300, 0.1, jitter=jitter), rounds=20), "fedbuff", steps=20, k=10)
    assert found.steps_per_s == pytest.approx(300 / 0.1, rel=0.02)
    assert found.round_s == pytest.approx(10 * 20 / 3000, rel=0.02)
    assert found.compute_share == pytest.approx(1.0)
    # A site's update is as old as what the others have sent meanwhile, one update each.
    assert found.staleness == pytest.approx(29.9, abs=0.1)
    assert found.rounds * 10 >= 10 * 300


def test_fedbuff_does_not_depend_on_how_many_rounds_are_asked_for() -> None:
    groups = (Group("gpu", 30, 0.05, 0.3, 0.1), Group("cpu", 10, 1.0, 0.3, 0.2))
    few, many = (play(of(*groups, rounds=one), "fedbuff", steps=10, k=5) for one in (4, 20_000))
    assert many.rounds == 20_000
    assert few.round_s == pytest.approx(many.round_s, rel=0.02)
    assert few.staleness == pytest.approx(many.staleness, rel=0.05)


@pytest.mark.parametrize(("sites", "k", "jitter"), [(1, 1, 10.0), (1, 7, 0.0), (3, 100, 0.0)])
def test_fedbuff_of_few_sites(sites: int, k: int, jitter: float) -> None:
    description = of(Group("all", sites, 1.0, jitter=jitter), rounds=4)
    found = play(description, "fedbuff", steps=1, k=k)
    assert found.seconds > 0
    assert found.compute_share == pytest.approx(1.0)
    if not jitter:
        assert found.steps_per_s == pytest.approx(sites, rel=0.01)


def test_fedbuff_does_not_wait_for_who_hardly_ever_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST_UPDATES", 2000)
    found = play(of(Group("all", 5, 1.0), Group("off", 1, 1e9)), "fedbuff", steps=2, k=5)
    assert found.rounds == 400
    assert found.steps_per_s == pytest.approx(5.0)


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=12),
    st.floats(0.1, 100),
    st.floats(0.1, 100),
)
def test_the_shared_link_is_a_queue(ready: list[float], server: float, own: float) -> None:
    description = of(Group("all", len(ready), 1.0, up_mbps=own), server=Server(down_mbps=server))
    sites = Sites(description, 0)
    one_by_one = np.zeros(len(ready))
    for site in np.argsort(ready, kind="stable"):
        one_by_one[site] = sites.arrives(int(site), ready[site])
    np.testing.assert_allclose(sites.arrived(np.array(ready)), one_by_one)


@given(st.integers(1, 200), st.floats(0, 2), st.floats(0, 1.5))
def test_steps_that_are_cut_end_with_the_one_in_progress(
    steps: int, jitter: float, share: float
) -> None:
    sites = Sites(of(Group("all", 1, 0.5, jitter=jitter)), 0)
    total = float(sites.lasting(np.array([steps]))[0])
    done, lasts = sites.stopped(0, steps, total, share * total)
    assert 1 <= done <= steps
    assert lasts <= total * (1 + 1e-9)
    assert lasts >= min(share, 1.0) * total * (1 - 1e-9)
    if share >= 1:
        assert done == steps


def test_sites_and_steps_have_the_moments_that_were_asked_for() -> None:
    sites = Sites(of(Group("all", 40_000, 2.0, spread=0.5, jitter=0.4)), 0)
    logs = np.log(sites.step_s)
    assert np.mean(logs) == pytest.approx(np.log(2.0), abs=0.01)
    assert np.std(logs) == pytest.approx(0.5, abs=0.01)
    drawn = sites.lasting(np.full(40_000, 9)) / sites.step_s
    assert np.mean(drawn) == pytest.approx(9.0, abs=0.05)
    assert np.std(drawn) == pytest.approx(0.4 * 3, abs=0.05)


def test_a_description_gives_the_same_results_again(tmp_path: Path) -> None:
    file = tmp_path / "sites.yaml"
    file.write_text(YAML)
    description = Description.read(file)
    results = simulation.simulate(description)
    assert simulation.simulate(description) == results
    by_name = {one.method.split()[0]: one for one in results}
    assert by_name["esync"].idle_share < 0.08
    assert by_name["esync"].idle_share < by_name["esync-compat"].idle_share
    assert by_name["esync"].steps_per_s > 5 * by_name["sync"].steps_per_s
    # One bit an element, two means and a prefix for the one chunk.
    assert by_name["sync"].up_bytes == pytest.approx(40 * 125_000, rel=0.001)
    for one in results:
        total = one.compute_share + one.transfer_share + one.idle_share
        assert total == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_sites_take_less_than_a_minute() -> None:
    groups = (
        Group("gpu", 3000, 0.05, 0.3, 0.1, 20, 100, 20),
        Group("cpu", 5000, 0.3, 0.3, 0.2, 10, 50, 40),
        Group("phone", 2000, 1.0, 0.5, 0.3, 5, 20, 60),
    )
    methods = (
        Method("sync"),
        Method("fedavg"),
        Method("esync"),
        Method("fedbuff", k=1000),
    )
    description = of(*groups, rounds=4, methods=methods, server=Server(10_000, 10_000))
    began = time.process_time()  # others may be at work beside it
    results = simulation.simulate(description)
    assert time.process_time() - began < 60
    assert results[2].idle_share < 0.25 * results[1].idle_share


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    file, out = tmp_path / "sites.yaml", tmp_path / "out.json"
    file.write_text(YAML)
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", str(file), "--json", str(out)])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["method", "round", "95"]
    told = json.loads(out.read_text())
    assert [line.split()[0] for line in lines[1:6]] == [
        one["method"].split()[0] for one in told["methods"]
    ]
    assert f"{told['methods'][0]['idle_share']:.1%}" in lines[1]
    assert lines[6].startswith("40 sites, 3 rounds of each method after the first three, ")
    assert f"{told['methods'][4]['rounds']} steps of the server with fedbuff 10, k 5" in lines[6]
    with pytest.raises(SystemExit):
        cli.main(["simulate", str(file), "--json", "-"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["methods"] == told["methods"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 1", "version: 2", "`version` must be 1"),
        ("step_s: 0.05", "step_s: 0", "`step_s` must be > 0"),
        ("count: 30", "count: 0", "`count` must be from 1"),
        ("count: 30", "cuont: 30", "Did you mean `count`"),
        ("name: sync", "name: async", "`name` must be one of sync"),
        ("parameters: 1000000", "parameters: 0", "`parameters` must be from 1"),
        ("parameters: 1000000, ", "", "Either `parameters` or `shapes`"),
        ("parameters: 1000000", "shapes: [[5], [-3, 4]]", r"`shapes\[1\]` must be sizes from 0"),
        (
            "parameters: 1000000",
            "shapes: [[1099511627776], [1]]",
            r"`shapes` must be of at most 2\^40 elements in all\. Received: shapes=1099511627777",
        ),
        ("count: 30", "count: 100000", "`groups` must be at most 100000 sites for esync-compat"),
        ("onebit", "onebti", "onebit"),
        ("rounds: 6", "rounds: 2", "`rounds` must be from 4"),
        ("up_mbps: 20", "up_mbps: .inf", "`up_mbps` must be > 0 and finite"),
        ("spread: 0.2", "spread: .nan", "`spread` must be from 0 to 5"),
        ("name: esync}", "name: esync, pace: margn=1}", "`pace`: a pace must have"),
    ],
)
def test_descriptions_that_are_wrong(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in YAML
    file = tmp_path / "sites.yaml"
    file.write_text(YAML.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        Description.read(file)
