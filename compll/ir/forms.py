# SPDX-License-Identifier: Apache-2.0
"""What a small lambda computes, whatever its spelling: expressions as forms, equal ones the same.

    v  0  1  x + y  x * y  max(x, y)  min(x, y)         operands in one order, lets written out
    x < y  x <= y  x != 0  !c  c && d  c || d           conditions, which are numbers 0 and 1 too
    c ? x : y                                           where it is none of the above

Conversions that keep a number are looked through: of a condition, of a constant that fits, of an
unsigned integer to a wider type. What is not known stays as it is, so two functions that are equal
may have two forms, but those of one form are equal, but for NaN and -0 in a maximum or minimum.
"""

from dataclasses import dataclass, field

from compll.ir import nodes, semantics
from compll.ir.types import BOOL, FLOAT, INT, Type, UInt

_CONDITIONS = ("!", "&&", "||", "<", "<=", "nonzero")
# A float holds unsigned integers of that width.
_EXACT_BITS = 24
# Arms within arms that are looked through; no reducer or order needs more.
_MOST_ARMS = 200


@dataclass(frozen=True, eq=False)
class Form:
    """A node: `op` of `parts`; `value`: a variable or constant, or what else tells it apart."""

    op: str
    parts: "tuple[Form, ...]"
    value: object
    number: int
    depth: int


@dataclass
class Forms:
    """Makes the forms of one lambda; there is one object for each of them."""

    _made: dict[tuple[object, ...], Form] = field(default_factory=dict)
    _known: dict[nodes.Var, Form] = field(default_factory=dict)
    # Of steps into the arms of a choice, which may be shared: else they could take for ever.
    _done: dict[tuple[object, ...], Form] = field(default_factory=dict)

    def _make(self, op: str, *parts: Form, value: object = None) -> Form:
        key = (op, *(part.number for part in parts), type(value), value)
        if key not in self._made:
            depth = 1 + max((part.depth for part in parts), default=0)
            self._made[key] = Form(op, parts, value, len(self._made), depth)
        return self._made[key]

    def _symmetric(self, op: str, x: Form, y: Form, value: object = None) -> Form:
        return self._make(op, *sorted((x, y), key=lambda part: part.number), value=value)

    def variable(self, var: nodes.Var) -> Form:
        """A variable, or the value that was given to it."""
        return self._known.get(var) or self._make("variable", value=var)

    def constant(self, value: float) -> Form:
        """A number."""
        return self._make("constant", value=float(value))

    def of_lambda(self, function: nodes.Lambda) -> Form:
        """What a lambda returns."""
        for let in function.lets:
            self._known[let.var] = self.of(let.value)
        return self.of(function.result)

    def of(self, expr: nodes.Expr) -> Form:
        """An expression."""
        match expr:
            case nodes.Ref():
                return self.variable(expr.var)
            case nodes.Const():
                is_small = abs(expr.value) < 1 << _EXACT_BITS
                return self.constant(expr.value) if is_small else self._make("other", value=expr)
            case nodes.Convert():
                return self._convert(self.of(expr.operand), expr.operand.type, expr.type)
            case nodes.Unary(op="!"):
                return self.negation(self.condition(self.of(expr.operand)))
            case nodes.Binary():
                return self._binary(expr, self.of(expr.left), self.of(expr.right))
            case nodes.Math(function="max" | "min"):
                x, y = map(self.of, expr.arguments)
                return self._symmetric(expr.function, x, y)
            case nodes.Select():
                test = self.condition(self.of(expr.condition))
                return self.choice(test, self.of(expr.yes), self.of(expr.no))
            case nodes.Apply():
                given = [self.of(argument) for argument in expr.arguments]
                self._known |= zip(expr.function.params, given, strict=True)
                return self.of_lambda(expr.function)
            case _:
                return self._make("other", value=id(expr))

    def _binary(self, expr: nodes.Binary, x: Form, y: Form) -> Form:
        is_both = is_condition(x) and is_condition(y)
        match expr.op:
            case "&&" | "||":
                return self.both(expr.op, self.condition(x), self.condition(y))
            case "&" | "|" if is_both:
                return self.both(2 * expr.op, x, y)
            case "*" if is_both:
                return self.both("&&", x, y)
            case "+" | "*":
                return self._symmetric(expr.op, x, y, expr.type)
            case "<" | "<=":
                return self._compared(expr, x, y)
            case ">" | ">=":
                return self._compared(expr, y, x)
            case "!=" | "==":
                zero = self.constant(0)
                if zero in (x, y):
                    test = self.condition(x if y is zero else y)
                    return test if expr.op == "!=" else self.negation(test)
        return self._make("other", x, y, value=(expr.op, expr.left.type))

    def _compared(self, expr: nodes.Binary, x: Form, y: Form) -> Form:
        op = "<" if expr.op in ("<", ">") else "<="
        return self._make(op, x, y, value=expr.left.type == FLOAT)

    def _convert(self, x: Form, source: Type, kind: Type) -> Form:
        if source == kind:
            return x
        if kind == BOOL:
            return self.condition(x)
        if x.op == "constant":
            return self._converted(x, source, kind)
        if is_condition(x):
            return x
        if isinstance(source, UInt) and _holds(kind, source):
            return x
        key = ("convert", x.number, source, kind)
        if key not in self._done:
            self._done[key] = (
                self.choice(x.parts[0], *(self._convert(arm, source, kind) for arm in x.parts[1:]))
                if x.op == "choice" and x.depth < _MOST_ARMS
                else self._make("convert", x, value=(source, kind))
            )
        return self._done[key]

    def _converted(self, x: Form, source: Type, kind: Type) -> Form:
        number = x.value
        if not isinstance(number, float):
            raise TypeError(f"`x` must be a constant. Received: {x}")
        if isinstance(kind, UInt) and not isinstance(kind.bits, int):
            # Any width holds these.
            return x if number in (0, 1) else self._make("convert", x, value=(source, kind))
        bits = kind.bits if isinstance(kind, UInt) and isinstance(kind.bits, int) else 0
        held = INT if isinstance(source, UInt) or source == BOOL else source
        given = semantics.constant(number if held == FLOAT else int(number), held)
        with semantics.quiet():
            return self.constant(float(semantics.convert(given, held, kind, bits)))

    def condition(self, x: Form) -> Form:
        """`x != 0`."""
        if is_condition(x):
            return x
        if x.op == "constant":
            return self.constant(x.value != 0)
        key = ("condition", x.number)
        if key not in self._done:
            self._done[key] = (
                self.choice(x.parts[0], *map(self.condition, x.parts[1:]))
                if x.op == "choice" and x.depth < _MOST_ARMS
                else self._make("nonzero", x)
            )
        return self._done[key]

    def negation(self, x: Form) -> Form:
        """The opposite of a condition."""
        match x.op:
            case "!":
                return x.parts[0]
            case "constant":
                return self.constant(x.value == 0)
            case "<" | "<=" if not x.value:  # of integers
                op = "<=" if x.op == "<" else "<"
                return self._make(op, x.parts[1], x.parts[0], value=False)
        return self._make("!", x)

    def both(self, op: str, x: Form, y: Form) -> Form:
        """`x && y` or `x || y` of conditions."""
        ends = {"&&": 0, "||": 1}[op]
        for one, other in ((x, y), (y, x)):
            if one.op == "constant":
                return one if one.value == ends else other
        if x is y:
            return x
        if x.op == y.op == "!":
            opposite = "||" if op == "&&" else "&&"
            return self.negation(self.both(opposite, x.parts[0], y.parts[0]))
        return self._symmetric(op, x, y)

    def choice(self, test: Form, yes: Form, no: Form) -> Form:
        """`test ? yes : no`."""
        if test.op == "constant":
            return yes if test.value else no
        if yes is no:
            return yes
        if test.op == "!":
            return self.choice(test.parts[0], no, yes)
        if is_condition(yes) and is_condition(no):
            return self._chosen_condition(test, yes, no)
        one = self.constant(1)
        for arm, other, counted in ((yes, no, test), (no, yes, self.negation(test))):
            if arm.op == "+" and set(arm.parts) == {one, other}:
                return self._symmetric("+", other, counted, arm.value)
        if test.op in ("<", "<="):
            low, high = test.parts
            for name, above, below in (("max", high, low), ("min", low, high)):
                either = self._symmetric(name, low, high)
                if yes in (above, either) and no in (below, either):
                    return either
        return self._make("choice", test, yes, no)

    def _chosen_condition(self, test: Form, yes: Form, no: Form) -> Form:
        if yes.op == "constant":
            return self.both("||", test, no) if yes.value else self._but(test, no)
        if no.op == "constant":
            opposite = self.negation(test)
            return self.both("||", opposite, yes) if no.value else self.both("&&", test, yes)
        return self._make("choice", test, yes, no)

    def _but(self, test: Form, no: Form) -> Form:
        return self.both("&&", self.negation(test), no)


def is_condition(x: Form) -> bool:
    """Whether a form is 0 or 1 and nothing else."""
    return x.op in _CONDITIONS or (x.op == "constant" and x.value in (0, 1))


def _holds(kind: Type, source: UInt) -> bool:
    """Whether a type holds all numbers of an unsigned one."""
    if kind == INT:
        return True
    is_narrow = not isinstance(source.bits, int) or source.bits <= _EXACT_BITS
    return kind == FLOAT and is_narrow
