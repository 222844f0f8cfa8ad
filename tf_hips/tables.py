# SPDX-License-Identifier: Apache-2.0
"""Tables and lines on stdout: no value is ever cut.

A file or a pipe has no width, and gets every column in one line a row. On a terminal, columns of
words go on in the next line; where that is not enough, what may be left out is, and is named; and
where that is not enough either, each row is printed as a block, a line for each column.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tf_hips.log import printable_lines

if TYPE_CHECKING:
    from rich.console import Console

_NO_WIDTH = 1 << 16  # rich wants a number where there is no terminal
_LEAST_WORDS = 16  # characters that a column of words needs, to be read
_GAP = 2  # characters between columns


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its head.
        is_right: whether it is flush right, as numbers are.
        folds: whether a value may go on in the next line, as words may.
    """

    name: str
    is_right: bool = False
    folds: bool = False


def numbers(*names: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(name, is_right=True) for name in names)


def short(value: float, digits: int = 3) -> str:
    """A number >= 0 of so many digits; from 1000 on a whole one, `60,560`, and not `6.06e+04`."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.{digits}g}"


def console() -> "Console":
    """Stdout, as wide as what is printed where it is no terminal; text is printed as it is."""
    from rich.console import Console

    return Console(
        highlight=False,
        markup=False,
        emoji=False,  # `:100:` in an address is none
        width=None if sys.stdout.isatty() else _NO_WIDTH,
    )


def fits(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> bool:
    """Whether `show` can print a table without leaving out columns and in one line a row."""
    return not rows or _least_width(columns, rows, range(len(columns)), True) <= console().width


def show(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    leave_out: Sequence[str] = (),
    hint: str = "",
    has_head: bool = True,
) -> None:
    """Prints a table so that it fits on the terminal; nothing where there are no rows.

    Args:
        columns: of the table.
        rows: texts, one for each column.
        leave_out: names of the columns to leave out on a narrow terminal, in this order.
        hint: where to find what was left out.
        has_head: whether to print the names of the columns; without, the first column is bold.
    """
    if not rows:
        return
    rows = [[printable_lines(cell) for cell in row] for row in rows]
    out = console()
    kept = list(range(len(columns)))
    gone: list[str] = []
    candidates = [name for name in leave_out if any(name == one.name for one in columns)]
    while _least_width(columns, rows, kept, has_head) > out.width and candidates:
        gone.append(candidates.pop(0))
        kept = [index for index in kept if columns[index].name != gone[-1]]
    if _least_width(columns, rows, kept, has_head) > out.width:
        _show_blocks(out, columns, rows, has_head)
        return
    _show_table(out, [columns[i] for i in kept], [[row[i] for i in kept] for row in rows], has_head)
    if gone:
        out.print(f"left out in {out.width} columns: {', '.join(gone)}{hint and f' ({hint})'}")


def _least_width(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], kept: Sequence[int], has_head: bool
) -> int:
    """Characters that a row needs without cutting a value."""
    widths = []
    for index in kept:
        wide = max(_width(row[index]) for row in rows)
        if columns[index].folds:
            wide = min(wide, _LEAST_WORDS)
        widths.append(max(wide, _width(columns[index].name) if has_head else 0))
    return sum(widths) + _GAP * (len(widths) - 1)


def _width(text: str) -> int:
    from rich.cells import cell_len

    return max((cell_len(line) for line in text.splitlines()), default=0)


def _show_table(
    out: "Console", columns: Sequence[Column], rows: Sequence[Sequence[str]], has_head: bool
) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=has_head)
    for index, column in enumerate(columns):
        table.add_column(
            column.name,
            justify="right" if column.is_right else "left",
            no_wrap=not column.folds,
            overflow="fold",
            style="" if has_head or index else "bold",
        )
    for row in rows:
        table.add_row(*row)
    out.print(table)


def _show_blocks(
    out: "Console", columns: Sequence[Column], rows: Sequence[Sequence[str]], has_head: bool
) -> None:
    """Each row as lines; a line that is too long goes on in the next one."""
    for number, row in enumerate(rows):
        if number and has_head:
            out.print()
        for column, value in zip(columns, row, strict=True):
            text = f"{column.name}: {value}" if has_head and column.name else value
            out.print(text, soft_wrap=True)
