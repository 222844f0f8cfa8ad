# SPDX-License-Identifier: Apache-2.0
"""How a run has ended, from its events, and that tables say it of one that is not whole."""

import pytest

from tests.report.test_runs import event, write_events
from tf_hips.report import ends, page, runs

SETUP = {"mode": "sync", "network": "lenet", "dataset": "digits", "steps": 400}
LOST = "PeerError: The run has ended. Site `b` was lost: no call for 120 s"


def begun(site: str, at: float = 10.0) -> list[dict]:
    return [
        event(at, "joined", site, workers=[1, 1]),
        event(at + 1, "setup", site, **SETUP),
        event(at + 2, "round", site, round=10, sent=1, received=1, seconds=0.1),
    ]


def left(site: str, reason: str | None, at: float = 20.0) -> dict:
    return event(at, "left", site, reason=reason, sent=1, received=1)


def ended(site: str, at: float = 19.0) -> list[dict]:
    return [event(at, "result", site, test_accuracy=0.5), left(site, None, at + 1)]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([*begun("a"), *begun("b"), *ended("a"), *ended("b")], "ended"),
        ([*begun("a"), *begun("b")], "not ended: step 11/400"),
        ([*begun("a"), *begun("b"), left("a", LOST)], f"failed: {LOST}"),
        # The first reason is why the others failed, too.
        ([*begun("a"), *begun("b"), left("a", "x", 21), left("b", "y", 20)], "failed: y"),
        ([*begun("a"), *begun("b"), *ended("a")], "b not ended: step 11/400"),
        ([*begun("a"), *begun("b"), *ended("a"), left("b", "OSError: x")], "b failed: OSError: x"),
        # It failed, and came back.
        ([*begun("a"), left("a", "x", 13), *begun("a", 14), *ended("a")], "ended"),
        ([*begun("a"), *ended("a"), *begun("a", 30)], "not ended: step 11/400"),
        # Scripts without a trainer.
        ([event(1, "joined"), left("west", None)], "ended"),
        ([event(1, "joined"), left("west", "x")], "failed: x"),
        ([event(1, "joined")], "not ended"),
        ([event(1, "epoch", test_accuracy=0.5)], None),
    ],
)
def test_events_say_how_a_run_has_ended(tmp_path, events, state):
    [run] = runs.read(write_events(tmp_path, sorted(events, key=lambda one: one["time_us"])))
    assert run.state == state
    assert runs.facts(run)["state"] == state


def test_a_table_says_it_where_not_all_are_whole(tmp_path):
    write_events(tmp_path / "whole", [*begun("a"), *ended("a")])
    write_events(tmp_path / "failed", [*begun("a"), left("a", LOST)])
    whole, failed = (runs.read(tmp_path / name)[0] for name in ("whole", "failed"))
    assert "state" not in page.table([whole])[0]
    head, *rows = page.table([whole, failed])
    assert (head[0], head[-1]) == ("run", "state")
    first, second = (row[-1] for row in rows)
    assert first == "ended"
    assert second.startswith("failed: PeerError: The run has ended. Site `b`")
    assert len(second) <= 60


def test_each_event_is_looked_at_a_few_times_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    of_site = ends._of_site

    def counting(own: list[dict], setup: dict) -> object:
        looked.append(len(own))
        return of_site(own, setup)

    monkeypatch.setattr(ends, "_of_site", counting)
    rounds = [
        event(12 + n, "round", site, round=n, sent=1, received=1, seconds=0.1)
        for n in range(300)
        for site in ("a", "b")
    ]
    events = [*begun("a"), *begun("b"), *rounds]
    assert ends.state(events, {**SETUP}) == "not ended: step 300/400"
    assert sum(looked) == len(events)
