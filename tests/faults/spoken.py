# SPDX-License-Identifier: Apache-2.0
"""A process of a job: it says lines of JSON, hears lines, and is killed by its number.

All waiting is for something that a process says or does; what does not come within `DEADLINE_S`
ends the job with what the process has said.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.forked import Program

DEADLINE_S = 90.0
ROOT = Path(__file__).resolve().parents[2]


class Failed(AssertionError):
    """A job did not end as it must."""


class Spoken:
    """A process that says lines of JSON, and hears lines."""

    def __init__(self, module: str, order: dict[str, Any], log: Path) -> None:
        self._log = log
        with log.open("ab") as errors:
            self.process = Program(
                [sys.executable, "-m", module, json.dumps(order)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._said: list[dict[str, Any]] = []
        self._heard = threading.Condition()
        self._has_ended = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def tell(self, line: str) -> None:
        """Says one line to it; one that has ended is found out by `wait_for`."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def wait_for(
        self, key: str, value: object = None, *, patience_s: float = DEADLINE_S
    ) -> dict[str, Any]:
        """Waits until it says `key`, with `value` unless that is None."""

        def found() -> dict[str, Any] | None:
            for one in self._said:
                if key in one and value in (None, one[key]):
                    return one
            return None

        with self._heard:
            self._heard.wait_for(lambda: found() or self._has_ended, patience_s)
            line = found()
        if line is None:
            raise Failed(f"{self._log.stem} did not say `{key}` {value}\n{self.story()}")
        return line

    def has_said(self, key: str) -> bool:
        """Whether it has said `key`."""
        with self._heard:
            return any(key in one for one in self._said)

    def forget(self, key: str) -> None:
        """Forgets what it has said about `key`."""
        with self._heard:
            self._said = [one for one in self._said if key not in one]

    def ends(self) -> int:
        """Waits until it ends; its exit code."""
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self._log.stem} does not end\n{self.story()}") from None
        self._thread.join(DEADLINE_S)
        return code

    def kill(self) -> None:
        """Kills it, by its number."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.ends()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.process.stdin.close()
        self.process.stdout.close()

    def story(self) -> str:
        """The last lines of what it said."""
        text = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
        return f"--- {self._log.stem}, said {self._said[-3:]}\n{text}"

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._heard:
                self._said.append(json.loads(line))
                self._heard.notify_all()
        with self._heard:
            self._has_ended = True
            self._heard.notify_all()
