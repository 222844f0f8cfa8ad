# SPDX-License-Identifier: Apache-2.0
"""What is printed of a value is the text that makes it again."""

import pytest

import tf_hips
from tf_hips import robust
from tf_hips.ps import rules
from tf_hips.robust import attacks


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (tf_hips.error_feedback(tf_hips.onebit()), "error_feedback(onebit)"),
        (tf_hips.budget(10, 30), "budget(wan_mbps=10, max_sync_s=30)"),
        (robust.krum(), "krum(f=auto)"),
        (robust.nnm(f=2) >> robust.trimmed_mean(f=2), "nnm(f=2) >> trimmed_mean(f=2)"),
        (robust.nnm(f=2), "nnm(f=2)"),
        (robust.sketched(robust.krum(f=1)), "sketched(k=512) >> krum(f=1)"),
        (attacks.reversed_gradient(), "reversed_gradient(c=100.0)"),
        (rules.parse("sgd(0.1)"), "sgd(learning_rate=0.1)"),
        (
            robust.detox.Detox(3, robust.median()),
            "detox(r=3, vote=digest, buckets=0, fixed=False) >> median(f=auto)",
        ),
    ],
)
def test_values_print_as_their_text(value: object, text: str) -> None:
    assert repr(value) == str(value) == text
    assert repr([value]) == f"[{text}]"
