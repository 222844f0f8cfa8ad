# SPDX-License-Identifier: Apache-2.0
"""Jobs of benchmarks: processes that do what they are told and stand still otherwise.

The ranks of a job run the same module. Commands come to them as lines of JSON on standard input,
answers go as lines of JSON to what was their standard output (see `obedience`).

A job that is not measured is stopped with SIGSTOP, all its ranks at once: Horovod's thread looks at
its queue every millisecond, and would take time from the job that is.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks import harness
from benchmarks.network import INTERFACE, Network
from tf_hips.comm.launch import local_rank_environments, rank_environments

DEADLINE_S = 180.0  # of one command
TOPOLOGY = Path("/sys/devices/system/cpu")


class Job:
    """The ranks of one job, one process each."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []

    def add(
        self,
        command: list[str],
        log: Path,
        output: BinaryIO,
        environment: dict[str, str],
        core: int | None,
    ) -> None:
        """Starts one more rank, which writes what it says to `output`, the file `log`.

        It runs on `core` alone, if that is a number.
        """
        self._logs.append(log)
        process = subprocess.Popen(
            command,
            cwd=harness.ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            bufsize=0,
            process_group=0,  # not a session, see docs/decisions/0024
        )
        self._processes.append(process)
        if core is not None:
            os.sched_setaffinity(process.pid, {core})

    def ask(self, *, deadline_s: float = DEADLINE_S, **command: Any) -> list[dict[str, Any]]:
        """What the ranks answer to `command`; they run for as long as it takes.

        Raises:
            SystemExit: a rank ended, or said nothing for `deadline_s`; shows what all ranks said.
        """
        self._signal(signal.SIGCONT)
        line = (json.dumps(command) + "\n").encode()
        for process in self._processes:
            process.stdin.write(line)
            process.stdin.flush()
        end = time.monotonic() + deadline_s
        answers = [self._answer(rank, end) for rank in range(len(self._processes))]
        self._signal(signal.SIGSTOP)
        return answers

    def end(self) -> None:
        """Kills the ranks: they have nothing to write."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()
            process.stdout.close()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.kill(process.pid, number)

    def _answer(self, rank: int, end: float) -> dict[str, Any]:
        output = self._processes[rank].stdout
        ready, _, _ = select.select([output], [], [], max(0.0, end - time.monotonic()))
        line = output.readline() if ready else b""
        if not line:
            why = "ended" if ready else "did not answer in time"
            said = [log.read_text(errors="replace")[-4000:] for log in self._logs]
            raise SystemExit("\n".join([f"rank {rank} {why}.", *said]))
        return json.loads(line)


def spread(processors: Sequence[int], topology: Path = TOPOLOGY) -> list[int]:
    """The same processors, first one of each physical core, then those that share a core with one.

    Args:
        processors: numbers of logical ones.
        topology: where the system tells of all; a processor that it does not tell of has its own.
    """
    of_core: dict[str, int] = {}
    turns = []
    for processor in processors:
        path = topology / f"cpu{processor}/topology/thread_siblings_list"
        core = path.read_text(encoding="ascii").strip() if path.is_file() else f"{processor}"
        turns.append((of_core.get(core, 0), processor))
        of_core[core] = of_core.get(core, 0) + 1
    return [processor for _, processor in sorted(turns)]


@contextlib.contextmanager
def job(
    num_ranks: int,
    *,
    module: str,
    threads: int,
    settings: dict[str, str] | None = None,
    network: Network | None = None,
) -> Iterator[Job]:
    """Starts a job; kills it at the end.

    Args:
        num_ranks: processes; one is started without any launcher's variables.
        module: what they run.
        threads: TensorFlow's compute threads per process.
        settings: variables to add to the environment.
        network: rank i runs on its host i; None: all on this machine's loopback.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environments: list[dict[str, str]] = [{}]
        commands = [[sys.executable, "-m", module]] * num_ranks
        if network is not None:
            hosts = network.hosts[:num_ranks]
            commands = [host.command(*commands[0]) for host in hosts]
            environments = stack.enter_context(
                rank_environments([host.address for host in hosts], network.address, INTERFACE)
            )
        elif num_ranks > 1:
            environments = stack.enter_context(local_rank_environments(num_ranks))
        # What the shell of the user has set for Horovod would decide the comparison.
        inherited = {key: v for key, v in os.environ.items() if not key.startswith("HOROVOD_")}
        common = {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "-1",
            "PYTHONPATH": str(harness.ROOT),
            "TF_NUM_INTRAOP_THREADS": str(threads),
            "TF_NUM_INTEROP_THREADS": str(threads),
            "OMP_NUM_THREADS": str(threads),
            # A job that stands still for long must not take its ranks for lost.
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "900",
            **(settings or {}),
        }
        made = Job()
        stack.callback(made.end)
        # A core for each rank, as on machines of their own: where ranks move about, they and their
        # many threads are in each other's way, differently in each block.
        cores: list[int | None] = [*spread(sorted(os.sched_getaffinity(0)))]
        if num_ranks == 1 or num_ranks > len(cores):
            cores = [None] * num_ranks
        for rank, environment in enumerate(environments):
            log = folder / f"{rank}.log"
            output = stack.enter_context(log.open("wb"))
            variables = {**inherited, **common, **environment}
            made.add(commands[rank], log, output, variables, cores[rank])
        yield made
