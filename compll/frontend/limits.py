# SPDX-License-Identifier: Apache-2.0
"""Whether the default and the range of a parameter let it be a width or the size of a block.

What a call is given is checked when it is made. A default that every call would refuse, and a range
of which every value would be refused, are told here, where they are written.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from compll.errors import Report
from compll.frontend.constants import integer_with
from compll.frontend.interface import Interface
from compll.ir import nodes
from compll.ir.types import FLOAT, INT, MAX_PACKED_BITS, UInt
from compll.ir.walk import free_vars


@dataclass(frozen=True)
class _Use:
    """What a number is used for, as messages name it, and the numbers that can be used so."""

    what: str
    rule: str
    allowed: Iterable[int]
    code: str


def check_limits(
    interface: Interface, widths: Iterable[UInt], blocks: Iterable[nodes.Expr], report: Report
) -> None:
    """Reports defaults and ranges with which no call works.

    Args:
        interface: the parameters, with what the `param` block says of them.
        widths: types whose width depends on parameters.
        blocks: sizes of blocks that do.
        report: where findings go.
    """
    for kind in widths:
        if isinstance(kind.bits, nodes.Expr):
            rule, allowed = f"from 1 to {MAX_PACKED_BITS}", range(1, MAX_PACKED_BITS + 1)
            use = _Use(f"the width `uint<{report.text(kind.bits.span)}>`", rule, allowed, "E304")
            _check(interface, kind.bits, use, report)
    for block in blocks:
        rule = f"a power of two from {nodes.BLOCKS[0]} to {nodes.BLOCKS[-1]}"
        use = _Use(f"the size `{report.text(block.span)}` of a block", rule, nodes.BLOCKS, "E407")
        _check(interface, block, use, report)


def _check(interface: Interface, value: nodes.Expr, use: _Use, report: Report) -> None:
    note = f"note: it is used on {report.place(value.span)}"
    bare = value
    while isinstance(bare, nodes.Convert) and bare.type == INT:
        bare = bare.operand
    for param in interface.params:
        if not isinstance(bare, nodes.Ref) or bare.var is not param.var or bare.type == FLOAT:
            continue
        if not any(param.low <= number <= param.high for number in use.allowed):
            shown = f"[{param.low:.0f}, {param.high:.0f}]"
            message = f"no number in {shown} is {use.rule}, as {use.what} must be"
            item = interface.fields.get(param.var.name)
            if item is None or item.low is None or item.high is None:
                report.add(use.code, message, value.span)
            else:
                help_line = "help: write a range that holds such a number"
                report.add("E602", message, item.low.span.to(item.high.span), help_line, note)
            return
    defaults = {param.var: param.default for param in interface.params if param.default is not None}
    found = integer_with(value, defaults)
    if found is None or found in use.allowed:
        return
    message = f"{use.what} must be {use.rule}. Received: {found}"
    for name in [param.var.name for param in interface.params if param.var in free_vars(value)]:
        item = interface.fields[name]
        if item.default is not None:
            help_line = f"help: write a default that makes it {use.rule}"
            report.add("E602", f"{message}, by default", item.default.span, help_line, note)
            return
    report.add(use.code, message, value.span)
