# SPDX-License-Identifier: Apache-2.0
"""Where the ops of a codec run: on the GPU that holds the gradients, if there are kernels for it.

The kernels of the built-in codecs are in libtf_hips_cuda.so beside the ops (`make build CUDA=1`);
those of a loaded codec are compiled when it is first used beside a GPU, if nvcc is there. Without
them, or with a driver or a GPU that they cannot use, gradients are encoded on the CPU, and copied
there, which is told once.
"""

import functools

import tensorflow as tf

from tf_hips import log
from tf_hips.ops import jit, library, loaded
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.flow import on_gpu

_CPU = "/cpu:0"
_told: set[str] = set()


def has_gpu_kernels(compressor: Compressor) -> bool:
    """Whether there is a GPU, and the codec of `compressor` and of its sums have kernels for it."""
    if not on_gpu() or not compressor.makes_packets or compressor.is_budget:
        return False
    stages = [stage for _, stage in compressor.stages]
    names = {one.codec.name for stage in stages for one in (stage, stage.for_sums)}
    return all(_has_kernels(name) for name in names)


def device(compressor: Compressor) -> str | None:
    """Where an op of `compressor` must be placed; None: wherever TensorFlow likes.

    Without kernels for the GPU that is the CPU: the ops have kernels for either, and TensorFlow
    would choose the GPU's.
    """
    if not on_gpu() or _has_kernels(compressor.codec.name):
        return None
    return _CPU


@functools.cache
def _has_kernels(name: str) -> bool:
    if loaded.NAME.fullmatch(name) is None:
        reason = library.built_in_cuda_refusal(name)
        if not reason:
            return True
    else:
        address, reason = jit.cuda_table(name, _architectures())
        if address is not None:
            library.add_cuda_codec(tf, name, address)
            return True
    _tell(name, reason)
    return False


def _tell(name: str, reason: str) -> None:
    """Says why a codec is not on the GPU; what holds for all codecs is said of the first one."""
    if reason not in _told:
        _told.add(reason)
        log.warning("%s encodes on the CPU, and gradients are copied there: %s", name, reason)


def _architectures() -> tuple[str, ...]:
    """Of the GPUs that TensorFlow may use, as nvcc names them: "90"; none if it does not know."""
    found = set()
    for gpu in tf.config.get_visible_devices("GPU"):
        capability = tf.config.experimental.get_device_details(gpu).get("compute_capability")
        if capability is None:
            return ()
        found.add("".join(map(str, capability)))
    return tuple(sorted(found))
