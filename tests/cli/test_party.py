# SPDX-License-Identifier: Apache-2.0
"""`tf-hips party` with small scripts as workers: what they are told, how their end is reported."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import launched
from tests.support.eventually import eventually
from tf_hips import config
from tf_hips.cli.party import start_local_workers
from tf_hips.cli.processes import Job

pytestmark = pytest.mark.heavy  # processes start, and are waited for, in each of these

TELL = """
import json, os, sys
from tf_hips import config
run = config.current()
print(json.dumps({
    "rank": os.environ.get("HOROVOD_RANK"),
    "size": os.environ.get("HOROVOD_SIZE"),
    "role": config.role(),
    "run": [run.run, run.seed, run.uplink and [run.uplink.server, run.uplink.site, run.uplink.tls,
                                                run.uplink.deadline_s]],
    "log_dir": run.log_dir,
    "compression": run.compression,
    "intra": run.intra,
    "config": os.environ["TF_HIPS_CONFIG"],
    "arguments": sys.argv[1:],
}))
"""


def party(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Its workers begin at once; see `launched`."""
    return launched.run(["party", *arguments], timeout=30, env={**os.environ, **environment})


@pytest.fixture
def tell(tmp_path: Path) -> str:
    path = tmp_path / "tell.py"
    path.write_text(TELL)
    return str(path)


def told(output: str, role: str) -> dict[str, object]:
    [line] = [line for line in output.splitlines() if line.startswith(f"[{role}] {{")]
    return dict(json.loads(line.partition("] ")[2]))


def test_workers_are_told_the_run_and_keep_their_arguments(tell: str, tmp_path: Path) -> None:
    done = party(
        *("--server", "127.0.0.1:7070", "--site", "west", "--run", "r7", "--seed", "5"),
        *("--insecure", "--log-dir", str(tmp_path / "log"), "-np", "2", "--deadline", "1800"),
        *("--compression", "error_feedback( onebit )"),
        *("--", tell, "--epochs", "3", "--", "-np"),
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        facts = told(done.stdout, f"west/worker{rank}")
        assert (facts["rank"], facts["size"], facts["role"]) == (str(rank), "2", "worker")
        assert facts["run"] == ["r7", 5, ["127.0.0.1:7070", "west", None, 1800.0]]
        assert facts["log_dir"] == str(tmp_path / "log")
        assert facts["compression"] == "error_feedback(onebit)"
        assert facts["arguments"] == ["--epochs", "3", "--", "-np"]
        assert not Path(str(facts["config"])).exists()


def test_without_a_server_the_site_is_alone(tell: str) -> None:
    done = party("-H", "localhost:2", "--", tell)
    assert done.returncode == 0, done.stderr
    assert told(done.stdout, "local/worker1")["run"] == ["local", 0, None]


def test_a_site_is_announced_whole_or_not_at_all(tell: str, tmp_path: Path) -> None:
    announce, before = tmp_path / "announce", tmp_path / "before"
    announce.write_text("of a run before\n")
    before.hardlink_to(announce)  # who had it open reads on in the same file
    done = party("--announce", str(announce), "--", tell)
    assert done.returncode == 0, done.stderr
    assert announce.read_text() == "1 worker\n"
    assert before.read_text() == "of a run before\n"
    assert {path.name for path in tmp_path.iterdir()} == {"announce", "before", "tell.py"}


def test_a_worker_below_the_server_of_its_party_is_told_so(tell: str) -> None:
    below = ("--server", "127.0.0.1:7071", "--insecure", "--server-role", "server")
    done = party(*below, "--intra", "ps", "--site", "west-0", "--", tell)
    assert done.returncode == 0, done.stderr
    assert told(done.stdout, "west-0/worker0")["intra"] == "ps"
    assert told(party(*below, "--", tell).stdout, "local/worker0")["intra"] is None


@pytest.mark.parametrize(
    "wrong", [[], ["--server", "127.0.0.1:7070", "--insecure"], ["-np", "2"]], ids=str
)
def test_only_such_a_worker_can_be_told_so(wrong: list[str], tell: str) -> None:
    below = ["--server", "127.0.0.1:7071", "--insecure", "--server-role", "server"]
    done = party(*(below if "-np" in wrong else []), *wrong, "--intra", "ps", "--", tell)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "--intra ps is for one worker below the server of its party" in done.stderr


def test_the_first_failure_is_the_exit_code_and_the_last_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\nif os.environ['HOROVOD_RANK'] == '1':\n    os._exit(7)\ntime.sleep(600)\n"
    )
    done = party("--site", "west", "-np", "2", "--", str(script))
    assert done.returncode == 7
    last = done.stderr.splitlines()[-1]
    assert last == "tf-hips: west/worker1 failed first (exit code 7); all processes ended"


def test_other_hosts_go_through_horovodrun(tell: str, tmp_path: Path) -> None:
    """A `horovodrun` that writes down its arguments and runs the command once, as a host would."""
    programs = tmp_path / "bin"
    programs.mkdir()
    fake = programs / "horovodrun"
    fake.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint('ARGUMENTS', *sys.argv[1:8])\n"
        "os.execvp(sys.argv[8], sys.argv[8:])\n"
    )
    fake.chmod(0o755)
    done = party(
        *("--server", "localhost:7070", "--site", "west", "--insecure", "--interface", "eth1"),
        *("-np", "3", "-H", "far.example:2,near.example:2", "--", tell, "--epochs", "3"),
        PATH=f"{programs}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stderr
    line = "[west] ARGUMENTS --gloo -np 3 -H far.example:2,near.example:2"
    assert f"{line} --network-interfaces eth1\n" in done.stdout
    facts = told(done.stdout, "west")
    assert facts["run"] == ["local", 0, ["localhost:7070", "west", None, 600.0]]
    assert facts["role"] == "worker"
    assert facts["arguments"] == ["--epochs", "3"]


def test_a_folder_that_other_hosts_cannot_enter_is_refused(
    tell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my job").mkdir()
    monkeypatch.chdir(tmp_path / "my job")
    done = party("-H", "far.example:1", "--", tell)
    assert done.returncode == 2
    assert "its path must have no spaces" in done.stderr
    assert party("-H", "localhost:1", "--", tell).returncode == 0


def test_a_hostfile_is_read(tell: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\nlocalhost slots=2\n\n")
    done = party("--hostfile", str(hosts), "--", tell)
    assert done.returncode == 0, done.stderr
    assert told(done.stdout, "local/worker1")["size"] == "2"


@pytest.mark.parametrize("text", ["", "# nobody\n\n"])
def test_a_hostfile_without_a_host_is_refused(text: str, tell: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    done = party("--hostfile", str(hosts), "--", tell)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "--hostfile must name a host" in done.stderr


RAISE = """
import os
import tf_hips
from tf_hips.errors import ConfigError, PeerError
raise {error} from ValueError("inner")
"""


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (
            "PeerError('Join: nobody\\n  listens.')",
            "tf_hips.errors.PeerError: Join: nobody listens.",
            1,
        ),
        (
            "PeerError('Server a:1, Exchange: The run has ended. b was lost.')",
            "tf_hips.errors.PeerError: Server a:1, Exchange: The run has ended. b was lost.",
            78,
        ),
        ("ConfigError('no such key')", "tf_hips.errors.ConfigError: no such key", 78),
    ],
)
def test_an_error_of_ours_is_one_line_and_a_code(
    error: str, line: str, code: int, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(RAISE.format(error=error))
    done = party("-np", "2", "--", str(script))
    assert done.returncode == code
    *said, last = done.stderr.splitlines()
    # Of the other one no line is shown: that it was as far too, if it was.
    same = "tf-hips: local/worker{} failed with the same error as local/worker{}"
    assert said[0] in [f"[local/worker{rank}] {line}" for rank in range(2)]
    assert said[1:] in ([], [same.format(0, 1)], [same.format(1, 0)])
    assert re.fullmatch(rf"tf-hips: local/worker\d failed first \(exit code {code}\); .*", last)

    whole = party("--", str(script), TF_HIPS_TRACEBACK="1")
    assert whole.returncode == code
    assert "Traceback (most recent call last)" in whole.stderr


IN_A_ROUND = """
import keras, numpy as np
import tf_hips

with tf_hips.HierarchicalPS().scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.full((8, 2), np.nan, "float32"), np.ones((8, 1), "float32"), verbose=0)
"""


@pytest.mark.tf
@pytest.mark.heavy
def test_an_error_in_a_round_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)  # that of these tests
    script = tmp_path / "train.py"
    script.write_text(IN_A_ROUND)
    done = subprocess.run(  # as users start it, with all that TensorFlow says while it is loaded
        [sys.executable, "-m", "tf_hips.cli", "party", "--", str(script)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "TF_NUM_INTRAOP_THREADS": "1"},
    )
    assert done.returncode == 1
    of_worker = [line for line in done.stderr.splitlines() if line.startswith("[local/worker0] ")]
    assert len(of_worker) == 1, done.stderr
    assert "tf_hips.errors.NonFiniteError: Gradient " in of_worker[0]


def test_an_error_of_the_script_keeps_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RAISE.format(error="KeyError('x')"))
    done = party("--", str(script))
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "KeyError: 'x'" in done.stderr


def test_horovodrun_may_end_its_workers_when_the_launcher_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the launcher reaches `horovodrun` as SIGTERM, which it can act on."""
    programs, told, began = tmp_path / "bin", tmp_path / "told", tmp_path / "began"
    programs.mkdir()
    fake = programs / "horovodrun"
    fake.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, signal, sys, time\n"
        "def end(number, frame):\n"
        f"    pathlib.Path({str(told)!r}).write_text(f'{{number}}\\n')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"pathlib.Path({str(began)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    fake.chmod(0o755)
    script = tmp_path / "train.py"
    script.write_text("")
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "tf_hips.cli", "party"),
            *("-H", "far.example:2", "--", str(script)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
    )
    try:
        eventually(began.exists)
    finally:
        launcher.kill()
        launcher.wait(timeout=20)
    eventually(lambda: told.exists() and told.read_text() == f"{int(signal.SIGTERM)}\n")


def test_workers_that_start_again_have_the_only_rendezvous(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[int] = []
    held: set[int] = set()

    @contextlib.contextmanager
    def environments(number: int) -> Iterator[list[dict[str, str]]]:
        attempt = len(opened)
        opened.append(number)
        held.add(attempt)
        yield [{"RANK": str(rank)} for rank in range(number)]
        held.remove(attempt)

    monkeypatch.setattr("tf_hips.comm.launch.local_rank_environments", environments)

    class Restarting(Job):
        def __init__(self) -> None:
            self.roles: list[str] = []

        def start(self, role: str, *rest: Any, **more: Any) -> int:
            self.roles.append(role)
            return 0

        def start_group(self, name: str, start: Any, max_restarts: int, **more: Any) -> None:
            for attempt in range(max_restarts + 1):
                start(attempt)
                assert held == {attempt}

    job = Restarting()
    with contextlib.ExitStack() as stack:
        start_local_workers(
            job,
            stack,
            config.Run(),
            site="west",
            number=2,
            processes=2,
            command=["true"],
            folder=tmp_path,
            max_restarts=2,
        )
        assert held == {2}
    assert not held
    assert opened == [2, 2, 2]
    assert job.roles == ["west/worker0", "west/worker1"] * 3
