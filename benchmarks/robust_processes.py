# SPDX-License-Identifier: Apache-2.0
"""Cells of the table of `make bench-robust`, trained again by real processes.

One `tf-hips server` with the rule, and five processes over gRPC on loopback, each the server of a
party and its three workers; one of them lies. It knows what the others send because it computes it,
too: batches, weights and residuals are functions of the seed and of what came down.
"""

import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import obedience, ps_processes, robust_levels
from benchmarks.collectives_jobs import Row, row
from benchmarks.ps_processes import Process, Server, sites_of
from benchmarks.robust_levels import LENGTH, PARTIES, STEPS, Cell, Fleet, Trainee
from tf_hips.config import Uplink
from tf_hips.ops import native
from tf_hips.ps.client.client import Client

CELLS = (
    Cell("median", "global", "onebit", "alie"),
    Cell("trimmed_mean(f=1)", "global", "none", "sign flip"),
    Cell("meamed(f=1)", "global", "terngrad", "min-max"),
)
# As in the table: sums must not depend on threads.
_ALONE = {"OPENBLAS_NUM_THREADS": "1", "TF_HIPS_NUM_THREADS": "1"}


class Worker:
    """One party, honest or not."""

    def join(self, server: str, party: int, cell: dict[str, str], seed: int) -> dict[str, Any]:
        """Joins with a fresh model."""
        self._cell, self._party = Cell(**cell), party
        self._fleet, self._trainee = Fleet(self._cell, seed), Trainee(self._cell, seed)
        uplink = Uplink(server, sites_of(PARTIES)[party], None, ps_processes.DEADLINE_S)
        self._client = Client(uplink, ps_processes.RUN, robust_levels.MEMBERS)
        text = self._fleet.for_sums.text
        child = self._client.join(text, "same", seed, self._cell.rule_at("global")).child
        self._client.agree_model([(LENGTH,)])
        return {"child": child}

    def train(self, steps: int) -> dict[str, Any]:
        """Makes steps; the accuracy after the last, and a digest of the weights."""
        trainee, party = self._trainee, self._party
        for step in range(steps):
            up = self._fleet.packets(trainee.weights, step, trainee.before, [party])[party]
            merged = self._client.exchange(step, up)
            trainee.step(native.decode(self._fleet.for_sums, merged, LENGTH))
        weights = np.ascontiguousarray(trainee.weights)
        return {"accuracy": trainee.accuracy(), "weights": weights.tobytes().hex()}

    def leave(self) -> dict[str, Any]:
        """Leaves the run."""
        self._client.leave()
        return {}


def trained(cell: Cell, seed: int, steps: int = STEPS) -> float:
    """Accuracy after training with a server and five parties that are processes, in percent.

    Raises:
        ValueError: the liars of the cell are not parties.
        SystemExit: a process has ended, or parties have different weights.
    """
    if cell.level != "global":
        raise ValueError(f"a party must lie or not as a whole. Received: level={cell.level!r}")
    options = ["--rule", cell.rule_at("global"), "--once"]
    with (
        ps_processes.server(PARTIES, is_durable=False, is_secure=False, options=options) as server,
        _parties(server, cell, seed) as parties,
    ):
        for one in parties:
            one.tell(json.dumps({"do": "train", "steps": steps}))
        answers = [one.hear() for one in parties]
        for one in parties:
            one.tell(json.dumps({"do": "leave"}))
        for one in parties:
            one.hear()
    if len({answer["weights"] for answer in answers}) != 1:
        raise SystemExit(f"parties have different weights after {cell}")
    return float(answers[0]["accuracy"])


@contextlib.contextmanager
def _parties(server: Server, cell: Cell, seed: int) -> Iterator[list[Process]]:
    """The processes of the parties, joined; killed at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hips-bench")))
        made = []
        for party in range(PARTIES):
            command = [sys.executable, "-m", "benchmarks.robust_processes"]
            one = Process(command, log=folder / f"party {party}.log", settings=_ALONE)
            stack.callback(one.end)
            order = {"do": "join", "server": server.address, "party": party, "seed": seed}
            one.tell(json.dumps({**order, "cell": vars(cell)}))
            made.append(one)
        for one in made:
            one.hear()
        yield made


def measured(seeds: int, table: Callable[[Cell], float]) -> Iterator[Row]:
    """Each cell by processes, and how far that is from what the table has."""
    for cell in CELLS:
        real = statistics.mean(trained(cell, seed) for seed in range(seeds))
        what = f"{cell.rule}, {cell.level}, {cell.codec}, {cell.attack}: "
        shown = f"table: {table(cell):.4g} %"
        yield row("table", f"{what}by processes", real, "%", against=shown)
        yield row(
            "table", f"{what}processes beside the table", abs(real - table(cell)), "points",
            about="robust-table-processes",
        )  # fmt: skip


if __name__ == "__main__":
    obedience.obey(Worker())
