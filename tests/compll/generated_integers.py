# SPDX-License-Identifier: Apache-2.0
"""Programs of integers that a grammar makes: what C++ computes with 32 bits in loops, or may not.

In programs of `generated_programs.py` most numbers are floats, and a lambda has one variable. Here
it has several integers, which are made of each other, of the bits of floats, of codes and of noise,
and lie around the ends of 32 bits (compll/backends/narrow.py). All choices come from one source.
"""

import random

from tests.compll.generated_programs import REDUCERS, Made, N

# Powers of two at which something ends, and how far beside them a number may be.
_POWERS = (0, 1, 5, 7, 8, 15, 16, 30, 31, 31, 32, 32, 33, 47, 62)
_COUNTS = ("1", "7", "13", "16", "24", "31", "32", "40", "63")
_SPANS = (
    *(("0", "65536"), ("(-5)", "300"), ("0", "(1 << 60)"), ("((-1) << 47)", "(1 << 47)")),
    *(("0", "(1 << 47)"), ("3000000000", "3000000100"), ("(-2147483648)", "2147483648")),
)
_FLOATS = ("g", "g", "abs(g)", "scale", "(-0.0)", "0.0", "1e-40", "(-2.5)", "3e9", "max(g, -0.0)")
_CODES = ("uint1", "uint2", "uint4", "uint8", "uint16", "uint32", "uint<5>", "uint<width>")
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


def generate_integers(choose: random.Random) -> Made:
    """A program; `choose` makes all choices."""
    return _Writer(choose).program()


class _Writer:
    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self._number = 0
        self._is_encode = True
        self._statements: list[str] = []
        self._fields: list[tuple[str, str]] = []
        self._scalars = ["width", "count"]
        # What an element reads besides: vectors of codes as long as the gradient, and of blocks.
        self._codes: list[str] = []
        self._of_blocks: list[str] = []
        # Of the lambda in the making.
        self._ints: list[str] = []
        self._smalls: list[str] = []
        self._floats: list[str] = []
        self._last = "g"

    def program(self) -> Made:
        choose = self._choose
        self._code()
        for _ in range(choose.randint(3, 8)):
            choose.choice(
                [self._vector, self._vector, self._vector, self._code, self._reduce, self._block]
            )()
        encode, self._statements = tuple(self._statements), []
        # Decode has what was sent.
        self._is_encode = False
        self._scalars = ["width", "count"]
        sent = dict(self._fields)
        self._codes = [name for name in self._codes if name in sent]
        self._of_blocks = [name for name in self._of_blocks if name in sent]
        if choose.random() < 0.3:
            self._reduce()
        self._statements.append(f"gradient = map(range({N}), {self._lambda('float')});")
        return Made((), encode, tuple(self._fields), tuple(self._statements))

    def _name(self) -> str:
        self._number += 1
        return f"v{self._number}"

    def _field(self, kind: str, value: str) -> str:
        name = self._name()
        self._statements.append(f"{kind} {name} = {value};")
        self._fields.append((name, kind))
        return name

    # Statements.

    def _vector(self) -> None:
        """All 64 bits of integers, or floats."""
        if self._choose.random() < 0.2:
            self._field("float*", f"map(range({N}), {self._lambda('float')})")
            return
        name = self._name()
        self._statements.append(f"int* {name} = map(range({N}), {self._lambda('int')});")
        self._codes.append(self._field("uint32*", name))
        self._field("uint32*", f"map({name}, [&](int x) -> uint32 {{ return x >> 32; }})")

    def _code(self) -> None:
        kind = self._choose.choice(_CODES)
        self._codes.append(self._field(f"{kind}*", f"map(range({N}), {self._lambda(kind)})"))

    def _reduce(self) -> None:
        kind, name = self._choose.choice(["int", *_CODES]), self._name()
        init = self._choose.choice(["0", "1", "count", "(-2147483648)"])
        source = f"map(range({N}), {self._lambda(kind)})"
        self._statements.append(
            f"int {name} = reduce({source}, {init}, {self._choose.choice(REDUCERS)});"
        )
        self._scalars.append(name)
        if self._is_encode:
            self._field("uint32", name)
            self._field("uint32", f"{name} >> 32")

    def _block(self) -> None:
        kind, name = self._choose.choice(["int", *_CODES]), self._name()
        source = f"map(range({N}), {self._lambda(kind)})"
        reducer = self._choose.choice(REDUCERS)
        self._statements.append(f"int* {name} = block_reduce({source}, 32, 1, {reducer});")
        self._of_blocks += [name, self._field("uint32*", name)]

    # Lambdas.

    def _lambda(self, result: str) -> str:
        """A lambda of an element's number."""
        choose = self._choose
        self._ints = ["i", *self._scalars]
        self._smalls = ["count"]
        self._floats = list(_FLOATS)
        self._last = "g"
        lets = [f"float g = {'gradient[i]' if self._is_encode else 'i * scale'};"]
        for _ in range(choose.randint(2, 6)):
            lets += self._let()
        if result == "float":
            value = f"{self._float(2)} {choose.choice('+-')} {self._last}"
        else:
            # All that has been computed counts.
            names = dict.fromkeys(self._ints[1 + len(self._scalars) :])
            terms = [f"{name} * {2 * k + 3}" for k, name in enumerate(names)]
            value = " + ".join([self._int(2), *terms])
        return f"[&](int i) -> {result} {{ {' '.join(lets)} return {value}; }}"

    def _let(self) -> list[str]:
        """A variable of a lambda, which may be changed at once."""
        choose, name = self._choose, self._name()
        self._last = name
        if choose.random() < 0.15:
            lines = [f"float {name} = {self._float(2)};"]
            self._floats += [name] * 2
            return lines
        kind = choose.choice(["int", "int", "int", choose.choice(_CODES)])
        shape = choose.randrange(6)
        match shape:
            case 0 | 1:
                value = f"bitcast<uint32>({choose.choice(['g', self._float(1)])})"
            case 2:
                value = f"{self._read()} {choose.choice('+-')} {self._edge()}"
            case 3:
                value = f"{self._small()} >> {choose.choice(_COUNTS)}"
            case 4:
                value = self._small_of(self._small(), self._small())
            case _:
                value = self._int(2)
        lines = [f"{kind} {name} = {value};"]
        self._ints += [name] * 4
        if shape < 5:
            self._smalls.append(name)
        if choose.random() < 0.2:
            lines.append(f"if ({self._condition(1)}) {{ {name} = {self._int(1)}; }}")
        return lines

    def _small(self) -> str:
        """A number of 32 bits, most often."""
        return self._choose.choice([*self._smalls[-4:], *self._smalls[-4:], self._read()])

    def _small_of(self, left: str, right: str) -> str:
        """What is made of two numbers and has about as many bits."""
        choose = self._choose
        sign = choose.choice([*"+-&|^", *_COMPARISONS])
        call = f"{choose.choice(['min', 'max'])}({left}, {right})"
        select = f"{self._condition(1)} ? {left} : {right}"
        return choose.choice([f"{left} {sign} {right}", call, select])

    def _read(self) -> str:
        """An element of a vector, if there is one."""
        # A vector of an Encode is made where it is read: read by each other they grow too long.
        vectors = [f"{name}[i]" for name in (self._codes[:1] if self._is_encode else self._codes)]
        vectors += [f"{name}[i / 32]" for name in self._of_blocks]
        return self._choose.choice(vectors or ["i"])

    def _edge(self) -> str:
        """A number at the end of something."""
        number = (1 << self._choose.choice(_POWERS)) + self._choose.choice([-1, 0, 1])
        return str(number) if self._choose.random() < 0.5 else f"(-{number})"

    def _int(self, depth: int) -> str:
        choose = self._choose
        if depth <= 0 or choose.random() < 0.1:
            leaves = [self._small(), self._small(), choose.choice(self._ints), self._read()]
            return choose.choice([*leaves, self._edge()])
        left, right = self._int(depth - 1), self._int(depth - 1)
        match choose.randrange(14):
            case 0 | 1:
                return f"({left} {choose.choice('+-*&|^')} {right})"
            case 2:
                return f"({self._small()} {choose.choice('+-&|^')} {self._edge()})"
            case 3:
                return f"({left} {choose.choice('/%')} {right})"
            case 4 | 5:
                counts = [*_COUNTS, f"({right} & 31)", f"({right} & 63)", right]
                return f"({left} {choose.choice(['<<', '>>'])} {choose.choice(counts)})"
            case 6:
                return f"({choose.choice('~-')}{choose.choice([left, self._small()])})"
            case 7:
                return f"{choose.choice(['abs', 'sign'])}({left})"
            case 8:
                return f"{choose.choice(['min', 'max'])}({left}, {right})"
            case 9 if self._is_encode:
                low, high = choose.choice([*_SPANS, (left, right)])
                return f"random<int>({low}, {high})"
            case 10:
                return choose.choice([f"bitcast<uint32>({self._float(1)})", self._condition(1)])
            case _:
                return f"({self._condition(depth - 1)} ? {left} : {right})"

    def _condition(self, depth: int) -> str:
        choose = self._choose
        sign = choose.choice(_COMPARISONS)
        match choose.randrange(7) if depth > 0 else 0:
            case 0 | 1:
                return f"({self._int(depth)} {sign} {self._int(depth)})"
            case 2:
                return f"({self._small()} {sign} {self._edge()})"
            case 3:
                return f"({self._float(depth - 1)} {sign} {self._float(0)})"
            case 4:
                parts = [self._condition(depth - 1) for _ in range(3)]
                return f"({parts[0]} ? {parts[1]} : {parts[2]})"
            case 5:
                joined = choose.choice(["&&", "||"])
                return f"({self._condition(depth - 1)} {joined} {self._condition(depth - 1)})"
            case _:
                return choose.choice([f"(!{self._int(depth - 1)})", self._int(depth - 1)])

    def _float(self, depth: int) -> str:
        choose = self._choose
        if depth <= 0 or choose.random() < 0.3:
            return choose.choice(self._floats)
        match choose.randrange(5):
            case 0:
                return f"bitcast<float>({self._int(depth - 1)})"
            case 1 | 2:
                return f"({self._int(depth)} * {choose.choice(['1.0', '0.5', *self._floats])})"
            case 3:
                sides = self._float(depth - 1), self._float(depth - 1)
                return f"({self._condition(depth - 1)} ? {sides[0]} : {sides[1]})"
            case _:
                sign = choose.choice("+-*/")
                return f"({self._float(depth - 1)} {sign} {self._float(depth - 1)})"
