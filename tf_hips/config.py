# SPDX-License-Identifier: Apache-2.0
"""What a process is told about its run: frozen values, read strictly from one YAML file.

The launcher writes the file and names it in `TF_HIPS_CONFIG`; `TF_HIPS_ROLE` says what the process
is. A process without either is a run of its own with no slow tier. Unknown keys are errors: a
misspelt option must not be ignored.

This is the only module that reads YAML. It imports neither TensorFlow nor Horovod nor gRPC.
"""

import dataclasses
import difflib
import json
import os
import re
import reprlib
import stat
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tf_hips.errors import ConfigError

CONFIG_VARIABLE = "TF_HIPS_CONFIG"
ROLE_VARIABLE = "TF_HIPS_ROLE"
LOCAL_WORKER_VARIABLE = "TF_HIPS_LOCAL_WORKER"
"""Number of a worker among those of all sites that a launcher started on its machine."""
ROLES = ("worker", "party", "server", "global-server", "evaluator", "operator")
SERVER_ROLES = ("global-server", "server")
INTRAS = ("horovod", "ps")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")
"""Of a run or a site: part of the name of a certificate, of files and of roles in the log."""

MOST_SECONDS = 1e9
"""Thirty years. What waits adds the clock, counts in nanoseconds or in a C int, and for much longer
does not wait at all."""

_Value = TypeVar("_Value")

_MAX_BYTES = 1 << 26  # of a file
_MAX_SHOWN = 200  # characters of a value in a message


@dataclasses.dataclass(frozen=True)
class Tls:
    """Paths of an identity's PEM files: the authority it trusts, its certificate and its key."""

    authority: str
    certificate: str
    key: str


@dataclasses.dataclass(frozen=True)
class Uplink:
    """How a party reaches the server above it.

    Attributes:
        server: `host:port` of the server; of several that share the model all, in the order of
            their shards, with commas between them.
        site: this party's name, as the server lists it.
        tls: identity of the party; None means plain text, which is allowed on loopback only.
        deadline_s: seconds to wait for an answer of the server, at most 1e9. Where the server
            itself waits for other parties, a party waits at least as long as it does.
        server_role: role in the certificate of that server: `global-server`, or `server`, which is
            that of a party.
    """

    server: str
    site: str
    tls: Tls | None = None
    deadline_s: float = 600.0
    server_role: str = "global-server"

    def __post_init__(self) -> None:
        """Checks the role and the deadline.

        Raises:
            ConfigError: the role is not one of a server, or the deadline is no time to wait.
        """
        if not 0 < self.deadline_s <= MOST_SECONDS:
            raise ConfigError(
                f"`deadline_s` must be > 0 and at most 1e9. Received: deadline_s={self.deadline_s}"
            )
        if self.server_role not in SERVER_ROLES:
            raise ConfigError(
                f"`server_role` must be one of {', '.join(SERVER_ROLES)}. Received: "
                f"server_role={self.server_role!r}"
            )


@dataclasses.dataclass(frozen=True)
class Run:
    """One run as one process sees it.

    Attributes:
        run: identity of the run; the server refuses children of another run.
        seed: seed of the run, from which every encoder derives its own.
        uplink: the slow tier, or None where there is none.
        log_dir: folder for event logs, or None for no event log.
        saves: whether the first rank of this party saves models. Where several parties share a
            folder, one of them does.
        attempt: how often the launcher has started this party before, in this run.
        comes_back: whether the launcher starts the party again if it fails; it then leaves the run
            without a word, so that the others wait.
        compression: text of the compression of gradients, "error_feedback(onebit)", for a script
            that names none; it may then name no other. The strategy reads and checks it.
        rule: text of the update rule (docs/rules.md), "momentum(learning_rate=0.1)", in the same
            way; None: the script's, or else the server's.
        intra: how the workers of a party meet, "horovod" or "ps", as they were started; None: the
            script says, or else "horovod".
        servers_end: whether the servers end with the run, so that nobody can join it anew.
    """

    run: str = "local"
    seed: int = 0
    uplink: Uplink | None = None
    log_dir: str | None = None
    saves: bool = True
    attempt: int = 0
    comes_back: bool = False
    compression: str | None = None
    rule: str | None = None
    intra: str | None = None
    servers_end: bool = False

    def __post_init__(self) -> None:
        """Checks `intra`.

        Raises:
            ConfigError: it is no way to meet.
        """
        if self.intra is not None and self.intra not in INTRAS:
            raise ConfigError(
                f"`intra` must be one of {', '.join(INTRAS)}. Received: intra={self.intra!r}"
            )


def load(path: str | Path) -> Run:
    """Reads a `Run` from a YAML file.

    Raises:
        ConfigError: as for `read`.
    """
    return read(Run, path)


def read(
    kind: type[_Value], path: str | Path, version: int | None = None, what: str | None = None
) -> _Value:
    """Reads a dataclass from a YAML file that anybody may have written.

    Args:
        kind: the dataclass; its fields are the keys. Their types may be str, int, float, bool,
            `X | None`, other dataclasses, `tuple[X, ...]`, `Mapping[str, X]` and, for what others
            check, `Any`.
        path: the file.
        version: what the key `version` must say; None where there is no such key.
        what: what such a file holds, for the error about one of another kind; None: any error is
            about its first key.

    Raises:
        ConfigError: the file is missing or is no YAML mapping, its version is another, a key is
            unknown or missing, a value has another type, or `kind` refuses it.
    """
    path = Path(path)
    data = _parsed(path)
    if what is not None and isinstance(data, Mapping):
        _check_kind(kind, data, path, what)
    if version is not None:
        if not isinstance(data, Mapping) or "version" not in data:
            raise ConfigError(
                f"{path}: expected a mapping with `version: {version}`. Received: {shown(data)}"
            )
        if data["version"] != version or isinstance(data["version"], bool):
            raise ConfigError(
                f"{path}: `version` must be {version}. Received: {shown(data['version'])}"
            )
        data = {key: value for key, value in data.items() if key != "version"}
    return _build(kind, data, str(path), "")


def build(kind: type[_Value], data: Any, source: str) -> _Value:
    """Makes a dataclass of mappings and lists, as `read` does; `source` is named in errors.

    Raises:
        ConfigError: as for `read`.
    """
    return _build(kind, data, source, "")


def dump(run: Run, path: str | Path) -> None:
    """Writes `run` as YAML that `load` reads back."""
    text = yaml.safe_dump(dataclasses.asdict(run), sort_keys=False)
    Path(path).write_text(text, encoding="utf-8")


def write(value: Any, path: str | Path, version: int) -> None:
    """Writes a dataclass as YAML that `read` reads back; lists of mappings get a line per entry.

    The file appears whole or not at all.
    """
    parts = [f"version: {version}\n"]
    for key, entry in dataclasses.asdict(value).items():
        if isinstance(entry, tuple) and entry and isinstance(entry[0], dict):
            rows = [
                yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=float("inf"))
                for row in entry
            ]
            parts.append(f"{key}:\n" + "".join(f"- {row}" for row in rows))
        else:
            entry = list(entry) if isinstance(entry, tuple) else entry
            parts.append(yaml.safe_dump({key: entry}, sort_keys=False, width=float("inf")))
    write_whole("".join(parts), path)


def write_whole(text: str, path: str | Path) -> None:
    """Writes a file that a reader sees whole or not at all; in UTF-8.

    What is no regular file (`/dev/stdout`, a pipe, a link) is written to and stays what it is; of
    that a reader may see a part.
    """
    path = Path(path)
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        path.write_text(text, encoding="utf-8")
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def shown(value: Any) -> str:
    """`value` for a message: short, whatever it is."""
    short = reprlib.Repr()
    short.maxlevel, short.maxother = 2, _MAX_SHOWN
    short.maxstring = _MAX_SHOWN
    try:
        return short.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a value of type {type(value).__name__}"


def current() -> Run:
    """The run that this process belongs to: from `TF_HIPS_CONFIG`, or a run of its own."""
    path = os.environ.get(CONFIG_VARIABLE)
    return load(path) if path else Run()


def role() -> str:
    """The role of this process: what `TF_HIPS_ROLE` says, or else `worker`.

    Where it says nothing, a task of type `evaluator` in `TF_CONFIG` is one; the other types of
    `tf.distribute` are workers, who learn from their launcher how they meet.
    """
    value = os.environ.get(ROLE_VARIABLE)
    if value is None:
        value = "evaluator" if _is_evaluator(os.environ.get("TF_CONFIG")) else "worker"
    if value not in ROLES:
        raise ConfigError(
            f"`{ROLE_VARIABLE}` must be one of {', '.join(ROLES)}. Received: {value!r}"
        )
    return value


def _is_evaluator(text: str | None) -> bool:
    """Whether `TF_CONFIG` gives this process the task of an evaluator."""
    try:
        return bool(json.loads(text or "{}")["task"]["type"] == "evaluator")
    except (ValueError, KeyError, TypeError):
        return False


def _parsed(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read: {error.strerror}."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be text in UTF-8. Received: {error}") from error
    if len(text) > _MAX_BYTES:
        raise ConfigError(f"{path} must have at most {_MAX_BYTES} bytes. Received: more")
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_in_one_line(error)}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        # A date that no calendar has, a number of too many digits, nesting without end.
        raise ConfigError(f"{path} is not valid YAML: {type(error).__name__}: {error}") from error
    return data if data is not None else {}


class _Loader(yaml.SafeLoader):
    """The safe loader, which takes the last of equal keys; here they are an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As `SafeLoader`; a key that is merged (`<<`) may be said again."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key `{key.value[:_MAX_SHOWN]}` is there twice",
                    problem_mark=key.start_mark,
                )
            seen.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None)
        return node


def _in_one_line(error: yaml.YAMLError) -> str:
    """What is wrong, and where; PyYAML's own text has five lines and a name for the text."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason} (character {error.position})"
    return str(error)


def _check_kind(cls: type[Any], data: Mapping[Any, Any], path: Path, what: str) -> None:
    """Raises ConfigError where most keys, and more than one, are of another kind of file."""
    hints = typing.get_type_hints(cls)
    others = [key for key in data if key not in hints]
    if len(others) > max(1, len(data) // 2):
        shown_keys = ", ".join(
            f"`{shown(key) if not isinstance(key, str) else key[:_MAX_SHOWN]}`"
            for key in others[:3]
        )
        raise ConfigError(
            f"{path} must be a file of {what}. Received: another kind of file, in which "
            f"{len(others)} of {len(data)} keys are unknown: {shown_keys}"
            f"{', ...' if len(others) > 3 else ''}"
        )


def _build(cls: type[_Value], data: Any, file: str, where: str) -> _Value:
    place = where.removesuffix(".")
    if not isinstance(data, Mapping):
        at = f" at `{place}`" if place else ""
        raise ConfigError(f"{file}: expected a mapping{at}. Received: {shown(data)}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in data.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key)[:_MAX_SHOWN], hints, n=1)
            advice = f" Did you mean `{near[0]}`?" if near else f" Known keys: {', '.join(hints)}."
            name = key if isinstance(key, str) and len(key) <= _MAX_SHOWN else shown(key)
            raise ConfigError(f"{file}: unknown key `{where}{name}`.{advice}")
        values[key] = _convert(hints[key], value, file, f"{where}{key}")
    required = {
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - values.keys())
    if missing:
        whole = f"{file}: `{place}`" if place else file
        raise ConfigError(f"{whole} lacks the key `{missing[0]}`.")
    try:
        return cls(**values)
    except ConfigError as error:
        at = f"at `{place}`: " if place else ""
        raise ConfigError(f"{file}: {at}{error}") from error


def _convert(hint: Any, value: Any, file: str, where: str) -> Any:
    if hint is Any:
        return value
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        hint = next((kind for kind in kinds if type(value) is kind), kinds[0])
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast("type[Any]", hint), value, file, f"{where}.")
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is tuple and isinstance(value, list):
        return tuple(
            _convert(parts[0], entry, file, f"{where}[{place}]")
            for place, entry in enumerate(value)
        )
    if kind is Mapping and isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{file}: keys of `{where}` must be text. Received: {shown(key)}")
        return {
            key: _convert(parts[1], entry, file, f"{where}.{shown(key)[1:-1]}")
            for key, entry in value.items()
        }
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{file}: `{where}` must be finite. Received: an int") from None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        name = {tuple: "list", Mapping: "mapping"}.get(kind, kind.__name__)
        raise ConfigError(f"{file}: `{where}` must be of type {name}. Received: {shown(value)}")
    return value
