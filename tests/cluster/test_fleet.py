# SPDX-License-Identifier: Apache-2.0
"""`tf-hips sync`, `up` and `down` over a real sshd."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from tests.cluster.sshd import ROOT, Done, Served, Site
from tests.support.eventually import eventually
from tf_hips.cluster import archive, description, fleet, ssh
from tf_hips.cluster.fleet import Outcome

pytestmark = pytest.mark.heavy  # a minute of processes that are started and waited for

# Says that it is ready, as a party or a server does, and then does what the test wants.
READY = """#!/bin/sh
for word; do case $word in --announce=*) echo "1 worker" >"${word#--announce=}" ;; esac; done
"""
WAITS = "exec sleep 600\n"

TWO_HOSTS = """
import os, threading
from tests.ps.parties import Party
from tf_hips import config

if os.environ["HOROVOD_RANK"] == "0":
    uplink = config.current().uplink
    party = Party(uplink.server, uplink.site, uplink.tls)
    party.join()
print(f"worker {os.environ['HOROVOD_RANK']} of {os.environ['HOROVOD_SIZE']} on "
      f"{os.environ['HOROVOD_HOSTNAME']} is there: {os.environ['GREETING']}, pid {os.getpid()}",
      flush=True)
threading.Event().wait()
"""


def rows(done: Done) -> dict[str, str]:
    """The line of each role."""
    return {line.split()[0]: " ".join(line.split()[2:]) for line in done.stdout.splitlines()[1:]}


def acts_as(site: Site, script: str) -> None:
    """Puts another program in the place of tf-hips on the machines."""
    (site.folder / "tf-hips").write_text(script)


def files(folder: Path) -> dict[str, int]:
    """Modes of all files below a folder, by name."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_mode & 0o777
        for path in folder.rglob("*")
        if path.is_file()
    }


def process_of(site: Site, role: str) -> psutil.Process:
    return psutil.Process(int((site.home(role) / "pid").read_text().split()[0]))


def alive(process: psutil.Process) -> bool:
    """Whether it runs; one that nobody has waited for does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def outcomes(act: Callable[[fleet.Tell], None]) -> dict[str, Outcome]:
    heard: list[Outcome] = []
    act(heard.append)
    return {outcome.role: outcome for outcome in heard}


def test_a_run_from_files_to_its_end(site: Site) -> None:
    early = site.run("up")
    assert early.returncode == 1
    assert "is not complete there; `tf-hips sync` copies it" in rows(early)["server-hub"]
    assert "a server that it needs does not run" in rows(early)["party-west"]

    done = site.run("sync")
    assert done.returncode == 0, done.stderr
    assert files(site.home("server-hub")) == {
        "authority.pem": 0o600,
        "global-server-hub.pem": 0o600,
        "global-server-hub.key": 0o600,
        "revoked.txt": 0o600,
        "server.yaml": 0o600,
    }
    for name in ("west", "east"):
        home = site.home(f"party-{name}")
        assert set(files(home)) == {
            "authority.pem",
            f"party-{name}.pem",
            f"party-{name}.key",
            "job/train.py",
        }
        assert home.stat().st_mode & 0o077 == 0
    for machine in ("one", "two"):
        assert not list((site.folder / machine).rglob("authority.key"))

    done = site.run("up")
    assert done.returncode == 0, done.stdout
    assert f"listens at 127.0.0.1:{site.port}" in rows(done)["server-hub"]
    assert rows(done)["party-east"].startswith("running pid ")
    assert rows(done)["party-east"].endswith(", 1 worker")
    west = process_of(site, "party-west")
    assert f"pid {west.pid}" in rows(done)["party-west"]
    assert west.environ()["GREETING"] == "a b"

    again = site.run("up")
    assert again.returncode == 0
    assert set(rows(again)) == {"server-hub", "party-west", "party-east"}
    for line in rows(again).values():
        assert line.startswith("runs already pid ")
    assert process_of(site, "party-west") == west
    # The description says another run by now: what runs is not it.
    described = site.file.read_text()
    site.change(run="later")
    other = site.run("up", "--site", "hub")
    assert other.returncode == 1
    assert re.match(r"not started pid \d+ of run \w+; `tf-hips down`", rows(other)["server-hub"])
    site.file.write_text(described)

    told = subprocess.run(
        [
            *(sys.executable, "-m", "tf_hips.cli", "status", "--json"),
            *("--server", f"127.0.0.1:{site.port}", "--authority", "pki/authority.pem"),
            *("--certificate", "pki/party-west.pem", "--key", "pki/party-west.key"),
        ],
        cwd=site.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=True,
        timeout=30,
    )
    assert [child["site"] for child in json.loads(told.stdout)["children"]] == ["west", "east"]

    processes = [process_of(site, role) for role in ("server-hub", "party-west", "party-east")]
    for name in ("west", "east"):
        (site.home(f"party-{name}") / "job" / "finish").touch()
    assert psutil.wait_procs(processes, timeout=20)[1] == []
    for name, greeting in (("west", "a b"), ("east", "None")):
        home = site.home(f"party-{name}")
        said = f"trained in {home}/job: ['--name', 'two words'] {greeting}\n"
        assert said in (home / "log").read_text()
    done = site.run("down")
    assert done.returncode == 0
    assert set(rows(done).values()) == {"not running"}


def test_down_ends_parties_and_then_servers(site: Site) -> None:
    assert site.run("sync").returncode == 0
    assert site.run("up").returncode == 0
    # The server goes on with its run on its own when somebody else starts it there.
    server = process_of(site, "server-hub")
    done = site.run("down", "--site", "west")
    assert (done.returncode, list(rows(done))) == (0, ["party-west"])
    assert server.is_running()
    done = site.run("down")
    assert done.returncode == 0
    assert rows(done)["party-west"] == "not running"
    assert rows(done)["server-hub"].startswith(("ended pid ", "not running"))
    for role in ("server-hub", "party-west", "party-east"):
        assert not (site.home(role) / "pid").exists()
    assert not alive(server)


def test_one_that_does_not_end_is_killed_and_that_is_said(site: Site) -> None:
    acts_as(site, READY + "trap '' TERM\nwhile :; do sleep 0.1; done\n")
    assert site.run("sync", "--site", "east").returncode == 0
    assert site.run("up", "--site", "east").returncode == 0
    process = process_of(site, "party-east")
    done = site.run("down", "--site", "east", "--grace", "1")
    assert done.returncode == 0
    assert rows(done) == {
        "party-east": f"killed pid {process.pid} did not end within 1 s of SIGTERM"
    }
    assert not alive(process)


@pytest.mark.parametrize("change", ["start time", "boot"])
def test_another_process_of_the_same_number_is_left_alone(change: str, site: Site) -> None:
    acts_as(site, READY + WAITS)
    assert site.run("sync", "--site", "east").returncode == 0
    assert site.run("up", "--site", "east").returncode == 0
    process = process_of(site, "party-east")
    file = site.home("party-east") / "pid"
    true = file.read_text()
    number, began, boot = true.split()
    other = [number, str(int(began) + 1), boot] if change == "start time" else [number, began, "b"]
    file.write_text(" ".join(other) + "\n")
    done = site.run("down", "--site", "east")
    assert (done.returncode, rows(done)) == (0, {"party-east": "not running"})
    assert process.is_running()

    file.write_text(true)
    assert rows(site.run("down", "--site", "east"))["party-east"].startswith("ended pid")


@pytest.mark.parametrize(
    ("script", "code", "state", "wait"),
    [
        (
            "#!/bin/sh\necho earlier; echo no such layer >&2; exit 3\n",
            1,
            "ended, exit code 3 no such layer",
            "20",
        ),
        (READY + "echo all done\n", 0, "over, exit code 0 all done", "20"),
        (READY + "echo half; kill -9 $$\n", 1, "over, exit code 137", "20"),
        ("#!/bin/sh\nexec sleep 600\n", 1, "runs, but was not ready after 1 s", "1"),
    ],
    ids=["ended", "over", "killed", "slow"],
)
def test_what_became_of_one_that_was_started(
    script: str, code: int, state: str, wait: str, site: Site
) -> None:
    acts_as(site, script)
    assert site.run("sync", "--site", "east").returncode == 0
    (site.home("party-east") / "log").write_text("of an earlier run\n")
    done = site.run("up", "--site", "east", "--wait", wait)
    assert done.returncode == code
    assert state in rows(done)["party-east"]
    assert "earlier run" not in done.stdout
    site.run("down", "--site", "east", "--grace", "5")


def test_what_runs_is_known_after_a_connection_broke(served: Served, site: Site) -> None:
    acts_as(site, "#!/bin/sh\n" + WAITS)
    assert site.run("sync", "--site", "east").returncode == 0
    cluster = description.load(site.file)
    found: dict[str, Outcome] = {}
    starting = threading.Thread(
        target=lambda: found.update(
            outcomes(lambda tell: fleet.up(cluster, cluster.parties[1:], 30, tell))
        )
    )
    starting.start()
    eventually((site.home("party-east") / "pid").exists)
    for part in process_of(site, "party-east").parents():
        if part.name() == "sshd" and part.pid != served.process.pid:
            part.kill()
    starting.join(20)
    outcome = found["party-east"]
    pid = process_of(site, "party-east").pid
    assert (outcome.is_good, outcome.state) == (False, "running")
    assert outcome.detail.startswith("the connection broke")
    assert outcome.detail.endswith(f"asked again: pid {pid}")
    # The first `up` is at work there for as long as it would have waited.
    os.kill(pid, 15)
    eventually(lambda: rows(site.run("down", "--site", "east"))["party-east"] == "not running")


def test_errors_of_ssh_are_explained(served: Served, site: Site) -> None:
    cases = {
        "the host's key is not known yet; `ssh 127.0.0.2` once by hand": {
            "ssh_options": [*served.options(hosts="none"), "-o", "StrictHostKeyChecking=yes"]
        },
        "the host lets none of your keys in": {"ssh_options": served.options(key="stranger")},
        "nothing answers at ssh's port": {"ssh_options": ["-p", "1", *served.options()]},
        "the host's key is not the one that is known": {
            "ssh_options": served.options(hosts="changed")
        },
    }
    known = (served.folder / "known_hosts").read_text()
    other = (served.folder / "stranger.pub").read_text()
    (served.folder / "changed").write_text(f"{known.split()[0].replace('.1]', '.2]')} {other}")
    for said, change in cases.items():
        site.change(**change)
        done = site.run("down", "--site", "east")
        assert done.returncode == 1
        assert rows(done)["party-east"].startswith(f"not ended {said}"), done.stdout
    unknown = {"site": "east", "hosts": {"nowhere.invalid": 1}}
    site.change(parties=[{"site": "west", "hosts": {"127.0.0.1": 1}}, unknown])
    assert "not copied" in (line := rows(site.run("sync", "--site", "east"))["party-east"])
    assert "there is no host of this name (ssh: " in line


def test_a_machine_without_the_program_says_so(site: Site) -> None:
    site.change(program="/nowhere/tf-hips")
    assert site.run("sync", "--site", "west").returncode == 0
    done = site.run("up", "--site", "west")
    assert done.returncode == 1
    assert "there is no program /nowhere/tf-hips there" in rows(done)["party-west"]
    assert not (site.home("party-west") / "pid").exists()


def test_a_folder_that_cannot_be_made_is_named(site: Site) -> None:
    (site.folder / "two").write_text("a file")
    done = site.run("sync", "--site", "east", "--site", "west")
    assert done.returncode == 1
    assert "cannot be written" in rows(done)["party-east"]
    assert rows(done)["party-west"].startswith("copied 4 files")


def test_an_archive_that_breaks_off_changes_nothing(site: Site) -> None:
    assert site.run("sync", "--site", "east").returncode == 0
    home = site.home("party-east")
    before = (home / "party-east.pem").read_bytes()
    (site.folder / "pki" / "party-east.pem").write_text("another")
    cluster = description.load(site.file)
    sent = archive.pack(archive.entries(cluster, cluster.parties[1], "127.0.0.2"))
    options = cluster.ssh_options
    answer = ssh.call("127.0.0.2", options, "receive", [str(home)], sent[: len(sent) - 20])
    assert answer.find("broken")
    assert (home / "party-east.pem").read_bytes() == before
    assert not list(home.glob("incoming*"))
    assert ssh.call("127.0.0.2", options, "receive", [str(home)], sent).find("received")
    assert (home / "party-east.pem").read_text() == "another"
    assert not list(home.glob("incoming*"))


def test_a_dry_run_touches_nothing(site: Site) -> None:
    for command in ("sync", "up", "down"):
        done = site.run(command, "--dry-run")
        assert done.returncode == 0
        assert len(done.stdout.splitlines()) == 3
    assert not (site.folder / "one").exists()
    assert "party-west.key, job/train.py\n" in site.run("sync", "--dry-run").stdout


def test_an_unknown_site_is_refused(site: Site) -> None:
    done = site.run("up", "--site", "wset")
    assert done.returncode == 2
    assert "--site must be one of east, hub, west. Received: 'wset'" in done.stderr


def test_a_server_that_was_killed_goes_on_with_its_run(site: Site) -> None:
    assert site.run("sync").returncode == 0
    assert site.run("up").returncode == 0
    homes = [site.home(f"party-{name}") for name in ("west", "east")]
    eventually(lambda: all("trained in" in (home / "log").read_text() for home in homes))
    server = process_of(site, "server-hub")
    parties = [process_of(site, role) for role in ("party-west", "party-east")]
    server.kill()
    eventually(lambda: not alive(server))

    done = site.run("up")
    assert done.returncode == 0  # that the parties run already is no failure
    assert rows(done)["server-hub"].startswith("running pid ")
    assert rows(done)["party-west"].startswith("runs already pid ")
    for home in homes:
        (home / "job" / "finish").touch()
    assert psutil.wait_procs(parties, timeout=30)[1] == []
    for home in homes:
        assert "failed first" not in (home / "log").read_text()
    assert "Restored the run" in (site.home("server-hub") / "log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_party_of_two_hosts(served: Served, site: Site) -> None:
    """horovodrun starts worker 1 over ssh, as the launcher of an MPIJob would."""
    # horovodrun's ssh knows nothing of our port and key.
    programs = site.folder / "bin"
    programs.mkdir()
    wrapper = programs / "ssh"
    wrapper.write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} {shlex.join(served.options())} "$@"\n'
    )
    wrapper.chmod(0o755)
    told = yaml.safe_load(site.file.read_text())
    told["parties"] = [
        {
            "site": "west",
            "hosts": {"127.0.0.1": 1, "127.0.0.2": 1},
            "interface": "lo",
            "environment": {"PATH": f"{programs}:{os.environ['PATH']}", "GREETING": "a b"},
        }
    ]
    site.change(parties=told["parties"])
    (site.folder / "job" / "train.py").write_text(TWO_HOSTS)
    assert site.run("sync").returncode == 0
    west = site.home("party-west")
    assert (west / "hostfile").read_text() == "127.0.0.1 slots=1\n127.0.0.2 slots=1\n"
    done = site.run("up")
    assert done.returncode == 0, done.stdout
    assert rows(done)["party-west"].endswith(", 2 workers")
    launcher = process_of(site, "party-west")
    eventually(lambda: (west / "log").read_text().count("is there: a b") == 2)
    log = (west / "log").read_text()
    for rank, host in enumerate(("127.0.0.1", "127.0.0.2")):
        assert f"worker {rank} of 2 on {host} is there: a b" in log
    workers = [psutil.Process(int(pid)) for pid in re.findall(r"is there: a b, pid (\d+)", log)]
    assert site.run("down").returncode == 0
    assert psutil.wait_procs([launcher, *workers], timeout=20)[1] == []
