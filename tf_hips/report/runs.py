# SPDX-License-Identifier: Apache-2.0
"""Runs as values that can be compared, read from events or from trees of HiPS and ESync.

Read here are, beside what `rounds` reads, the events of trainers: `setup` (`mode`, `network`,
`dataset`, `split`, `workers`, `device`), `epoch` (`step`, `steps`, `samples`, `seconds`,
`rounds_s`, `test_accuracy`), `joined` (`workers` of each party), and `local_steps` of any event of
a worker.

Nothing is computed that was not measured: bytes come from sockets or are not there.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_hips import log
from tf_hips.errors import ConfigError
from tf_hips.log import Event
from tf_hips.report import choices, ends, peers, rounds, trees
from tf_hips.report.choices import Share
from tf_hips.report.peers import Mark

# What a trainer says of itself.
_SETUP = {"mode", "network", "dataset"}
# The role of a server that has none above it.
_TOPMOST = "global-server"


class NoRunError(ConfigError):
    """Nothing in a folder is of a run."""


@dataclasses.dataclass(frozen=True)
class Worker:
    """What one worker did.

    Attributes:
        name: `site/worker<rank>`, or `host/device`.
        samples: that it trained on.
        seconds: in training, without tests.
        communication_s: of these, in which it waited for other parties; None: not measured.
        local_steps: steps of each round; none where it was not logged.
        with_tests: whether `seconds` are all since training began: ESync's summaries have no
            others.
    """

    name: str
    samples: int
    seconds: float
    communication_s: float | None
    local_steps: tuple[int, ...] = ()
    with_tests: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        label: what a legend calls it.
        subject: network and data set; empty where logs do not say.
        mode: how workers trained together; empty where logs do not say.
        split: how rows were dealt out; `iid` where logs do not say.
        points: (seconds since training began, test accuracy) of each test in training.
        workers: those that have told something, in the order of their names; none where only
            servers have.
        num_workers: how many trained, also those without a log or played by another's process.
        seconds: from the beginning to the last test.
        slow_bytes: bytes on all uplink sockets, both ways; None: not measured.
        dense_bytes: what gradients in fp32 would have taken, with local steps those of each step;
            None: not known.
        slow_seconds: in which `slow_bytes` were measured.
        source: where it was read.
        marks: what was found out about its peers.
        shares: how often rules have chosen the rows of each.
        result: as one of `points`, the model that the run ended with; None: logs do not say.
        state: whether it has ended, as `ends.state` says.
        is_of_servers: whether only servers have told anything.
    """

    label: str
    subject: str
    mode: str
    split: str
    points: tuple[tuple[float, float], ...]
    workers: tuple[Worker, ...]
    num_workers: int
    seconds: float
    slow_bytes: int | None
    dense_bytes: int | None
    slow_seconds: float
    source: str
    marks: tuple[Mark, ...] = ()
    shares: tuple[Share, ...] = ()
    result: tuple[float, float] | None = None
    state: str | None = None
    is_of_servers: bool = False

    @property
    def is_iid(self) -> bool:
        """Whether all workers had rows of the same kind."""
        return self.split in ("iid", "")

    @property
    def is_single(self) -> bool:
        """Whether one device trained by itself."""
        return len(self.workers) == 1 and self.slow_bytes is None

    @property
    def curve(self) -> tuple[tuple[float, float], ...]:
        """`points`, and `result` where it is not what the last of them says."""
        if self.result is None or (self.points and self.points[-1][1] == self.result[1]):
            return self.points
        return (*self.points, self.result)

    @property
    def accuracy(self) -> float | None:
        """The last one: of `result` where there is one."""
        return self.curve[-1][1] if self.curve else None

    @property
    def best_accuracy(self) -> float | None:
        """The highest one."""
        return max((one for _, one in self.curve), default=None)

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all workers by the time that the run took, tests included."""
        samples = sum(worker.samples for worker in self.workers)
        return samples / self.seconds if samples and self.seconds > 0 else None

    @property
    def bytes_per_s(self) -> float | None:
        """On the slow tier, all parties together, both ways."""
        if self.slow_bytes is None or self.slow_seconds <= 0:
            return None
        return self.slow_bytes / self.slow_seconds

    @property
    def communication_share(self) -> float | None:
        """Of the workers' training time, what they waited for other parties.

        Of a bare summary of ESync, of all time since training began.
        """
        known = [one for one in self.workers if one.communication_s is not None and one.seconds > 0]
        if not known or self.is_single:
            return None
        waited = sum(one.communication_s or 0.0 for one in known)
        return waited / sum(one.seconds for one in known)


def read(path: str | Path) -> list[Run]:
    """Runs of a folder of events, a folder of trees, a summary of ESync, or a folder of those.

    Of a folder that has events of servers alone it is what these know: of peers, and how long it
    took. In a folder of folders such a one is left out, beside one of workers.

    Raises:
        ConfigError: there is none, or a file is damaged.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix == ".jsonl":
            raise ConfigError(
                f"The events of a run must be given as their folder, {path.parent}. Received: "
                f"{path}, one process's"
            )
        return [from_summary(trees.read_summary(path), path)]
    if not path.is_dir():
        raise ConfigError(f"A run must be a folder or a summary. Received: {path}, which is none")
    events = log.read_events(path)
    if events:
        try:
            return [from_events(events, path)]
        except ConfigError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # A process of another version, or none of ours.
            raise ConfigError(
                f"Events in {path} must have the values that tf_hips writes. Received: "
                f"{type(error).__name__}: {error}"
            ) from error
    known = {f"{one}{end}.json" for one in trees.SUMMARIES.values() for end in ("", "-Non-IID")}
    summaries = sorted(one for one in path.iterdir() if one.name in known)
    if summaries:
        return [from_summary(trees.read_summary(one), one) for one in summaries]
    if trees.is_tree(path):
        return [from_summary(trees.summarise_tree(path), path)]
    if metas := sorted({*path.glob(trees.META), *path.glob(f"*/{trees.META}")}):
        return [from_meta(metas[0], path)]
    found = []
    for folder in sorted(one for one in path.iterdir() if one.is_dir() and _holds_a_run(one)):
        with contextlib.suppress(NoRunError):  # a report, checkpoints
            found += read(folder)
    # Beside workers a server tells nothing that they do not.
    found = [run for run in found if not run.is_of_servers] or found
    if not found:
        raise NoRunError(
            f"{path} must hold events (*.jsonl), trees (HOST/DEVICE/iter-1.txt) or summaries. "
            "Received: none of them"
        )
    return found


def _holds_a_run(folder: Path) -> bool:
    kinds = ("*.jsonl", "*.json", trees.META, f"*/{trees.META}")
    return trees.is_tree(folder) or any(any(folder.glob(kind)) for kind in kinds)


def read_all(paths: Sequence[str | Path]) -> list[Run]:
    """Runs of several places, with labels that tell them apart.

    What all have in common, network and data set, is left out; runs of one label get
    their places, as much of the path as tells them apart.

    Raises:
        ConfigError: as for `read`.
    """
    found = [run for path in paths for run in read(path)]
    if len({run.subject for run in found}) > 1:
        found = [
            dataclasses.replace(run, label=f"{run.label}, {run.subject}") if run.subject else run
            for run in found
        ]
    places = _places(found)
    return [
        dataclasses.replace(run, label=_with_place(run, place)) if place else run
        for run, place in zip(found, places, strict=True)
    ]


def _places(found: Sequence[Run]) -> list[str]:
    """Of each run what tells it from others of its label, the end of its path; else nothing.

    Runs of one place have numbers.
    """
    parts = [Path(run.source).resolve().parts for run in found]
    labels = [run.label for run in found]
    places = []
    for number, label in enumerate(labels):
        alike = [other for other, one in enumerate(labels) if one == label]
        if len(alike) == 1:
            places.append("")
            continue
        paths = {parts[other] for other in alike}
        depth = 1
        while len({path[-depth:] for path in paths}) < len(paths):
            depth += 1
        place = "/".join(parts[number][-depth:])
        same = [other for other in alike if parts[other] == parts[number]]
        places.append(f"{place} ({same.index(number) + 1})" if len(same) > 1 else place)
    return places


def _with_place(run: Run, place: str) -> str:
    # What has no name of its own is called as its folder, which the place ends with.
    source = Path(run.source)
    is_place = run.label in (source.name, source.resolve().name)
    return place if is_place else f"{run.label}, {place}"


def from_events(events: Sequence[Event], source: Path) -> Run:
    """The newest run of a folder of events.

    Raises:
        ConfigError: neither a worker nor a server has told anything.
    """
    of_all = rounds.newest_run(events)
    events = [event for event in of_all if event["role"] == "worker"]
    if not events:
        return _from_servers(of_all, source)
    # A script may have events of its own that are called so.
    setup = next((e for e in events if e["event"] == "setup" and e.keys() >= _SETUP), None)
    started = (e for e in events if e is setup or e["event"] == "first_sync")
    begin = next(started, events[0])["time_us"]
    points = tuple(
        ((time_us - begin) / 1e6, accuracy) for time_us, accuracy in rounds.epochs(events)
    )
    ended = rounds.result(events)
    of_workers: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        of_workers.setdefault((event["site"], event["rank"]), []).append(event)
    workers = tuple(_worker(of_workers[name]) for name in sorted(of_workers))
    try:
        traffic = rounds.traffic(events)
    except ConfigError:  # one device, or one party
        traffic = None
    facts = setup or {}
    return Run(
        label=_label(facts) or source.name or source.resolve().name,
        subject=f"{facts['network']} on {facts['dataset']}" if facts else "",
        mode=str(facts.get("mode", "")),
        split=str(facts.get("split", "iid")),
        points=points,
        workers=workers,
        num_workers=_num_workers(events, facts) or len(workers),
        seconds=points[-1][0] if points else (events[-1]["time_us"] - begin) / 1e6,
        slow_bytes=None if traffic is None else traffic.measured[-1],
        dense_bytes=None if traffic is None else _dense(events, workers) or traffic.dense[-1],
        slow_seconds=0.0 if traffic is None else traffic.seconds[-1] - traffic.seconds[0],
        source=str(source),
        marks=peers.marks(of_all),
        shares=choices.shares(of_all),
        result=None if ended is None else ((ended[0] - begin) / 1e6, ended[1]),
        state=ends.state(events, facts),
    )


def _from_servers(events: Sequence[Event], source: Path) -> Run:
    """What is known where the logs of workers are elsewhere, with their parties.

    Raises:
        NoRunError: no server has begun.
    """
    if not any(event["event"] == "listen" for event in events):
        raise NoRunError(f"{source} must hold events of workers or servers. Received: neither")
    joins = [event for event in events if event["event"] == "join"]
    # The topmost server's children stand for all below them.
    topmost = [event for event in joins if event["role"] == _TOPMOST]
    workers = {str(one.get("child_site")): one.get("workers") for one in topmost or joins}
    return Run(
        label=source.name or source.resolve().name,
        subject="",
        mode="",
        split="",
        points=(),
        workers=(),
        num_workers=sum(one for one in workers.values() if isinstance(one, int)),
        seconds=(events[-1]["time_us"] - events[0]["time_us"]) / 1e6,
        slow_bytes=None,
        dense_bytes=None,
        slow_seconds=0.0,
        source=str(source),
        marks=peers.marks(events),
        shares=choices.shares(events),
        is_of_servers=True,
    )


def _num_workers(events: Sequence[Event], setup: Event) -> int:
    """As a trainer or, of a script, the server has said it last; 0: neither."""
    told = [setup.get("workers"), *(e.get("workers") for e in events if e["event"] == "joined")]
    if isinstance(told[0], int):
        return told[0]
    # Of each party; a script may have events of its own that are called so.
    parties = next((one for one in reversed(told) if isinstance(one, list)), [])
    return sum(one for one in parties if isinstance(one, int))


def _dense(events: Sequence[Event], workers: Sequence[Worker]) -> int:
    """What gradients of each local step would have taken, once for each party; 0: there are none.

    Workers of a party that keep step have made the same steps, and of others the most count.
    """
    elements = next((e["num_elements"] for e in events if e["event"] == "model"), 0)
    steps: dict[str, int] = {}
    for worker in workers:
        site = worker.name.rpartition("/")[0]
        steps[site] = max(steps.get(site, 0), sum(worker.local_steps))
    return sum(steps.values()) * 2 * rounds.BYTES_PER_FLOAT * int(elements)


def _label(setup: Event) -> str:
    if not setup:
        return ""
    split = str(setup.get("split", "iid"))
    return str(setup["mode"]) + ("" if split == "iid" else f", {split}")


def _worker(events: Sequence[Event]) -> Worker:
    told = [event for event in events if event["event"] == "epoch" and "seconds" in event]
    # A worker that went on from a backup may have made one twice.
    epochs = list({event.get("epoch", place): event for place, event in enumerate(told)}.values())
    exchanges = [event for event in events if event["event"] == "round"]
    waited: float | None = None
    seconds = float(sum(event["seconds"] for event in epochs))
    if epochs:
        known = [event["rounds_s"] for event in epochs if event.get("rounds_s") is not None]
        waited = float(sum(known)) if known else None
    elif len(exchanges) > 1:
        # From the first answer to the last, so the exchange before the first is left out.
        seconds = (exchanges[-1]["time_us"] - exchanges[0]["time_us"]) / 1e6
        waited = float(sum(event["seconds"] for event in exchanges[1:]))
    return Worker(
        name=f"{events[0]['site']}/worker{events[0]['rank']}",
        samples=sum(int(event.get("samples") or 0) for event in epochs),
        seconds=seconds,
        communication_s=None if waited is None else min(waited, seconds),
        local_steps=tuple(int(e["local_steps"]) for e in events if e.get("local_steps")),
    )


def from_summary(summary: trees.Summary, path: Path) -> Run:
    """A run from a tree's summary; its name says the mode, and `-niid` or `-Non-IID` the split."""
    name = path.stem if path.is_file() else path.name
    plainly = name.lower()
    is_iid = not plainly.endswith(("-niid", "-non-iid"))
    mode = plainly.removesuffix("-niid").removesuffix("-non-iid")
    modes = {text: one for one, file in trees.SUMMARIES.items() for text in (one, file.lower())}
    workers = []
    points: tuple[tuple[float, float], ...] = ()
    seconds = 0.0
    for host, devices in sorted(summary.items()):
        for device, lists in sorted(devices.items()):
            elapsed = [float(one) for one in lists["elapsed_time_list"]]
            waited = lists.get("aggregate_time_list")
            steps = [int(one) for one in lists.get("self_iters_list", [])]
            total = elapsed[-1] if elapsed else 0.0
            seconds = max(seconds, total)
            computing = lists.get("compute_time_list")
            trained = float(sum(computing) + sum(waited or ())) if computing else total
            workers.append(
                Worker(
                    name=f"{host}/{device}",
                    samples=sum(int(one) for one in lists["num_samples_list"]),
                    seconds=trained,
                    communication_s=min(float(sum(waited)), trained)
                    if waited and any(waited)
                    else None,
                    # ESync counts the entry of the aggregation, too; others have that one only.
                    local_steps=tuple(one - 1 for one in steps)
                    if max(steps, default=0) > 1
                    else (),
                    with_tests=not computing,
                )
            )
            points = points or _points(lists, f"{path}: {host}/{device}")
    return Run(
        label=name,
        subject="",
        mode=modes.get(mode, ""),
        split="iid" if is_iid else "class",
        points=points,
        workers=tuple(workers),
        num_workers=len(workers),
        seconds=seconds,
        slow_bytes=None,
        dense_bytes=None,
        slow_seconds=0.0,
        source=str(path),
    )


def _points(lists: trees.Lists, where: str) -> tuple[tuple[float, float], ...]:
    """The accuracies of a worker, if it has any that say when they were measured."""
    accuracies = lists["accuracy_list"]
    seconds = lists.get("accuracy_time_list", lists["elapsed_time_list"])
    if len(seconds) != len(accuracies):
        if accuracies:
            log.warning(
                "%s has %d accuracies of %d rounds, and does not say of which: they are left out; "
                "the tree that it was made of does.",
                where,
                len(accuracies),
                len(lists["num_samples_list"]),
            )
        return ()
    return tuple(
        (float(second), float(accuracy))
        for second, accuracy in zip(seconds, accuracies, strict=True)
        if math.isfinite(accuracy)
    )


def from_meta(meta: Path, path: Path) -> Run:
    """A run of which only HiPS's `net.meta` is left: its last test, when the file was written.

    Raises:
        ConfigError: it is no such file.
    """
    told = trees.read_meta(meta)
    try:
        second = max(0.0, meta.stat().st_mtime - float(told["begin_time"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{meta} must say `begin_time`. Received: another") from error
    run = from_summary({}, path)
    return dataclasses.replace(
        run, points=((second, float(told["test_acc"])),), seconds=second, source=str(meta)
    )


def facts(run: Run) -> dict[str, Any]:
    """What `tf-hips summary` says of a run, as JSON values."""
    return {
        "run": run.label,
        "source": run.source,
        "subject": run.subject,
        "mode": run.mode,
        "split": run.split,
        "state": run.state,
        "workers": run.num_workers,
        "accuracy": run.accuracy,
        "best_accuracy": run.best_accuracy,
        "seconds": run.seconds,
        "samples_per_s": run.samples_per_s,
        "slow_bytes": run.slow_bytes,
        "dense_bytes": run.dense_bytes,
        "communication_share": run.communication_share,
        "points": [list(point) for point in run.curve],
        "per_worker": [dataclasses.asdict(worker) for worker in run.workers],
        "peers": [dataclasses.asdict(line) for line in peers.lines(run.marks)],
        "chosen": [dataclasses.asdict(one) for one in run.shares],
    }
