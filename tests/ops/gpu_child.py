# SPDX-License-Identifier: Apache-2.0
"""What a process of test_gpu_ops does: TensorFlow with a double of a GPU, and our ops on it."""

import ctypes
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import tf_hips
from tests.support import gpu_double
from tf_hips.ops import Compressor, Key, error_feedback, graph, library, native, placement

GPU = "/gpu:0"
KEY = {"seed": 2**63 + 5, "step": 7, "tensor_id": 3, "offset": 16}
SIZES = (0, 1, 1000, 5001)
CODECS = ("onebit", "terngrad", "graddrop")


def vector(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def raises(text: str, call: Callable[[], Any]) -> None:
    """Checks that a call fails, with these words."""
    try:
        call()
    except tf.errors.OpError as error:
        assert text in str(error), str(error)
        return
    raise AssertionError(f"there must be an error: {text}")


def on_gpu(tensor: tf.Tensor) -> np.ndarray:
    assert tensor.device.endswith("GPU:0"), tensor.device
    return tensor.numpy()


def check_codec(name: str, n: int) -> None:
    """All ops of a codec give the bytes of the native library."""
    codec = Compressor(name)
    x, residual = vector(n), vector(n, 1)
    key = Key(**KEY)
    with tf.device(GPU):
        packet, _ = graph.encode(codec, tf.constant(x), **KEY)
        expected = native.encode(codec, x, key)
        np.testing.assert_array_equal(on_gpu(packet), expected)
        found = on_gpu(graph.decode(codec, packet, n))
        np.testing.assert_array_equal(found, native.decode(codec, expected, n))
        feedback = error_feedback(codec)
        kept = residual.copy()
        wanted = native.encode(feedback, x, key, kept)
        packet, left = graph.encode(feedback, tf.constant(x), kept=tf.constant(residual), **KEY)
        np.testing.assert_array_equal(on_gpu(packet), wanted)
        np.testing.assert_array_equal(on_gpu(left), kept)
        rows = np.stack([expected, wanted, expected])
        found = on_gpu(graph.merge(codec, tf.constant(rows), n))
        np.testing.assert_array_equal(found, native.merge(codec, rows, n))
        kept = residual.copy()
        wanted = native.merge_encode(feedback, rows, n, key, kept)
        packet, left = graph.merge_encode(
            feedback, tf.constant(rows), n, tf.constant(residual), **KEY
        )
        np.testing.assert_array_equal(on_gpu(packet), wanted)
        np.testing.assert_array_equal(on_gpu(left), kept)


def check_state() -> None:
    codec, n = tf_hips.dgc(0.1), 3001
    state = np.zeros(codec.state_shape([n]), np.float32)
    with tf.device(GPU):
        held = tf.zeros(codec.state_shape([n]))
        for step in range(3):
            x = vector(n, step)
            key = {**KEY, "step": step}
            packet, held = graph.encode(codec, tf.constant(x), kept=held, **key)
            np.testing.assert_array_equal(
                on_gpu(packet), native.encode(codec, x, Key(**key), state)
            )
            np.testing.assert_array_equal(on_gpu(held), state)


def check_momentum() -> None:
    """A running mean is encoded on the GPU, or made and encoded where its codec is."""
    n = 3001
    for name, where in (("onebit", "GPU:0"), ("tbq", "CPU:0")):
        codec = tf_hips.momentum(error_feedback(Compressor(name)))
        kept = np.zeros(codec.state_shape([n]), np.float32)
        with tf.device(GPU):
            held = tf.zeros(codec.state_shape([n]))
            for step in range(3):
                x, key = vector(n, step), {**KEY, "step": step}
                x[step] = (np.nan, np.inf, 1e-40)[step]
                packet, held = graph.encode(codec, tf.constant(x), kept=held, **key)
                assert packet.device.endswith(where), packet.device
                wanted = native.encode(codec, x, Key(**key), kept)
                np.testing.assert_array_equal(packet.numpy(), wanted)
                np.testing.assert_array_equal(held.numpy(), kept)


def check_wrong_packets() -> None:
    codec, n = Compressor("onebit"), 2**20 + 9
    good = native.encode(codec, vector(n), Key(**KEY))
    bad = good.copy()
    bad[2**17 + 24] ^= 1  # of the second chunk's prefix, the first byte
    feedback = error_feedback(codec)
    with tf.device(GPU):
        magic = ", chunk 1, does not decode: "
        raises(f"`packet`{magic}", lambda: graph.decode(codec, tf.constant(bad), n))
        rows = tf.constant(np.stack([good, bad]))
        raises(f"row 1 of `packets`{magic}", lambda: graph.merge(codec, rows, n))
        old = tf.zeros([n])
        raises(
            f"row 1 of `packets`{magic}",
            lambda: graph.merge_encode(feedback, rows, n, old, **KEY),
        )
        decode = library.ops(tf).tf_hips_onebit_decode
        raises("ytes", lambda: decode(packet=tf.zeros([30], tf.uint8), num_elements=n))
        codec = Compressor("graddrop")
        many = tf.zeros([2**23 + 1, codec.wire_bytes(0)], tf.uint8)
        raises(
            "`packets` must have at most 8388608 rows on a GPU. Received: 8388609",
            lambda: graph.merge(codec, many, 0),
        )
        raises(
            "`state` of dgc must have the shape [2,9]",
            lambda: library.ops(tf).tf_hips_dgc_encode_state(
                gradient=tf.zeros([9]), state=tf.zeros([1, 9]), seed=1, step=1, ratio=0.1
            ),
        )


def check_own_packets(folder: Path) -> None:
    """A packet of its own that a codec refuses: an error, and the residual is what it was."""
    file = folder / "own.pse"
    file.write_text(
        "void OwnEncode(float* g, uint8* out) { int flip = g[0] > 100 ? 1 : 0;\n"
        "uint32* at = map(range(4), [&](int i) -> uint32 { return flip == 1 ? 3 - i : i; });\n"
        "out = concat(at, map(range(4), [&](int i) -> float { return g[i]; })); }\n"
        "void OwnDecode(uint8* in, float* g) { uint32* at; float* values;\n"
        "extract(in, at, values); g = scatter(g.size, at, values); }\n"
    )
    feedback, n = error_feedback(tf_hips.load(file)()), 2**20 + 10
    refused = "encoding with own failed: its own packet, chunk 1, does not decode: "
    x, old = np.ones(n, np.float32), np.arange(n, dtype=np.float32) % 50
    with tf.device(GPU):
        residual = tf.Variable(old)

        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            packet, left = graph.encode(feedback, x, kept=residual.read_value(), **KEY)
            residual.assign(left)
            return packet

        x[2**20] = 1000  # the first element of the second chunk
        raises(refused, lambda: step(tf.constant(x)))
        raises(refused, lambda: graph.encode(feedback, tf.constant(x), kept=residual, **KEY))
        np.testing.assert_array_equal(residual.numpy(), old)
        x[2**20] = 60
        kept = old.copy()
        packet = native.encode(feedback, x, Key(**KEY), kept)
        np.testing.assert_array_equal(on_gpu(step(tf.constant(x))), packet)
        np.testing.assert_array_equal(residual.numpy(), kept)
        # The sum of two is too large for it.
        rows, bad = np.stack([packet, packet]), packet.copy()
        bad[0] ^= 1

        def merge(rows: np.ndarray) -> tf.Tensor:
            return graph.merge_encode(feedback, tf.constant(rows), n, tf.zeros([n]), **KEY)[0]

        raises(refused, lambda: merge(rows))
        raises("row 1 of `packets`, chunk 0, ", lambda: merge(np.stack([packet, bad, packet])))
        expected = native.merge_encode(feedback, rows[:1], n, Key(**KEY), old * 0)
        np.testing.assert_array_equal(on_gpu(merge(rows[:1])), expected)


def check_refusal(kernels: Path, folder: Path) -> None:
    """With a driver that the library cannot use, the CPU encodes, too; it is said once."""
    path = library.CUDA_PATH
    library.CUDA_PATH = Path(shutil.copyfile(kernels, folder / "refusing.so"))
    emulated = ctypes.CDLL(str(library.CUDA_PATH))
    emulated.emulation_fail(0, 1)
    placement._has_kernels.cache_clear()
    for name in ("onebit", "terngrad"):
        with tf.device(GPU):
            packet, _ = graph.encode(Compressor(name), tf.ones([9]), **KEY)
        assert packet.device.endswith("CPU:0"), packet.device
        assert not placement.has_gpu_kernels(Compressor(name))
    emulated.emulation_fail(0, 0)
    library.CUDA_PATH = path


def check_failed_launches(path: Path) -> None:
    """What CUDA says of a kernel that does not start reaches the user."""
    codec, kernels = Compressor("onebit"), ctypes.CDLL(str(path))
    packet = tf.constant(native.encode(codec, vector(9), Key(**KEY)))
    said = "failed: CUDA could not start a kernel: an emulated error"
    with tf.device(GPU):
        x = tf.ones([9])
        kernels.emulation_fail(1, 0)
        raises(f"encoding with onebit {said}", lambda: graph.encode(codec, x, **KEY))
        kernels.emulation_fail(1, 0)
        raises(f"decoding with onebit {said}", lambda: graph.decode(codec, packet, 9))


def check_copies(plugin: ctypes.CDLL) -> None:
    """A step leaves its gradient on the GPU: only packets and reports go to the host."""
    feedback, n = error_feedback(Compressor("onebit")), 2**16
    with tf.device(GPU):
        x, residual = tf.constant(vector(n)), tf.Variable(tf.zeros([n]))

        @tf.function
        def step(x: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
            with tf.device(None):  # where TensorFlow likes
                packet, left = graph.encode(
                    feedback, x, kept=residual.read_value(), seed=1, step=number, tensor_id=0
                )
                residual.assign(left)
                with tf.device("/cpu:0"):  # as Horovod does
                    sent = tf.identity(packet)
                return graph.merge(feedback, tf.stack([sent, sent]), n)

        step(x, tf.constant(0, tf.int64))
        count = plugin.gpu_double_bytes_to_host
        before = count()
        total = step(x, tf.constant(1, tf.int64))
        copied = count() - before
        assert total.device.endswith("GPU:0"), total.device
    assert feedback.wire_bytes(n) <= copied < feedback.wire_bytes(n) + 200, copied


def check_loaded(folder: Path) -> None:
    """A specification of the user's is compiled for the GPU, too, when it is first used there."""
    file = folder / "halves.pse"
    file.write_text(
        "void HalvesEncode(float* g, uint8* out) { out = concat(map(g, [&](float x) -> float "
        "{ return x / 2; })); }\n"
        "void HalvesDecode(uint8* in, float* g) { float* v; extract(in, v); "
        "g = map(v, [&](float x) -> float { return x * 2; }); }\n"
    )
    codec, x = tf_hips.load(file)(), vector(2000)
    with tf.device(GPU):
        packet, _ = graph.encode(codec, tf.constant(x), **KEY)
        np.testing.assert_array_equal(on_gpu(packet), native.encode(codec, x, Key(**KEY)))
        np.testing.assert_array_equal(on_gpu(graph.decode(codec, packet, 2000)), x)
    assert placement.has_gpu_kernels(codec)
    assert placement._architectures() == ()  # the double has none
    with mock.patch.object(tf.config.experimental, "get_device_details") as details:
        details.return_value = {"compute_capability": (9, 0)}
        assert placement._architectures() == ("90",)


def check(plugin: Path, kernels: Path, folder: Path) -> None:
    """Checks all; `folder` gets the ops' library, and later `kernels` beside it."""
    device = gpu_double.load(plugin)
    # Loaded from where the double of the CUDA library can be put beside it.
    own = folder / library.OPS_PATH.name
    shutil.copyfile(library.OPS_PATH, own)
    library.OPS_PATH, library.CUDA_PATH = own, folder / library.CUDA_PATH.name
    onebit = Compressor("onebit")
    with tf.device(GPU):
        encode = library.ops(tf).tf_hips_onebit_encode
        raises("`make build CUDA=1`", lambda: encode(gradient=tf.ones([9]), seed=1, step=1))
        # Without kernels the CPU encodes, and a word is said.
        packet, _ = graph.encode(onebit, tf.ones([9]), **KEY)
    assert packet.device.endswith("CPU:0"), packet.device
    assert not placement.has_gpu_kernels(onebit)
    check_refusal(kernels, folder)
    shutil.copyfile(kernels, library.CUDA_PATH)
    placement._has_kernels.cache_clear()
    assert placement.has_gpu_kernels(onebit)
    assert not placement.has_gpu_kernels(Compressor("tbq"))  # which is not in this library
    for name in CODECS:
        for n in SIZES:
            check_codec(name, n)
    check_codec("onebit", 2**20 + 9)
    check_state()
    check_momentum()
    check_wrong_packets()
    check_own_packets(folder)
    check_failed_launches(library.CUDA_PATH)
    check_copies(device)
    check_loaded(folder)
