# SPDX-License-Identifier: Apache-2.0
"""Flower, the peer of `make bench-ps`: in a virtual environment of its own, one round at a time.

The environment is made once, in a cache folder of the user, from `flower/requirements.txt`.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.network import Network
from benchmarks.ps_processes import START_S, Process

_APP = Path(__file__).parent / "flower" / "app.py"
_REQUIREMENTS = Path(__file__).parent / "flower" / "requirements.txt"
# Flower reports each start to its makers otherwise, and its clients wait for that.
_SETTINGS = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_LOG_LEVEL": "ERROR"}


def interpreter() -> Path:
    """The Python that has Flower; installs it the first time.

    Raises:
        OSError: it cannot be installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tf_hips"
    wanted = hashlib.sha256(_REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = cache / f"flower-{wanted}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        commands = (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", "-r", str(_REQUIREMENTS)],
        )
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"`{' '.join(command)}` must succeed. Received: {done.stderr[-500:]}")
        (folder / "complete").touch()
    return python


def version() -> str:
    """What is pinned."""
    lines = _REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith("flwr=="))


class Flower:
    """A Flower server with its clients, which all wait for the next round."""

    def __init__(self, server: Process) -> None:
        self._server = server

    def round(self) -> float:
        """Makes one round; its seconds."""
        self._server.tell("")
        return float(self._server.hear()["seconds"])


@contextlib.contextmanager
def flower(
    num_clients: int,
    shapes: Sequence[Sequence[int]],
    num_rounds: int,
    network: Network | None = None,
) -> Iterator[Flower]:
    """Starts a server and its clients, with TLS of the server; kills them at the end.

    Args:
        num_clients: how many clients.
        shapes: of the parameters.
        num_rounds: how often `round` may be called.
        network: client i runs on its host i, the server on the bridge; None: loopback.
    """
    python = str(interpreter())
    host = network.address if network is not None else "127.0.0.1"
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hips-flower")))
        key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
                *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=flower"),
                *("-addext", f"subjectAltName=IP:{host}", "-keyout", key, "-out", certificate),
            ],
            check=True,
            capture_output=True,
        )
        common = {"address": f"{host}:{port}", "shapes": [list(shape) for shape in shapes]}
        order = {
            **common,
            "clients": num_clients,
            "rounds": num_rounds,
            "tls": [certificate, certificate, key],
        }
        command = [python, str(_APP), "server", json.dumps(order)]
        server = Process(command, log=folder / "flower server.log", settings=_SETTINGS)
        stack.callback(server.end)
        _await(host, port)
        for number in range(num_clients):
            order = {**common, "seed": number, "ca": certificate}
            command = [python, str(_APP), "client", json.dumps(order)]
            if network is not None:
                command = network.hosts[number].command(*command)
            client = Process(command, log=folder / f"client {number}.log", settings=_SETTINGS)
            stack.callback(client.end)
        server.hear()  # all are there
        yield Flower(server)


def _await(host: str, port: int) -> None:
    """Waits until somebody listens; a client that comes earlier waits for long."""
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"Flower does not listen at {host}:{port}")
        time.sleep(0.05)
