# SPDX-License-Identifier: Apache-2.0
"""Argument types and the parser that says what is wrong in one line."""

import argparse
import json
import os
import re
import shutil
import ssl
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tf_hips.cli import hints
from tf_hips.config import MOST_SECONDS, NAME, Tls
from tf_hips.errors import LibraryError

_ON = {"1", "true", "yes", "on"}
_OFF = {"", "0", "false", "no", "off"}

# What argparse says; newer versions have no quotes around the choices.
_WRONG_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")

_NO_COMMAND = (": COMMAND", ": VERB")


class UsageError(Exception):
    """The command line asks for something that cannot be; `main` prints it and exits with 2."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; no abbreviations."""

    def __init__(self, **options: object) -> None:
        """As `argparse.ArgumentParser`, without abbreviations."""
        super().__init__(**{"allow_abbrev": False, **options})  # type: ignore[arg-type]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As `argparse.ArgumentParser`, but what is unknown is refused here.

        Else the parser of all commands would do it, which does not say of which command. Options
        that stand behind a script are the script's, and it is said where they have names of ours:
        without `--`, which says so itself, they may have been meant for us.
        """
        options, left = super().parse_known_args(args, namespace)
        known = [
            name
            for name, action in self._option_string_actions.items()
            if action.help != argparse.SUPPRESS
        ]
        if left:
            unknown = [one.partition("=")[0] for one in left if one.startswith("-")]
            found = [text for one in unknown if (text := hints.option(one, known))]
            self.error(f"unrecognized arguments: {' '.join(left)}{found[0] if found else ''}")
        if any(action.dest == "script" for action in self._actions) and "--" not in (args or ()):
            text = hints.behind(options.script, options.arguments, known)
            sys.stderr.write(f"{self.prog}: warning: {text}\n" if text else "")
        return options, left

    def error(self, message: str) -> NoReturn:
        """Prints one line, with the choice that is nearest to a wrong one, and exits with 2."""
        if message.endswith(_NO_COMMAND):
            message += f"; `{self.prog} --help` lists them"
        wrong = _WRONG_CHOICE.search(message)
        if wrong is not None:
            message += hints.near(wrong[1], re.findall(r"[^\s,']+", wrong[2]))
        sys.stderr.write(f"{self.prog}: error: {message}\n")
        sys.exit(2)


def count(text: str) -> int:
    """A whole number from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1. Received: {text!r}")
    return value


def seed(text: str) -> int:
    """A whole number in [0, 2^63)."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number in [0, 2^63). Received: {text!r}")
    return value


def seconds(text: str) -> float:
    """A positive number of seconds, at most 1e9: thirty years."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST_SECONDS:
        bound = " and at most 1e9" if value > 0 else ""
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds > 0{bound}. Received: {text!r}"
        )
    return value


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number. Received: {text!r}")
    return value


def switch(text: str) -> bool:
    """`1`, `true`, `yes`, `on`, or their opposites; nothing at all is off."""
    if text.lower() in _ON | _OFF:
        return text.lower() in _ON
    raise argparse.ArgumentTypeError(f"must be true or false. Received: {text!r}")


def plain(text: str) -> Any:
    """A number, a truth value or what else JSON knows, where the text is one; else the text."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text


def mapping(text: str) -> dict[str, Any]:
    """A mapping in JSON; texts in it are read as by `plain`."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(
            f'must be a mapping in JSON, as {{"nesterov": true}}. Received: {text!r}'
        )
    return {key: plain(value) if isinstance(value, str) else value for key, value in found.items()}


def index(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0. Received: {text!r}")
    return int(text)


def site(text: str) -> str:
    """The name of a party."""
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "must be 1 to 50 letters, digits, '.', '_' or '-', a letter or digit first. "
            f"Received: {text!r}"
        )
    return text


def sites(text: str) -> tuple[str, ...]:
    """Names of parties, separated by commas, all different."""
    names = tuple(site(part.strip()) for part in text.split(","))
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"must name every party once. Received: {text!r}")
    return names


def endpoint(text: str) -> str:
    """`HOST:PORT`; the host may be an IPv6 address in brackets."""
    from tf_hips.ps.transport.sockets import lacks_brackets

    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"must be HOST:PORT. Received: {text!r}")
    if int(port) > 65535:
        raise argparse.ArgumentTypeError(
            f"must be HOST:PORT, the port at most 65535. Received: {text!r}"
        )
    if lacks_brackets(host):
        raise argparse.ArgumentTypeError(
            f"must have an IPv6 address in brackets, as [::1]:7070. Received: {text!r}"
        )
    return text


def endpoints(text: str) -> str:
    """One `HOST:PORT`, or several with commas between them."""
    return ",".join(endpoint(part.strip()) for part in text.split(","))


def shard(text: str) -> tuple[int, int]:
    """`I/N`: one of N servers, I from 0 to N - 1."""
    index, slash, number = text.partition("/")
    is_shard = bool(slash) and index.isdecimal() and number.isdecimal()
    if not is_shard or int(index) >= int(number):
        raise argparse.ArgumentTypeError(f"must be I/N, I from 0 to N - 1. Received: {text!r}")
    return int(index), int(number)


def codec(text: str) -> str:
    """The text of a compression; returns its canonical text. Imports no TensorFlow."""
    from tf_hips.ops import compressor

    try:
        canonical: str = compressor.resolve(text).text
    except (ValueError, LibraryError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return canonical


def downlink(text: str) -> str:
    """The text of a compression, or `same`: what the way up has."""
    return text if text == "same" else codec(text)


def add_max_restarts(parser: argparse.ArgumentParser, whom: str) -> None:
    """Declares `--max-restarts`."""
    parser.add_argument(
        "--max-restarts",
        type=_number,
        default=0,
        metavar="N",
        help=f"start {whom} again up to N times when one of them fails; they go on from their last "
        "backup while the others wait (default 0)",
    )


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more. Received: {text!r}")
    return int(text)


def rule(text: str) -> str:
    """The text of an update rule; returns its canonical text."""
    from tf_hips.ps import rules

    try:
        return rules.parse(text).text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_identity(parser: argparse.ArgumentParser, owner: str) -> None:
    """Adds `--authority`, `--certificate`, `--key` and `--insecure` of `owner`."""
    group = parser.add_argument_group("certificates", "`tf-hips certs` makes them")
    group.add_argument(
        "--authority", metavar="FILE", help="PEM of the authority that signs all certificates"
    )
    group.add_argument("--certificate", metavar="FILE", help=f"PEM of the certificate of {owner}")
    group.add_argument("--key", metavar="FILE", help=f"PEM of the private key of {owner}")
    group.add_argument("--insecure", action="store_true", help="plain text, on loopback only")


def identity(options: argparse.Namespace, prefix: str = "") -> Tls | None:
    """The TLS files of the command line, with absolute paths; None with `--insecure`.

    Args:
        options: with the attributes that `add_identity` declares.
        prefix: of the options' names in messages.

    Raises:
        UsageError: some are missing, are not readable files, or `--insecure` is given as well.
    """
    files = {name: getattr(options, name) for name in ("authority", "certificate", "key")}
    given = [name for name, path in files.items() if path is not None]
    if options.insecure:
        if given:
            raise UsageError(f"--insecure and --{prefix}{given[0]} exclude each other")
        return None
    missing = [f"--{prefix}{name}" for name in files if name not in given]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} missing; `tf-hips certs` makes them, --insecure goes without"
        )
    for name, path in files.items():
        if not Path(path).is_file():
            raise UsageError(f"--{prefix}{name} must be a file. Received: {path!r}")
        try:
            with Path(path).open("rb"):
                pass
        except OSError as error:
            raise UsageError(
                f"--{prefix}{name} must be a file that this user can read. Received: {path!r} "
                f"({error.strerror})"
            ) from error
    # Not resolved: links may lead elsewhere when files are renewed, as those of a volume that
    # Kubernetes makes of a Secret do, and where they led before is gone then.
    found = Tls(**{name: str(Path(path).absolute()) for name, path in files.items()})
    _check_loads(found)
    key = Path(found.key).resolve()
    mode = stat.S_IMODE(key.stat().st_mode)
    # In a folder that is closed to them nobody reaches it.
    if mode & stat.S_IROTH and all(one.stat().st_mode & stat.S_IXOTH for one in key.parents):
        sys.stderr.write(
            f"tf-hips: warning: all users of this machine can read the key {found.key} (mode "
            f"{mode:04o}). `chmod 600` lets its owner alone.\n"
        )
    return found


def check_loopback(name: str, addresses: str, tls: Tls | None) -> None:
    """Looks whether plain text stays on this machine, before anything is started.

    Args:
        name: of the option, `--server`.
        addresses: what it was given: `HOST:PORT`, or several with commas between them.
        tls: what `identity` made of the options; None: plain text.

    Raises:
        UsageError: plain text would go to another machine, or come from one.
    """
    from tf_hips.ps.transport.sockets import is_loopback, split_address

    hosts = [split_address(address)[0] for address in addresses.split(",")]
    if tls is None and not all(map(is_loopback, hosts)):
        raise UsageError(f"--insecure is for a {name} on loopback. Received: {addresses!r}")


def _check_loads(identity: Tls) -> None:
    """Loads the files as a TLS handshake will, before anything is started.

    Raises:
        UsageError: one of them is no PEM of its kind, or the key belongs to another certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(identity.authority)
    except OSError as error:
        raise UsageError(
            f"--authority must be a PEM certificate. Received: {identity.authority!r}"
        ) from error
    try:
        # Without a passphrase OpenSSL would ask for one on the terminal; gRPC takes no such key.
        context.load_cert_chain(identity.certificate, identity.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"--key must be the key of --certificate. Received: {identity.key!r}, which is "
                "another's"
            ) from error
        raise UsageError(
            "--certificate and --key must be PEM files, the key without a passphrase. "
            f"Received: {identity.certificate!r}, {identity.key!r}"
        ) from error


def check_log_dir(folder: str) -> None:
    """Makes the folder of event logs.

    Raises:
        UsageError: it cannot be made, or nothing can be written there.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            "--log-dir must be a folder that can be written. Received: "
            f"{folder} ({error.strerror or error})"
        ) from error


def check_output(name: str, file: str) -> None:
    """Looks, before anything is started, whether the file of the option `name` can be written.

    Raises:
        UsageError: it cannot.
    """
    path = Path(file)
    # A device, a pipe or a link is written to; what is a file is replaced by another one.
    is_kept = path.exists() and (path.is_symlink() or not path.is_file())
    folder = Path(os.path.realpath(path)).parent
    may = os.access(path, os.W_OK) if is_kept else os.access(folder, os.W_OK | os.X_OK)
    if path.is_dir() or not may:
        raise UsageError(f"{name} must be a file in a folder that can be written. Received: {file}")


def script_command(script: str, arguments: list[str]) -> list[str]:
    """The command of one worker: a Python script with this interpreter, or any program on the path.

    Raises:
        UsageError: there is no such script or program.
    """
    if Path(script).suffix == ".py":
        if not Path(script).is_file():
            raise UsageError(f"the training script must be a file. Received: {script!r}")
        return [sys.executable, script, *arguments]
    program = shutil.which(script)
    if program is None:
        raise UsageError(
            f"the training script must be a .py file or a program on the path. Received: {script!r}"
        )
    return [program, *arguments]
