# SPDX-License-Identifier: Apache-2.0
"""What the log says of ranks whose rows are refused (strategies/refusals.py)."""

import logging

import pytest

from tf_hips import robust
from tf_hips.comm.robust_rows import Refused
from tf_hips.strategies.refusals import Refusals


def test_the_log_has_a_line_when_refusals_begin_again(caplog: pytest.LogCaptureFixture) -> None:
    events: list[int] = []
    refusals = Refusals([], robust.median(f=1), 0, lambda _, **told: events.append(told["step"]))
    refused = [Refused(1, "NaN")]
    for step in (3, 4, 5, 9, 10):
        refusals(step, refused, None)
    lines = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert [line.split(" on ")[0] for line in lines] == ["From step 3", "From step 9"]
    assert events == [3, 4, 5, 9, 10]


def test_who_was_chosen_is_an_event_of_rank_0() -> None:
    events: list[tuple[str, dict]] = []
    for rank in (0, 1):
        told = Refusals(
            [], robust.krum(f=0), rank, lambda name, **more: events.append((name, more))
        )
        told.chosen(7, (1,), (0, 1, 2))
    among = ["rank 0", "rank 1", "rank 2"]
    assert events == [("rows_chosen", {"step": 7, "sites": ["rank 1"], "among": among})]
