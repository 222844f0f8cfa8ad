# SPDX-License-Identifier: Apache-2.0
"""The tables of all commands, in a pipe and on terminals that are narrow: no value is cut."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.comm.profiles import DGC, ONEBIT, codec, profile
from tf_hips import cli, tables
from tf_hips.cli import cluster, info, simulate, status
from tf_hips.cli import plan as plan_command
from tf_hips.cli import profile as profile_command
from tf_hips.cluster import fleet
from tf_hips.comm.planner import make_plan
from tf_hips.data import sets
from tf_hips.report import page, runs
from tf_hips.simulation import Result
from tf_hips.simulation.description import Description, Group, Method, Traffic
from tf_hips.trainer import data_sets
from tf_hips.trainer.settings import Show

CUT = "\u2026"
Capture = pytest.CaptureFixture[str]
Narrow = Callable[[int], None]


@pytest.fixture
def terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Narrow:
    """Makes stdout a terminal of so many columns, without colours."""

    def begin(columns: int) -> None:
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", "25")  # else a dumb terminal has 80 columns
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    monkeypatch.setenv("COLUMNS", "80")  # a pipe has no width, whatever the shell exports
    return begin


def joined(text: str) -> str:
    """Without what folds a text: words that go on in the next line."""
    return "".join(text.split())


RESULT = Result(
    method="esync-compat epsilon=0.5",
    rounds=27,
    seconds=300.0,
    round_s=12.34,
    round_p95_s=56.78,
    compute_share=0.123,
    transfer_share=0.234,
    idle_share=0.643,
    steps_per_site=17.25,
    least_steps=11,
    most_steps=98765,
    steps_per_s=1357.0,
    up_bytes=4_560_000,
    down_bytes=7_890_000,
    staleness=3.5,
)
RESULT_TEXTS = ["12.34 s", "56.78 s", "12.3%", "23.4%", "64.3%", "17.25", "11", "98765"]
RESULT_TEXTS += ["1,357", "4.56 MB", "7.89 MB", "3.5"]


def show_simulated() -> None:
    results = [RESULT, dataclasses.replace(RESULT, method="sync", staleness=0.0)]
    methods = (Method("esync-compat"), Method("sync"))
    sites = Description(Traffic(parameters=1000), (Group("all", 2, 1.0),), methods)
    simulate._show(sites, results, 0.1)


def test_simulate_has_whole_rows_in_a_pipe(terminal: Narrow, capsys: Capture) -> None:
    show_simulated()
    head, first, second, last = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["method", "round"]
    assert first.split("  ")[0] == RESULT.method
    assert [text.strip() for text in first.split("  ")[1:] if text.strip()] == RESULT_TEXTS
    assert second.startswith("sync ")
    assert last.startswith("2 sites, 27 rounds of each method")


def test_simulate_keeps_the_method_on_a_narrow_terminal(terminal: Narrow, capsys: Capture) -> None:
    terminal(80)
    show_simulated()
    head, first, second, left_out, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["method", "round", "idle", "steps", "steps/s", "up/round", "down/round"]
    assert max(map(len, (head, first, second))) <= 80
    for text in (RESULT.method, "12.34 s", "64.3%", "17.25", "1,357", "4.56 MB"):
        assert f" {text} " in f" {first} "
    assert left_out.startswith("left out in 80 columns: least, most, 95 %, transfer, compute")

    terminal(60)  # not even what must stay fits beside each other
    show_simulated()
    out = capsys.readouterr().out
    block = out.split("\n\n")[0].splitlines()
    assert block[0] == f"method: {RESULT.method}"
    assert [line.split(": ")[1] for line in block[1:]] == RESULT_TEXTS
    assert "\n\nmethod: sync\nround: 12.34 s\n" in out


WAY = "error_feedback(onebit)"


def told(server: int | None = None) -> dict[str, Any]:
    """What a server of two sites tells as `ps.server.status.snapshot`; one of two, or alone."""
    children = [
        {
            "site": site,
            "state": "there",
            "workers": 16,
            "round": 123456,
            "lag": 0,
            "chunks": 128,
            "received_bytes": 1.23 * 2**30,
            "sent_bytes": 0,
            "retries": 1234,
            "last_call_s": 7.0,
            "late": 11,
            "absent": 22,
            "refused_rows": 33,
            "outvoted": 44,
            "proven": 55,
            "passed_over": 66,
        }
        for site in ("frankfurt", "sao-paulo")
    ]
    named = {} if server is None else {"server": f"hub.example.org:707{server}"}
    alone = {"run": "job", "state": "training", "round": 123456, "tensors": 2, "parameters": 10}
    alone |= {
        "rule": "detox(r=3) >> median",
        "robust": None,
        "compression": WAY,
    }
    alone |= {"downlink": WAY, "shard": [server or 0, 2], "ended": None}
    alone |= {"round_s": 9.0, "rounds": 3, "uptime_s": 90.0, "refused": 0, "is_durable": True}
    alone |= {"quorum": 2, "deadline_s": None, "uplink": None, "residual_rms": 0.5, "chunks": 128}
    return {**named, **alone, "children": children}


COUNTS = ["16", "123456", "0", "128/128", "1.23 GiB", "0 B", "1234", "7 s ago"]
LIARS = ["11", "22", "33", "44", "55", "66"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1023 * 2**10, "0.999 MiB"),
        (999.6 * 2**20, "0.976 GiB"),
        (12345 * 2**40, "12,345 TiB"),
    ],
)
def test_bytes_have_no_exponent(number: float, text: str) -> None:
    assert status._bytes(number) == text


def test_long_rounds_have_no_exponent(capsys: Capture) -> None:
    slow = {"round_s": 3600.0 * 30, "rounds": 2, "deadline_s": 1800.0}
    status._show([{**told(), **slow}])
    out = capsys.readouterr().out
    assert ", 15 h 0 min a round, " in out
    assert "quorum: 2 of 2, after 30 min" in out

    assert simulate._seconds(0.99996) == "1 s"
    assert simulate._seconds(12345.6) == "12,346 s"
    assert simulate._bytes(999_600) == "1 MB"
    simulate._show(
        Description(Traffic(parameters=1000), (Group("all", 2, 1.0),), (Method("sync"),)),
        [dataclasses.replace(RESULT, method="sync", steps_per_site=60560.2, steps_per_s=1e6)],
        0.1,
    )
    row = columns_of(capsys.readouterr().out.splitlines()[1])
    assert (row[6], row[9]) == ("60,560", "1,000,000")


def columns_of(line: str) -> list[str]:
    return [text.strip() for text in line.split("  ") if text.strip()]


@pytest.mark.parametrize("servers", [1, 2])
def test_status_has_whole_rows_in_a_pipe(servers: int, terminal: Narrow, capsys: Capture) -> None:
    status._show([told()] if servers == 1 else [told(0), told(1)])
    lines = capsys.readouterr().out.splitlines()
    shards = [[]] if servers == 1 else [["0/2"], ["1/2"]]
    expected = [
        [*shard, site, "there", *COUNTS, *LIARS]
        for shard in shards
        for site in ("frankfurt", "sao-paulo")
    ]
    assert [columns_of(line) for line in lines[-len(expected) :]] == expected
    rule = "rule: detox(r=3) >> median; up: error_feedback(onebit); down: error_feedback(onebit)"
    assert rule in lines


def test_status_keeps_who_lies_on_a_narrow_terminal(terminal: Narrow, capsys: Capture) -> None:
    terminal(80)
    status._show([told()])
    out = capsys.readouterr().out
    *_, head, first, last, left_out, _ = out.splitlines()
    assert " ".join(head.split()) == (
        "site state round late absent refused outvoted proven passed over"
    )
    assert columns_of(first) == ["frankfurt", "there", "123456", *LIARS]
    assert columns_of(last) == ["sao-paulo", "there", "123456", *LIARS]
    assert max(map(len, (head, first, last))) <= 80
    assert left_out.startswith("left out in 80 columns: workers, retries, chunks, sent, received")

    terminal(60)
    status._show([told()])
    blocks = capsys.readouterr().out.split("site: ")[1:]
    for block, site in zip(blocks, ("frankfurt", "sao-paulo"), strict=True):
        lines = block.strip().splitlines()
        assert [line.rpartition(": ")[2] for line in lines] == [site, "there", *COUNTS, *LIARS]


def test_status_says_how_often_a_row_was_chosen(terminal: Narrow, capsys: Capture) -> None:
    terminal(80)
    one = told()
    one["children"][0] |= {"chosen": 0, "chosen_of": 40}
    one["children"][1] |= {"chosen": 33, "chosen_of": 38}
    status._show([one | {"quorum": None, "rule": "krum(f=1)"}])
    *_, head, first, last, _ = capsys.readouterr().out.splitlines()
    assert head.split()[-2:] == ["refused", "chosen"]
    assert columns_of(first)[-1] == "0/40"
    assert columns_of(last)[-1] == "33/38"


def test_status_says_no_more_than_there_is(terminal: Narrow, capsys: Capture) -> None:
    terminal(80)
    one = told()
    for child in one["children"]:
        child["refused_rows"] = 0
    status._show([one | {"quorum": None, "rule": "sync"}])
    *_, head, first, _, left_out = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["retries", "last", "call"]
    assert columns_of(first) == ["frankfurt", "there", *COUNTS[1:]]
    assert left_out == "left out in 80 columns: workers (--json prints all)"


def test_before_the_first_round_status_has_no_time_of_rounds(capsys: Capture) -> None:
    for rounds, refused, said in (
        (0, 1, "server: up for 90 s, 1 call refused, durable"),
        (3, 0, "server: up for 90 s, 3 s a round, 0 calls refused, durable"),
    ):
        status._show([told() | {"rounds": rounds, "refused": refused}])
        assert said in capsys.readouterr().out


def show_plan() -> None:
    costs = profile(4, 1.25e7, codecs=(codec(ONEBIT, 1 / 8), codec(DGC, 0.065)))
    plan_command.show(make_plan(costs, list(GRADIENTS.items()), [ONEBIT]), 4.0)


GRADIENTS = {f"stage/{'a_long_name/' * 8}[bold]kernel:100:{i}": 2**23 + i for i in range(2)}


def test_a_plan_has_whole_names(terminal: Narrow, capsys: Capture) -> None:
    show_plan()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        [name, str(size), ONEBIT] for name, size in GRADIENTS.items()
    ]
    terminal(80)
    show_plan()
    out = capsys.readouterr().out
    assert CUT not in out
    table = out.splitlines()[:-1]
    assert max(map(len, table)) <= 80
    for size in GRADIENTS.values():
        assert f" {size} " in out
    # The first column's lines, put together.
    wide = table[0].index("elements") - 2
    assert "".join(line[:wide].strip() for line in table[1:]).startswith("".join(GRADIENTS))


def test_a_profile_has_whole_names(terminal: Narrow, capsys: Capture) -> None:
    name = "error_feedback(mixed(onebit, topk(ratio=0.001), threshold=1048576), decay=0.99)"
    measured = dataclasses.replace(codec(ONEBIT, 1 / 8), compression=name)
    costs = profile(4, 1.25e7, codecs=(measured,))
    profile_command.show(costs)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error_")]
    assert line.startswith(f"{name}  ")
    assert line.rstrip().endswith(" KiB")
    terminal(80)
    profile_command.show(costs)
    out = capsys.readouterr().out
    assert CUT not in out
    assert max(map(len, out.splitlines())) <= 80
    assert "encode" in out
    assert " ms " in out


def test_certificates_are_shown_whole(tmp_path: Path, terminal: Narrow, capsys: Capture) -> None:
    def certs(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            cli.main(["certs", *arguments])
        return capsys.readouterr().out

    site = "a-site-with-a-long-name-of-those-that-clouds-give"
    certs("init", str(tmp_path))
    certs("issue", str(tmp_path), "--party", site, "--days", "5")
    certs("revoke", str(tmp_path), f"party/{site}", "--reason", "[they] left: for good")
    [line] = [line for line in certs("show", str(tmp_path)).splitlines() if site in line]
    assert columns_of(line)[:2] == [f"party-{site}.pem", f"party/{site}"]
    assert line.rstrip().endswith("[they] left: for good")
    terminal(80)
    out = certs("show", str(tmp_path))
    assert CUT not in out
    for text in (f"party-{site}.pem", f"party/{site}", "[they] left: for good"):
        assert text in out


def test_what_became_of_roles_is_shown_whole(terminal: Narrow, capsys: Capture) -> None:
    detail = "the unit has failed " * 12 + "[status 3]"
    heard = [
        fleet.Outcome("party-west", "ops@west.example.org", False, "failed", detail),
        fleet.Outcome("server-hub", "ops@hub:100:", True, "active", "since 3 days"),
    ]
    order = [("server-hub", "ops@hub:100:"), ("party-west", "ops@west.example.org")]
    cluster._show(heard, order)
    _, first, second = capsys.readouterr().out.splitlines()
    assert columns_of(first) == ["server-hub", "ops@hub:100:", "active", "since 3 days"]
    assert columns_of(second) == ["party-west", "ops@west.example.org", "failed", detail]
    terminal(80)
    cluster._show(heard, order)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert joined(detail) in joined(out)
    cluster._show([], order)
    assert capsys.readouterr().out == ""


def test_info_is_a_line_each_in_a_pipe(
    terminal: Narrow, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"native library": "/a/long/path" * 30, "codecs": ", ".join(["a[b]"] * 60)}
    monkeypatch.setattr(info, "facts", lambda: facts)

    def told() -> str:
        with pytest.raises(SystemExit):
            cli.main(["info"])
        return capsys.readouterr().out

    first, second = told().splitlines()
    assert columns_of(first) == ["native library", facts["native library"]]
    assert columns_of(second) == ["codecs", facts["codecs"]]
    terminal(80)
    out = told()
    assert max(map(len, out.splitlines())) <= 80
    assert joined(out) == joined("".join(f"{name}{value}" for name, value in facts.items()))


def test_summary_is_whole(
    terminal: Narrow, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = ["run", "workers", "accuracy", "best", "time", "samples/s", "slow tier", "reason"]
    row = ["runs/" + "deep/" * 6, "16", "91.23 %", "93.45 %", "1 h 20 min", "123456", "1.23 GiB"]
    row.append("norm is 1e9 times the median; " * 3)
    monkeypatch.setattr(runs, "read_all", lambda paths: [])
    monkeypatch.setattr(page, "table", lambda found: [head, row])
    monkeypatch.setattr(page, "peer_table", lambda found: [head])

    def summary() -> str:
        with pytest.raises(SystemExit):
            cli.main(["summary", "x"])
        return capsys.readouterr().out

    assert columns_of(summary().splitlines()[1]) == [text.strip() for text in row]
    terminal(110)
    out = summary()
    assert max(map(len, out.splitlines())) <= 110
    for text in row[1:-1]:
        assert f" {text} " in out
    terminal(80)
    assert [line.partition(": ")[0] for line in summary().splitlines() if ": " in line] == head


def test_a_table_takes_what_there_is(terminal: Narrow, capsys: Capture) -> None:
    words, number = tables.Column("w", folds=True), tables.Column("number", is_right=True)
    tables.show([words, number], [])
    assert capsys.readouterr().out == ""
    rows = [("y" * 500, "1")]
    tables.show([words, number], rows, leave_out=("number", "absent"))
    assert capsys.readouterr().out.splitlines()[1] == f"{'y' * 500}       1"


def show_split(monkeypatch: pytest.MonkeyPatch, classes: int) -> None:
    labels = np.repeat(np.arange(classes), 20)
    images = np.zeros((len(labels), 2, 2, 1), np.uint8)
    part = sets.Rows(images, labels)
    found = sets.DataSet("own", part, part, classes, "here")
    monkeypatch.setattr(sets, "load", lambda *_, **__: found)
    data_sets.show(Show(name="own", split="iid", parties=(1, 1)))


def test_every_class_of_a_split_is_shown_in_a_pipe(
    terminal: Narrow, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    show_split(monkeypatch, 120)
    *_, said, head, first, second = capsys.readouterr().out.splitlines()
    assert said == "rows of each worker, and of each of the 120 classes"
    assert head.split() == ["worker", "rows", *map(str, range(120))]
    for number, line in enumerate((first, second)):
        worker, count, *of_classes = map(int, line.split())
        assert (worker, count, len(of_classes)) == (number, 1200, 120)
        assert sum(of_classes) == count


def test_a_terminal_shows_the_classes_that_fit(
    terminal: Narrow, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(80)
    show_split(monkeypatch, 12)
    *_, said, head, _, _ = capsys.readouterr().out.splitlines()
    assert said == "rows of each worker, and of each of the 12 classes"
    assert head.split()[-1] == "11"
    terminal(40)
    show_split(monkeypatch, 12)
    *_, said, head, first, _ = capsys.readouterr().out.splitlines()
    assert said.startswith("rows of each worker, and of the first 7 of 12 classes; ")
    assert head.split() == ["worker", "rows", *map(str, range(7))]
    assert (len(first.split()), CUT in first) == (9, False)
