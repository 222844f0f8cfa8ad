# SPDX-License-Identifier: Apache-2.0
"""Reports from events: the numbers by hand."""

from typing import Any

import pytest

from tf_hips import report
from tf_hips.errors import ConfigError

SITES = ("west", "east")
NUM_ELEMENTS = 1000


def event(second: float, name: str, site: str, rank: int = 0, **values: Any) -> dict[str, Any]:
    facts = {"run": "r", "role": "worker", "site": site, "rank": rank}
    return {"time_us": int(second * 1e6), **facts, "event": name, **values}


def run_events(fingerprints: tuple[str, str] = ("f", "f")) -> list[dict[str, Any]]:
    events = []
    for site, fingerprint in zip(SITES, fingerprints, strict=True):
        events.append(event(1, "model", site, num_elements=NUM_ELEMENTS))
        events.append(event(2, "first_sync", site, sent=5000, received=100))
        events += [
            event(3 + number, "round", site, round=number, sent=150, received=160)
            for number in range(4)
        ]
        events += [event(4.5 + n, "epoch", site, epoch=n + 1, test_accuracy=0.5) for n in (0, 1)]
        events.append(event(8, "left", site, sent=5700, received=800))
        events.append(
            event(7, "result", site, test_accuracy=0.96, fingerprint=fingerprint, epoch=2)
        )
    facts = {"run": "r", "role": "global-server", "site": "s"}
    server = {**facts, "time_us": 3_500_000, "event": "round"}
    return sorted([*events, server], key=lambda e: e["time_us"])


def test_traffic_counts_both_ways_of_all_parties() -> None:
    traffic = report.traffic(run_events())
    assert traffic.measured[-1] == 2 * (5700 + 800)
    assert traffic.dense[-1] == 2 * 4 * (2 * 4 * NUM_ELEMENTS)
    assert traffic.rounds[-1] == 4
    assert traffic.ratio == traffic.dense[-1] / traffic.measured[-1]
    assert traffic.measured[0] == 5100
    assert traffic.dense[0] == 0
    assert list(traffic.measured) == sorted(traffic.measured)
    before_the_end = next(
        index for index, second in enumerate(traffic.seconds) if second == pytest.approx(7.0)
    )
    assert traffic.measured[before_the_end - 1] == 2 * (5100 + 4 * 310)


def test_bytes_are_those_of_all_processes_of_a_party() -> None:
    first = [event for event in run_events() if event["site"] == "west"]
    before = [event(0, "joined", "west"), *(one for one in first if one["event"] != "left")]
    after = [
        event(10, "joined", "west"),
        event(11, "first_sync", "west", sent=20, received=30),
        event(12, "round", "west", round=4, sent=150, received=160),
    ]
    killed = report.traffic([*before, *after])
    assert killed.measured[-1] == 5100 + 4 * 310 + 50 + 310
    left = report.traffic([*before, *after, event(13, "left", "west", sent=200, received=200)])
    assert left.measured[-1] == 5100 + 4 * 310 + 400
    assert left.dense[-1] == killed.dense[-1] == 5 * 8 * NUM_ELEMENTS


def test_summary_has_the_lowest_accuracy_and_compares_all_replicas() -> None:
    events = run_events()
    same = report.summarise(events)
    assert same.are_replicas_identical
    assert set(same.fingerprints) == {"west/worker0", "east/worker0"}
    assert same.accuracy == 0.96
    assert same.seconds == pytest.approx(7.0)
    assert not report.summarise(run_events(("f", "g"))).are_replicas_identical


def test_epochs_are_those_of_one_worker() -> None:
    assert report.epochs(run_events()) == [(4_500_000, 0.5), (5_500_000, 0.5)]
    assert report.epochs([]) == []


@pytest.mark.parametrize("name", ["result", "model", "round"])
def test_a_missing_event_is_named(name: str) -> None:
    kept = {"model": ("result",), "result": (), "round": ("result", "model")}[name]
    events = [e for e in run_events() if e["event"] in kept and e["role"] == "worker"]
    with pytest.raises(ConfigError, match=f"`{name}"):
        report.summarise(events)


def test_a_folder_may_hold_older_runs() -> None:
    alone = run_events()
    older = [
        {**e, "run": "older", "time_us": e["time_us"] - 5_000_000, "fingerprint": "other"}
        for e in alone
    ]
    both = sorted([*older, *alone], key=lambda e: e["time_us"])
    assert report.summarise(both) == report.summarise(alone)
    assert report.traffic(both) == report.traffic(alone)
    assert report.epochs(both) == report.epochs(alone)


def test_a_run_is_that_of_workers() -> None:
    alone = run_events()
    evaluation = event(99, "evaluation", "local", step=5) | {"run": "local", "role": "evaluator"}
    assert report.newest_run([*alone, evaluation]) == alone
    assert report.newest_run([evaluation]) == [evaluation]
