# SPDX-License-Identifier: Apache-2.0
"""Options of quorums, on a command line and in files."""

from pathlib import Path

import pytest
import yaml

from tf_hips import cli

COMMON = ["server", "--parties", "a,b,c", "--insecure"]


def ended(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_file_says_the_same_as_a_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for deadline, value in (("adaptive", "adaptive"), ("30", 30.0), ("0.5", 0.5)):
        options = ["--quorum", "2", "--round-deadline", deadline, "--late", "drop"]
        assert ended([*COMMON, *options, "--below-quorum-s", "60", "--print-config"]) == 0
        text = capsys.readouterr().out
        told = yaml.safe_load(text)
        assert (told["quorum"], told["round_deadline"], told["late"]) == (2, value, "drop")
        path = tmp_path / "server.yaml"
        path.write_text(text)
        assert ended(["server", "--config", str(path), "--print-config"]) == 0
        assert capsys.readouterr().out == text


def test_what_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options, text in (
        (["--round-deadline", "soon"], "must be `adaptive` or a number of seconds"),
        (["--late", "never"], "invalid choice: 'never'"),
        (["--close-at", "2", "--quorum", "2"], "so it excludes `quorum`"),
        (["--quorum", "2", "--rule", "asgd"], "asynchronous rules have none"),
        (["--deadline-mads", "3"], "`deadline_mads` needs a `quorum`"),
        (["--quorum", "2", "--round-deadline", "700"], "must be less than `round_timeout_s`"),
    ):
        assert ended([*COMMON, *options]) == 2
        assert text in capsys.readouterr().err.splitlines()[-1]
