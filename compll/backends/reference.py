# SPDX-License-Identifier: Apache-2.0
"""The definition of the language: a NumPy interpreter of the typed IR.

It runs programs as check leaves them, and as the inline pass leaves them; both give the same
packets, and so do all other back ends, bit for bit. Vectors are NumPy arrays, a lambda is evaluated
for all elements at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from compll import packet
from compll.backends import bits, philox, reduction, select
from compll.errors import as_written
from compll.ir import nodes, semantics, transforms
from compll.ir.functions import Value
from compll.ir.types import FLOAT, INT, MAX_PACKED_BITS, Array, Type, UInt
from compll.packet import MAX_ELEMENTS, PacketError

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Key:
    """Where randomness comes from; `offset`: index in the tensor of element 0."""

    seed: int
    step: int
    tensor_id: int
    offset: int


class Interpreter:
    """Values of the variables of one call, and how expressions are evaluated with them."""

    def __init__(self, values: Mapping[nodes.Var, Value], key: Key) -> None:
        """`values`: parameters and vectors that are known from the start."""
        self._values = dict(values)
        self._key = key

    def run(self, lets: tuple[nodes.Let, ...]) -> None:
        """Evaluates lets in order."""
        for let in lets:
            self._values[let.var] = self.eval(let.value)

    def bind(self, var: nodes.Var, value: Value) -> None:
        """Gives a variable a value."""
        self._values[var] = value

    def width(self, kind: Type) -> int:
        """Bits of a scalar or element in a packet."""
        if isinstance(kind, Array):
            return self.width(kind.element)
        if not isinstance(kind, UInt):
            return 32
        if isinstance(kind.bits, int):
            return kind.bits
        value = int(self.eval(kind.bits))
        if not 1 <= value <= MAX_PACKED_BITS:
            raise ValueError(
                f"the width `{as_written(str(kind))}` must be from 1 to {MAX_PACKED_BITS}. "
                f"Received: {value}"
            )
        return value

    def eval(self, expr: nodes.Expr) -> Value:
        """The value of an expression."""
        match expr:
            case nodes.Const():
                return semantics.constant(expr.value, expr.type)
            case nodes.Ref():
                return self._values[expr.var]
            case nodes.Size():
                return np.int64(np.asarray(self.eval(expr.array)).size)
            case nodes.Unary():
                return semantics.unary(expr.op, self.eval(expr.operand))
            case nodes.Binary():
                return semantics.binary(
                    expr.op, self.eval(expr.left), self.eval(expr.right), expr.left.type
                )
            case nodes.Select():
                return semantics.select(
                    self.eval(expr.condition), self.eval(expr.yes), self.eval(expr.no)
                )
            case nodes.Convert():
                width = self.width(expr.type) if isinstance(expr.type, UInt) else 0
                return semantics.convert(
                    self.eval(expr.operand), expr.operand.type, expr.type, width
                )
            case nodes.Bitcast():
                return semantics.bitcast(self.eval(expr.operand), expr.type)
            case nodes.KeyPart():
                # The 64 bits of a seed, as an int has them.
                return np.uint64(self._key.seed if expr.name == "seed" else self._key.step).astype(
                    np.int64
                )
            case nodes.Math():
                return semantics.math(
                    expr.function, [self.eval(argument) for argument in expr.arguments]
                )
            case nodes.Index():
                return self._index(self.eval(expr.array), self.eval(expr.index))
            case nodes.Random():
                return self._random(expr)
            case nodes.Range():
                return np.arange(self._length(expr.count), dtype=np.int64)
            case nodes.Map():
                source = np.asarray(self.eval(expr.source))
                self.bind(expr.position, np.arange(source.size, dtype=np.int64))
                kind = expr.source.type
                element = kind.element if isinstance(kind, Array) else kind
                return self._spread(self._apply(expr.function, [(source, element)]), source.size)
            case nodes.Elementwise():
                size = self._length(expr.size)
                self.bind(expr.position, np.arange(size, dtype=np.int64))
                self.run(expr.lets)
                return self._spread(self.eval(expr.value), size)
            case nodes.Apply():
                return self._apply(
                    expr.function,
                    [(self.eval(argument), argument.type) for argument in expr.arguments],
                )
            case nodes.Reduce():
                return self._reduce(expr)
            case nodes.BlockReduce():
                return self._block_reduce(expr)
            case nodes.Sample():
                return self._sample(expr)
            case nodes.Filter():
                found = np.asarray(self.eval(expr.source))[np.asarray(self.eval(expr.flags))]
                # Not a length: a limit may be more than any vector has.
                return found if expr.limit is None else found[: max(0, int(self.eval(expr.limit)))]
            case nodes.Sort():
                return select.sort(self.eval(expr.source), expr.is_descending)
            case nodes.Hadamard():
                return transforms.hadamard(self.eval(expr.source), self.block(expr.block))
            case nodes.TopK():
                return select.top_k(self.eval(expr.source), int(self.eval(expr.count)))
            case nodes.Scatter():
                used = None if expr.used is None else int(self.eval(expr.used))
                indices, values = self.eval(expr.indices), self.eval(expr.values)
                return select.scatter(self._length(expr.size), indices, values, used)
            case _:
                raise TypeError(f"`expr` must be an IR expression. Received: {expr!r}")

    def _length(self, count: nodes.Expr) -> int:
        length = max(0, int(self.eval(count)))
        if length > MAX_ELEMENTS:
            raise ValueError(
                f"a vector must have at most {MAX_ELEMENTS} elements. Received: {length}"
            )
        return length

    def _spread(self, value: Value, size: int) -> Value:
        # A lambda that ignores its argument gives one scalar for all elements.
        return np.broadcast_to(np.asarray(value), (size,))

    def _apply(self, function: nodes.Lambda, arguments: list[tuple[Value, Type]]) -> Value:
        for var, (value, kind) in zip(function.params, arguments, strict=True):
            if kind != var.type:
                width = self.width(var.type) if isinstance(var.type, UInt) else 0
                value = semantics.convert(value, kind, var.type, width)
            self.bind(var, value)
        self.run(function.lets)
        return self.eval(function.result)

    def _index(self, array: Value, index: Value) -> Value:
        array = np.asarray(array)
        if array.size == 0:
            return np.zeros(np.shape(index), array.dtype)[()]
        inside = (index >= 0) & (index < array.size)
        return semantics.select(inside, array[np.where(inside, index, 0)], array.dtype.type(0))

    def _random(self, expr: nodes.Random) -> Value:
        low, high = self.eval(expr.low), self.eval(expr.high)
        noise = self._noise(self.eval(expr.position), expr.site, expr.bits)
        if expr.type == INT:
            span = np.multiply(noise, np.subtract(high, low))
            return np.add(low, np.right_shift(span, expr.bits))
        fraction = noise.astype(np.float32) * np.float32(2.0**-16)
        return np.add(low, np.multiply(np.subtract(high, low), fraction))

    def _noise(self, positions: Value, site: int, bits: int) -> Value:
        elements = np.atleast_1d(positions) + np.int64(self._key.offset)
        draw = philox.noise16 if bits == 16 else philox.noise32
        return draw(elements, self._key.seed, self._key.step, self._key.tensor_id, site)

    def _sample(self, expr: nodes.Sample) -> Value:
        source = np.asarray(self.eval(expr.source))
        noise = self._noise(np.arange(self._length(expr.count), dtype=np.int64), expr.site, 32)
        return self._index(source, np.right_shift(np.multiply(noise, source.size), 32))

    def block(self, expr: nodes.Expr) -> int:
        """Elements of a block."""
        value = int(self.eval(expr))
        if value not in nodes.BLOCKS:
            sizes = ", ".join(map(str, nodes.BLOCKS))
            raise ValueError(f"a block must have {sizes} elements. Received: {value}")
        return value

    def _block_reduce(self, expr: nodes.BlockReduce) -> Value:
        init, values = self.eval(expr.init), self.eval(expr.source)
        is_float = expr.init.type == FLOAT
        if is_float and isinstance(expr.source.type, Array):
            values = semantics.convert(values, expr.source.type.element, FLOAT)
        return reduction.reduce_blocks(expr.reducer, self.block(expr.block), init, values, is_float)

    def _reduce(self, expr: nodes.Reduce) -> Value:
        init, values = self.eval(expr.init), self.eval(expr.source)
        if not isinstance(expr.source.type, Array):
            raise TypeError(f"a Reduce needs a vector. Received: {expr.source.type}")
        if expr.type == FLOAT:
            return reduction.reduce_float(
                expr.reducer, init, semantics.convert(values, expr.source.type.element, FLOAT)
            )
        return reduction.reduce_int(expr.reducer, init, values)


def _float_bytes(values: Floats) -> bytes:
    """Floats in little-endian; all NaNs are written as one: theirs depend on operand order."""
    words = values.astype("<f4").view("<u4")
    return np.where(np.isnan(values), np.uint32(0x7FC00000), words).astype("<u4").tobytes()


class Reference:
    """A codec that runs in NumPy, with chunks and prefixes.

    Raises ValueError for parameters that are unknown, missing or out of range.
    """

    def __init__(self, program: nodes.Program, /, **params: float) -> None:
        """`params`: values by name; the others take their defaults."""
        self.program = program
        self.params = packet.parameter_values(program, params)
        self.codec_hash = packet.codec_hash(program, self.params)
        self.state_names = program.state_names

    def _start(self, key: Key) -> Interpreter:
        values = {}
        for param in self.program.params:
            value = self.params[param.var.name]
            values[param.var] = semantics.constant(
                value if param.var.type == FLOAT else int(value), param.var.type
            )
        interpreter = Interpreter(values, key)
        for kind in self.program.widths:
            interpreter.width(kind)
        for block in self.program.blocks:
            interpreter.block(block)
        return interpreter

    def encode_body(
        self,
        gradient: Floats,
        key: Key,
        state: Sequence[Floats] = (),
        new_state: Sequence[Floats] = (),
    ) -> bytes:
        """The body of the packet of one chunk; `new_state` becomes what `state` is after it."""
        encode = self.program.encode
        if encode is None:
            raise ValueError(f"{self.program.name} has no Encode")
        with semantics.quiet():
            interpreter = self._start(key)
            interpreter.bind(encode.gradient, gradient)
            for update, old in zip(encode.updates, state, strict=True):
                interpreter.bind(update.state, old)
            interpreter.run(encode.lets)
            parts = []
            for value, capacity in zip(encode.fields, encode.sizes, strict=True):
                width = interpreter.width(value.type)
                found = np.atleast_1d(interpreter.eval(value))
                if capacity is not None:
                    room = max(0, int(interpreter.eval(capacity))) - found.size
                    found = np.concatenate([found, np.zeros(room, found.dtype)])
                is_float = value.type in (FLOAT, Array(FLOAT))
                parts.append(
                    _float_bytes(found) if is_float else bits.pack(found.astype(np.int64), width)
                )
            for update, new in zip(encode.updates, new_state, strict=True):
                new[...] = interpreter.eval(update.value)
        return b"".join(parts)

    def _layout(self, interpreter: Interpreter, n: int) -> list[tuple[int, int]]:
        """Number of elements and bits of an element, for each field of a packet of n elements."""
        decode, encode = self.program.decode, self.program.encode
        if decode is not None:
            interpreter.bind(decode.gradient, np.broadcast_to(np.float32(0), (n,)))
            fields = [(item.var.type, item.size) for item in decode.fields]
        elif encode is not None:
            interpreter.bind(encode.gradient, np.broadcast_to(np.float32(0), (n,)))
            fields = [
                (value.type, size) for value, size in zip(encode.fields, encode.sizes, strict=True)
            ]
        else:
            raise ValueError(f"{self.program.name} has no function")
        return [
            (1 if size is None else max(0, int(interpreter.eval(size))), interpreter.width(kind))
            for kind, size in fields
        ]

    def body_bytes(self, n: int) -> int:
        """Bytes of the body of a chunk of n elements."""
        with semantics.quiet():
            layout = self._layout(self._start(Key(0, 0, 0, 0)), n)
        return sum(bits.packed_bytes(count, width) for count, width in layout)

    def decode_body(self, body: bytes, n: int) -> Floats:
        """The n values of one chunk; raises PacketError."""
        decode = self.program.decode
        if decode is None:
            raise ValueError(f"{self.program.name} has no Decode")
        with semantics.quiet():
            interpreter = self._start(Key(0, 0, 0, 0))
            layout = self._layout(interpreter, n)
            expected = sum(bits.packed_bytes(count, width) for count, width in layout)
            if len(body) != expected:
                raise PacketError(
                    f"the body of {n} elements must have {expected} bytes. Received: {len(body)}"
                )
            at = 0
            for item, (count, width) in zip(decode.fields, layout, strict=True):
                size = bits.packed_bytes(count, width)
                value = self._read(body[at : at + size], item.var.type, count, width)
                at += size
                if item.equals is not None and value != interpreter.eval(
                    nodes.Ref(item.var.type, item.var.span, item.equals)
                ):
                    wanted = f"{item.var.name} = {self.params[item.equals.name]:g}"
                    raise PacketError(f"the packet must have {wanted}. Received: {value}")
                interpreter.bind(item.var, value)
            interpreter.run(decode.lets)
            return np.array(interpreter.eval(decode.result), np.float32)

    def _read(self, data: bytes, kind: Type, count: int, width: int) -> Value:
        element = kind.element if isinstance(kind, Array) else kind
        if element == FLOAT:
            values: Value = np.frombuffer(data, "<f4", count).astype(np.float32)
        else:
            values = bits.unpack(data, count, width)
        return values if isinstance(kind, Array) else values[0]

    def encode(
        self,
        x: Floats,
        seed: int = 0,
        step: int = 0,
        tensor_id: int = 0,
        offset: int = 0,
        state: Floats | None = None,
    ) -> Bytes:
        """Packets of a float32 vector [n]; returns uint8 [wire_bytes(n)].

        `state`: float32 [len(state_names), n], zeros at first, which becomes what it is after the
        call; only for a codec that has state.
        """
        packet.check_vector(x, np.float32, "x")
        packet.check_key(seed, step, tensor_id, offset)
        packet.check_state(state, self.state_names, x.size, self.program.name)
        old = np.empty((0, x.size), np.float32) if state is None else state
        new = np.empty_like(old)
        parts = []
        start = 0
        for size in packet.packet_sizes(x.size):
            key = Key(seed, step, tensor_id, offset + start)
            end = start + size
            states = (list(old[:, start:end]), list(new[:, start:end]))
            body = self.encode_body(x[start:end], key, *states)
            parts += [packet.prefix(self.codec_hash, size), body]
            start = end
        old[...] = new
        return np.frombuffer(b"".join(parts), np.uint8).copy()

    def decode(self, packets: Bytes, n: int) -> Floats:
        """The float32 vector [n] in `packets` (uint8); raises PacketError."""
        packet.check_vector(packets, np.uint8, "packets")
        parts = packet.split(packets.tobytes(), self.codec_hash, n, self.body_bytes)
        out = np.empty(n, np.float32)
        start = 0
        for size, body in parts:
            out[start : start + size] = self.decode_body(body, size)
            start += size
        return out

    def wire_bytes(self, n: int) -> int:
        """Bytes of the packets of n elements, prefixes included."""
        return packet.wire_bytes(n, self.body_bytes)
