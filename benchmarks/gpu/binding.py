# SPDX-License-Identifier: Apache-2.0
"""The table of tf_hips/cc/cuda/codec_cuda.h in ctypes."""

import ctypes

VOID, I32, I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
FINE = 2**64 - 1
SET, ADD, RESIDUAL = 0, 1, 3
CUDA_FAILED = 32


class Key(ctypes.Structure):
    """Where the noise of a call comes from."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint32),
        ("tensor_id", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
    )


class Codec(ctypes.Structure):
    """TfHipsCudaCodec."""

    _fields_ = (
        ("abi_version", I32),
        ("name", ctypes.c_char_p),
        ("spec_hash", ctypes.c_uint32),
        ("num_params", I32),
        ("params", VOID),
        ("wire_bytes", ctypes.CFUNCTYPE(I64, VOID, I64)),
        ("scratch_bytes", ctypes.CFUNCTYPE(I64, VOID, I64)),
        (
            "encode",
            ctypes.CFUNCTYPE(
                *(I32, VOID, VOID, VOID, VOID, VOID, VOID, I64, VOID, I64, VOID, I64, VOID)
            ),
        ),
        (
            "decode",
            ctypes.CFUNCTYPE(I32, VOID, VOID, I64, I32, VOID, I64, I32, VOID, VOID, I64, VOID),
        ),
        ("num_states", I32),
        ("state_names", VOID),
        (
            "encode_state",
            ctypes.CFUNCTYPE(I32, VOID, VOID, VOID, VOID, VOID, I64, VOID, I64, VOID, I64, VOID),
        ),
        ("error_text", ctypes.CFUNCTYPE(ctypes.c_char_p)),
        ("own_may_fail", I32),
    )


def table(library: ctypes.CDLL, name: str) -> Codec:
    """The codec of that name in a library."""
    getter = getattr(library, f"tf_hips_cuda_codec_{name}")
    getter.restype = ctypes.POINTER(Codec)
    found: Codec = getter().contents
    return found
