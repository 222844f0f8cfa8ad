# SPDX-License-Identifier: Apache-2.0
"""The processes of one job: its servers, which can be killed and started again, and its children.

top, top-1, ...   the global server, or the shards of one
west              the server of a party, below all of these
a, b, c           children, each of the server that the setting says
"""

import contextlib
import dataclasses
import functools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.hosted import RUN, Hosted, Trap
from tests.faults.spoken import DEADLINE_S, ROOT, Failed, Spoken
from tests.faults.training import Setting, undisturbed
from tests.ps.relay import Relay
from tf_hips.config import Tls
from tf_hips.ps.security import authority
from tf_hips.ps.terms.assignment import Shard

__all__ = ["DEADLINE_S", "ROOT", "RUN", "Certificates", "Failed", "Job", "certificates", "run"]

TOP = "top"


@dataclasses.dataclass(frozen=True)
class Certificates:
    """Identities of servers and of sites, in files."""

    servers: dict[str, Tls]  # by site; of the global server by `TOP`
    sites: dict[str, Tls]


@contextlib.contextmanager
def certificates(setting: Setting) -> Iterator[Certificates]:
    """Makes an authority and what it signs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority.make_authority(folder, days=2)

        def signed(role: str, site: str) -> Tls:
            return authority.make_certificate(role, site, folder=folder, authority=folder, days=1)

        below = [site for site, _ in setting.parties]
        servers = {TOP: signed("global-server", "hq")}
        servers |= {site: signed("server", site) for site in below}
        sites = (*below, *setting.sites)
        yield Certificates(servers, {site: signed("party", site) for site in sites})


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
        wanted: str | None = None,
    ) -> None:
        """A job that has not begun.

        Args:
            base: an empty folder.
            setting: what is trained.
            known: identities, where the setting is secure.
            is_eager: servers make a snapshot in every round.
            resends: children that call again send all, and not only what the server lacks.
            wanted: digest of the final weights; None: they must be equal.
        """
        self.setting = setting
        self.resends = resends
        self.num_child_kills = 0
        self.digest = ""  # of the first child's weights, in the end
        self._wanted = wanted
        self._base, self._known = base, known
        self.tops = [
            Hosted(
                base,
                f"{TOP}-{place}" if place else TOP,
                lambda place=place: self._top_options(place),  # type: ignore[misc]
                is_eager=is_eager,
                children=setting.top_children,
                is_sketched=setting.draws,
                shard=Shard(place, setting.shards),
            )
            for place in range(setting.shards)
        ]
        below = [
            Hosted(
                base,
                site,
                lambda site=site, leaves=leaves: self._party_options(site, leaves),  # type: ignore[misc]
                is_eager=is_eager,
                children=leaves,
                is_below=True,
                is_sketched=setting.draws,
            )
            for site, leaves in setting.parties
        ]
        self.servers = {one.name: one for one in (*self.tops, *below)}
        self.children: list[Spoken] = []

    def __enter__(self) -> "Job":
        for one in self.servers.values():
            one.relay.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        processes = [one.process for one in self.servers.values() if one.process is not None]
        for process in (*self.children, *processes):
            process.close()
        for one in self.servers.values():
            one.relay.__exit__()

    @property
    def top(self) -> Hosted:
        """The first of the topmost servers."""
        return self.tops[0]

    @property
    def server(self) -> Spoken:
        """Its process."""
        return self.top.running

    @property
    def relay(self) -> Relay:
        """What all travels through on the way to it."""
        return self.top.relay

    @property
    def num_kills(self) -> int:
        """Processes that were killed."""
        return self.num_child_kills + sum(one.num_kills for one in self.servers.values())

    @property
    def num_cuts(self) -> int:
        """Links that were cut."""
        return sum(one.relay.num_cuts for one in self.servers.values())

    def address(self, site: str = TOP) -> str:
        """Where the children of a server find it; of the topmost one, all of its shards."""
        servers = self.tops if site == TOP else [self.servers[site]]
        return ",".join(one.relay.address for one in servers)

    def _top_options(self, place: int) -> list[str]:
        found = ["--parties", ",".join(self.setting.top_children), *self._identity(TOP)]
        if self.setting.has_quorum:
            quorum = len(self.setting.top_children) - 1
            found += ["--quorum", str(quorum), "--round-deadline", "0.3"]
        if self.setting.rule is not None:
            found += ["--rule", self.setting.rule]
            if place:
                found += ["--lead", self.top.relay.address]
        return [*found, "--shard", f"{place}/{self.setting.shards}"]

    def _party_options(self, site: str, leaves: tuple[str, ...]) -> list[str]:
        found = ["--parties", ",".join(leaves), *self._identity(site)]
        found += ["--uplink", self.address(), "--site", site]
        if self._known is None:
            return found
        identity = self._known.sites[site]
        return [
            *found,
            *("--uplink-certificate", identity.certificate, "--uplink-key", identity.key),
        ]

    def _identity(self, site: str) -> list[str]:
        if self._known is None:
            return ["--insecure"]
        tls = self._known.servers[site]
        return [
            *("--authority", tls.authority),
            *("--certificate", tls.certificate, "--key", tls.key),
        ]

    def serve(self, *, is_refused: bool = False, trap: Trap | None = None) -> None:
        """Starts the first of the topmost servers; see `Hosted.serve`."""
        self.top.serve(is_refused=is_refused, trap=trap)

    def start(self) -> None:
        """Starts the servers and the children, which join and wait."""
        for one in self.servers.values():
            one.serve()
        self.bring_children()

    def bring_children(self) -> None:
        """Starts the children."""
        for site in self.setting.sites:
            self.bring_child(site, self.setting)

    def bring_child(self, site: str, setting: Setting) -> None:
        """Starts one child."""
        server = setting.server_of(site)
        order = {
            "setting": dataclasses.asdict(setting),
            "site": site,
            "server": self.address(server or TOP),
            "role": "server" if server else "global-server",
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
        self.num_child_kills += 1
        threading.Event().wait(delay_s)  # no party for so long is the fault
        self.bring_child(self.setting.sites[place], self.setting)
        self.children[place] = self.children.pop()
        self.children[place].tell(str(stop))

    def trap_child(self, place: int, where: str, number: int) -> None:
        """Lets a child stop at a place of round `number`."""
        self.children[place].tell(json.dumps({"place": where, "round": number}))
        self.children[place].wait_for("set")

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
        """Kills the first of the topmost servers; see `Hosted.kill`."""
        self.top.kill(delay_s, again=again, serve=serve)

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
        self.digest = digests[0]
        wanted = self._wanted or self.digest
        if any(one != wanted for one in digests):
            raise Failed(f"weights must be {wanted}. Received: {digests}\n{self.story()}")
        servers = [one.running for one in self.servers.values()]
        codes = [one.ends() for one in (*self.children, *servers)]
        if any(codes):
            raise Failed(f"all must end with 0. Received: {codes}\n{self.story()}")
        self.check_log()

    def check_log(self) -> None:
        """Raises Failed unless the journals of all servers hold each update once."""
        for one in self.servers.values():
            one.check_log(self.setting.rounds, closes=self.setting.has_quorum and not one.is_below)

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
        servers = [one.process for one in self.servers.values() if one.process is not None]
        return "\n".join(one.story() for one in (*self.children, *servers))


def run(base: Path, setting: Setting, act: Callable[[Job], None], **more: Any) -> Job:
    """Runs a job in `base` with faults that `act` makes, to its end.

    Raises:
        Failed: it did not end as it must.
    """
    wanted = None
    if not (setting.has_quorum or setting.draws):
        wanted = undisturbed(setting) if setting.rule is None else calm(setting)
    return _run(base, setting, act, wanted=wanted, **more)


@functools.cache
def calm(setting: Setting) -> str:
    """The digest of the final weights of a job in which nothing happens."""
    with tempfile.TemporaryDirectory() as name:
        return _run(Path(name), setting, lambda job: None).digest


def _run(base: Path, setting: Setting, act: Callable[[Job], None], **more: Any) -> Job:
    with contextlib.ExitStack() as stack:
        known = stack.enter_context(certificates(setting)) if setting.is_secure else None
        job = stack.enter_context(Job(base, setting, known, **more))
        job.start()
        job.reach(-1)
        act(job)
        job.train(setting.rounds)
        job.reach(setting.rounds - 1)
        job.finish()
        return job
