# SPDX-License-Identifier: Apache-2.0
"""Which of several global servers holds which chunks of a model.

The chunks are dealt out from the largest to the smallest, those of one size by number; each goes to
the shard that has the fewest elements so far, among equals to the first. So whole chunks of large
tensors go round all shards in turn, small tensors fill what is uneven then, and no shard has more
elements than 4/3 of the least that is possible. Shard 0 has the largest chunk: it is empty only
where there is none at all.

Invariant: the table is a function of the model's shapes and of the number of shards alone. Every
server and every party computes it for itself, and the state of a server rests on it, so it is part
of the protocol: it is never changed without a new format.
"""

import dataclasses
import functools
import heapq
from collections.abc import Sequence

from tf_hips.errors import ProtocolError
from tf_hips.ps.terms.model import Model

MAX_SHARDS = 1024


@dataclasses.dataclass(frozen=True)
class Shard:
    """Which of how many servers that share a model, counted from 0.

    Raises:
        ValueError: there is no such shard.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        """Checks both numbers."""
        numbers = (self.index, self.count)
        are_whole = all(type(one) is int for one in numbers)
        if not are_whole or not 0 <= self.index < self.count <= MAX_SHARDS:
            raise ValueError(
                f"`shard` must be I of N, I from 0 to N - 1 and N at most {MAX_SHARDS}. Received: "
                f"{str(self.index)[:40]} of {str(self.count)[:40]}"
            )

    @classmethod
    def from_numbers(cls, numbers: Sequence[object]) -> "Shard":
        """The shard of `[index, count]`.

        Raises:
            ValueError: `numbers` is something else.
        """
        if len(numbers) != 2:
            raise ValueError(f"`shard` must be two numbers, I and N. Received: {len(numbers)}")
        index, count = numbers
        return cls(index, count)  # type: ignore[arg-type]

    @property
    def numbers(self) -> tuple[int, int]:
        """What `from_numbers` reads."""
        return self.index, self.count

    @property
    def is_whole(self) -> bool:
        """Whether it is the only one."""
        return self.count == 1

    def chunks(self, model: Model) -> tuple[int, ...]:
        """The numbers of this shard's chunks, in order."""
        if self.is_whole:
            return tuple(range(len(model.chunks)))
        return _tables(model, self.count)[self.index]

    def check(self, server: str, numbers: Sequence[object]) -> None:
        """Raises ProtocolError if what `server` says that it is, `[index, count]`, is not this."""
        try:
            found = Shard.from_numbers(numbers)
        except ValueError as error:
            raise ProtocolError(f"Server {server}: {error}") from error
        if found.count != self.count:
            raise ProtocolError(
                f"`server` must name all servers of the run, in the order of their shards. "
                f"Received: {self.count} of them, and {server} is {found}"
            )
        if found != self:
            raise ProtocolError(
                "`server` must name the servers in the order of their shards. Received: "
                f"{server}, which is {found}, at place {self.index}"
            )

    def __str__(self) -> str:
        """Such as `shard 0 of 3`."""
        return f"shard {self.index} of {self.count}"


WHOLE = Shard()


@functools.lru_cache(maxsize=4)
def _tables(model: Model, count: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of each of `count` shards."""
    shards = [(0, index) for index in range(count)]  # elements so far; a heap from the start
    tables: list[list[int]] = [[] for _ in range(count)]
    for chunk in sorted(range(len(model.chunks)), key=lambda one: (-model.chunks[one].size, one)):
        elements, index = shards[0]
        tables[index].append(chunk)
        heapq.heapreplace(shards, (elements + model.chunks[chunk].size, index))
    return tuple(tuple(sorted(table)) for table in tables)
