# SPDX-License-Identifier: Apache-2.0
"""Runs from events and from trees, the numbers by hand; and the pages that show them."""

import contextlib
import dataclasses
import itertools
import json
import re
import sys
import xml.dom.minidom

import pytest

from tests.support import forked
from tf_hips import log
from tf_hips.errors import ConfigError
from tf_hips.report import figures, page, runs, trees


def event(second, name, site="west", rank=0, run="r", **values):
    facts = {"run": run, "role": "worker", "site": site, "rank": rank}
    return {"time_us": int(second * 1e6), **facts, "event": name, **values}


def write_events(folder, events):
    folder.mkdir(parents=True, exist_ok=True)
    for one in events:
        name = f"{one['role']}-{one['site']}-{one['rank']}.jsonl"
        with (folder / name).open("a") as file:
            file.write(json.dumps(one) + "\n")
    return folder


def test_lines_that_are_no_events_of_a_run_are_left_out(tmp_path):
    folder = write_events(tmp_path, trained(sites=("west",)))
    expected = runs.facts(runs.read(folder)[0])
    [file] = folder.glob("*.jsonl")
    with file.open("ab") as more:
        more.write(b"\xff\xfe\x00 a lost disk\n\x00\x00\n[1]\n7\n")
        more.write(b'{"a":' + b"[" * 100_000 + b"\n")
        for values in ({"event": "x", "time_us": 1}, event(1, "x") | {"time_us": "now"}):
            more.write(json.dumps(values).encode() + b"\n")
        # A script has events of its own.
        more.write(json.dumps(event(9, "setup", mine=1)).encode() + b"\n")
    assert runs.facts(runs.read(folder)[0]) == expected


def test_nan_is_no_number_of_a_log_and_of_no_summary(tmp_path):
    nan, infinity = float("nan"), float("inf")
    with contextlib.closing(log.EventLog(tmp_path, run="r", role="w", site="s", rank=0)) as own:
        own.write("epoch", loss=nan, parts=[1.5, {"most": infinity}], name="NaN")
    [line] = (tmp_path / "w-s-0.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["parts"] == [1.5, {"most": None}]
    [read] = log.read_events(tmp_path)
    assert (read["loss"], read["name"]) == (None, "NaN")
    # Python's json writes what is no JSON; another script's log may hold it.
    run = runs.read(write_events(tmp_path / "other", trained(accuracies=(0.5, nan, 0.7))))[0]
    assert [accuracy for _, accuracy in run.points] == [0.5, 0.7]
    json.dumps(runs.facts(run), allow_nan=False)


def trained(mode="sync", split="iid", sites=("west", "east"), accuracies=(0.5, 0.9)):
    events = []
    for site in sites:
        setup = {"mode": mode, "network": "lenet", "dataset": "digits", "split": split}
        events.append(event(10, "setup", site, workers=len(sites), device="cpu", **setup))
        if len(sites) > 1:
            events.append(event(11, "model", site, num_elements=1000))
            events.append(event(12, "first_sync", site, sent=4000, received=100))
            events += [
                event(13 + n, "round", site, round=n, sent=100, received=150, seconds=0.1)
                for n in range(4)
            ]
        events += [
            event(
                *(15 + 5 * n, "epoch", site),
                epoch=n + 1,
                samples=100,
                seconds=2.0,
                rounds_s=0.5 if len(sites) > 1 else None,
                test_accuracy=accuracy,
            )
            for n, accuracy in enumerate(accuracies)
        ]
    return events


def test_a_run_of_events_by_hand(tmp_path):
    [run] = runs.read(write_events(tmp_path / "one", trained(split="class")))
    assert (run.label, run.subject) == ("sync, class", "lenet on digits")
    assert run.points == ((5.0, 0.5), (10.0, 0.9))
    assert (run.accuracy, run.seconds) == (0.9, 10.0)
    assert not run.is_iid
    assert not run.is_single
    assert [one.name for one in run.workers] == ["east/worker0", "west/worker0"]
    assert [one.samples for one in run.workers] == [200, 200]
    assert run.samples_per_s == 40.0
    assert run.communication_share == 0.25
    assert run.slow_bytes == 2 * (4100 + 4 * 250)
    assert run.dense_bytes == 2 * 4 * 8 * 1000
    assert run.slow_seconds == 4.0
    assert run.bytes_per_s == run.slow_bytes / 4.0


def test_each_event_is_looked_at_a_few_times_however_many_workers_there_are(tmp_path):
    looks = []

    class Watched(dict):
        def __getitem__(self, key):
            looks.extend([key] * (key == "rank"))
            return super().__getitem__(key)

    sites = [f"w{number:03}" for number in range(100)]
    events = [Watched(one) for one in trained(sites=sites)]
    run = runs.from_events(events, tmp_path)
    assert [one.name for one in run.workers] == [f"{site}/worker0" for site in sites]
    assert (run.slow_bytes, run.dense_bytes) == (100 * 5100, 100 * 4 * 8000)
    assert len(looks) < 10 * len(events)


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        (45_400, "45.4 kB (8.5x more than dense)"),
        (5450, "5.45 kB (as much as dense)"),
        (5340, "5.34 kB (as much as dense)"),
        (534, "534 B (10.0x less than dense)"),
    ],
)
def test_more_bytes_than_dense_are_not_called_less(tmp_path, slow, said):
    [run] = runs.read(write_events(tmp_path / "one", trained()))
    [_, row] = page.table([dataclasses.replace(run, slow_bytes=slow, dense_bytes=5340)])
    assert row[6] == said


def test_an_interval_that_was_made_twice_counts_once(tmp_path):
    events = trained()
    again = [one | {"time_us": one["time_us"] + 1} for one in events if one.get("epoch") == 2]
    [run] = runs.read(write_events(tmp_path / "one", [*events, *again]))
    assert [(one.samples, one.seconds) for one in run.workers] == [(200, 4.0)] * 2


def test_one_device_has_no_traffic_and_no_share(tmp_path):
    [run] = runs.read(write_events(tmp_path / "one", trained("local", sites=("local",))))
    assert run.is_single
    assert run.is_iid
    assert run.bytes_per_s is None
    assert run.communication_share is None
    assert run.label == "local"


def test_a_test_without_a_number_is_no_point(tmp_path):
    events = trained(accuracies=(0.5, None, 0.7))
    [run] = runs.read(write_events(tmp_path / "one", events))
    assert [accuracy for _, accuracy in run.points] == [0.5, 0.7]


@pytest.mark.parametrize(
    ("result", "accuracy", "best"), [(0.17, 0.17, 0.17), (0.05, 0.05, 0.11), (None, 0.11, 0.11)]
)
def test_a_run_ends_with_its_result_and_not_its_last_test(tmp_path, result, accuracy, best):
    # With local steps the last `epoch` is of one party's weights before the last meeting.
    events = trained("fedavg", accuracies=(0.1, 0.11))
    events += [event(22, "result", site, test_accuracy=result) for site in ("west", "east")]
    [run] = runs.read(write_events(tmp_path / "one", events))
    assert (run.accuracy, run.best_accuracy) == (accuracy, best)
    tests = ((5.0, 0.1), (10.0, 0.11))
    assert run.points == tests
    assert run.seconds == 10.0
    assert run.curve == (tests if result is None else (*tests, (12.0, result)))
    facts = runs.facts(run)
    assert (facts["accuracy"], facts["best_accuracy"]) == (accuracy, best)
    assert facts["points"][-1][1] == accuracy
    [_, row] = page.table([run])
    assert row[2:4] == [f"{accuracy:.2%}", f"{best:.2%}"]


def test_a_result_that_the_last_test_has_told_is_no_point_more(tmp_path):
    events = [*trained(), event(22, "result", test_accuracy=0.9)]
    [run] = runs.read(write_events(tmp_path / "one", events))
    assert run.curve == run.points


def test_a_run_that_was_tested_at_its_end_alone_has_a_figure(tmp_path):
    events = [*trained(accuracies=()), event(22, "result", test_accuracy=0.8)]
    [run] = runs.read(write_events(tmp_path / "one", events))
    assert (run.points, run.accuracy) == ((), 0.8)
    assert "accuracy-iid" in figures.draw([run])


def test_events_of_scripts_give_shares_from_rounds(tmp_path):
    # examples/digits.py: no `setup`, and epochs without seconds.
    events = [one for one in trained() if one["event"] in ("model", "first_sync", "round")]
    events += [event(16, "epoch", site, test_accuracy=0.8) for site in ("west", "east")]
    [run] = runs.read(write_events(tmp_path / "script", events))
    assert run.label == "script"
    assert run.communication_share == pytest.approx(0.3 / 3.0)
    assert run.samples_per_s is None


def test_workers_count_that_have_no_log_of_their_own(tmp_path):
    # A script of 2 parties of 2 workers each, of which rank 0 has events.
    events = [one for one in trained() if one["event"] != "setup"]
    [run] = runs.read(write_events(tmp_path / "told-by-none", events))
    assert runs.facts(run)["workers"] == 2
    joined = [event(10 + n, "joined", "west", workers=[2] * (n + 1)) for n in range(2)]
    odd = [event(12, "joined", "west", workers="of its own"), event(13, "joined", "west")]
    [run] = runs.read(write_events(tmp_path / "script", [*joined, *odd, *events]))
    assert (runs.facts(run)["workers"], len(run.workers)) == (4, 2)
    assert page.table([run])[1][1] == "4"
    # A trainer says it itself.
    simulated = [one | {"workers": 5} for one in trained("simulated", sites=("local",))]
    [run] = runs.read(write_events(tmp_path / "trainer", simulated))
    assert (runs.facts(run)["workers"], run.is_single) == (5, True)


def test_local_steps_are_found_in_any_event(tmp_path):
    events = trained() + [event(20 + n, "assigned", local_steps=n + 1) for n in range(3)]
    [run] = runs.read(write_events(tmp_path / "one", events))
    assert {one.name: one.local_steps for one in run.workers} == {
        "east/worker0": (),
        "west/worker0": (1, 2, 3),
    }
    # Gradients of 6 steps, up and down, whatever the number of rounds.
    assert run.dense_bytes == 6 * 2 * 4 * 1000


def test_labels_say_what_differs(tmp_path):
    places = [
        write_events(tmp_path / "a", trained()),
        write_events(tmp_path / "b", trained("async")),
        write_events(tmp_path / "c", trained("async")),
    ]
    labels = [run.label for run in runs.read_all(places)]
    assert labels == ["sync", "async, b", "async, c"]
    assert [run.label for run in runs.read_all([tmp_path])] == labels
    other = [{**one, "network": "vgg11"} for one in trained()]
    write_events(tmp_path / "d", other)
    assert runs.read_all([tmp_path / "a", tmp_path / "d"])[1].label == "sync, vgg11 on digits"


def write_tree(folder, rounds=3, accuracy=True, names=(trees.COMPUTING, trees.AGGREGATION)):
    computing, aggregation = names
    folder.mkdir(parents=True)
    for number in range(1, rounds + 1):
        told = {
            "num_iters": number,
            "time": {
                "0": {"check ready": 0.01, "get_batch": 0.01, computing: 0.3},
                "1": {"get_batch": 0.01, computing: 0.3},
                "2": {"check ready": 0.01, aggregation: 0.25},
            },
            "num_samples": 128,
            "total_time": 2.0 * number,
        }
        if accuracy:
            told["accuracy"] = 0.1234 * number
        (folder / f"iter-{number}.txt").write_text(json.dumps(told))


def test_a_tree_of_esync_by_hand(tmp_path):
    root = tmp_path / "esync-niid"
    write_tree(root / "cloud1/gpu0", names=("forward and backward", "global update"))
    write_tree(root / "cloud3/cpu", accuracy=False, names=("x", "global update"))
    summary = trees.summarise_tree(root)
    assert summary["cloud1"]["gpu0"] == {
        "accuracy_list": [0.123, 0.247, 0.37],
        "num_samples_list": [128] * 3,
        "self_iters_list": [3] * 3,
        "elapsed_time_list": [2.0, 4.0, 6.0],
        "aggregate_time_list": [0.25] * 3,
        "compute_time_list": [0.6] * 3,
    }
    [run] = runs.read(root)
    assert (run.mode, run.split, run.is_iid) == ("esync", "class", False)
    assert run.points[-1] == (6.0, 0.37)
    assert [one.local_steps for one in run.workers] == [(2, 2, 2)] * 2
    assert run.samples_per_s == 6 * 128 / 6.0
    # Of 2.55 s in training; the other has files that do not say how long that was: of 6 s.
    assert [one.with_tests for one in run.workers] == [False, True]
    assert run.communication_share == pytest.approx(2 * 0.75 / (2.55 + 6.0))
    assert run.slow_bytes is None, "it was not measured"
    path = root / "ESync-Non-IID.json"
    trees.write_summary(summary, path)
    [again] = runs.read(root)
    assert again.points == run.points
    assert not again.is_iid
    assert runs.read(path) == [again]


def test_events_and_the_tree_of_a_run_have_one_share(tmp_path):
    seconds, rounds_s = [2.0, 3.0], [0.5, 1.0]
    events = []
    for site in ("west", "east"):
        for number, (second, waited) in enumerate(zip(seconds, rounds_s, strict=True), 1):
            told = {"epoch": number, "samples": 64, "seconds": second, "rounds_s": waited}
            events.append(event(10 * number, "epoch", site, test_accuracy=0.5, **told))
            trees.write_iteration(
                tmp_path / "tree" / site / "cpu",
                number,
                computing_s=second - waited,
                aggregation_s=waited,
                evaluation_s=4.0,
                num_samples=64,
                total_s=10.0 * number,
                accuracy=0.5,
            )
    [told] = runs.read(write_events(tmp_path / "events", events))
    [tree] = runs.read(tmp_path / "tree")
    assert tree.communication_share == told.communication_share == 0.3
    assert [one.seconds for one in tree.workers] == [5.0, 5.0]
    assert tree.seconds == 20.0
    trees.write_summary(trees.summarise_tree(tmp_path / "tree"), tmp_path / "Sync.json")
    assert runs.read(tmp_path / "Sync.json")[0].communication_share == 0.3
    # One of ESync's own has no seconds of training, and the axis says of which the share is.
    summary = trees.read_summary(tmp_path / "Sync.json")
    for lists in summary.values():
        del lists["cpu"]["compute_time_list"]
    trees.write_summary(summary, tmp_path / "Sync.json")
    [bare] = runs.read(tmp_path / "Sync.json")
    assert bare.communication_share == pytest.approx(1.5 / 20.0)
    for found, times in ([tree], "training"), ([bare], "elapsed"), ([bare, tree], "elapsed or"):
        label = figures.draw(found)["time-share"].axes[0].get_xlabel()
        assert label.startswith(f"share of {times} ")


@pytest.mark.parametrize(
    "name", ["global aggregate", "global update", "global aggregation", "update global model"]
)
def test_names_of_both_projects_are_read(tmp_path, name):
    write_tree(tmp_path / "host/cpu", names=("local training", name))
    assert trees.summarise_tree(tmp_path)["host"]["cpu"]["aggregate_time_list"] == [0.25] * 3


def test_what_is_written_is_read_back(tmp_path):
    for number in (1, 2):
        trees.write_iteration(
            tmp_path / "party0/cpu",
            number,
            computing_s=1.0,
            aggregation_s=0.5,
            evaluation_s=0.25 if number == 2 else None,
            num_samples=64,
            total_s=2.0 * number,
            accuracy=0.75,
        )
    trees.write_meta(
        tmp_path / "party0",
        iterations=94,
        accuracy=0.75,
        learning_rate=0.001,
        batch_size=64,
        begin_s=1568790726.5,
    )
    lists = trees.summarise_tree(tmp_path)["party0"]["cpu"]
    assert lists["aggregate_time_list"] == [0.5, 0.5]
    assert lists["self_iters_list"] == [1, 1]
    meta = trees.read_meta(tmp_path / "party0/net.meta")
    assert meta == {
        "global_iters": 94,
        "test_acc": 0.75,
        "learning_rate": 0.001,
        "batch_size": 64,
        "begin_time": 1568790726.5,
    }
    [run] = runs.read(tmp_path)
    assert run.workers[0].local_steps == (), "one entry is no local step"
    for path in (tmp_path / "party0/cpu").iterdir():
        path.unlink()
    [run] = runs.read(tmp_path)
    assert run.accuracy == 0.75
    assert run.points[0][0] > 0
    (tmp_path / "party0/net.meta").write_text('{"test_acc": 0.5}')
    with pytest.raises(ConfigError, match="must say `begin_time`"):
        runs.read(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "iter-2.txt").unlink(), "no iter-2.txt"),
        (lambda path: (path / "iter-3.txt").write_text('{"time"'), "must be JSON"),
        (lambda path: (path / "iter-3.txt").write_text("{}"), "Received: no time"),
        (lambda path: (path / "iter-1.txt").write_text("[]"), "must be a log of ESync or HiPS"),
    ],
)
def test_a_damaged_tree_is_named(tmp_path, spoil, message):
    write_tree(tmp_path / "host/cpu")
    spoil(tmp_path / "host/cpu")
    with pytest.raises(ConfigError, match=message):
        runs.read(tmp_path)


def test_values_of_another_type_are_refused(tmp_path):
    folder = write_events(tmp_path, trained())
    with next(folder.glob("*.jsonl")).open("a") as more:
        more.write(json.dumps(event(9, "epoch", seconds="y", step=3, steps=3)) + "\n")
    with pytest.raises(ConfigError, match="must have the values that tf_hips writes"):
        runs.read(folder)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must hold events"):
        runs.read(tmp_path)
    with pytest.raises(ConfigError, match="which is none"):
        runs.read(tmp_path / "nowhere")
    other = tmp_path / "Sync.json"
    other.write_text('{"a": {"b": {"accuracy_list": ["x"]}}}')
    with pytest.raises(ConfigError, match="must be a summary of ESync"):
        runs.read(other)
    [file, _] = sorted(write_events(tmp_path / "logs", trained()).iterdir())
    with pytest.raises(ConfigError, match=re.escape(f"as their folder, {file.parent}. Received: ")):
        runs.read(file)


def test_a_folder_that_is_no_run_is_left_out(tmp_path):
    write_events(tmp_path / "logs", trained())
    write_events(tmp_path / "of-server", [event(1, "started") | {"role": "global-server"}])
    for name, text in {
        "report/numbers.json": "[]",
        "models/evaluations.jsonl": '{"step": 1}\n',
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    [run] = runs.read(tmp_path)
    assert run.source == str(tmp_path / "logs")
    (tmp_path / "logs").rename(tmp_path.parent / "logs")
    with pytest.raises(ConfigError, match="Received: none of them"):
        runs.read(tmp_path)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_events(root / "1-single", trained("local", sites=("local",)))
    write_events(root / "2-sync", trained(accuracies=[0.02 * n for n in range(45)]))
    write_events(root / "3-class", trained("dcasgd", "dirichlet(0.3)", accuracies=(0.1, 0.7)))
    with_steps = trained("async") + [event(20, "assigned", local_steps=n) for n in (3, 5, 4)]
    write_events(root / "4-steps", with_steps)
    write_tree(root / "sync/cloud1/gpu0")
    write_tree(root / "sync/cloud3/cpu")
    return runs.read_all([root])


@pytest.mark.heavy
def test_every_figure_has_labels_units_and_room(found):
    drawn = figures.draw(found)
    assert set(drawn) == {
        *("accuracy-iid", "accuracy-non-iid", "throughput", "traffic"),
        *("time-share", "local-steps"),
    }
    for name, figure in drawn.items():
        figure.canvas.draw()
        [axes] = figure.axes
        assert axes.get_xlabel(), name
        legend = axes.get_legend()
        texts = [*axes.texts, *(legend.get_texts() if legend else []), axes.xaxis.label]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = axis.get_major_ticks()
            texts += [one.label1 for one in ticks if min(limits) <= one.get_loc() <= max(limits)]
        boxes = [one.get_window_extent() for one in texts if one.get_text()]
        for box in boxes:
            assert figure.bbox.x0 <= box.x0, name
            assert box.x1 <= figure.bbox.x1 + 1, name
        kept = [one.get_window_extent() for one in (legend.get_texts() if legend else [])]
        for line in axes.get_lines():
            path = line.get_transform().transform_path(line.get_path())
            assert not [box for box in kept if path.intersects_bbox(box, filled=False)], name
        labels = [one for one in axes.get_yticklabels() if one.get_text()]
        heights = sorted((one.y0, one.y1) for one in (t.get_window_extent() for t in labels))
        assert all(low[1] <= high[0] + 1 for low, high in itertools.pairwise(heights)), name


def test_the_single_device_is_dotted_in_both_kinds(found):
    drawn = figures.draw(found)
    for name, solid in (("accuracy-iid", 3), ("accuracy-non-iid", 1)):
        lines = drawn[name].axes[0].get_lines()
        dotted = [line for line in lines if line.get_linestyle() != "-"]
        assert len(lines) - len(dotted) == solid
        assert {line.get_label() for line in dotted} >= {"local, lenet on digits (one device)"}


def test_only_what_was_measured_is_drawn(tmp_path):
    single = runs.read(write_events(tmp_path / "a", trained("local", sites=("local",))))
    assert set(figures.draw(single)) == {"accuracy-iid", "throughput"}


@pytest.mark.heavy
def test_a_page_needs_no_network(found, tmp_path):
    files = page.write(found, tmp_path / "out", "A <title> & more")
    names = {path.name for path in files}
    assert {"report.html", "summary.json", "traffic.png", "traffic.svg"} <= names
    text = (tmp_path / "out/report.html").read_text()
    assert "A &lt;title&gt; &amp; more" in text
    assert text.count("<svg") == 6
    # Whatever is referred to is in the page: no scripts, styles, fonts or images from elsewhere.
    assert not re.search(r"<(?:script|link|img|iframe|object)\b|@import|\bsrc=", text)
    assert not re.search(r"""(?:href=["']|url\()(?!#)""", text)
    ids = re.findall(r'\bid="(p[0-9a-f]{8,}|m[0-9a-f]{8,})"', text)
    assert len(ids) == len(set(ids)) > 6
    for name in ("traffic.svg", "time-share.svg"):
        xml.dom.minidom.parse(str(tmp_path / "out" / name))
    assert (tmp_path / "out/traffic.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "out/summary.json").read_text())
    assert [one["run"] for one in numbers] == [run.label for run in found]
    again = page.svg(figures.draw(found)["traffic"], "traffic")
    assert again == (tmp_path / "out/traffic.svg").read_text()


@pytest.mark.heavy
def test_the_commands(tmp_path):
    write_events(tmp_path / "a", trained())
    write_tree(tmp_path / "host1/gpu0")
    write_tree(tmp_path / "more/host2/cpu", accuracy=False)

    def run(*words, code=0):
        done = forked.run([sys.executable, "-m", "tf_hips.cli", *words], cwd=tmp_path, timeout=50)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    table = run("summary", "a")
    assert "state" not in table  # of whole runs, or of those that cannot say so
    assert re.search(r"sync +2 +90\.00% +90\.00% +10\.0 s +40 +10\.2 kB \(6\.3x", table)
    [numbers] = json.loads(run("summary", "a", "--json", "-"))
    assert numbers["communication_share"] == 0.25
    run("summary", "host1", "more", "--esync", "ESync.json")
    merged = json.loads((tmp_path / "ESync.json").read_text())
    assert {host: list(devices) for host, devices in merged.items()} == {
        "host1": ["gpu0"],
        "host2": ["cpu"],
    }
    both = run("summary", "host1", "more", "--esync", "again.json", "--json", "numbers.json")
    assert both == "wrote again.json\nwrote numbers.json\n"
    assert json.loads((tmp_path / "again.json").read_text()) == merged
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert json.loads(run("summary", "host1", "more", "--json", "-")) == numbers
    only = run("summary", "host1", "more", "--esync", "last.json", "--json", "-")
    assert json.loads(only) == numbers
    assert json.loads((tmp_path / "last.json").read_text()) == merged
    error = run("summary", "host1", "host1", "--esync", "x.json", code=2)
    assert "host1/gpu0 twice" in error
    assert run("report", "nowhere", code=1).startswith("tf-hips report: error: A run must be")


def test_steps_and_rounds_are_counted_in_whole_numbers(tmp_path):
    events = trained() + [event(20 + n, "assigned", local_steps=20) for n in range(3)]
    drawn = figures.draw(runs.read(write_events(tmp_path / "one", events)))["local-steps"]
    [axes] = drawn.axes
    assert axes.get_ylabel() == "steps of a worker"
    for ticks in (axes.get_xticks(), axes.get_yticks()):
        assert [one for one in ticks if one != round(one)] == []
