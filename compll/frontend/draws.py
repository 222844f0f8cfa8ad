# SPDX-License-Identifier: Apache-2.0
"""Which calls of `random` an element reaches, and how often.

A `random` is known by its place in the text and gives an element one number (see Randomness in
docs/compll-language.md). A helper that is called twice for one element would so give the same
number twice, where who wrote it expects two. Of arms of which an element takes one, each may reach
what the other one does.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from compll.frontend import ast
from compll.frontend.scope import each
from compll.ir import nodes
from compll.source import Span

_One = TypeVar("_One")


class Draws:
    """Where a function has drawn noise, along the path that is being lowered."""

    def __init__(self) -> None:
        """`reached` is (element, place in the text) of each draw that a path has behind it."""
        self.reached: frozenset[tuple[nodes.Expr, int]] = frozenset()
        self._calls: list[Span] = []

    @contextlib.contextmanager
    def call(self, span: Span) -> Iterator[None]:
        """While the lambda is lowered that is called at `span`."""
        self._calls.append(span)
        try:
            yield
        finally:
            self._calls.pop()

    def again(self, element: nodes.Expr, site: int) -> Span | None:
        """Counts a draw; where the element has reached it before, what was called to get there."""
        is_again = (element, site) in self.reached
        self.reached |= {(element, site)}
        return self._calls[0] if is_again and self._calls else None

    def apart(self, arms: Iterable[ast.Expr], make: Callable[[ast.Expr], _One]) -> list[_One]:
        """What `make` gives for each arm, as `each` does, of which an element takes one."""
        before = after = self.reached

        def one(arm: ast.Expr) -> _One:
            nonlocal after
            self.reached = before
            try:
                return make(arm)
            finally:
                after |= self.reached

        try:
            return each(arms, one)
        finally:
            self.reached = after
