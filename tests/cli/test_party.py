# SPDX-License-Identifier: Apache-2.0
"""`tf-hips party` with small scripts as workers: what they are told, how their end is reported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TELL = """
import json, os, sys
from tf_hips import config
run = config.current()
print(json.dumps({
    "rank": os.environ.get("HOROVOD_RANK"),
    "size": os.environ.get("HOROVOD_SIZE"),
    "role": config.role(),
    "run": [run.run, run.seed, run.uplink and [run.uplink.server, run.uplink.site, run.uplink.tls]],
    "log_dir": run.log_dir,
    "config": os.environ["TF_HIPS_CONFIG"],
    "arguments": sys.argv[1:],
}))
"""


def party(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tf_hips.cli", "party", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, **environment},
    )


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
        *("--server", "hub.example:7070", "--site", "west", "--run", "r7", "--seed", "5"),
        *("--insecure", "--log-dir", str(tmp_path / "log"), "-np", "2"),
        *("--", tell, "--epochs", "3", "--", "-np"),
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        facts = told(done.stdout, f"west/worker{rank}")
        assert (facts["rank"], facts["size"], facts["role"]) == (str(rank), "2", "worker")
        assert facts["run"] == ["r7", 5, ["hub.example:7070", "west", None]]
        assert facts["log_dir"] == str(tmp_path / "log")
        assert facts["arguments"] == ["--epochs", "3", "--", "-np"]
        assert not Path(str(facts["config"])).exists()


def test_without_a_server_the_site_is_alone(tell: str) -> None:
    done = party("-H", "localhost:2", "--", tell)
    assert done.returncode == 0, done.stderr
    assert told(done.stdout, "local/worker1")["run"] == ["local", 0, None]


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
        f"#!{sys.executable}\nimport os, sys\nprint('ARGUMENTS', *sys.argv[1:6])\n"
        "os.execvp(sys.argv[6], sys.argv[6:])\n"
    )
    fake.chmod(0o755)
    done = party(
        *("--server", "hub.example:7070", "--site", "west", "--insecure"),
        *("-np", "3", "-H", "far.example:2,near.example:2", "--", tell, "--epochs", "3"),
        PATH=f"{programs}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stderr
    assert "[west] ARGUMENTS --gloo -np 3 -H far.example:2,near.example:2" in done.stdout
    facts = told(done.stdout, "west")
    assert facts["run"] == ["local", 0, ["hub.example:7070", "west", None]]
    assert facts["role"] == "worker"
    assert facts["arguments"] == ["--epochs", "3"]


def test_a_hostfile_is_read(tell: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\nlocalhost slots=2\n\n")
    done = party("--hostfile", str(hosts), "--", tell)
    assert done.returncode == 0, done.stderr
    assert told(done.stdout, "local/worker1")["size"] == "2"
