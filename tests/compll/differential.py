# SPDX-License-Identifier: Apache-2.0
"""One generated program in all back ends: what disagrees with the reference, and in how few lines.

`test_generated.py` does it for a few programs, `python -m tests.fuzz programs` for any number.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt

import compll
from compll.backends.cache import build
from compll.backends.library import CompiledCodec
from compll.packet import PREFIX, PacketError
from compll.pipeline import cuda_source
from compll.specification import Specification
from tests.compll import emulation, hurry
from tests.compll.emulation import FINE, Emulated
from tests.compll.generated_programs import NAME, VALUES, Made
from tests.compll.support import assert_same_floats, gradients

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Key(TypedDict):
    """Where randomness comes from."""

    seed: int
    step: int
    tensor_id: int
    offset: int


SIZES = (0, 1, 33, 300, 2500)
KINDS = ("plain", "broken", "denormal", "huge", "small integers", "any bits")
KEY = Key(seed=2**63 + 5, step=11, tensor_id=9, offset=19)
NO_RESULT = "gradient = map(range(gradient.size), [&](int i) -> float { return 0; });"


def inputs(n: int) -> dict[str, Floats]:
    """Gradients of n elements, by what is in them."""
    rng = np.random.default_rng(n + 1)
    found = gradients(n)
    found["small integers"] = rng.integers(-3, 4, n).astype(np.float32)
    found["any bits"] = rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)
    return {kind: found[kind] for kind in KINDS}


def compiled_program(made: Made) -> compll.Program | None:
    """The program, or None where the compiler refuses it."""
    try:
        return compll.compile_text(made.text, NAME)
    except compll.CompileError:
        return None


def has_cuda(program: compll.Program, made: Made) -> bool:
    """Whether the CUDA back end takes the program."""
    try:
        cuda_source(program, Specification(NAME, ((f"{NAME}.pse", made.text.encode()),)))
    except compll.CompileError:
        return False
    return True


def check_cpp(
    program: compll.Program,
    flags: Sequence[str] | None = None,
    sizes: Sequence[int] = SIZES,
    values_of: Sequence[dict[str, float]] = VALUES,
    library: Path | None = None,
    kind: type[CompiledCodec] = CompiledCodec,
) -> None:
    """Raises AssertionError where C++ gives other bits than the reference, in any entry.

    `flags`: of the compiler; None: in a hurry, for what is shipped takes ten times as long.
    `values_of`: of the parameters, one after another. `library`: with it, if there is one.
    `kind`: how what was compiled is called; see tests/support/foreign.py.
    """
    if library is None:
        source = compll.generate(program)[f"{program.name}.codec.cc"]
        library = build(source, program.name, hurry.flags() if flags is None else tuple(flags))
    for values in values_of:
        pair = CompiledPair(program, kind(program, library, **values), values)
        for n in sizes:
            pair.check(n)


def check_cuda(
    program: compll.Program,
    sizes: Sequence[int] = SIZES,
    values_of: Sequence[dict[str, float]] = VALUES,
    library: Path | None = None,
) -> None:
    """The same of the CUDA kernels, run on this CPU; `library`: with them, if there is one."""
    library = emulation.build(program) if library is None else library
    for values in values_of:
        reference = compll.Reference(program, **values)
        kernels = Emulated(program, library, **values)
        for n in sizes:
            for number, (kind, x) in enumerate(inputs(n).items()):
                kernels.alone(may_be=number % 2 == 0)
                kernels.order(backwards=number % 3 == 1)
                # A loop that draws noise has full tiles only where that is in whole blocks.
                key = KEY if number % 4 < 2 else Key(**{**KEY, "offset": 16})
                case = f"{values}, {n} elements, {kind}, from {key['offset']}"
                _check_kernels(kernels, reference, x, key, case)
                if n and not reference.state_names:
                    _check_kernels_with_feedback(kernels, reference, x, key, case)


def _check_kernels(
    kernels: Emulated, reference: compll.Reference, x: Floats, key: Key, case: str
) -> None:
    state = _state(reference.state_names, x.size)
    new_state = None if state is None else state.copy()
    expected = reference.encode(x, state=new_state, **key)
    packet, kept = kernels.encode(x, state=state, **key)
    assert packet.tobytes() == expected.tobytes(), f"packet: {case}"
    if kept is not None and new_state is not None:
        _same(kept, new_state, f"state: {case}")
    value = _decoded(reference, expected, x.size)
    found, report = kernels.decode([expected], x.size)
    assert (report == FINE) == (value is not None), f"report {report}: {case}"
    if value is not None:
        _same(found, value, f"decode: {case}")
        found, _ = kernels.decode([expected, expected], x.size)
        with np.errstate(all="ignore"):
            _same(found, value + value, f"merge: {case}")


def _check_kernels_with_feedback(
    kernels: Emulated, reference: compll.Reference, x: Floats, key: Key, case: str
) -> None:
    """Two rounds: what is left of a gradient and a residual, beside that and then over it."""
    residual = _residual(x.size)
    for is_apart in (True, False):
        packet, rest = expected_feedback(reference, x, residual, key)
        report = np.zeros(1, np.uint64)
        found, left = kernels.encode(x, residual, is_apart=is_apart, report=report, **key)
        assert found.tobytes() == packet.tobytes(), f"feedback: {case}, {is_apart=}"
        assert (report[0] == FINE) == (rest is not None), f"report {report}: {case}, {is_apart=}"
        if rest is None:
            assert kernels.codec.own_may_fail
            with np.errstate(all="ignore"):
                _same(left, x + residual, f"refused feedback: {case}, {is_apart=}")
            return
        _same(left, rest, f"feedback: {case}, {is_apart=}")
        residual = rest


def expected_feedback(
    reference: compll.Reference, x: Floats, residual: Floats, key: Key = KEY
) -> tuple[Bytes, Floats | None]:
    """The packet of a sum and what decoding it misses; None: its packet is refused."""
    with np.errstate(all="ignore"):
        total = x + residual
        packet = reference.encode(total, **key)
        value = _decoded(reference, packet, x.size)
        if value is None:
            return packet, None
        rest = total - value
    return packet, np.where(np.isfinite(rest), rest, np.float32(0))


def _residual(n: int) -> Floats:
    return np.random.default_rng(n).standard_normal(n).astype(np.float32)


def _state(names: Sequence[str], n: int) -> Floats | None:
    """What a call finds in the states, if there are any."""
    rng = np.random.default_rng(3)
    return rng.standard_normal((len(names), n)).astype(np.float32) if names else None


def _same(found: Floats | None, expected: Floats | None, case: str) -> None:
    """Both refuse, or give the same floats."""
    assert (found is None) == (expected is None), f"only one refuses: {case}"
    if found is None or expected is None:
        return
    try:
        assert_same_floats(found, expected)
    except AssertionError as error:
        raise AssertionError(f"{case}\n{error}") from None


def _decoded(reference: compll.Reference, packet: Bytes, n: int) -> Floats | None:
    """What the reference makes of a packet; None: it refuses it."""
    try:
        return reference.decode(packet, n)
    except PacketError:
        return None


class CompiledPair:
    """A program in C++, and the reference that it must equal."""

    def __init__(
        self, program: compll.Program, codec: CompiledCodec, values: dict[str, float]
    ) -> None:
        """`values`: of the parameters, of `codec` too."""
        self._reference = compll.Reference(program, **values)
        self._codec = codec
        self._values = values

    def check(self, n: int) -> None:
        """Raises AssertionError where one of the two does something else with n elements."""
        packets = [self._encode(x, kind) for kind, x in inputs(n).items()]
        bodies = [packet[PREFIX.size :] for packet in packets]
        if n == 0:
            return
        size = self._reference.body_bytes(n)
        bodies.append(np.random.default_rng(n).integers(0, 256, size, np.uint8))
        values = [self._decode(body, n) for body in bodies]
        good = [
            (body, value) for body, value in zip(bodies, values, strict=True) if value is not None
        ]
        if good and self._codec.has_merge:
            self._merge([body for body, _ in good], [value for _, value in good])

    def _case(self, what: str, n: int, more: str = "") -> str:
        return f"{what}: {self._values}, {n} elements{more}"

    def _encode(self, x: Floats, kind: str) -> Bytes:
        """The packet of a vector, by both; with its state, or with feedback."""
        old = _state(self._codec.state_names, x.size)
        states = [None if old is None else old.copy() for _ in range(2)]
        expected = self._reference.encode(x, state=states[0], **KEY)
        found = self._codec.encode(x, state=states[1], **KEY)
        assert found.tobytes() == expected.tobytes(), self._case("packet", x.size, f", {kind}")
        if old is None:
            if x.size and self._codec.has_feedback:
                self._feedback(x, kind)
            return expected
        _same(states[1], states[0], self._case("state", x.size, f", {kind}"))
        if x.size:
            rows = list(old)
            body = self._codec.encode_body(x, **KEY, state=rows, new_state=rows)
            case = self._case("state in place", x.size, f", {kind}")
            assert body.tobytes() == expected[PREFIX.size :].tobytes(), case
            _same(old, states[0], case)
        return expected

    def _feedback(self, x: Floats, kind: str) -> None:
        """Two rounds: what is left of a gradient and a residual, beside that and then over it."""
        residual = _residual(x.size)
        for is_apart in (True, False):
            case = self._case("feedback", x.size, f", {kind}, {is_apart=}")
            packet, rest = expected_feedback(self._reference, x, residual)
            left = np.full_like(residual, np.nan) if is_apart else residual
            try:
                body = self._codec.encode_feedback_body(x, residual, left, **KEY)
            except PacketError:
                assert rest is None, case
                return
            assert rest is not None, case
            assert body.tobytes() == packet[PREFIX.size :].tobytes(), case
            _same(left, rest, case)
            residual = left

    def _decode(self, body: Bytes, n: int) -> Floats | None:
        """What a body holds, by both: set, and added to what is there."""
        value: Floats | None
        try:
            value = self._reference.decode_body(body.tobytes(), n)
        except PacketError:
            value = None
        room = np.linspace(-1, 1, n, dtype=np.float32)
        for is_added in (False, True):
            expected = value
            if is_added and value is not None:
                with np.errstate(all="ignore"):
                    expected = room + value
            out = room.copy()
            try:
                self._codec.decode_body(body, out, add=is_added)
                found: Floats | None = out
            except PacketError:
                found = None
            _same(found, expected, self._case("add" if is_added else "decode", n))
        return value

    def _merge(self, bodies: list[Bytes], values: list[Floats]) -> None:
        """The sum of bodies, of some numbers of them: groups of rows and what is beside them."""
        for number in {1, min(3, len(bodies)), len(bodies)}:
            total = values[0].copy()
            with np.errstate(all="ignore"):
                for value in values[1:number]:
                    total += value
            found = np.empty_like(total)
            self._codec.merge_bodies(bodies[:number], found)
            _same(found, total, self._case(f"merge of {number}", total.size))


def shrink(made: Made, fails: Callable[[Made], bool], max_tries: int = 300) -> Made:
    """A shorter program that `fails` too: statements, fields and expressions are left out."""
    tries = 0
    is_shorter = True
    while is_shorter:
        is_shorter = False
        for candidate in _shorter(made):
            if tries == max_tries:
                return made
            if compiled_program(candidate) is None:
                continue
            tries += 1
            if fails(candidate):
                made, is_shorter = candidate, True
                break
    return made


def _shorter(made: Made) -> Iterator[Made]:
    """The program without one of its parts."""
    if made.decode[-1] != NO_RESULT:
        yield replace(made, decode=(*made.decode[:-1], NO_RESULT))
    for at in reversed(range(len(made.decode) - 1)):
        yield replace(made, decode=made.decode[:at] + made.decode[at + 1 :])
    for at in range(len(made.fields)):
        yield replace(made, fields=made.fields[:at] + made.fields[at + 1 :])
    for name in made.states:
        rest = tuple(one for one in made.encode if not one.startswith(f"{name} ="))
        states = tuple(one for one in made.states if one != name)
        yield replace(made, states=states, encode=rest)
    for at in reversed(range(len(made.encode))):
        yield replace(made, encode=made.encode[:at] + made.encode[at + 1 :])
    for at, statement in enumerate(made.encode):
        for text in _simpler(statement):
            yield replace(made, encode=(*made.encode[:at], text, *made.encode[at + 1 :]))
    for at, statement in enumerate(made.decode):
        for text in _simpler(statement):
            yield replace(made, decode=(*made.decode[:at], text, *made.decode[at + 1 :]))


def _simpler(statement: str) -> Iterator[str]:
    """The statement with one of its lambdas or expressions cut, always shorter."""
    for found in re.finditer(r"[{(]", statement):
        start = found.start()
        end = _group_end(statement, start)
        group = statement[start:end]
        if group[0] == "{":
            last = group.rfind("return")
            instead = ["{ return 0; }", f"{{ {group[last:]}" if last > 2 else group]
        else:
            instead = ["0", *_children(group)]
        for text in instead:
            if len(text) < len(group):
                yield statement[:start] + text + statement[end:]


def _children(group: str) -> list[str]:
    """The bracketed groups right inside a bracketed group."""
    found, at = [], 1
    while (at := group.find("(", at)) > 0:
        end = _group_end(group, at)
        found.append(group[at:end])
        at = end
    return found


def _group_end(text: str, start: int) -> int:
    """One behind the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in "({[") - (text[at] in ")}]")
        if depth == 0:
            return at + 1
    return len(text)
