# SPDX-License-Identifier: Apache-2.0
"""The options of a sub-command as keys of a YAML file.

The keys follow from the parser: `--round-timeout S` is `round_timeout`, a number. So an option that
a command gets is a key of its file at once. What the command line says counts more than the file,
and the file more than the defaults.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tf_hips import config
from tf_hips.cli import arguments, local_training, quorums
from tf_hips.errors import ConfigError

# What a value is in YAML, by the type of the option; others are what their default is, else text.
_KINDS: dict[Any, Any] = {
    arguments.count: int,
    arguments.seed: int,
    arguments.seconds: float,
    arguments.sites: tuple[str, ...],
    quorums.deadline: float | str,
    arguments.number: float,
    arguments.switch: bool,
    arguments.index: int,
    arguments.mapping: Mapping[str, Any],
    local_training.participation: int | float,
}
_PATHS = ("FILE", "DIR")


class ConfigFile:
    """The file of one sub-command: which keys it has, and what follows from it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        """Takes the options that `parser` has so far; it must not have defaults set by `dest`."""
        self._what = f"options of `{parser.prog}`"
        self._actions = {
            key: action
            for action in parser._actions
            if (key := _key(action)) and not isinstance(action, argparse._HelpAction)
        }
        self._defaults = {action.dest: action.default for action in self._actions.values()}
        self._required = [key for key, action in self._actions.items() if action.required]
        self._kinds = {key: _kind(action) for key, action in self._actions.items()}
        fields = [
            (key, kind | None, dataclasses.field(default=None)) for key, kind in self._kinds.items()
        ]
        self.kind: type[Any] = dataclasses.make_dataclass("Options", fields, frozen=True)
        # What an option made of a text may be anything; a file says the text.
        self._texts: dict[str, str] = {}
        self._types = {key: action.type for key, action in self._actions.items()}
        for key, action in self._actions.items():
            if self._kinds[key] is str and callable(action.type):
                action.type = self._remembering(key, action.type)

    @property
    def keys(self) -> list[str]:
        """All keys, in the order of `--help`."""
        return list(self._actions)

    @property
    def actions(self) -> Mapping[str, argparse.Action]:
        """The options, by key."""
        return self._actions

    @property
    def paths(self) -> list[str]:
        """The keys that are paths."""
        return [key for key, action in self._actions.items() if action.metavar in _PATHS]

    def checked(
        self, values: Any, source: str, folder: Path, *, moves_paths: bool = True
    ) -> dict[str, Any]:
        """What the command would make of `values`, by `dest`; keys that say nothing are left out.

        Args:
            values: a mapping of YAML.
            source: named in errors.
            folder: files are looked for here.
            moves_paths: relative paths are meant from `folder`; else they are of another machine,
                and stay.

        Raises:
            ConfigError: a key is unknown, or a value is of another type or refused by the option.
        """
        built = config.build(self.kind, values, source)
        found = {}
        with contextlib.chdir(folder):
            for key, action in self._actions.items():
                value = getattr(built, key)
                if value is None:
                    continue
                if action.metavar in _PATHS:
                    value = str(folder / value) if moves_paths else value
                elif callable(kind := self._types[key]):
                    try:
                        value = kind(option_text(value))
                    except argparse.ArgumentTypeError as error:
                        raise ConfigError(f"{source}: `{key}` {error}") from error
                if action.choices is not None and value not in action.choices:
                    raise ConfigError(
                        f"{source}: `{key}` must be one of {', '.join(action.choices)}. "
                        f"Received: {value!r}"
                    )
                found[action.dest] = value
        return found

    def merge(self, given: argparse.Namespace) -> argparse.Namespace:
        """The options of a command: those given, else those of `--config`, else the defaults.

        Raises:
            ConfigError: as for `config.read` and `checked`.
            UsageError: an option that must be there is in neither.
        """
        found: dict[str, Any] = {}
        if given.config is not None:
            path = Path(given.config)
            values = dataclasses.asdict(config.read(self.kind, path, what=self._what))
            found = self.checked(values, str(path), path.resolve().parent)
            texts = {key: value for key, value in values.items() if isinstance(value, str)}
            self._texts = {**texts, **self._texts}
        merged = {**self._defaults, **found, **vars(given)}
        for key in self._required:
            if merged[self._actions[key].dest] is None:
                raise arguments.UsageError(
                    f"{option(key)} is missing: it must be given, or `{key}` in the file of "
                    "--config"
                )
        return argparse.Namespace(**merged)

    def text(self, options: argparse.Namespace) -> str:
        """The options as a file that says the same; what is not set is left out."""
        values = {}
        for key, action in self._actions.items():
            value = getattr(options, action.dest)
            if value is not None and value is not False:
                if action.metavar in _PATHS:
                    value = str(Path(value).absolute())
                if self._kinds[key] is str and not isinstance(value, str):
                    value = self._texts[key]
                values[key] = list(value) if isinstance(value, tuple) else value
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)

    def _remembering(self, key: str, kind: Callable[[str], Any]) -> Callable[[str], Any]:
        @functools.wraps(kind)
        def remember(text: str) -> Any:
            value = kind(text)
            self._texts[key] = text
            return value

        return remember


def add(parser: argparse.ArgumentParser) -> ConfigFile:
    """Gives a sub-command `--config` and `--print-config`; to be called after its options."""
    file = ConfigFile(parser)
    for key, action in file._actions.items():
        # What is given can then be told from what is not; `merge` puts the defaults in.
        action.default, action.required = argparse.SUPPRESS, False
        if isinstance(action, argparse._StoreTrueAction):
            parser.add_argument(
                f"--no-{key.replace('_', '-')}",
                dest=action.dest,
                action="store_false",
                default=argparse.SUPPRESS,
                help=f"not {option(key)}, whatever the file says",
            )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML whose keys are options, `round_timeout: 60`; options given here count more. "
        "Paths in it are relative to its folder",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the options as such a file, and end"
    )
    return file


def option(key: str) -> str:
    """The option that is `key` in a file."""
    return f"--{key.replace('_', '-')}"


def option_text(value: Any) -> str:
    """A value of YAML as it is written on a command line."""
    if isinstance(value, Mapping):
        return json.dumps(value, default=str)
    return ",".join(value) if isinstance(value, tuple | list) else str(value)


def _key(action: argparse.Action) -> str:
    """`round_timeout` of `--round-timeout`; nothing of an argument without a long option."""
    names = [name for name in action.option_strings if name.startswith("--")]
    return names[0].removeprefix("--").replace("-", "_") if names else ""


def _kind(action: argparse.Action) -> Any:
    if isinstance(action, argparse._StoreTrueAction):
        return bool
    by_default = type(action.default) if isinstance(action.default, int | float) else str
    return _KINDS.get(action.type, by_default)
