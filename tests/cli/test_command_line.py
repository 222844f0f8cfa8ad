# SPDX-License-Identifier: Apache-2.0
"""What `tf-hips` says to a wrong command line: one line, exit code 2."""

import argparse
import datetime
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tf_hips import cli, config
from tf_hips.cli import certs
from tf_hips.cli.children import Failure
from tf_hips.ps.session.settings import ServerConfig


def tf_hips(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tf_hips", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


WRONG = {
    "no command": ([], "COMMAND"),
    "unknown command": (["trian"], "; did you mean train?"),
    "command like none": (["frobnicate"], "invalid choice: 'frobnicate'"),
    "unknown option": (
        ["run", "--partys", "2", "x.py"],
        "tf-hips run: error: unrecognized arguments: --partys; did you mean --parties?",
    ),
    "unknown option with a value": (
        ["server", "--parties", "a", "--compresion=onebit"],
        "tf-hips server: error: unrecognized arguments: --compresion=onebit; did you mean "
        "--compression?",
    ),
    "unknown option of a verb": (
        ["data", "show", "--worker", "2"],
        "tf-hips data show: error: unrecognized arguments: --worker",
    ),
    "unknown choice": (
        ["train", "-n", "lenet", "-dt", "digits", "--optimizer", "adamm"],
        "; did you mean adam",
    ),
    "choice nearly": (
        ["train", "-n", "lenet", "-dt", "digits", "--split-over", "partys"],
        "; did you mean party?",
    ),
    "mode nearly": (
        ["train", "-n", "lenet", "-dt", "digits", "--mode", "fedavgg"],
        "; did you mean fedavg? Received: 'fedavgg'",
    ),
    "attack nearly": (
        ["train", "-n", "lenet", "-dt", "digits", "--err-mode", "label_flop"],
        "foe, label_flip; did you mean label_flip? Received: 'label_flop'",
    ),
    "a folder nobody can make": (
        ["server", "--parties", "a", "--insecure", "--log-dir", "/proc/xx"],
        "--log-dir must be a folder that can be written. Received: /proc/xx (",
    ),
    "abbreviated option": (["run", "--work", "2", "x.py"], "--work"),
    "no script": (["run", "--parties", "2"], "the following arguments are required: script\n"),
    "missing script": (["run", "nowhere.py"], "Received: 'nowhere.py'"),
    "missing program": (["party", "--", "no-such-program"], "Received: 'no-such-program'"),
    "no parties": (["run", "--parties", "0", "x.py"], "whole number >= 1. Received: '0'"),
    "half a worker": (["run", "--workers", "1.5", "x.py"], "whole number >= 1. Received: '1.5'"),
    "negative seed": (["run", "--seed", "-1", "x.py"], "Received: '-1'"),
    "unknown compression": (["run", "--compression", "onebti", "x.py"], "onebit"),
    "no port": (["party", "--server", "host", "--", "x.py"], "HOST:PORT. Received: 'host'"),
    "a port that no machine has": (
        ["party", "--server", "host:65536", "--", "x.py"],
        "must be HOST:PORT, the port at most 65535. Received: 'host:65536'",
    ),
    "IPv6 without brackets": (
        ["party", "--server", "2001:db8::1:7070", "--", "x.py"],
        "must have an IPv6 address in brackets, as [::1]:7070. Received: '2001:db8::1:7070'",
    ),
    "bad site": (["party", "--site", "a/b", "--", "x.py"], "Received: 'a/b'"),
    "no certificates": (
        ["party", "--server", "h:1", "--", "{script}"],
        "--authority, --certificate, --key missing",
    ),
    "certificates without a server": (
        ["party", "--insecure", "--", "{script}"],
        "need --server",
    ),
    "both secure and not": (
        ["server", "--parties", "a", "--insecure", "--key", "k"],
        "--insecure and --key exclude each other",
    ),
    "missing certificate": (
        ["server", "--parties", "a", "--authority", "no.pem", "--certificate", "c", "--key", "k"],
        "--authority must be a file. Received: 'no.pem'",
    ),
    "party twice": (["server", "--parties", "a,a", "--insecure"], "Received: 'a,a'"),
    "no such shard": (
        ["server", "--parties", "a", "--insecure", "--shard", "3/3"],
        "I/N, I from 0 to N - 1. Received: '3/3'",
    ),
    "half a shard": (
        ["server", "--parties", "a", "--insecure", "--shard", "1"],
        "I/N, I from 0 to N - 1. Received: '1'",
    ),
    "one of several is no server": (
        ["party", "--server", "h:1,h", "--", "x.py"],
        "HOST:PORT. Received: 'h'",
    ),
    "one of several is far away": (
        ["party", "--server", "127.0.0.1:7,8.8.8.8:7", "--insecure", "--", "{script}"],
        "--insecure is for a --server on loopback. Received: '127.0.0.1:7,8.8.8.8:7'",
    ),
    "no servers": (["run", "--servers", "0", "x.py"], "whole number >= 1. Received: '0'"),
    "never": (["server", "--parties", "a", "--round-timeout", "0"], "seconds > 0. Received: '0'"),
    "more workers than slots": (
        ["party", "-np", "3", "-H", "localhost:2", "--", "{script}"],
        "-np must be at most the 2 slots of the hosts. Received: 3",
    ),
    "bad host": (["party", "-H", "localhost:x", "--", "{script}"], "Received: 'localhost:x'"),
    "interface for nothing": (
        ["party", "--interface", "eth0", "-np", "2", "--", "{script}"],
        "--interface is for workers on other hosts",
    ),
    "no hostfile": (
        ["party", "--hostfile", "no", "--", "{script}"],
        "--hostfile no cannot be read",
    ),
    "certificate for nobody": (["certs", "issue", "x"], "--party-server, --party and --operator"),
    "a quorum of more than all": (
        ["server", "--parties", "a,b", "--insecure", "--quorum", "5"],
        "`quorum` must be from 1 to the number of parties, 2. Received: quorum=5",
    ),
    "late without a quorum": (
        ["server", "--parties", "a,b", "--insecure", "--late", "drop"],
        "`late` needs a `quorum` or `close_at`",
    ),
    "a quorum of no rounds": (
        ["server", "--parties", "a,b", "--insecure", "--rule", "asgd", "--quorum", "1"],
        "asynchronous rules have none. Received: rule=asgd",
    ),
    "too few parties for a server's rule": (
        ["server", "--parties", "a,b", "--insecure", "--rule", "krum(f=1)"],
        "krum needs n >= 2 f + 3 rows. Received: n=2, f=1",
    ),
    "too few parties for a rule": (
        ["run", "--parties", "3", "--rule", "krum(f=3)", "{script}"],
        "`--rule`: Rule krum(f=3) cannot work with 3 children",
    ),
    "a site without a server above": (
        ["server", "--parties", "a", "--insecure", "--site", "west"],
        "--site needs --uplink",
    ),
    "a server above without a site": (
        ["server", "--parties", "a", "--insecure", "--uplink", "h:1"],
        "--uplink needs --site",
    ),
    "a role of nothing": (
        ["party", "--server-role", "server", "--", "{script}"],
        "--server-role is that of a --server",
    ),
    "robust in no server": (
        ["run", "--robust-local", "krum(f=1)", "{script}"],
        "`--robust-local` needs `--intra ps`. Received: krum(f=1)",
    ),
    "no robust rule": (
        ["run", "--intra", "ps", "--robust-local", "fedavg", "{script}"],
        "`--robust-local` must be a robust rule alone",
    ),
    "robust below a sum": (
        ["run", "--intra", "ps", "--workers", "3", "--robust-local", "median", "{script}"],
        "the `--rule` must take means, as mean or trimmed_mean do. Received: sum",
    ),
    "too few for a robust rule": (
        ["run", "--intra=ps", "--workers=3", "--rule=mean", "--robust-local=krum(1)", "{script}"],
        "krum needs n >= 2 f + 3 rows. Received: n=3, f=1",
    ),
    "too few groups that vote": (
        [
            *("run", "--intra=ps", "--workers=9", "--rule=mean"),
            # What goes up is not what workers send to votes.
            *("--compression=error_feedback(onebit)", "--robust-local=detox(r=3) >> krum(f=1)"),
            "{script}",
        ],
        "krum needs n >= 2 f + 3 rows. Received: n=3, f=1",
    ),
    "sketches without servers": (
        ["run", "--rule", "sketched >> krum(f=1)", "{script}"],
        "A `--rule` on sketches needs parties with servers",
    ),
    "too few for sketches": (
        ["run", "--intra=ps", "--workers=2", "--rule=sketched>>krum(1)", "{script}"],
        "cannot work with 4 leaves: krum needs n >= 2 f + 3 rows. Received: n=4, f=1",
    ),
    "another way to meet": (["run", "--intra", "mpi", "x.py"], "invalid choice: 'mpi'"),
    "no days": (["certs", "issue", "x", "--party", "a", "--days", "0"], "number >= 1. Received"),
    "longer than the authority": (
        ["certs", "issue", "x", "--party", "a", "--days", "9999"],
        "at most 3650",
    ),
    "no authority": (["certs", "issue", "x", "--party", "a"], "`tf-hips certs init x` makes one"),
    "deadline for nothing": (["party", "--deadline", "5", "--", "{script}"], "needs --server"),
    "no time": (["run", "--deadline", "0", "x.py"], "seconds > 0. Received: '0'"),
    "bad run": (["party", "--run", "a/b", "--", "x.py"], "Received: 'a/b'"),
    "unknown downlink": (
        ["server", "--parties", "a", "--downlink", "onebti", "--insecure"],
        "onebit",
    ),
    "unknown rule": (
        ["server", "--parties", "a", "--rule", "momentun(0.1)", "--insecure"],
        "did you mean momentum?",
    ),
    "rule of nothing": (["run", "--rule", "sgd(learning_rate=0)", "x.py"], "`learning_rate` must"),
    "plain text to a public address": (
        ["party", "--server", "8.8.8.8:7", "--insecure", "--", "{script}"],
        "--insecure is for a --server on loopback. Received: '8.8.8.8:7'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_command_line_is_one_line_and_exit_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('must not run')")
    arguments, expected = WRONG[case]
    with pytest.raises(SystemExit) as ended:
        cli.main([argument.format(script=script) for argument in arguments])
    output = capsys.readouterr()
    assert ended.value.code == 2
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("tf-hips")
    assert expected in output.err


@pytest.mark.parametrize("command", ["server", "party"])
def test_certificates_are_loaded_before_anything_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('must not run')")
    (tmp_path / "text.pem").write_text("no certificate")
    west, east = certs.make(tmp_path, server=None, parties=["west", "east"], days=1)
    text = str(tmp_path / "text.pem")
    start = {
        "server": ["server", "--parties", "west"],
        "party": ["party", "--server", "127.0.0.1:1", "--site", "west"],
    }[command]
    script = ["--", str(tmp_path / "train.py")] if command == "party" else []
    for authority, certificate, key, expected in (
        (text, west.certificate, west.key, f"--authority must be a PEM certificate. .*{text}"),
        (west.authority, text, west.key, f"--certificate and --key must be PEM files, .*{text}"),
        (west.authority, west.certificate, text, f"--certificate and --key must be PEM .*{text}"),
        (west.authority, west.certificate, east.key, "--key must be the key of --certificate"),
    ):
        files = ["--authority", authority, "--certificate", certificate, "--key", key]
        with pytest.raises(SystemExit) as ended:
            cli.main([*start, *files, *script])
        output = capsys.readouterr()
        assert ended.value.code == 2
        assert output.out == ""
        assert output.err.count("\n") == 1
        assert re.search(expected, output.err)


def test_a_server_takes_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerConfig] = []
    monkeypatch.setattr(
        "tf_hips.ps.server.foreground.serve", lambda config, announce: seen.append(config)
    )
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    options = ["--compression", "onebit", "--downlink", "same", "--join-timeout", "7"]
    options += ["--round-timeout", "8", "--lost-after", "9", "--max-model-mb", "2"]
    options += ["--max-gather-mb", "3", "--state", "kept", "--rule", "fedavgm(0.5)"]
    options += ["--shard", "1/3", "--lead", "127.0.0.1:7071"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["server", "--parties", "a,b", "--insecure", *options])
    assert ended.value.code == 0
    [config] = seen
    assert (config.compression, config.downlink) == ("onebit", "same")
    assert (config.join_timeout_s, config.round_timeout_s, config.lost_after_s) == (7.0, 8.0, 9.0)
    assert config.max_model_bytes == 2 << 20
    assert config.max_gather_bytes == 3 << 20
    assert config.state_dir == "kept"
    assert (config.shard, config.lead) == ((1, 3), "127.0.0.1:7071")
    assert config.rule == "fedavgm(learning_rate=0.5, momentum=0.9)"


@pytest.mark.parametrize(
    ("options", "idle_s"),
    [
        ([], 3600.0),
        (["--round-timeout", "60"], 3600.0),
        (["--round-timeout", "7200"], 7200.0),
        (["--round-timeout", "7200", "--idle-timeout", "9000"], 9000.0),
        (["--idle-timeout", "5"], 5.0),
    ],
)
def test_how_long_a_server_hears_of_nobody(
    options: list[str], idle_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parties that compute for hours between rounds must be able to say so."""
    seen: list[ServerConfig] = []
    monkeypatch.setattr(
        "tf_hips.ps.server.foreground.serve", lambda config, announce: seen.append(config)
    )
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit):
        cli.main(["server", "--parties", "a", "--insecure", *options])
    assert [one.idle_timeout_s for one in seen] == [idle_s]


class RecordingJob:
    """Takes note of what would be started."""

    def __init__(self) -> None:
        self.commands: dict[str, list[str]] = {}
        self.told: dict[str, config.Run] = {}

    def __enter__(self) -> "RecordingJob":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start_group(self, name: str, start: Any, max_restarts: int, **more: Any) -> None:
        start(0)

    def start(
        self, role: str, command: list[str], environment: dict[str, str], **options: object
    ) -> None:
        self.commands[role] = list(command)
        if config.CONFIG_VARIABLE in environment:
            self.told[role] = config.load(environment[config.CONFIG_VARIABLE])

    def wait_for_file(self, path: Path, seconds: float) -> str:
        return f"127.0.0.1:{path.name.removeprefix('address')}"

    def wait(self) -> None:
        pass


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "timeout_s", "deadline_s"), [([], None, 600.0), (["--deadline", "900"], 900, 900.0)]
)
def test_a_deadline_bounds_the_server_and_the_parties(
    options: list[str],
    timeout_s: float | None,
    deadline_s: float,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    job = RecordingJob()
    monkeypatch.setattr("tf_hips.cli.run.Job", lambda **_: job)
    (tmp_path / "train.py").write_text("raise SystemExit('must not run')")
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--workers", "1", *options, str(tmp_path / "train.py")])
    assert ended.value.code == 0
    deadlines = {
        role: told.uplink and told.uplink.deadline_s for role, told in sorted(job.told.items())
    }
    assert deadlines == {"party0/worker0": deadline_s, "party1/worker0": deadline_s}
    given = [part for part in job.commands["server"] if "-timeout" in part]
    names = [] if timeout_s is None else ["round", "join"]
    assert given == [f"--{name}-timeout={timeout_s:.1f}" for name in names]


def test_several_servers_are_started_and_told_to_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = RecordingJob()
    monkeypatch.setattr("tf_hips.cli.run.Job", lambda **_: job)
    (tmp_path / "train.py").write_text("raise SystemExit('must not run')")
    options = ["--parties", "1", "--workers", "1", "--servers", "3"]
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *options, str(tmp_path / "train.py")])
    assert ended.value.code == 0
    assert sorted(job.commands) == ["party0/worker0", "server0", "server1", "server2"]
    for index in range(3):
        command = job.commands[f"server{index}"]
        assert command[command.index("--shard") + 1] == f"{index}/3"
        lead = command[command.index("--lead") + 1] if "--lead" in command else None
        assert lead == (None if index == 0 else "127.0.0.1:0")
    uplink = job.told["party0/worker0"].uplink
    assert uplink is not None
    assert uplink.server == "127.0.0.1:0,127.0.0.1:1,127.0.0.1:2"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "has_server"),
    [
        ([], False),
        (["--server"], True),
        (["--servers", "1"], True),
        (["--compression", "onebit"], True),
        (["--rule", "mean"], True),
        (["--approach", "baseline"], True),
        (["--deadline", "9"], True),
        (["--max-restarts", "1"], True),
    ],
)
def test_one_party_has_a_server_only_where_it_is_asked_for(
    options: list[str],
    has_server: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = RecordingJob()
    stuck = Failure("server", 1, "still there", is_stuck=True)
    monkeypatch.setattr(job, "wait", lambda: stuck if has_server else None)
    monkeypatch.setattr("tf_hips.cli.run.Job", lambda **_: job)
    (tmp_path / "train.py").write_text("raise SystemExit('must not run')")
    logs = ["--seed", "3", "--log-dir", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--parties", "1", *options, *logs, str(tmp_path / "train.py")])
    assert ended.value.code == int(has_server)
    # The way out that is told does not lead back.
    said = capsys.readouterr().err
    assert (f"--parties 1 without {''.join(options[:1])} starts none\n" in said) == has_server
    assert set(job.told) == {"party0/worker0", "party0/worker1"}
    assert ("server" in job.commands) == has_server
    for told in job.told.values():
        assert (told.uplink is not None) == has_server
        assert (told.seed, told.log_dir) == (3, str(tmp_path))
        assert told.compression == ("onebit" if "onebit" in options else None)


def test_plain_text_on_a_public_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["server", "--parties", "a", "--insecure", "--bind", "0.0.0.0:0"])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1
    assert "loopback" in error


def test_the_command_starts_without_tensorflow() -> None:
    code = (
        "import sys\nfrom tf_hips import cli\n"
        "try:\n    cli.main(['--version'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras', 'grpc', 'horovod')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_command_that_is_declared_alone_is_as_beside_all_others() -> None:
    def helps(parser: argparse.ArgumentParser) -> dict[str, str]:
        commands = next(one for one in parser._actions if one.dest == "command")
        return {name: one.format_help() for name, one in dict(commands.choices or {}).items()}

    whole = helps(cli.make_parser())
    assert list(whole) == list(cli._COMMANDS)
    assert helps(cli.make_parser("no such command")) == whole
    for name, text in whole.items():
        alone = helps(cli.make_parser(name))
        assert len(alone) < len(whole)
        assert alone[name] == text


def test_info_has_a_line_for_everything() -> None:
    done = tf_hips("info")
    assert done.returncode == 0
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    for name in ("tf_hips", "TensorFlow", "Keras", "Horovod", "native library", "CUDA", "codecs"):
        assert name in names


RunCerts = Callable[..., tuple[int, str]]


@pytest.fixture
def run_certs(capsys: pytest.CaptureFixture[str]) -> RunCerts:
    """`tf-hips certs` in this process; its exit code, and all that it said."""

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["certs", *arguments])
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out + output.err

    return run


def test_certs_are_made_once_and_renewed(tmp_path: Path, run_certs: RunCerts) -> None:
    folder = tmp_path / "certificates"
    assert run_certs("init", str(folder))[0] == 0
    assert run_certs("issue", str(folder), "--server", "hub", "--party", "west")[0] == 0
    authority = (folder / "authority.pem").read_bytes()
    west = (folder / "party-west.pem").read_bytes()
    made = {path.name for path in folder.iterdir()}
    assert made == {
        "authority.pem",
        "authority.key",
        "issued.txt",
        "revoked.txt",
        "global-server-hub.pem",
        "global-server-hub.key",
        "party-west.pem",
        "party-west.key",
    }
    assert (folder.stat().st_mode | (folder / "party-west.key").stat().st_mode) & 0o077 == 0

    code, text = run_certs("issue", str(folder), "--party", "west")
    assert (code, "is there already" in text) == (2, True)
    assert (folder / "party-west.pem").read_bytes() == west

    more = ("--party", "west", "--party", "east", "--renew")
    assert run_certs("issue", str(folder), *more)[0] == 0
    assert (folder / "authority.pem").read_bytes() == authority
    assert (folder / "party-west.pem").read_bytes() != west
    assert (folder / "party-east.pem").is_file()
    assert run_certs("init", str(folder))[0] == 1


def test_certs_are_shown_and_revoked(
    tmp_path: Path, run_certs: RunCerts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = str(tmp_path)
    run_certs("init", folder)
    run_certs(
        "issue", folder, "--server", "hub", "--party", "west", "--party", "east", "--days", "5"
    )
    code, text = run_certs("show", folder)
    assert code == 0
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "the authority" in lines["authority.pem"]
    assert "party/west" in lines["party-west.pem"]
    assert "4 days left" in lines["party-west.pem"]

    code, text = run_certs("revoke", folder, "party/west", "--reason", "[they] left")
    assert (code, text.count("party/west")) == (0, 1)
    today = datetime.datetime.now(datetime.UTC).date()
    code, text = run_certs(
        "show", str(tmp_path / "party-west.pem"), str(tmp_path / "party-east.pem")
    )
    assert code == 1
    assert f"revoked {today} [they] left" in text
    assert "4 days left" in text
    assert run_certs("show", str(tmp_path / "party-west.pem"))[0] == 1

    # A second time there is nothing left to revoke; what is known is not changed by the attempt.
    before = (tmp_path / "revoked.txt").read_bytes()
    code, text = run_certs("revoke", folder, "party/east", "party/west")
    assert code == 1
    assert "`party/west` must be a certificate" in text
    assert (tmp_path / "revoked.txt").read_bytes() == before
    # One that has been renewed is revoked alone by its file.
    run_certs("issue", folder, "--party", "west", "--renew")
    code, text = run_certs("revoke", folder, str(tmp_path / "party-east.pem"))
    assert (code, text.count("party/east")) == (0, 1)
    assert run_certs("show", str(tmp_path / "party-west.pem"))[0] == 0
    code, text = run_certs("revoke", folder, "global-server/hub")
    assert (code, "parties read no such list" in text) == (0, True)
    code, text = run_certs("show", str(tmp_path / "issued.txt"))
    assert (code, "issued.txt must be a certificate in PEM" in text) == (1, True)


def test_certificates_last_as_long_as_they_are_asked_to(tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509")

    def days_left(name: str) -> float:
        end = x509.load_pem_x509_certificate((tmp_path / name).read_bytes()).not_valid_after_utc
        left = end - datetime.datetime.now(datetime.UTC)
        return round(left / datetime.timedelta(days=1), 2)

    for command, *arguments in (
        ["init"],
        ["issue", "--party", "west"],
        ["issue", "--server", "hub", "--days", "7"],
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["certs", command, str(tmp_path), *arguments])
        assert ended.value.code == 0
    assert days_left("party-west.pem") == 30
    assert days_left("global-server-hub.pem") == 7
    assert days_left("authority.pem") == 3650
