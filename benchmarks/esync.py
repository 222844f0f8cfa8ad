# SPDX-License-Identifier: Apache-2.0
"""Two parties of uneven speed below one server: how long they wait for each other.

    idle         share of the time in which a party waits for the other, on the mean
    steps/s      local steps of both in a second
    to 0.9       seconds until the model of the meetings has an accuracy of 0.9 on digits it has not
                 seen, after the first step

Steps of the quick party are padded by sleep to `--step-ms`, more than ten times what they take of a
core; those of the other one to so many times that. Methods: `sync`, a meeting after each step;
`fixed`, 20 local steps each; `compat`, the paper's rule with its 0.5 s; `ours`, with as many steps
of the slow party as make some 20 of the quick one. With `skew`, the clock of the slow party is 5 s
behind. Meetings while graphs are traced do not count.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from tf_hips.ps.state_server import StateServer, StateServerConfig

LEVELS = (1, 4, 20)
METHODS = ("sync", "fixed", "compat", "compat skew", "ours", "ours skew")
ACCURACY = 0.9


def measured(method: str, level: int, options: argparse.Namespace) -> dict[str, Any]:
    """One training of both parties."""
    name, _, skew = method.partition(" ")
    step_s = options.step_ms / 1e3
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        state = StateServer(StateServerConfig("127.0.0.1:0"))
        state.start()
        stack.callback(state.stop)
        command = [sys.executable, "-m", "tf_hips.cli", "run", "--parties", "2", "--workers", "1"]
        command += ["--rule", "fedavg(1.0)", "--slowdown", f"worker=0:{step_s * level}s"]
        command += ["--slowdown", f"worker=1:{step_s}s"]
        command += ["--clock-skew", "worker=0:-5s"] if skew else []
        script = str(Path(__file__).with_name("esync_worker.py"))
        command += [
            script,
            folder,
            name,
            str(level),
            str(options.seconds),
            state.address,
            options.split,
        ]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=options.seconds + 240,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        if done.returncode:
            raise SystemExit(f"{method} at {level}x failed:\n{done.stderr[-4000:]}")
        told = [json.loads(Path(folder, f"{party}.json").read_text()) for party in (0, 1)]
    if not all(one["meetings"] for one in told):
        raise SystemExit(f"{method} at {level}x: no round was over; give it more --seconds")
    reached = [at for at, right in told[1]["accuracies"] if right >= ACCURACY]
    return {
        "uneven": f"{level}x",
        "method": method,
        "idle": round(sum(one["waited_s"] / one["seconds"] for one in told) / 2, 4),
        "idle, slow": round(told[0]["waited_s"] / told[0]["seconds"], 4),
        "idle, quick": round(told[1]["waited_s"] / told[1]["seconds"], 4),
        "round ms": round(1e3 * told[1]["seconds"] / max(1, told[1]["meetings"]), 1),
        "steps/s": round(sum(one["steps"] / one["seconds"] for one in told), 1),
        "to 0.9, s": round(reached[0], 2) if reached else None,
        "best": round(max((right for _, right in told[1]["accuracies"]), default=0.0), 4),
    }


def main() -> int:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--levels", type=int, nargs="+", default=list(LEVELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each training")
    parser.add_argument("--step-ms", type=float, default=25.0, help="of the quick party")
    parser.add_argument("--split", choices=("iid", "class"), default="iid")
    parser.add_argument("--dry-run", action="store_true", help="nothing is stored")
    options = parser.parse_args()
    began = time.monotonic()
    rows = []
    for level in options.levels:
        for method in options.methods:
            rows.append(measured(method, level, options))
            print(f"{time.monotonic() - began:5.0f} s  {rows[-1]}", flush=True)
    if options.dry_run:
        harness.show("esync", rows)
    else:
        note = "What the figures are: see the head of `benchmarks/esync.py`."
        harness.write("esync", rows, command="python -m benchmarks.esync", note=note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
