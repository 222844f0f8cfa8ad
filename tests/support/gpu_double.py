# SPDX-License-Identifier: Apache-2.0
"""A device of type GPU for TensorFlow where no GPU is; see gpu_double.cc."""

import ctypes
import subprocess
from pathlib import Path

import tensorflow as tf

SOURCE = Path(__file__).with_suffix(".cc")


def build(folder: Path) -> Path:
    """Compiles the plugin."""
    made = folder / "gpu_double.so"
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", "-Wall", "-Werror"]
    include = f"-isystem{tf.sysconfig.get_include()}"
    subprocess.run(["g++", *flags, include, "-o", made, SOURCE], check=True, timeout=60)
    return made


def load(plugin: Path) -> ctypes.CDLL:
    """Gives TensorFlow the device; before it has looked for its devices."""
    from tensorflow.python.framework import load_library  # noqa: TID251 - no public name for it

    load_library.load_pluggable_device_library(str(plugin))
    assert len(tf.config.list_logical_devices("GPU")) == 1
    library = ctypes.CDLL(str(plugin))
    library.gpu_double_bytes_to_host.restype = ctypes.c_int64
    return library
