# SPDX-License-Identifier: Apache-2.0
"""Files, folders and numbers that cannot be: one line that says what was expected, at once."""

import argparse
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tf_hips import cli, config
from tf_hips.cli import arguments, party, run
from tf_hips.cli.arguments import UsageError
from tf_hips.cli.children import Failure
from tf_hips.errors import ConfigError

SERVER = ("server", "--parties", "a", "--insecure", "--bind", "127.0.0.1:0")
WRONG = {
    "a million parties": (
        ["run", "--parties", "1000000", "{script}"],
        "--parties times --workers must be at most 1000, all on this machine. Received: 2000000",
    ),
    "a run's log in a file": (
        ["run", "--parties", "1", "--log-dir", "{script}", "{script}"],
        "--log-dir must be a folder that can be written. Received: {script} (File exists)",
    ),
    "a party's log in a file": (
        ["party", "--log-dir", "{script}", "--", "{script}"],
        "--log-dir must be a folder that can be written. Received: {script} (File exists)",
    ),
    "a server announced nowhere": (
        [*SERVER, "--announce", "{folder}/none/address"],
        "--announce must be a file in a folder that can be written. Received: "
        "{folder}/none/address",
    ),
    "a server announced in a folder": (
        [*SERVER, "--announce", "{folder}"],
        "--announce must be a file in a folder that can be written. Received: {folder}",
    ),
    "a state server announced nowhere": (
        ["state-server", "--insecure", "--bind", "127.0.0.1:0", "--announce", "{folder}/none/a"],
        "--announce must be a file in a folder that can be written. Received: {folder}/none/a",
    ),
    "a party announced nowhere": (
        ["party", "--announce", "{folder}/none/a", "--", "{script}"],
        "--announce must be a file in a folder that can be written. Received: {folder}/none/a",
    ),
    "a hostfile of bytes": (
        ["party", "--hostfile", "{binary}", "--", "{script}"],
        "--hostfile {binary} must be text in UTF-8",
    ),
    "revoked in plain text": (
        [*SERVER, "--revoked", "{binary}"],
        "--revoked lists certificates, and --insecure has none",
    ),
    "revoked in plain text at a state server": (
        ["state-server", "--insecure", "--revoked", "{binary}"],
        "--revoked lists certificates, and --insecure has none",
    ),
    "the status of another machine in plain text": (
        ["status", "--insecure", "--server", "127.0.0.1:1,192.0.2.1:7070"],
        "--insecure is for a --server on loopback. Received: '127.0.0.1:1,192.0.2.1:7070'",
    ),
    "a server above in plain text on another machine": (
        [*SERVER, "--uplink", "192.0.2.1:7070", "--site", "a"],
        "--insecure is for a --uplink on loopback. Received: '192.0.2.1:7070'",
    ),
    "a state server in plain text for other machines": (
        ["state-server", "--insecure", "--bind", "0.0.0.0:1"],
        "--insecure is for a --bind on loopback. Received: '0.0.0.0:1'",
    ),
    "a deadline that no clock has": (
        ["run", "--deadline", "1e10", "{script}"],
        "must be a number of seconds > 0 and at most 1e9. Received: '1e10'",
    ),
    "a simulation written nowhere": (
        ["simulate", "{folder}/sites.yaml", "--json", "{folder}/none/x.json"],
        "--json must be a file in a folder that can be written. Received: {folder}/none/x.json",
    ),
    "no command": ([], "required: COMMAND; `tf-hips --help` lists them"),
    "no command of certs": (["certs"], "required: COMMAND; `tf-hips certs --help` lists them"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_line_and_exit_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: str(tmp_path / name) for name in ("script.py", "binary")}
    (tmp_path / "script.py").write_text("raise SystemExit('must not run')")
    (tmp_path / "binary").write_bytes(b"\xe0\x00\xff")
    places = {"script": names["script.py"], "binary": names["binary"], "folder": str(tmp_path)}
    given, expected = WRONG[case]
    with pytest.raises(SystemExit) as ended:
        cli.main([one.format(**places) for one in given])
    output = capsys.readouterr()
    assert (ended.value.code, output.out, output.err.count("\n")) == (2, "", 1)
    assert expected.format(**places) in output.err


def test_a_run_may_have_as_many_workers_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    parser = arguments.Parser(prog="tf-hips")
    run.add(parser.add_subparsers())
    options = parser.parse_args(["run", "--parties", "500", "--workers", "2", "train.py"])
    run.check_size(options)
    options.workers = 3
    with pytest.raises(arguments.UsageError, match="Received: 1500"):
        run.check_size(options)


def test_errors_of_the_system_name_the_file_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        cli.main(["certs", "init", str(tmp_path / "file")])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"tf-hips certs: error: {tmp_path / 'file'}: File exists\n"
    with pytest.raises(SystemExit) as ended:
        cli.main(["certs", "show", str(tmp_path / "none")])
    assert ended.value.code == 1
    text = f"{tmp_path / 'none'} cannot be read: No such file or directory"
    assert capsys.readouterr().err == f"tf-hips certs: error: {text}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: [a\n", "expected ',' or ']', but got '<stream end>' (line 2, column 1)"),
        ("run: a\nseed: 1\nrun: b\n", "the key `run` is there twice (line 3, column 1)"),
        ("run: a\nuplink: {site: a, site: b}\n", "the key `site` is there twice (line 2, column"),
        ("run: \x07\n", "special characters are not allowed (character 5)"),
    ],
)
def test_wrong_yaml_is_shown_by_line_and_column(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        config.load(path)
    assert str(raised.value).startswith(f"{path} is not valid YAML: ")
    assert said in str(raised.value)
    assert "unicode string" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_key_of_a_merge_may_be_said_again(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("<<: {run: a, seed: 1}\nrun: b\n")
    assert (config.load(path).run, config.load(path).seed) == ("b", 1)


@pytest.mark.parametrize(
    ("option", "value"),
    [("-H", "far, farther:2"), ("--hostfile", "# ours\nfar # slow\nfarther slots=2 # fast\n")],
)
def test_horovodrun_gets_slots_of_every_host(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It takes neither a host without slots nor a comment, and says so by a traceback."""
    program = tmp_path / "horovodrun"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/told\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "train.py").write_text("")
    if option == "--hostfile":
        (tmp_path / "hosts").write_text(value)
        value = str(tmp_path / "hosts")
    done = subprocess.run(
        [sys.executable, "-m", "tf_hips.cli", "party", option, value, "--", tmp_path / "train.py"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "told").read_text()
    assert "-np 3 -H far:1,farther:2 " in told
    assert "--hostfile" not in told


@pytest.mark.parametrize(
    "line",
    ["west1 slot=4", "west1 slots = 4", "west1:4", "west1 slots=0", "me@west1", "-oX slots=2"],
)
def test_a_line_of_a_hostfile_that_is_none_is_refused(line: str, tmp_path: Path) -> None:
    """A misspelt one would be one slot, or a traceback of horovodrun's."""
    (tmp_path / "hosts").write_text(f"west0 slots=2\n{line}\n")
    options = argparse.Namespace(hosts=None, hostfile=str(tmp_path / "hosts"))
    with pytest.raises(UsageError, match="`HOST slots=N` in a file") as refused:
        party._hosts(options)
    assert repr(line) in str(refused.value)


def test_a_name_without_an_address_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    for resolve, said in (
        (unknown, "west1 resolves to no address here (Name or service not known), "),
        (lambda name: "127.0.1.1", "west1 resolves to a loopback address here, "),
        (lambda name: "10.0.0.1", ""),
    ):
        monkeypatch.setattr(socket, "gethostbyname", resolve)
        party._warn_of_own_name("west1")
        error = capsys.readouterr().err
        assert error.count("\n") == bool(said)
        assert said in error


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """As root a new file could take the place of /dev/null."""
    pipe, link, file = (tmp_path / name for name in ("pipe", "link", "file"))
    os.mkfifo(pipe)
    link.symlink_to(file)
    file.write_text("before")
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        for path in (pipe, link):
            arguments.check_output("--announce", str(path))
            config.write_whole(f"to {path.name}\n", path)
        assert reader.read() == "to pipe\n"
    assert pipe.is_fifo() and link.is_symlink()
    assert file.read_text() == "to link\n"
    file.unlink()
    arguments.check_output("--announce", str(link))
    config.write_whole("anew", link)
    assert file.read_text() == "anew"
    link.unlink()
    link.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="--announce must be a file"):
        arguments.check_output("--announce", str(link))


def test_a_server_nobody_joined_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    stuck = Failure("server", 1, "still there 15 s after the last worker", is_stuck=True)
    assert party.report(stuck) == 1
    explained, last = capsys.readouterr().err.splitlines()
    assert "HierarchicalPS" in explained
    assert explained.endswith("; --parties 1 starts none")
    assert last.startswith("tf-hips: server failed first (still there 15 s")
    party.report(stuck, ["--deadline", "--max-restarts"])
    explained, _ = capsys.readouterr().err.splitlines()
    assert explained.endswith("--parties 1 without --deadline and --max-restarts starts none")
    assert party.report(Failure("server", 1, "exit code 1")) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_full_disk_is_said_without_a_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tf_hips.ps.security.authority.make_authority", full)
    with pytest.raises(SystemExit) as ended:
        cli.main(["certs", "init", str(tmp_path)])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "tf-hips certs: error: No space left on device\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "{path}: expected a mapping. Received: ['a']"),
        ("uplink: 3\n", "{path}: expected a mapping at `uplink`. Received: 3"),
        ("uplink: {site: a}\n", "{path}: `uplink` lacks the key `server`."),
    ],
)
def test_the_whole_file_has_no_name_of_its_own(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        config.load(path)
    assert str(raised.value) == said.format(path=path)
