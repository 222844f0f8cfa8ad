# SPDX-License-Identifier: Apache-2.0
"""The processes of one job: a server that can be killed and started again, its children, a relay.

All waiting is for something that a process says or does; what does not come within `DEADLINE_S`
ends the job with what all processes have said.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.training import Setting, undisturbed
from tests.ps.relay import Relay
from tf_hips.config import Tls
from tf_hips.ps import authority
from tf_hips.ps.model import Model
from tf_hips.ps.recorder import Kind, from_payload
from tf_hips.ps.records import Reader

DEADLINE_S = 90.0
RUN = "job"
ROOT = Path(__file__).resolve().parents[2]


class Failed(AssertionError):
    """A job did not end as it must."""


class Spoken:
    """A process that says lines of JSON, and hears lines."""

    def __init__(self, module: str, order: dict[str, Any], log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(order)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self._said: list[dict[str, Any]] = []
        self._heard = threading.Condition()
        self._has_ended = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def tell(self, line: str) -> None:
        """Says one line to it; one that has ended is found out by `wait_for`."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def wait_for(
        self, key: str, value: object = None, *, patience_s: float = DEADLINE_S
    ) -> dict[str, Any]:
        """Waits until it says `key`, with `value` unless that is None."""

        def found() -> dict[str, Any] | None:
            for one in self._said:
                if key in one and value in (None, one[key]):
                    return one
            return None

        with self._heard:
            self._heard.wait_for(lambda: found() or self._has_ended, patience_s)
            line = found()
        if line is None:
            raise Failed(f"{self._log.stem} did not say `{key}` {value}\n{self.story()}")
        return line

    def has_said(self, key: str) -> bool:
        """Whether it has said `key`."""
        with self._heard:
            return any(key in one for one in self._said)

    def forget(self, key: str) -> None:
        """Forgets what it has said about `key`."""
        with self._heard:
            self._said = [one for one in self._said if key not in one]

    def ends(self) -> int:
        """Waits until it ends; its exit code."""
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self._log.stem} does not end\n{self.story()}") from None
        self._thread.join(DEADLINE_S)
        return code

    def kill(self) -> None:
        """Kills it, by its number."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.ends()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.process.stdin.close()
        self.process.stdout.close()

    def story(self) -> str:
        """The last lines of what it said."""
        text = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
        return f"--- {self._log.stem}, said {self._said[-3:]}\n{text}"

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._heard:
                self._said.append(json.loads(line))
                self._heard.notify_all()
        with self._heard:
            self._has_ended = True
            self._heard.notify_all()


@dataclasses.dataclass(frozen=True)
class Certificates:
    """Identities of a server and of the sites, in files."""

    server: Tls
    sites: dict[str, Tls]


@contextlib.contextmanager
def certificates(sites: tuple[str, ...]) -> Iterator[Certificates]:
    """Makes an authority and what it signs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority.make_authority(folder, days=2)

        def signed(role: str, site: str) -> Tls:
            return authority.make_certificate(role, site, folder=folder, authority=folder, days=1)

        yield Certificates(
            signed("global-server", "hq"), {site: signed("party", site) for site in sites}
        )


class Job:
    """One run: `start`, `train` as far as wanted with faults in between, `finish`."""

    def __init__(
        self,
        base: Path,
        setting: Setting,
        known: Certificates | None = None,
        *,
        is_eager: bool = False,
        resends: bool = False,
    ) -> None:
        """A job that has not begun.

        Args:
            base: an empty folder.
            setting: what is trained.
            known: identities, where the setting is secure.
            is_eager: the server makes a snapshot in every round.
            resends: children that call again send all, and not only what the server lacks.
        """
        self.setting = setting
        self.state = base / "state"
        self.archive = base / "archive"
        self.archive.mkdir()
        self.is_eager, self.resends = is_eager, resends
        self.num_kills = 0
        self._base, self._known = base, known
        self.server_log = base / "server.log"
        self.events = base / "events"
        self.more: list[str] = []  # options of the next server
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.relay = Relay(self.port)
        self.server: Spoken | None = None
        self.children: list[Spoken] = []

    def __enter__(self) -> "Job":
        self.relay.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self.children, *([self.server] if self.server else [])):
            one.close()
        self.relay.__exit__()

    def options(self) -> list[str]:
        """Of `tf-hips server`."""
        found = ["--parties", ",".join(self.setting.sites), "--run", RUN, "--once"]
        found += ["--bind", f"127.0.0.1:{self.port}", "--state", str(self.state)]
        found += ["--log-dir", str(self.events), *self.more]
        if self.setting.has_quorum:
            found += ["--quorum", str(len(self.setting.sites) - 1), "--round-deadline", "0.3"]
        if self._known is None:
            return [*found, "--insecure"]
        tls = self._known.server
        return [
            *found,
            "--authority",
            tls.authority,
            "--certificate",
            tls.certificate,
            "--key",
            tls.key,
        ]

    def serve(self, *, is_refused: bool = False, trap: tuple[str, int, int] | None = None) -> None:
        """Starts a server; returns when it listens, or has ended because it refuses to.

        `trap`: as that of `trap`, set before the server listens.
        """
        order = {
            "options": self.options(),
            "archive": str(self.archive),
            "is_eager": self.is_eager,
            "trap": trap,
        }
        self.server = Spoken("tests.faults.trapped", order, self.server_log)
        if is_refused:
            self.server.ends()
        else:
            self.server.wait_for("listens")

    def start(self) -> None:
        """Starts the server and the children, which join and wait."""
        self.serve()
        self.bring_children()

    def bring_children(self) -> None:
        """Starts the children."""
        for site in self.setting.sites:
            self.bring_child(site, self.setting)

    def bring_child(self, site: str, setting: Setting) -> None:
        """Starts one child."""
        order = {
            "setting": dataclasses.asdict(setting),
            "site": site,
            "server": self.relay.address,
            "run": RUN,
            "resends": self.resends,
            "tls": dataclasses.asdict(self._known.sites[site]) if self._known else None,
            "backup": str(self._base / f"site-{site}.npz"),
        }
        self.children.append(Spoken("tests.faults.child", order, self._base / f"site-{site}.log"))

    def kill_child(self, place: int, delay_s: float, stop: int) -> None:
        """Kills a child and starts it again, `delay_s` later; it goes on up to round `stop`."""
        self.children[place].kill()
        self.children[place].close()
        self.num_kills += 1
        threading.Event().wait(delay_s)  # no party for so long is the fault
        self.bring_child(self.setting.sites[place], self.setting)
        self.children[place] = self.children.pop()
        self.children[place].tell(str(stop))

    def trap_child(self, place: int, where: str, number: int) -> None:
        """Lets a child stop at a place of round `number`."""
        self.children[place].tell(json.dumps({"place": where, "round": number}))
        self.children[place].wait_for("set")

    def trap(self, place: str, number: int, count: int) -> None:
        """Sets a trap from round `number` on."""
        self.server.tell(json.dumps({"place": place, "round": number, "count": count}))
        self.server.wait_for("set")
        self.server.forget("set")

    def train(self, stop: int) -> None:
        """Lets the children train up to round `stop`, which is not among them."""
        for one in self.children:
            one.tell(str(stop))

    def reach(self, number: int) -> None:
        """Waits until all children have ended round `number`; -1: until they have begun."""
        for one in self.children:
            if number < 0:
                one.wait_for("joined")
            else:
                one.wait_for("round", number)

    def kill(
        self,
        delay_s: float = 0.0,
        *,
        again: bool = False,
        serve: Callable[[], None] | None = None,
    ) -> None:
        """Kills the server and starts it, `delay_s` later.

        Args:
            delay_s: how long there is no server.
            again: the new one is killed, too, as soon as it listens.
            serve: starts a server; None: as `serve` does.
        """
        for _ in range(1 + again):
            self.server.kill()
            self.num_kills += 1
            threading.Event().wait(delay_s)  # no server for so long is the fault
            (serve or self.serve)()

    def finish(self) -> None:
        """Lets the children leave, and looks at what is left.

        Raises:
            Failed: weights are not what they are where nothing happens, an update was lost or
                counted twice, or a process did not end in peace.
        """
        for one in self.children:
            one.tell("")
        self.check_end()

    def check_end(self) -> None:
        """The second half of `finish`."""
        digests = [one.wait_for("digest")["digest"] for one in self.children]
        wanted = digests[0] if self.setting.has_quorum else undisturbed(self.setting)
        if any(one != wanted for one in digests):
            raise Failed(f"weights must be {wanted}. Received: {digests}\n{self.story()}")
        codes = [one.ends() for one in (*self.children, self.server)]
        if any(codes):
            raise Failed(f"all must end with 0. Received: {codes}\n{self.story()}")
        self.check_log()

    def check_log(self) -> None:
        """Raises Failed unless the journals hold each update once."""
        came = Counter(
            (fields["round"], fields["child"], fields["chunk"])
            for fields in self.recorded(Kind.PACKET)
        )
        shapes = self.recorded(Kind.MODEL)[0]["shapes"]
        expected = {
            (number, child, chunk)
            for number in range(self.setting.rounds)
            for child in range(len(self.setting.sites))
            for chunk in range(len(Model.from_json(shapes).chunks))
        }
        if self.setting.has_quorum:
            self._check_closings()
        lost = sorted(expected - came.keys())
        twice = sorted(key for key, count in came.items() if count > 1)
        if lost or twice or came.keys() - expected:
            raise Failed(f"lost: {lost[:5]}; twice: {twice[:5]} (round, child, chunk)")

    def _check_closings(self) -> None:
        """Raises Failed unless each round was closed once, and no update counts twice."""
        closings = self.recorded(Kind.CLOSED)
        if [one["round"] for one in closings] != list(range(self.setting.rounds)):
            raise Failed(f"each round must be closed once. Received: {closings}")
        counted = Counter((child, one["round"]) for one in closings for child in one["children"])
        counted += Counter((child, number) for one in closings for child, number in one["late"])
        if any(count > 1 for count in counted.values()):
            raise Failed(f"an update counts once. Received: {counted}")

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

    def eventually(self, is_there: Callable[[], bool]) -> None:
        """Waits for what no process says."""
        deadline = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while not is_there():
            if time.monotonic() > deadline:
                raise Failed(f"what the job waits for does not come\n{self.story()}")
            pause.wait(0.005)

    def story(self) -> str:
        """What all processes have said."""
        return "\n".join(one.story() for one in (*self.children, self.server))


def run(base: Path, setting: Setting, act: Callable[[Job], None], **more: Any) -> Job:
    """Runs a job in `base` with faults that `act` makes, to its end.

    Raises:
        Failed: it did not end as it must.
    """
    with contextlib.ExitStack() as stack:
        known = stack.enter_context(certificates(setting.sites)) if setting.is_secure else None
        job = stack.enter_context(Job(base, setting, known, **more))
        job.start()
        job.reach(-1)
        act(job)
        job.train(setting.rounds)
        job.reach(setting.rounds - 1)
        job.finish()
        return job
