# SPDX-License-Identifier: Apache-2.0
"""Parameters of a loaded codec that are in their ranges, and make a codec that cannot be."""

from pathlib import Path

import pytest

import tf_hips
from tests.support import hurried
from tf_hips.ops import error_feedback, native, parse

SPEC = """
param Scaled {
    int bits in [1, 32] = 4;
    int block in [16, 1024] = 128;
}

void ScaledEncode(float* gradient, uint8* packet, int bits, int block) {
    float* sizes = map(gradient, [&](float g) -> float { return abs(g); });
    float* scales = block_reduce(sizes, block, 0, max);
    uint<bits>* codes = map(range(gradient.size), [&](int i) -> uint<bits> {
        return gradient[i] / scales[i / block];
    });
    packet = concat(scales, codes);
}

void ScaledDecode(uint8* packet, float* gradient, int bits, int block) {
    float* scales;
    uint<bits>* codes;
    extract(packet, scales, codes);
    gradient = map(range(gradient.size), [&](int i) -> float {
        return codes[i] * scales[i / block];
    });
}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A specification, compiled in a hurry into a cache of its own."""
    hurried.cache_of_its_own(tmp_path, monkeypatch)
    file = tmp_path / "scaled.pse"
    file.write_text(SPEC)
    return file


def test_bad_blocks_and_widths_are_refused_when_a_compressor_is_made(spec: Path) -> None:
    codec = tf_hips.load(spec)
    for block in (16, 128, 1024):
        good = codec(bits=16, block=block)
        assert native.wire_bytes(good, 2048) == 16 + 2 * 2048 + 4 * (2048 // block)
        assert parse(good.text) == error_feedback(good).codec == good
    for bits, block in ((4, 100), (4, 1000), (20, 128), (17, 100)):
        shown = rf"blocks of 16, 32.*widths from 1 to 16.*Received: bits={bits}, block={block}$"
        with pytest.raises(ValueError, match=shown):
            codec(bits=bits, block=block)
        with pytest.raises(ValueError, match=shown):
            parse(f"error_feedback({spec}(bits={bits}, block={block}))", files=True)
    with pytest.raises(ValueError, match=r"`block` must be in \[16, 1024\]"):
        codec(block=8)
