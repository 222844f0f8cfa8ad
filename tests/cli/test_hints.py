# SPDX-License-Identifier: Apache-2.0
"""What is said of options that a command does not have."""

import pytest

from tf_hips import cli


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
