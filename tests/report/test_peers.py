# SPDX-License-Identifier: Apache-2.0
"""Which peers were refused or outvoted: from events to lines, tables, pages and figures."""

import dataclasses
import itertools
import json
import subprocess
import sys

import pytest

from tests.report.test_runs import event, trained, write_events
from tf_hips.errors import ConfigError
from tf_hips.report import page, peer_figures, peers, runs


def of_server(second, name, **values):
    return {**event(second, name, "-", **values), "role": "global-server"}


def marked():
    """A run in which two peers were caught, by all who can catch one."""
    events = trained()
    for step in range(40):
        who = f"worker {step % 2}"
        events.append(event(20 + step / 10, "outvoted", who=who, round=step))
    events += [
        event(25, "row_refused", who="worker 1", round=9, reason="NaN at\nelement 17"),
        of_server(26, "row_refused", child=0, child_site="west", round=3, reason="norm 9e9"),
        of_server(26, "norm_absurd", child=0, child_site="west", round=3, reason="norm 9e9"),
        of_server(26, "proven", sites=["west", "east"], round=4),
        of_server(26, "passed_over", sites=["east"], round=5),
        # Every worker tells of the refusal of a loop; it is one.
        *(
            event(27, "update_refused", site, number=12, who="party `east`")
            for site in ("west", "east")
        ),
        event(28, "update_refused", "west", number=13, who="party `east`"),
        of_server(29, "call_refused", code="INVALID", reason="too long", peer="ipv4:10.0.0.7:5531"),
        of_server(
            30, "call_refused", code="INVALID", reason="too short", peer="ipv4:10.0.0.7:5532"
        ),
        of_server(31, "turned_away", who="10.0.0.7"),
        of_server(32, "round", round=3, child=0, child_site="west"),
    ]
    return events


def test_lines_by_hand():
    lines = {(one.peer, one.kind): one for one in peers.lines(peers.marks(marked()))}
    assert {key: one.times for key, one in lines.items()} == {
        ("worker 0", "outvoted"): 20,
        ("worker 1", "outvoted"): 20,
        ("worker 1", "row refused"): 1,
        ("west", "row refused"): 1,
        ("west", "absurd norm"): 1,
        ("west", "proven to lie"): 1,
        ("east", "proven to lie"): 1,
        ("east", "asked in vain"): 1,
        ("east", "update refused"): 2,
        ("calls from 10.0.0.7", "call refused"): 2,
        ("10.0.0.7", "turned away"): 1,
    }
    assert lines["east", "update refused"].rounds == (12, 13)
    assert lines["worker 1", "row refused"].reason == "NaN at element 17"
    assert lines["calls from 10.0.0.7", "call refused"].reason == "too short"
    assert lines["calls from 10.0.0.7", "call refused"].rounds == ()
    assert "(global-server" in lines["west", "row refused"].by
    assert lines["worker 0", "outvoted"].by.startswith("the majority of its group")


def test_a_robust_rule_over_ranks_tells_of_each_rank():
    # As `strategies.refusals` writes it: one event of a step for all who are refused.
    first = {"rank": 1, "reason": "NaN or infinity in gradient 0 (kernel) and 1 more"}
    events = [
        *trained(),
        event(20, "rows_refused", step=4, rule="median(f=2)", rows=[first]),
        event(
            21,
            "rows_refused",
            step=5,
            rule="median(f=2)",
            rows=[first, {"rank": 3, "reason": "long"}],
        ),
    ]
    lines = {one.peer: one for one in peers.lines(peers.marks(events))}
    assert set(lines) == {"rank 1", "rank 3"}
    assert {one.kind for one in lines.values()} == {"row refused"}
    assert (lines["rank 1"].times, lines["rank 1"].rounds) == (2, (4, 5))
    assert lines["rank 1"].reason.startswith("NaN or infinity in gradient 0")
    assert (lines["rank 3"].times, lines["rank 3"].reason) == (1, "long")
    assert all(one.by.startswith("a robust rule") for one in lines.values())


def test_a_party_that_differs_counts_once_for_each_thing_however_many_tell():
    # As `strategies.agreeing` writes it: each worker tells.
    events = trained()
    for epoch in (1, 2):
        what, reason = f"the model after epoch {epoch}", "it is not that of most parties"
        for site in ("west", "east"):
            told = {"what": what, "sites": ["north", "south"], "reason": reason}
            events.append(event(20 + epoch, "parties_differ", site, **told))
    lines = {one.peer: one for one in peers.lines(peers.marks(events))}
    assert set(lines) == {"north", "south"}
    for one in lines.values():
        assert (one.kind, one.times, one.rounds) == ("differs", 2, ())
        assert one.by.startswith("most parties, in what must be equal on all (")
        assert one.reason == "the model after epoch 2: it is not that of most parties"


def test_a_party_is_one_peer_whoever_tells_of_it():
    events = [
        # `strategies.withheld`, the server and a loop, whose workers are peers of their own.
        event(20, "update_refused", number=1, who="party `party4`"),
        of_server(21, "row_refused", child=4, child_site="party4", round=1),
        event(22, "update_refused", number=2, who="worker 1 of party `party4`"),
    ]
    assert peers.names(peers.marks(events)) == ["party4", "worker 1 of party `party4`"]


def test_workers_of_two_parties_that_have_one_name_are_two_peers():
    def told(second, site, name, **values):
        return {**event(second, name, site, **values), "role": "server"}

    events = [
        of_server(18, "join", child=0, child_site="west"),
        *(told(19, "west", "join", child=place, child_site=f"w{place}") for place in range(3)),
        *(told(19, "east", "join", child=place, child_site=f"w{place}") for place in range(2)),
        # Both servers count their own rounds.
        told(21, "west", "row_refused", child=1, child_site="w1", round=3, reason="norm 9e9"),
        told(22, "east", "row_refused", child=1, child_site="w1", round=3, reason="norm 7e8"),
        told(23, "west", "outvoted", sites=["w1", "w2"], round=4),
        of_server(24, "row_refused", child=0, child_site="west", round=5, reason="norm 2e9"),
    ]
    lines = {(one.peer, one.kind): one for one in peers.lines(peers.marks(events))}
    assert {key: (one.times, one.reason) for key, one in lines.items()} == {
        ("west/w1", "row refused"): (1, "norm 9e9"),
        ("east/w1", "row refused"): (1, "norm 7e8"),
        ("west/w1", "outvoted"): (1, ""),
        ("w2", "outvoted"): (1, ""),  # of one server only
        ("west", "row refused"): (1, "norm 2e9"),
    }


def test_servers_that_share_a_model_tell_of_one_peer():
    events = [
        {**of_server(20, name, child=0, child_site="west", round=3, reason="norm 9e9"), "rank": k}
        for name in ("join", "row_refused")
        for k in range(2)
    ]
    assert [(one.peer, one.times) for one in peers.lines(peers.marks(events))] == [("west", 1)]


def test_no_two_kinds_are_drawn_alike(found):
    marks = tuple(peers.Mark("west", kind, 3, "its group", "") for kind in peers.NAMES)
    drawn = peer_figures.draw([dataclasses.replace(found[0], marks=marks)])
    bars = drawn["peers"].axes[0].patches
    lines = drawn["peers-rounds"].axes[0].get_lines()
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in bars}) == len(peers.NAMES)
    assert len({(one.get_color(), one.get_marker()) for one in lines}) == len(peers.NAMES)


def test_a_run_without_such_events_has_none(tmp_path):
    [run] = runs.read(write_events(tmp_path / "a", trained()))
    assert run.marks == ()
    assert runs.facts(run)["peers"] == []
    assert peer_figures.draw([run]) == {}
    assert len(page.peer_table([run])) == 1


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_events(root / "a", marked())
    write_events(
        root / "b", [*trained("async"), event(27, "update_refused", number=3, who="party `w`")]
    )
    return runs.read_all([root])


@pytest.mark.heavy
def test_both_figures_have_room_for_all_their_words(found):
    drawn = peer_figures.draw(found)
    assert set(drawn) == {"peers", "peers-rounds"}
    for name, figure in drawn.items():
        figure.canvas.draw()
        [axes] = figure.axes
        labels = [one for one in axes.get_yticklabels() if one.get_text()]
        assert len(labels) == 7
        assert labels[-1].get_text() == "async\nw"
        legend = [one.get_text() for one in axes.get_legend().get_texts()]
        assert legend == peers.kinds([mark for run in found for mark in run.marks])
        texts = [*labels, *axes.texts, axes.xaxis.label, *axes.get_legend().get_texts()]
        for box in (one.get_window_extent() for one in texts):
            assert figure.bbox.x0 <= box.x0, name
            assert box.x1 <= figure.bbox.x1 + 1, name
        rows = sorted((box.y0, box.y1) for box in (one.get_window_extent() for one in labels))
        assert all(low[1] <= high[0] + 1 for low, high in itertools.pairwise(rows)), name
    counts = [one.get_text() for one in drawn["peers"].axes[0].texts]
    assert counts == ["21", "20", "4", "3", "2", "1", "1"]
    ticks = sum(len(line.get_xdata()) for line in drawn["peers-rounds"].axes[0].get_lines())
    with_round = [mark for run in found for mark in run.marks if mark.round is not None]
    assert ticks == len(with_round)


def test_a_page_of_a_long_run_has_no_more_marks_than_a_figure_shows(found):
    one = dataclasses.replace(found[0].marks[0], peer="west", kind="row refused", reason="")
    rounds = range(30_000)
    marks = tuple(dataclasses.replace(one, round=number) for number in rounds)
    drawn = peer_figures.draw([dataclasses.replace(found[0], marks=marks)])
    [line] = drawn["peers-rounds"].axes[0].get_lines()
    drawn_at = line.get_xdata()
    assert 1000 < len(drawn_at) <= 2001
    widest = max(two - one for one, two in itertools.pairwise(drawn_at))
    assert drawn_at[0] == rounds[0]
    assert drawn_at[-1] > rounds[-1] - widest
    assert widest <= len(rounds) / 1000


def test_each_mark_is_looked_at_a_few_times_however_many_peers_there_are(found, monkeypatch):
    """Addresses from which calls were refused are peers, too."""
    looks = []

    class Watched(peers.Mark):
        def __getattribute__(self, name):
            looks.extend([name] * (name == "peer"))
            return super().__getattribute__(name)

    monkeypatch.setattr(peer_figures, "_MAX_ROWS", 2)
    crowd = tuple(Watched(f"p{n}", "call refused", None, "a server", "") for n in range(100))
    axes = peer_figures.draw([dataclasses.replace(found[0], marks=crowd)])["peers"].axes[0]
    assert axes.get_xlabel() == "times; 98 more are not shown"
    assert len(looks) < 10 * len(crowd)


def test_too_many_peers_are_counted_and_said(found):
    crowd = tuple(
        dataclasses.replace(found[0].marks[0], peer=f"worker {number}") for number in range(40)
    )
    drawn = peer_figures.draw([dataclasses.replace(found[0], marks=crowd)])
    axes = drawn["peers"].axes[0]
    assert len(axes.get_yticklabels()) == 30
    assert axes.get_xlabel() == "times; 10 more are not shown"


@pytest.mark.heavy
def test_the_page_and_the_numbers_have_them(found, tmp_path):
    page.write(found, tmp_path, "Peers")
    text = (tmp_path / "report.html").read_text()
    assert "<h2>Peers</h2>" in text
    assert "<td>east</td><td>update refused</td><td>2</td><td>12 to 13</td>" in text
    assert '<figure id="peers">' in text
    assert '<figure id="peers-rounds">' in text
    assert (tmp_path / "peers-rounds.png").read_bytes().startswith(b"\x89PNG")
    [first, _] = json.loads((tmp_path / "summary.json").read_text())
    assert first["peers"][0] == {
        **first["peers"][0],
        "peer": "worker 0",
        "kind": "outvoted",
        "times": 20,
    }


def test_the_command_prints_a_second_table(tmp_path):
    write_events(tmp_path / "a", marked())
    done = subprocess.run(
        [sys.executable, "-m", "tf_hips.cli", "summary", "a"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    [line] = [one for one in lines if "worker 1" in one and "row refused" in one]
    assert line.endswith("NaN at element 17") or "NaN at element 17 " in line
    assert any("found out by" in one for one in lines)


def test_the_log_of_a_server_alone_tells_of_its_peers(tmp_path):
    """Parties keep the logs of their workers."""
    told = [
        of_server(0, "listen", address="hub:7070", parties=["west", "east"], shard=[0, 1]),
        of_server(1, "join", child=0, child_site="west", workers=2),
        of_server(2, "join", child=1, child_site="east", workers=3),
        of_server(3, "join", child=1, child_site="east", workers=3, is_back=True),
        of_server(4, "rows_chosen", round=3, sites=["east"], among=["west", "east"]),
        of_server(5, "row_refused", child=0, child_site="west", round=4, reason="norm 9e9"),
    ]
    [run] = runs.read(write_events(tmp_path / "hub", told))
    assert (run.label, run.num_workers, run.seconds, run.workers) == ("hub", 5, 5.0, ())
    [line] = peers.lines(run.marks)
    assert (line.peer, line.kind, line.rounds) == ("west", "row refused", (4,))
    assert [(one.peer, one.chosen, one.of) for one in run.shares] == [
        ("east", 1, 1),
        ("west", 0, 1),
    ]
    wrote = {path.name for path in page.write([run], tmp_path / "report", "A run")}
    assert {"peers.png", "peers-rounds.png", "chosen.png", "report.html"} <= wrote
    assert json.loads((tmp_path / "report/summary.json").read_text())[0]["accuracy"] is None
    # Beside the logs of workers it is no run of its own.
    write_events(tmp_path / "all/hub", told)
    assert [one.num_workers for one in runs.read(tmp_path / "all")] == [5]
    write_events(tmp_path / "all/west", trained())
    assert [one.num_workers for one in runs.read(tmp_path / "all")] == [2]
    with pytest.raises(ConfigError, match="events of workers or servers"):
        runs.read(write_events(tmp_path / "other", told[1:]))
