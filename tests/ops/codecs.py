# SPDX-License-Identifier: Apache-2.0
"""What the tests of tf_hips.ops share: the codecs under test, gradients, the reference."""

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt

import compll
import tf_hips.ops
from tf_hips.ops import REGISTRY, Compressor, Key, native
from tf_hips.ops.native import Bytes
from tf_hips.ops.registry import Algorithm

Floats = npt.NDArray[np.float32]
SPECS = Path(tf_hips.ops.__file__).parent / "specs"


def variants() -> list[Compressor]:
    """Every algorithm without state, with its defaults and with the ends of each parameter's range.

    What only those with state promise is in tests/ops/test_state.py.
    """
    return _variants([a for a in REGISTRY.values() if not a.state_names])


def stateful_variants() -> list[Compressor]:
    """The same of the algorithms with state; what no codec sees makes no difference."""
    found = _variants([a for a in REGISTRY.values() if a.state_names])
    different = {(c.name, c.codec_params): c for c in reversed(found)}
    return list(reversed(different.values()))


def all_variants() -> list[Compressor]:
    """Every algorithm, with state and without."""
    return [*variants(), *stateful_variants()]


def fresh(compressor: Compressor, n: int) -> Floats | None:
    """What an encoder of n elements keeps before its first step; None: nothing."""
    return np.zeros(compressor.state_shape([n]), np.float32) if compressor.has_state else None


def encoded(compressor: Compressor, x: Floats, key: Key) -> Bytes:
    """The packets of x, of an encoder in its first step."""
    return native.encode(compressor, x, key, fresh(compressor, x.size))


def _variants(algorithms: list[Algorithm]) -> list[Compressor]:
    found = []
    for algorithm in algorithms:
        found.append(Compressor(algorithm.name))
        for parameter in algorithm.parameters:
            for value in (parameter.minimum, parameter.maximum):
                found.append(Compressor(algorithm.name, ((parameter.name, value),)))
    return list(dict.fromkeys(found))


def variants_with_feedback() -> list[Compressor]:
    """Those of `variants` that error feedback may wrap."""
    return [c for c in variants() if not loses_more_than_it_is_given(c)]


def loses_more_than_it_is_given(compressor: Compressor) -> bool:
    """Whether error feedback around this codec diverges."""
    params = dict(compressor.params)
    return any(params[name] < least for name, least in REGISTRY[compressor.name].feedback_minimum)


@functools.cache
def reference(compressor: Compressor) -> compll.Reference:
    """The NumPy interpreter of a compressor's codec: what every back end must equal."""
    codec = compressor.codec
    program = compll.compile_spec(SPECS / f"{codec.name}.pse")
    return compll.Reference(program, **dict(codec.codec_params))


def gradient(n: int, seed: int = 0) -> Floats:
    """Normal values, a tenth of them zero."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n, np.float32)
    return np.where(rng.random(n) < 0.1, np.float32(0), values)


def in_reach(compressor: Compressor, x: Floats) -> Floats:
    """Such a gradient in units that error feedback around this codec can keep up with."""
    reach = REGISTRY[compressor.codec.name].reach
    if reach is None:
        return x
    most = np.float32(dict(compressor.codec.params)[reach])
    return np.clip(x * most, -most, most)


def strange(n: int) -> Floats:
    """Denormals, zeros of both signs, and large and small values."""
    pool = np.array([1e-45, -1e-40, 0.0, -0.0, 1.2e-38, -3e-39, 1e-42, 5e-39], np.float32)
    return np.random.default_rng(1).choice(pool, n)


def bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Floats as words, so that NaN equals NaN and -0 differs from 0.

    Which NaN comes of infinity minus infinity is a matter of the processor.
    """
    words = np.ascontiguousarray(values).view(np.uint32)
    return np.where(np.isnan(values), np.uint32(0x7FC00000), words)
