# SPDX-License-Identifier: Apache-2.0
"""A real sshd on loopback with keys of its own, and a cluster whose machines are folders here."""

import contextlib
import dataclasses
import getpass
import io
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.support import children
from tf_hips import cli

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
# Two names of one machine, as ssh sees them.
HOSTS = ("127.0.0.1", "127.0.0.2")
_SEPARATED = Path("/run/sshd")


def missing() -> str:
    """What this machine lacks to serve ssh; empty if nothing."""
    if PROGRAM is None:
        return "no sshd (openssh-server) on this machine"
    if not shutil.which("ssh") or not shutil.which("ssh-keygen"):
        return "no ssh (openssh-client) on this machine"
    return ""


@dataclasses.dataclass(frozen=True)
class Served:
    """A running sshd.

    Attributes:
        folder: its keys and its log.
        port: where it listens.
        process: its process.
    """

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    def options(self, *, key: str = "key", hosts: str = "known_hosts") -> list[str]:
        """Options of ssh with which its hosts are known and let us in."""
        return [
            *("-F", "none", "-p", str(self.port), "-i", str(self.folder / key)),
            *("-o", f"UserKnownHostsFile={self.folder / hosts}"),
            *("-o", "GlobalKnownHostsFile=none", "-o", "IdentitiesOnly=yes"),
            *("-o", "IdentityAgent=none"),
        ]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """An sshd that lets in who has `folder/key`; ended with all its connections."""
    for name in ("host", "key", "stranger"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    if os.geteuid() == 0:
        _SEPARATED.mkdir(mode=0o755, exist_ok=True)
    served = _start(folder)
    public = (folder / "host.pub").read_text()
    (folder / "known_hosts").write_text(
        "".join(f"[{host}]:{served.port} {public}" for host in HOSTS)
    )
    try:
        yield served
    finally:
        served.process.terminate()
        served.process.wait(10)


def _start(folder: Path) -> Served:
    """Another process may take a free port before sshd has it; then the next one is tried."""
    for _ in range(10):
        with socket.socket() as probe:
            probe.bind((HOSTS[0], 0))
            port = probe.getsockname()[1]
        (folder / "sshd_config").write_text(
            "\n".join(
                [
                    f"Port {port}",
                    *(f"ListenAddress {host}" for host in HOSTS),
                    f"HostKey {folder / 'host'}",
                    f"AuthorizedKeysFile {folder / 'authorized_keys'}",
                    "PidFile none",
                    "UsePAM no",
                    "StrictModes no",
                    "PasswordAuthentication no",
                    "PermitRootLogin yes",
                    # What it starts is found by the guard against processes left behind.
                    f"SetEnv {children.VARIABLE}={os.environ[children.VARIABLE]}",
                ]
            )
            + "\n"
        )
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(PROGRAM), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log
            )
        if _answers(process, port):
            return Served(folder, port, process)
        process.wait(10)
    raise RuntimeError(f"sshd does not start: {(folder / 'log').read_text()}")


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    while process.poll() is None:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection((HOSTS[1], port), timeout=10) as probe,
        ):
            return probe.recv(4) == b"SSH-"
    return False


class Done(NamedTuple):
    """What a command came to: its exit code and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@dataclasses.dataclass(frozen=True)
class Site:
    """A cluster that is all on this machine.

    Attributes:
        folder: holds `cluster.yaml`, `job/` and `pki/`.
        port: the server's.
    """

    folder: Path
    port: int

    @property
    def file(self) -> Path:
        """`cluster.yaml`."""
        return self.folder / "cluster.yaml"

    def home(self, role: str) -> Path:
        """The folder of `server-hub`, `party-west` or `party-east`."""
        machine = "one" if role in ("server-hub", "party-west") else "two"
        return self.folder / machine / role

    def run(self, *arguments: str) -> Done:
        """`tf-hips COMMAND --from cluster.yaml ...`."""
        command, *more = arguments
        out, error = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(error),
            pytest.MonkeyPatch.context() as environment,
            pytest.raises(SystemExit) as ended,
        ):
            environment.setenv("COLUMNS", "250")
            cli.main([command, "--from", str(self.file), *more])
        return Done(int(ended.value.code or 0), out.getvalue(), error.getvalue())

    def states(self, *arguments: str) -> dict[str, str]:
        """What a command says of each role."""
        lines = self.run(*arguments).stdout.splitlines()[1:]
        return {line.split()[0]: " ".join(line.split()[2:]) for line in lines}

    def change(self, **keys: Any) -> None:
        """Writes other values of keys into `cluster.yaml`."""
        told = yaml.safe_load(self.file.read_text())
        self.file.write_text(yaml.safe_dump({**told, **keys}))


def site(folder: Path, options: list[str], script: str) -> Site:
    """A server and two parties on two "machines", two addresses and folders of this one."""
    with socket.socket() as probe:
        probe.bind((HOSTS[0], 0))
        port = probe.getsockname()[1]
    (folder / "job").mkdir()
    (folder / "job" / "train.py").write_text(script)
    program = folder / "tf-hips"
    begin = f"#!/bin/sh\nexport OPENBLAS_NUM_THREADS=1 PYTHONPATH={ROOT}\n"
    program.write_text(f'{begin}exec {sys.executable} -m tf_hips.cli "$@"\n')
    program.chmod(0o755)
    one, two = folder / "one", folder / "two"
    (folder / "cluster.yaml").write_text(
        yaml.safe_dump(
            {
                "version": 1,
                "run": "local",
                "script": "job/train.py",
                "arguments": ["--name", "two words"],
                "certificates": "pki",
                "folder": str(one),
                "program": str(program),
                "ssh_options": options,
                "servers": [
                    {
                        "site": "hub",
                        "host": f"{getpass.getuser()}@{HOSTS[0]}",
                        "address": f"127.0.0.1:{port}",
                    }
                ],
                "parties": [
                    {"site": "west", "hosts": {HOSTS[0]: 1}, "environment": {"GREETING": "a b"}},
                    {"site": "east", "hosts": {HOSTS[1]: 1}, "folder": str(two)},
                ],
                "server": {"once": True, "state": "state", "lost_after": 20},
            }
        )
    )
    for command in (
        ["init", "pki"],
        ["issue", "pki", "--server", "hub", "--party", "west", "--party", "east"],
    ):
        with contextlib.chdir(folder), pytest.raises(SystemExit) as ended:
            cli.main(["certs", *command])
        assert ended.value.code == 0
    return Site(folder, port)
