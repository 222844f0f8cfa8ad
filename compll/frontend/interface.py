# SPDX-License-Identifier: Apache-2.0
"""What a specification shows outside: which functions it has, and their parameters.

Parameters are the scalars after the two vectors, in that order; a `param` block named like the
codec gives them defaults and ranges. Without one, a parameter has no default, and its range is that
of its type.
"""

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass

from compll.errors import Report
from compll.frontend import ast
from compll.frontend.lower import MAX_FLOAT
from compll.frontend.scope import nearest
from compll.ir import nodes, semantics
from compll.ir.types import FIXED_WIDTHS, FLOAT, INT, Array, Type, UInt

# Inputs, outputs and attributes that the generated operations have anyway, and what TensorFlow's
# wrappers of operations call their own arguments and variables.
RESERVED = (
    *("gradient", "packet", "packets", "residual", "new_residual", "state", "new_state"),
    *("sum", "seed", "step"),
    *("tensor_id", "offset", "num_elements"),
    *("name", "ctx", "tld"),
)
# TF_HIPS_MAX_STATE of tf_hips/cc/runtime/codec.h.
MAX_STATE = 8
# Integers travel as binary64.
_MAX_INT = 2**53


@dataclass
class Interface:
    """The outside of a codec.

    `gradient` stands for the gradient of both functions: what Encode reads, and what Decode knows
    the size of. `fields`: what the `param` block says, by parameter. `states`: vectors of that size
    that outlive a call of Encode. `has_encode`: the file has an Encode, if only one that was
    refused, so that `encode` is None.
    """

    prefix: str
    gradient: nodes.Var
    params: list[nodes.Param]
    encode: ast.Function | None
    decode: ast.Function | None
    fields: dict[str, ast.ParamField]
    states: tuple[nodes.Var, ...]
    has_encode: bool


def read_interface(tree: ast.File, report: Report) -> Interface | None:
    """The interface of a file; None when there is no function to go on with."""
    found: dict[str, ast.Function] = {}
    prefix = ""
    for function in tree.functions:
        kind = function.name[-6:]
        stem = function.name[:-6]
        if kind not in ("Encode", "Decode") or not re.fullmatch(r"[A-Z][A-Za-z0-9]*", stem):
            help_line = "help: the names are XEncode and XDecode; X begins with a capital letter"
            message = f"`{function.name}` is neither an Encode nor a Decode"
            if stem and kind in ("Encode", "Decode"):
                shown = f"the `{stem}` of `{function.name}`"
                message = f"{shown} must be a capital letter, and then letters and digits"
                help_line = "help: TensorFlow names the operations after it, as in TopKEncode"
            elif _spelled(function.result) != "void":
                kinds = ", ".join(f"{_spelled(p.type)} {p.name}" for p in function.parameters)
                result = _spelled(function.result)
                shown = f"lambda_func {function.name} = [&]({kinds}) -> {result} {{ ... }}"
                help_line = f"help: a helper is a lambda inside of the function: `{shown}`"
            report.add("E501", message, function.span, help_line)
            continue
        if kind in found or (found and stem != prefix):
            first = next(iter(found.values()))
            place = report.place(first.span)
            note = f"note: `{first.name}` is on {place}; one file holds one codec"
            report.add("E503", f"`{function.name}` is one function too many", function.span, note)
            continue
        prefix = stem
        if _has_signature(function, kind, report):
            found[kind] = function
    if not tree.functions:
        help_line = "help: `void XEncode(float* gradient, uint8* compressed) { ... }`"
        report.add("E509", "this file has no function", tree.span, help_line)
    if not found:
        return None
    encode, decode = found.get("Encode"), found.get("Decode")
    lead = encode or decode
    if lead is None:
        return None
    gradient = lead.parameters[0 if encode else 1]
    var = nodes.Var(gradient.name, Array(FLOAT), gradient.span)
    fields = _read_fields(lead, tree, prefix, report)
    params = []
    for parameter in lead.parameters[2:]:
        scalar = scalar_type(parameter.type)
        if scalar is not None:
            item = fields.get(parameter.name)
            params.append(_limits(nodes.Var(parameter.name, scalar, parameter.span), item, report))
    has_encode = any(function.name.endswith("Encode") for function in tree.functions)
    states = _read_states(tree, prefix, has_encode, report)
    interface = Interface(prefix, var, params, encode, decode, fields, states, has_encode)
    if encode is not None and decode is not None:
        _compare(encode, decode, report)
    return interface


def scalar_type(tree: ast.TypeName) -> Type | None:
    """The type of a scalar parameter, or None when it cannot be one."""
    if tree.is_array or tree.width is not None:
        return None
    if tree.name in FIXED_WIDTHS:
        return UInt(FIXED_WIDTHS[tree.name])
    return {"float": FLOAT, "int": INT}.get(tree.name)


def _has_signature(function: ast.Function, kind: str, report: Report) -> bool:
    vectors = ("float*", "uint8*") if kind == "Encode" else ("uint8*", "float*")
    given = [_spelled(parameter.type) for parameter in function.parameters]
    form = f"void {function.name}({vectors[0]}, {vectors[1]}, scalars...)"
    if _spelled(function.result) != "void" or tuple(given[:2]) != vectors:
        shown = f"{_spelled(function.result)} {function.name}({', '.join(given)})"
        report.add("E502", f"expected `{form}`, found `{shown}`", function.span)
        return False
    is_good = True
    names = [parameter.name for parameter in function.parameters]
    for number, parameter in enumerate(function.parameters):
        name = parameter.name
        if number >= 2 and scalar_type(parameter.type) is None:
            message = f"`{name}` must be a float, an int or one of {', '.join(FIXED_WIDTHS)}"
            report.add("E502", message, parameter.type.span)
            is_good = False
        if name in names[:number]:
            report.add("E203", f"`{name}` is declared twice", parameter.span)
            is_good = False
        elif number >= 2 and (name in RESERVED or name.startswith("_") or keyword.iskeyword(name)):
            note = f"help: choose another; operations use {', '.join(RESERVED)} themselves"
            if name not in RESERVED:
                note = "help: choose a name that an argument in Python may have"
            message = f"`{name}` cannot be the name of a parameter"
            report.add("E603", message, parameter.span, note)
    return is_good


def _spelled(tree: ast.TypeName) -> str:
    return f"{tree.name}{'<...>' if tree.width is not None else ''}{'*' if tree.is_array else ''}"


def _compare(encode: ast.Function, decode: ast.Function, report: Report) -> None:
    one = [(_spelled(p.type), p.name) for p in encode.parameters[2:]]
    two = [(_spelled(p.type), p.name) for p in decode.parameters[2:]]
    if one != two:
        shown = [
            ", ".join(f"{kind} {name}" for kind, name in params) or "none" for params in (one, two)
        ]
        message = f"`{decode.name}` takes other parameters: {shown[1]}"
        report.add("E507", message, decode.span, f"note: `{encode.name}` takes: {shown[0]}")


def _read_fields(
    function: ast.Function, tree: ast.File, prefix: str, report: Report
) -> dict[str, ast.ParamField]:
    """What `param` blocks say of the parameters of a function, by name."""
    fields: dict[str, ast.ParamField] = {}
    types = {parameter.name: parameter.type for parameter in function.parameters[2:]}
    # One that is in another function alone, or in one that was refused, is told there.
    known = {item.name for other in tree.functions for item in other.parameters[2:]}
    for number, block in enumerate(tree.blocks):
        if block.name != prefix:
            help_lines = nearest(block.name, [prefix]) or (
                f"note: this file's codec is `{prefix}`",
            )
            report.add(
                "E601", f"`{block.name}` is not the codec of this file", block.span, *help_lines
            )
            continue
        if _is_repeated(block, tree.blocks[:number], report):
            continue
        for item in block.fields:
            if item.name in known and item.name not in types:
                continue
            if item.name not in types:
                help_lines = nearest(item.name, types)
                report.add(
                    "E601",
                    f"`{function.name}` has no parameter `{item.name}`",
                    item.span,
                    *help_lines,
                )
            elif _spelled(item.type) != _spelled(types[item.name]):
                was = _spelled(types[item.name])
                is_now = _spelled(item.type)
                message = f"`{item.name}` is `{is_now}` here and `{was}` in `{function.name}`"
                report.add("E601", message, item.type.span)
            elif item.name in fields:
                report.add("E203", f"`{item.name}` is declared twice", item.span)
            else:
                fields[item.name] = item
    return fields


def _is_repeated(
    block: ast.ParamBlock | ast.StateBlock,
    earlier: Sequence[ast.ParamBlock | ast.StateBlock],
    report: Report,
) -> bool:
    """Whether a block of this name came before; one that says something else is reported.

    Equal ones are welcome: the files of an Encode and a Decode may both say what both need.
    """
    first = next((one for one in earlier if one.name == block.name), None)
    if first is not None and _content(first) != _content(block):
        word = "param" if isinstance(block, ast.ParamBlock) else "state"
        note = f"note: it must be equal to the first one, on {report.place(first.span)}"
        help_line = "help: remove one of the two, or let both say the same"
        report.add("E203", f"a second `{word} {block.name}`", block.span, note, help_line)
    return first is not None


def _content(block: ast.ParamBlock | ast.StateBlock) -> list[tuple[object, ...]]:
    """What a block says, without places in the text."""
    if isinstance(block, ast.StateBlock):
        return [(item.name, _spelled(item.type)) for item in block.fields]
    return [
        (
            *(item.name, _spelled(item.type)),
            *(None if n is None else n.value for n in (item.low, item.high, item.default)),
        )
        for item in block.fields
    ]


def _read_states(
    tree: ast.File, prefix: str, has_encode: bool, report: Report
) -> tuple[nodes.Var, ...]:
    taken = {item.name for function in tree.functions for item in function.parameters}
    found: dict[str, nodes.Var] = {}
    misplaced: set[str] = set()
    for number, block in enumerate(tree.states):
        if block.name != prefix or not has_encode:
            note = f"note: this file's codec is `{prefix}`"
            if block.name == prefix:
                note = (
                    "help: write it beside the Encode: only that can change a state, and this file "
                    "has none"
                )
            message = f"`{block.name}` is not a codec of this file that can have state"
            help_lines = nearest(block.name, [prefix]) if block.name != prefix else ()
            report.add("E604", message, block.span, *(help_lines or (note,)))
            if not has_encode:
                continue
            misplaced.update(item.name for item in block.fields)
        # What is wrongly declared is known all the same: its uses are not unknown names.
        if _is_repeated(block, tree.states[:number], report):
            continue
        for item in block.fields:
            if _spelled(item.type) != "float*":
                message = f"`{item.name}` must be a `float*`, found `{_spelled(item.type)}`"
                report.add("E605", message, item.type.span)
            if item.name not in taken and item.name not in found:
                found[item.name] = nodes.Var(item.name, Array(FLOAT), item.span)
            elif item.name not in misplaced:
                report.add("E203", f"`{item.name}` is declared twice", item.span)
        if len(block.fields) > MAX_STATE:
            message = f"a codec has at most {MAX_STATE} states, this one {len(block.fields)}"
            report.add("E604", message, block.span)
    return tuple(found.values())


def _rounded(value: float, kind: Type) -> float:
    """A number as a type holds it; one that it cannot hold, as it is."""
    return semantics.binary32(value) if kind == FLOAT else value


def _held(value: float, kind: Type) -> float:
    """A number as a parameter holds it.

    Parameters know one zero: else equal values would have different packets.
    """
    return float(_rounded(value, kind)) + 0.0


def _shown(limit: float, kind: Type) -> str:
    """A limit of a parameter as messages print it."""
    return f"{limit:.9g}" if kind == FLOAT or limit != int(limit) else str(int(limit))


def _limits(var: nodes.Var, item: ast.ParamField | None, report: Report) -> nodes.Param:
    if isinstance(var.type, UInt) and isinstance(var.type.bits, int):
        low, high = 0.0, float((1 << var.type.bits) - 1)
    else:
        low, high = (
            (-MAX_FLOAT, MAX_FLOAT) if var.type == FLOAT else (-float(_MAX_INT), float(_MAX_INT))
        )
    if item is None:
        return nodes.Param(var, low, high, None)
    is_held = True
    for number in (item.low, item.high, item.default):
        if number is None:
            continue
        if var.type != FLOAT and isinstance(number.value, float):
            help_line = "help: write a number without a point"
            report.add("E602", f"`{var.name}` is an integer", number.span, help_line)
            is_held = False
        elif not low <= _rounded(number.value, var.type) <= high:
            holds = " to ".join(_shown(limit, var.type) for limit in (low, high))
            article = "an" if var.type == INT else "a"
            report.add("E602", f"{article} `{var.type}` holds {holds}", number.span)
            is_held = False
    if not is_held:  # what it would be compared with, or be shown as, is not a value
        return nodes.Param(var, low, high, None)
    if item.low is not None and item.high is not None:
        low, high = _held(item.low.value, var.type), _held(item.high.value, var.type)
        if low > high:
            message = f"the range [{_shown(low, var.type)}, {_shown(high, var.type)}] is empty"
            help_line = "help: write the smaller number first"
            report.add("E602", message, item.low.span.to(item.high.span), help_line)
            return nodes.Param(var, low, high, None)
    if item.default is None:
        return nodes.Param(var, low, high, None)
    default = _held(item.default.value, var.type)
    if not low <= default <= high:
        shown = f"[{_shown(low, var.type)}, {_shown(high, var.type)}]"
        report.add("E602", f"the default must be in {shown}", item.default.span)
    return nodes.Param(var, low, high, default)
