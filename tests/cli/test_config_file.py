# SPDX-License-Identifier: Apache-2.0
"""`tf-hips server --config`: options as keys of a file, which the command line overrides."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tf_hips import cli
from tf_hips.cli import arguments, config_file, server
from tf_hips.ps.server import foreground as served
from tf_hips.ps.session.settings import ServerConfig

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*options: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["server", *options])
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return command


def written(folder: Path, text: str) -> str:
    path = folder / "server.yaml"
    path.write_text(text)
    return str(path)


def parser() -> tuple[argparse.ArgumentParser, config_file.ConfigFile]:
    top = argparse.ArgumentParser()
    commands = top.add_subparsers()
    server.add(commands)
    own = commands.choices["server"]
    return own, own.get_default("file")


def test_a_file_has_the_choices_of_the_options(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, "parties: [a]\ninsecure: true\nvote: loud\n")
    code, printed, error = run("--config", path, "--print-config")
    assert (code, printed) == (1, "")
    assert "server.yaml: `vote` must be one of digest, exact, tolerant. Received: 'loud'" in error


def test_the_command_line_counts_more_than_the_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[ServerConfig] = []
    monkeypatch.setattr(served, "serve", lambda config, announce: told.append(config))
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    path = written(
        tmp_path,
        "parties: [west, east]\nrun: job1\ninsecure: true\nround_timeout: 60\nlost_after: 7.5\n"
        "max_model_mb: 3\nonce: true\nstate: kept\ncompression: error_feedback( onebit )\n",
    )
    code, _, error = run("--config", path, "--lost-after", "9", "--no-once", "--bind", "[::1]:0")
    assert (code, error) == (0, "")
    [config] = told
    assert (config.parties, config.run, config.insecure) == (("west", "east"), "job1", True)
    assert (config.round_timeout_s, config.lost_after_s) == (60.0, 9.0)
    assert (config.join_timeout_s, config.max_model_bytes) == (600.0, 3 << 20)
    assert (config.once, config.bind) == (False, "[::1]:0")
    assert config.state_dir == str(tmp_path / "kept")
    assert config.compression == "error_feedback(onebit)"


def test_what_is_printed_says_the_same_again(run: Run, tmp_path: Path) -> None:
    path = written(tmp_path, "parties: [west]\nround_timeout: 60\nlog_dir: logs\nonce: true\n")
    code, text, _ = run("--config", path, "--metrics", "127.0.0.1:0", "--print-config")
    assert code == 0
    assert yaml.safe_load(text) == {
        "parties": ["west"],
        "bind": "127.0.0.1:7070",
        "run": "local",
        "round_timeout": 60.0,
        "once": True,
        "log_dir": str(tmp_path / "logs"),
        "metrics": "127.0.0.1:0",
    }
    again = tmp_path / "elsewhere"
    again.mkdir()
    assert run("--config", written(again, text), "--print-config")[1] == text


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("partys: [a]", 1, "unknown key `partys`. Did you mean `parties`?"),
        (
            "version: 1\nrun: a\nsites: []\nscript: b",
            1,
            "must be a file of options of `tf-hips server`. Received: another kind of file, in "
            "which 3 of 4 keys are unknown: `version`, `sites`, `script`",
        ),
        ("parties: a", 1, "`parties` must be of type list. Received: 'a'"),
        ("parties: [a, a]", 1, "`parties` must name every party once. Received: 'a,a'"),
        ("parties: [yes]", 1, "`parties[0]` must be of type str. Received: True"),
        ("round_timeout: 0", 1, "`round_timeout` must be a number of seconds > 0. Received: '0.0'"),
        ("max_model_mb: 1.5", 1, "`max_model_mb` must be of type int. Received: 1.5"),
        ("bind: host", 1, "`bind` must be HOST:PORT. Received: 'host'"),
        ("compression: onebti", 1, "onebit"),
        ("once: 1", 1, "`once` must be of type bool. Received: 1"),
        ("config: other.yaml", 1, "unknown key `config`"),
        ("run: job1", 2, "--parties is missing: it must be given, or `parties` in the file"),
        ("- parties", 1, "expected a mapping"),
        ("parties: [a]\ninsecure: true\nkey: k", 2, "--insecure and --key exclude each other"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    text: str, code: int, said: str, run: Run, tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    ended, _, error = run("--config", path)
    assert (ended, error.count("\n")) == (code, 1)
    assert said in error
    assert code == 2 or path in error


def test_a_file_that_is_not_there_is_refused(run: Run, tmp_path: Path) -> None:
    code, _, error = run("--config", str(tmp_path / "none.yaml"))
    assert code == 1
    assert "none.yaml cannot be read" in error


def test_a_specification_is_found_beside_the_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def codec(text: str) -> str:
        seen.append(Path(text).resolve())
        return text

    own, file = parser()
    monkeypatch.setitem(file._types, "compression", codec)
    given = own.parse_args(["--config", written(tmp_path, "parties: [a]\ncompression: my.pse\n")])
    file.merge(given)
    assert seen == [tmp_path / "my.pse"]


def test_every_option_is_a_key() -> None:
    own, file = parser()
    options = {
        name
        for action in own._actions
        for name in action.option_strings
        if name.startswith("--") and not name.startswith("--no-")
    }
    assert {config_file.option(key) for key in file.keys} == options - {
        "--help",
        "--config",
        "--print-config",
    }


def test_a_value_that_is_no_text_is_printed_as_it_was_given(tmp_path: Path) -> None:
    """The file of what is printed says the same again, whoever said it last."""
    own = argparse.ArgumentParser()
    own.add_argument("--shard", type=lambda text: tuple(map(int, text.split("/"))))
    file = config_file.add(own)
    path = written(tmp_path, "shard: 0/3\n")
    for given, text in (([], "0/3"), (["--shard", "2/4"], "2/4")):
        options = file.merge(own.parse_args(["--config", path, *given]))
        assert options.shard == tuple(map(int, text.split("/")))
        assert file.text(options) == f"shard: {text}\n"


def test_an_option_that_a_command_gets_is_a_key_at_once(tmp_path: Path) -> None:
    own = argparse.ArgumentParser()
    own.add_argument("--shard", metavar="I/N")
    own.add_argument("--wait", type=arguments.seconds, required=True)
    own.add_argument("--again", type=lambda text: int(text), default=0)
    file = config_file.add(own)
    found = file.checked({"shard": "0/3", "wait": 4, "again": 2}, "x", tmp_path)
    assert found == {"shard": "0/3", "wait": 4.0, "again": 2}
    given = own.parse_args(["--wait", "5"])
    assert yaml.safe_load(file.text(file.merge(given))) == {"wait": 5.0, "again": 0}
    with pytest.raises(arguments.UsageError, match="--wait is missing"):
        file.merge(own.parse_args(["--shard", "1/2"]))
