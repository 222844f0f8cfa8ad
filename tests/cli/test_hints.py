# SPDX-License-Identifier: Apache-2.0
"""What is said of options that a command does not have, and of those behind a script."""

import subprocess
import sys
from pathlib import Path

import pytest

from tf_hips import cli
from tf_hips.cli import arguments, party, run


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["server", "--parties", "a", "--port", "7070"], "did you mean --bind?"),
        (["server", "--parties", "a", "--host", "0.0.0.0"], "did you mean --bind?"),
        (
            ["server", "--parties", "a", "--workers", "2"],
            "--workers is an option of `tf-hips run`",
        ),
        (["run", "--state", "d", "s.py"], "--state is an option of `tf-hips server`"),
        (["run", "--downlink", "onebit", "s.py"], "--downlink is an option of `tf-hips server`"),
        (["run", "-np", "4", "s.py"], "did you mean --workers?"),
        (["party", "--downlink", "onebit", "s.py"], "--downlink is an option of `tf-hips server`"),
        (["party", "--quorum", "2", "s.py"], "--quorum is an option of `tf-hips server`"),
        (["party", "--name", "west", "s.py"], "did you mean --site?"),
        (["party", "--workers", "4", "s.py"], "did you mean -np?"),
        (["party", "--hots", "a", "s.py"], "did you mean --hosts?"),
        (["train", "--bs", "3"], "did you mean --batch-size?"),
    ],
)
def test_an_unknown_option_is_known_by_another_name_or_to_another_command(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(given)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"; {said}\n")


def test_what_is_near_to_nothing_gets_no_proposal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--site", "west", "s.py"])
    assert capsys.readouterr().err.endswith(": --site\n")


ONE = "tf-hips {}: warning: `{}` stands behind s.py and goes to the script; options of tf-hips "
TWO = "tf-hips {}: warning: `{}`, `{}` stand behind s.py and go to the script; options of tf-hips "


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("run --parties 1 s.py --workers 1 --epochs 3", ONE.format("run", "--workers")),
        ("run s.py --workers=1 --workers 2", ONE.format("run", "--workers")),
        ("party s.py -np 2 --site west", TWO.format("party", "-np", "--site")),
        ("run s.py -np 2", ""),
        ("run s.py --help --epochs 3 parties", ""),
        ("run --workers 1 s.py", ""),
        ("run -- s.py --workers 1", ""),
        ("party --site west -- s.py --site east", ""),
    ],
)
def test_options_behind_the_script_are_named(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = arguments.Parser(prog="tf-hips")
    commands = parser.add_subparsers()
    run.add(commands)
    party.add(commands)
    options = parser.parse_args(given.split())
    assert options.script == "s.py"
    assert capsys.readouterr().err == (f"{said}stand before it\n" if said else "")


@pytest.mark.heavy
def test_a_site_that_trains_alone_by_mistake_is_warned(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    behind = ("--server", "127.0.0.1:1", "--site", "west", "--insecure")
    done = subprocess.run(
        [sys.executable, "-m", "tf_hips.cli", "party", str(script), *behind],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[local/worker0] ran\n")
    assert done.stderr.startswith(
        f"tf-hips party: warning: `--server`, `--site`, `--insecure` stand behind {script} and go"
    )
