# SPDX-License-Identifier: Apache-2.0
"""What the tests of compll share: specifications, gradients, and both back ends of a program."""

from pathlib import Path

import numpy as np

import compll
from compll.backends.cache import build
from compll.backends.library import CompiledCodec
from tests.compll import hurry

SPECS = Path(__file__).resolve().parents[2] / "tf_hips/ops/specs"
SIZES = (0, 1, 7, 8, 1023, 1_000_003)
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


def compiled(program: compll.Program, **params: float) -> CompiledCodec:
    """A program in machine code, built in a hurry; the tests of ops run what is shipped."""
    source = compll.generate(program)[f"{program.name}.codec.cc"]
    library = build(source, program.name, hurry.flags())
    return CompiledCodec(program, library, **params)


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
