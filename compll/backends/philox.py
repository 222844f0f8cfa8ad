# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011), on NumPy vectors.

One block serves eight elements with 16 bits each: element e of a tensor uses block e // 8, lane e %
8. Or four with 32 bits each: block e // 4, word e % 4.
"""

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

U64 = npt.NDArray[np.uint64]


def philox4x32(
    counter: tuple[U64, U64, U64, U64], key: tuple[int, int]
) -> tuple[U64, U64, U64, U64]:
    """The four 32-bit words (as uint64) of ten rounds, for vectors of counter words and one key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (p1 >> _32) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _32) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def noise16(
    elements: npt.NDArray[np.int64], seed: int, step: int, tensor_id: int, site: int
) -> npt.NDArray[np.int64]:
    """The 16 random bits of each element (its index in the tensor) at call site `site`."""
    wanted = elements.astype(np.uint64)
    blocks, places = np.unique(wanted >> np.uint64(3), return_inverse=True)
    words = _words(blocks, seed, step, tensor_id, site)
    halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=2).reshape(
        len(blocks), 8
    )
    lanes = (wanted & np.uint64(7)).astype(np.int64)
    noise: npt.NDArray[np.int64] = halves[places.reshape(-1), lanes].astype(np.int64)
    return noise


def noise32(
    elements: npt.NDArray[np.int64], seed: int, step: int, tensor_id: int, site: int
) -> npt.NDArray[np.int64]:
    """The 32 random bits of each element: word e % 4 of block e // 4."""
    wanted = elements.astype(np.uint64)
    blocks, places = np.unique(wanted >> np.uint64(2), return_inverse=True)
    words = _words(blocks, seed, step, tensor_id, site)
    lanes = (wanted & np.uint64(3)).astype(np.int64)
    noise: npt.NDArray[np.int64] = words[places.reshape(-1), lanes].astype(np.int64)
    return noise


def _words(blocks: U64, seed: int, step: int, tensor_id: int, site: int) -> U64:
    """The four words of each block of a call site, [blocks, 4]."""
    fixed = [np.broadcast_to(np.uint64(word), blocks.shape) for word in (step, tensor_id)]
    key = (seed & 0xFFFFFFFF, (seed >> 32) ^ site)
    return np.stack(philox4x32((blocks & _LOW, blocks >> _32, fixed[0], fixed[1]), key), axis=1)
