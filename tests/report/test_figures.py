# SPDX-License-Identifier: Apache-2.0
"""What figures do with many runs, long names, and names that say nothing."""

import dataclasses
import warnings

import pytest

from tests.report.test_runs import trained, write_events
from tf_hips.report import canvas, figures, peer_figures, runs
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


def test_a_long_text_keeps_its_ends():
    assert canvas.wrapped("sync, lenet on digits", 12) == "sync, lenet\non digits"
    assert canvas.wrapped("run\npeer", 12) == "run\npeer"
    lines = canvas.wrapped("first" + "x" * 100 + "last", 10).split("\n")
    assert len(lines) == 4
    assert max(map(len, lines)) == 10
    assert lines[0].startswith("first") and lines[1].endswith("…") and lines[-1].endswith("last")
