# SPDX-License-Identifier: Apache-2.0
"""Servers and children as processes, for `make bench-ps`; on loopback or on hosts of a network."""

import contextlib
import dataclasses
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
from typing import Any

from benchmarks import harness
from benchmarks.network import Network
from tf_hips.config import Tls
from tf_hips.ps.security import authority

DEADLINE_S = 600.0  # of one answer
START_S = 60.0
RUN = "bench"
_CHILD = "benchmarks.ps_child"


class Process:
    """A process that answers lines of JSON with lines of JSON."""

    def __init__(
        self, command: Sequence[str], *, log: Path, settings: dict[str, str] | None = None
    ) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=harness.ROOT,
                env={**os.environ, "PYTHONPATH": str(harness.ROOT), **(settings or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def fileno(self) -> int:
        """What `select` waits for."""
        return self._process.stdout.fileno()

    def tell(self, line: str) -> None:
        """Says one line to it."""
        self._process.stdin.write(line.encode() + b"\n")

    def hear(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Its next line.

        Raises:
            SystemExit: it has ended, or says nothing for so long; shows what it has logged.
        """
        output = self._process.stdout
        ready, _, _ = select.select([output], [], [], deadline_s)
        line = output.readline() if ready else b""
        if not line:
            why = "ended" if ready else "did not answer in time"
            text = self._log.read_text(errors="replace")[-4000:]
            raise SystemExit(f"{self._log.stem} {why}.\n{text}")
        return json.loads(line)

    def end(self) -> None:
        """Kills it: it has nothing to write."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def hear_all(processes: Sequence[Process], deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
    """The next line of each, in their order.

    Raises:
        SystemExit: one has ended, or says nothing for so long; shows what it has logged.
    """
    end = time.monotonic() + deadline_s
    answers: dict[int, dict[str, Any]] = {}
    while waiting := [one for one in processes if one.pid not in answers]:
        ready, _, _ = select.select(waiting, [], [], max(0.0, end - time.monotonic()))
        for one in ready or waiting[:1]:
            answers[one.pid] = one.hear(0.0)
    return [answers[one.pid] for one in processes]


@dataclasses.dataclass(frozen=True)
class Server:
    """A server process.

    Attributes:
        process: it.
        address: where children reach it.
        start_s: from the start of the process to the moment at which it listened.
        identities: of the children, by site; None without TLS.
    """

    process: Process
    address: str
    start_s: float
    identities: dict[str, Tls] | None

    def memory(self) -> tuple[int, int]:
        """Resident bytes now, and the most there were."""
        found = {}
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                found[name] = 1024 * int(value.split()[0])
        return found["VmRSS"], found["VmHWM"]

    def libraries(self) -> str:
        """What is mapped into its memory, by name."""
        return Path(f"/proc/{self.process.pid}/maps").read_text()


def sites_of(num_children: int) -> tuple[str, ...]:
    """Names of so many sites."""
    return tuple(f"s{number}" for number in range(num_children))


@contextlib.contextmanager
def server(
    num_children: int,
    *,
    is_durable: bool = True,
    is_secure: bool = True,
    network: Network | None = None,
    host: int | None = None,
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """Starts a server; kills it at the end.

    Args:
        num_children: how many children it has.
        is_durable: with `--state`, on the disk of the temporary folder.
        is_secure: with mutual TLS.
        network: on which the children are; None: loopback.
        host: number of the server's host there; None: the bridge.
        options: more options of `tf-hips server`.
    """
    sites = sites_of(num_children)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hips-bench")))
        at = "127.0.0.1"
        command = [sys.executable, "-m", "tf_hips.cli", "server"]
        if network is not None:
            at = network.address if host is None else network.hosts[host].address
        announce = folder / "address"
        command += ["--parties", ",".join(sites), "--run", RUN, "--bind", f"{at}:0"]
        command += ["--announce", str(announce), *options]
        if is_durable:
            command += ["--state", str(folder / "state")]
        identities = None
        if is_secure:
            authority.make_authority(folder / "tls", days=2)

            def signed(role: str, site: str) -> Tls:
                files = {"folder": folder / "tls", "authority": folder / "tls", "days": 1}
                return authority.make_certificate(role, site, **files)

            mine = signed("global-server", "hq")
            identities = {site: signed("party", site) for site in sites}
            command += ["--authority", mine.authority, "--certificate", mine.certificate]
            command += ["--key", mine.key]
        else:
            command.append("--insecure")
        if network is not None and host is not None:
            command = network.hosts[host].command(*command)
        began = time.perf_counter()
        process = Process(command, log=folder / "server.log")
        stack.callback(process.end)
        while not announce.exists():
            if time.perf_counter() - began > START_S:
                text = (folder / "server.log").read_text(errors="replace")
                raise SystemExit(f"the server does not listen.\n{text}")
            time.sleep(0.002)
        start_s = time.perf_counter() - began
        yield Server(process, announce.read_text().strip(), start_s, identities)


class Children:
    """Processes of children, asked together."""

    def __init__(self, processes: list[Process], num_children: int) -> None:
        self.processes, self._num_children = processes, num_children

    def join(self, at: Server, shapes: Sequence[Sequence[int]], up: str, down: str) -> int:
        """All join; bytes that one of them sends in a round."""
        sites = sites_of(self._num_children)
        each = self._num_children // len(self.processes)
        for number, process in enumerate(self.processes):
            mine = sites[number * each : (number + 1) * each]
            known = at.identities
            order = {
                "do": "join",
                "server": at.address,
                "run": RUN,
                "sites": mine,
                "identities": [dataclasses.asdict(known[one]) if known else None for one in mine],
                "shapes": [list(shape) for shape in shapes],
                "up": up,
                "down": down,
            }
            process.tell(json.dumps(order))
        answers = [process.hear() for process in self.processes]
        return int(answers[0]["bytes"])

    def rounds(self, first: int, count: int = 1) -> dict[str, list[float]]:
        """Seconds of rounds, the slowest child's: of all, and of the exchange alone."""
        for process in self.processes:
            process.tell(json.dumps({"do": "rounds", "first": first, "count": count}))
        answers = [process.hear() for process in self.processes]
        return {
            name: [max(values) for values in zip(*(one[name] for one in answers), strict=True)]
            for name in ("seconds", "exchanges")
        }

    def leave(self) -> None:
        """All leave the run."""
        for process in self.processes:
            process.tell(json.dumps({"do": "leave"}))
        for process in self.processes:
            process.hear()


@contextlib.contextmanager
def children(
    num_children: int, *, num_processes: int | None = None, network: Network | None = None
) -> Iterator[Children]:
    """Starts processes that are children; kills them at the end.

    Args:
        num_children: how many children.
        num_processes: how many processes they are, alike; None: one each.
        network: process i runs on its host i; None: all on this machine's loopback.
    """
    count = num_processes or num_children
    if num_children % count:
        raise ValueError(f"`num_processes` must divide {num_children}. Received: {count}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hips-bench")))
        processes = []
        for number in range(count):
            command = [sys.executable, "-m", _CHILD]
            if network is not None:
                command = network.hosts[number].command(*command)
            one = Process(command, log=folder / f"child {number}.log")
            stack.callback(one.end)
            processes.append(one)
        yield Children(processes, num_children)
