# SPDX-License-Identifier: Apache-2.0
"""Output on a terminal: colours, one live line; and what a pipe's bytes become."""

import errno
import io

import pytest

from tf_hips.cli.output import Printer, Splitter


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def shown(terminal: io.BytesIO) -> str:
    return terminal.getvalue().decode()


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_prefixes_have_a_colour_per_role_on_a_terminal() -> None:
    out = Terminal()
    printer = Printer(out, io.BytesIO(), None)
    for role in ("a", "b", "a"):
        printer.line(role, "x", is_error=False)
    lines = shown(out).splitlines()
    assert lines[0] == lines[2] == "\x1b[36m[a]\x1b[0m x"
    assert lines[1] == "\x1b[33m[b]\x1b[0m x"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    Printer(out, io.BytesIO(), None).line("a", "x", is_error=False)
    assert shown(out) == "[a] x\n"


def test_an_empty_no_color_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    out = Terminal()
    Printer(out, io.BytesIO(), None).line("a", "x", is_error=False)
    assert shown(out) == "\x1b[36m[a]\x1b[0m x\n"


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    printer = Printer(out, io.BytesIO(), "a")
    printer.state("a", "5 %")
    printer.line("a", "\x1b[1mbold\x1b[0m", is_error=False)
    printer.finish()
    assert shown(out) == "[a] bold\n"


def test_escapes_are_taken_out_where_there_is_no_terminal() -> None:
    out = io.BytesIO()
    Printer(out, io.BytesIO(), None).line("a", "\x1b[1mbold\x1b[0m", is_error=False)
    assert shown(out) == "[a] bold\n"


def test_one_role_has_a_live_line_that_makes_way_for_lines() -> None:
    out = Terminal()
    printer = Printer(out, io.BytesIO(), "a")
    printer.state("b", "50 %")
    assert shown(out) == ""
    printer.state("a", "5 %")
    printer.state("a", "x" * 100)
    printer.line("b", "done", is_error=False)
    assert shown(out) == (
        "\r\x1b[K[a] 5 %" + "\r\x1b[K[a] " + "x" * 35 + "\r\x1b[K" + "\x1b[36m[b]\x1b[0m done\n"
    )


def test_an_update_of_a_keras_bar_is_the_live_line() -> None:
    out = Terminal()
    printer = Printer(out, io.BytesIO(), "a")
    printer.line("a", "\x1b[1m2/9\x1b[0m \u2501\u2501 1s", is_error=False)
    assert shown(out) == "\r\x1b[K[a] 2/9 \u2501\u2501 1s"


def test_an_error_of_many_ranks_is_written_once_with_their_names() -> None:
    error = io.BytesIO()
    printer = Printer(io.BytesIO(), error, None)
    reason = "tf_hips.errors.ProtocolError: All workers must train with the same optimizer"
    drawing = "tf_hips.errors.SpecificationError: a.pse:1:2: error: unknown name `x`"
    trace = "Traceback (most recent call last):"
    for number in range(12):
        printer.line(f"a/worker{number}", reason, is_error=True)
    for role in ("b", "c"):
        printer.line(role, drawing, is_error=True)
        printer.line(role, trace, is_error=True)
    printer.line("d", f"{reason}s", is_error=True)
    for _ in range(2):  # a job is stopped once more when its context ends
        printer.finish()
    others = ", ".join(f"a/worker{number}" for number in range(1, 9))
    assert shown(error).splitlines() == [
        f"[a/worker0] {reason}",
        *(
            f"[{role}] {t}"
            for role in "bc"
            for t in (drawing, "Traceback (most recent call last):")
        ),
        f"[d] {reason}s",
        f"tf-hips: {others} and 3 more failed with the same error as a/worker0",
    ]
    # Where it is started again it says so again; also where the others are not.
    for roles in ("abab", "aba"):
        for role in roles:
            printer.line(role, reason, is_error=True)
        printer.finish()
        assert shown(error).splitlines()[-3:] == [
            f"[a] {reason}",
            f"[a] {reason}",
            "tf-hips: b failed with the same error as a",
        ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_do_not_depend_on_how_the_bytes_arrive(size: int) -> None:
    data = "one\n\ntwo \u00e4\r\n 1%\r 2%\rthree\nfour".encode()
    splitter = Splitter()
    lines = []
    for begin in range(0, len(data), size):
        lines += splitter.feed(data[begin : begin + size])
    assert [*lines, *splitter.finish()] == ["one", "", "two \u00e4", "three", "four"]


def test_a_line_without_end_is_bounded() -> None:
    splitter = Splitter()
    lines = [line for _ in range(10) for line in splitter.feed(b"x" * 60_000)]
    assert sum(map(len, lines)) + sum(map(len, splitter.finish())) == 600_000
    assert max(map(len, lines)) < 200_000


def test_a_reader_that_has_gone_is_noted() -> None:
    class Closed(io.BytesIO):
        def write(self, data: object) -> int:
            raise BrokenPipeError

    printer = Printer(Closed(), io.BytesIO(), None)
    printer.line("a", "x", is_error=False)
    assert printer.is_broken


def test_a_full_disk_loses_lines_and_says_how_many() -> None:
    class Disk(io.RawIOBase):
        """Has room for some bytes more."""

        def __init__(self) -> None:
            self.room, self.text = 100, b""

        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = bytes(data[: self.room])
            self.room -= len(taken)
            self.text += taken
            return len(taken)

    disk = Disk()
    out = io.BufferedWriter(disk)
    printer = Printer(out, io.BytesIO(), None)
    printer.line("a", "one", is_error=False)
    disk.room = 5
    for text in ("two", "three"):
        printer.line("a", text, is_error=False)
    printer.finish()
    assert not printer.is_broken
    out.flush()  # nothing is left that would fail when the process ends
    disk.room = 100
    printer.line("a", "four", is_error=False)
    printer.finish()
    told = "tf-hips: 2 lines could not be written here"
    assert disk.text.decode().splitlines() == ["[a] one", "[a] t", told, "[a] four"]


NOTICES = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795252278.001998    2297 port.cc:153] oneDNN custom operations are on. You may",
    "2026-11-21 09:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are",
    "I0000 00:00:1795252278.1    97 cpu_feature_guard.cc:227] This TensorFlow binary is optimized",
    "2026-11-21 09:00:00.1: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow "
    "binary is optimized to use available CPU instructions in performance-critical operations.",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with",
]
OTHERS = [
    "W0000 00:00:1795252278.001998    2297 port.cc:153] something else",
    "WARNING: All log messages are lost",
    "Traceback (most recent call last):",
]


def test_notices_of_tensorflow_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    out, error = io.BytesIO(), io.BytesIO()
    printer = Printer(out, error, None)
    for text in (*NOTICES, *OTHERS):
        printer.line("a", text, is_error=True)
    assert shown(error).splitlines() == [f"[a] {text}" for text in OTHERS]
    printer.line("a", NOTICES[0], is_error=False)
    assert shown(out) == f"[a] {NOTICES[0]}\n"

    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    everything = io.BytesIO()
    printer = Printer(io.BytesIO(), everything, None)
    for text in NOTICES:
        printer.line("a", text, is_error=True)
    assert len(shown(everything).splitlines()) == len(NOTICES)
