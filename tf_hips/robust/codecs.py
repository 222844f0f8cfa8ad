# SPDX-License-Identifier: Apache-2.0
"""Which compressors go with which rules: rows that rules look at must say something everywhere.

Refused is what sends mostly zeros, or may: codecs that send few elements, those with a threshold,
below which an element is sent as 0, and those that make mostly zeros of noise, which is tried: so a
codec that was loaded is judged, too.
"""

import functools

import numpy as np

from tf_hips.ops import native
from tf_hips.ops.compressor import Compressor, parse
from tf_hips.robust.aggregator import Aggregator

# All rows are in their results, each with a bounded part, so one of zeros has no more than others.
_BEAR_SPARSE = ("geometric_median", "centred_clipping", "mean")
# Of a row of noise; qsgd makes 75 % zeros with 2 bits, 38 with 3.
_NUM_TRIED, _MOST_ZEROS = 4096, 0.5
# Of TernGrad: what 2 and 4 bits do is in docs/attacks.md, "Two levels, and codecs".
_LEAST_BITS = 4


def why_not_sparse(
    rule: Aggregator, compression: str, *, name: str | None = None, sender: str = "child"
) -> str | None:
    """Why a rule cannot bear rows of few elements; None: it can, or they are of all.

    Where each sender sends other elements, or may (`randomk`), or only what reaches a threshold,
    most values of a coordinate are 0, and their median is; and a row of zeros is nearer to each of
    them than they are to each other.

    Args:
        rule: any.
        compression: text of what each row was encoded with.
        name: what the rule is called; None: by its text.
        sender: what one is called who sends a row.

    Raises:
        ValueError: there is no such compressor here.
    """
    mixes = any(step.name == "nnm" for step in rule.steps)
    if rule.rule.name in _BEAR_SPARSE and not mixes:
        return None
    compressor = parse(compression)
    if compressor.is_sparse:
        why = f"where each {sender} may send others, most values are 0"
        why += ", and a budget may become topk" if compressor.is_budget else ""
    elif compressor.has_threshold:
        why = "what is below a threshold is sent as 0, and that may be most of a row"
    elif (share := _share_of_zeros(compressor.codec)) > _MOST_ZEROS:
        why = f"{share:.0%} of a row of normal noise are sent as 0"
    else:
        return None
    return (
        f"Rule {name or rule} needs packets of all elements: {why}. Rules that bear it, without "
        f"nnm: geometric_median, centred_clipping, clip >> mean. Received: {compression}"
    )


def why_noisy(rule: Aggregator, compression: str) -> str | None:
    """Why liars hide in what a codec adds to honest rows, for a warning; None: not that we know.

    Args:
        rule: any.
        compression: text of what each row is encoded with.

    Raises:
        ValueError: there is no such compressor here.
    """
    codec = parse(compression).codec
    bits = dict(codec.params).get("bitwidth", _LEAST_BITS) if codec.name == "terngrad" else None
    if bits is None or bits >= _LEAST_BITS:
        return None
    return (
        f"Rule {rule} may not find liars among packets of {codec.text}: steps of a tensor's range "
        f"over {2 ** int(bits) - 1} are many times most gradients, so honest rows are far from "
        f"each other. Take bitwidth={_LEAST_BITS}, onebit, or no compression"
    )


@functools.lru_cache(64)
def _share_of_zeros(codec: Compressor) -> float:
    """Which share of a row of normal noise a codec sends as 0, at the first step."""
    row = np.random.default_rng(0).standard_normal(_NUM_TRIED).astype(np.float32)
    kept = np.zeros(codec.state_shape(row.shape), np.float32) if codec.has_state else None
    packet = native.encode(codec, row, native.Key(0, 0, 0), kept=kept)
    return 1.0 - np.count_nonzero(native.decode(codec, packet, row.size)) / row.size


def why_not(rule: Aggregator, compressor: Compressor) -> str | None:
    """Why a rule cannot be applied to rows of ranks that were encoded so; None: it can.

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
    return why_not_sparse(rule, compressor.text, sender="rank")
