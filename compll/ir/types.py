# SPDX-License-Identifier: Apache-2.0
"""Types of the IR.

    type    = Float | Int | Bool | UInt(bits) | Array(element)

Values are computed as Float (IEEE binary32), Int (64 bits, two's complement, wrapping) or Bool.
`UInt` is a storage type: an unsigned integer of 1 to 32 bits that becomes an Int as soon as it is
computed with. Its width is a number or, for `uint<expr>`, an expression over parameters.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compll.ir.nodes import Expr

MAX_PACKED_BITS = 16
FIXED_WIDTHS = {"uint1": 1, "uint2": 2, "uint4": 4, "uint8": 8, "uint16": 16, "uint32": 32}


@dataclass(frozen=True, slots=True)
class Type:
    """Any type."""


@dataclass(frozen=True, slots=True)
class Float(Type):
    """IEEE binary32."""

    def __str__(self) -> str:
        return "float"


@dataclass(frozen=True, slots=True)
class Int(Type):
    """A signed integer of 64 bits."""

    def __str__(self) -> str:
        return "int"


@dataclass(frozen=True, slots=True)
class Bool(Type):
    """The result of a comparison."""

    def __str__(self) -> str:
        return "bool"


@dataclass(frozen=True, slots=True)
class UInt(Type):
    """An unsigned integer of `bits` bits; packed without gaps in vectors."""

    bits: "int | Expr"

    def __str__(self) -> str:
        if isinstance(self.bits, int):
            return (
                f"uint{self.bits}" if f"uint{self.bits}" in FIXED_WIDTHS else f"uint<{self.bits}>"
            )
        from compll.ir.printer import print_expr

        return f"uint<{print_expr(self.bits)}>"


@dataclass(frozen=True, slots=True)
class Array(Type):
    """A vector of scalars."""

    element: Type

    def __str__(self) -> str:
        return f"{self.element}*"


FLOAT = Float()
INT = Int()
BOOL = Bool()


def joined(left: Type, right: Type) -> Type:
    """The type in which two scalars are computed with each other: Float if either is, else Int."""
    return FLOAT if FLOAT in (left, right) else INT
