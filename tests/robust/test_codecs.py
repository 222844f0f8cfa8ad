# SPDX-License-Identifier: Apache-2.0
"""Which codecs go with which rules: the same in a server and over the ranks of a job."""

import numpy as np
import pytest

from tf_hips import robust
from tf_hips.ops import compressor as compressors
from tf_hips.ps import rules
from tf_hips.robust import codecs

N = 11
RULES = (
    *("mean", "median", "trimmed_mean(f=1)", "meamed(f=1)", "majority", "krum(f=1)"),
    *("multi_krum(f=1)", "bulyan(f=1)", "mda(f=1)", "cge(f=1)", "geometric_median"),
    *("centred_clipping", "clip >> mean", "nnm(f=1) >> geometric_median"),
)


@pytest.mark.parametrize("compression", ["onebit", "error_feedback(topk)", "dgc", "randomk"])
@pytest.mark.parametrize("text", RULES)
def test_a_server_and_ranks_refuse_the_same(text: str, compression: str) -> None:
    told = rules.why_not(text, N, compression)
    why = codecs.why_not(robust.parse(text), compressors.parse(compression))
    assert (why is None) == (told is None), (why, told)
    assert why is None or "packets of all elements" in why
    assert why is None or compression != "onebit"


@pytest.mark.parametrize("text", ["krum(f=1)", "cge(f=1)", "multi_krum(f=1, m=1)"])
def test_why_rules_that_choose_rows_must_refuse_them(text: str) -> None:
    # Ten honest rows of as many elements each, no two at the same places, and a liar's zeros.
    rows = np.zeros((N, 100), np.float32)
    for row in range(N - 1):
        rows[row, 10 * row : 10 * row + 10] = 1
    found = robust.parse(text).run(rows)
    assert N - 1 in (found.selected or ())
    assert robust.parse("geometric_median").run(rows).vector.any()
