# SPDX-License-Identifier: Apache-2.0
"""The figure of the demo, drawn of events."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.report.test_rounds import NUM_ELEMENTS, SITES, event, run_events

pytestmark = pytest.mark.heavy  # figures are drawn

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def demo_figure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("demo_figure")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_figure_is_drawn(demo_figure: ModuleType, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"figure.{suffix}"
    demo_figure.draw(run_events(), path, "a title")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    assert len(data) > 10_000
    if suffix == "svg":
        assert b"4.9x" in data


@pytest.mark.parametrize("rounds", [1, 4, 60])
@pytest.mark.parametrize("first_sync_bytes", [10, 5000, 5_000_000])
def test_no_label_crosses_a_line(
    demo_figure: ModuleType, rounds: int, first_sync_bytes: int
) -> None:
    events = []
    for site in SITES:
        events.append(event(1, "model", site, num_elements=NUM_ELEMENTS))
        events.append(event(2, "first_sync", site, sent=first_sync_bytes, received=9))
        for number in range(rounds):
            events.append(event(3 + number, "round", site, round=number, sent=150, received=160))
            events.append(
                event(3.5 + number, "epoch", site, epoch=number + 1, test_accuracy=0.5 * number % 1)
            )
        events.append(event(4 + rounds, "result", site, test_accuracy=0.9, fingerprint="f"))
    drawn = demo_figure.figure(sorted(events, key=lambda e: e["time_us"]), "a title")
    drawn.canvas.draw()
    for axes in drawn.axes:
        legend = axes.get_legend()
        labels = [*axes.texts, *(legend.get_texts() if legend else [])]
        boxes = [label.get_window_extent() for label in labels if label.get_text()]
        assert boxes
        for line in axes.get_lines():
            path = line.get_transform().transform_path(line.get_path())
            assert not [box for box in boxes if path.intersects_bbox(box, filled=False)]
        assert all(drawn.bbox.containsx(box.x0) and drawn.bbox.containsx(box.x1) for box in boxes)
