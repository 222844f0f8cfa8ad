# SPDX-License-Identifier: Apache-2.0
"""How programs of `make bench-*` end."""

import json
from pathlib import Path

import pytest

from benchmarks import closing, harness, robust_server, robust_step
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
    assert stored["note"] == ""
    assert {name: facts["note"] for name, facts in stored["parts"].items()} == {
        "one": "The second.",
        "two": "The first.",
    }


def _machine(monkeypatch: pytest.MonkeyPatch, commit: str, **facts: object) -> None:
    """This machine is another one from now on, and the clock goes on."""
    here = {"cpu": "AMD EPYC", "cores": 2, "vectors": "AVX2", "memory_gib": 24, "gpu": "none"}
    here |= {"os": "Debian", "python": "3.11", "versions": {}, "date": "2026-11-23", **facts}
    here |= {"time": f"1{commit[-1]}:00:00", "commit": commit}
    monkeypatch.setattr(harness, "environment", lambda *_: here)


def _conclude(part: str, measured: float, note: str, **how: object) -> None:
    rows = [row(part, "what", measured, "x", about="a-figure")]
    closing.conclude("a", rows, command="make bench-a", note=note, is_complete=True, **how)


def test_each_part_says_when_and_on_what_it_was_measured(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(monkeypatch, "c1")
    _conclude("one", 3.0, "The first.")
    [text] = results.glob("a_2cpu_epyc_202611.md")
    assert "Parts were" not in text.read_text()  # one run, its head tells all
    for place, part in enumerate(("two", "three"), start=2):
        _machine(monkeypatch, f"c{place}")
        _conclude(part, 3.0, f"Of {part}.", updates=[part])
    stored = _stored(results)
    assert {name: facts["commit"] for name, facts in stored["parts"].items()} == {
        "one": "c1",
        "two": "c2",
        "three": "c3",
    }
    lines = text.read_text().splitlines()
    assert [line for line in lines if line.startswith("* ")] == [
        "* one: 2026-11-23 11:00:00, commit c1, AMD EPYC, 2 cores. The first.",
        "* two: 2026-11-23 12:00:00, commit c2, AMD EPYC, 2 cores. Of two.",
        "* three: 2026-11-23 13:00:00, commit c3, AMD EPYC, 2 cores. Of three.",
    ]


@pytest.mark.parametrize("other", [{"cpu": "AMD EPYC 9"}, {"cores": 16}, {"vectors": "AVX-512"}])
def test_a_result_of_another_machine_takes_no_parts(
    results: Path, monkeypatch: pytest.MonkeyPatch, other: dict
) -> None:
    _machine(monkeypatch, "c1")
    _conclude("one", 3.0, "The first.")
    _machine(monkeypatch, "c2", **other)
    with pytest.raises(SystemExit, match=r"needs a stored result of this machine.*a_2cpu_epyc_2"):
        _conclude("one", 4.0, "The second.", updates=["one"])
    _machine(monkeypatch, "c3")
    assert closing.stored("a")["rows"][0]["measured"] == 3.0


def test_a_result_of_another_machine_stays_where_it_is(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, cpu in enumerate(("AMD EPYC", "AMD EPYC 9", "AMD EPYC", "Intel(R) Xeon(R)")):
        _machine(monkeypatch, f"c{place}", cpu=cpu)
        _conclude("one", 3.0 + place, "")
    stored = {path.name: json.loads(path.read_text()) for path in results.glob("*.json")}
    assert {name: one["environment"]["commit"] for name, one in stored.items()} == {
        "a_2cpu_epyc_202611.json": "c2",
        "a_2cpu_epyc-2_202611.json": "c1",
        "a_2cpu_xeon_202611.json": "c3",
    }


def test_an_old_result_is_read_and_its_machine_found(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"date": "2026-11-22", "cpu": "AMD EPYC", "cores": 2, "gpu": "none", "commit": "c0"}
    rows = [row("one", "what", 1.5, "x", about="a-figure"), row("two", "b", 1.0, "s")]
    result = {"theme": "a", "note": "Old.", "environment": old, "rows": rows}
    results.mkdir(parents=True)
    (results / "a_2cpu_202611.json").write_text(json.dumps(result))
    # By name it is the last; it is of another machine, and newer.
    others = {**result, "environment": {**old, "date": "2026-11-24", "cores": 16}}
    (results / "a_9cpu_202612.json").write_text(json.dumps(others))
    _machine(monkeypatch, "c1")
    _conclude("one", 3.0, "New.", updates=["one"])
    stored = json.loads((results / "a_2cpu_epyc_202611.json").read_text())
    assert {name: facts["commit"] for name, facts in stored["parts"].items()} == {
        "two": "c0",
        "one": "c1",
    }
    assert stored["parts"]["two"] == {**{k: old[k] for k in ("date", "commit", "cpu", "cores")},
                                      "time": "", "note": "Old."}  # fmt: skip
    assert stored["rows"][-1]["met"] == "yes"


def test_a_figure_is_compared_as_it_was_measured(results: Path) -> None:
    def met(measured: float, interval: str = "") -> str:
        one = row("one", "what", measured, "x", about="a-figure", interval=interval)
        [bound] = closing.targets([one], "make bench-a")
        return bound["met"]

    assert met(1.99996) == "no"
    assert met(2.0) == "yes"
    assert harness.cell(1.99996) == "2.0"
    # Whatever is narrow or wide: who holds the bound inside cannot tell.
    assert met(2.01, "1.99 - 2.03") == met(2.1, "1 - 3") == "noisy"
    assert met(2.01, "2 - 2.03") == "yes"
    assert met(1.9, "1.8 - 2") == "no"


def test_a_narrow_interval_around_a_bound_is_stored_and_a_wide_one_need_not_be(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def concluded(interval: str) -> str:
        one = row("one", "what", 2.01, "x", about="a-figure", interval=interval)
        closing.conclude(
            "a", [one], command="make bench-a", note="", is_complete=True, stores_noisy=False
        )
        return capsys.readouterr().out

    said = concluded("1 - 3")
    assert "too busy to tell of a-figure" in said
    assert not results.exists()
    assert "too busy" not in concluded("1.99 - 2.03")
    assert _stored(results)["rows"][-1]["met"] == "noisy"


@pytest.mark.parametrize(
    ("cpu", "family"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", "xeon"),
        ("AMD EPYC", "epyc"),
        ("AMD EPYC 7B13 64-Core Processor", "epyc"),
        ("Intel(R) Core(TM) i7-1185G7 @ 3.00GHz", "core"),
        ("Neoverse-N1", "neoverse"),
        ("", "cpu"),
    ],
)
def test_a_file_is_named_by_the_family_of_the_cpu(cpu: str, family: str) -> None:
    assert harness.family(cpu) == family


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("AMD EPYC", "AMD EPYC (family 25, model 17)"),
        ("AMD EPYC 9B14", "AMD EPYC 9B14"),
    ],
)
def test_machines_that_a_cloud_calls_alike_differ(name: str, told: str, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: {name}\n\n")
    assert harness.cpu(cpuinfo) == told
    assert harness.family(told) == "epyc"


def test_a_network_that_cannot_be_made_is_a_part_that_is_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for measured, about in (
        (lambda: robust_step.measured(1), {robust_step.TARGET}),
        (lambda: robust_server.measured(1), {case.about for case in robust_server.CASES}),
    ):
        with pytest.raises(closing.NotRunError, match="by root") as error:
            list(measured())
        assert set(error.value.targets) == about


def test_nothing_is_put_into_a_result_that_is_not_there(results: Path) -> None:
    with pytest.raises(SystemExit, match=r"needs a stored result.*Received: none"):
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
    assert bound["measured"] is None


def test_a_part_without_figures_stores_nothing(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row("one", "what", 1.0, "x")]
    closing.conclude("a", rows, command="make bench-a", note="", is_complete=True)
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == ["nothing is stored", "bench-a: 0 of 1 targets met, 1 not measured"]
    assert not results.exists()
