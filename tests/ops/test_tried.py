# SPDX-License-Identifier: Apache-2.0
"""What is found out about a loaded codec by trying it."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

import tf_hips
from tests.support import hurried
from tf_hips.ops import error_feedback
from tf_hips.ops.jit import LoadedCodec
from tf_hips.ops.repeats import times_sent

pytestmark = pytest.mark.heavy  # compiles

Load: TypeAlias = Callable[[str, str], LoadedCodec]

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

# Uniform, unbiased, with a grain that no tensor chooses.
DITHERED = """
param Dithered { float grain in [0.001, 1000] = 1; }

void DitheredEncode(float* gradient, uint8* packet, float grain) {
    packet = concat(map(gradient, [&](float x) -> uint16 {
        return floor(x / grain + random<float>(0, 1)) + 32768;
    }));
}

void DitheredDecode(uint8* packet, float* gradient, float grain) {
    uint16* codes;
    extract(packet, codes);
    gradient = map(codes, [&](uint16 c) -> float { return (c - 32768) * grain; });
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

# A momentum in a state, sent as 16 bits.
RUNNING = """
param Running { float decay in [0, 0.999] = 0.9; }

state Running { float* velocity; }

void RunningEncode(float* gradient, uint8* packet, float decay) {
    velocity = map(range(gradient.size), [&](int i) -> float {
        return decay * velocity[i] + gradient[i];
    });
    lambda_func high = [&](float v) -> uint16 { return bitcast<uint32>(v) >> 16; }
    packet = concat(map(velocity, high));
}

void RunningDecode(uint8* packet, float* gradient, float decay) {
    uint16* high;
    extract(packet, high);
    gradient = map(high, [&](uint16 x) -> float { return bitcast<float>(x << 16); });
}
"""

# A residual in a state: what is not sent waits.
LATE = """
state Late { float* residual; }

void LateEncode(float* gradient, uint8* packet) {
    float* wanted = map(range(gradient.size), [&](int i) -> float {
        return residual[i] + gradient[i];
    });
    float most = reduce(map(wanted, [&](float w) -> float { return abs(w); }), 0, max);
    uint2* codes = map(wanted, [&](float w) -> uint2 {
        return abs(w) < most / 2 ? 0 : w < 0 ? 2 : 1;
    });
    residual = map(range(gradient.size), [&](int i) -> float {
        return wanted[i] - (codes[i] == 0 ? 0.0 : codes[i] == 1 ? most : -most);
    });
    packet = concat(most, codes);
}

void LateDecode(uint8* packet, float* gradient) {
    float most;
    uint2* codes;
    extract(packet, most, codes);
    gradient = map(codes, [&](uint2 c) -> float { return c == 0 ? 0.0 : c == 1 ? most : -most; });
}
"""


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Loads a specification, compiled in a hurry into a cache of its own."""
    folder = tmp_path_factory.mktemp("specs")

    def load(name: str, text: str) -> LoadedCodec:
        file = folder / f"{name}.pse"
        file.write_text(text)
        return tf_hips.load(file)

    with pytest.MonkeyPatch.context() as patch:
        hurried.cache_of_its_own(folder, patch)
        yield load


def test_growth_that_is_no_faster_than_a_power_of_the_steps_is_seen(load: Load) -> None:
    dither = load("dither", NATURAL_DITHERING)
    with pytest.raises(
        ValueError,
        match=r"of 1000 elements, residuals grow without bound. Received: dither@.*\(s=4\)",
    ):
        error_feedback(dither(s=4))


def test_growth_that_only_large_tensors_have_is_seen(load: Load) -> None:
    dither = load("dither", NATURAL_DITHERING)
    with pytest.raises(ValueError, match=r"a tensor of 1048576 elements, residuals grow without"):
        error_feedback(dither(s=7))
    assert error_feedback(dither(s=15)).has_residual


def test_what_sends_late_is_no_growth(load: Load) -> None:
    sparse = load("sparse", SPARSE_TERNARY)
    for ratio in (0.001, 0.01, 1.0):
        assert error_feedback(sparse(ratio=ratio)).has_residual


def test_a_grain_far_larger_than_the_noise_is_no_growth(load: Load) -> None:
    """A residual is never larger than the grain, and larger than all gradients of the trial."""
    dithered = load("dithered", DITHERED)
    for grain in (1.0, 1000.0):
        assert error_feedback(dithered(grain=grain)).has_residual


def test_how_often_a_movement_is_sent(load: Load) -> None:
    running = load("running", RUNNING)
    # 1 + decay + decay^2 + ..., for what 16 bits of each term are.
    for decay, expected in ((0.0, 1.0), (0.5, 2.0), (0.9, 10.0)):
        assert times_sent(running(decay=decay)) == pytest.approx(expected, rel=0.01)
    late = load("late", LATE)
    assert times_sent(late()) == pytest.approx(1.0, rel=0.01)
