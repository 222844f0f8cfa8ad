# SPDX-License-Identifier: Apache-2.0
"""With which exit code a script ends, for what is called at its exit.

A script that fails by an exception leaves it in `sys.last_value`. Of a `SystemExit` Python keeps
nothing: functions of `atexit` cannot tell `sys.exit(1)` from a good end. So `sys.exit` raises one
here that notes when the interpreter itself reads its code, which it does to end the process.

A script that catches the exception goes on, and nothing is noted. `raise SystemExit(1)` without
`sys.exit` is not seen, and `os._exit` calls nothing at exit.
"""

import sys
import threading
from typing import Any, NoReturn

_noted: object = None


class _Exit(SystemExit):
    """The `SystemExit` of `sys.exit`."""

    @property
    def code(self) -> Any:  # type: ignore[override]
        """What `sys.exit` was called with."""
        found = super().code
        try:
            sys._getframe(1)
        except ValueError:  # no Python code has asked: the process ends
            global _noted
            _noted = found
        return found


# Messages name the class of an exception, and its own name says nothing to who reads them.
_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__


def watch() -> None:
    """From now on `reason` knows of `sys.exit`; once is enough."""
    sys.exit = _exit


def reason(error: BaseException | None) -> str | None:
    """Why the process ends; None: in peace, as far as is known.

    Args:
        error: the exception that ends it, if one is known.
    """
    if error is not None:
        return f"{type(error).__name__}: {error}"
    if _noted is None or (isinstance(_noted, int) and _noted == 0):
        return None
    return f"SystemExit: {_noted}"


def _exit(status: object = None, /) -> NoReturn:
    """Exits the interpreter by raising `SystemExit(status)`."""
    if threading.current_thread() is not threading.main_thread():
        # It ends this thread alone, of which `threading` says nothing if it is this very class.
        raise SystemExit(status)
    raise _Exit(status)
