# SPDX-License-Identifier: Apache-2.0
"""How much `make bench-ps` measures."""

import dataclasses

ONEBIT = "error_feedback(onebit)"


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
        rounds: of every comparison.
        tensors: of a million elements each, of the model of 100 MB.
        load_rounds: of many children.
        is_full: what takes long is measured and not put together from shorter figures.
    """

    rounds: int = 5
    tensors: int = 25
    load_rounds: int = 1000
    is_full: bool = False

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the model of 100 MB."""
        return [(1000, 1000)] * self.tensors

    @property
    def is_complete(self) -> bool:
        """Whether the result may be stored."""
        return (
            self.rounds >= Options.rounds
            and self.tensors == Options.tensors
            and self.load_rounds >= Options.load_rounds
        )
