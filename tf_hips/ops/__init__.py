# SPDX-License-Identifier: Apache-2.0
"""Gradient codecs: values that name them, and three ways to run them.

    compressor   Compressor, a plain value; parse(text)
    algorithms   onebit(), terngrad(), ... one function per algorithm; the wrappers; REGISTRY
    jit          load(path): a specification becomes a codec of the running program
    native       NumPy arrays and byte buffers, no TensorFlow
    graph        TensorFlow ops; import it by name, it imports TensorFlow
    library      finds and checks the built libraries

Specifications are in specs/; the libraries are built from them by `make build`.
"""

from tf_hips.ops.algorithms import (
    REGISTRY,
    bf16,
    bisparse,
    budget,
    dgc,
    eden,
    error_feedback,
    fp8,
    fp16,
    fp32,
    graddrop,
    hips2bit,
    int8,
    mixed,
    momentum,
    natural,
    onebit,
    powersgd,
    qsgd,
    randomk,
    tbq,
    terngrad,
    topk,
    warmup,
)
from tf_hips.ops.compressor import CHUNK, Compressor, chunk_sizes, parse
from tf_hips.ops.jit import load
from tf_hips.ops.native import Key, derive_seed

__all__ = [
    "CHUNK",
    "REGISTRY",
    "Compressor",
    "Key",
    "bf16",
    "bisparse",
    "budget",
    "chunk_sizes",
    "derive_seed",
    "dgc",
    "eden",
    "error_feedback",
    "fp8",
    "fp16",
    "fp32",
    "graddrop",
    "hips2bit",
    "int8",
    "load",
    "mixed",
    "momentum",
    "natural",
    "onebit",
    "parse",
    "powersgd",
    "qsgd",
    "randomk",
    "tbq",
    "terngrad",
    "topk",
    "warmup",
]
