# SPDX-License-Identifier: Apache-2.0
"""What a server makes of its children's packets: one update rule per chunk and round.

A rule is used as `begin(n)`, then `add(child, packet)` once per child, in any order, then
`finish()`. A rule with `needs_rows` wants all rows decoded side by side (robust aggregation does);
one without merges packets directly.

Invariant: the result does not depend on the order of arrival, bit for bit.
"""

from typing import Protocol

from tf_hips.ops import native
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import Bytes, Floats


class Rule(Protocol):
    """Turns the packets of one chunk, one per child, into its update."""

    needs_rows: bool

    def begin(self, num_elements: int) -> None:
        """Starts a chunk of `num_elements` elements."""

    def add(self, child: int, packet: Bytes) -> None:
        """Takes the packet of `child`."""

    def finish(self) -> Floats:
        """The update, shape [num_elements]."""


class Keeping:
    """What keeps the packets of a chunk until all have come: the first half of a rule."""

    def __init__(self, compressor: Compressor) -> None:
        """Takes nothing yet; packets are those of `compressor`."""
        self._compressor = compressor
        self._num_elements = 0
        self._packets: dict[int, Bytes] = {}

    def begin(self, num_elements: int) -> None:
        """Starts a chunk of `num_elements` elements."""
        self._num_elements = num_elements
        self._packets = {}

    def add(self, child: int, packet: Bytes) -> None:
        """Takes the packet of `child`."""
        self._packets[child] = packet


class Sum(Keeping):
    """The sum of all packets, added up in child order: what synchronous gradients need."""

    needs_rows = False

    def finish(self) -> Floats:
        """The sum, shape [num_elements]."""
        ordered = [self._packets[child] for child in sorted(self._packets)]
        self._packets = {}
        return native.merge(self._compressor, ordered, self._num_elements)
