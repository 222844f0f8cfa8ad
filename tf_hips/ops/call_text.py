# SPDX-License-Identifier: Apache-2.0
"""Arguments of texts such as `terngrad(bitwidth=2)`, which name values: read, never evaluated."""

import re
import types
from collections.abc import Mapping

from tf_hips.ops.registry import Parameter

ARGUMENT = re.compile(r"\s*(?:([A-Za-z_]\w*)\s*=)?\s*([^\s=]+)\s*", re.ASCII)


def values(
    name: str, known: Mapping[str, Parameter], arguments: str, text: str
) -> dict[str, int | float]:
    """The values of a compressor's parameters, by name."""
    found: dict[str, int | float] = {}
    for position, argument in enumerate(arguments.split(",") if arguments else []):
        match = ARGUMENT.fullmatch(argument)
        key = match.group(1) if match is not None else None
        if key is None:
            if position >= len(known):
                raise ValueError(f"`{name}` takes {len(known)} arguments. Received: {text!r}")
            key = list(known)[position]
        if key in found:
            raise ValueError(f"`{key}` must be given once. Received: {text!r}")
        value = _parse_value(argument, match.group(2) if match else "", text)
        if isinstance(value, str):
            if key not in known or not known[key].readable:
                raise _bad_argument(argument, text)
            value = known[key].number(value)
        found[key] = value
    return found


def is_number(text: str) -> bool:
    """Whether an argument is the text of a number, and so no part of what a wrapper wraps."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def wrong_kind(name: str, needed: str, value: object) -> TypeError:
    """The error for an argument that is no value and no text; a maker is told to be called.

    Args:
        name: of the argument.
        needed: what it must be.
        value: what was given.
    """
    hint = ""
    if isinstance(value, types.FunctionType):
        hint = f"; did you forget the parentheses, `{value.__name__}()`?"
    return TypeError(f"`{name}` must be {needed}. Received: {name}={value!r}{hint}")


def _parse_value(argument: str, value: str, text: str) -> int | float | str:
    """The value of an argument: a number, or else a word."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    if value.isidentifier():
        return value
    raise _bad_argument(argument, text)


def _bad_argument(argument: str, text: str) -> ValueError:
    return ValueError(
        f"an argument must read like 'bitwidth=2'. Received: {argument.strip()!r} in {text!r}"
    )
