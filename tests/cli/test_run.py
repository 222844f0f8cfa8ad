# SPDX-License-Identifier: Apache-2.0
"""`tf-hips run` with real workers: when one fails, all end soon, and the one is named."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import forked, launched
from tests.support.eventually import eventually

# Seconds from a worker's end to the end of the job; and for TensorFlow to load and train steps.
END_WITHIN_S = 20.0
START_WITHIN_S = 90.0

TRAIN = """
import os, pathlib, sys
import keras, numpy as np
import tf_hips

folder, failing_rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
strategy = tf_hips.HierarchicalPS(compression=tf_hips.error_feedback(tf_hips.onebit()))
rank = strategy.global_rank


class Mark(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            (folder / f"{rank}").write_text(f"{os.getpid()}\\n")
        if batch == 5 and rank == failing_rank:
            raise RuntimeError("this worker gives up")


with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
model.fit(np.tile(x, (20000, 1)), np.ones(640000, "float32"), batch_size=8, verbose=0,
          callbacks=[Mark()])
"""

# Without TensorFlow: in the run, and then busy with something else, until a signal lets it fail.
JOIN = """
import os, pathlib, signal, sys, time
from tf_hips import config
from tf_hips.ps.client.client import Client


def give_up(*_):
    raise RuntimeError("this worker gives up")


signal.signal(signal.SIGUSR1, give_up)
run = config.current()
client = Client(run.uplink, run.run, 1)
child = client.join("onebit", "same", run.seed).child
(pathlib.Path(sys.argv[1]) / f"{child}").write_text(f"{os.getpid()}\\n")
time.sleep(300)
"""


def start(
    folder: Path, program: str, failing_rank: int, *, is_real: bool
) -> "subprocess.Popen[str] | forked.Program":
    """The launcher; one that is not real is one of `launched`."""
    script = folder / "program.py"
    script.write_text(program)
    temporary = folder / "tmp"
    temporary.mkdir()
    words = ["run", "--parties", "2", "--workers", "1", str(script), str(folder), str(failing_rank)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, "TMPDIR": str(temporary)}
    if not is_real:
        return forked.Program(launched.command(words), **streams, env=environment)
    command = [sys.executable, "-m", "tf_hips.cli", *words]
    return subprocess.Popen(command, **streams, text=True, env=environment)


def printed(job: "subprocess.Popen[str] | forked.Program") -> str:
    """All that a job that has ended has printed, which is less than a pipe takes."""
    assert job.stdout is not None
    return str(job.stdout.read())


def wait_for_pid(path: Path, job: "subprocess.Popen[str] | forked.Program") -> int:
    def is_there() -> bool:
        if job.poll() is not None:
            pytest.fail(f"the job ended with {job.returncode}:\n{printed(job)}")
        return path.exists() and path.read_text().endswith("\n")

    eventually(is_there, START_WITHIN_S, "no step within the deadline")
    return int(path.read_text())


@pytest.mark.heavy
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "kind",
    [
        "killed",
        "raises",
        pytest.param("raises in fit", marks=(pytest.mark.tf, pytest.mark.slow)),
    ],
)
def test_when_a_worker_fails_all_end_and_it_is_named(tmp_path: Path, kind: str) -> None:
    program = (TRAIN, 1) if kind == "raises in fit" else (JOIN, -1)
    job = start(tmp_path, *program, is_real=kind != "raises")
    try:
        pids = [wait_for_pid(tmp_path / str(rank), job) for rank in range(2)]
        processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        if kind != "raises in fit":
            assert {process.pid for process in processes} > {job.pid, *pids}, "the server is there"
            os.kill(pids[1], signal.SIGKILL if kind == "killed" else signal.SIGUSR1)
        job.wait(END_WITHIN_S)
        output = printed(job)
    finally:
        job.kill()
    reason, code = ("killed by SIGKILL", 137) if kind == "killed" else ("exit code 1", 1)
    expected = f"tf-hips: party1/worker0 failed first ({reason}); all processes ended"
    assert output.splitlines()[-1] == expected, output
    assert job.returncode == code
    assert not [process for process in processes if process.is_running()]
    assert list((tmp_path / "tmp").iterdir()) == [], "temporary folders are removed"
    if kind != "killed":
        assert "[party1/worker0] RuntimeError: this worker gives up" in output
