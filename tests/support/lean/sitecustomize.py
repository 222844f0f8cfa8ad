# SPDX-License-Identifier: Apache-2.0
"""Keras does not find scikit-learn and pyplot: a third of what importing it takes. And garbage is
looked for more rarely: a sixth of what is left.

Keras imports them for wrappers and galleries that nothing here uses, and does without where they
are not installed. Everybody else finds them. Python imports this file when it starts, as its folder
is on the path of what tests start; `tests/conftest.py` imports it for the tests themselves.
"""

from __future__ import annotations

import gc
import sys

TYPE_CHECKING = False  # to import `typing` takes longer than all that is here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_LEFT_OUT = {"sklearn", "matplotlib", "matplotlib.pyplot"}


class _NotForKeras:
    """Comes before all other finders, and finds nothing."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """None: others may look for it.

        Raises:
            ModuleNotFoundError: Keras asks for what it can do without.
        """
        if name in _LEFT_OUT and _asking().startswith("keras."):
            raise ModuleNotFoundError(f"{name} is left out in tests", name=name)


def _asking() -> str:
    """The name of the module that imports."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("importlib."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


sys.meta_path.insert(0, _NotForKeras)
# TensorFlow makes half a million objects that stay, and its traces others by the thousand. With
# Python's own number, 700, looking at them is a sixth of the import and a twentieth of a test.
gc.set_threshold(20_000, 10, 10)
