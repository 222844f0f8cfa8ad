# SPDX-License-Identifier: Apache-2.0
"""How often rules have chosen each peer's row: from events to shares, tables, pages, figures."""

import dataclasses
import json
import subprocess
import sys

import pytest

from tests.report.test_peers import of_server
from tests.report.test_runs import event, trained, write_events
from tf_hips.report import choices, page, peer_figures, runs
from tf_hips.report.choices import Share

SITES = ["east", "north", "west"]


def chosen():
    """Two shards tell of ten rounds: west is chosen in nine, north in one, east never."""
    events = trained()
    for number in range(10):
        among = SITES if number else SITES[1:]
        sites = ["west"] if number != 4 else ["north"]
        for second in (20, 21):
            told = {"round": number, "sites": sites, "among": among}
            events.append(of_server(second + number, "rows_chosen", **told))
    return events


def test_shares_by_hand():
    told = choices.shares(chosen())
    by = told[0].by
    assert by.startswith("global-server")
    assert told == (
        Share("west", 9, 10, by),
        Share("north", 1, 10, by),
        Share("east", 0, 9, by),
    )
    assert [one.share for one in told] == [0.9, 0.1, 0.0]
    assert choices.shares(trained()) == ()


def test_ranks_have_steps_and_each_event_counts():
    # As `strategies.refusals` writes it: one for each list of gradients of a step.
    ranks = ["rank 0", "rank 1"]
    events = [
        event(20 + number, "rows_chosen", step=number // 2, sites=ranks[:1], among=ranks)
        for number in range(4)
    ]
    assert [(one.peer, one.chosen, one.of) for one in choices.shares(events)] == [
        ("rank 0", 4, 4),
        ("rank 1", 0, 4),
    ]


@pytest.mark.heavy
def test_the_page_the_numbers_and_the_figure_have_them(tmp_path):
    [run] = runs.read(write_events(tmp_path / "a", chosen()))
    page.write([run], tmp_path / "out", "Chosen")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<h2>Chosen rows</h2>" in text
    assert "<td>west</td><td>9</td><td>10</td><td>90%</td>" in text
    assert '<figure id="chosen">' in text
    [facts] = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [(one["peer"], one["chosen"], one["of"]) for one in facts["chosen"]] == [
        ("west", 9, 10),
        ("north", 1, 10),
        ("east", 0, 9),
    ]
    [axes] = peer_figures.draw([run])["chosen"].axes
    assert [one.get_text() for one in axes.get_yticklabels()] == ["west", "north", "east"]
    assert [one.get_text() for one in axes.texts] == ["9 of 10", "1 of 10", "0 of 9"]


def test_of_too_many_peers_both_ends_are_drawn(tmp_path):
    [run] = runs.read(write_events(tmp_path / "a", chosen()))
    crowd = tuple(Share(f"w{number}", number, 40, "it") for number in range(40, -1, -1))
    [axes] = peer_figures.draw([dataclasses.replace(run, shares=crowd)])["chosen"].axes
    labels = [one.get_text() for one in axes.get_yticklabels()]
    assert len(labels) == 30 and (labels[0], labels[-1]) == ("w40", "w0")
    assert axes.get_xlabel().endswith("; 11 between them are not shown")


def test_the_command_prints_a_table(tmp_path):
    write_events(tmp_path / "a", chosen())
    done = subprocess.run(
        [sys.executable, "-m", "tf_hips.cli", "summary", "a"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [line] = [one for one in done.stdout.splitlines() if " east " in f" {one} "]
    assert line.split()[-5:-1] == ["0", "9", "0%", "global-server"]
