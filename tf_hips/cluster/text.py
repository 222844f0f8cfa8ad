# SPDX-License-Identifier: Apache-2.0
"""YAML as a person would write it: no anchors, and texts of several lines as such."""

from typing import Any

import yaml


def documents(*values: Any) -> str:
    """The values as documents of one file."""
    return yaml.dump_all(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Whether an object that occurs again is written again: always."""
        return True


def _scalar(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _scalar)
