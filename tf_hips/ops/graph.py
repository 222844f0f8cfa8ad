# SPDX-License-Identifier: Apache-2.0
"""The codecs as TensorFlow ops, eagerly or in a graph.

The same bytes as ops.native, bit for bit, on a CPU and on a GPU (see `placement`). Shapes are
static where the gradient's are. The ops are pure functions of their inputs and attributes: state
(residuals, steps) belongs to the caller. They have no gradients.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_hips.ops import jit, library, placement, smoothing
from tf_hips.ops.compressor import Compressor, check_for_sums, check_makes_packets
from tf_hips.ops.flow import Tensor, all_finite, on_gpu, opaque
from tf_hips.ops.native import check_stage

_ENCODE_MOMENTUM = "encode_momentum"


def register() -> None:
    """Makes the ops known to TensorFlow, so that a graph that has them can be read.

    Using any of them here does so, too, and so does tf_hips.load where TensorFlow was imported
    before.

    Raises:
        LibraryError: the library is missing, or was built for another TensorFlow.
    """
    library.ops(tf)


def encode(
    compressor: Compressor,
    gradient: Tensor,
    *,
    seed: Tensor | int,
    step: Tensor | int,
    tensor_id: int,
    offset: int = 0,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Encodes one tensor.

    Args:
        compressor: what to encode with; of a warm-up the stage of `step`, which must be known when
            the graph is built.
        gradient: float32 of any shape.
        seed: of this encoder: a Python int in [0, 2^64), or an int64 scalar with the same bits.
        step: in [0, 2^32), an int or an integer scalar.
        tensor_id: position of the tensor in its model.
        offset: index in its tensor of the first element encoded.
        kept: what encoding keeps (a residual, or momentum and states), float32 of
            `compressor.state_shape`; given if and only if `compressor.has_state`.

    Returns:
        The packets (uint8, 1-D, all chunks concatenated), and what is kept now, or None.

    Raises:
        ValueError: `kept` is missing or superfluous, or the step of a warm-up is not known yet.
    """
    compressor = _stage(compressor, step)
    _check_kept(compressor, kept)
    key = {"seed": _seed(seed), "step": _step(step), "tensor_id": tensor_id, "offset": offset}
    if compressor.has_momentum:
        return _encode_momentum(compressor, gradient, kept, **key)
    if kept is None:
        return _op(compressor, "encode")(gradient=gradient, **key), None
    if not compressor.has_residual:
        packet, new_state = _op(compressor, "encode_state")(gradient=gradient, state=kept, **key)
        return packet, new_state
    packet, new_residual = _op(compressor, "encode_feedback")(
        gradient=gradient, residual=kept, **key
    )
    return packet, new_residual


def _encode_momentum(
    compressor: Compressor, gradient: Tensor, kept: Tensor, **key: Any
) -> tuple[Tensor, Tensor]:
    """Takes a gradient into the momentum, and encodes that; see ops.smoothing."""
    kept, vector = tf.convert_to_tensor(kept, tf.float32), tf.reshape(gradient, [-1])
    if vector.shape.is_fully_defined():
        shape = compressor.state_shape(vector.shape)
        if not kept.shape.is_compatible_with(shape):
            raise ValueError(
                f"`kept` of {compressor.text} must have the shape {list(shape)}. "
                f"Received: shape {kept.shape}"
            )
    inner = compressor.for_sums
    if not on_gpu() or placement.device(compressor.codec) is not None:
        packet, new_kept = _op(compressor, _ENCODE_MOMENTUM)(
            gradient=vector,
            kept=kept,
            beta=dict(compressor.params)["beta"],
            feedback=inner.has_residual,
            **key,
        )
        return packet, new_kept
    momentum, *others = tf.unstack(kept, len(compressor.state_names))
    sent, news = _moved(compressor, momentum, vector)
    packet, rest = encode(inner, sent, kept=others[0] if others else None, **key)
    return packet, tf.stack([news, *([] if rest is None else [rest])])


def _moved(compressor: Compressor, momentum: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """What is to be encoded, and the momentum then, on the GPU where they lie."""
    beta, share = smoothing.shares(compressor)
    # Else TensorFlow would join products with those before them, or take out a common factor.
    [gradient] = opaque([gradient])
    new = tf.add(*opaque([momentum * beta, gradient * share]))
    new = tf.where(tf.abs(new) <= smoothing.TINY, tf.zeros_like(new), new)

    def spoilt() -> tuple[Tensor, Tensor]:
        finite = tf.where(tf.math.is_finite(new), new, tf.zeros_like(new))
        return tf.where(tf.math.is_finite(gradient), new, gradient), finite

    sent, news = tf.cond(all_finite([new]), lambda: (tf.identity(new), tf.identity(new)), spoilt)
    return sent, news


def decode(compressor: Compressor, packet: Tensor, num_elements: int) -> Tensor:
    """Decodes all packets of one tensor to float32 [num_elements].

    What a warm-up encoded is decoded by `compressor.at(step)`.

    Raises:
        tf.errors.InvalidArgumentError: the packets are truncated, too long, or not of this codec.
        ValueError: their static shape already says so, or `compressor` is a warm-up.
    """
    return _op(compressor, "decode")(packet=packet, num_elements=num_elements)


def merge(compressor: Compressor, packets: Tensor, num_elements: int) -> Tensor:
    """Returns the sum of the decoded rows of `packets`, added in their order.

    Args:
        compressor: what they were encoded with; of a warm-up, `compressor.at(step)`.
        packets: uint8 [W, B], all packets of one tensor in each row; W >= 1.
        num_elements: of each tensor.

    Returns:
        float32 [num_elements].

    Raises:
        tf.errors.InvalidArgumentError, ValueError: as for `decode`.
    """
    return _op(compressor, "merge")(packets=packets, num_elements=num_elements)


def merge_encode(
    compressor: Compressor,
    packets: Tensor,
    num_elements: int,
    kept: Tensor | None = None,
    *,
    seed: Tensor | int,
    step: Tensor | int,
    tensor_id: int,
    offset: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Merges the rows of `packets` (uint8 [W, B]) and encodes the sum again.

    With error feedback both happen chunk by chunk in one op, and `kept` is the residual, float32
    [num_elements]. What has momentum or state encodes no sums: it would be applied twice.
    `recode_sum` takes any compressor. Of a warm-up the stage of `step` does both.

    Returns:
        The packets of the sum (uint8 [B]), and what is kept now, or None.

    Raises:
        tf.errors.InvalidArgumentError, ValueError: as for `decode`.
    """
    compressor = check_for_sums(_stage(compressor, step))
    _check_kept(compressor, kept)
    if kept is None:
        total = merge(compressor, packets, num_elements)
        return encode(compressor, total, seed=seed, step=step, tensor_id=tensor_id, offset=offset)
    packet, new_residual = _op(compressor, "merge_encode")(
        packets=packets,
        residual=kept,
        seed=_seed(seed),
        step=_step(step),
        num_elements=num_elements,
        tensor_id=tensor_id,
        offset=offset,
    )
    return packet, new_residual


def recode_sum(
    compressor: Compressor, packets: Tensor, num_elements: int, kept: Tensor | None, **key: Any
) -> tuple[Tensor, Tensor | None]:
    """Merges the rows of `packets`, encoded with `compressor`, and encodes with its `for_sums`.

    Args:
        compressor: what the rows were encoded with; of a warm-up the stage of `step`.
        packets: uint8 [W, B].
        num_elements: of each tensor.
        kept: what `compressor.for_sums` keeps, if anything.
        **key: `seed`, `step`, `tensor_id` and `offset`, as for `encode`.

    Returns:
        The packets of the sum, for `decode` with `compressor.for_sums`, and what is kept now.

    Raises:
        tf.errors.InvalidArgumentError, ValueError: as for `decode`.
    """
    compressor = _stage(compressor, key["step"])
    sums = compressor.for_sums
    if sums == compressor:
        return merge_encode(sums, packets, num_elements, kept, **key)
    return encode(sums, merge(compressor, packets, num_elements), kept=kept, **key)


def clip(compressor: Compressor, vectors: Sequence[Tensor], num_encoders: int) -> list[Tensor]:
    """Scales vectors down together to a norm of `compressor.clip_norm / sqrt(num_encoders)`.

    Args:
        compressor: what they will be encoded with; without `clip_norm`, or where their norm is
            smaller, they stay as they are. So they do where one is not finite: whoever looks at
            them can still say which.
        vectors: gradients of one step, float32.
        num_encoders: how many such lists are summed.
    """
    if not compressor.clip_norm:
        return list(vectors)
    most = compressor.clip_norm / math.sqrt(num_encoders)

    def of_doubles() -> list[Tensor]:
        wide = [tf.cast(vector, tf.float64) for vector in vectors]
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(vector)) for vector in wide]))
        scale = tf.where(tf.math.is_finite(norm), most / norm, 1.0)
        # As a float32 it may be so small that TensorFlow takes it for 0, and what it scales is not.
        return [tf.cast(vector * scale, tf.float32) for vector in wide]

    def of_floats() -> list[Tensor]:
        # Not most * min(1 / norm, 1 / most), which is not always 1 where nothing is to be clipped.
        scale = tf.where(norm <= most, 1.0, most * (1.0 / norm))
        return [vector * scale for vector in vectors]

    norm = tf.linalg.global_norm(vectors)
    # Squares of finite numbers overflow, too.
    return list(tf.cond(tf.math.is_finite(norm), of_floats, of_doubles))


def _op(compressor: Compressor, kind: str) -> Any:
    """The generated wrapper of one op, with the codec's parameters filled in."""
    check_stage(compressor)
    codec = check_makes_packets(compressor).codec
    algorithm = jit.algorithm(codec.name)
    is_for_all = kind == _ENCODE_MOMENTUM
    op = kind if is_for_all else f"{algorithm.op}_{kind}"
    function = getattr(library.ops(tf), f"tf_hips_{op}")
    params: dict[str, Any] = dict(codec.codec_params)
    if algorithm.is_loaded or is_for_all:
        # One op for all of them: see cc/tf/loaded_ops.cc.
        values = [
            [params[p.name] for p in algorithm.parameters if p.is_integer == is_integer]
            for is_integer in (True, False)
        ]
        params = {"codec": algorithm.name, "integers": values[0], "floats": values[1]}
    device = placement.device(codec)
    if device is None:
        return lambda **arguments: function(**arguments, **params)

    def placed(**arguments: Any) -> Any:
        with tf.device(device):
            return function(**arguments, **params)

    return placed


def _seed(seed: Tensor | int) -> Tensor:
    """A scalar int64 with the 64 bits of `seed`."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        return _integers(seed, "seed")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"`seed` must be in [0, 2^64). Received: seed={seed}")
    return tf.constant(seed - (seed >> 63 << 64), tf.int64)


def _step(step: Tensor | int) -> Tensor:
    return _integers(step, "step")


def _integers(value: Tensor | int, name: str) -> Tensor:
    """`value` as int64; floats are refused, because they would be truncated without a word."""
    dtype = tf.as_dtype(value.dtype) if hasattr(value, "dtype") else tf.int64
    if isinstance(value, bool | float) or not dtype.is_integer:
        kind = dtype.name if hasattr(value, "dtype") else type(value).__name__
        raise TypeError(f"`{name}` must be an integer. Received: {name} of type {kind}")
    return tf.cast(value, tf.int64)


def _stage(compressor: Compressor, step: Tensor | int) -> Compressor:
    """What a compressor is in this step."""
    if not compressor.is_warmup:
        return check_stage(compressor)
    known = step if isinstance(step, int) else tf.get_static_value(_step(step))
    if known is None:
        raise ValueError(
            "the step of a warm-up must be known when a graph is built: give "
            "`compressor.at(step)`, or choose among the stages with tf.switch_case. "
            f"Received: {compressor.text}"
        )
    return check_stage(compressor.at(int(known)))


def _check_kept(compressor: Compressor, kept: Tensor | None) -> None:
    if compressor.has_state != (kept is not None):
        raise ValueError(
            "`kept` must be given if and only if the compressor has error feedback, momentum or "
            "state. "
            f"Received: {compressor.text}, kept={'None' if kept is None else 'a tensor'}"
        )
