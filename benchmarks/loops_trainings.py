# SPDX-License-Identifier: Apache-2.0
"""Trainings of several parties that run side by side, for `make bench-loops`.

Parties are processes that stay (`loops_party`); a training has a server of its own in this process.
Steps are padded by sleep, so some trainings fit on a few cores at once. All of a batch trace before
any of them begins: what one of them makes for the first time is not in another one's way.
"""

import contextlib
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ps_processes
from benchmarks.ps_processes import Process
from tf_hips.ps.server.server import Server, ServerConfig
from tf_hips.ps.server.state_server import StateServer, StateServerConfig

WORKER = "benchmarks.loops_party"
PREPARE_S = 300.0
MORE_S = 120.0  # beyond the seconds of a training, until it must have ended
# Meetings that do not count where waiting is measured: in them times are learnt.
UNCOUNTED = 3
FOR_EVER = 10**6  # steps


class FailedError(Exception):
    """A party has failed, or said nothing for too long; shows what it had to say."""


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained.

    Attributes:
        step_s: of each party, the seconds of a step; 0: as long as it takes.
        loop: arguments of a loop, and its "kind": `fedavg`, `esync`, or `plain` for none.
        rule: of the server.
        has_state_server: whether `loop` gets the address of one.
        data, split: "digits" or "synthetic"; "iid", or "class": each party has classes of its own.
        seed: of weights and of the order of samples.
        skew_s: by which the clock of the first party is wrong.
        goal: accuracy at which it may end; 0: none.
        seconds: at most.
        least_meetings: that there must be before it ends at its goal.
        steps: of each party; then it ends.
        compression, optimizer, rate: of the strategy, and of local steps.
        log_dir: folder of the event log.
    """

    step_s: tuple[float, ...]
    loop: dict[str, Any]
    rule: str = "fedavg(1.0)"
    has_state_server: bool = False
    data: str = "digits"
    split: str = "iid"
    seed: int = 0
    skew_s: float = 0.0
    goal: float = 0.0
    seconds: float = 60.0
    least_meetings: int = 0
    steps: int = FOR_EVER
    compression: str = "fp32"
    optimizer: str = "sgd"
    rate: float = 0.05
    log_dir: str | None = None


@dataclasses.dataclass(frozen=True)
class Trained:
    """What came of it.

    Attributes:
        goal_s: seconds to the goal; infinite where it was not reached.
        goal_meetings: meetings to it; 0 where it was not reached.
        seconds: that it lasted.
        idle_share: share of the time in which a party waits for others, on the mean of all; not a
            number where there were too few meetings.
        round_s: seconds from one meeting to the next, on the mean.
        last_round_s: seconds from the meeting before to the one at the goal.
        steps_per_s: local steps of all parties in a second.
        step_ms: what a step takes by itself, the longest of the parties' medians.
        best: the best accuracy that was seen.
        accuracy: of the last model.
    """

    goal_s: float
    goal_meetings: int
    seconds: float
    idle_share: float
    round_s: float
    last_round_s: float
    steps_per_s: float
    step_ms: float
    best: float
    accuracy: float

    @classmethod
    def of(cls, training: Training, answers: Sequence[dict[str, Any]]) -> "Trained":
        """What the parties have measured, in one."""
        judge = answers[-1]
        reached = [one for one in judge["accuracies"] if training.goal and one[2] >= training.goal]
        counted = [_counted(one["meetings"]) for one in answers]
        has_enough = all(len(one) > 1 for one in counted)
        idle = [sum(row["waited_s"] for row in one[1:]) / _length(one) for one in counted if one]
        return cls(
            reached[0][0] if reached else math.inf,
            reached[0][1] if reached else 0,
            judge["seconds"],
            sum(idle) / len(idle) if has_enough else math.nan,
            _length(counted[-1]) / (len(counted[-1]) - 1) if has_enough else math.nan,
            _last_round(judge, reached[0][1]) if reached else math.nan,
            sum(one["steps"] / one["seconds"] for one in answers),
            max(one["step_ms"] for one in answers),
            max((one[2] for one in judge["accuracies"]), default=0.0),
            judge["accuracy"],
        )


def _last_round(judge: dict[str, Any], meeting: int) -> float:
    """Seconds between the meeting before and the one at which the goal was seen."""
    looks = [0.0, *(one[0] for one in judge["accuracies"] if one[1] <= meeting)]
    return float(looks[-1] - looks[-2])


def _counted(meetings: Sequence[dict[str, float]]) -> Sequence[dict[str, float]]:
    """The meetings that count, after one from whose end they are counted; without the last."""
    return meetings[UNCOUNTED - 1 : -1]


def _length(counted: Sequence[dict[str, float]]) -> float:
    return max(counted[-1]["at"] - counted[0]["at"], 1e-9)


class Crew:
    """Processes of parties."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes
        self._number = 0

    def __len__(self) -> int:
        """How many there are."""
        return len(self._processes)

    def train(self, trainings: Sequence[Training]) -> list[Trained]:
        """Makes trainings side by side.

        Raises:
            FailedError: a party has failed.
        """
        seats = iter(self._processes)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hips-bench")))
            made = []
            for training in trainings:
                self._number += 1
                over = folder / f"over-{self._number}"
                orders = _orders(stack, training, f"loops-{self._number}", over)
                made.append([(next(seats), order) for order in orders])
            everyone = [seat for seats_of in made for seat in seats_of]
            processes = [process for process, _ in everyone]
            for process, order in everyone:
                process.tell(json.dumps({"do": "prepare", **order}))
            self._hear(processes, PREPARE_S)
            for process in processes:
                process.tell(json.dumps({"do": "train"}))
            longest_s = max(training.seconds for training in trainings)
            answers = iter(self._hear(processes, longest_s + MORE_S))
            return [
                Trained.of(training, [next(answers) for _ in seats_of])
                for training, seats_of in zip(trainings, made, strict=True)
            ]

    @staticmethod
    def _hear(processes: Sequence[Process], deadline_s: float) -> list[dict[str, Any]]:
        try:
            return ps_processes.hear_all(processes, deadline_s)
        except SystemExit as error:
            if not isinstance(error.code, str):
                raise  # somebody ends this program
            raise FailedError(error.code) from error

    def all_of(self, trainings: Sequence[Training]) -> Iterator[Trained]:
        """Makes as many trainings at a time as there are seats, in their order."""
        at = 0
        while at < len(trainings):
            batch: list[Training] = []
            while at < len(trainings) and (
                sum(len(one.step_s) for one in [*batch, trainings[at]]) <= len(self)
            ):
                batch.append(trainings[at])
                at += 1
            yield from self.train(batch)


def _orders(
    stack: contextlib.ExitStack, training: Training, run: str, over: Path
) -> list[dict[str, Any]]:
    """What each party is told; starts the servers of the training."""
    sites = tuple(f"s{number}" for number in range(len(training.step_s)))
    server = Server(ServerConfig(parties=sites, run=run, insecure=True, rule=training.rule))
    server.start()
    stack.callback(server.stop, 0.0)
    loop = dict(training.loop)
    if training.has_state_server:
        state = StateServer(StateServerConfig("127.0.0.1:0"))
        state.start()
        stack.callback(state.stop)
        loop["state_server"] = state.address
    common = {
        field.name: getattr(training, field.name)
        for field in dataclasses.fields(training)
        if field.name not in ("rule", "has_state_server")
    }
    return [
        common
        | {
            "run": run,
            "server": f"127.0.0.1:{server.port}",
            "site": site,
            "loop": loop,
            "over": str(over),
            "parties": len(sites),
            "number": number,
            "judges": number == len(sites) - 1,
            "step_s": training.step_s[number],
            "skew_s": training.skew_s if number == 0 else 0.0,
        }
        for number, site in enumerate(sites)
    ]


@contextlib.contextmanager
def crew(num_parties: int) -> Iterator[Crew]:
    """Starts processes of parties; kills them at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hips-bench")))
        settings = {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        processes = []
        for number in range(num_parties):
            command = [sys.executable, "-m", WORKER]
            one = Process(command, log=folder / f"party {number}.log", settings=settings)
            stack.callback(one.end)
            processes.append(one)
        yield Crew(processes)
