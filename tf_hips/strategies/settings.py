# SPDX-License-Identifier: Apache-2.0
"""Optimizers of all workers must make the same steps of the same gradients.

Each worker applies what all have reduced, so a momentum, a clipping or a schedule that is another
one on one worker takes its weights away from those of the others. What need not be equal is not
looked at: names, which Keras counts; rates that are variables, which become the first worker's;
functions, of which nobody can tell whether they are alike.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tf_hips.callbacks import optimizers
from tf_hips.errors import ProtocolError

Settings = dict[str, Any]
"""Such as {"optimizer": "SGD", "`momentum` of optimizer": 0.9}."""

_OPTIMIZER = "optimizer"
_RATE = "`learning_rate`"
_NUMBER, _FUNCTION = "a number", "a function"
# As which Keras writes one.
_FUNCTION_CLASSES = ("function", "__lambda__")
_MOST_SHOWN = 200  # characters of a value in a message


def configs_of(parts: Sequence[Any]) -> Settings:
    """The classes of the optimizers `parts`, and what their `get_config` says, by path.

    What is no JSON value is there as it is.
    """
    told: Settings = {}
    for number, optimizer in enumerate(parts):
        which = _OPTIMIZER if len(parts) == 1 else f"{_OPTIMIZER} {number}"
        told[which] = type(optimizer).__name__
        try:
            with warnings.catch_warnings():  # Keras warns of lambdas, which nobody loads here
                warnings.simplefilter("ignore")
                config = optimizer.get_config()
        except Exception:  # noqa: BLE001 - whatever it raises
            continue  # a class of the script's own, which cannot tell
        for key, value in config.items():
            if key != "name":  # which Keras counts
                told.update((f"`{path}` of {which}", one) for path, one in _flat(key, value))
    return told


def settings_of(used: Sequence[Any]) -> Settings:
    """What decides about the steps of the optimizers `used`: JSON values by name."""
    found = {id(part): part for one in used for part in optimizers.parts(one)}  # each once
    return comparable(configs_of(list(found.values())))


def comparable(told: Mapping[str, Any]) -> Settings:
    """Of what `configs_of` says, among other facts, that which must be equal on all workers.

    Args:
        told: also by another worker, so of values of any kind.
    """
    settings: Settings = {}
    for name, value in told.items():
        key, _, which = name.rpartition(" of ")
        if which.startswith(_OPTIMIZER) and _is_plain(value):
            is_rate = key == _RATE and isinstance(value, int | float)
            settings[name] = _NUMBER if is_rate else value
    return settings


def check_settings(everyone: Sequence[tuple[str, Settings]]) -> None:
    """Raises where workers train by optimizers that make other steps of the same gradients.

    Args:
        everyone: of each worker its name, and what `settings_of` or `comparable` says.

    Raises:
        ProtocolError: names the first setting that differs.
    """
    whose, first = everyone[0]
    for who, one in everyone:
        # The class first, then its settings. What one cannot tell, or has not got in its version of
        # Keras, is not compared.
        for name in sorted({*first} & {*one}, key=lambda name: (name.startswith("`"), name)):
            if one[name] != first[name]:
                raise ProtocolError(
                    "All workers must train with the same optimizer, and give it the same "
                    f"settings. Received: {name} is {_shown(one[name])} on {who}, and "
                    f"{_shown(first[name])} on {whose}{_remedy(name, first)}"
                )


def _remedy(name: str, told: Settings) -> str:
    """What is to be said of a setting that may decide about no step: one that Keras does not know.

    Args:
        name: of the setting.
        told: among others the class of its optimizer.
    """
    key, _, which = name.rpartition(" of ")
    if not key or hasattr(keras.optimizers, str(told.get(which))):
        return ""
    return (
        f". Give all workers one value; or, if {key} decides about no step (a path, a number of "
        f"the worker), leave it out of `get_config` of {told.get(which)}"
    )


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is inside of a setting, by its path; of an object its class and its settings."""
    if isinstance(value, Mapping):
        inside: Any = value
        if "class_name" in value and "config" in value:
            is_function = value["class_name"] in _FUNCTION_CLASSES
            yield path, _FUNCTION if is_function else value["class_name"]
            inside = None if is_function else value["config"]
        for key, one in inside.items() if isinstance(inside, Mapping) else ():
            if key != "name":
                yield from _flat(f"{path}.{key}", one)
    elif isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value):
        for place, one in enumerate(value):
            yield from _flat(f"{path}[{place}]", one)
    else:
        yield path, _shortened(value)


def _shortened(value: Any) -> Any:
    """A number that went through a float32, as it was written; also in a list."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, list | tuple):
        return [_shortened(one) for one in value]
    return value


def _is_plain(value: Any) -> bool:
    """Whether this is a number, a text, a truth, None, or a list of these."""
    values = value if isinstance(value, list) else [value]
    return all(one is None or isinstance(one, str | int | float) for one in values)


def _shown(value: Any) -> str:
    return str(value)[:_MOST_SHOWN]
