# SPDX-License-Identifier: Apache-2.0
"""What is other than it was when something was saved, in words."""

from collections.abc import Mapping
from typing import Any

_NOT_KNOWN = "not known"


def changes(current: Mapping[str, Any], was: Mapping[str, Any], when: str = "") -> list[str]:
    """Such as "`local_steps` is 4 and was 8", for each name of two sets of facts that differs.

    Args:
        current: what is, by name.
        was: what was.
        when: the end of each sentence, such as " when the state was saved".
    """
    return [
        f"{name} is {current.get(name, _NOT_KNOWN)} and was {was.get(name, _NOT_KNOWN)}{when}"
        for name in sorted({*current, *was})
        if current.get(name) != was.get(name)
    ]
