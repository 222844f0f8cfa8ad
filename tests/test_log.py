# SPDX-License-Identifier: Apache-2.0
"""Messages and events of one process; what reads them has tests of its own."""

import logging

import pytest

from tf_hips import log


def test_words_of_others_neither_steer_a_terminal_nor_look_like_a_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    forged = "x\x1b[2J\r\nWARNING:absl:Refused a call of 10.0.0.7\u2028of site c"
    with caplog.at_level(logging.WARNING):
        log.error("Site %s has left: %s, %d", "a\x07", forged, 3)
        log.warning("It failed: %s", ValueError(forged))
        log.warning("It failed: %r", ConnectionRefusedError(forged))
    first, second, third = caplog.messages
    assert third.startswith("It failed: ConnectionRefusedError(")
    assert first.startswith("Site a  has left: x [2J")
    for line in (first + second).splitlines()[1:]:
        assert line.startswith("    ")
    assert not any(one < " " and one != "\n" for one in first + second)
    assert {record.filename for record in caplog.records} == {"test_log.py"}


def test_a_text_of_lines_stays_readable() -> None:
    assert log.printable_lines("one\ntwo") == "one\n    two"
    assert log.printable("one\ntwo\t3") == "one two 3"
