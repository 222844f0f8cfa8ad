# SPDX-License-Identifier: Apache-2.0
"""Update rules of the native library beside NumPy's float32: equal bit for bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tf_hips.errors import NonFiniteError
from tf_hips.ops import native_updates as updates
from tf_hips.ops.native_updates import SecondMoment

Floats = npt.NDArray[np.float32]
# Odd ones, whole registers and one more, several blocks of threads.
SIZES = (0, 1, 7, 16, 17, 1023, (1 << 18) + 3, (1 << 20) + 5)
f = np.float32
ONE = f(1)


def arrays(n: int, count: int, seed: int = 0) -> list[Floats]:
    """Values of very different size, exact zeros and denormals among them."""
    generator = np.random.default_rng((n, count, seed))
    made = []
    for _ in range(count):
        values = generator.standard_normal(n, np.float32)
        values *= (10.0 ** generator.integers(-8, 4, n)).astype(np.float32)
        values[::11] = 0
        values[5::97] = f(1e-41)
        made.append(values)
    return made


def scale_(x: Floats) -> tuple[Floats, ...]:
    return (f(0.3) * x,)


def momentum_(g: Floats, m: Floats, nesterov: bool) -> tuple[Floats, ...]:
    new = f(0.9) * m + g
    return f(0.1) * (g + f(0.9) * new if nesterov else new), new


def adam_(g: Floats, m: Floats, v: Floats) -> tuple[Floats, ...]:
    first = m + (g - m) * (ONE - f(0.9))
    second = v + (g * g - v) * (ONE - f(0.999))
    return (first * f(0.01)) / (np.sqrt(second) + f(1e-7)), first, second


def adaptive_(g: Floats, m: Floats | None, v: Floats, kind: SecondMoment) -> tuple[Any, ...]:
    first = g if m is None else f(0.9) * m + (ONE - f(0.9)) * g
    square = g * g
    if kind == SecondMoment.ADAGRAD:
        second = v + square
    elif kind == SecondMoment.ADAM:
        second = f(0.99) * v + (ONE - f(0.99)) * square
    else:
        second = v - ((ONE - f(0.99)) * square) * np.sign(v - square)
    return (f(0.1) * first) / (np.sqrt(second) + f(1e-3)), None if m is None else first, second


def delayed_(g: Floats, total: Floats, received: Floats, square: Floats | None) -> tuple[Any, ...]:
    strength, new = f(2), None
    if square is not None:
        new = f(0.95) * square + (ONE - f(0.95)) * (g * g)
        strength = f(2) / np.sqrt(new + f(1e-7))
    return total + f(0.1) * (g + ((strength * g) * g) * (received - total)), new


def check(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert other.dtype == np.float32
            np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("n", SIZES)
def test_each_rule_equals_numpy_bit_for_bit(n: int) -> None:
    g, m, v, total, received = arrays(n, 5)
    v = np.abs(v)
    before = [array.copy() for array in (g, m, v, total, received)]
    check([updates.scale(g, 0.3)], scale_(g))
    check([updates.add_scaled(m, g, 0.3)], (m + f(0.3) * g,))
    room = np.empty(n, np.float32)
    assert updates.add_scaled(m, g, 0.3, out=room) is room
    check([room], (m + f(0.3) * g,))
    for nesterov in (False, True):
        found = updates.momentum(g, m, rate=0.1, beta=0.9, nesterov=nesterov)
        check(found, momentum_(g, m, nesterov))
    found_adam = updates.adam(g, m, v, rate=0.01, beta_1=0.9, beta_2=0.999, epsilon=1e-7)
    check(found_adam, adam_(g, m, v))
    for kind in SecondMoment:
        for first in (m, None):
            rates = {"rate": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}
            check(updates.adaptive(g, first, v, **rates, kind=kind), adaptive_(g, first, v, kind))
    for square in (v, None):
        rates = {"rate": 0.1, "strength": 2.0, "decay": 0.95, "epsilon": 1e-7}
        found_delayed = updates.delayed(g, total, received, square, **rates)
        check(found_delayed, delayed_(g, total, received, square))
    mixed = updates.mix(g, total, received, alpha=0.6)
    check([mixed], (total + f(0.6) * (g + (received - total)),))
    for array, kept in zip((g, m, v, total, received), before, strict=True):
        np.testing.assert_array_equal(array, kept)


def calls(n: int) -> dict[str, Callable[[Floats], object]]:
    m, v, total, received = (np.abs(array) for array in arrays(n, 4, 1))
    rates = {"rate": 0.1, "beta_1": 0.9, "beta_2": 0.99}
    return {
        "scale": lambda g: updates.scale(g, 2.0),
        "add_scaled": lambda g: updates.add_scaled(m, g, 2.0),
        "momentum": lambda g: updates.momentum(g, m, rate=0.1, beta=0.9, nesterov=True),
        "adam": lambda g: updates.adam(g, m, v, **rates, epsilon=1e-7),
        "adaptive": lambda g: updates.adaptive(g, m, v, **rates, tau=1e-3, kind=SecondMoment.YOGI),
        "delayed": lambda g: updates.delayed(
            g, total, received, v, rate=0.1, strength=2.0, decay=0.9, epsilon=1e-7
        ),
        "mix": lambda g: updates.mix(g, total, received, alpha=0.6),
    }


@pytest.mark.heavy
@pytest.mark.parametrize("name", calls(1))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_finite_anywhere_is_seen(name: str, value: float) -> None:
    n = (1 << 18) + 21
    call = calls(n)[name]
    assert call(np.ones(n, np.float32)) is not None
    for place in (0, n // 2, n - 1):
        g = np.ones(n, np.float32)
        g[place] = value
        if np.isfinite(value) and name == "mix":
            continue  # 0.6 of it is a number
        with pytest.raises(NonFiniteError, match="must be finite"):
            call(g)


def test_arrays_that_do_not_fit_are_refused() -> None:
    g = np.ones(8, np.float32)
    with pytest.raises(ValueError, match="must have 8 elements"):
        updates.add_scaled(g, g[:7].copy(), 1.0)
    short = g[:7].copy()
    adam = {"rate": 1.0, "beta_1": 0.9, "beta_2": 0.9, "epsilon": 1e-8}
    yogi = {"rate": 1.0, "beta_1": 0.9, "beta_2": 0.9, "tau": 1e-3, "kind": SecondMoment.YOGI}
    delay = {"rate": 1.0, "strength": 1.0, "decay": 0.9, "epsilon": 1e-8}
    for call in (
        lambda: updates.add_scaled(g, g, 1.0, short),
        lambda: updates.momentum(g, short, rate=1.0, beta=0.9, nesterov=False),
        lambda: updates.adam(g, short, g, **adam),
        lambda: updates.adam(g, g, short, **adam),
        lambda: updates.adaptive(g, short, g, **yogi),
        lambda: updates.adaptive(g, g, short, **yogi),
        lambda: updates.delayed(g, short, g, g, **delay),
        lambda: updates.delayed(g, g, short, g, **delay),
        lambda: updates.delayed(g, g, g, short, **delay),
        lambda: updates.mix(g, short, g, alpha=0.5),
        lambda: updates.mix(g, g, short, alpha=0.5),
    ):
        with pytest.raises(ValueError, match=r"must have 8 elements.* Received: 7"):
            call()
    with pytest.raises(TypeError, match="contiguous float32"):
        updates.scale(np.ones(8), 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="contiguous float32"):
        updates.scale(g[::2], 1.0)
