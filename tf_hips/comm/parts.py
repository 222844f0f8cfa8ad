# SPDX-License-Identifier: Apache-2.0
"""Tensors of more elements than Horovod can count.

Horovod 0.28.1 counts elements in a C int, also their places in what is gathered; more of them end
the job deep inside Gloo. What keeps its shape travels in parts; what does not is refused.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

# Elements.
PART = 1 << 30
MOST = (1 << 31) - 1

Run = Callable[[tf.Tensor, str], tf.Tensor]


def in_parts(run: Run, tensor: tf.Tensor, name: str, most: int | None = None) -> tf.Tensor:
    """`run(tensor, name)`, for a collective whose result is like its input, element by element.

    A tensor of more elements is cut into `<name>.part_<k>`. One of unknown size goes as it is.

    Args:
        run: the collective.
        tensor: the same shape on all ranks.
        name: of the collective.
        most: elements of a part; None: `PART`.
    """
    most = PART if most is None else most
    size = tensor.shape.num_elements()
    if size is None or size <= most:
        return run(tensor, name)
    lengths = [min(most, size - begin) for begin in range(0, size, most)]
    parts = cut(tf.reshape(tensor, [-1]), lengths)
    sums = [run(part, f"{name}.part_{number}") for number, part in enumerate(parts)]
    return tf.reshape(tf.concat(sums, 0), tensor.shape)


def cut(vector: tf.Tensor, lengths: Sequence[int]) -> list[tf.Tensor]:
    """Cuts a vector into parts of these lengths, together those of the vector, at least one."""
    # TensorFlow counts in the type of the lengths. Where that is an int32 in which the end of a
    # part has no room, and all parts are whole lines of 64 bytes, it ends the process.
    return list(tf.split(vector, tf.constant(lengths, tf.int64), num=len(lengths)))


def check_countable(num_elements: int | None, kind: str, name: str) -> None:
    """Raises where Horovod cannot count what a rank gives to a collective, or gets from it.

    Raises:
        ValueError: it is more than `MOST` elements.
    """
    if num_elements is not None and num_elements > MOST:
        raise ValueError(
            f"The {kind} `{name}` must have at most {MOST} elements: Horovod counts no further. "
            f"Received: {num_elements} elements. Make it in parts."
        )
