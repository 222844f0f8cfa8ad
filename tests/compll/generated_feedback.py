# SPDX-License-Identifier: Apache-2.0
"""Quantisers that a grammar makes, for error feedback: most reads are in order, a few are not.

With feedback an encoder overwrites what it reads, the sum of gradient and residual, while it works.
Programs of `generated_programs.py` read so much out of order that no loop of theirs does that; here
a program has the shape of a codec, whose loops do, and one or two reads elsewhere, which must stop
them. All choices come from one source.
"""

import random

from tests.compll.generated_programs import Made, N

BLOCKS = ("16", "64", "256", "block")
# Of codes; fields of 8 bits and floats can have an element per block.
WIDTHS = ("uint1", "uint2", "uint4", "uint8", "uint8", "uint16", "uint<3>", "uint<width>")
# Elements that are far from the loop's own, and elements of no loop.
FAR = (f"{N} - 1 - {{0}}", "{0} + 1", "{0} - 1", "{0} ^ 1", "{0} / 16", "{0} * 3", "0", f"{N} - 1")
FIXED = ("0", f"{N} - 1", f"{N} / 2", "1030", "count")


def generate_feedback(choose: random.Random) -> Made:
    """A program that can encode with feedback; `choose` makes all choices."""
    return _Writer(choose).program()


class _Writer:
    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self._number = 0
        # How often a read is out of order.
        self._odd = choose.choice([0.02, 0.08, 0.2])
        self._statements: list[str] = []
        self._scalars: list[str] = []
        self._beside: list[str] = []
        self._block = choose.choice(BLOCKS)
        self._blocks: list[str] = []
        self._codes: list[str] = []
        self._fields: list[tuple[str, str]] = []
        self._sent: list[tuple[str, str]] = []

    def program(self) -> Made:
        choose = self._choose
        for _ in range(choose.choice([0, 0, 1, 1, 2, 3])):
            self._scalar()
        if choose.random() < 0.5:
            self._reduce_blocks()
        for _ in range(choose.choice([1, 1, 1, 2])):
            self._code()
        if choose.random() < 0.3:
            self._scalar()
        self._send_scalars()
        choose.shuffle(self._fields)
        encode = tuple(self._statements)
        return Made((), encode, tuple(self._fields), tuple(self._decode()), tuple(self._sent))

    def _name(self) -> str:
        self._number += 1
        return f"v{self._number}"

    def _is_odd(self) -> bool:
        return self._choose.random() < self._odd

    # Encode.

    def _at(self, vector: str, position: str, *, may_be_odd: bool = True) -> str:
        """An element of a vector as long as the gradient, the loop's own more often than not."""
        place = self._choose.choice(FAR).format(position) if may_be_odd and self._is_odd() else None
        return f"{vector}[{place or position}]"

    def _of_block(self, vector: str, position: str) -> str:
        """What the block of an element has, more often than not."""
        near = f"{position} / {self._block}"
        far = (f"{vector}.size - 1 - {near}", position, f"{position} / 32", "0", f"{near} + 1")
        return f"{vector}[{self._choose.choice(far) if self._is_odd() else near}]"

    def _term(self, position: str) -> str:
        """What an expression of an element may add."""
        choose = self._choose
        terms = ["0.25", "scale", "random<float>(0, 1)", "step"]
        terms += self._scalars * 2
        terms += [self._of_block(name, position) for name in self._blocks] * 2
        if self._is_odd():
            terms = [self._at("gradient", position), f"gradient[{choose.choice(FIXED)}]"]
            terms += [self._at(name, position) for name in self._beside]
        return choose.choice(terms)

    def _value(self, position: str) -> str:
        """A float of element `position`."""
        sign = self._choose.choice(["+", "-", "*", "/"])
        own = self._at("gradient", position)
        if self._choose.random() < 0.5:
            own = f"abs({own})"
        return f"({own} {sign} {self._term(position)})" if self._choose.random() < 0.7 else own

    def _mapped(self) -> str:
        """Floats, as many as the gradient has."""
        if self._choose.random() < 0.5:
            return f"map(gradient, [&](float g) -> float {{ return abs(g) + {self._plain()}; }})"
        return f"map(range({N}), [&](int i) -> float {{ return {self._value('i')}; }})"

    def _plain(self) -> str:
        return self._choose.choice(["0.5", "scale", *self._scalars])

    def _scalar(self) -> None:
        choose, name = self._choose, self._name()
        shape = choose.choice(["reduce", "reduce", "reduce", "kept", "top", "element", "sum"])
        if shape == "reduce":
            init = f"gradient[{choose.choice(FIXED)}]" if self._is_odd() else "0"
            text = f"reduce({self._mapped()}, {init}, {choose.choice(['max', 'sum', 'min'])})"
        elif shape == "kept":
            kept = self._name()
            limit = choose.choice(["", "", ", count", f", {N} / 3"])
            flags = f"[&](int i) -> uint1 {{ return {self._value('i')} > {self._plain()}; }}"
            self._statements.append(f"int* {kept} = filter(range({N}), {flags}{limit});")
            found = self._name()
            values = f"map({kept}, [&](int k) -> float {{ return gradient[k]; }})"
            self._statements.append(f"float* {found} = {values};")
            self._beside.append(found)
            text = choose.choice([f"{found}.size", f"reduce({found}, 0, sum)", f"{found}[0]"])
        elif shape == "top":
            kept, count = self._name(), choose.choice(["5", f"{N} / 4", "max(count, 0)"])
            self._statements.append(f"int* {kept} = top_k({self._mapped()}, {count});")
            values = f"map({kept}, [&](int k) -> float {{ return gradient[k]; }})"
            text = f"reduce({values}, 0, {choose.choice(['sum', 'max'])})"
        elif shape == "element" and choose.random() < 0.5:
            text = f"gradient[{choose.choice(FIXED)}] * 2"
        else:
            text = f"{self._plain()} + {self._plain()}"
        self._statements.append(f"float {name} = {text};")
        self._scalars.append(name)

    def _reduce_blocks(self) -> None:
        """Scales of blocks, as they are or made of something."""
        choose, name = self._choose, self._name()
        init = self._plain() if self._is_odd() else "0"
        reducer = choose.choice(["max", "max", "sum", "min"])
        text = f"block_reduce({self._mapped()}, {self._block}, {init}, {reducer})"
        self._statements.append(f"float* {name} = {text};")
        self._blocks.append(name)
        if choose.random() < 0.6:
            made, kind = self._name(), choose.choice(["float", "float", "uint8", "uint16"])
            more = f"gradient[{choose.choice(FIXED)}]" if self._is_odd() else self._plain()
            if choose.random() < 0.7:
                mapped = f"map({name}, [&](float s) -> {kind} {{ return s + {more}; }})"
            else:
                own = choose.choice(["b", "b", f"{name}.size - 1 - b"])
                body = f"[&](int b) -> {kind} {{ return {name}[{own}] + {more}; }}"
                mapped = f"map(range({name}.size), {body})"
            self._statements.append(f"{kind}* {made} = {mapped};")
            self._fields.append((made, f"{kind}*"))
            self._blocks.append(made)
        else:
            self._fields.append((name, "float*"))

    def _code(self) -> None:
        """Codes of all elements."""
        choose, name, kind = self._choose, self._name(), self._choose.choice(WIDTHS)
        terms = [self._value("i")]
        terms += [self._at(one, "i") for one in self._codes]
        value = f" {choose.choice('+-*')} ".join(terms)
        shown = choose.choice([f"{value} * 3", f"abs({value}) * 10", f"{value} > {self._plain()}"])
        body = f"[&](int i) -> {kind} {{ return {shown}; }}"
        self._statements.append(f"{kind}* {name} = map(range({N}), {body});")
        self._codes.append(name)
        self._fields.append((name, f"{kind}*"))

    def _send_scalars(self) -> None:
        choose = self._choose
        for name in self._scalars:
            if choose.random() < 0.7:
                self._fields.append((name, "float"))
        if choose.random() < 0.2:
            found = [f"gradient[{at}]" for at in FIXED]
            found += [f"{one}[{choose.choice(['0', f'{one}.size - 1'])}]" for one in self._blocks]
            name = self._name()
            self._fields.append((name, "float"))
            self._sent.append((name, choose.choice(found)))

    # Decode.

    def _decode(self) -> list[str]:
        choose = self._choose
        names = [name for name, _ in self._fields]
        scalars = [name for name, kind in self._fields if kind == "float"]
        self._scalars = scalars
        self._blocks = [name for name in self._blocks if name in names]
        found: list[str] = []
        if self._is_odd() or choose.random() < 0.1:
            vector = choose.choice([*self._codes, *self._blocks])
            name, last = self._name(), f"{vector}.size - 1"
            at = choose.choice([f"{vector}[0]", f"{vector}[{last}]", f"{vector}[7]", last])
            found.append(f"float {name} = {at};")
            self._scalars = [*scalars, name]
        terms = [self._at(name, "i") for name in self._codes]
        terms += [self._of_block(name, "i") for name in self._blocks]
        terms += [name for name in self._scalars if choose.random() < 0.7]
        choose.shuffle(terms)
        value = terms[0]
        for term in terms[1:]:
            value = f"({value} {choose.choice('+-*')} {term})"
        found.append(
            f"gradient = map(range({N}), [&](int i) -> float {{ return {value} * 0.5; }});"
        )
        return found
