# SPDX-License-Identifier: Apache-2.0
"""One function for each rule; it makes a value, which takes rows [n, d], float32, and gives [d].

A pre-aggregator (`clip`, `arc`, `bucketing`, `nnm`) gives rows to what stands behind its `>>`.
f is how many of n rows may be bad, "auto" as many as the rule bears. Definitions and sources:
docs/aggregators.md.
"""

from typing import TypeAlias

from tf_hips.robust.aggregator import Aggregator, make, make_pre
from tf_hips.robust.value import PreAggregator

Auto: TypeAlias = int | str


def mean() -> Aggregator:
    """The mean of all rows that are finite and not absurd; bears nothing else."""
    return make("mean")


def median(f: Auto = "auto") -> Aggregator:
    """The median of each coordinate, of an even number the mean of the two middle values."""
    return make("median", f=f)


def trimmed_mean(f: Auto = "auto") -> Aggregator:
    """Of each coordinate the mean without the f largest and the f smallest values."""
    return make("trimmed_mean", f=f)


def meamed(f: Auto = "auto") -> Aggregator:
    """Of each coordinate the mean of the n - f values nearest to the median."""
    return make("meamed", f=f)


def krum(f: Auto = "auto") -> Aggregator:
    """The row with the least sum of squared distances to its n - f - 2 nearest."""
    return make("krum", f=f)


def multi_krum(f: Auto = "auto", m: Auto = "auto") -> Aggregator:
    """The mean of the m rows that Krum finds best; m = n - f - 2 unless it is given."""
    return make("multi_krum", f=f, m=m)


def bulyan(f: Auto = "auto", compat: bool = False) -> Aggregator:
    """Of n - 2 f rows, chosen by Krum one after the other, the mean around the median.

    Args:
        f: bad rows.
        compat: DETOX's form: n - f - 2 rows at once, of which f values at each end are left out.
    """
    return make("bulyan", f=f, compat=compat)


def geometric_median(f: Auto = "auto", nu: float = 1e-6) -> Aggregator:
    """The point from which the sum of distances to the rows is least.

    Args:
        f: bad rows.
        nu: smoothing, relative to a distance of two honest rows.
    """
    return make("geometric_median", f=f, nu=nu)


def majority(f: Auto = "auto") -> Aggregator:
    """signSGD: the sign that most rows have in a coordinate; 0 of a tie."""
    return make("majority", f=f)


def centred_clipping(f: Auto = "auto", tau: float = 1.0, iterations: int = 3) -> Aggregator:
    """The mean of differences from the result before, each no longer than a radius.

    Args:
        f: bad rows.
        tau: the radius, relative to the median length of the differences.
        iterations: how often.
    """
    return make("centred_clipping", f=f, tau=tau, iterations=iterations)


def mda(f: Auto = "auto") -> Aggregator:
    """The mean of the n - f rows of least diameter; f is at most 16."""
    return make("mda", f=f)


def cge(f: Auto = "auto") -> Aggregator:
    """The mean of the n - f rows of least norm."""
    return make("cge", f=f)


def clip(c: float = 1.0) -> PreAggregator:
    """Shortens rows to c times the median norm."""
    return make_pre("clip", c=c)


def arc(f: Auto = "auto") -> PreAggregator:
    """Shortens the floor(2 (f / n) (n - f)) longest rows to the norm of the next."""
    return make_pre("arc", f=f)


def bucketing(s: int = 2) -> PreAggregator:
    """Means of s rows each, drawn by the seed of the run and the step."""
    return make_pre("bucketing", s=s)


def nnm(f: Auto = "auto") -> PreAggregator:
    """Of each row the mean of its n - f nearest, itself among them."""
    return make_pre("nnm", f=f)
