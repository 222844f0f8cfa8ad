# SPDX-License-Identifier: Apache-2.0
"""Lambdas and expressions of generated programs (generated_programs.py)."""

import random
from dataclasses import dataclass, field, replace

FLOATS = ("0.5", "2.0", "1e-3", "(-1.5)", "3e38", "0.0", "127.0", "1e-40", "scale", "0.25")
INTS = (
    *("0", "1", "2", "(-1)", "3", "7", "16", "255", "width", "count", "(1 << width)", "65535"),
    *("(-128)", "9223372036854775807", "gradient.size"),
)
KINDS = ("uint1", "uint2", "uint4", "uint8", "uint16", "uint32")
CODES = ("uint1", "uint2", "uint4", "uint8", "uint<3>", "uint<5>", "uint<width>")
WIDTHS = ("uint<width>", "uint<17 - width>", "uint<3>", "uint<5>", "uint<11>")
MIRRORED = ("{0} ^ 1", "{0} ^ 3", "{0} ^ 7")
AT = ("{0} / block", "{0} / 16", "{0} / 128", "{0} + 1", "{0} - 1", "{0} * 3")
AT_ODD = ("0", "{0} % 5", "{0} >> 2", "gradient.size - 1 - {0}", "count", "{0} & -8")
# Kinds of expressions of floats; rows of 16 floats have the plain ones.
PLAIN = ("sign", "sign", "sign", "least", "select", "abs", "minus", "draw", "value")
OTHER = ("function", "function", "call", "bits")
# Operations that a lambda may have, those of the vectors that it reads included.
MAX_COST = 150


@dataclass(frozen=True)
class Vector:
    """A vector that a function has; of one `length`, two have as many elements.

    `cost`: operations that make an element where it is read.
    """

    name: str
    kind: str
    length: str
    cost: int = 1


@dataclass(frozen=True)
class Scope:
    """What an expression may read; `position`: the number of its element, if it knows it.

    `is_plain`: it uses only what C++ computes in rows of 16 floats (compll/backends/row_code.py).
    """

    floats: tuple[str, ...]
    ints: tuple[str, ...]
    vectors: tuple[Vector, ...] = ()
    helpers: tuple[str, ...] = ()
    position: str | None = None
    may_draw: bool = False
    is_plain: bool = False


@dataclass
class Function:
    """An Encode or Decode in the making."""

    is_encode: bool
    statements: list[str] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    floats: list[str] = field(default_factory=list)
    ints: list[str] = field(default_factory=list)
    helpers: list[str] = field(default_factory=list)

    def scope(self) -> Scope:
        """Of its scalar expressions."""
        keys = ("seed", "step") if self.is_encode else ()
        return Scope(
            (*self.floats, "scale"),
            (*self.ints, "width", "count", *keys),
            tuple(self.vectors),
            tuple(self.helpers),
        )


class Expressions:
    """Writes lambdas and expressions for the function in `_function`."""

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self._number = 0
        self._cost = 0
        # Codes made of floats and back, as quantisers do, or anything.
        self._is_quantiser = choose.random() < 0.5
        self._function = Function(is_encode=True)

    def _name(self) -> str:
        self._number += 1
        return f"v{self._number}"

    def _add(self, statement: str) -> None:
        self._function.statements.append(statement)

    def _kind(self) -> str:
        """A type of unsigned integers."""
        kinds = CODES if self._is_quantiser else self._choose.choice([KINDS, WIDTHS])
        return self._choose.choice(kinds)

    def _lambda(
        self,
        kind: str,
        result: str,
        *,
        is_index: bool = False,
        may_draw: bool = True,
        depth: int | None = None,
    ) -> str:
        """A lambda of one argument; `is_index`: it is the number of an element.

        Leaves what an element costs in `_cost`.
        """
        choose, name, outer = self._choose, self._name(), self._function.scope()
        depth = choose.randint(1, 3) if depth is None else depth
        is_plain = choose.random() < (0.9 if self._is_quantiser else 0.2)
        floats: tuple[str, ...] = (name,) * 4
        if kind != "float":
            floats = (f"({name} + 0.0)",) * (0 if is_plain and kind == "int" else 3)
        ints = () if kind == "float" else (name,) * 2
        scope = replace(
            outer,
            floats=floats + outer.floats,
            ints=ints + outer.ints,
            vectors=outer.vectors if is_index else (),
            position=name if is_index else None,
            may_draw=may_draw and self._function.is_encode,
            is_plain=is_plain,
        )
        self._cost = 0
        return f"[&]({kind} {name}) -> {result} {{ {self._body(result, depth, scope)} }}"

    def _body(self, result: str, depth: int, scope: Scope) -> str:
        choose = self._choose

        def value(at_depth: int) -> str:
            is_float = result == "float" or scope.is_plain or choose.random() < 0.5
            return (self._float if is_float else self._int)(at_depth, scope)

        shapes = ["branches", "variable", "value", "value"]
        shape = choose.choice(shapes if scope.is_plain else [*shapes, "number"])
        if shape == "branches":
            first = f"if ({self._condition(1, scope)}) {{ return {value(depth - 1)}; }}"
            second = f"else if ({self._condition(1, scope)}) {{ return {value(0)}; }}"
            return f"{first} {second} return {value(depth)};"
        if shape == "variable":
            name = self._name()
            start = f"float {name} = {self._float(depth, scope)};"
            scope = replace(scope, floats=(name,) * 3 + scope.floats)
            change = f"{name} {choose.choice(['=', '+=', '*=', '-='])} {self._float(1, scope)};"
            last = f"return {name} {choose.choice('+-*')} {self._float(1, scope)};"
            return f"{start} if ({self._condition(1, scope)}) {{ {change} }} {last}"
        if shape == "number":
            name, kind = self._name(), choose.choice(["int", self._kind()])
            start = f"{kind} {name} = {value(depth)};"
            scope = replace(scope, ints=(name,) * 3 + scope.ints)
            return f"{start} return {value(1)};"
        return f"return {value(depth)};"

    def _float(self, depth: int, scope: Scope) -> str:
        """An expression, of a float more often than not."""
        choose = self._choose
        self._cost += 1
        if depth <= 0:
            return self._leaf(scope, FLOATS, scope.floats, is_float=True)
        shape = choose.choice(PLAIN if scope.is_plain else PLAIN + OTHER)
        if shape == "sign":
            left, right = self._float(depth - 1, scope), self._float(depth - 1, scope)
            return f"({left} {choose.choice('+-*/')} {right})"
        if shape == "least":
            name = choose.choice(["min", "max"])
            return f"{name}({self._float(depth - 1, scope)}, {self._float(depth - 1, scope)})"
        if shape == "select":
            yes, no = self._float(depth - 1, scope), self._float(depth - 1, scope)
            return f"({self._condition(depth - 1, scope)} ? {yes} : {no})"
        if shape == "draw" and scope.may_draw:
            if scope.is_plain:
                return "random<float>(0, 1)"
            return f"random<float>({self._float(0, scope)}, {self._float(0, scope)})"
        inner = self._float(depth - 1, scope)
        if shape == "minus":
            return f"(-{inner})"
        if shape == "abs":
            return f"abs({inner})"
        if shape == "function":
            name = choose.choice(["sqrt", "floor", "ceil", "round", "sign", "exp2", "log2"])
            return f"{name}({inner})"
        if shape == "call" and scope.helpers:
            return f"{choose.choice(scope.helpers)}({inner})"
        if shape == "bits":
            return f"bitcast<float>({self._int(depth - 1, scope)})"
        return inner

    def _int(self, depth: int, scope: Scope) -> str:
        choose = self._choose
        self._cost += 1
        if depth <= 0:
            return self._leaf(scope, INTS, scope.ints, is_float=False)
        shape = choose.randrange(10)
        if shape < 5:
            left, right = self._int(depth - 1, scope), self._int(depth - 1, scope)
            sign = choose.choice(["+", "-", "*", "/", "%", "<<", ">>", "&", "|", "^"])
            return f"({left} {sign} {right})"
        if shape == 5:
            yes, no = self._int(depth - 1, scope), self._int(depth - 1, scope)
            return f"({self._condition(depth - 1, scope)} ? {yes} : {no})"
        if shape == 6:
            return f"bitcast<uint32>({self._float(depth - 1, scope)} + 0.0)"
        if shape == 7 and scope.may_draw:
            return f"random<int>({self._int(0, scope)}, {self._int(0, scope)})"
        if shape == 8:
            return f"({choose.choice('~-+')}{self._int(depth - 1, scope)})"
        return self._int(0, scope)

    def _condition(self, depth: int, scope: Scope) -> str:
        choose = self._choose
        shape = choose.randrange(5)
        if shape == 0 and depth > 0:
            left, right = self._condition(depth - 1, scope), self._condition(depth - 1, scope)
            return f"({left} {choose.choice(['&&', '||'])} {right})"
        if shape == 1 and not scope.is_plain:
            sign = choose.choice(["<", "==", "!=", ">="])
            return f"({self._int(depth - 1, scope)} {sign} {self._int(depth - 1, scope)})"
        if shape == 2 and not scope.is_plain:
            return f"!({self._float(depth - 1, scope)} > {self._float(0, scope)})"
        sign = choose.choice(["<", ">", "<=", ">=", "==", "!="])
        codes = [one for one in scope.vectors if one.kind.startswith("uint")]
        if shape == 3 and codes and scope.position is not None:
            code = self._element(choose.choice(codes), scope)
            return f"({code} {sign} {choose.randrange(8)})"
        return f"({self._float(depth - 1, scope)} {sign} {self._float(depth - 1, scope)})"

    def _leaf(
        self, scope: Scope, numbers: tuple[str, ...], names: tuple[str, ...], *, is_float: bool
    ) -> str:
        """A number, a scalar, or an element of a vector."""
        choose = self._choose
        vectors = [
            one
            for one in scope.vectors
            if (is_float or one.kind != "float") and self._cost + one.cost <= MAX_COST
        ]
        if vectors and choose.random() < 0.6:
            one = choose.choice(vectors)
            element = self._element(one, scope)
            is_code = is_float and scope.is_plain and one.kind != "float"
            return f"({element} + 0.0)" if is_code else element
        return choose.choice(names) if choose.random() < 0.7 else choose.choice(numbers)

    def _element(self, vector: Vector, scope: Scope) -> str:
        choose, position = self._choose, scope.position
        self._cost += vector.cost
        if position is None:
            return f"{vector.name}[{choose.choice(['0', 'gradient.size - 1', 'count', '(-1)'])}]"
        _, by, block = vector.length.rpartition(" by ")
        if by and choose.random() < 0.7:
            return f"{vector.name}[{position} / {block}]"
        if scope.is_plain:
            places = choose.choice([("{0}",), ("{0}",), ("{0}",), MIRRORED])
        else:
            places = choose.choice([("{0}",), MIRRORED, AT, AT_ODD])
        return f"{vector.name}[{choose.choice(places).format(position)}]"
