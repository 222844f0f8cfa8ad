# SPDX-License-Identifier: Apache-2.0
"""How programs of `make bench-*` end."""

import json
from pathlib import Path

import pytest

from benchmarks import closing, harness
from benchmarks.collectives_jobs import row


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/targets.toml").write_text(
        '[[target]]\nid = "a-figure"\nissue = 6\nfigure = "a"\nunit = "x"\nat_least = 2\n'
        'command = "make bench-a"\n'
    )
    return harness.RESULTS


def _stored(results: Path) -> dict:
    [path] = results.glob("a_*.json")
    return json.loads(path.read_text())


def test_a_part_that_is_measured_anew_takes_its_place(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [
        row("one", "what", 1.0, "x", about="a-figure"),
        row("two", "another", 5.0, "s"),
    ]
    how = {"command": "make bench-a", "is_complete": True}
    closing.conclude("a", first, note="The first.", **how)
    assert capsys.readouterr().out.splitlines()[-1] == "bench-a: 0 of 1 targets met"
    again = [row("one", "what", 3.0, "x", about="a-figure")]
    closing.conclude("a", again, note="The second.", updates=["one"], **how)
    assert capsys.readouterr().out.splitlines()[-1] == "bench-a: 1 of 1 targets met"
    stored = _stored(results)
    figures = [(one["part"], one["measured"]) for one in stored["rows"] if not one["id"]]
    assert sorted(figures) == [("one", 3.0), ("two", 5.0)]
    assert [one["met"] for one in stored["rows"] if one["id"]] == ["yes"]
    assert "Parts measured anew: one (The second.)" in stored["note"]
    assert stored["note"].endswith(": two. The first.")


def test_nothing_is_put_into_a_result_that_is_not_there(results: Path) -> None:
    with pytest.raises(SystemExit, match=r"needs a stored result\. Received: none"):
        closing.conclude(
            "a", [], command="make bench-a", note="", is_complete=True, updates=["one"]
        )


def test_what_this_machine_cannot_run_is_said_and_stores_nothing(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closing.conclude(
        "a", [], command="make bench-a", note="", is_complete=True, not_run=["a-figure"]
    )
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["nothing is stored", "bench-a: 0 of 1 targets met, 1 not run"]
    assert not results.exists()
    [bound] = closing.targets([], "make bench-a", ["a-figure"])
    assert (bound["what"], bound["met"]) == ("not measured", closing.NOT_RUN)
    [bound] = closing.targets([], "make bench-a")
    assert bound["met"] == "no"
