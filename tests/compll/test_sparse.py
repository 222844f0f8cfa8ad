# SPDX-License-Identifier: Apache-2.0
"""filter, sort, top_k, sample and scatter: their meaning, and that compiled code has the same."""

import re
import struct

import numpy as np
import pytest

import compll
from compll.backends import select
from compll.backends.reference import Key
from compll.ir import nodes
from compll.passes import optimise
from compll.passes.fold import fold
from compll.passes.inline import inline
from tests.compll.support import SIZES, assert_same_floats, compiled, encoder, gradients

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

PREFIX = 16
EVERYTHING = encoder(
    """
    lambda_func large = [&](float g) -> uint1 { return abs(g) > limit; }
    float* big = filter(gradient, large);
    int* where = filter(range(gradient.size), [&](int i) -> int { return gradient[i] > limit; }, 9);
    float* squares = map(big, [&](float g) -> float { return g * g; });
    float* some = filter(map(squares, [&](float s) -> float { return s - 1; }), large, 50);
    float* up = sort(gradient, less);
    float* down = sort(some, [&](float a, float b) -> uint1 { return b < a; });
    int* codes = map(gradient, [&](float g) -> int { return g * 100; });
    int* sorted = sort(codes, greater);
    lambda_func shaken = [&](float g) -> float { return g * random<float>(0, 1); }
    float* drawn = sample(map(gradient, shaken), 31);
    float* twice = sample(sample(gradient, 40), 31);
    int* best = top_k(gradient, gradient.size / 3 + 2);
    int* few = top_k(some, 4);
    float total = reduce(some, 0, sum);
    float middle = sort(sample(gradient, 101), less)[50];
    uint32 count = some.size;
    uint32 counts = big.size + where.size + few.size + best.size + squares.size;
    uint32* at = map(where, [&](int i) -> uint32 { return i; });
    uint16* low = map(best, [&](int i) -> uint16 { return i; });
    uint<3>* bits = map(few, [&](int i) -> uint<3> { return i + sorted[0]; });
    uint16* tops = map(sorted, [&](int c) -> uint16 { return c; });
    out = concat(
        count, counts, some, up, drawn, twice, low, total, middle, bits, at, down, big, tops);""",
    ", float limit",
)
SPARSE = """
param Foo {
    int k in [0, 1000] = 40;
    int padding in [0, 8] = 3;
}
void FooEncode(float* gradient, uint8* out, int k, int padding) {
    int* kept = top_k(map(gradient, [&](float g) -> float { return abs(g); }), k);
    uint16* low = map(kept, [&](int i) -> uint16 { return i; });
    uint4* high = map(kept, [&](int i) -> uint4 { return i >> 16; });
    float* values = map(kept, [&](int i) -> float { return gradient[i]; });
    float* spare = filter(values, [&](float x) -> uint1 { return x > 100; }, k + padding);
    uint16 count = kept.size;
    out = concat(count, low, high, values, spare);
}
void FooDecode(uint8* packet, float* gradient, int k, int padding) {
    uint16 count;
    uint16* low;
    uint4* high;
    float* values;
    float* spare;
    extract(packet, count, low, high, values, spare);
    int* where = map(range(low.size), [&](int i) -> int { return low[i] + (high[i] << 16); });
    RESULT
}
"""
RESULTS = {
    "scatter": "gradient = scatter(gradient.size, where, values, count);",
    "map of a scatter": """
    float* whole = scatter(gradient.size, where, values, count);
    gradient = map(whole, [&](float x) -> float { return 2 * x + 1; });""",
}


def test_what_operators_mean():
    x = np.array([3, np.nan, -1, 0.0, -0.0, 3, np.inf, -np.inf, np.nan, 1e-45], np.float32)
    up, down = select.sort(x, False), select.sort(x, True)
    expected = np.array([-np.inf, -1, -0.0, 0.0, 1e-45, 3, 3, np.inf, np.nan, np.nan], np.float32)
    assert_same_floats(up, expected)
    assert_same_floats(down, np.concatenate([expected[:8][::-1], expected[8:]]))
    assert select.sort(np.array([2, -5, 7]), True).tolist() == [7, 2, -5]
    order = [6, 0, 5, 9, 3, 4, 2, 7, 1, 8]
    for k in range(12):
        assert select.top_k(x, k).tolist() == sorted(order[:k])
    assert select.top_k(x, -1).size == 0

    def scatter(*places, n=5, used=None):
        values = np.arange(1, len(places) + 1, dtype=np.float32)
        return select.scatter(n, np.array(places, np.int64), values, used).tolist()

    assert scatter(0, 2, 4) == [1, 0, 2, 0, 3]
    assert scatter(1, 0, 0, used=1) == [0, 1, 0, 0, 0]
    assert scatter(used=0) == [0] * 5
    for bad in ((1, 1), (2, 1), (-1, 2), (3, 5)):
        with pytest.raises(compll.PacketError, match="indices of a packet must ascend within 0"):
            scatter(*bad)
    for used in (-1, 3):
        with pytest.raises(compll.PacketError, match="must have at most 2 values"):
            scatter(1, 2, used=used)


def test_packets_of_every_operator():
    program = compll.compile_text(EVERYTHING, "everything")
    for limit in (0.0, 1.5):
        reference, codec = compll.Reference(program, limit=limit), compiled(program, limit=limit)
        for n in SIZES:
            for kind, x in gradients(n).items():
                if n > 2000 and kind not in ("broken", "constant"):
                    continue
                # Elements 2^35 apart share the low word of noise's counter.
                where = {"seed": 5, "offset": 3 if kind == "plain" else 2**35 + 3}
                expected, packet = reference.encode(x, **where), codec.encode(x, **where)
                assert packet.tobytes() == expected.tobytes(), (n, kind)
                assert packet.size == codec.wire_bytes(n) == reference.wire_bytes(n)


def test_what_a_packet_holds():
    """Elements first, zeros behind; a sample is of the vector, and of the key."""
    program = compll.compile_text(EVERYTHING, "everything")
    codec = compiled(program, limit=0.5)
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    body = codec.encode_body(x, seed=1).tobytes()
    big = x[np.abs(x) > 0.5]
    some = (big * big - np.float32(1))[np.abs(big * big - np.float32(1)) > 0.5][:50]
    count, counts = struct.unpack_from("<II", body)
    assert (count, counts) == (some.size, 2 * big.size + 9 + 4 + 335)
    floats = np.frombuffer(body, np.float32, 50 + 1000 + 31, 8)
    np.testing.assert_array_equal(floats[:50], some)
    np.testing.assert_array_equal(floats[50:1050], np.sort(x))
    assert struct.unpack_from("<1000f", codec.encode_body(x, seed=2), 8 + 4 * 50) == tuple(
        floats[50:1050]
    )
    drawn = [codec.encode_body(x, seed=seed)[8 + 4 * 1050 :][: 4 * 31] for seed in (1, 1, 2)]
    assert drawn[0].tobytes() == drawn[1].tobytes() != drawn[2].tobytes()

    few = codec.encode_body(np.full(20, 0.1, np.float32)).tobytes()
    assert struct.unpack_from("<II", few) == (0, 8)
    assert not any(few[8 : 8 + 4 * 20])


def test_samples_are_drawn_evenly():
    text = encoder("    float* s = sample(gradient, 50000);\n    out = concat(s);")
    program = compll.compile_text(text, "sample")
    x = np.arange(10, dtype=np.float32)
    body = compll.Reference(program).encode_body(x, Key(1, 2, 3, 0))
    counts = np.bincount(np.frombuffer(body, np.float32).astype(int), minlength=10)
    # Five standard deviations of a binomial count.
    assert np.abs(counts - 5000).max() < 5 * np.sqrt(50000 * 0.1 * 0.9)


@pytest.mark.parametrize("name", RESULTS)
def test_decoders_agree(name):
    program = compll.compile_text(SPARSE.replace("RESULT", RESULTS[name]), "sparse")
    reference, codec = compll.Reference(program), compiled(program)
    for n in SIZES:
        for kind, x in gradients(n).items():
            if n > 2000 and kind not in ("broken", "constant"):
                continue
            packet = reference.encode(x, seed=5)
            assert codec.encode(x, seed=5).tobytes() == packet.tobytes(), (n, kind)
            decoded = reference.decode(packet, n)
            assert_same_floats(codec.decode(packet, n), decoded)
            if name == "scatter":
                kept = select.top_k(np.abs(x), 40)
                np.testing.assert_array_equal(decoded[kept], x[kept])
                assert np.count_nonzero(decoded) == np.count_nonzero(x[kept])
            added = np.full(n, 0.5, np.float32)
            codec.decode_body(packet[PREFIX:], added, add=True)
            assert_same_floats(added, np.float32(0.5) + decoded)


@pytest.mark.parametrize("name", RESULTS)
def test_passes_keep_the_meaning(name):
    for text in (SPARSE.replace("RESULT", RESULTS[name]), EVERYTHING):
        program = compll.compile_text(text, "sparse")
        params = {"limit": 0.5} if text is EVERYTHING else {}
        reference = compll.Reference(program, **params)
        for change in (inline, lambda p: fold(inline(p))):
            changed = compll.Reference(change(program), **params)
            for n in (0, 1, 9, 1030):
                x, key = gradients(n)["broken"], Key(1, 2, 3, 4)
                body = reference.encode_body(x, key)
                assert changed.encode_body(x, key) == body
                if program.decode is not None:
                    assert_same_floats(changed.decode_body(body, n), reference.decode_body(body, n))


@pytest.mark.parametrize("name", RESULTS)
def test_hostile_bodies_are_refused(name):
    """Any body decodes alike in both, or is refused by both and leaves the output as it was."""
    program = compll.compile_text(SPARSE.replace("RESULT", RESULTS[name]), "sparse")
    reference, codec = compll.Reference(program), compiled(program)
    rng = np.random.default_rng(7)
    n, refused = 70_000, 0
    good = codec.encode_body(rng.normal(size=n).astype(np.float32))
    bodies = [good]
    for _ in range(150):
        body = good.copy()
        for at in rng.integers(0, 2 + 40 * 2 + 20 if rng.random() < 0.8 else body.size, 2):
            body[at] = rng.integers(0, 256)
        bodies.append(body)
    bodies += [rng.integers(0, 256, good.size).astype(np.uint8) for _ in range(20)]
    bodies += [np.zeros_like(good), np.full_like(good, 255)]
    for body in bodies:
        out = np.full(n, 7, np.float32)
        try:
            expected = reference.decode_body(body.tobytes(), n)
        except compll.PacketError:
            refused += 1
            with pytest.raises(compll.PacketError):
                codec.decode_body(body, out)
            assert (out == 7).all()
            continue
        codec.decode_body(body, out)
        assert_same_floats(out, expected)
    assert 60 < refused < len(bodies) - 20


def test_a_scatter_that_nobody_reads_still_refuses():
    text = SPARSE.replace(
        "RESULT",
        """float* unused = scatter(gradient.size, where, values);
    gradient = map(range(gradient.size), [&](int i) -> float { return i; });""",
    )
    program = compll.compile_text(text, "unused")
    x = np.arange(100, dtype=np.float32)
    for codec in (compll.Reference(program), compiled(program)):
        packet = codec.encode(x)
        np.testing.assert_array_equal(codec.decode(packet, 100), x)
        packet[PREFIX + 2 + 1] = 1
        with pytest.raises(compll.PacketError):
            codec.decode(packet, 100)


def test_vectors_are_kept_once():
    steps = optimise(compll.compile_text(EVERYTHING, "everything")).encode
    kept = [step.var.name for step in steps if isinstance(step, nodes.Store)]
    assert sorted(kept) == sorted(
        ["big", "where", "some", "up", "down", "sorted", "best", "few", "kept"]
    )


PLACES = """
    lambda_func large = [&](float g) -> uint1 { return g > 0.5; }
    int* where = filter(range(gradient.size), [&](int i) -> uint1 { return large(gradient[i]); });
    float* sizes = map(where, [&](int i) -> float { return gradient[i] * 2; });
    int* best = top_k(sizes, 40);
    lambda_func behind = [&](int j) -> float { return gradient[where[j + 3]] + gradient[j]; }
    float* beyond = map(range(60), behind);
    float* values = map(best, [&](int j) -> float { return gradient[where[j]]; });
    float total = reduce(map(where, [&](int i) -> float { return gradient[i]; }), 0, sum);
    out = concat(total, beyond, values);"""


def test_what_was_filtered_is_kept_beside_its_places():
    program = compll.compile_text(encoder(PLACES), "places")
    source = compll.generate(program)["places.codec.cc"]
    behind = source.partition("where_count = std::min")[2].partition("store_float(")[0]
    # Of the gradient itself: element j in order, and element 0, which a place that is not there is.
    assert behind.count("value_or(where_gradient, ") == 2
    assert len(re.findall(r"\bin\[|value_at\(in, n, [^0]", behind)) == 1
    reference, codec = compll.Reference(program), compiled(program)
    for n in (0, 1, 7, 300, 5000):
        for kind, x in gradients(n).items():
            expected = reference.encode(x).tobytes()
            assert codec.encode(x).tobytes() == expected, (n, kind)


LONGER_PLACES = """
    int* where = filter(range(gradient.size + 3), [&](int i) -> uint1 { return gradient[i] >= 0; });
    float* values = map(where, [&](int i) -> float { return gradient[i] + 1; });
    uint32* places = map(where, [&](int i) -> uint32 { return i; });
    out = concat(places, values);"""


def test_places_behind_the_gradient_hold_0():
    program = compll.compile_text(encoder(LONGER_PLACES), "longer")
    reference, codec = compll.Reference(program), compiled(program)
    behind = np.full(16, 7, np.float32)  # what is in memory there belongs to nobody
    for n in (0, 5, 13):
        x = behind[:n]
        assert codec.encode(x).tobytes() == reference.encode(x).tobytes(), n


def test_a_limit_may_be_more_than_any_vector_has():
    text = encoder(
        "out = concat(filter(gradient, [&](float g) -> uint1 { return g > 0; }, k));", ", int k"
    )
    program = compll.compile_text(text, "limited")
    x = np.arange(-2, 3, dtype=np.float32)
    whole = compll.Reference(program, k=5).encode(x)[PREFIX:]
    for k in (2**40 + 1, 2**53):
        np.testing.assert_array_equal(compll.Reference(program, k=k).encode(x)[PREFIX:], whole)


def test_long_chains_are_refused_not_followed():
    """Each cut is a level of the length's expression; maps and sorts are not."""
    step = "float* v{0} = sort(filter(v{1}, [&](float g) -> uint1 {{ return g > 0; }}{2}), less);\n"
    for limit, is_refused, count in ((", 5", True, 300), ("", False, 120)):
        lines = "".join(step.format(k + 1, k, limit) for k in range(count))
        text = encoder(
            f"float* v0 = map(gradient, [&](float g) -> float {{ return g; }});\n{lines}"
            f"out = concat(v{count});"
        )
        if is_refused:
            with pytest.raises(compll.CompileError, match="E403"):
                compll.compile_text(text, "chain")
        else:
            optimise(compll.compile_text(text, "chain"))
