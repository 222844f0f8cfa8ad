# SPDX-License-Identifier: Apache-2.0
"""The system's `ssh`: one command on one machine, what it answered, and what its errors mean."""

import dataclasses
import re
import shlex
import subprocess
from collections.abc import Sequence
from importlib import resources

from tf_hips.errors import ConfigError

# ssh takes the first value it meets, so the operator's own options come first; but a password that
# nobody can type must never be asked for.
_NEVER_ASK = ("-o", "BatchMode=yes")
_DEFAULTS = (
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)
_MARK = "@tf-hips "
# ssh's own exit code, as opposed to the command's.
_SSH_FAILED = 255
_BROKE = "the connection broke"
# What ssh says in English, and what the operator may do.
_EXPLAINED = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the host's key is not the one that is known; if the machine was made anew, "
        "`ssh-keygen -R HOST` forgets the old one",
    ),
    (
        r"Host key verification failed",
        "the host's key is not known yet; `ssh HOST` once by hand, and compare it",
    ),
    (
        r"Permission denied",
        "the host lets none of your keys in; `ssh HOST` must work without a password (ssh-agent, "
        "authorized_keys)",
    ),
    (r"Could not resolve hostname", "there is no host of this name"),
    (r"Connection refused", "nothing answers at ssh's port of this host"),
    (r"timed out|No route to host|Network is unreachable", "the host cannot be reached"),
    (
        r"Connection (?:to .* )?(?:closed|reset)|Broken pipe|Timeout, server|client_loop",
        _BROKE,
    ),
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one command on a machine came to.

    Attributes:
        said: what the machine said, line by line: a word and the rest.
        code: exit code of the command.
        trouble: why ssh itself failed, in words; empty where it did not.
        error: the last line on standard error.
    """

    said: tuple[tuple[str, str], ...]
    code: int
    trouble: str
    error: str

    def find(self, *words: str) -> tuple[str, str] | None:
        """The last line that begins with one of `words`."""
        return next((line for line in reversed(self.said) if line[0] in words), None)

    @property
    def is_unreached(self) -> bool:
        """Whether ssh failed before the machine can have done anything."""
        return bool(self.trouble) and not self.said and not self.trouble.startswith(_BROKE)

    @property
    def log(self) -> list[str]:
        """Lines of the role's log that came along."""
        return [rest for word, rest in self.said if word == "log"]


def command(host: str, options: Sequence[str], verb: str, arguments: Sequence[str]) -> list[str]:
    """The ssh command that runs a verb of `remote.sh` on `host`."""
    script = resources.files("tf_hips.cluster").joinpath("remote.sh").read_text(encoding="utf-8")
    told = shlex.join(["sh", "-c", script, "tf-hips", verb, *arguments])
    return ["ssh", *_NEVER_ASK, *options, *_DEFAULTS, "--", host, f"exec {told}"]


def call(
    host: str,
    options: Sequence[str],
    verb: str,
    arguments: Sequence[str],
    data: bytes = b"",
) -> Answer:
    """Runs a verb of `remote.sh` on `host` and waits for its end.

    Args:
        host: destination of ssh.
        options: the operator's own options of ssh.
        verb: a function of `remote.sh`.
        arguments: its arguments.
        data: its standard input.

    Raises:
        ConfigError: there is no ssh here.
    """
    whole = command(host, options, verb, arguments)
    try:
        done = subprocess.run(whole, input=data, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ConfigError("`ssh` must be a program on the path of this machine") from error
    lines = done.stdout.decode(errors="replace").splitlines()
    said = [line.removeprefix(_MARK).partition(" ") for line in lines if line.startswith(_MARK)]
    errors = done.stderr.decode(errors="replace")
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "").strip()
    return Answer(
        tuple((word, rest) for word, _, rest in said),
        done.returncode,
        explain(errors, host) if done.returncode == _SSH_FAILED or done.returncode < 0 else "",
        last,
    )


def explain(error: str, host: str) -> str:
    """Why ssh could not do what it was asked to, from what it printed."""
    last = next((line for line in reversed(error.splitlines()) if line.strip()), "").strip()
    for pattern, meaning in _EXPLAINED:
        if re.search(pattern, error):
            return f"{meaning.replace('HOST', host)} (ssh: {last})"
    return f"{_BROKE} (ssh: {last})" if last else _BROKE
