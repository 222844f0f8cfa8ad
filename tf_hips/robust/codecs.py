# SPDX-License-Identifier: Apache-2.0
"""Which compressors go with which rules: rows that rules look at must say something everywhere."""

from tf_hips.ops.compressor import Compressor
from tf_hips.robust.aggregator import Aggregator

SPARSE = frozenset({"bisparse", "dgc", "graddrop", "randomk", "topk"})
"""Codecs that send few elements, each sender others."""
_OF_COORDINATES = frozenset({"median", "trimmed_mean", "meamed", "majority", "bulyan"})


def why_not(rule: Aggregator, compressor: Compressor) -> str | None:
    """Why a rule cannot be applied to rows that were encoded so; None: it can.

    Where each row holds other elements, most values of a coordinate are 0, and so is their median.
    Rules that end in a mean of rows may have them. What makes no packets has no rows.

    Args:
        rule: any.
        compressor: what each row was encoded with.
    """
    if not compressor.makes_packets:
        return (
            f"Rule {rule} needs packets, one of each rank: sums of low rank are made by all "
            f"together. Received: {compressor.text}"
        )
    if rule.rule.name in _OF_COORDINATES and compressor.codec.name in SPARSE:
        return (
            f"Rule {rule} needs packets of all elements: where each rank sends others, most "
            f"values are 0. Received: {compressor.text}"
        )
    return None
