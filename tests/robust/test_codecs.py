# SPDX-License-Identifier: Apache-2.0
"""Rows of few elements: a server and the ranks of a job refuse them with the same rules."""

import numpy as np
import pytest

from tf_hips import robust
from tf_hips.ops import compressor as compressors
from tf_hips.ps import rules
from tf_hips.robust import codecs

SPARSE = ("topk", "error_feedback(randomk)", "dgc", "warmup(dgc, steps=8)")


@pytest.mark.parametrize(
    ("text", "bears"),
    [
        ("median", False),
        ("bulyan(f=0)", False),
        ("krum(f=1)", False),
        ("mda(f=1)", False),
        ("nnm(f=1) >> geometric_median(f=1)", False),
        ("geometric_median(f=1)", True),
        ("centred_clipping(f=1)", True),
        ("clip >> mean", True),
    ],
)
def test_servers_and_ranks_bear_the_same_rows(text: str, bears: bool) -> None:
    rule = robust.parse(text)
    for compression in SPARSE:
        one = compressors.parse(compression)
        assert (codecs.why_not(rule, one) is None) == bears
        assert (rules.why_not(text, 7, one.text) is None) == bears
    for compression in ("onebit", "fp32"):
        assert codecs.why_not(rule, compressors.parse(compression)) is None
        assert rules.why_not(text, 7, compression) is None


def test_who_sends_and_what_came_is_said() -> None:
    assert codecs.why_not(robust.median(), compressors.parse("topk")) == (
        "Rule median(f=auto) needs packets of all elements: where each rank may send others, most "
        f"values are 0. Received: {compressors.parse('topk').text}"
    )
    told = rules.why_not("median", 3, "topk")
    assert told is not None and "each child may send others" in told


@pytest.mark.parametrize("text", ["krum(f=1)", "cge(f=1)", "multi_krum(f=1, m=1)"])
def test_why_rules_that_choose_rows_must_refuse_them(text: str) -> None:
    # Ten honest rows of as many elements each, no two at the same places, and a liar's zeros.
    rows = np.zeros((11, 100), np.float32)
    for row in range(10):
        rows[row, 10 * row : 10 * row + 10] = 1
    found = robust.parse(text).run(rows)
    assert 10 in (found.selected or ())
    assert robust.parse("geometric_median").run(rows).vector.any()
