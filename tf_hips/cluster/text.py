# SPDX-License-Identifier: Apache-2.0
"""YAML as a person would write it: no anchors, and texts of several lines as such.

Who reads it may know YAML 1.1, 1.2 or, as kubectl does, some of both: a text is plain only where
none of them could take it for a number, a date, a bool or null.
"""

import re
from typing import Any

import yaml

_WORD = re.compile(r"-{0,2}[A-Za-z/][A-Za-z0-9 ._/:@=+,()-]*")
_NO_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def documents(*values: Any) -> str:
    """The values as documents of one file."""
    return yaml.dump_all(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Whether an object that occurs again is written again: always."""
        return True


def _scalar(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    is_word = _WORD.fullmatch(value) and value.lower() not in _NO_WORDS
    style = "|" if "\n" in value else None if is_word else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _scalar)
