# SPDX-License-Identifier: Apache-2.0
"""Packets of a few elements, worked out here from what each specification's header says.

Nothing of compll is used, its noise neither: the interpreter, to which all else is compared, is
compared with the formulae of the papers and the layout of the bytes.
"""

import math
import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.ops.codecs import encoded
from tf_hips.ops import REGISTRY, Compressor, Key, native, parse

F = np.float32
KEY = Key(seed=0x123456789ABCDEF1, step=9, tensor_id=4, offset=19)
ELEMENTS = [0.3, -1.25, 2.5, -0.0, 0.75]
PREFIX_BYTES = 16

By = Callable[[Sequence[float], dict[str, float]], bytes]


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Philox4x32-10 (Salmon et al., 2011)."""
    low, high = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        one, two = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (two >> 32) ^ c1 ^ low, two % 2**32
        c2, c3 = (one >> 32) ^ c3 ^ high, one % 2**32
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def block(number: int) -> tuple[int, ...]:
    key = (KEY.seed % 2**32, KEY.seed >> 32)
    return philox(key, (number % 2**32, number >> 32, KEY.step, KEY.tensor_id))


def noise(element: int) -> int:
    """The 16 bits of an element."""
    number, lane = divmod(element + KEY.offset, 8)
    words = block(number)
    return words[lane // 2] >> 16 * (lane % 2) & 0xFFFF


def drawn(x: Sequence[float], count: int) -> list[float]:
    """`count` elements, drawn with replacement by 32 bits each, the largest first."""
    places = [divmod(e + KEY.offset, 4) for e in range(count)]
    words = [block(number)[word] for number, word in places]
    return sorted((abs(x[word * len(x) >> 32]) for word in words), reverse=True)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def packed(codes: Sequence[int], width: int) -> bytes:
    """Codes without gaps, least significant bits first."""
    stream = sum(code << width * k for k, code in enumerate(codes))
    return stream.to_bytes(-(-len(codes) * width // 8), "little")


def hashed(value: int) -> int:
    """The finalizer of MurmurHash3, but for its last step."""
    value = (value ^ value >> 16) * 2246822507 % 2**32
    return (value ^ value >> 13) * 3266489909 % 2**32


def number_sent(x: Sequence[float], p: dict[str, float]) -> int:
    return min(len(x), max(1, math.ceil(F(len(x)) * F(p["ratio"]))))


def largest(x: Sequence[float], k: int) -> list[int]:
    """The places of the k largest sizes, of equals the first; ascending."""
    return sorted(sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))[:k])


def low_and_high(kept: Sequence[int], room: int) -> tuple[bytes, bytes]:
    """Places as 16 and as 4 bits, zeros behind them."""
    places = [*kept, *[0] * (room - len(kept))]
    return struct.pack(f"<{room}H", *(i % 2**16 for i in places)), packed(
        [i >> 16 for i in places], 4
    )


def filled(x: Sequence[float], kept: Sequence[int], room: int) -> bytes:
    return floats(*(x[i] for i in kept), *[0] * (room - len(kept)))


def onebit(x: Sequence[float], p: dict[str, float]) -> bytes:
    below, others = [v for v in x if v < 0], [v for v in x if not v < 0]
    means = [float(sum(map(F, side), F(0)) / F(max(len(side), 1))) for side in (below, others)]
    return floats(*means) + packed([v < 0 for v in x], 1)


def tbq(x: Sequence[float], p: dict[str, float]) -> bytes:
    return packed([2 if v >= p["tau"] else 0 if v <= -p["tau"] else 1 for v in x], 2)


def hips2bit(x: Sequence[float], p: dict[str, float]) -> bytes:
    codes = [3 if v >= p["threshold"] else 2 if v <= -p["threshold"] else 0 for v in x]
    codes += [0] * (-len(x) % 16)
    return b"".join(packed(codes[k : k + 4][::-1], 2) for k in range(0, len(codes), 4))


def terngrad(x: Sequence[float], p: dict[str, float]) -> bytes:
    bits, least, most = int(p["bitwidth"]), F(min(x)), F(max(x))
    gap = (most - least) / F(2**bits - 1)
    codes = [int((F(v) - least) / gap + F(noise(i) / 2**16)) for i, v in enumerate(x)]
    head = bytes([bits, len(x) % 2**bits]) + floats(least, most)
    return head + packed([min(code, 2**bits - 1) for code in codes], bits)


def qsgd(x: Sequence[float], p: dict[str, float]) -> bytes:
    bits = int(p["bits"])
    s = 2 ** (bits - 1) - 1
    step = F(max(map(abs, x))) / F(s)
    levels = [F(v) * (F(1) / step) + F(s) for v in x]
    codes = [int(level + F(noise(i) / 2**16)) for i, level in enumerate(levels)]
    return floats(step) + packed(codes, bits)


def natural(x: Sequence[float], p: dict[str, float]) -> bytes:
    codes = []
    for i, v in enumerate(x):
        (word,) = struct.unpack("<I", floats(v))
        goes_up = word % 2**23 + noise(i) * 2**7 + 2**6 >= 2**23
        codes.append((word >> 23) + goes_up)
    return packed(codes, 9)


def int8(x: Sequence[float], p: dict[str, float]) -> bytes:
    scale = F(max(map(abs, x))) / F(127)
    return floats(scale) + bytes(int(F(v) * (F(1) / scale) + F(128.5)) for v in x)


def fp8(x: Sequence[float], p: dict[str, float]) -> bytes:
    mantissa = int(p["format"])
    bias, most = {3: (7, 448), 2: (15, 57344)}[mantissa]
    scale = F(max(map(abs, x))) / F(most)
    sizes = []
    for code in range(0x7F if mantissa == 3 else 0x7C):
        exponent, rest = divmod(code, 2**mantissa)
        share = rest / 2**mantissa
        sizes.append(math.ldexp(share + (exponent > 0), max(exponent, 1) - bias))
    codes = []
    for v in x:
        size = float(F(abs(v)) * (F(1) / scale))
        nearest = min(range(len(sizes)), key=lambda c: (abs(sizes[c] - size), c % 2))
        codes.append(nearest | 0x80 * (math.copysign(1, v) < 0))
    return floats(scale) + bytes(codes)


def fp16(x: Sequence[float], p: dict[str, float]) -> bytes:
    return np.array(x, np.float16).tobytes()


def bf16(x: Sequence[float], p: dict[str, float]) -> bytes:
    codes = []
    for v in x:
        (word,) = struct.unpack("<I", floats(v))
        up, rest = divmod(word, 2**16)
        codes.append(up + (rest > 2**15 or (rest == 2**15 and up % 2 == 1)))
    return struct.pack(f"<{len(x)}H", *codes)


def fp32(x: Sequence[float], p: dict[str, float]) -> bytes:
    return floats(*x)


def topk(x: Sequence[float], p: dict[str, float]) -> bytes:
    k = number_sent(x, p)
    kept = largest(x, k)
    return b"".join((*low_and_high(kept, k), filled(x, kept, k)))


def randomk(x: Sequence[float], p: dict[str, float]) -> bytes:
    n, k = len(x), number_sent(x, p)
    key, kept = noise(0) + (noise(1) << 16), []
    for part in range(k):
        bits = hashed((part * 2654435769 + key) % 2**32)
        bits ^= bits >> 16
        first, last = part * n // k, (part + 1) * n // k
        kept.append(first + (bits * (last - first) >> 32))
    return struct.pack("<I", key) + filled(x, kept, k)


def graddrop(x: Sequence[float], p: dict[str, float]) -> bytes:
    n, k = len(x), number_sent(x, p)
    m = min(n, max(math.ceil(n * p["sampled"]), math.ceil(16 / p["ratio"])))
    threshold = drawn(x, m)[max(1, math.ceil(F(m) * F(p["ratio"]))) - 1]
    found = [i for i in range(n) if abs(x[i]) >= threshold and x[i] != 0][: 2 * k]
    kept = [found[j] for j in largest([x[i] for i in found], k)]
    head = struct.pack("<I", len(kept))
    return b"".join((head, *low_and_high(kept, k), filled(x, kept, k)))


def bisparse(x: Sequence[float], p: dict[str, float]) -> bytes:
    n, k = len(x), number_sent(x, p)
    m = min(n, math.ceil(10 / p["ratio"]))  # of so few elements
    threshold = drawn(x, m)[max(1, int(F(m) * F(p["ratio"]))) - 1]
    kept = [i for i in range(n) if abs(x[i]) >= threshold and x[i] != 0][:k]
    head = struct.pack("<I", len(kept))
    return b"".join((head, filled(x, kept, k), *low_and_high(kept, k)))


def eden(x: Sequence[float], p: dict[str, float]) -> bytes:
    """Of 8 elements, which hadamard takes as they are."""
    bits, salt = int(p["bits"]), noise(0) + (noise(1) << 16)
    r = np.array([-v if hashed((i + salt) % 2**32) >> 31 else v for i, v in enumerate(x)])
    for stride in (1, 2, 4):
        pairs = r.reshape(-1, 2, stride)
        r = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
    r = r / math.sqrt(len(x))
    z = r * math.sqrt(len(x)) / np.linalg.norm(r)
    centroids = np.array({1: [0.79788456], 2: [0.45278003, 1.51041761]}[bits])
    levels = np.abs(np.abs(z)[:, None] - centroids).argmin(1)
    half = 2 ** (bits - 1)
    codes = np.where(z < 0, half - 1 - levels, half + levels)
    scale = r @ r / (r @ (np.sign(z) * centroids[levels]))
    return struct.pack("<I", salt) + floats(scale) + packed(codes.tolist(), bits)


EIGHT = [*ELEMENTS, 0.1, -0.2, 3.0]
CASES: list[tuple[str, By, Sequence[float]]] = [
    *(("bf16", bf16, ELEMENTS), ("fp16", fp16, ELEMENTS), ("fp32", fp32, ELEMENTS)),
    *(("fp16", fp16, [0.3, 1e-7, -6e-5, 65504, 3e-6]), ("bf16", bf16, [1e-42, 3e38, -0.0, 1, 7])),
    *((f"bisparse({ratio})", bisparse, ELEMENTS) for ratio in (0.01, 0.4, 1)),
    *((f"graddrop({ratio}, 0.5)", graddrop, ELEMENTS) for ratio in (0.01, 0.4, 1)),
    *((f"randomk({ratio})", randomk, ELEMENTS) for ratio in (0.01, 0.5, 1)),
    *((f"topk({ratio})", topk, ELEMENTS) for ratio in (0.01, 0.4, 0.41, 1)),
    *((f"eden({bits}, 16)", eden, EIGHT) for bits in (1, 2)),
    *((f"fp8({kind}, 16)", fp8, [0.3, -1.25, 2.5, -0.0, 1e-4]) for kind in ("e4m3", "e5m2")),
    *(("hips2bit(0.75)", hips2bit, ELEMENTS), ("tbq(0.75)", tbq, ELEMENTS)),
    *(("int8(16)", int8, ELEMENTS), ("natural", natural, ELEMENTS), ("onebit", onebit, ELEMENTS)),
    *((f"qsgd({bits}, 16)", qsgd, ELEMENTS) for bits in range(2, 9)),
    *((f"terngrad({bits})", terngrad, ELEMENTS) for bits in range(1, 9)),
]


@pytest.mark.parametrize(
    ("text", "by_hand", "x"), CASES, ids=[f"{text} of {str(x)[:24]}" for text, _, x in CASES]
)
def test_packets_are_what_the_headers_say(text: str, by_hand: By, x: Sequence[float]) -> None:
    compressor = parse(text)
    values = np.array(x, F)
    packet = encoded(compressor, values, KEY).tobytes()[PREFIX_BYTES:]
    expected = by_hand([float(v) for v in values], dict(compressor.params))
    if compressor.name == "eden":  # its sums are rounded otherwise
        np.testing.assert_allclose(
            np.frombuffer(packet[4:8], "<f4"), np.frombuffer(expected[4:8], "<f4"), rtol=1e-6
        )
        packet, expected = packet[:4] + packet[8:], expected[:4] + expected[8:]
    assert packet.hex() == expected.hex()


@pytest.mark.parametrize("nesterov", [0, 1])
def test_dgc_sends_and_keeps_what_the_paper_says(nesterov: int) -> None:
    compressor = Compressor(
        "dgc", (("ratio", 0.4), ("momentum", 0.9), ("nesterov", nesterov), ("clip_norm", 0.0))
    )
    state = np.array([[0.1, 0.2, -0.3, 0.5, 1], [1, -2, 0.25, 0, 4]], F)
    x, (u, v), m = np.array(ELEMENTS, F), state.copy(), F(0.9)
    u = m * (u + x) if nesterov else m * u + x
    v = v + u + x if nesterov else v + u
    packet = native.encode(compressor, x, KEY, state)
    kept = largest(v.tolist(), 2)
    expected = b"".join((*low_and_high(kept, 2), floats(*v[kept])))
    assert packet.tobytes()[PREFIX_BYTES:].hex() == expected.hex()
    u[kept], v[kept] = 0, 0
    np.testing.assert_array_equal(state, [u, v])


def test_every_algorithm_is_worked_out() -> None:
    assert sorted({text.partition("(")[0] for text, _, _ in CASES} | {"dgc"}) == sorted(REGISTRY)
