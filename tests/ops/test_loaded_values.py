# SPDX-License-Identifier: Apache-2.0
"""What is loaded and cannot be used: values of parameters, libraries of half a codec, a codec that
refuses its own packets, and one that another thread is loading."""

import threading
from pathlib import Path

import numpy as np
import pytest

import tf_hips
from compll import pipeline, specification
from compll.specification import Specification
from tests.support import hurried
from tf_hips.errors import LibraryError, PacketError, SpecificationError
from tf_hips.ops import (
    Key,
    error_feedback,
    jit,
    loaded,
    native,
    parse,
    registry,
    specifications,
)

pytestmark = pytest.mark.heavy  # compiles

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


@pytest.mark.parametrize("lacks", ["Encode", "Decode"])
def test_a_library_of_half_a_codec_is_refused(spec: Path, lacks: str) -> None:
    """As its specification is."""
    halves = {
        "Decode": "void HalfEncode(float* g, uint8* out, float scale) { out = concat(g); }\n",
        "Encode": "void HalfDecode(uint8* packet, float* g, float scale) { extract(packet, g); }\n",
    }
    file = spec.with_name("half.pse")
    file.write_text(f"param Half {{ float scale in [1, 2]; }}\n{halves[lacks]}")
    with pytest.raises(SpecificationError, match=f"Encode and a Decode. Received: no {lacks}"):
        tf_hips.load(file)
    library = pipeline.build(specification.read(file), spec.parent)
    with pytest.raises(LibraryError, match=f"half.so must .* Encode and a Decode.*no {lacks}$"):
        tf_hips.load(library)
    assert tf_hips.load(pipeline.build(specification.read(spec), spec.parent))(bits=2).params


# Its indices descend, which no `scatter` takes.
DESCENDS = """
void DescendsEncode(float* gradient, uint8* packet) {
    uint16* at = map(range(min(4, gradient.size)), [&](int i) -> uint16 { return 3 - i; });
    float* values = map(at, [&](uint16 i) -> float { return gradient[i]; });
    packet = concat(at, values);
}

void DescendsDecode(uint8* packet, float* gradient) {
    uint16* at;
    float* values;
    extract(packet, at, values);
    int* places = map(at, [&](uint16 i) -> int { return i; });
    gradient = scatter(gradient.size, places, values);
}
"""


def test_error_feedback_around_a_codec_that_refuses_its_own_packets_is_refused(spec: Path) -> None:
    """And says so: its user has seen no packet."""
    file = spec.with_name("descends.pse")
    file.write_text(DESCENDS)
    codec = tf_hips.load(file)()
    packet = native.encode(codec, np.ones(8, np.float32), Key(1, 2, 3))
    with pytest.raises(PacketError):
        native.decode(codec, packet, 8)
    shown = rf"whose Decode takes what its Encode makes\. Received: {codec.text}, .*own \(.+\)"
    with pytest.raises(ValueError, match=shown):
        error_feedback(codec)


class Waiting(Exception):
    """A thread would wait here."""


class Held:
    """A lock that somebody else has."""

    def __enter__(self) -> None:
        raise Waiting

    def __exit__(self, *error: object) -> None:
        pass


def test_who_names_a_codec_that_another_thread_is_loading_waits(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the last moment; whoever finds it has its table."""
    found: list[str] = []

    def ask(name: str) -> None:
        try:
            jit.algorithm(name)
        except Exception as error:  # noqa: BLE001 - compared below
            found.append(type(error).__name__)

    def add(algorithm: registry.Algorithm, *, is_ours: bool) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(jit, "_lock", Held())
            other = threading.Thread(target=ask, args=(algorithm.name,))
            other.start()
            other.join()
        assert loaded.table(algorithm.name) is not None
        whole(algorithm, is_ours=is_ours)

    whole = registry.add
    monkeypatch.setattr(registry, "add", add)
    spec.write_text(SPEC + "// another content\n")
    assert parse(tf_hips.load(spec)(bits=2).text).params
    assert found == ["Waiting"]


def test_what_another_process_named_is_not_what_a_stem_means_here(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither before a file of that name is loaded here, nor for a moment afterwards."""
    meant = []

    def add(library: Path, *, is_ours: bool = True) -> registry.Algorithm:
        """Without a library, which takes a compiler."""
        found = registry.Algorithm(library.name, op="loaded")
        registry.add(found, is_ours=is_ours)
        meant.append(registry.newest("scaled"))
        return found

    monkeypatch.setattr(registry, "_newest", {})
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(loaded, "add", add)
    monkeypatch.setattr(specifications, "library", lambda one: Path(specifications.full_name(one)))
    theirs = [Specification("scaled", (("", f"{SPEC}// {k}\n".encode()),)) for k in range(2)]
    first, second = (specifications.full_name(one) for one in theirs)
    specifications.keep({first: theirs[0].data.decode(), second: theirs[1].data.decode()})
    assert parse(first).name == first
    ours = tf_hips.load(spec).name
    assert parse(second).name == second
    assert meant == [None, ours, ours]
    assert parse("scaled").name == ours
