# SPDX-License-Identifier: Apache-2.0
"""What a process is told about its run: frozen values, read strictly from one YAML file.

The launcher writes the file and names it in `TF_HIPS_CONFIG`; `TF_HIPS_ROLE` says what the process
is. A process without either is a run of its own with no slow tier. Unknown keys are errors: a
misspelt option must not be ignored.

This is the only module that reads YAML. It imports neither TensorFlow nor Horovod nor gRPC.
"""

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tf_hips.errors import ConfigError

CONFIG_VARIABLE = "TF_HIPS_CONFIG"
ROLE_VARIABLE = "TF_HIPS_ROLE"
ROLES = ("worker", "party", "server", "global-server", "evaluator", "operator")

_Value = TypeVar("_Value")


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
        server: `host:port` of the server.
        site: this party's name, as the server lists it.
        tls: identity of the party; None means plain text, which is allowed on loopback only.
        deadline_s: seconds to wait for an answer of the server. Where the server itself waits for
            other parties, a party waits at least as long as it does.
    """

    server: str
    site: str
    tls: Tls | None = None
    deadline_s: float = 600.0


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
        compression: text of the compression of gradients, "error_feedback(onebit)", for a script
            that names none; it may then name no other. The strategy reads and checks it.
    """

    run: str = "local"
    seed: int = 0
    uplink: Uplink | None = None
    log_dir: str | None = None
    saves: bool = True
    compression: str | None = None


def load(path: str | Path) -> Run:
    """Reads a `Run` from a YAML file.

    Raises:
        ConfigError: the file is missing or is no YAML mapping, a key is unknown, or a value has
        another type.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read: {error.strerror}."
        ) from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    return _build(Run, data if data is not None else {}, str(path), "")


def dump(run: Run, path: str | Path) -> None:
    """Writes `run` as YAML that `load` reads back."""
    text = yaml.safe_dump(dataclasses.asdict(run), sort_keys=False)
    Path(path).write_text(text, encoding="utf-8")


def current() -> Run:
    """The run that this process belongs to: from `TF_HIPS_CONFIG`, or a run of its own."""
    path = os.environ.get(CONFIG_VARIABLE)
    return load(path) if path else Run()


def role() -> str:
    """The role of this process, `worker` unless `TF_HIPS_ROLE` says otherwise."""
    value = os.environ.get(ROLE_VARIABLE, "worker")
    if value not in ROLES:
        raise ConfigError(
            f"`{ROLE_VARIABLE}` must be one of {', '.join(ROLES)}. Received: {value!r}"
        )
    return value


def _build(cls: type[_Value], data: Any, file: str, where: str) -> _Value:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{file}: expected a mapping at `{where or '.'}`. Received: {data!r}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in data.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            advice = f" Did you mean `{near[0]}`?" if near else f" Known keys: {', '.join(hints)}."
            raise ConfigError(f"{file}: unknown key `{where}{key}`.{advice}")
        values[key] = _convert(hints[key], value, file, f"{where}{key}")
    required = {
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - values.keys())
    if missing:
        raise ConfigError(f"{file}: `{where or '.'}` lacks the key `{missing[0]}`.")
    return cls(**values)


def _convert(hint: Any, value: Any, file: str, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast("type[Any]", hint), value, file, f"{where}.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{file}: `{where}` must be of type {hint.__name__}. Received: {value!r}")
    return value
