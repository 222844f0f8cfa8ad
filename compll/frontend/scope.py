# SPDX-License-Identifier: Apache-2.0
"""Names in scope while a function is lowered.

A scope maps the names of the program text to what they stand for now. Variables of the language may
be assigned again, variables of the IR may not: an assignment binds the name to a new `Var` (or to
none yet), which is all there is to single assignment, because expressions are pure.
"""

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from compll.frontend import ast, hints
from compll.ir import nodes
from compll.ir.types import FLOAT, Type
from compll.source import Span


class Refused(Exception):
    """Unwinds to the statement after an error that has been reported."""


class Exhausted(Refused):
    """The same after a limit of the whole was reached: what is beside it would reach it, too."""


_One = TypeVar("_One")
_Two = TypeVar("_Two")


def both(first: Callable[[], _One], second: Callable[[], _Two]) -> tuple[_One, _Two]:
    """What two steps make; the second is taken even where the first one is refused."""
    try:
        one = first()
    except Exhausted:
        raise
    except Refused:
        second()
        raise
    return one, second()


def each(trees: Iterable[ast.Expr], make: Callable[[ast.Expr], _One]) -> list[_One]:
    """What `make` gives for each expression; one that is refused does not hide the others."""
    made = []
    refused = None
    for tree in trees:
        try:
            made.append(make(tree))
        except Exhausted:
            raise
        except Refused as error:
            refused = error
    if refused is not None:
        raise refused
    return made


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the text: its type, and the IR expression that is its value now, if it has one.

    `kind` is "local", "parameter" (nothing may assign it), "output" (the gradient of a decode),
    "packet" (the uint8 vector), "state" (without a value in a Decode) or "captured" (an outer local
    in a lambda). `output` refers to the vector that an output will be.
    """

    type: Type
    kind: str
    declared: Span
    value: nodes.Expr | None
    output: nodes.Expr | None = None

    def assigned(self, value: nodes.Expr | None) -> "Variable":
        """This variable after an assignment."""
        return replace(self, value=value)


@dataclass(frozen=True, slots=True)
class Function:
    """A lambda of the text, lowered anew at each use, with the values captured then.

    `scope` is where it was declared: its names mean what they mean there, wherever it is used.
    """

    tree: ast.Lambda
    name: str
    declared: Span
    scope: "Scope"


# A variable whose declaration or assignment was refused: its uses are refused silently.
POISONED = Variable(FLOAT, "poisoned", Span(0, 0), None)


class Scope:
    """Names of a function or lambda, with those of the function around it.

    A lambda sees what was declared before it, so it cannot call itself.
    """

    def __init__(self, outer: "Scope | None" = None, at: int = 0, name: str = "") -> None:
        """An empty scope; for a lambda `name`, `outer` is where it is declared, at offset `at`."""
        self.names: dict[str, Variable | Function] = {}
        self.outer = outer
        self._at = at
        self._name = name

    def lambda_name(self) -> str:
        """The name of the lambda that this scope is of; empty for one without a name."""
        return self._name

    def find(self, name: str, before: int | None = None) -> Variable | Function | None:
        """What `name` stands for; inside a lambda, locals of the outside are "captured".

        `before`: an offset; locals that are declared there or later are not seen.
        """
        found = self.names.get(name)
        if found is not None and _is_seen(found, before):
            return found
        found = self.outer.find(name, self._at) if self.outer is not None else None
        if isinstance(found, Variable) and found.kind in ("local", "captured"):
            return replace(found, kind="captured")
        return found

    def all_names(self, before: int | None = None) -> list[str]:
        """Every visible name."""
        outside = self.outer.all_names(self._at) if self.outer is not None else []
        return [*(name for name, found in self.names.items() if _is_seen(found, before)), *outside]


def _is_seen(found: Variable | Function, before: int | None) -> bool:
    is_local = isinstance(found, Function) or found.kind == "local"
    return before is None or not is_local or found.declared.start < before


def unknown(
    name: str, known: Iterable[str], kind: str = "float", value: str = " = ..."
) -> tuple[str, ...]:
    """The line of help for an unknown name: what is near, or how it is declared.

    Args:
        name: it.
        known: names that are known there.
        kind: a type that it may have.
        value: what stands behind the name in its declaration.
    """
    declare = f"help: declare it before, as in `{kind} {name}{value};`"
    return hints.elsewhere(name) or nearest(name, known) or (declare,)


def nearest(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """A help line with the known name that is spelt most like `name`; empty when none is near."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=1)
    return (f"help: did you mean `{near[0]}`?",) if near else ()
