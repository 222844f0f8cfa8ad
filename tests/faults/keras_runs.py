# SPDX-License-Identifier: Apache-2.0
"""Keras trainings of two parties whose server is killed; for `make soak`.

The parties are `tf-hips party` with one worker each. Weights are those of the same training under a
server that nobody kills, bit for bit, and the journals hold each update once.
"""

import dataclasses
import functools
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.faults.job import DEADLINE_S, ROOT, RUN, Failed, Job
from tests.faults.training import Setting

STEPS = 48
_SCRIPT = Path(__file__).with_name("keras_party.py")
_SETTING = Setting("keras", "error_feedback(onebit)", "error_feedback(onebit)", rounds=STEPS)
_PLACES = ("mid-upload", "recorded", "mid-download", "snapshot", "snapshot-named")
_PATIENCE_S = 3 * DEADLINE_S  # TensorFlow's imports, two at a time on a busy machine


@dataclasses.dataclass(frozen=True)
class KerasRun:
    """One training, and the traps into which its server goes."""

    seed: int
    traps: tuple[tuple[str, int, float], ...]  # place, round, seconds without a server

    @classmethod
    def of(cls, seed: int) -> "KerasRun":
        """The run of a seed; the same on every machine."""
        draw = random.Random(f"keras {seed}")
        rounds = sorted(draw.sample(range(1, STEPS - 4, 6), draw.randint(1, 3)))
        return cls(
            seed, tuple((draw.choice(_PLACES), one, draw.choice((0.0, 1.0))) for one in rounds)
        )

    @property
    def name(self) -> str:
        """Which run it is."""
        return f"keras {self.seed}"

    def run(self, base: Path) -> str:
        """Runs it; what happened, in words."""
        digests = _train(base, self.seed, self.traps)
        with tempfile.TemporaryDirectory() as other:
            wanted = _train(Path(other), self.seed, ())
        if len({*digests, *wanted}) != 1:
            raise Failed(f"weights must be {wanted}. Received: {digests}")
        return ", ".join(f"{place} in round {number}" for place, number, _ in self.traps)


def _train(base: Path, seed: int, traps: tuple[tuple[str, int, float], ...]) -> list[str]:
    """Fingerprints of the weights of all parties."""
    with Job(base, _SETTING, is_eager=True) as job:
        todo = [functools.partial(job.serve, trap=(place, at, 1)) for place, at, _ in traps]
        todo.append(job.serve)
        todo.pop(0)()
        parties = [_party(job, base, site, seed) for site in _SETTING.sites]
        try:
            for place, _, delay_s in traps:
                job.server.wait_for("trapped", place, patience_s=_PATIENCE_S)
                job.kill(delay_s, serve=todo.pop(0))
            codes = [one.wait(_PATIENCE_S) for one in parties]
        finally:
            for one in parties:
                if one.poll() is None:
                    one.terminate()  # the launcher ends its worker
                    one.wait(DEADLINE_S)
        if any(codes) or job.server.ends():
            logs = [(base / f"{site}.log").read_text()[-3000:] for site in _SETTING.sites]
            raise Failed(f"all must end with 0. Received: {codes}\n{job.story()}\n{logs}")
        job.check_log()
        return [(base / site).read_text(encoding="ascii") for site in _SETTING.sites]


def _party(job: Job, base: Path, site: str, seed: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tf_hips.cli", "party", "--server", job.relay.address]
    command += ["--site", site, "--run", RUN, "--seed", str(seed), "-np", "1", "--insecure"]
    command += [str(_SCRIPT), str(base / site), str(seed), str(STEPS)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_ENABLE_ONEDNN_OPTS": "0",
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
