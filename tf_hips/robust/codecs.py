# SPDX-License-Identifier: Apache-2.0
"""Which compressors go with which rules: rows that rules look at must say something everywhere."""

from tf_hips.ops.compressor import Compressor
from tf_hips.robust.aggregator import Aggregator

SPARSE = frozenset({"bisparse", "dgc", "graddrop", "randomk", "topk"})
"""Codecs that send few elements, each sender others."""
# All rows are in their results, each with a bounded part, so one of zeros has no more than others.
_BEAR_SPARSE = frozenset({"geometric_median", "centred_clipping", "mean"})


def bears_sparse(rule: Aggregator) -> bool:
    """Whether a rule can be applied to rows each of which holds other elements than the others.

    Most values of a coordinate are 0 then, and so is their median; and a row of zeros, which
    anybody can send, is nearer to each row than these are to each other, and shorter.

    Args:
        rule: any.
    """
    mixes = any(step.name == "nnm" for step in rule.steps)
    return rule.rule.name in _BEAR_SPARSE and not mixes


def why_not(rule: Aggregator, compressor: Compressor) -> str | None:
    """Why a rule cannot be applied to rows that were encoded so; None: it can.

    What makes no packets has no rows.

    Args:
        rule: any.
        compressor: what each row was encoded with.
    """
    if not compressor.makes_packets:
        return (
            f"Rule {rule} needs packets, one of each rank: sums of low rank are made by all "
            f"together. Received: {compressor.text}"
        )
    if compressor.codec.name in SPARSE and not bears_sparse(rule):
        return (
            f"Rule {rule} needs packets of all elements: where each rank sends others, most "
            f"values are 0. Received: {compressor.text}"
        )
    return None
