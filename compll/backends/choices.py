# SPDX-License-Identifier: Apache-2.0
"""Long choices of an element, step by step, so that their loop becomes vector code.

    c = x < 1 ? 0 : x < 2 ? 1 : x < 4 ? 2 : x < 8 ? 3 : 4
        -->  choice = x < 8 ? 3 : 4;  choice2 = x < 4 ? 2 : choice;  ...;  c = x < 1 ? 0 : choice3

To compilers the first form is branches that meet at one place. g++ makes selections of those where
no more than four meet (its max-tree-if-conversion-phi-args); in the second form two do, each time.
"""

from dataclasses import replace

from compll.ir import nodes
from compll.ir.types import INT
from compll.ir.walk import changed, walk

# What may meet at one place.
_MOST = 4
# Functions that are an instruction or two.
_QUICK = ("min", "max", "abs")


class Choices:
    """The long choices of one function, under the same names wherever they are asked for."""

    def __init__(self) -> None:
        """None yet."""
        self._found: dict[nodes.Select, nodes.Var] = {}

    def apart(
        self, value: nodes.Expr, position: nodes.Var, named: set[nodes.Var]
    ) -> tuple[tuple[nodes.Let, ...], nodes.Expr]:
        """A value whose long choices are made by lets, which come before it.

        `position`: the number of the loop's element. `named`: choices that the loop has made
        before; those that are made now are added.
        """
        lets: list[nodes.Let] = []

        def steps(choice: nodes.Select) -> nodes.Select:
            yes, no = name(choice.yes), name(choice.no)
            return replace(choice, condition=inside(choice.condition), yes=yes, no=no)

        def name(arm: nodes.Expr) -> nodes.Expr:
            if not isinstance(arm, nodes.Select):
                return inside(arm)
            made = steps(arm)
            var = self._found.setdefault(made, nodes.Var("choice", made.type, made.span))
            if var not in named:
                named.add(var)
                lets.append(nodes.Let(var, made, made.span))
            return nodes.Ref(made.type, made.span, var)

        def inside(expr: nodes.Expr) -> nodes.Expr:
            if isinstance(expr, nodes.Select) and _num_arms(expr) > _MOST:
                return steps(expr) if _is_quick(expr, position) else changed(expr, inside)
            return changed(expr, inside)

        value = inside(value)
        return tuple(lets), value


def _num_arms(expr: nodes.Expr) -> int:
    """How many values a choice is made from."""
    count, waiting = 0, [expr]
    while waiting:
        found = waiting.pop()
        if isinstance(found, nodes.Select):
            waiting += [found.yes, found.no]
        else:
            count += 1
    return count


def _is_quick(expr: nodes.Expr, position: nodes.Var) -> bool:
    """Whether all of a choice is computed sooner than a branch finds the part that is needed."""

    def is_here(index: nodes.Expr) -> bool:
        return isinstance(index, nodes.Ref) and index.var is position

    for part in walk(expr):
        match part:
            case nodes.Math() if part.function not in _QUICK:
                return False
            case nodes.Binary(op="/" | "%") if part.type == INT:
                return False
            case nodes.Index() if not is_here(part.index):
                return False
            case nodes.Random() if not is_here(part.position):
                return False
    return True
