# SPDX-License-Identifier: Apache-2.0
"""What every scalar operator computes, in NumPy, on scalars and on vectors alike.

Float is np.float32, Int is np.int64, UInt(n) is np.int64 holding 0 .. 2^n - 1, Bool is np.bool_.
Everything is total: integers wrap, x / 0 and x % 0 are 0, shifts count modulo 64, conversions
saturate. Callers silence NumPy's warnings with `quiet()`; results do not depend on it.
"""

import contextlib
import struct

import numpy as np

from compll.ir import functions
from compll.ir.functions import Value
from compll.ir.types import BOOL, FLOAT, Type, UInt


def quiet() -> contextlib.AbstractContextManager[None]:
    """Silences overflow, division and invalid warnings: all of them have defined results here."""
    return np.errstate(all="ignore")


def binary32(value: float) -> float:
    """The nearest binary32; what is too large for one, as it is."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except (OverflowError, struct.error):
        return value
    return rounded


def constant(value: float | bool, kind: Type) -> Value:
    """A Python number as a value of a type."""
    if kind == FLOAT:
        return np.float32(value)
    return np.bool_(value) if kind == BOOL else np.int64(value)


def unary(op: str, x: Value) -> Value:
    """`-x`, `~x`, `!x`."""
    if op == "!":
        return np.logical_not(x)
    return np.negative(x) if op == "-" else np.invert(x)


def binary(op: str, x: Value, y: Value, kind: Type) -> Value:
    """`x op y` on operands of type `kind`."""
    match op:
        case "+":
            return np.add(x, y)
        case "-":
            return np.subtract(x, y)
        case "*":
            return np.multiply(x, y)
        case "/":
            return np.divide(x, y) if kind == FLOAT else _int_divide(x, y)
        case "%":
            return _int_remainder(x, y)
        case "<<":
            return np.left_shift(x, np.bitwise_and(y, 63))
        case ">>":
            return np.right_shift(x, np.bitwise_and(y, 63))
        case "&":
            return np.bitwise_and(x, y)
        case "|":
            return np.bitwise_or(x, y)
        case "^":
            return np.bitwise_xor(x, y)
        case "<":
            return np.less(x, y)
        case "<=":
            return np.less_equal(x, y)
        case ">":
            return np.greater(x, y)
        case ">=":
            return np.greater_equal(x, y)
        case "==":
            return np.equal(x, y)
        case "!=":
            return np.not_equal(x, y)
        case "&&":
            return np.logical_and(x, y)
        case "||":
            return np.logical_or(x, y)
        case _:
            raise ValueError(f"`op` must be a binary operator. Received: op={op!r}")


def _int_divide(x: Value, y: Value) -> Value:
    # Towards zero, as in C. Divisors 0 and -1 are taken out first: the rest can neither trap nor
    # overflow.
    plain = np.where((y == 0) | (y == -1), np.int64(1), y)
    quotient = np.floor_divide(np.subtract(x, np.fmod(x, plain)), plain)
    return np.where(y == 0, np.int64(0), np.where(y == -1, np.negative(x), quotient))[()]


def _int_remainder(x: Value, y: Value) -> Value:
    plain = np.where((y == 0) | (y == -1), np.int64(1), y)
    return np.fmod(x, plain)


def select(condition: Value, yes: Value, no: Value) -> Value:
    """`condition ? yes : no`."""
    chosen: Value = np.where(condition, yes, no)
    return chosen[()]


def maximum(x: Value, y: Value) -> Value:
    """`x > y ? x : y`: y when either is NaN."""
    return select(np.greater(x, y), x, y)


def minimum(x: Value, y: Value) -> Value:
    """`x < y ? x : y`: y when either is NaN."""
    return select(np.less(x, y), x, y)


def math(function: str, arguments: list[Value]) -> Value:
    """A built-in function of scalars."""
    match function:
        case "abs":
            return np.abs(arguments[0])
        case "sign":
            return functions.sign(arguments[0])
        case "exp2":
            return functions.exp2(arguments[0])
        case "log2":
            return functions.log2(arguments[0])
        case "sqrt":
            return np.sqrt(arguments[0])
        case "floor":
            return np.floor(arguments[0])
        case "ceil":
            return np.ceil(arguments[0])
        case "round":
            return _round(arguments[0])
        case "min":
            return minimum(*arguments)
        case "max":
            return maximum(*arguments)
        case _:
            raise ValueError(
                f"`function` must be a built-in function. Received: function={function!r}"
            )


def _round(x: Value) -> Value:
    whole = np.trunc(x)
    away = select(
        np.abs(np.subtract(x, whole)) >= np.float32(0.5),
        np.copysign(np.float32(1), x),
        np.float32(0),
    )
    return np.add(whole, away)


def convert(x: Value, source: Type, target: Type, bits: int = 0) -> Value:
    """`x` of type `source` as `target`; `bits`: the width, when the target is a UInt."""
    if target == FLOAT:
        return np.asarray(x).astype(np.float32)[()]
    if target == BOOL:
        return np.not_equal(x, 0)
    if source == FLOAT:
        return _truncate(x, (1 << bits) - 1) if isinstance(target, UInt) else _to_int(x)
    x = np.asarray(x).astype(np.int64)[()]
    return np.bitwise_and(x, np.int64((1 << bits) - 1)) if isinstance(target, UInt) else x


def bitcast(x: Value, target: Type) -> Value:
    """The bits of a Float as an integer, or the Float with the low 32 bits of an integer."""
    return functions.bits_float(x) if target == FLOAT else functions.float_bits(x)


def _truncate(x: Value, top: int) -> Value:
    inside = select(np.greater(x, np.float32(0)) & np.less(x, np.float32(top)), x, np.float32(0))
    return select(
        np.greater_equal(x, np.float32(top)), np.int64(top), np.asarray(inside).astype(np.int64)
    )


def _to_int(x: Value) -> Value:
    limit = np.float32(2.0**63)
    inside = select(np.abs(x) < limit, x, np.float32(0))
    inner = np.asarray(inside).astype(np.int64)
    ends = select(np.greater_equal(x, limit), np.int64(2**63 - 1), inner)
    return select(np.less_equal(x, -limit), np.int64(-(2**63)), ends)
