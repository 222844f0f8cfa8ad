# SPDX-License-Identifier: Apache-2.0
"""When one block of threads does all kernels of a small call, one after another.

Each step keeps the shared memory that it has as a kernel of its own, so what they need together
must fit: it is counted in the text of the kernels, and in the functions of the headers they call.
"""

import re
from collections.abc import Sequence

from compll.backends.cuda_kernels import Launch

# A block has 48 KiB, of which alignment may take some.
_MAX_SHARED_BYTES = 48 * 1024 - 512
_MOST_TILES = 8
_SIZES = {"float": 4, "uint32_t": 4, "int32_t": 4, "int64_t": 8, "Kept": 256}
_CONSTANTS = {
    **{"kTile": 1024, "kPaddedTile": 1152, "kThreads": 128, "kLanes": 16},
    **{"kBins": 2048, "kGroups": 4},
}
_DECLARED = re.compile(r"TF_HIPS_SHARED (\w+) \w+(?:\[([^\]]+)\])?;")
# Functions of reduce.cuh, select.cuh and top_k.cuh, and what each instance of them has.
_CALLED = {
    r"reduce_blocks<\w+>": 4096,
    "sum_threads": 128,
    "scan_tiles": 2048 + 32,
    r"sort_keys<\w+>": 16384,
    "pick_sorted": 8192 + 512 + 32 + 32,
}
# put_by_warps, which nearly all kernels come to by one way or another.
_PUT = 4096
# top_k_alone: counts, what is picked of them, and sums.
_TOP_K = 8192 + 512 + 32 + 2048 + 32 + 64


def shared_bytes(text: str) -> int:
    """Shared memory of all kernels in a text together; each has its own.

    Raises:
        TypeError: a declaration is not understood.
    """
    total = _PUT
    for kind, count in _DECLARED.findall(text):
        total += _SIZES[kind] * (_value(count) if count else 1)
    for name, size in _CALLED.items():
        total += size * len(set(re.findall(rf"\b{name}\(", text)))
    return total


def _value(text: str) -> int:
    """The value of a length that the emitter writes: products, quotients and a sum of numbers."""
    if re.fullmatch(r"[\w */+]+", text) is None:
        raise TypeError(f"a length of shared memory must be made of numbers. Received: {text}")
    total = 0
    for term in text.split("+"):
        value = 1
        for sign, word in re.findall(r"([*/]?) *(\w+)", term):
            number = _CONSTANTS[word] if word in _CONSTANTS else int(word)
            value = value // number if sign == "/" else value * number
        total += value
    return total


def alone_tiles(launches: Sequence[Launch], text: str, *, is_decode: bool) -> int:
    """Up to how many tiles one block of threads does all of a call; 0: never.

    A kernel that must be started is taken to cost as much as a tile that is not done at once with
    the others (not measured). A single kernel starts as quickly for many blocks.

    Args:
        launches: of the call.
        text: of its kernels.
        is_decode: a report is set, and packets are checked, before.
    """
    number = sum(launch.number for launch in launches) + (2 if is_decode else 0)
    has_top_k = any("top_k_alone" in launch.alone for launch in launches)
    needed = shared_bytes(text) + (_TOP_K if has_top_k else 0)
    return 0 if number < 2 or needed > _MAX_SHARED_BYTES else min(number, _MOST_TILES)
