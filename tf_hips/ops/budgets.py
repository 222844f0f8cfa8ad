# SPDX-License-Identifier: Apache-2.0
"""Budget: a compressor that is chosen when the model is known, by what a link carries in a time.

    budget(wan_mbps=10, max_sync_s=30)

is the first of LADDER, from exact values on, whose packets of all gradients cross the link once up
and once down in that time. Party and server choose for themselves, from the sizes of the gradients
alone, so they choose the same.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from tf_hips.ops import compressor as compressors
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.registry import Parameter, checked

BUDGET = "budget"

PARAMETERS = (
    Parameter("wan_mbps", default=None, minimum=1e-3, maximum=1e6),
    Parameter("max_sync_s", default=None, minimum=1e-3, maximum=1e6),
)

LADDER = (
    "fp32",
    "fp16",
    "error_feedback(int8)",
    "error_feedback(terngrad(bitwidth=4))",
    "error_feedback(terngrad(bitwidth=2))",
    "error_feedback(onebit)",
    "error_feedback(topk(ratio=0.01))",
    "error_feedback(topk(ratio=0.003))",
    "error_feedback(topk(ratio=0.001))",
)
"""What a budget may become, the most exact first; each has fewer bytes than the one before it."""


@dataclasses.dataclass(frozen=True, repr=False)
class Budget(Compressor):
    """What a link carries in a time, in a compressor's place until `for_sizes` is asked."""

    name: str = BUDGET

    def __post_init__(self) -> None:
        """Checks the two numbers.

        Raises:
            TypeError: one is no number.
            ValueError: one is missing, unknown or out of range.
        """
        values = checked(BUDGET, PARAMETERS, dict(self.params))
        if self.inner is not None:
            raise ValueError(f"`{BUDGET}` wraps nothing. Received: {self.inner.text}")
        object.__setattr__(self, "params", tuple(values.items()))

    @property
    def is_budget(self) -> bool:
        """Yes."""
        return True

    def for_sizes(self, sizes: Sequence[int]) -> Compressor:
        """The compressor for a model.

        Args:
            sizes: elements of each gradient.

        Raises:
            ValueError: even the smallest takes longer; says how long.
        """
        return _chosen(self, tuple(sizes))

    def seconds(self, compressor: Compressor, sizes: Sequence[int]) -> float:
        """Seconds for one round's packets of `compressor`, once up and once down, on the link."""
        ways = (compressor, compressor.for_sums)
        num_bytes = sum(one.wire_bytes(size) for one in ways for size in sizes if size)
        return num_bytes * 8e-6 / dict(self.params)["wan_mbps"]

    @property
    def makes_packets(self) -> bool:
        """What it becomes does."""
        return True

    @property
    def has_residual(self) -> bool:
        """Not itself; `for_sizes` knows."""
        return False

    @property
    def state_names(self) -> tuple[str, ...]:
        """What it may keep."""
        return ("residual",)

    @property
    def for_sums(self) -> Compressor:
        """Itself: everything of LADDER encodes its own sums."""
        return self

    @property
    def clip_norm(self) -> float:
        """Nothing of LADDER clips."""
        return 0.0

    @property
    def is_unbiased(self) -> bool:
        """Not in general."""
        return False

    @property
    def is_sparse(self) -> bool:
        """Where the link is slow, it is top-k."""
        return True

    @property
    def has_threshold(self) -> bool:
        """Nothing of LADDER has one."""
        return False

    @property
    def draws_alike(self) -> bool:
        """Nothing of LADDER draws elements."""
        return False

    @property
    def text(self) -> str:
        """The text that `parse` turns into this value."""
        numbers = [
            f"{name}={np.format_float_positional(np.float32(value), trim='-')}"
            for name, value in self.params
        ]
        return f"{BUDGET}({', '.join(numbers)})"

    def wire_bytes(self, n: int) -> int:
        """Bytes of the packets of a model of one gradient of n elements."""
        return self.for_sizes([n]).wire_bytes(n)

    def wire_bytes_of(self, shape: Sequence[int]) -> int:
        """The same of a gradient of that shape."""
        return self.for_sizes([math.prod(shape)]).wire_bytes_of(shape)

    def chunk_packet_bytes(self, n_chunk: int) -> int:
        """Unknown before the model is.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"a budget has no packets before `for_sizes`. Received: {self.text}")


@functools.lru_cache(maxsize=16)
def _chosen(budget: Budget, sizes: tuple[int, ...]) -> Compressor:
    limit_s = dict(budget.params)["max_sync_s"]
    least, seconds = LADDER[-1], 0.0
    for text in LADDER:
        found = compressors.parse(text)
        seconds = budget.seconds(found, sizes)
        if seconds <= limit_s:
            return found
    raise ValueError(
        f"a budget must have room for {least}, which takes {seconds:.3g} s for the "
        f"{sum(sizes)} elements of this model, once up and once down. Received: {budget.text}"
    )


compressors.SPECIAL[BUDGET] = (Budget, PARAMETERS)
