# SPDX-License-Identifier: Apache-2.0
"""What a loop of an encoder does about feedback, a tile at a time (feedback.py).

    sum       before a tile is read
    left      when its codes are packed: they are decoded again, and what they miss is left

Where functions of rows can do the same while the elements are in registers (row_code.py), they do.
"""

from collections.abc import Callable
from dataclasses import dataclass

from compll.backends.row_code import RowCode
from compll.backends.tile_needs import ASK_AHEAD
from compll.ir import nodes

# Decodes codes that a function of rows holds; the arguments of that function are found here.
HeldRows = Callable[[dict[str, tuple[str, str]]], RowCode | None]


@dataclass(frozen=True)
class TileFeedback:
    """What one loop does.

    Attributes:
        first: statements that form the sum, at the beginning of each tile; none: it is there.
        has_last: tiles are decoded again.
        gradient: what the encoder reads; None: functions of rows must not form the sum.
        held: makes the code that decodes in rows; None: there is none.
    """

    first: tuple[str, ...] = ()
    has_last: bool = False
    gradient: nodes.Var | None = None
    held: HeldRows | None = None

    def asks(self, sweep: nodes.Sweep) -> tuple[str, ...]:
        """How a loop over short tiles asks for what an encoder reads, before it does anything.

        What follows the first line belongs behind functions of rows that form the sum: they ask for
        gradient and residual by themselves. A loop that only reduces is quickest
        where every line is asked for, and so is one that reduces a sum.
        """
        if not sweep.writes:
            return (ASK_AHEAD,)
        if self.first and not sweep.reduces:
            page = "if constexpr (!kFeedback) prefetch_page<2>({} + base, count);"
            return page, f"if constexpr (kFeedback) {ASK_AHEAD}"
        return ("prefetch_again<kFeedback>({} + base, count);",)

    def last_lines(self, done: str = "") -> tuple[str, ...]:
        """Statements at the end of each tile; `done`: C++ for elements that need them no more."""
        if not self.has_last:
            return ()
        at = f"base + {done}" if done else "base"
        call = f"decode_fields(params, body, layout, value + {at}, n, TF_HIPS_RESIDUAL, {at}, "
        call += "base + count);"
        if done:
            return (
                "if constexpr (kFeedback) {",
                f"  if ({done} < count) {{",
                f"    {call}",
                "  }",
                "}",
            )
        return ("if constexpr (kFeedback) {", f"  {call}", "}")


NO_FEEDBACK = TileFeedback()
