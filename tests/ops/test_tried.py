# SPDX-License-Identifier: Apache-2.0
"""What is found out about a loaded codec by trying it."""

from pathlib import Path

import pytest

import tf_hips
from tests.support import hurried
from tf_hips.ops import error_feedback
from tf_hips.ops.jit import LoadedCodec

# Horvath et al., 2022: powers of two of the norm of all elements, unbiased.
NATURAL_DITHERING = """
param Dither { int s in [1, 15] = 7; }

void DitherEncode(float* gradient, uint8* packet, int s) {
    float norm = sqrt(reduce(map(gradient, [&](float g) -> float { return g * g; }), 0, sum));
    float inverse = norm > 0 ? 1 / norm : 0.0;
    float least = exp2(1 - s);
    uint<5>* codes = map(gradient, [&](float g) -> uint<5> {
        float x = min(abs(g) * inverse, 1.0);
        int e = floor(log2(x));
        int below = max(e, -s);
        float low = x < least ? 0.0 : exp2(below);
        float high = x < least ? least : 2 * low;
        int up = random<float>(0, 1) < (x - low) / (high - low);
        return (g < 0 ? 16 : 0) + (x < least ? up : below + s + up);
    });
    packet = concat(norm, codes);
}

void DitherDecode(uint8* packet, float* gradient, int s) {
    float norm;
    uint<5>* codes;
    extract(packet, norm, codes);
    gradient = map(codes, [&](uint<5> c) -> float {
        int level = c & 15;
        float size = level == 0 ? 0.0 : exp2(level - s) * norm;
        return c >= 16 ? -size : size;
    });
}
"""

# Sattler et al., 2019: the sign of the largest elements, and their mean magnitude.
SPARSE_TERNARY = """
param Sparse { float ratio in [0.001, 1] = 0.01; }

void SparseEncode(float* gradient, uint8* packet, float ratio) {
    lambda_func size = [&](float g) -> float { return abs(g); }
    int k = ceil(gradient.size * ratio);
    int* kept = top_k(map(gradient, size), k);
    lambda_func magnitude = [&](int i) -> float { return abs(gradient[i]); }
    float mean = reduce(map(kept, magnitude), 0, sum) / max(kept.size, 1);
    uint1* signs = map(kept, [&](int i) -> uint1 { return gradient[i] < 0; });
    packet = concat(mean, map(kept, [&](int i) -> uint32 { return i; }), signs);
}

void SparseDecode(uint8* packet, float* gradient, float ratio) {
    float mean;
    uint32* kept;
    uint1* signs;
    extract(packet, mean, kept, signs);
    float* values = map(signs, [&](uint1 s) -> float { return s ? -mean : mean; });
    gradient = scatter(gradient.size, kept, values);
}
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Loads a specification, compiled in a hurry into a cache of its own."""
    hurried.cache_of_its_own(tmp_path, monkeypatch)

    def load(name: str, text: str) -> LoadedCodec:
        file = tmp_path / f"{name}.pse"
        file.write_text(text)
        return tf_hips.load(file)

    return load


def test_growth_that_is_no_faster_than_a_power_of_the_steps_is_seen(load) -> None:
    dither = load("dither", NATURAL_DITHERING)
    with pytest.raises(
        ValueError,
        match=r"of 1000 elements, residuals grow without bound. Received: dither@.*\(s=4\)",
    ):
        error_feedback(dither(s=4))


def test_growth_that_only_large_tensors_have_is_seen(load) -> None:
    dither = load("dither", NATURAL_DITHERING)
    with pytest.raises(ValueError, match=r"a tensor of 1048576 elements, residuals grow without"):
        error_feedback(dither(s=7))
    assert error_feedback(dither(s=15)).has_residual


def test_what_sends_late_is_no_growth(load) -> None:
    sparse = load("sparse", SPARSE_TERNARY)
    for ratio in (0.001, 0.01, 1.0):
        assert error_feedback(sparse(ratio=ratio)).has_residual
