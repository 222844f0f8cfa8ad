# SPDX-License-Identifier: Apache-2.0
"""What `tf-hips` says to a wrong command line: one line, exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from tf_hips import cli


def tf_hips(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tf_hips.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


WRONG = {
    "no command": ([], "COMMAND"),
    "unknown command": (["trian"], "'trian'"),
    "unknown option": (["run", "--partys", "2", "x.py"], "--partys"),
    "abbreviated option": (["run", "--work", "2", "x.py"], "--work"),
    "no script": (["run", "--parties", "2"], "the following arguments are required: script\n"),
    "missing script": (["run", "nowhere.py"], "Received: 'nowhere.py'"),
    "missing program": (["party", "--", "no-such-program"], "Received: 'no-such-program'"),
    "no parties": (["run", "--parties", "0", "x.py"], "whole number >= 1. Received: '0'"),
    "half a worker": (["run", "--workers", "1.5", "x.py"], "whole number >= 1. Received: '1.5'"),
    "negative seed": (["run", "--seed", "-1", "x.py"], "Received: '-1'"),
    "unknown compression": (["run", "--compression", "onebti", "x.py"], "onebit"),
    "no port": (["party", "--server", "host", "--", "x.py"], "HOST:PORT. Received: 'host'"),
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
    "never": (["server", "--parties", "a", "--round-timeout", "0"], "seconds > 0. Received: '0'"),
    "more workers than slots": (
        ["party", "-np", "3", "-H", "localhost:2", "--", "{script}"],
        "-np must be at most the 2 slots of the hosts. Received: 3",
    ),
    "bad host": (["party", "-H", "localhost:x", "--", "{script}"], "Received: 'localhost:x'"),
    "no hostfile": (
        ["party", "--hostfile", "no", "--", "{script}"],
        "--hostfile no cannot be read",
    ),
    "certificate for nobody": (["certs", "--out", "x"], "--server and --party"),
    "host of nobody": (["certs", "--out", "x", "--party", "a", "--host", "h"], "needs --server"),
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


def test_plain_text_on_a_public_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["server", "--parties", "a", "--insecure", "--bind", "0.0.0.0:0"])
    error = capsys.readouterr().err
    assert ended.value.code == 1
    assert error.count("\n") == 1
    assert "loopback" in error


def test_the_command_starts_without_tensorflow() -> None:
    code = (
        "import sys\nfrom tf_hips import cli\n"
        "try:\n    cli.main(['--version'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras', 'grpc', 'horovod')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_info_has_a_line_for_everything() -> None:
    done = tf_hips("info")
    assert done.returncode == 0
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    for name in ("tf_hips", "TensorFlow", "Keras", "Horovod", "native library", "CUDA", "codecs"):
        assert name in names


def test_certs_are_made_once_and_added_to(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    first = tf_hips("certs", "--out", str(folder), "--server", "hub", "--party", "west")
    assert first.returncode == 0
    authority = (folder / "authority.pem").read_bytes()
    made = {path.name for path in folder.iterdir()}
    assert made == {
        "authority.pem",
        "authority.key",
        "global-server-hub.pem",
        "global-server-hub.key",
        "party-west.pem",
        "party-west.key",
    }
    assert (folder.stat().st_mode | (folder / "party-west.key").stat().st_mode) & 0o077 == 0

    again = tf_hips("certs", "--out", str(folder), "--party", "west")
    assert again.returncode == 2
    assert "is there already" in again.stderr

    more = tf_hips("certs", "--out", str(folder), "--party", "east")
    assert more.returncode == 0
    assert (folder / "authority.pem").read_bytes() == authority
    assert (folder / "party-east.pem").is_file()
