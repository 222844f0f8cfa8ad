# SPDX-License-Identifier: Apache-2.0
"""What decides on the bits of a worker's gradients, so that workers can be compared.

Sums of floats depend on their order: on the instructions of a processor, on how many threads share
a convolution, on oneDNN. Names of these say why two workers differ; whether they do is said by a
probe, the gradient of a small network with fixed weights and data.
"""

import hashlib
import os
import platform
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tf_hips.ps.client.vote import facts_to_json

_SHOWN = 16


def replica_facts() -> str:
    """What decides on this worker's bits, as `SeatClient.say_replica` takes it."""
    devices = sorted(
        tf.config.experimental.get_device_details(one).get("device_name", "GPU")
        for one in tf.config.list_physical_devices("GPU")
    )
    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1
    return facts_to_json(
        {
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
            "processor": f"{platform.machine()} {_short(_processor())}",
            "intra-op threads": str(threads),
            "TF_ENABLE_ONEDNN_OPTS": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "not set"),
            "device": ", ".join(devices)[:150] or "CPU",
            "floatx": keras.config.floatx(),
            "gradient of a probe": probe(),
        }
    )


def probe() -> str:
    """Digest of the gradient of two convolutions and a product, of fixed values."""
    generator = np.random.default_rng(2019)

    def values(*shape: int) -> tf.Tensor:
        return tf.constant(generator.standard_normal(shape), tf.float32)

    images, labels = values(16, 24, 24, 3), values(16, 40)
    weights = [values(3, 3, 3, 32), values(3, 3, 32, 16), values(16 * 24 * 24, 40) / 100.0]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        hidden = images
        for kernel in weights[:2]:
            hidden = tf.nn.relu(tf.nn.conv2d(hidden, kernel, 1, "SAME"))
        output = tf.matmul(tf.reshape(hidden, [16, -1]), weights[2])
        loss = tf.reduce_mean(tf.square(output - labels))
    found = hashlib.sha256()
    for gradient in tape.gradient(loss, weights):
        found.update(gradient.numpy().tobytes())
    return found.hexdigest()[:_SHOWN]


def _processor() -> str:
    """What the processor can do, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return " ".join(sorted(flags.partition(":")[2].split()))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_SHOWN]
