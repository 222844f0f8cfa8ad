# SPDX-License-Identifier: Apache-2.0
"""What is timed of a codec, and whether the last round of it has left what the CPU computes.

Each round begins alike: with zeros where a call reads what it writes, else with bytes that no
result has.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.gpu.binding import ADD, SET
from benchmarks.gpu.checks import same
from benchmarks.gpu.cpu import Cpu
from benchmarks.gpu.machine import Bytes, Floats, GpuCodec, Memory

if TYPE_CHECKING:
    from benchmarks.gpu.shares import Buffers

NUM_MERGED = 16
# Of every call that is timed.
KEY: dict[str, Any] = {"seed": 1, "step": 2, "tensor_id": 3}
_NO_RESULT = 0xFF  # a float of these bytes is NaN, and no prefix has them


@dataclass(frozen=True)
class Case:
    """One operation: `run` times a number of calls, `reset` stands before, `is_right` behind it."""

    what: str
    reset: Callable[[], None]
    run: Callable[[int], float]
    is_right: Callable[[], bool]


class Timed:
    """The operations of one codec on one tensor."""

    def __init__(
        self, codec: GpuCodec, cpu: Cpu, buffers: "Buffers", rows: Sequence[Memory], calls: int
    ) -> None:
        """`rows`: NUM_MERGED packets of each set; `calls`: of a round."""
        self._codec, self._cpu, self._buffers, self._rows = codec, cpu, buffers, rows
        self._calls, self._sets = calls, buffers.num_sets

    def encode(self) -> Case:
        """Without a residual, on all sets that the codec has."""
        sets = self._codec.sets
        used = len(counts(self._calls, len(sets)))

        def is_right() -> bool:
            wanted = self._cpu.encode(self._buffers.x, **KEY)
            return all(np.array_equal(one.get(), wanted) for one in sets[:used])

        return Case(
            "encode", lambda: _fill(sets, _NO_RESULT), self._encoder(len(sets), None), is_right
        )

    def encode_feedback(self) -> Case:
        """With a residual, which each call replaces."""
        residuals, sets = self._buffers.residuals, self._codec.sets
        turns = counts(self._calls, self._sets)

        def reset() -> None:
            _fill(residuals, 0)
            _fill(sets, _NO_RESULT)

        def is_right() -> bool:
            left = np.zeros(self._codec.n, np.float32)
            good = True
            for done in range(1, max(turns) + 1):
                wanted = self._cpu.encode_feedback(self._buffers.x, left, **KEY)
                for k in (k for k, count in enumerate(turns) if count == done):
                    good &= np.array_equal(sets[k].get(), wanted) and same(residuals[k].get(), left)
            return good

        return Case("encode, feedback", reset, self._encoder(self._sets, residuals), is_right)

    def encode_state(self) -> Case:
        """From zeros, as the state, to another vector."""
        codec = self._codec
        used = len(counts(self._calls, self._sets))

        def reset() -> None:
            _fill(codec.states[::2], 0)
            _fill([*codec.states[1::2], *codec.sets], _NO_RESULT)

        def is_right() -> bool:
            state = np.zeros((codec.num_states, codec.n), np.float32)
            wanted = self._cpu.encode(self._buffers.x, state, **KEY)
            made = zip(codec.sets[:used], codec.states[1::2], strict=False)
            return all(
                np.array_equal(one.get(), wanted) and same(new.get(), state.ravel())
                for one, new in made
            )

        return Case("encode", reset, self._encoder(self._sets, None), is_right)

    def decode(self) -> Case:
        """Writes."""
        outs, rows = self._buffers.outs, self._rows[::NUM_MERGED]
        turns = counts(self._calls, self._sets)

        def is_right() -> bool:
            found = zip(self._decoded(rows[: len(turns)]), outs, strict=False)
            return all(same(out.get(), values) for values, out in found)

        return self._decoder("decode", rows, self._sets, SET, is_right)

    def decode_add(self, sets: int) -> Case:
        """Adds to what the call before has left."""
        outs = self._buffers.outs
        rows = self._rows[::NUM_MERGED] if sets == self._sets else self._rows[:sets]
        turns = counts(self._calls, sets)

        def is_right() -> bool:
            good = True
            decoded = self._decoded(rows[: len(turns)])
            for out, values, count in zip(outs, decoded, turns, strict=False):
                total = np.zeros_like(values)
                for _ in range(count):
                    total += values
                good &= same(out.get(), total)
            return good

        return self._decoder("decode, add", rows, sets, ADD, is_right)

    def merge(self) -> Case:
        """Sums the packets of a set."""

        def is_right() -> bool:
            outs = zip(self._sums(), self._buffers.outs, strict=False)
            return all(same(out.get(), total) for total, out in outs)

        return self._decoder(f"merge of {NUM_MERGED}", self._rows, self._sets, SET, is_right)

    def _encoder(self, sets: int, residuals: Sequence[Memory] | None) -> Callable[[int], float]:
        gradients = self._buffers.gradients[:sets]
        return lambda calls: self._codec.time_encode(gradients, residuals, calls)

    def _decoder(
        self,
        what: str,
        rows: Sequence[Memory],
        sets: int,
        mode: int,
        is_right: Callable[[], bool],
    ) -> Case:
        outs, codec = self._buffers.outs[:sets], self._codec
        return Case(
            what,
            lambda: _fill(outs, _NO_RESULT if mode == SET else 0),
            lambda calls: codec.time_decode(rows, outs, mode, calls),
            is_right,
        )

    def _decoded(self, rows: Sequence[Memory]) -> Iterator[Floats]:
        """What each packet holds; often the same."""
        before: tuple[Bytes, Floats] | None = None
        for row in rows:
            packets = row.get()
            if before is None or not np.array_equal(packets, before[0]):
                before = packets, self._cpu.decode(packets, self._codec.n)
            yield before[1]

    def _sums(self) -> Iterator[Floats]:
        """Of the packets of each set, in their order; mostly the same."""
        first = self._rows[:NUM_MERGED]
        of_first = self._sum(first)
        yield of_first
        for k in range(1, len(counts(self._calls, self._sets))):
            some = self._rows[k * NUM_MERGED : (k + 1) * NUM_MERGED]
            pairs = zip(first, some, strict=True)
            is_same = all(np.array_equal(one.get(), other.get()) for one, other in pairs)
            yield of_first if is_same else self._sum(some)

    def _sum(self, rows: Sequence[Memory]) -> Floats:
        total = self._cpu.decode(rows[0].get(), self._codec.n)
        for row in rows[1:]:
            total += self._cpu.decode(row.get(), self._codec.n)
        return total


def counts(calls: int, sets: int) -> list[int]:
    """How often each set that has a turn has it in a round of `calls` calls, warm-up included."""
    # As in device.cu.
    turns = (range(k, calls // 4 + 2, sets) for k in range(sets))
    found = [len(turn) + len(range(k, calls, sets)) for k, turn in enumerate(turns)]
    return [count for count in found if count]


def _fill(vectors: Sequence[Memory], byte: int) -> None:
    for memory in vectors:
        memory.fill(byte)
