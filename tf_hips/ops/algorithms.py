# SPDX-License-Identifier: Apache-2.0
"""The compressors by name: one function per algorithm, and the wrappers.

    tf_hips.error_feedback(tf_hips.onebit())

Arguments are checked here, before any process starts; the facts behind the checks are in
ops.registry.
"""

from tf_hips.ops.budgets import Budget
from tf_hips.ops.compressor import Compressor, resolve
from tf_hips.ops.feedback import ERROR_FEEDBACK
from tf_hips.ops.mixing import MIXED
from tf_hips.ops.registry import REGISTRY, Algorithm, Parameter
from tf_hips.ops.smoothing import MOMENTUM
from tf_hips.ops.stages import WARMUP

__all__ = [
    "REGISTRY",
    "Algorithm",
    "Parameter",
    "bf16",
    "bisparse",
    "budget",
    "dgc",
    "eden",
    "error_feedback",
    "fp8",
    "fp16",
    "fp32",
    "graddrop",
    "hips2bit",
    "int8",
    "mixed",
    "momentum",
    "natural",
    "onebit",
    "powersgd",
    "qsgd",
    "randomk",
    "tbq",
    "terngrad",
    "topk",
    "warmup",
]


def bf16() -> Compressor:
    """bfloat16, rounded to nearest even: half the bytes, errors below 2^-8 of a value.

    Biased, by very little. NaN and infinities stay.
    """
    return Compressor("bf16")


def fp16() -> Compressor:
    """IEEE binary16, rounded to nearest even: half the bytes, errors below 2^-11 of a value.

    Biased, by very little. From 65520 on values become infinity; below 2^-14 precision is lost. NaN
    and infinities stay.
    """
    return Compressor("fp16")


def bisparse(ratio: float = 0.01) -> Compressor:
    """GeoMX's Bi-Sparse: the first elements above a threshold that is estimated from a sample.

    6.5 bytes per element sent. Biased: use it inside `error_feedback`. GeoMX's momentum is left to
    the optimizer. NaN is never sent; an infinity is an element like others, and arrives as it is.

    Args:
        ratio: the largest share of a chunk's elements that is sent, in [0.001, 1].
    """
    return Compressor("bisparse", (("ratio", ratio),))


def dgc(
    ratio: float = 0.01, momentum: float = 0.9, nesterov: bool | int = False, clip_norm: float = 0.0
) -> Compressor:
    """Deep gradient compression (Lin et al., 2018): top-k with momentum before it, not behind it.

    6.5 bytes per element sent. Biased, with a residual of its own: `error_feedback` around it is
    refused. Momentum lives here, in each worker: give the optimizer none. What is not encoded has
    none then: gradients of one worker alone, and those of large embeddings, which never meet a
    codec. Sums are sent on by `Compressor.for_sums`, exact top-k of four times the ratio with error
    feedback. NaN counts as the smallest and an infinity as the largest; what is sent arrives as it
    is, and what is not finite is not kept.

    Args:
        ratio: the share of a chunk's elements that is sent, in [0.001, 1].
        momentum: the share of the velocity that each step keeps, in [0, 0.9999].
        nesterov: Nesterov's momentum (the paper's appendix B).
        clip_norm: the norm that the gradients of all variables together, summed over the workers,
            are meant to have at most; each of N encoders clips its own to clip_norm / sqrt(N)
            before the velocity (section 3.2). A strategy does that: a codec sees one chunk of one
            gradient. 0 clips nothing.

    Raises:
        TypeError: an argument is not a number of its kind.
        ValueError: one is out of its range.
    """
    number = int(nesterov) if isinstance(nesterov, bool) else nesterov
    params = (("ratio", ratio), ("momentum", momentum), ("nesterov", number))
    return Compressor("dgc", (*params, ("clip_norm", clip_norm)))


def eden(bits: int = 1, block: int = 1024) -> Compressor:
    """EDEN (Vargaftik et al., 2022), DRIVE (2021) with one bit: blocks rotated, then quantised.

    31x smaller with 1 bit. A random rotation makes elements of a block nearly normal, so the levels
    that are best for those serve any dense gradient: of the energy of a block 0.571, 0.133, 0.036
    and 0.0096 are lost with 1, 2, 3 and 4 bits. Each block keeps what it has in its own direction,
    and errors of several encoders do not add up: in the mean over seeds little is lost. Biased all
    the same: with 1 bit the error of a block with few elements that are not zero can be as large as
    they are, and beside one large element small ones are lost. An error is spread over its block.
    NaN counts as 0 and an infinity as the largest finite value of its block.

    Args:
        bits: bits per element, from 1 to 4.
        block: elements that are rotated together and share a scale, a power of two from 16 to 1024.
    """
    return Compressor("eden", (("bits", bits), ("block", block)))


def fp32() -> Compressor:
    """The identity: float32 values as they are, NaN and infinities too.

    The slow tier's codec without compression.
    """
    return Compressor("fp32")


def fp8(format: str | int = "e4m3", block: int = 128) -> Compressor:
    """8-bit floats with a scale per block (Micikevicius et al., 2022), rounded to nearest even.

    About 3.9x smaller. Biased, by the rounding. NaN stays; an infinity becomes the largest finite
    value of its block.

    Args:
        format: "e4m3" (errors up to 2^-4 of a value) or "e5m2" (2^-3, and a wider range).
        block: elements that share a scale, a power of two from 16 to 1024.
    """
    number = REGISTRY["fp8"].parameters[0].number(format)
    return Compressor("fp8", (("format", number), ("block", block)))


def hips2bit(threshold: float = 0.5) -> Compressor:
    """MXNet's 2-bit quantisation, byte for byte, as HiPS (GeoMX) uses it. 16x smaller.

    Sends threshold, -threshold or 0. Biased: use it inside `error_feedback`. `tbq` does the same
    arithmetic, faster. NaN becomes 0, an infinity the threshold with its sign.

    Args:
        threshold: what an element must reach to be sent, in units of the gradient, and the most
            that it passes on in one step: gradients should mostly be smaller.
    """
    return Compressor("hips2bit", (("threshold", threshold),))


def int8(block: int = 128) -> Compressor:
    """8-bit integers with a scale per block, rounded to nearest. About 3.9x smaller.

    Biased, by the rounding: errors are up to 1/254 of the largest element of a block. NaN becomes
    0, an infinity the largest finite value of its block.

    Args:
        block: elements that share a scale, a power of two from 16 to 1024.
    """
    return Compressor("int8", (("block", block),))


def natural() -> Compressor:
    """Natural compression (Horvath et al., 2022): sign and exponent, the mantissa rounded randomly.

    9 bits per element, 3.6x smaller. Unbiased; its variance is at most an eighth of the square. NaN
    becomes infinity, infinities stay.
    """
    return Compressor("natural")


def graddrop(ratio: float = 0.01, sampled: float = 0.001) -> Compressor:
    """Gradient dropping (Aji and Heafield, 2017): elements above a threshold, from a sample.

    6.5 bytes per element sent. Biased: use it inside `error_feedback`. Cheaper than `topk`; how
    many elements are sent varies by about a quarter below `ratio`. NaN is never sent; an infinity
    is an element like others, and arrives as it is.

    Args:
        ratio: the largest share of a chunk's elements that is sent, in [0.001, 1].
        sampled: the share of the elements that the threshold is estimated from, in [0.0001, 1]; at
            least 16 / ratio elements, as far as a chunk has them.
    """
    return Compressor("graddrop", (("ratio", ratio), ("sampled", sampled)))


def onebit() -> Compressor:
    """1-bit SGD (Seide et al., 2014): a sign bit per element and two means per chunk.

    About 32x smaller. Biased: use it inside `error_feedback`. One mean is of the elements below 0
    and one of the others: a NaN makes all elements of a chunk that are not below 0 NaN, an infinity
    all of its sign infinite.
    """
    return Compressor("onebit")


def powersgd(rank: int = 4, min_compression_rate: float = 2.0) -> Compressor:
    """PowerSGD (Vogels et al., 2019): gradients as matrices of low rank.

    Sends 4 * rank * (a + b) bytes for a matrix of a x b; kernels are matrices of their inputs and
    outputs. Vectors, and matrices for which that saves too little, are summed exactly. It is
    linear: ranks that meet sum it in two halves, whatever their number, so it is for
    `CompressedRing(compression=...)` and `HierarchicalPS(local_compression=...)`; a server has no
    part in it. Biased: use it inside `error_feedback`. Good with large matrices; layers of a few
    hundred inputs and outputs gain little.

    Args:
        rank: columns of the factors, from 1 to 256. 1 to 4 is what papers use, more for language
            models.
        min_compression_rate: how many times fewer elements than the matrix the factors must have,
            at least 1.
    """
    params = (("rank", rank), ("min_compression_rate", min_compression_rate))
    return Compressor("powersgd", params)


def qsgd(bits: int = 4, bucket: int = 512) -> Compressor:
    """QSGD (Alistarh et al., 2017): random rounding to levels that are even in a bucket.

    Unbiased; errors are below the largest element of a bucket over 2^(bits - 1) - 1. NaN becomes 0,
    an infinity the largest finite value of its bucket.

    Args:
        bits: bits per element, from 2 to 8; at least 3 inside `error_feedback`.
        bucket: elements that share a scale, a power of two from 16 to 1024.
    """
    return Compressor("qsgd", (("bits", bits), ("bucket", bucket)))


def tbq(tau: float = 0.5) -> Compressor:
    """Threshold quantisation (Strom, 2015) in HiPress's dense form: 2 bits, 16x smaller.

    Sends tau, -tau or 0. Biased: use it inside `error_feedback`. NaN becomes 0, an infinity tau
    with its sign.

    Args:
        tau: what an element must reach to be sent, in units of the gradient, and the most that it
            passes on in one step: gradients should mostly be smaller.
    """
    return Compressor("tbq", (("tau", tau),))


def randomk(ratio: float = 0.01) -> Compressor:
    """Random-k (Stich et al., 2018): one element at random from each of k equal parts of a chunk.

    4 bytes per element sent: indices are computed again from 4 bytes of noise in the packet.
    All workers, owners, parties and servers of a run draw the same elements in a step, other ones
    in the next (`Compressor.encoder_seed`), so a sum has no more elements than a packet, and the
    way back keeps all of them. Biased, because it is not scaled by 1 / ratio: use it inside
    `error_feedback`. NaN and infinities are elements like others, and arrive as they are.

    Args:
        ratio: the share of a chunk's elements that is sent, in [0.001, 1].
    """
    return Compressor("randomk", (("ratio", ratio),))


def terngrad(bitwidth: int = 2) -> Compressor:
    """TernGrad (Wen et al., 2017), as CompLL lists it.

    Random rounding to 2^bitwidth levels between the least and the greatest value of a chunk.
    Unbiased. An infinity, or values further apart than the largest float32, make the whole chunk
    NaN. A NaN arrives as the least value, and elements beside it may be cut to a smaller range.

    Args:
        bitwidth: bits per element, from 1 to 8.
    """
    return Compressor("terngrad", (("bitwidth", bitwidth),))


def topk(ratio: float = 0.01) -> Compressor:
    """Exact top-k (Stich et al., 2018): the elements of a chunk with the largest absolute values.

    6.5 bytes per element sent. Biased: use it inside `error_feedback`. NaN counts as the smallest
    and an infinity as the largest; what is sent arrives as it is.

    Args:
        ratio: the share of a chunk's elements that is sent, in [0.001, 1].
    """
    return Compressor("topk", (("ratio", ratio),))


def error_feedback(compressor: Compressor | str) -> Compressor:
    """Adds what the codec lost to the next gradient (Seide et al., 2014; Karimireddy et al., 2019).

    Args:
        compressor: a codec without error feedback, or its text.

    Raises:
        TypeError: `compressor` is no compressor and no text.
        ValueError: it has error feedback or momentum already, or keeps state, such as dgc().
    """
    return Compressor(ERROR_FEEDBACK, inner=resolve(compressor))


def momentum(compressor: Compressor | str, beta: float = 0.9) -> Compressor:
    """Sends a running mean of the sender's gradients: m <- beta m + (1 - beta) g, encoded is m.

        tf_hips.momentum(tf_hips.error_feedback(tf_hips.onebit()), beta=0.9)

    What robust rules want: means over time lie nearer to each other than gradients do, so a lie has
    less room (docs/robustness.md). Give the optimizer no momentum then: with a mean of all senders
    this is SGD with momentum at (1 - beta) times the learning rate, so the learning rate is that of
    plain SGD. m is 0 at first and not corrected for that. Sums are encoded without it
    (`Compressor.for_sums`), and what is not encoded has none: all gradients where one worker is
    alone, and those of large embeddings in a job without a server.

    Args:
        compressor: what encodes m: a codec without state, in `error_feedback` or not.
        beta: from 0 to 0.9999.

    Raises:
        TypeError: `compressor` is no compressor and no text, or `beta` no number.
        ValueError: `beta` is out of its range, or `compressor` has momentum or state of its own,
            makes no packets, or is `warmup(...)` or `mixed(...)`, which go around it.
    """
    return Compressor(MOMENTUM, (("beta", beta),), inner=resolve(compressor))


def warmup(
    compressor: Compressor | str, steps: int, stages: int | None = None, start: float = 1.0
) -> Compressor:
    """Sends more, or everything, in the first steps, when gradients change fast.

        tf_hips.warmup(tf_hips.error_feedback(tf_hips.topk(0.001)), steps=400)

    sends a share of 0.25, 0.063, 0.016 and 0.004 of the elements for 100 steps each, then 0.001: it
    comes down geometrically, as in DGC (Lin et al., 2018, section 3.3). Before codecs without a
    parameter `ratio` there are `steps` steps of exact float32 values, as with PowerSGD's
    `start_powerSGD_iter` and the `freeze_step` of 1-bit Adam; residuals are zero until then.

    Residuals and momentum go from stage to stage, and the stage follows the number of the step,
    also in a run that is resumed. Each stage is a computation of its own in the graph: tracing
    takes that much longer, steps do not. `Compressor.stages` shows them, `Compressor.at(step)`
    gives the one of a step, `wire_bytes` is that of the last one.

    Args:
        compressor: what comes after the warm-up; with error feedback inside, if any.
        steps: number of the first step after it, at least 1.
        stages: from 1 to 32, at most `steps`; None: 4 for codecs with a ratio. 1 for others.
        start: for codecs with a ratio, what it comes down from. The first stage is already below.

    Raises:
        TypeError: `compressor` is no compressor and no text, or an argument no number of its kind.
        ValueError: one is out of its range, or `compressor` is a warm-up itself, or a codec with
            state and without a ratio.
    """
    params = {"steps": steps, **({} if stages is None else {"stages": stages}), "start": start}
    return Compressor(WARMUP, tuple(params.items()), inner=resolve(compressor))


def mixed(compressor: Compressor | str, below: int) -> Compressor:
    """Sends small tensors as fp16 and the others by a compressor, as GeoMX's MPQ does.

        tf_hips.mixed(tf_hips.error_feedback(tf_hips.onebit()), below=1000)

    For packets between parties and their server, both ways: what a bias could save is little, and
    fp16 loses little of it. Small tensors have no residual, and a value of theirs beyond 65504 is
    refused like an infinity. `Compressor.of_size(n)` gives what a tensor of n elements gets.

    Args:
        compressor: for tensors of `below` elements and more; a warm-up stands inside, too.
        below: elements of the smallest tensor that it is for, from 1 to 2^40.

    Raises:
        TypeError: `compressor` is no compressor and no text, or `below` no whole number.
        ValueError: `below` is out of its range, or `compressor` is mixed itself or makes no
            packets.
    """
    return Compressor(MIXED, (("below", below),), inner=resolve(compressor))


def budget(wan_mbps: float, max_sync_s: float) -> Compressor:
    """The most exact compressor whose round crosses a link in a time; chosen for each model.

        tf_hips.HierarchicalPS(compression=tf_hips.budget(wan_mbps=10, max_sync_s=30))

    A round is all gradients once up and once down. What may be chosen, from exact values to
    0.1 % of the elements: `tf_hips.ops.budgets.LADDER`. For the slow tier only.

    Args:
        wan_mbps: what the link of a party carries each way, in Mbit/s.
        max_sync_s: seconds that a round may take on it.

    Raises:
        TypeError: an argument is no number.
        ValueError: one is out of range; and, when the model is known, nothing is small enough.
    """
    return Budget(params=(("wan_mbps", wan_mbps), ("max_sync_s", max_sync_s)))
