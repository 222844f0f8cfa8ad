# SPDX-License-Identifier: Apache-2.0
"""What the tests of compll share: specifications, gradients, and both back ends of a program."""

import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

import compll
from compll.backends.cache import build
from compll.backends.library import CompiledCodec
from tests.compll import hurry

Key = TypeVar("Key")

SPECS = Path(__file__).resolve().parents[2] / "tf_hips/ops/specs"
# The last: what is looked for among samples (top_k.h), and places of more than 16 bits. Whole
# chunks are those of tests of ops.
SIZES = (0, 1, 7, 8, 1023, 200_003)
# Indices descend, and are refused, where the first element of a chunk is large.
OWN = """
void OwnEncode(float* gradient, uint8* out) {
    int flip = gradient[0] > 100 ? 1 : 0;
    uint32* at = map(range(4), [&](int i) -> uint32 { return flip == 1 ? 3 - i : i; });
    float* values = map(range(4), [&](int i) -> float { return gradient[i]; });
    out = concat(at, values);
}
void OwnDecode(uint8* packet, float* gradient) {
    uint32* at;
    float* values;
    extract(packet, at, values);
    gradient = scatter(gradient.size, at, values);
}
"""


def spec(name: str) -> compll.Program:
    """A specification of the product."""
    return compll.compile_spec(SPECS / f"{name}.pse")


def encoder(body: str, params: str = "") -> str:
    """The text of an Encode with this body."""
    return f"void FooEncode(float* gradient, uint8* out{params}) {{\n{body}\n}}\n"


def compiled(
    program: compll.Program, library: Path | None = None, **params: float
) -> CompiledCodec:
    """A program in machine code, built in a hurry; the tests of ops run what is shipped.

    `library`: of `together` with this program among others; None: it is built alone.
    """
    return CompiledCodec(program, library or together([program]), **params)


def together(programs: Iterable[compll.Program]) -> Path:
    """Programs of different names in one library: half of what each takes alone is the headers'."""
    sources = {one.name: compll.generate(one)[f"{one.name}.codec.cc"] for one in programs}
    if len(sources) > 1:
        sources = {"": "#undef TF_HIPS_CODEC_ID\n", **sources}  # a library says one thing only
    return build("\n".join(sources.values()), next(reversed(sources)), hurry.flags())


def renamed(texts: Mapping[Key, str], name: str) -> dict[Key, compll.Program]:
    """At most 26 specifications of that name, compiled under different ones: for `together`."""
    called = [name + letter for letter in string.ascii_lowercase]
    return {
        key: compll.compile_text(text.replace(name.capitalize(), own.capitalize()), own)
        for own, (key, text) in zip(called, texts.items(), strict=False)
    }


def in_one_library(texts: Mapping[Key, str], name: str) -> tuple[dict[Key, compll.Program], Path]:
    """The programs of `renamed`, and the library of all."""
    programs = renamed(texts, name)
    return programs, together(programs.values())


def gradients(n: int) -> dict[str, np.ndarray]:
    """Vectors of n elements that codecs must survive."""
    rng = np.random.default_rng(n)
    plain = rng.normal(size=n).astype(np.float32)
    denormal = plain * np.float32(1e-40)
    denormal[::3] = np.float32(1e-45)
    broken = plain.copy()
    broken[n // 2 : n // 2 + 1] = np.nan
    broken[n // 3 : n // 3 + 1] = np.inf
    broken[n // 5 : n // 5 + 1] = -np.inf
    huge = plain.copy()
    huge[: n // 2] = np.float32(3e38)
    huge[n // 2 :] = np.float32(-3e38)
    return {
        "plain": plain,
        "denormal": denormal,
        "broken": broken,
        "all nan": np.full(n, np.nan, np.float32),
        "constant": np.full(n, np.float32(0.3)),
        "minus zero": np.full(n, np.float32(-0.0)),
        "huge": huge,
    }


def assert_same_floats(left: np.ndarray, right: np.ndarray) -> None:
    """Equal bit for bit, but for which NaN it is."""
    np.testing.assert_array_equal(np.isnan(left), np.isnan(right))
    good = ~np.isnan(left)
    np.testing.assert_array_equal(left[good].view(np.uint32), right[good].view(np.uint32))


def residual_of(reference: compll.Reference, v: np.ndarray, packets: np.ndarray) -> np.ndarray:
    """What error feedback leaves of `v`."""
    with np.errstate(all="ignore"):
        rest = v - reference.decode(packets, v.size)
    return np.where(np.isfinite(rest), rest, np.float32(0))
