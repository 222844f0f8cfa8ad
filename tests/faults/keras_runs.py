# SPDX-License-Identifier: Apache-2.0
"""Keras trainings of which everything is killed once and more; for `make soak`.

              top            the global server, with a state
             /   \
        west      c          the server of a party; a party of two workers, which Horovod joins
       /    \
      a      b               parties of one worker

Parties are `tf-hips party --max-restarts`. Servers go into traps, workers kill themselves after a
step. Weights are those of the same training that nobody disturbs, bit for bit, on all workers, and
the journals of both servers hold each update once.
"""

import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.faults.job import DEADLINE_S, ROOT, RUN, TOP, Failed, Job
from tests.faults.training import Setting

STEPS = 48
WEST = "west"
_SCRIPT = Path(__file__).with_name("keras_party.py")
_SETTING = Setting(
    *("keras", "error_feedback(onebit)", "error_feedback(onebit)"),
    sites=("a", "b", "c"),
    rounds=STEPS,
    parties=((WEST, ("a", "b")),),
)
_WORKERS = {"a": 1, "b": 1, "c": 2}
_PLACES = ("mid-upload", "recorded", "mid-download", "snapshot", "snapshot-named")
_PARTY_PLACES = (*_PLACES, "going-up", "going-down")
# Each kind is in every soak of ten: the seed says with which one a run begins.
KINDS = (WEST, "leaf", "rank-0", TOP, "worker")
_PATIENCE_S = 3 * DEADLINE_S  # TensorFlow's imports, four at a time on a busy machine


@dataclasses.dataclass(frozen=True)
class Kill:
    """Something that is killed once.

    Attributes:
        kind: `top` or `west`, a server in a trap; `leaf`, a worker below that; `rank-0` or `worker`
            of the other party.
        round: in which, or after which step.
        place: of a trap.
        delay_s: seconds without a server.
    """

    kind: str
    round: int
    place: str = ""
    delay_s: float = 0.0

    @property
    def worker(self) -> tuple[str, int] | None:
        """Site and rank of a worker; None: it is a server."""
        return {"leaf": ("b", 0), "rank-0": ("c", 0), "worker": ("c", 1)}.get(self.kind)

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        return f"{self.kind}{where} in round {self.round}"


@dataclasses.dataclass(frozen=True)
class KerasRun:
    """One training, and what is killed."""

    seed: int
    kills: tuple[Kill, ...]

    @classmethod
    def of(cls, seed: int) -> "KerasRun":
        """The run of a seed; the same on every machine."""
        draw = random.Random(f"keras {seed}")
        rounds = sorted(draw.sample(range(2, STEPS - 6, 8), draw.randint(2, 3)))
        kinds = [KINDS[(seed + place) % len(KINDS)] for place in range(len(rounds))]
        draw.shuffle(kinds)
        return cls(seed, tuple(_drawn(draw, *pair) for pair in zip(kinds, rounds, strict=True)))

    @property
    def name(self) -> str:
        """Which run it is."""
        return f"keras {self.seed}"

    def run(self, base: Path) -> str:
        """Runs it; what happened, in words."""
        digests = _train(base, self.seed, self.kills)
        with tempfile.TemporaryDirectory() as other:
            wanted = _train(Path(other), self.seed, ())
        if len({*digests, *wanted}) != 1:
            raise Failed(f"weights must be {wanted}. Received: {digests}")
        return ", ".join(str(one) for one in self.kills)


def _drawn(draw: random.Random, kind: str, number: int) -> Kill:
    if kind not in (TOP, WEST):
        return Kill(kind, number)
    place = draw.choice(_PLACES if kind == TOP else _PARTY_PLACES)
    return Kill(kind, number, place, draw.choice((0.0, 1.0)))


def _train(base: Path, seed: int, kills: tuple[Kill, ...]) -> list[str]:
    """Fingerprints of the weights of all workers."""
    with Job(base, _SETTING, is_eager=True) as job:
        traps = [one for one in kills if one.worker is None]
        for server in job.servers.values():
            server.serve(trap=_next(traps, server.name))
        parties = [_party(job, base, site, seed, kills) for site in _SETTING.sites]
        try:
            while traps:
                one = traps.pop(0)
                server = job.servers[one.kind]
                server.running.wait_for("trapped", one.place, patience_s=_PATIENCE_S)
                after = _next(traps, server.name)
                server.kill(one.delay_s, serve=lambda s=server, t=after: s.serve(trap=t))  # type: ignore[misc]
            codes = [one.wait(_PATIENCE_S) for one in parties]
        finally:
            for one in parties:
                if one.poll() is None:
                    one.terminate()  # the launcher ends its workers
                    one.wait(DEADLINE_S)
        if any(codes) or any(one.running.ends() for one in job.servers.values()):
            logs = [(base / f"{site}.log").read_text()[-3000:] for site in _SETTING.sites]
            raise Failed(f"all must end with 0. Received: {codes}\n{job.story()}\n{logs}")
        job.check_log()
        marks = sorted(one.name for one in base.glob("killed-*"))
        wanted = sorted(f"killed-{one.worker[1]}-{one.round}" for one in kills if one.worker)
        if marks != wanted:
            raise Failed(f"these must have been killed: {wanted}. Received: {marks}")
        return [
            (base / f"{site}.{rank}").read_text(encoding="ascii")
            for site, count in _WORKERS.items()
            for rank in range(count)
        ]


def _next(traps: list[Kill], server: str) -> tuple[str, int, int] | None:
    """The next trap of a server."""
    return next(((one.place, one.round, 1) for one in traps if one.kind == server), None)


def _party(
    job: Job, base: Path, site: str, seed: int, kills: tuple[Kill, ...]
) -> "subprocess.Popen[bytes]":
    own = [(one.worker[1], one.round) for one in kills if one.worker and one.worker[0] == site]
    server = _SETTING.server_of(site)
    role = "server" if server else "global-server"
    command = [sys.executable, "-m", "tf_hips.cli", "party", "--server", job.address(server or TOP)]
    command += ["--server-role", role, "--site", site, "--run", RUN, "--seed", str(seed)]
    command += ["-np", str(_WORKERS[site]), "--insecure", "--max-restarts", str(len(kills) + 1)]
    command += [str(_SCRIPT), str(base / site), str(seed), str(STEPS)]
    command += [str(base / f"backup-{site}"), json.dumps(own)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_NUM_INTRAOP_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    with (base / f"{site}.log").open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
