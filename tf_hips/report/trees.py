# SPDX-License-Identifier: Apache-2.0
"""Logs as HiPS and ESync write and read them.

    HOST/DEVICE/iter-1.txt   one JSON object for each interval of a worker: `num_iters`, `time`
                             (seconds of what it did, by number and name), `num_samples`,
                             `total_time` since the start, `accuracy` of the one that tests
    HOST/net.meta            `global_iters`, `test_acc`, `learning_rate`, `batch_size`,
                             `begin_time` (HiPS)
    HOST/net.weights.h5      the weights of that test, of Keras, to go on from
    ESync.json               of all workers of a tree: lists of accuracies, samples, iterations,
                             seconds since the start and seconds of aggregation (ESync); ours has
                             seconds of computing, too, where the files have them, and where not
                             every interval was tested the seconds since the start of each accuracy

Both projects name what a worker does in their own ways; all of those are read. DEVICE is `cpu`,
`gpu0`, ..., and `cpu-1` for a second worker of the party on one of that name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tf_hips import config
from tf_hips.errors import ConfigError

COMPUTING = "forward and backward"
AGGREGATION = "global aggregate"
EVALUATION = "evaluation"
# What is training, by the names of ESync and of HiPS.
_COMPUTINGS = (COMPUTING, "local training")
# What is waiting for others, by the names of ESync (its two trainers) and HiPS (its two).
_AGGREGATIONS = (
    *("global update", AGGREGATION),
    *("global aggregation", "update global model"),
)
_FILE = re.compile(r"iter-(\d+)\.txt")
META = "net.meta"
WEIGHTS = "net.weights.h5"  # where HiPS has net.params, of MXNet
# What ESync calls summaries, by mode; `-Non-IID` follows where workers have different data.
SUMMARIES = {
    "esync": "ESync",
    "sync": "Sync",
    "async": "Async",
    "dcasgd": "DCASGD",
    "fedavg": "FedAvg",
    "local": "Standalone",
}

Lists = dict[str, list[Any]]
Summary = dict[str, dict[str, Lists]]


def write_iteration(
    folder: Path,
    number: int,
    *,
    computing_s: float,
    aggregation_s: float,
    evaluation_s: float | None,
    num_samples: int,
    total_s: float,
    accuracy: float | None,
) -> None:
    """Writes `iter-NUMBER.txt`.

    Args:
        folder: HOST/DEVICE.
        number: of the interval, from 1.
        computing_s: seconds of it in forward and backward passes.
        aggregation_s: seconds of it spent on other workers.
        evaluation_s: seconds of its test; None: there was none.
        num_samples: samples of this worker.
        total_s: seconds since training began.
        accuracy: of the test; None for workers that do not tell.
    """
    spent = {COMPUTING: round(computing_s, 4), AGGREGATION: round(aggregation_s, 4)}
    if evaluation_s is not None:
        spent[EVALUATION] = round(evaluation_s, 4)
    told: dict[str, Any] = {
        "num_iters": number,
        "time": {"0": spent},
        "num_samples": num_samples,
        "total_time": total_s,
    }
    if accuracy is not None:
        told["accuracy"] = accuracy
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"iter-{number}.txt").write_text(json.dumps(told), encoding="utf-8")


def go_on(folder: Path, at_most: int | None) -> tuple[int, float]:
    """Deletes files of intervals that are made again.

    Args:
        folder: HOST/DEVICE.
        at_most: intervals that were made; None: all that have a file.

    Returns:
        The number of the last interval that has a file, and its `total_time`.
    """
    numbers = _numbers(folder)
    for number in numbers:
        if at_most is not None and number > at_most:
            (folder / f"iter-{number}.txt").unlink()
    last = max((one for one in numbers if at_most is None or one <= at_most), default=0)
    try:
        return last, float(_json(folder / f"iter-{last}.txt")["total_time"]) if last else 0.0
    except (ConfigError, KeyError, TypeError, ValueError):  # was killed while it wrote
        return last, 0.0


def write_meta(
    folder: Path,
    *,
    iterations: int,
    accuracy: float,
    learning_rate: float,
    batch_size: int,
    begin_s: float,
) -> None:
    """Writes `net.meta`; who reads it sees the whole old or the whole new one."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "global_iters": iterations,
        "test_acc": accuracy,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "begin_time": begin_s,
    }
    config.write_whole(json.dumps(told), folder / META)


def read_meta(path: Path) -> Mapping[str, Any]:
    """What `net.meta` says.

    Raises:
        ConfigError: it is no such file.
    """
    found = _json(path)
    if not isinstance(found, dict) or not isinstance(found.get("test_acc"), int | float):
        raise ConfigError(f"{path} must be a net.meta of HiPS, with `test_acc`. Received: another")
    return found


def is_tree(folder: Path) -> bool:
    """Whether there is a log of a worker under `folder`."""
    return next(_workers(folder), None) is not None


def _workers(folder: Path) -> Iterator[Path]:
    """Folders of workers: HOST/DEVICE, or DEVICE where the folder is that of a host."""
    for pattern in ("*/*/iter-1.txt", "*/iter-1.txt"):
        yield from (path.parent for path in folder.glob(pattern))


def summarise_tree(folder: Path) -> Summary:
    """The summary of all hosts and devices under a folder; trees of several hosts lie side by side.

    Raises:
        ConfigError: there is no worker, two have one name, or a file is no such log; names it.
    """
    found: Summary = {}
    for worker in sorted(_workers(folder)):
        host = worker.parent.name
        if worker.name in found.setdefault(host, {}):
            raise ConfigError(
                f"{folder} must have each worker once. Received: {host}/{worker.name} twice"
            )
        found[host][worker.name] = _lists(worker)
    if not found:
        raise ConfigError(f"{folder} must hold HOST/DEVICE/iter-1.txt. Received: none")
    return found


def _lists(worker: Path) -> Lists:
    numbers = _numbers(worker)
    if numbers != list(range(1, len(numbers) + 1)):
        gap = next(number for number in range(1, numbers[-1]) if number not in numbers)
        raise ConfigError(
            f"{worker} must have all files to iter-{numbers[-1]}.txt. Received: no iter-{gap}.txt"
        )
    lists: Lists = {
        "accuracy_list": [],
        "num_samples_list": [],
        "self_iters_list": [],
        "elapsed_time_list": [],
        "aggregate_time_list": [],
    }
    computing: list[float] = []
    tested: list[float] = []
    for number in numbers:
        path = worker / f"iter-{number}.txt"
        told = _json(path)
        try:
            parts = told["time"]
            last = parts[str(max(map(int, parts)))]
            waited = next(last[name] for name in _AGGREGATIONS if name in last)
            lists["num_samples_list"].append(int(told["num_samples"]))
            lists["self_iters_list"].append(len(parts))
            lists["aggregate_time_list"].append(float(waited))
            names = [(part, name) for part in parts.values() for name in _COMPUTINGS]
            if computed := [float(part[name]) for part, name in names if name in part]:
                computing.append(sum(computed))
            if "total_time" in told:
                lists["elapsed_time_list"].append(round(float(told["total_time"]), 3))
            if "accuracy" in told:
                lists["accuracy_list"].append(round(float(told["accuracy"]), 3))
                tested += lists["elapsed_time_list"][-1:] if "total_time" in told else []
        except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
            raise ConfigError(
                f"{path} must be a log of ESync or HiPS. Received: no "
                f"{error.args[0] if error.args else 'time of aggregation'}"
            ) from error
    if len(computing) == len(numbers):
        lists["compute_time_list"] = computing
    if tested and len(tested) < len(numbers):  # else they are those of `elapsed_time_list`
        lists["accuracy_time_list"] = tested
    return lists


def _numbers(worker: Path) -> list[int]:
    names = (_FILE.fullmatch(path.name) for path in worker.iterdir())
    return sorted(int(match[1]) for match in names if match)


def write_summary(summary: Summary, path: Path) -> None:
    """Writes a summary as ESync does."""
    path.write_text(json.dumps(summary), encoding="utf-8")


def read_summary(path: Path) -> Summary:
    """Reads what `write_summary` or ESync's `summary.py` wrote.

    Raises:
        ConfigError: it is no such file.
    """
    found = _json(path)
    try:
        for workers in found.values():
            for lists in workers.values():
                for name in ("accuracy_list", "num_samples_list", "elapsed_time_list"):
                    if not all(isinstance(one, int | float) for one in lists[name]):
                        raise ValueError(name)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} must be a summary of ESync, HOST: DEVICE: lists. Received: another file"
        ) from error
    return dict(found)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON. Received: a file that is cut off or other") from (
            error
        )
