# SPDX-License-Identifier: Apache-2.0
"""Error feedback of specifications whose loops read what the same loops overwrite.

An encoder with feedback writes the sum over its residual while it works, and then what is left over
the sum; what it packs is decoded as soon as it is there. Each of these reads something elsewhere,
so that one of that has to be done in a loop of its own. None of the product's does.
"""

import functools
import random
from pathlib import Path

import pytest

import compll
from compll.backends.feedback import Fusion, has_feedback, has_ranges
from compll.passes import optimise
from tests.compll import emulation
from tests.compll.differential import check_cpp, check_cuda
from tests.compll.generated_feedback import generate_feedback
from tests.compll.generated_programs import VALUES
from tests.compll.support import renamed, together

pytestmark = pytest.mark.heavy  # each runs g++ where the cache is empty

NAME = "Made"
# Three tiles, and one that is not whole.
SIZES = (3300,)
LARGEST = """
    float* scales = block_reduce(
        map(gradient, [&](float g) -> float { return abs(g); }), 64, 0, max);
"""
SCALED = """
    uint8* codes = map(range(gradient.size), [&](int i) -> uint8 {
        return abs(gradient[i]) * 100 / (scales[i / 64] + 1);
    });
"""
SIGNS = "uint1* codes = map(gradient, [&](float g) -> uint1 { return g > 0; });"
BY_SCALE = "return codes[i] * scales[i / 64];"
BLOCKS = "float* scales; uint8* codes;"
ROTATED = "float* turned = hadamard(map(codes, [&](uint8 code) -> float {{ return code; }}), {});"


def text_of(encode: str, fields: str, decode: str, declared: str, sent: str = "") -> str:
    """A specification; `sent`: what its Encode sends, where that is not `fields`."""
    return f"""
void {NAME}Encode(float* gradient, uint8* packet) {{
    {encode}
    packet = concat({sent or fields});
}}
void {NAME}Decode(uint8* packet, float* gradient) {{
    {declared}
    extract(packet, {fields});
    {decode}
}}
"""


def each(body: str, before: str = "") -> str:
    """A Decode that computes each element from its number `i`."""
    return f"{before} gradient = map(range(gradient.size), [&](int i) -> float {{ {body} }});"


MADE = {
    "blocks of the gradient backwards": text_of(
        """
    float* scales = block_reduce(map(range(gradient.size), [&](int i) -> float {
        return abs(gradient[gradient.size - 1 - i]);
    }), 64, 0, max);
    """
        + SCALED,
        *("scales, codes", each(BY_SCALE), BLOCKS),
    ),
    "scales with the first element": text_of(
        LARGEST
        + """
    float* made = map(scales, [&](float scale) -> float { return scale + gradient[0]; });
    uint8* codes = map(range(gradient.size), [&](int i) -> uint8 {
        return abs(gradient[i]) * 100 / (scales[i / 64] + 1);
    });
    """,
        *("made, codes", each("return codes[i] * made[i / 64];"), "float* made; uint8* codes;"),
    ),
    "codes of the gradient backwards": text_of(
        LARGEST
        + """
    uint8* codes = map(range(gradient.size), [&](int i) -> uint8 {
        return abs(gradient[gradient.size - 1 - i]) * 100 / (scales[i / 64] + 1);
    });
    """,
        *("scales, codes", each(BY_SCALE), BLOCKS),
    ),
    # Four blocks a tile: their codes begin amid a group of eight.
    "wide codes of few blocks": text_of(
        """
    float* largest = block_reduce(
        map(gradient, [&](float g) -> float { return abs(g); }), 256, 0, max);
    uint16* scales = map(largest, [&](float size) -> uint16 { return size * 100; });
    uint32* again = map(largest, [&](float size) -> uint32 { return size * 1000; });
    uint8* codes = map(range(gradient.size), [&](int i) -> uint8 {
        return abs(gradient[i]) * 100 / (largest[i / 256] + 1);
    });
    """,
        "scales, again, codes",
        each("return codes[i] * scales[i / 256] * 0.0001 - again[i / 256];"),
        "uint16* scales; uint32* again; uint8* codes;",
    ),
    "the first element sent": text_of(
        SIGNS,
        *("first, codes", each("return codes[i] * first;"), "float first; uint1* codes;"),
        sent="gradient[0], codes",
    ),
    "the last element sent": text_of(
        SIGNS,
        *("last, codes", each("return codes[i] * 0.5;"), "float last; uint1* codes;"),
        sent="gradient[gradient.size - 1], codes",
    ),
    "a scale sent": text_of(
        LARGEST + SCALED,
        *("last, scales, codes", each(BY_SCALE), f"float last; {BLOCKS}"),
        sent="scales[scales.size - 1], scales, codes",
    ),
    "a sum of codes sent behind them": text_of(
        SIGNS + "float far = gradient[gradient.size - 1] + codes[5];",
        *("far, codes", each("return codes[i] * 3;"), "float far; uint1* codes;"),
    ),
    "decoding needs the last code": text_of(
        "uint8* codes = map(gradient, [&](float g) -> uint8 { return abs(g) * 50; });",
        *("codes", each("return codes[i] - tail;", "float tail = codes[codes.size - 1];")),
        "uint8* codes;",
    ),
    "decoding needs the last wide code": text_of(
        "uint16* codes = map(gradient, [&](float g) -> uint16 { return abs(g) * 50; });",
        *("codes", each("return codes[i] - tail;", "float tail = codes[codes.size - 1];")),
        "uint16* codes;",
    ),
    "decoding needs scales backwards": text_of(
        LARGEST + SCALED,
        *("scales, codes", each("return codes[i] * scales[scales.size - 1 - i / 64];"), BLOCKS),
    ),
    "decoding needs the last scale": text_of(
        LARGEST + SCALED,
        "scales, codes",
        each("return codes[i] * tail;", "float tail = scales[scales.size - 1];"),
        BLOCKS,
    ),
    "decoding needs scales of other blocks": text_of(
        LARGEST + SCALED, *("scales, codes", each("return codes[i] * scales[i / 32];"), BLOCKS)
    ),
    "codes against the first element": text_of(
        """
    float first = gradient[0];
    uint1* codes = map(gradient, [&](float g) -> uint1 { return g >= first; });
    """,
        *("codes", each("return codes[i];"), "uint1* codes;"),
    ),
    "the last codes against the first element": text_of(
        """
    float first = gradient[0];
    float size = reduce(map(gradient, [&](float g) -> float { return abs(g); }), 0, max);
    uint1* codes = map(gradient, [&](float g) -> uint1 { return g >= first; });
    """,
        *("size, codes", each("return codes[i] * size;"), "float size; uint1* codes;"),
    ),
    "beyond what a filter keeps": text_of(
        """
    int* found = filter(range(gradient.size), [&](int i) -> uint1 { return gradient[i] > 1; });
    uint16* codes = map(range(gradient.size), [&](int i) -> uint16 {
        return abs(gradient[found[i]]) * 1000;
    });
    """,
        *("codes", each("return codes[i] * 0.001;"), "uint16* codes;"),
    ),
    # Decoders that make tiles of blocks, each as soon as it is packed.
    "rotated": text_of(
        LARGEST + SCALED,
        *("scales, codes", each("return turned[i] * scales[i / 64];", ROTATED.format(64)), BLOCKS),
    ),
    "rotated in larger blocks": text_of(
        LARGEST + SCALED,
        *("scales, codes", each("return turned[i] * scales[i / 64];", ROTATED.format(512)), BLOCKS),
    ),
    "sums of blocks": text_of(
        LARGEST + SCALED,
        "scales, codes",
        each(
            "return codes[i] - 0.01 * sums[i / 64];",
            "float* sums = block_reduce(codes, 64, 0, sum);",
        ),
        BLOCKS,
    ),
    # Those whose tiles are not there yet.
    "rotated behind a plain loop": text_of(
        "uint8* codes = map(gradient, [&](float g) -> uint8 { return abs(g) * 50; });",
        *("codes", each("return turned[i] * 0.25;", ROTATED.format(32)), "uint8* codes;"),
    ),
    "rotated backwards": text_of(
        LARGEST + SCALED,
        "scales, codes",
        each(
            "return turned[i] * scales[i / 64];",
            """
    float* turned = hadamard(map(range(gradient.size), [&](int i) -> float {
        return codes[gradient.size - 1 - i];
    }), 64);
    """,
        ),
        BLOCKS,
    ),
    "rotated by scales of other blocks": text_of(
        LARGEST + SCALED,
        *("scales, codes", each("return turned[i] * scales[i / 32];", ROTATED.format(64)), BLOCKS),
    ),
    "rotated against the last scale": text_of(
        LARGEST + SCALED,
        "scales, codes",
        each(
            "return turned[i] * tail;",
            "float tail = scales[scales.size - 1];" + ROTATED.format(64),
        ),
        BLOCKS,
    ),
    "rotated twice": text_of(
        LARGEST + SCALED,
        "scales, codes",
        each(
            "return again[i] * scales[i / 64];",
            ROTATED.format(64) + "float* again = hadamard(turned, 128);",
        ),
        BLOCKS,
    ),
}
# Which of them decode a tile as soon as it is packed.
DECODED_AT_ONCE = {"rotated", "rotated in larger blocks", "sums of blocks"}
# What differs from another one in a number or in a field beside it.
VARIANTS = {
    *("the last element sent", "a scale sent", "decoding needs the last wide code"),
    *("decoding needs the last scale", "the last codes against the first element"),
    *("codes of the gradient backwards", "rotated in larger blocks"),
    "rotated by scales of other blocks",
}
# Seeds of programs that found something.
SEEDS = (13, 42)


each_made = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in MADE],
)


@functools.cache
def programs() -> dict[str, compll.Program]:
    """The specifications, compiled under names of their own."""
    return renamed(MADE, NAME.lower())


def some(are_variants: bool) -> list[compll.Program]:
    """Those in one library: most of what each takes alone goes into reading headers."""
    return [one for name, one in programs().items() if (name in VARIANTS) == are_variants]


@functools.cache
def kernels(are_variants: bool) -> Path:
    """Their kernels."""
    return emulation.build(*some(are_variants))


@functools.cache
def machine_code(are_variants: bool) -> Path:
    """The same for this processor."""
    return together(some(are_variants))


@each_made
def test_machine_code_reads_nothing_that_is_overwritten(name):
    assert has_feedback(optimise(programs()[name]))  # else nothing of it is checked
    library = machine_code(name in VARIANTS)
    check_cpp(programs()[name], sizes=SIZES, values_of=({},), library=library)


@each_made
def test_kernels_read_nothing_that_is_overwritten(name):
    library = kernels(name in VARIANTS)
    check_cuda(programs()[name], sizes=SIZES, values_of=({},), library=library)


@pytest.mark.parametrize("name", [name for name in MADE if name.startswith(("rot", "sums"))])
def test_tiles_of_blocks_are_decoded_as_soon_as_they_can_be(name):
    plan = optimise(programs()[name])
    assert has_ranges(plan) == (name != "rotated twice")
    assert (Fusion.of(plan).last is not None) == (name in DECODED_AT_ONCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_quantisers_that_are_made(seed):
    program = compll.compile_text(generate_feedback(random.Random(seed)).text, "made")
    assert has_feedback(optimise(program))
    for check in (check_cpp, check_cuda):
        check(program, sizes=SIZES, values_of=VALUES[:2])
