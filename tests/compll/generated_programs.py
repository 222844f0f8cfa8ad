# SPDX-License-Identifier: Apache-2.0
"""Programs that a grammar makes, for back ends to be compared: right by construction, mostly.

`fuzzing.py` changes texts, so that few get past the check; these do, and do what nobody writes:
reductions in decoders, blocks of blocks, indices that wrap. All choices come from one source.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.compll.generated_expressions import Expressions, Function, Vector

NAME = "made"
PARAMS = (
    ("uint8", "width", "[1, 16] = 5"),
    ("float", "scale", "[-10, 10] = 1.5"),
    ("uint16", "block", "[16, 1024] = 64"),
    ("int", "count", "[-5, 300] = 9"),
)
# Values that a program is run with; a block must be a power of two.
VALUES: tuple[dict[str, float], ...] = (
    {},
    {"width": 1, "block": 16, "count": -3},
    {"width": 16, "scale": -0.5, "block": 1024, "count": 300},
    {"width": 8, "scale": 0, "block": 128, "count": 50},
)
REDUCERS = ("sum", "prod", "min", "max", "count", "and", "or")
FOLDS = {"sum": "a + b", "prod": "b * a", "min": "a < b ? a : b", "max": "b > a ? b : a"}
BLOCKS = ("block", "16", "32", "128", "1024")
N = "gradient.size"
# Ends of groups of 8, 16 codes, halves; and lengths that parameters tell.
LENGTHS = (f"({N} + 7) / 8 * 8", f"({N} + 15) / 16 * 16", f"{N} / 2", "count", "40", f"{N} + 3")


@dataclass(frozen=True)
class Made:
    """A program in parts, so that parts can be left out.

    `fields`: name and type of what a packet holds; a parameter is not declared again.
    `sent`: expressions that an Encode sends where Decode has a name.
    """

    states: tuple[str, ...]
    encode: tuple[str, ...]
    fields: tuple[tuple[str, str], ...]
    decode: tuple[str, ...]
    sent: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """The specification."""
        declared = " ".join(f"{kind} {name} in {rest};" for kind, name, rest in PARAMS)
        params = ", ".join(f"{kind} {name}" for kind, name, _ in PARAMS)
        names = ", ".join(name for name, _ in self.fields)
        sent = ", ".join(dict(self.sent).get(name, name) for name, _ in self.fields)
        states = "".join(f" float* {name};" for name in self.states)
        given = [name for _, name, _ in PARAMS]
        lines = [
            f"param Made {{ {declared} }}",
            *([f"state Made {{{states} }}"] if states else []),
            f"void MadeEncode(float* gradient, uint8* packet, {params}) {{",
            *(f"    {statement}" for statement in self.encode),
            f"    packet = concat({sent});",
            "}",
            f"void MadeDecode(uint8* packet, float* gradient, {params}) {{",
            *(f"    {kind} {name};" for name, kind in self.fields if name not in given),
            f"    extract(packet, {names});",
            *(f"    {statement}" for statement in self.decode),
            "}",
        ]
        return "\n".join(lines) + "\n"


def generate(choose: random.Random) -> Made:
    """A program; `choose` makes all choices."""
    return _Writer(choose).program()


class _Writer(Expressions):
    def program(self) -> Made:
        choose = self._choose
        states = tuple(f"state{k}" for k in range(choose.choice([0, 0, 0, 1, 2])))
        encode = self._function = Function(is_encode=True)
        encode.vectors = [Vector(name, "float", "n") for name in ("gradient", *states)]
        self._statements(choose.randint(2, 7))
        sparse = self._sparse() if choose.random() < 0.25 else ()
        # A state that is read after its assignment has its new value.
        for name in states:
            self._add(f"{name} = map(range({N}), {self._lambda('int', 'float', is_index=True)});")
        fields, vectors, scalars = self._fields(sparse)
        if choose.random() < 0.15:
            fields.append(("width", "uint8"))
        choose.shuffle(fields)
        decode = self._function = Function(is_encode=False, vectors=vectors)
        for name, kind in scalars:
            (decode.floats if kind == "float" else decode.ints).append(name)
        self._statements(choose.randint(0, 4))
        self._add(f"gradient = {self._result(sparse)};")
        return Made(states, tuple(encode.statements), tuple(fields), tuple(decode.statements))

    def _statements(self, number: int) -> None:
        vectors: list[Callable[[], None]] = [
            *(self._map, self._map, self._map, self._map, self._block_reduce, self._block_reduce),
            *(self._reduce, self._reduce, self._reduce),
        ]
        if not self._is_quantiser:
            vectors += [self._filter, self._sort, self._top_k]
            if self._function.is_encode:
                vectors.append(self._sample)
        scalars: list[Callable[[], None]] = [self._scalar, self._assign, self._branch, self._helper]
        for _ in range(number):
            self._choose.choice(vectors + scalars if self._function.vectors else scalars)()

    def _keep(self, name: str, kind: str, length: str, value: str, cost: int = 1) -> None:
        """Declares a vector."""
        self._add(f"{kind}* {name} = {value};")
        self._function.vectors.append(Vector(name, kind, length, cost))

    # Sources: a vector that has a name, or is made where it is used.

    def _vector(self, kind: str | None = None) -> Vector | None:
        found = [one for one in self._function.vectors if kind in (None, one.kind)]
        return self._choose.choice(found) if found else None

    def _mapped(self, kind: str) -> Vector:
        """A map that has no name yet, to `kind`; its name is its text."""
        if self._choose.random() < 0.4:
            source = self._vector()
            assert source is not None
            text = f"map({source.name}, {self._lambda(source.kind, kind)})"
            return Vector(text, kind, source.length, self._cost + source.cost)
        is_whole = self._choose.random() < (0.9 if self._is_quantiser else 0.7)
        length = N if is_whole else self._choose.choice(LENGTHS)
        text = f"map(range({length}), {self._lambda('int', kind, is_index=True)})"
        return Vector(text, kind, "n" if is_whole else length, self._cost)

    def _source(self, *kinds: str) -> Vector:
        """A vector of one of these kinds; of any if none is given."""
        choose = self._choose
        found = [one for one in self._function.vectors if not kinds or one.kind in kinds]
        if found and choose.random() < 0.6:
            return choose.choice(found)
        return self._mapped(choose.choice(kinds or ("float", "float", "int", self._kind())))

    # Statements.

    def _map(self) -> None:
        kind = self._choose.choice(["float", "float", "float", "int", self._kind(), self._kind()])
        made = self._mapped(kind)
        self._keep(self._name(), kind, made.length, made.name, made.cost)

    def _reducer(self, kind: str, reducers: tuple[str, ...] = REDUCERS) -> tuple[str, str]:
        """A reducer as it is written, and the kind of what it gives."""
        name = self._choose.choice(reducers)
        is_float = kind == "float" and name not in ("count", "and", "or")
        result = "float" if is_float else "int"
        if name in FOLDS and self._choose.random() < 0.25:
            return f"[&]({result} a, {result} b) -> {result} {{ return {FOLDS[name]}; }}", result
        return name, result

    def _reduce(self) -> None:
        is_made = self._is_quantiser and self._choose.random() < 0.6
        source, name = self._mapped("float") if is_made else self._source(), self._name()
        reducer, kind = self._reducer(source.kind)
        init = self._choose.choice(["0", "1", "(-5)", "count"])
        self._add(f"{kind} {name} = reduce({source.name}, {init}, {reducer});")
        (self._function.floats if kind == "float" else self._function.ints).append(name)

    def _block_reduce(self) -> None:
        source, block = self._source(), self._choose.choice(BLOCKS)
        reducer, kind = self._reducer(source.kind)
        init = self._choose.choice(["0", "1", "2"])
        text = f"block_reduce({source.name}, {block}, {init}, {reducer})"
        self._keep(self._name(), kind, f"{source.length} by {block}", text)

    def _filter(self) -> None:
        limit = self._choose.choice(["", "", ", count", ", 10", f", {N} / 3", ", max(count, 0)"])
        name = self._name()
        if self._choose.random() < 0.5:
            flags = self._lambda("int", "uint1", is_index=True, may_draw=False)
            self._keep(name, "int", name, f"filter(range({N}), {flags}{limit})")
        else:
            source = self._source()
            flags = self._lambda(source.kind, "uint1", may_draw=False)
            self._keep(name, source.kind, name, f"filter({source.name}, {flags}{limit})")

    def _sort(self) -> None:
        source = self._source()
        order = self._choose.choice(["less", "greater"])
        if source.kind in ("float", "int") and self._choose.random() < 0.3:
            sign = self._choose.choice("<>")
            order = f"[&]({source.kind} a, {source.kind} b) -> uint1 {{ return a {sign} b; }}"
        text = f"sort({source.name}, {order})"
        # Some are transforms; not by a choice, so that seeds keep the rest of their programs.
        number = sum(map(ord, source.name))
        if source.kind == "float" and number % 2 == 1:
            text = f"hadamard({source.name}, {BLOCKS[number % len(BLOCKS)]})"
        self._keep(self._name(), source.kind, source.length, text)

    def _top_k(self) -> None:
        name, count = self._name(), self._choose.choice(["5", "max(count, 0)", f"{N} / 2", "count"])
        self._keep(name, "int", name, f"top_k({self._source('float').name}, {count})")

    def _sample(self) -> None:
        source, name = self._source(), self._name()
        count = self._choose.choice(["5", "300", f"{N} / 7", "count"])
        self._keep(name, source.kind, name, f"sample({source.name}, {count})")

    def _scalar(self) -> None:
        name, scope = self._name(), self._function.scope()
        if self._choose.random() < 0.5:
            self._add(f"float {name} = {self._float(2, scope)};")
            self._function.floats.append(name)
        else:
            self._add(f"int {name} = {self._int(2, scope)};")
            self._function.ints.append(name)

    def _assign(self) -> None:
        """Changes a scalar; helpers that read it see the change."""
        names = self._function.floats if self._choose.random() < 0.5 else self._function.ints
        if not names:
            self._scalar()
            return
        name, sign = self._choose.choice(names), self._choose.choice(["=", "+=", "-=", "*=", "/="])
        make = self._float if names is self._function.floats else self._int
        self._add(f"{name} {sign} {make(1, self._function.scope())};")

    def _branch(self) -> None:
        if not self._function.floats:
            self._scalar()
            return
        scope, name = self._function.scope(), self._choose.choice(self._function.floats)
        text = f"if ({self._condition(1, scope)}) {{ {name} = {self._float(1, scope)}; }}"
        if self._choose.random() < 0.5:
            text += f" else {{ {name} *= {self._float(1, scope)}; }}"
        self._add(text)

    def _helper(self) -> None:
        """A lambda with a name, which expressions call."""
        name = self._name()
        body = self._lambda("float", "float", may_draw=False, depth=1)
        self._add(f"lambda_func {name} = {body}")
        if self._cost < 10:  # calls in calls grow fast
            self._function.helpers.append(name)

    # What both functions must agree on.

    def _sparse(self) -> tuple[str, str, str]:
        """Indices, values and their number, for a scatter."""
        kept, low, values, count = (self._name() for _ in range(4))
        self._choose.choice([self._filter, self._top_k])()
        if self._function.vectors[-1].kind != "int":
            self._top_k()
        found = self._function.vectors[-1].name
        self._add(f"int* {kept} = map({found}, [&](int i) -> int {{ return i; }});")
        self._add(f"uint16* {low} = map({kept}, [&](int i) -> uint16 {{ return i; }});")
        self._add(f"float* {values} = map({kept}, {self._lambda('int', 'float', is_index=True)});")
        self._add(f"uint32 {count} = {kept}.size;")
        return low, values, count

    def _fields(
        self, sparse: tuple[str, ...]
    ) -> tuple[list[tuple[str, str]], list[Vector], list[tuple[str, str]]]:
        """Fields of the packet, and which of them are vectors and scalars of a Decode."""
        choose, function = self._choose, self._function
        vectors: list[Vector] = []
        scalars = [(name, "float") for name in function.floats[-2:]]
        if sparse:
            low, values, count = sparse
            vectors = [Vector(low, "uint16", "kept"), Vector(values, "float", "kept")]
            scalars.append((count, "uint32"))
        # In a Decode `gradient` is the result, and states are not there.
        made = [one for one in function.vectors if one.name.startswith("v")]
        if self._is_quantiser:
            # Quantisers do not send floats, but those of blocks.
            made = [one for one in made if one.kind != "float" or one.length != "n"]
        for one in choose.sample(made, min(len(made), choose.randint(1, 3))):
            if one.kind == "int":
                name, kind = self._name(), self._kind()
                self._add(
                    f"{kind}* {name} = map({one.name}, [&](int z) -> {kind} {{ return z; }});"
                )
                vectors.append(Vector(name, kind, one.length))
            else:
                vectors.append(replace(one, cost=1))
        for value in function.ints[-2:]:
            name, kind = self._name(), self._kind()
            self._add(f"{kind} {name} = {value};")
            scalars.append((name, kind))
        if not vectors:
            name, kind = self._name(), self._kind() if self._is_quantiser else "float"
            self._add(f"{kind}* {name} = map(gradient, {self._lambda('float', kind)});")
            vectors.append(Vector(name, kind, "n"))
        return [*((one.name, f"{one.kind}*") for one in vectors), *scalars], vectors, scalars

    def _result(self, sparse: tuple[str, ...]) -> str:
        """What a Decode gives: as many elements as the gradient has."""
        choose = self._choose
        whole = [one for one in self._function.vectors if one.length == "n"]
        if sparse and choose.random() < 0.8:
            count = choose.choice([f", {sparse[2]}", f", {sparse[2]}", ""])
            return f"scatter({N}, {sparse[0]}, {sparse[1]}{count})"
        if whole and choose.random() < 0.4:
            one = choose.choice(whole)
            return f"map({one.name}, {self._lambda(one.kind, 'float')})"
        return f"map(range({N}), {self._lambda('int', 'float', is_index=True)})"
