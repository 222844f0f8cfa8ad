# SPDX-License-Identifier: Apache-2.0
"""What the log says of rows that are refused (ps/robust/rejections.py)."""

import logging

import pytest

from tf_hips.ps.robust.rejections import Rejections


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    caplog.clear()
    return found


def test_a_row_of_refusals_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    rejections = Rejections(("a", "b"))
    rejections.note(0, {1: "NaN"})
    assert told(caplog) == ["Round 0 goes on without the update of site b: NaN"]
    rejections.note(1, {1: "NaN"})
    rejections.note(2, {0: "NaN", 1: "NaN"})
    assert told(caplog) == ["Round 2 goes on without the update of site a: NaN"]
    # Rounds in which nobody is refused are not noted: a row that they end is over.
    rejections.note(9, {1: "NaN"})
    assert told(caplog) == ["Round 9 goes on without the update of site b: NaN"]
    assert rejections.counts == [1, 4]


def test_a_row_of_absurd_norms_is_one_line_and_nothing_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rejections = Rejections(("a", "b"))
    events: list[tuple[str, object]] = []
    rejections.tell = lambda event, **fields: events.append((event, fields["child_site"]))
    for number in (0, 1, 5):
        rejections.note_absurd(number, {1: "norm 1e9"})
    with rejections.quiet():
        rejections.note_absurd(9, {0: "norm 1e9"})
    assert [line.split(":")[0] for line in told(caplog)] == [
        f"In round {number} the update of site b has an absurd norm, which the rule bears in each "
        "coordinate"
        for number in (0, 5)
    ]
    assert events == [("norm_absurd", "b")] * 3
    assert rejections.counts == [0, 0]


def test_two_that_are_noted_one_by_one_do_not_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    rejections = Rejections(("a", "b"))
    for number in range(4):
        for child in range(2):
            rejections.note(number, {child: "its own"})
    assert len(told(caplog)) == 2
    rejections.note(1, {0: "NaN"}, {0: 7})
    assert told(caplog) == ["Step 1 goes on without the update of site a: NaN"]
