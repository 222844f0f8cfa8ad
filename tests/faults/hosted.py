# SPDX-License-Identifier: Apache-2.0
"""One server of a job: its process, which can be killed and started again, its files, its link."""

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.spoken import Failed, Spoken
from tests.ps.relay import Relay
from tf_hips.ps.disk.file_format import Reader
from tf_hips.ps.terms.assignment import WHOLE, Shard
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Kind, from_payload

RUN = "job"
Trap = tuple[str, int, int]


class Hosted:
    """A server by name; whoever calls it does so through a relay."""

    def __init__(
        self,
        base: Path,
        name: str,
        options: Callable[[], list[str]],
        *,
        is_eager: bool,
        children: tuple[str, ...],
        shard: Shard = WHOLE,
        is_below: bool = False,
        is_sketched: bool = False,
    ) -> None:
        """A server that does not run.

        Args:
            base: where it has a folder.
            name: of the folder.
            options: what it is told beside its address and its folders.
            is_eager: whether it makes a snapshot in every round.
            children: those that it serves.
            shard: which of those that share the model.
            is_below: whether there is a server above it.
            is_sketched: whether a rule is decided on sketches.
        """
        folder = base / name
        folder.mkdir()
        self.name, self.children, self.shard, self.is_below = name, children, shard, is_below
        self.state, self.archive = folder / "state", folder / "archive"
        self.archive.mkdir()
        self.log, self.events = folder / f"{name}.log", folder / "events"
        self.more: list[str] = []  # options of the next process
        self.is_eager, self.is_sketched = is_eager, is_sketched
        self.num_kills = 0
        self._options = options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.relay = Relay(self.port)
        self.process: Spoken | None = None

    @property
    def running(self) -> Spoken:
        """Its process."""
        if self.process is None:
            raise Failed(f"{self.name} was not started")
        return self.process

    def serve(self, *, is_refused: bool = False, trap: Trap | None = None) -> None:
        """Starts it; returns when it listens, or has ended because it refuses to.

        `trap`: as that of `trap`, set before it listens.
        """
        options = ["--run", RUN, "--once", "--bind", f"127.0.0.1:{self.port}"]
        options += ["--state", str(self.state), "--log-dir", str(self.events)]
        order = {
            "options": [*self._options(), *options, *self.more],
            "archive": str(self.archive),
            "is_eager": self.is_eager,
            "is_sketched": self.is_sketched,
            "trap": trap,
        }
        self.process = Spoken("tests.faults.trapped", order, self.log)
        if is_refused:
            self.process.ends()
        else:
            self.process.wait_for("listens")

    def trap(self, place: str, number: int, count: int) -> None:
        """Sets a trap from round `number` on."""
        self.running.tell(json.dumps({"place": place, "round": number, "count": count}))
        self.running.wait_for("set")
        self.running.forget("set")

    def kill(
        self,
        delay_s: float = 0.0,
        *,
        again: bool = False,
        serve: Callable[[], None] | None = None,
    ) -> None:
        """Kills it and starts it, `delay_s` later.

        Args:
            delay_s: how long there is no server.
            again: the new process is killed, too, as soon as it listens.
            serve: starts it; None: as `serve` does.
        """
        for _ in range(1 + again):
            self.running.kill()
            self.num_kills += 1
            threading.Event().wait(delay_s)  # no server for so long is the fault
            (serve or self.serve)()

    def check_log(self, num_rounds: int, *, closes: bool = False) -> None:
        """Raises Failed unless the journals hold each update, and each answer from above, once.

        Args:
            num_rounds: of the run.
            closes: whether rounds may close without some children.
        """
        rounds = range(num_rounds)
        model = Model.from_json(self.recorded(Kind.MODEL)[0]["shapes"])
        chunks = self.shard.chunks(model)
        updates = [
            (number, child, chunk)
            for number in rounds
            for child in range(len(self.children))
            for chunk in chunks
        ]
        came = [
            (fields["round"], fields["child"], fields["chunk"])
            for fields in self.recorded(Kind.PACKET)
        ]
        if self.is_sketched and not self.is_below:
            # A party without a weight sends nothing; each round is of one at least.
            updates = [one for one in updates if one in came]
            if {number for number, *_ in updates} != set(rounds):
                raise Failed(f"{self.name}: each round must have a sum. Received: {came[:5]}")
        self._compare(came, updates, "(round, child, chunk)")
        if closes:
            self._check_closings(self.recorded(Kind.CLOSED), num_rounds)
        if self.is_below:
            answers = [(number, chunk) for number in rounds for chunk in chunks]
            down = [(one["round"], one["chunk"]) for one in self.recorded(Kind.PASSED_DOWN)]
            self._compare(down, answers, "from above, (round, chunk)")

    def _compare(
        self, came: list[tuple[int, ...]], expected: list[tuple[int, ...]], what: str
    ) -> None:
        counts = Counter(came)
        lost = sorted(set(expected) - counts.keys())
        twice = sorted(key for key, count in counts.items() if count > 1)
        if lost or twice or counts.keys() - set(expected):
            raise Failed(f"{self.name}: lost: {lost[:5]}; twice: {twice[:5]} {what}")

    def _check_closings(self, closings: list[dict[str, Any]], num_rounds: int) -> None:
        """Raises Failed unless each round was closed once, and no update counts twice."""
        if [one["round"] for one in closings] != list(range(num_rounds)):
            raise Failed(f"{self.name}: each round must be closed once. Received: {closings}")
        counted = Counter((child, one["round"]) for one in closings for child in one["children"])
        counted += Counter((child, number) for one in closings for child, number in one["late"])
        if any(count > 1 for count in counted.values()):
            raise Failed(f"{self.name}: an update counts once. Received: {counted}")

    def recorded(self, kind: Kind) -> list[dict[str, Any]]:
        """What all journals of the run say of one kind, those included that were deleted."""
        paths = {path.name: path for path in self.archive.glob("journal-*")}
        paths |= {path.name: path for path in (self.state / RUN).glob("journal-*")}
        found = []
        for name in sorted(paths):
            reader = Reader(paths[name])
            found += [from_payload(body)[0] for one, body in reader.records() if one == kind]
            reader.close()
        return found
