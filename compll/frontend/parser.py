# SPDX-License-Identifier: Apache-2.0
"""Tokens to the untyped tree: recursive descent, one method per rule of the grammar.

    file      = { block | function }
    block     = 'param' NAME '{' { type NAME [ range ] [ '=' number ] ';' } '}'
              | 'state' NAME '{' { type NAME ';' } '}'
    range     = 'in' '[' number ',' number ']'
    function  = type NAME '(' [ type NAME { ',' type NAME } ] ')' body
    body      = '{' { stmt } '}'
    stmt      = type NAME [ '=' expr ] ';'  |  NAME '=' expr ';'
              | NAME ASSIGN expr ';'    ASSIGN: '+=' and the like; `x += y` is `x = x + y`
              | 'if' '(' expr ')' branch [ 'else' branch ]
              | 'return' [ expr ] ';'  |  expr ';'  |  ';'    (after a lambda without the ';')
    branch    = body | stmt
    type      = NAME [ '<' sum '>' ] [ '*' ]
    expr      = ternary, with C's operators and precedences, from '||' down to unary '-' '+' '!' '~'
    postfix   = primary { '[' expr ']' | '.' NAME }
    primary   = number | NAME | '(' expr ')' | lambda
              | NAME [ '<' type '>' ] '(' [ expr { ',' expr } ] ')'
    lambda    = '[' '&' ']' '(' [ type NAME { ',' type NAME } ] ')' '->' type body

After an error the parser goes on behind the next ';' or before the next '}', so one run reports
several errors. Depth is bounded: later stages may recurse over the tree.
"""

from collections.abc import Callable
from typing import NoReturn, TypeVar

from compll.errors import Report
from compll.frontend import ast, hints, mistakes
from compll.frontend.lexer import Token, tokenize
from compll.frontend.scope import nearest
from compll.source import SourceFile, Span

MAX_DEPTH = 64

TYPE_NAMES = (
    "void",
    "float",
    "int",
    "uint",
    "uint1",
    "uint2",
    "uint4",
    "uint8",
    "uint16",
    "uint32",
    "lambda_func",
)
_KEYWORDS = ("if", "else", "return")
_COMPOUND = ("+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^=")
_PRECEDENCE = {
    **{
        "||": 1,
        "&&": 2,
        "|": 3,
        "^": 4,
        "&": 5,
        "==": 6,
        "!=": 6,
        "<": 7,
        ">": 7,
        "<=": 7,
        ">=": 7,
    },
    **{"<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "%": 10},
}
_SUM = 9
# What binds less than a sum, but for `>`.
_BESIDE_WIDTHS = ("<", "<=", ">=", "==", "!=", "<<", ">>", "&", "^", "|", "&&", "||", "?")

_Item = TypeVar("_Item")


class _Recover(Exception):
    """Unwinds to the nearest rule that can go on after an error that has been reported."""


def parse(source: SourceFile, report: Report) -> ast.File:
    """Parses a file; findings go to `report`, and the tree then holds what could be understood.

    Raises CompileError at once for what is not even made of tokens.
    """
    tokens = tokenize(source, report)
    report.raise_if_any()
    return _Parser(tokens, report).file()


class _Parser:
    def __init__(self, tokens: list[Token], report: Report) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._report = report
        self._open: list[Token] = []

    # Tokens.

    @property
    def _token(self) -> Token:
        return self._tokens[self._at]

    def _peek(self, distance: int = 1) -> Token:
        return self._tokens[min(self._at + distance, len(self._tokens) - 1)]

    def _next(self) -> Token:
        token = self._token
        if token.kind != "end":
            self._at += 1
        return token

    def _is(self, text: str) -> bool:
        return self._token.kind in ("op", "name") and self._token.text == text

    def _take(self, text: str) -> bool:
        if self._is(text):
            self._at += 1
            return True
        return False

    def _expect(self, text: str, where: str) -> Token:
        if not self._is(text):
            self._fail(f"`{text}` {where}")
        return self._next()

    def _name(self, what: str) -> Token:
        taken = (*TYPE_NAMES, *_KEYWORDS, *mistakes.FOREIGN_WORDS)
        if self._token.kind != "name" or self._token.text in taken:
            self._fail(what)
        return self._next()

    def _fail(self, expected: str) -> NoReturn:
        token = self._token
        if token.kind == "op" and token.text in mistakes.FOREIGN_OPERATORS:
            self._foreign(token)
        if self._open and (token.kind == "end" or self._is_at_function()):
            line = self._report.line(self._open[-1].span)
            what = "the end of the file" if token.kind == "end" else f"`{self._peek().text}`"
            note = (
                f"help: close the `{{` of line {line}, or one inside of it, with `}}` before that"
            )
            self._report.add("E101", f"expected `}}`, found {what}", token.span, note)
            raise _Recover
        is_type = token.kind == "name" and token.text in TYPE_NAMES
        note = mistakes.advice(self._tokens, self._at, expected, is_type) or hints.advice(
            expected, token.text, is_type
        )
        if expected.startswith("the name") and token.text in (*_KEYWORDS, *mistakes.FOREIGN_WORDS):
            whose = "the language" if token.text in _KEYWORDS else "C++"
            note = f"help: choose another name: `{token.text}` is a word of {whose}"
        self._report.add("E101", f"expected {expected}, found {token.describe()}", token.span, note)
        raise _Recover

    def _expect_semicolon(self, where: str) -> None:
        """Takes a `;`; one that is missing at the end of a line is reported there."""
        last = self._tokens[max(0, self._at - 1)].span
        is_next_line = self._report.line(last) != self._report.line(self._token.span)
        if self._is(";") or not is_next_line or self._is_at_function() or self._token.kind == "end":
            self._expect(";", where)
            return
        expected = f"`;` {where}"
        note = hints.advice(expected, "", False)
        behind = Span(last.end, last.end + 1)
        self._report.add("E101", f"expected {expected}", behind, note)
        if self._token.kind != "name" and not self._is("}"):
            raise _Recover

    def _is_at_function(self) -> bool:
        """Whether a function begins here, which stands in no block."""
        return self._is("void") and self._peek().kind == "name" and self._peek(2).text == "("

    def _is_at_top(self) -> bool:
        """Whether a function or a block of parameters or states begins here."""
        is_block = self._is("param") or self._is("state")
        return self._is_at_function() or (is_block and self._peek(2).text == "{")

    def _foreign(self, token: Token) -> NoReturn:
        help_line = mistakes.foreign(token.text)
        if token.text in mistakes.FOREIGN_STARTS:
            help_line = hints.advice("a statement", token.text, False)
        self._report.add("E103", f"the language has no `{token.text}`", token.span, help_line)
        if self._peek().text == "(":
            # The `;` in the head of a loop does not end it.
            self._skip_parentheses()
        raise _Recover

    def _skip_parentheses(self) -> None:
        """Goes behind what the next token opens, or to where a block ends inside of it."""
        self._next()
        level = 0
        while self._token.kind != "end" and self._token.text not in ("{", "}"):
            level += {"(": 1, ")": -1}.get(self._next().text, 0)
            if level == 0:
                return

    def _is_foreign(self) -> bool:
        """Whether a word of another language begins a statement here."""
        token, after = self._token, self._peek()
        if token.kind != "name" or token.text not in mistakes.FOREIGN_STARTS:
            return token.kind == "name" and token.text in mistakes.FOREIGN_WORDS
        return after.kind == "name" or (token.text == "elif" and after.text == "(")

    def _nested(self, rule: Callable[[], _Item]) -> _Item:
        if self._depth >= MAX_DEPTH:
            message = f"nested more than {MAX_DEPTH} levels deep"
            self._report.add("E102", message, self._token.span)
            raise _Recover
        self._depth += 1
        try:
            return rule()
        finally:
            self._depth -= 1

    def _skip_statement(self) -> None:
        """Goes behind the next ';' or block of this level, or before the '}' that closes it.

        A block that is an argument's, a lambda's body, is not the end of its statement.
        """
        level = 0
        while self._token.kind != "end" and not (self._open and self._is_at_function()):
            if self._is("{"):
                level += 1
            elif self._is("}"):
                if level == 0:
                    return
                level -= 1
                if level == 0 and self._peek().text not in (")", ",", "]"):
                    self._next()
                    self._take(";")
                    return
            elif self._is(";") and level == 0:
                self._next()
                return
            self._next()

    # Declarations.

    def file(self) -> ast.File:
        blocks: list[ast.ParamBlock] = []
        states: list[ast.StateBlock] = []
        functions: list[ast.Function] = []
        while self._token.kind != "end":
            before = self._at
            try:
                if self._is("param"):
                    blocks.append(self._block())
                elif self._is("state"):
                    states.append(self._state_block())
                else:
                    functions.append(self._function())
            except _Recover:
                # Up to there, what belongs to a body would be told to be no function.
                while self._token.kind != "end" and (self._at == before or not self._is_at_top()):
                    self._next()
        return ast.File(
            Span(0, self._token.span.end), tuple(blocks), tuple(states), tuple(functions)
        )

    def _block(self) -> ast.ParamBlock:
        name, fields = self._fields("param", self._field)
        return ast.ParamBlock(name.span, name.text, fields)

    def _state_block(self) -> ast.StateBlock:
        name, fields = self._fields("state", self._state_field)
        return ast.StateBlock(name.span, name.text, fields)

    def _fields(self, word: str, field: Callable[[], _Item]) -> tuple[Token, tuple[_Item, ...]]:
        """What a block that begins with `word` holds, and its name."""
        self._next()
        name = self._name(f"the name of a codec after `{word}`")
        self._expect("{", f"after the name of a `{word}` block")
        fields: list[_Item] = []
        while not self._is("}") and self._token.kind != "end" and not self._is_at_top():
            try:
                fields.append(field())
            except _Recover:
                self._skip_statement()
        self._expect("}", f"at the end of a `{word}` block")
        self._take(";")
        return name, tuple(fields)

    def _state_field(self) -> ast.StateField:
        kind = self._type()
        name = self._name("the name of a state")
        self._expect_semicolon("after a state")
        return ast.StateField(name.span, kind, name.text)

    def _field(self) -> ast.ParamField:
        kind = self._type()
        name = self._name("the name of a parameter")
        low = high = default = None
        if self._take("in"):
            self._expect("[", "before a range")
            low = self._signed_number()
            self._expect(",", "between the ends of a range")
            high = self._signed_number()
            self._expect("]", "after a range")
        if self._take("="):
            default = self._signed_number()
        self._expect_semicolon("after a parameter")
        return ast.ParamField(name.span, kind, name.text, low, high, default)

    def _signed_number(self) -> ast.Number:
        start = self._token.span
        sign = -1 if self._take("-") else 1
        if self._token.kind not in ("int", "float"):
            self._fail("a number")
        number = self._number()
        return ast.Number(start.to(number.span), sign * number.value)

    def _function(self) -> ast.Function:
        if self._is_foreign():
            self._foreign(self._token)
        result = self._type()
        name = self._name("the name of a function")
        parameters = self._parameters()
        body = self._body("before the body of a function")
        return ast.Function(
            name.span, result, name.text, parameters, body, self._tokens[self._at - 1].span
        )

    def _parameters(self) -> tuple[ast.Parameter, ...]:
        self._expect("(", "before parameters")
        parameters: list[ast.Parameter] = []
        while not self._is(")"):
            if parameters:
                self._expect(",", "between parameters")
            kind = self._type(" of a parameter")
            name = self._name("the name of a parameter")
            parameters.append(ast.Parameter(name.span, kind, name.text))
        self._next()
        return tuple(parameters)

    def _type(self, where: str = "") -> ast.TypeName:
        if self._token.kind != "name" or self._token.text in _KEYWORDS:
            self._fail(f"a type{where}")
        name = self._next()
        width = None
        span = name.span
        if self._is("<"):
            self._next()
            width = self._nested(lambda: self._binary(_SUM))
            self._check_width_ends(name.span)
            span = span.to(self._expect(">", "after the width of a type").span)
        is_array = self._is("*")
        if is_array:
            span = span.to(self._next().span)
        return ast.TypeName(span, name.text, width, is_array)

    def _check_width_ends(self, begin: Span) -> None:
        """Refuses a width that goes on with a comparison, of which `>` would be its end."""
        ahead = [self._peek(distance) for distance in range(1, 3)]
        is_more = ahead[0].kind == "number" or ahead[1].text == "?"
        if self._token.text in _BESIDE_WIDTHS or (self._is(">") and is_more):
            message = f"a width ends before `{self._token.text}`"
            note = "help: put a comparison in parentheses, as in `uint<(bits > 8 ? 16 : 8)>`"
            self._report.add("E101", message, begin.to(self._token.span), note)
            raise _Recover

    # Statements.

    def _begin(self, where: str) -> Token:
        """Takes the `{` of a block; it is told to be missing, and no more, before a statement."""
        if not self._is("{"):
            try:
                self._fail(f"`{{` {where}")
            except _Recover:
                is_assigned = self._peek().text in ("=", *_COMPOUND)
                is_statement = is_assigned or self._token.text in ("if", "return")
                if self._is_at_function() or not (is_statement or self._is_declaration()):
                    raise
                return self._token
        return self._next()

    def _body(self, where: str = "before a block") -> tuple[ast.Stmt, ...]:
        self._open.append(self._begin(where))
        try:
            statements: list[ast.Stmt] = []
            while not self._is("}"):
                if self._token.kind == "end" or self._is_at_function():
                    self._fail("`}` at the end of a block")
                try:
                    statement = self._nested(self._statement)
                    if statement is not None:
                        statements.append(statement)
                except _Recover:
                    self._skip_statement()
                    while self._take("else"):  # of what was skipped
                        self._skip_statement()
            self._next()
            return tuple(statements)
        finally:
            self._open.pop()

    def _branch(self) -> tuple[ast.Stmt, ...]:
        if self._is("{"):
            return self._body()
        statement = self._nested(self._statement)
        return () if statement is None else (statement,)

    def _statement(self) -> ast.Stmt | None:
        token = self._token
        if self._take(";"):
            return None
        if token.kind == "name":
            if self._is_foreign():
                self._foreign(token)
            if token.text == "if":
                return self._if()
            if token.text == "return":
                return self._return()
            if token.text == "else":
                self._fail("a statement")
            if token.text == "state" and self._peek().kind == "name":
                note = "help: `state X { float* residual; }` stands before the functions"
                self._report.add("E511", "`state` is not allowed here", token.span, note)
                raise _Recover
            if self._is_declaration():
                return self._declare()
            if self._peek().kind == "op" and self._peek().text in ("=", *_COMPOUND):
                return self._assign()
        value = self._expression()
        self._end_statement(value)
        return ast.Evaluate(value.span, value)

    def _is_declaration(self) -> bool:
        """Whether a statement begins with a type, be it a known one or not."""
        name = self._token.text
        if name in TYPE_NAMES or self._peek().kind == "name":
            return True
        ahead = [self._peek(distance) for distance in range(1, 5)]
        texts = [token.text for token in ahead]
        if texts[0] == "<" and texts[2] == ">":
            return texts[3] == "*" or ahead[3].kind == "name"
        if texts[0] != "*" or ahead[1].kind != "name" or texts[2] not in ("=", ";"):
            return False
        return texts[2] == "=" or hints.is_like_a_type(name, nearest(name, TYPE_NAMES))

    def _declare(self) -> ast.Stmt:
        kind = self._type()
        name = self._name("the name of a variable")
        value = None
        if self._take("="):
            value = self._expression()
        self._end_statement(value)
        return ast.Declare(name.span, kind, name.text, value)

    def _assign(self) -> ast.Stmt:
        name = self._next()
        operator = self._next().text
        value = self._expression()
        self._end_statement(value)
        if operator != "=":
            old = ast.Name(name.span, name.text)
            value = ast.Binary(name.span.to(value.span), operator[:-1], old, value)
        return ast.Assign(name.span, name.text, value)

    def _end_statement(self, value: ast.Expr | None) -> None:
        if isinstance(value, ast.Lambda):
            self._take(";")
        else:
            self._expect_semicolon("at the end of a statement")

    def _if(self) -> ast.Stmt:
        start = self._next()
        self._expect("(", "after `if`")
        condition = self._expression()
        self._expect(")", "after a condition")
        yes = self._branch()
        no = self._branch() if self._take("else") else ()
        return ast.If(start.span, condition, yes, no)

    def _return(self) -> ast.Stmt:
        start = self._next()
        value = None if self._is(";") else self._expression()
        self._end_statement(value)
        return ast.Return(start.span, value)

    # Expressions.

    def _expression(self) -> ast.Expr:
        return self._nested(self._ternary)

    def _ternary(self) -> ast.Expr:
        condition = self._binary(1)
        if not self._take("?"):
            return condition
        yes = self._expression()
        self._expect(":", "between the values of `?`")
        no = self._expression()
        return ast.Ternary(condition.span.to(no.span), condition, yes, no)

    def _binary(self, lowest: int) -> ast.Expr:
        """Operators that bind at least as tightly as `lowest`.

        A long chain is a deep tree, so it is bounded too.
        """
        left, number = self._unary(), 0
        while (precedence := self._precedence()) >= lowest:
            number = self._one_more(number, "operators", left)
            operator = self._next()
            right = self._nested(lambda bound=precedence + 1: self._binary(bound))  # type: ignore[misc]
            left = ast.Binary(left.span.to(right.span), operator.text, left, right)
        return left

    def _precedence(self) -> int:
        """That of the operator that comes next; 0: none does."""
        return _PRECEDENCE.get(self._token.text, 0) if self._token.kind == "op" else 0

    def _one_more(self, number: int, what: str, value: ast.Expr) -> int:
        """How many there are in a row with one more behind `value`, if there may be so many."""
        if number == MAX_DEPTH:
            note = "help: name a part of it in a variable"
            self._report.add("E102", f"more than {MAX_DEPTH} {what} in a row", value.span, note)
            raise _Recover
        return number + 1

    def _unary(self) -> ast.Expr:
        if self._token.kind == "op" and self._token.text in ("-", "+", "!", "~"):
            operator = self._next()
            operand = self._nested(self._unary)
            return ast.Unary(operator.span.to(operand.span), operator.text, operand)
        return self._postfix()

    def _postfix(self) -> ast.Expr:
        value, number = self._primary(), 0
        while self._is("[") or self._is("."):
            number = self._one_more(number, "indices", value)
            if self._take("["):
                index = self._expression()
                end = self._expect("]", "after an index")
                value = ast.Index(value.span.to(end.span), value, index)
            else:
                self._next()
                field = self._name("the name of a field after `.`")
                value = ast.Field(value.span.to(field.span), value, field.text)
        return value

    def _primary(self) -> ast.Expr:
        token = self._token
        if token.kind in ("int", "float"):
            return self._number()
        if self._is("["):
            return self._lambda()
        if self._is("("):
            self._next()
            value = self._expression()
            self._expect(")", "to match `(`")
            return value
        if token.kind != "name" or token.text in (*TYPE_NAMES, *_KEYWORDS):
            self._fail("a value")
        if token.text in mistakes.FOREIGN_WORDS:
            self._foreign(token)
        self._next()
        type_argument = None
        if token.text in ("random", "bitcast") and self._take("<"):
            type_argument = self._type(" in `<...>`")
            self._expect(">", f"after the type of `{token.text}`")
            if not self._is("("):
                self._fail(f"`(` after `{token.text}<...>`")
        if not self._is("("):
            return ast.Name(token.span, token.text)
        self._next()
        arguments: list[ast.Expr] = []
        while not self._is(")"):
            if arguments:
                self._expect(",", "between arguments")
            arguments.append(self._expression())
        end = self._next()
        return ast.Call(
            token.span.to(end.span), token.text, token.span, type_argument, tuple(arguments)
        )

    def _number(self) -> ast.Number:
        token = self._next()
        if token.kind == "float":
            return ast.Number(token.span, float(token.text))
        if len(token.text) > 19 or int(token.text) >= 1 << 63:
            notes = hints.wrapped(token.text, self._report.text(token.span))
            self._report.add("E308", "an integer must be less than 2^63", token.span, *notes)
            return ast.Number(token.span, 0)
        return ast.Number(token.span, int(token.text))

    def _lambda(self) -> ast.Expr:
        start = self._next()
        self._expect("&", "in the `[&]` of a lambda")
        self._expect("]", "in the `[&]` of a lambda")
        parameters = self._parameters()
        self._expect("->", "before the type that a lambda returns")
        result = self._type(" after `->`")
        body = self._body()
        return ast.Lambda(start.span, parameters, result, body)
