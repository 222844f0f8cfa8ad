# SPDX-License-Identifier: Apache-2.0
"""What figures do with many runs, long names, and names that say nothing."""

import dataclasses
import warnings
import xml.dom.minidom

import pytest

from tests.report.test_runs import trained, write_events, write_tree
from tf_hips.report import canvas, figures, page, peer_figures, runs
from tf_hips.report.peers import Mark


def single(folder, label="local"):
    [run] = runs.read(write_events(folder, trained("local", sites=("local",))))
    return dataclasses.replace(run, label=label)


def assert_has_room(figure):
    """All words are inside, and what is drawn has most of the width."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "constrained_layout not applied"
        figure.canvas.draw()
    [axes] = figure.axes
    assert axes.bbox.width > 0.5 * figure.bbox.width
    assert axes.bbox.height > 1.5 * figure.dpi
    legend = axes.get_legend()
    for text in [*axes.get_yticklabels(), *(legend.get_texts() if legend else [])]:
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1 + 1


@pytest.mark.heavy
def test_the_legend_has_room_for_what_it_says_of_single_devices(tmp_path):
    one = single(tmp_path / "a")
    # Each is short; with "(one device)" three of them are wider than the figure.
    found = [
        dataclasses.replace(one, label=f"local, {name} on digits")
        for name in ("alexnet", "lenet", "vgg11")
    ]
    assert_has_room(figures.draw(found)["accuracy-iid"])


@pytest.mark.heavy
@pytest.mark.parametrize("letters", [45, 300])
def test_long_names_of_folders_have_room(tmp_path, letters):
    [run] = runs.read(write_events(tmp_path / "a", trained()))
    name = "2026-11-26-experiment-number-{}" + "-with-a-name" * (letters // 12)
    mark = Mark("a-peer-" * (letters // 7), "outvoted", 3, "its group", "")
    found = [
        dataclasses.replace(
            run, label=f"sync, dirichlet(0.3), {name.format(n)[:letters]}", marks=(mark,)
        )
        for n in range(3)
    ]
    drawn = {**figures.draw(found), **peer_figures.draw(found)}
    assert {"accuracy-iid", "throughput", "traffic", "time-share", "peers"} <= set(drawn)
    for figure in drawn.values():
        assert_has_room(figure)


def test_names_are_drawn_as_they_are(tmp_path):
    """matplotlib reads formulae between dollars, and hides names that begin with an underscore."""
    names = ("price $\\foo$", "5$ and 6$", "_old")
    [run] = runs.read(write_events(tmp_path, trained()))
    found = [dataclasses.replace(run, label=name, subject="$x$ on $y$") for name in names]
    drawn = [figures._of_accuracy(found)["accuracy-iid"], figures._of_bars(found)["throughput"]]
    for figure in drawn:
        figure.canvas.draw()
        [axes] = figure.axes
        legend = axes.get_legend()
        texts = legend.get_texts() if legend else axes.get_yticklabels()
        shown = [one._preprocess_math(one.get_text()) for one in texts]
        assert [(text.strip(), is_formula) for text, is_formula in shown] == [
            (name, False) for name in names
        ]
    odd = [dataclasses.replace(run, label=name) for name in ("bad\udcffname", "bell\x07")]
    figure = figures._of_accuracy(odd)["accuracy-iid"]
    text = page.svg(figure, "accuracy-iid")
    xml.dom.minidom.parseString(text)
    assert "<td>bad name</td>" in page.page(odd, {"accuracy-iid": text}, "T").encode().decode()
    title = drawn[0].get_suptitle()
    assert drawn[0]._suptitle._preprocess_math(title) == (
        "Test accuracy of $x$ on $y$, IID data",
        False,
    )


def test_a_long_text_keeps_its_ends():
    assert canvas.wrapped("sync, lenet on digits", 12) == "sync, lenet\non digits"
    assert canvas.wrapped("run\npeer", 12) == "run\npeer"
    lines = canvas.wrapped("first" + "x" * 100 + "last", 10).split("\n")
    assert len(lines) == 4
    assert max(map(len, lines)) == 10
    assert lines[0].startswith("first") and lines[1].endswith("...") and lines[-1].endswith("last")


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_events(tmp_path / name / "logs", trained())
    found = runs.read_all(["a/logs", "b/logs"])
    assert [run.label for run in found] == ["sync, a/logs", "sync, b/logs"]
    bars = figures.draw(found)["throughput"].axes[0].patches
    assert len({bar.get_facecolor() for bar in bars}) == 2
    # The same place twice.
    found = runs.read_all(["a/logs", "b/logs", tmp_path / "a/logs"])
    assert [run.label for run in found] == ["sync, a/logs (1)", "sync, b/logs", "sync, a/logs (2)"]
    # Scripts that say nothing of themselves are called as their folders.
    for name in ("a", "b"):
        events = [one for one in trained() if one["event"] != "setup"]
        write_events(tmp_path / "scripts" / name / "logs", events)
    found = runs.read_all(["scripts/a/logs", "scripts/b/logs", "scripts/a/logs"])
    assert [run.label for run in found] == ["a/logs (1)", "b/logs", "a/logs (2)"]
    monkeypatch.chdir("scripts/a/logs")
    assert [run.label for run in runs.read_all(["."])] == ["logs"]
    assert [run.label for run in runs.read_all([".", "../../b/logs"])] == ["a/logs", "b/logs"]


def test_no_two_runs_of_many_are_drawn_alike(tmp_path):
    [run] = runs.read(write_events(tmp_path / "a", trained()))
    one = single(tmp_path / "b")
    found = [run] * 9 + [one] * 9  # equal in all but their place
    lines = figures.draw(found)["accuracy-iid"].axes[0].get_lines()
    drawn = {(line.get_color(), str(line._dash_pattern)) for line in lines}
    assert len(drawn) == len(lines) == 18


def test_of_too_many_workers_both_ends_are_drawn(tmp_path, monkeypatch):
    assert (figures._MOST_ROWS, figures._MOST_LINES) == (60, 20)
    assert len(canvas.COLOURS) * len(canvas._LINES) >= figures._MOST_LINES
    monkeypatch.setattr(figures, "_MOST_ROWS", 6)
    monkeypatch.setattr(figures, "_MOST_LINES", 4)
    [run] = runs.read(write_events(tmp_path / "a", trained()))
    crowd = [
        runs.Worker(f"w{n}/worker0", 1, 100.0, float(n), local_steps=(1 + n, 1)) for n in range(8)
    ]
    many = [dataclasses.replace(run, workers=tuple(crowd))]
    [axes] = figures._shares(many).axes
    names = [one.get_text() for one in axes.get_yticklabels()]
    assert names == [f"w{n}/worker0" for n in (0, 1, 2, 5, 6, 7)]
    assert axes.get_xlabel().endswith("\n2 workers between them are not shown")
    assert axes.get_ylim() == (5.5, -0.5)
    [axes] = figures._local_steps(many).axes
    assert [one.get_label() for one in axes.get_lines()] == [f"w{n}/worker0" for n in (0, 1, 6, 7)]
    assert axes.get_xlabel().startswith("round; 4 workers between ")
    [axes] = figures._local_steps([dataclasses.replace(run, workers=tuple(crowd[:4]))]).axes
    assert axes.get_xlabel() == "round"


def test_a_run_of_one_process_is_drawn_beside_those_of_its_split(tmp_path):
    def made(mode, split, sites=("local",)):
        name = f"{mode}, {split}"
        [run] = runs.read(write_events(tmp_path / name, trained(mode, split, sites)))
        return dataclasses.replace(run, label=name)

    def drawn(*found):
        figures_ = figures.draw(found)
        return {
            name: [line.get_label().removesuffix(" (one device)") for line in figure.axes[0].lines]
            for name, figure in figures_.items()
            if name.startswith("accuracy")
        }

    local, iid = made("local", "iid"), made("simulated", "iid")
    niid, parties = made("simulated", "class"), made("sync", "iid", ("west", "east"))
    assert drawn(local, iid, niid, parties) == {
        "accuracy-iid": ["sync, iid", "local, iid", "simulated, iid"],
        "accuracy-non-iid": ["local, iid", "simulated, class"],
    }
    assert drawn(niid) == {"accuracy-non-iid": ["simulated, class"]}
    assert drawn(local) == {"accuracy-iid": ["local, iid"]}
    # ESync's name of it.
    write_tree(tmp_path / "Standalone/host/cpu")
    [standalone] = runs.read(tmp_path / "Standalone")
    assert drawn(standalone, niid)["accuracy-non-iid"] == ["Standalone", "simulated, class"]
