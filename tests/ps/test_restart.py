# SPDX-License-Identifier: Apache-2.0
"""Real servers, killed with SIGKILL and started again under children that notice nothing."""

import errno
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ps.parties import (
    DEADLINE_S,
    SHAPES,
    SITES,
    Party,
    expected_rounds,
    parties,
    serving,
    together,
    train_all,
)
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tests.support.forked import Program, run
from tf_hips import log
from tf_hips.errors import ConfigError, PeerError, StateError
from tf_hips.ps.disk import journal as journals
from tf_hips.ps.disk.file_format import Reader
from tf_hips.ps.server.server import Server, ServerConfig
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Kind, from_payload

pytestmark = pytest.mark.heavy  # servers start in most of these

NUM_CHUNKS = len(Model(SHAPES).chunks)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """`tf-hips server --state` on a port of its own, which can be killed and started again."""

    def __init__(self, base: Path) -> None:
        self.state = base / "state"
        self.logs = base / "logs"
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.lines: list[str] = []
        self.is_eager = False
        self.is_once = True
        self.process: Program | None = None
        self._drain: threading.Thread | None = None

    def command(self, *more: str) -> list[str]:
        """Of a server that makes a snapshot in every round where `is_eager` is set."""
        options = ["--parties", ",".join(SITES), "--insecure"]
        options += ["--once"] if self.is_once else []
        options += ["--state", str(self.state), *more]
        if not self.is_eager:
            return [sys.executable, "-m", "tf_hips.cli", "server", *options]
        program = (
            "from tf_hips import cli\n"
            "from tf_hips.ps.disk import durable\n"
            "durable.SNAPSHOT_AFTER_BYTES = durable.SNAPSHOT_AFTER_SNAPSHOTS = 0\n"
            f"cli.main({['server', *options]!r})"
        )
        return [sys.executable, "-c", program]

    def start(self) -> None:
        """Returns when it listens."""
        self.process = Program(
            self.command("--bind", self.address, "--log-dir", str(self.logs)),
            stderr=subprocess.PIPE,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if "listens at" in line:
                break
        else:
            raise AssertionError("".join(self.lines))
        self._drain = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._drain.start()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        # Told to end, it ends well, and leaves its run to the next one.
        code = 0 if number == signal.SIGTERM else -number
        assert self.process.wait(DEADLINE_S) == code

    def restart(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.kill(number)
        self.start()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
        if self._drain is not None:
            self._drain.join(DEADLINE_S)

    def accepted(self, kind: Kind) -> list[dict[str, Any]]:
        """What the journal says of one kind; it may be growing."""
        reader = Reader(self.state / "local" / "journal-000001")
        found = [from_payload(body)[0] for one, body in reader.records() if one == kind]
        reader.close()
        return found

    def wait_for(self, kind: Kind, is_there: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Waits until the journal says so."""
        eventually(lambda: is_there(self.accepted(kind)))

    def _read(self, lines: Any) -> None:
        self.lines += lines


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    made = ServerProcess(tmp_path)
    made.start()
    yield made
    made.end()


class Later:
    """A function that runs in a thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(2 * DEADLINE_S)
        assert self._result, "a party hangs"
        if isinstance(self._result[0], BaseException):
            raise self._result[0]
        return self._result[0]

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self._result.append(function())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._result.append(error)


def check_each_counted_once(server: ServerProcess, num_rounds: int) -> None:
    came = Counter(
        (one["round"], one["child"], one["chunk"]) for one in server.accepted(Kind.PACKET)
    )
    assert came == Counter(
        (number, child, chunk)
        for number in range(num_rounds)
        for child in range(len(SITES))
        for chunk in range(NUM_CHUNKS)
    )


def test_a_run_goes_on_with_a_server_killed_in_every_phase(server: ServerProcess) -> None:
    a, b = (Party(server.address, site, None) for site in SITES)
    joining = Later(a.join)
    eventually(lambda: a.client._is_durable)  # it has an answer to its first call, and joins
    server.restart()
    b.join()
    joining.result()

    weights = np.arange(3 << 18, dtype=np.float32)
    a.client.first_sync([weights])
    server.restart(signal.SIGTERM)
    np.testing.assert_array_equal(b.client.first_sync([0 * weights])[0], weights)

    gathering = Later(lambda: a.client.gather(0, "loss", b"from a"))
    server.wait_for(Kind.GATHERED, lambda found: len(found) == 1)
    server.restart()
    assert b.client.gather(0, "loss", b"from b") == gathering.result() == [b"from a", b"from b"]

    early = Later(lambda: a.train(0, 0))
    server.wait_for(Kind.PACKET, lambda found: len(found) == NUM_CHUNKS)
    server.restart(signal.SIGTERM)
    merged = b.train(0, 0)
    assert early.result() == merged

    merged += train_all((a, b), 1, 2)
    server.restart()
    merged += train_all((a, b), 3, 4)
    assert merged == expected_rounds(5)

    a.client.leave()
    server.kill()
    leaving = Later(b.client.leave)
    server.start()
    leaving.result()
    assert server.process is not None
    assert server.process.wait(DEADLINE_S) == 0
    check_each_counted_once(server, 5)
    restored = [one for one in log.read_events(server.logs) if one["event"] == "restored"]
    # Before the first restart nobody had joined, so there was nothing to restore.
    assert [one["round"] for one in restored] == [0, 0, 0, 2, 4]
    assert all(one["records"] > 0 < one["bytes"] for one in restored)


@pytest.mark.slow  # `make test-faults` does more of it
def test_a_server_killed_while_rounds_go_on(server: ServerProcess) -> None:
    a, b = (Party(server.address, site, None) for site in SITES)
    together(a.join, b.join)
    last = 59
    training = [Later(lambda one=one: one.train(0, last)) for one in (a, b)]
    for number, how in ((3, signal.SIGKILL), (17, signal.SIGTERM), (40, signal.SIGKILL)):
        server.wait_for(
            Kind.PACKET, lambda found, number=number: bool(found) and found[-1]["round"] >= number
        )
        server.restart(how)
    merged = [one.result() for one in training]
    assert merged[0] == merged[1] == expected_rounds(last + 1)
    together(a.client.leave, b.client.leave)
    assert server.process is not None
    assert server.process.wait(DEADLINE_S) == 0
    check_each_counted_once(server, last + 1)
    restored = [one for one in log.read_events(server.logs) if one["event"] == "restored"]
    assert all(3 <= one["round"] < last for one in restored)
    assert len(restored) == 3


@pytest.mark.slow  # `make test-faults` does more of it
def test_a_server_killed_while_it_makes_snapshots(server: ServerProcess) -> None:
    server.is_eager = True
    server.restart()
    a, b = (Party(server.address, site, None) for site in SITES)
    together(a.join, b.join)
    last = 59
    training = [Later(lambda one=one: one.train(0, last)) for one in (a, b)]

    def snapshots() -> list[int]:
        events = log.read_events(server.logs)
        return [event["round"] for event in events if event["event"] == "snapshot"]

    for number in (1, 17, 40):
        eventually(lambda number=number: max(snapshots(), default=-1) >= number)
        server.restart()
    merged = [one.result() for one in training]
    assert merged[0] == merged[1] == expected_rounds(last + 1)
    together(a.client.leave, b.client.leave)
    assert server.process is not None
    assert server.process.wait(DEADLINE_S) == 0


def test_a_full_disk_ends_the_run_for_all_in_one_line(server: ServerProcess) -> None:
    a, b = (Party(server.address, site, None) for site in SITES)
    together(a.join, b.join)
    expected = train_all((a, b), 0, 1)
    assert server.process is not None
    path = server.state / "local" / "journal-000001"
    # Neither the journal nor the event log has room for another round.
    limit = path.stat().st_size + 100
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    for one in [Later(lambda one=one: one.train(2, 2)) for one in (a, b)]:
        with pytest.raises(PeerError, match=f"cannot keep the run: {path}: File too large"):
            one.result()
    for one in (a, b):
        one.client.close()
    assert server.process.wait(DEADLINE_S) == 1
    server.end()
    assert sum("error: The server cannot keep the run" in line for line in server.lines) == 1
    # What was durable is there: nobody has left, and the run has not ended in it.
    server.start()
    assert any("in round" in line for line in server.lines)
    assert expected == expected_rounds(2)


def test_a_second_server_on_the_folder_is_refused_in_one_line(server: ServerProcess) -> None:
    done = run(server.command("--bind", "127.0.0.1:0"), timeout=DEADLINE_S)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert lines == done.stderr.splitlines()
    assert len(lines) == 1
    assert "`state` must be a folder that no running server uses for run `local`" in lines[0]


def test_a_state_of_another_server_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "parties": SITES,
        "insecure": True,
        "state_dir": str(tmp_path),
        "compression": "fp16",
    }
    first = Server(ServerConfig(**settings))
    first.start()
    first.stop(0.0)
    for change, text in (
        ({"compression": "fp32"}, "compression=fp32, as this one"),
        ({"parties": ("a", "c")}, "Received: parties=\\('a', 'b'\\)"),
    ):
        other = Server(ServerConfig(**settings | change))
        with pytest.raises(StateError, match=text):
            other.start()
    path = tmp_path / "local" / "journal-000001"
    path.write_bytes(path.read_bytes()[:50] + b"?" + path.read_bytes()[51:])
    with pytest.raises(StateError, match="journal-000001 is damaged at byte 0: its header"):
        Server(ServerConfig(**settings)).start()


def test_a_port_that_is_taken_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"parties": SITES, "insecure": True, "state_dir": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="`bind` must be a free address"):
            Server(ServerConfig(**settings, bind=bind)).start()
    with serving(None, **settings):  # type: ignore[arg-type]
        pass


def test_a_server_whose_disk_was_full_goes_on_with_the_run(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, pieces: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with serving(certificates, state_dir=str(tmp_path)) as server:
        with parties(server, certificates) as members, monkeypatch.context() as patch:
            train_all(members, 0, 1)
            patch.setattr(journals.os, "writev", full)
            for later in [Later(lambda one=one: one.train(2, 2)) for one in members]:
                with pytest.raises(PeerError, match="journal-000001: No space left on device"):
                    later.result()
            # It cannot go on yet.
            late = Party(server.address, "a", certificates.party("a"))
            with pytest.raises(PeerError, match="The server cannot keep a run in"):
                late.join()
        with parties(server, certificates) as members:
            assert all(one.client._joined().is_back for one in members)
            assert train_all(members, 0, 2) == expected_rounds(3)
