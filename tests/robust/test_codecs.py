# SPDX-License-Identifier: Apache-2.0
"""Rows of few elements: a server and the ranks of a job refuse them with the same rules."""

from pathlib import Path

import numpy as np
import pytest

import tf_hips
from tf_hips import robust
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.robust import codecs

SPARSE = ("topk", "error_feedback(randomk)", "dgc", "warmup(dgc, steps=8)")
THRESHOLDS = ("tbq", "hips2bit(threshold=0.01)", "warmup(error_feedback(tbq), steps=8)")
ZEROS = (
    "qsgd(bits=2)",
    "mixed(qsgd(bits=2, bucket=16), below=1000)",
    "warmup(qsgd(bits=2), steps=8)",
)
BEARING = ". Rules that bear it, without nnm: geometric_median, centred_clipping, clip >> mean. "


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
    for compression in (*SPARSE, *THRESHOLDS, *ZEROS):
        one = compressors.parse(compression)
        assert (codecs.why_not(rule, one) is None) == bears
        assert (rules.why_not(text, 7, one.text) is None) == bears
    for compression in ("onebit", "fp32", "error_feedback(qsgd(bits=3))", "mixed(int8, below=8)"):
        assert codecs.why_not(rule, compressors.parse(compression)) is None
        assert rules.why_not(text, 7, compression) is None


def test_who_sends_and_what_came_is_said() -> None:
    assert codecs.why_not(robust.median(), compressors.parse("topk")) == (
        "Rule median(f=auto) needs packets of all elements: where each rank may send others, most "
        f"values are 0{BEARING}Received: {compressors.parse('topk').text}"
    )
    text = "mixed(error_feedback(hips2bit), below=1000)"
    assert codecs.why_not(robust.krum(f=1), compressors.parse(text)) == (
        "Rule krum(f=1) needs packets of all elements: what is below a threshold is sent as 0, and "
        f"that may be most of a row{BEARING}Received: {compressors.parse(text).text}"
    )
    told = rules.why_not("median", 3, "topk")
    assert told is not None and "each child may send others" in told


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_what_hides_liars_is_told(bits: int) -> None:
    why = codecs.why_noisy(robust.krum(f=1), f"warmup(terngrad(bitwidth={bits}), steps=2)")
    assert (why is None) == (bits >= 4)
    if why is not None:
        assert f"packets of terngrad(bitwidth={bits}): steps of a tensor's range over" in why
    assert codecs.why_noisy(robust.krum(f=1), "error_feedback(onebit)") is None


LARGE = """
void LargeEncode(float* gradient, uint8* compressed) {
    compressed = concat(map(gradient, [&](float g) -> float { return abs(g) < 1 ? 0.0 : g; }));
}
void LargeDecode(uint8* compressed, float* gradient) {
    float* values;
    extract(compressed, values);
    gradient = map(values, [&](float value) -> float { return value; });
}
"""


@pytest.mark.heavy  # compiles
def test_a_codec_of_ones_own_is_tried(tmp_path: Path) -> None:
    file = tmp_path / "large.pse"
    file.write_text(LARGE, encoding="utf-8")
    mine = tf_hips.load(file)()
    why = codecs.why_not(robust.median(), mine)
    assert why is not None
    assert "68% of a row of normal noise are sent as 0" in why


@pytest.mark.parametrize("text", ["krum(f=1)", "cge(f=1)", "multi_krum(f=1, m=1)"])
def test_why_rules_that_choose_rows_must_refuse_them(text: str) -> None:
    # Ten honest rows of as many elements each, no two at the same places, and a liar's zeros.
    rows = np.zeros((11, 100), np.float32)
    for row in range(10):
        rows[row, 10 * row : 10 * row + 10] = 1
    found = robust.parse(text).run(rows)
    assert 10 in (found.selected or ())
    assert robust.parse("geometric_median").run(rows).vector.any()


@pytest.mark.parametrize("compression", ["tbq", "hips2bit"])
def test_why_thresholds_are_refused(compression: str) -> None:
    # What a step of a small model looks like: residuals reach the threshold now and then.
    compressor = compressors.parse(f"error_feedback({compression})")
    gradient = np.full(1000, 0.02, np.float32)
    rows = np.zeros((5, 1000), np.float32)
    for worker, row in enumerate(rows[:4]):  # the last one is a liar's
        kept = np.random.default_rng(worker).uniform(0, 0.5, 1000).astype(np.float32)
        packet = native.encode(compressor, gradient, native.Key(worker, 0, 0), kept=kept)
        row[:] = native.decode(compressor, packet, 1000)
        assert row.any()
    assert np.count_nonzero(robust.median()(rows)) < 10
    assert robust.krum(f=1).run(rows).selected == (4,)
    assert robust.geometric_median(f=1)(rows).mean() > 0
