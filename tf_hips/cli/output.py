# SPDX-License-Identifier: Apache-2.0
r"""The output of many processes on one terminal: whole lines, each with the role it came from.

A progress bar rewrites its line (`\r`, backspaces) or, where Keras sees no terminal, prints a line
per update. Of either only the last state is a line worth keeping. On a terminal, one role's bar is
shown live in the bottom line.

Ranks that refuse something do so together. An error that another role has printed is not shown
again: `finish` says whose it is, too.

TensorFlow greets whoever loads it with notices about its own build, in every worker, whatever
`TF_CPP_MIN_LOG_LEVEL` says: they are logged before it is read. They are left out here.
"""

import contextlib
import os
import re
import select
import shutil
from collections.abc import Callable
from typing import IO, Any

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Keras: "  7/24 <bar> 1s 20ms/step - loss: ...". The bar's glyph is U+2501.
_KERAS_BAR = re.compile(r"^\s*(\d+)/(\d+|Unknown)\s.*\u2501")
# Known notices only; any other line of that kind may matter.
_NOTICE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    r"|(?:[0-9-]+ [0-9:.]+: )?I[0-9. :]*\s+(?:\d+ )?\S*(?:port\.cc:\d+\] oneDNN custom operations"
    r"|cpu_feature_guard\.cc:\d+\] This TensorFlow binary is optimized)"
    r"|To enable the following instructions: .* rebuild TensorFlow"
)
# How a worker prints an uncaught error of ours (`errors.print_in_one_line`): all of it is one line,
# but for a diagnostic of CompLL, which is a drawing.
_REASON = re.compile(r"tf_hips\.errors\.(?!SpecificationError)\w+: ")
_MOST_ROLES = 8  # that are listed
_MAX_LINE_BYTES = 1 << 16


class Splitter:
    """Cuts a pipe's bytes into lines; `state` is the last state of an unfinished line."""

    def __init__(self) -> None:
        """Starts with nothing read."""
        self._rest = b""
        self.state = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes, without their ends."""
        state = self.state
        *lines, self._rest = (self._rest + data).split(b"\n")
        if (
            len(self._rest) > _MAX_LINE_BYTES
        ):  # bounds the memory that a child without newlines can take
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self.state = ""
        if b"\r" in self._rest:
            shown = _last_state(self._rest)
            self.state = shown or self.state
            self._rest = self._rest[self._rest.rindex(b"\r") :]
        texts = [_last_state(line) for line in lines]
        if texts and not texts[0]:  # the state was seen before the line's end came
            texts[0] = state
        return texts

    def finish(self) -> list[str]:
        """What was left without a line's end."""
        text = _last_state(self._rest) or self.state
        self._rest, self.state = b"", ""
        return [text] if text else []


class Printer:
    """Writes prefixed lines to two byte streams; colours and the live line only on a terminal."""

    def __init__(
        self,
        out: IO[bytes],
        err: IO[bytes],
        progress_role: str | None,
        takes: Callable[[IO[bytes]], bool] = lambda stream: True,
    ) -> None:
        """Writes nothing yet.

        Args:
            out: where lines of standard output go.
            err: where those of standard error go.
            progress_role: the role whose bar is shown live.
            takes: waits until a stream takes bytes, and says whether it does; else what is written
                is lost.
        """
        self._out = out
        self._err = err
        self._takes = takes
        self._progress_role = progress_role
        # A dumb terminal, as that of an editor, prints what others obey.
        self._is_dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
        self._is_terminal = out.isatty() and not self._is_dumb
        self._colours: dict[str, int] | None = (
            None if self._is_dumb or os.environ.get("NO_COLOR") else {}
        )
        self._live = ""
        # Zero is the level of those who want to see everything.
        self._hides_notices = os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0"
        self.is_broken = False
        self._lost: dict[IO[bytes], int] = {}  # lines of each stream that cannot be written
        self._reasons: dict[str, list[str]] = {}  # errors, and the roles that have printed them

    def line(self, role: str, text: str, *, is_error: bool) -> None:
        """Writes one line; a bar's update is shown live or not at all, a notice is left out.

        So is an error that another role has printed, until `finish`.
        """
        plain = _ESCAPE.sub("", text).replace("\b", "")
        if is_error and self._hides_notices and _NOTICE.match(plain):
            return
        if is_error and _REASON.match(plain):
            roles = self._reasons.setdefault(plain, [role])
            if role != roles[0]:  # who was started again and fails again says so again
                if role not in roles:
                    roles.append(role)
                return
        bar = _KERAS_BAR.match(plain)
        if bar and bar[1] != bar[2]:
            self.state(role, plain)
            return
        stream = self._err if is_error else self._out
        shown = text if stream.isatty() and not self._is_dumb else plain
        self._show_live("")
        self._write(stream, f"{self._prefix(role, stream)} {shown}".rstrip() + "\n")

    def state(self, role: str, text: str) -> None:
        """Shows the state of an unfinished line in place, on a terminal and for one role."""
        if self._is_terminal and role == self._progress_role and text:
            width = shutil.get_terminal_size().columns
            self._show_live(f"[{role}] {_ESCAPE.sub('', text)}"[: width - 1])

    def finish(self) -> None:
        """Clears the live line, and says who failed like others, and what could not be written."""
        self._show_live("")
        for first, *others in self._reasons.values():
            if others:
                named = ", ".join(others[:_MOST_ROLES])
                more = f" and {len(others) - _MOST_ROLES} more" if others[_MOST_ROLES:] else ""
                same = f"tf-hips: {named}{more} failed with the same error as {first}\n"
                self._write(self._err, same)
        self._reasons.clear()
        for stream in list(self._lost):
            self._write(stream, "")

    def _show_live(self, text: str) -> None:
        if text != self._live:
            self._write(self._out, f"\r\x1b[K{text}")
            self._live = text

    def _prefix(self, role: str, stream: IO[bytes]) -> str:
        if self._colours is None or not stream.isatty():
            return f"[{role}]"
        colour = self._colours.setdefault(role, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m[{role}]\x1b[0m"

    def _write(self, stream: IO[bytes], text: str) -> None:
        if self.is_broken:
            return
        try:
            if stream in self._lost:
                lost = f"\ntf-hips: {self._lost[stream]} lines could not be written here\n"
                self._put(stream, lost.encode())
                del self._lost[stream]
            self._put(stream, text.encode("utf-8", errors="replace"))
        except BrokenPipeError:  # nobody reads us any more; the job ends, see Job
            self.is_broken = True
            # What the stream still holds goes nowhere; Python would fail to flush it at its exit,
            # and end with a code of its own (120).
            with contextlib.suppress(OSError):  # a stream without a descriptor
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
        except OSError:  # a disk that is full ends no training
            self._lost[stream] = self._lost.get(stream, 0) + text.count("\n")

    def _put(self, stream: IO[bytes], data: bytes) -> None:
        """Writes at once; a buffer would keep what fails, and fail again when the process ends."""
        stream.flush()
        raw = getattr(stream, "raw", stream)  # itself where Python does not buffer (`-u`)
        while data:
            # A pipe that takes bytes at all takes so many without waiting for its reader.
            number = raw.write(data[: select.PIPE_BUF]) if self._takes(raw) else None
            if number is None:
                raise BlockingIOError("a stream that takes no more for now")
            data = data[number:]


def takes_soon(stream: IO[Any], seconds: float) -> bool:
    """Whether a stream takes bytes within some seconds: somebody reads it, or need not."""
    try:
        descriptor = stream.fileno()
    except OSError:
        return True  # it is in memory
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


def _last_state(line: bytes) -> str:
    r"""The last non-empty state of a line that was rewritten with `\r`."""
    states = [part for part in line.split(b"\r") if part.strip(b" \b")]
    return states[-1].decode("utf-8", errors="replace") if states else ""
