# SPDX-License-Identifier: Apache-2.0
"""Compressor: which codec, with which parameters, wrapped in what. A plain value.

A compressor holds no state and does no work: ops.native runs it without TensorFlow, ops.graph
inside a graph. It prints as the text that makes it again, `error_feedback(terngrad(bitwidth=2))`;
this text travels between processes, so two compressors are the same if and only if their texts are.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from tf_hips.ops import call_text, feedback, jit, loaded, low_rank, mixing, native, stages
from tf_hips.ops.feedback import ERROR_FEEDBACK
from tf_hips.ops.mixing import MIXED
from tf_hips.ops.registry import Parameter
from tf_hips.ops.smoothing import MOMENTUM
from tf_hips.ops.stages import WARMUP
from tf_hips.ops.wrappers import WITH_PARAMETERS, WRAPPERS

CHUNK = 1 << 20
"""Elements of one tensor that are encoded together. Frozen: it decides every packet's bytes."""

SPECIAL: "dict[str, tuple[Callable[..., Compressor], tuple[Parameter, ...]]]" = {}
"""Names that stand for no codec of their own: what makes them, and what they take."""

check_for_sums = native.check_for_sums

_MAX_TEXT = 320
_MAX_FILE_TEXT = 4096
_CALL = re.compile(r"\s*([A-Za-z_]\w*(?:@[0-9a-f]{16})?)\s*(?:\((.*)\)\s*)?", re.ASCII | re.DOTALL)
# A path holds no parentheses here; `tf_hips.load` takes any.
_FILE_CALL = re.compile(r"\s*([^()]*\S\.(?:pse|so))\s*(?:\((.*)\)\s*)?", re.DOTALL)


def chunk_sizes(n: int) -> list[int]:
    """Returns the elements of each chunk of a tensor of n elements; no chunk when n is 0."""
    if n < 0:
        raise ValueError(f"`n` must be at least 0. Received: n={n}")
    full, rest = divmod(operator.index(n), CHUNK)  # what NumPy compares repeats no list
    return [CHUNK] * full + [rest] * (rest > 0)


def packet_sizes(n: int) -> list[int]:
    """Returns the elements of each packet of a tensor of n elements; one packet of 0 when n is."""
    return chunk_sizes(n) or [0]


@dataclasses.dataclass(frozen=True)
class Compressor:
    """A codec for gradients, or a wrapper around one.

    Made by the functions of ops.algorithms, or by `parse`.

    Attributes:
        name: an algorithm of REGISTRY, a loaded one with the hash of its specification
            (`my@0123456789abcdef`), "error_feedback", "momentum", "warmup" or "mixed".
        params: (name, value) of each parameter, in the order of the specification.
        inner: what is wrapped; None for a codec.

    Raises:
        ValueError: there is no such compressor.
        TypeError: a parameter is not a number.
    """

    name: str
    params: tuple[tuple[str, int | float], ...] = ()
    inner: "Compressor | None" = None

    def __post_init__(self) -> None:
        self._check()
        # It travels between processes, which read no longer one.
        if len(self.text) > _MAX_TEXT:
            raise ValueError(
                f"the text of a compressor must have at most {_MAX_TEXT} characters: shorten the "
                f"names or values of its parameters. Received: {len(self.text)}, {self.text[:60]!r}"
                "..."
            )

    def _check(self) -> None:
        if self.inner is not None and self.inner.is_budget:
            raise ValueError(
                f"`{self.name}` must wrap a compressor; a budget chooses with error feedback or "
                f"without. Received: {self.inner.text}"
            )
        if self.name == ERROR_FEEDBACK:
            feedback.check(self.inner, self.params)
            return
        given = dict(self.params)
        if len(given) != len(self.params):
            raise ValueError(f"a parameter must be given once. Received: params={self.params}")
        wrapper = WITH_PARAMETERS.get(self.name)
        if wrapper is not None:
            object.__setattr__(self, "params", wrapper.checked(self.inner, given))
            return
        algorithm = jit.algorithm(self.name, also=WRAPPERS)
        params = algorithm.checked(**given)
        if algorithm.is_loaded and loaded.table(algorithm.name) is not None:
            loaded.check_values(algorithm.name, [value for _, value in params])
        if self.inner is not None:
            raise ValueError(
                f"`{self.name}` is a codec and wraps nothing. Received: {self.inner.text}"
            )
        object.__setattr__(self, "name", algorithm.name)
        object.__setattr__(self, "params", params)

    @property
    def is_budget(self) -> bool:
        """Whether it is chosen when the model is known; see `for_sizes`."""
        return False

    def for_sizes(self, sizes: Sequence[int]) -> "Compressor":
        """What encodes the gradients of a model; never a budget.

        Args:
            sizes: elements of each gradient.
        """
        return self

    @property
    def is_warmup(self) -> bool:
        """Whether it is another compressor in the first steps; see `at`."""
        return self.name == WARMUP or (self.is_mixed and self._mixed_with.is_warmup)

    @property
    def is_mixed(self) -> bool:
        """Whether it is another compressor for small tensors; see `of_size`."""
        return self.name == MIXED

    @property
    def _mixed_with(self) -> "Compressor":
        return self if self.inner is None else self.inner

    def of_size(self, n: int) -> "Compressor":
        """What encodes a tensor of n elements, and decodes what was encoded of it; never mixed.

        Args:
            n: elements of the whole tensor, not of a chunk.

        Raises:
            TypeError, ValueError: as for `wire_bytes`.
        """
        if not self.is_mixed:
            return self
        native.check_size(n)
        if n >= dict(self.params)["below"]:
            return self._mixed_with
        momentum = self._momentum
        return mixing.small() if momentum is None else momentum._with_inner(mixing.small())

    def _with_inner(self, inner: "Compressor") -> "Compressor":
        return Compressor(self.name, self.params, inner)

    @functools.cached_property
    def stages(self) -> "tuple[tuple[int, Compressor], ...]":
        """First step and compressor of each stage of a warm-up; else this one, from step 0 on."""
        if self.is_mixed:
            return tuple((first, self._with_inner(one)) for first, one in self._mixed_with.stages)
        if not self.is_warmup or self.inner is None:
            return ((0, self),)
        return stages.of_warmup(self.inner, dict(self.params))

    def at(self, step: int) -> "Compressor":
        """What encodes in this step, and decodes what was encoded in it; never a warm-up.

        Args:
            step: number of the step (`Key.step`), at least 0.

        Raises:
            TypeError: `step` is no integer.
        """
        if not self.is_warmup:
            return self
        native.check_integer("step", step)
        return next(stage for first, stage in reversed(self.stages) if first <= max(0, step))

    @property
    def codec(self) -> "Compressor":
        """The innermost compressor: the one that makes packets."""
        return self if self.inner is None else self.inner.codec

    @property
    def codec_params(self) -> tuple[tuple[str, int | float], ...]:
        """(name, value) of the parameters that the codec's specification has."""
        known = {p.name for p in jit.algorithm(self.name).parameters if p.is_codec}
        return tuple((name, value) for name, value in self.params if name in known)

    @property
    def makes_packets(self) -> bool:
        """Whether it encodes; else ranks sum with it, as `powersgd`, and nobody else can."""
        return jit.algorithm(self.codec.name).makes_packets

    @property
    def has_residual(self) -> bool:
        """Whether encoding keeps a residual alone: this is error feedback, in a warm-up or not."""
        if self.name == ERROR_FEEDBACK:
            return True
        return self.name != MOMENTUM and self.inner is not None and self.inner.has_residual

    @property
    def has_momentum(self) -> bool:
        """Whether `momentum` stands before the codec; that of `dgc` is its own."""
        return self._momentum is not None

    @property
    def _momentum(self) -> "Compressor | None":
        if self.name == MOMENTUM or self.inner is None:
            return self if self.name == MOMENTUM else None
        return self.inner._momentum

    @property
    def state_names(self) -> tuple[str, ...]:
        """What encoding keeps from call to call, by name.

        ("residual",) under error feedback, the states of the specification for a codec with state,
        nothing for others; with momentum ("momentum",) before these.
        """
        if self.name == ERROR_FEEDBACK:
            return ("residual",)
        if self.inner is None:
            return jit.algorithm(self.name).state_names
        return (MOMENTUM,) * (self.name == MOMENTUM) + self.inner.state_names

    @property
    def has_state(self) -> bool:
        """Whether encoding reads and writes something that outlives the call; see `state_shape`."""
        return bool(self.state_names)

    def state_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of what encoding keeps, float32, zeros at first, for a gradient of `shape`.

        Under error feedback that of the gradient; for a codec with state, and with momentum,
        `[states, elements]`.

        Raises:
            ValueError: encoding keeps nothing.
        """
        if not self.has_state:
            raise ValueError(f"encoding must keep something. Received: {self.text}")
        if self.has_residual:
            return tuple(shape)
        return len(self.state_names), math.prod(shape)

    @property
    def for_sums(self) -> "Compressor":
        """What encodes sums of decoded packets again, on an owner's or a server's way back.

        This compressor itself, unless its codec has state: a momentum that is in the packets must
        not be applied to their sum once more. Then another one, without momentum: for `dgc`
        `error_feedback(topk(...))` of four times its ratio, for loaded codecs `fp32`; with
        `momentum` what stands in it. Sums of a warm-up's packets are encoded by a warm-up of that,
        in the same stages.
        """
        if self.name == MOMENTUM and self.inner is not None:
            return self.inner
        if self.has_momentum and self.inner is not None:
            return self._with_inner(self.inner.for_sums)
        algorithm = jit.algorithm(self.codec.name)
        if not algorithm.state_names:
            return self
        if self.is_mixed:
            return self._with_inner(self._mixed_with.for_sums)
        if self.is_warmup and self.inner is not None:
            return stages.for_sums(self.inner, dict(self.params))
        return parse("fp32" if algorithm.sums is None else algorithm.sums(dict(self.params)))

    @property
    def clip_norm(self) -> float:
        """The norm that all gradients together are clipped to before they are encoded; 0: not.

        It is that of the sum over N encoders: each clips its own to clip_norm / sqrt(N).
        """
        if self.inner is not None:
            return self.inner.clip_norm
        return float(dict(self.params).get("clip_norm", 0.0))

    @property
    def is_unbiased(self) -> bool:
        """Whether the mean of what is decoded, over seeds, is the gradient, in every stage.

        Known of the codecs of tf_hips alone: False for one that was loaded.
        """
        if self.is_mixed:
            return self._mixed_with.is_unbiased and mixing.small().is_unbiased
        return not self.has_state and jit.algorithm(self.codec.name).is_unbiased

    @property
    def is_sparse(self) -> bool:
        """Whether packets say something of some elements only, so that most are decoded as 0.

        Of a loaded codec: whether its Decode is a `scatter`. A budget says so, because it may
        become such a codec.
        """
        return jit.algorithm(self.codec.name).is_sparse

    @property
    def has_threshold(self) -> bool:
        """Whether packets say 0 of what does not reach a parameter, which may be most elements.

        Known of the codecs of tf_hips alone: False for one that was loaded.
        """
        return jit.algorithm(self.codec.name).reach is not None

    @property
    def rounds_each(self) -> bool:
        """Whether each element is decoded as itself but for a share of itself.

        Whatever stands beside it, came before it, and however great it is, in every stage. Known
        of the codecs of tf_hips alone: False for one that was loaded.
        """
        if self.has_state or self.is_mixed:  # a mixture sends small tensors as fp16
            return False
        return jit.algorithm(self.codec.name).rounds_each

    @property
    def draws_alike(self) -> bool:
        """Whether all encoders of a run have one seed, so that they send the same elements.

        Known of the codecs of tf_hips alone: False for one that was loaded.
        """
        return jit.algorithm(self.codec.name).draws_alike

    def encoder_seed(self, run_seed: int, role: str) -> int:
        """Returns the seed of one encoder of a run (`Key.seed`), in [0, 2^64).

        Args:
            run_seed: of the whole run, the same in all processes.
            role: whose the encoder is, as for `derive_seed`; no matter where it draws alike.
        """
        return native.derive_seed(run_seed, "everyone" if self.draws_alike else role)

    @property
    def text(self) -> str:
        """The text that `parse` turns into this value; the same for equal values."""
        if self.inner is not None:
            wrapper = WITH_PARAMETERS.get(self.name)
            more = f", {wrapper.shown(dict(self.params))}" if wrapper is not None else ""
            return f"{self.name}({self.inner.text}{more})"
        known = jit.algorithm(self.name).parameters
        arguments = ", ".join(
            f"{parameter.name}={parameter.shown(value)}"
            for parameter, (_, value) in zip(known, self.params, strict=True)
        )
        return f"{self.name}({arguments})" if arguments else self.name

    def wire_bytes(self, n: int) -> int:
        """Returns the bytes of all packets of n elements, with prefixes; n = 0 is one packet.

        Of a warm-up those of its last stage; `at` tells others'. What makes no packets sends, for a
        matrix that is as near to a square as can be, what `wire_bytes_of` says.

        Raises:
            TypeError: `n` is no integer.
            ValueError: `n` is negative or more than 2^48.
        """
        native.check_size(n)
        n = int(n)  # NumPy's integers would overflow
        if self.is_mixed:
            return self.of_size(n).wire_bytes(n)
        if not self.makes_packets:
            square = self.wire_bytes_of(low_rank.square(n))
            return min(square, low_rank.BYTES_PER_FLOAT * n)
        return native.wire_bytes(self, n)

    def wire_bytes_of(self, shape: Sequence[int]) -> int:
        """Returns the bytes that stand for a gradient of `shape`; codecs look at its size only.

        Raises:
            TypeError: a side is no integer.
            ValueError: a side is negative, or there are more than 2^48 elements.
        """
        shape = native.checked_shape(shape)
        if self.is_mixed:
            return self.of_size(math.prod(shape)).wire_bytes_of(shape)
        if not self.makes_packets:
            params = dict(self.codec.params)
            rank, rate = int(params["rank"]), float(params["min_compression_rate"])
            return low_rank.wire_bytes(shape, rank, rate)
        return native.wire_bytes(self, math.prod(shape))

    def chunk_packet_bytes(self, n_chunk: int) -> int:
        """Returns the bytes of the packet of one chunk of `n_chunk` elements, at most CHUNK."""
        check_makes_packets(self)
        if not 0 <= n_chunk <= CHUNK:
            raise ValueError(f"`n_chunk` must be in [0, {CHUNK}]. Received: n_chunk={n_chunk}")
        return native.wire_bytes(self, n_chunk)

    def __repr__(self) -> str:
        return self.text


def check_unmixed(compressor: Compressor, name: str = "compressor") -> Compressor:
    """Passes on a compressor that is the same for tensors of all sizes.

    Raises:
        ValueError: it is mixed.
    """
    if compressor.is_mixed:
        raise ValueError(
            f"`{name}` must not be mixed: that is for packets between a party and its server "
            "(HierarchicalPS(compression=...)); elsewhere `comp_threshold` or a plan says what "
            f"small gradients get, and `compressor.of_size(n)` encodes. Received: {compressor.text}"
        )
    return compressor


def check_makes_packets(
    compressor: Compressor, name: str = "compressor", *, may_be_mixed: bool = False
) -> Compressor:
    """Passes on a compressor that encodes.

    Args:
        compressor: any.
        name: of the argument, for the message.
        may_be_mixed: whether each tensor is asked for by its size (`Compressor.of_size`).

    Raises:
        ValueError: it makes no packets, or is mixed.
    """
    if not may_be_mixed:
        check_unmixed(compressor, name)
    if not compressor.makes_packets:
        raise ValueError(
            f"`{name}` must make packets, which a server can merge: sums of low rank need all who "
            "send in both of their halves. Give it to the ranks of a party, as "
            "HierarchicalPS(local_compression=...) or CompressedRing(compression=...). "
            f"Received: {compressor.text}"
        )
    return compressor


def resolve(value: Compressor | str, name: str = "compressor") -> Compressor:
    """The compressor that the user of this process gave: a value, or a text that may name a file.

    Args:
        value: what was given.
        name: of the argument, for the message.

    Raises:
        ValueError, TypeError: as for `parse`; SpecificationError, LibraryError: as for `jit.load`.
    """
    if isinstance(value, str):
        return parse(value, files=True)
    if not isinstance(value, Compressor):
        raise call_text.wrong_kind(name, "a compressor such as onebit(), or its text", value)
    return value


def parse(text: str, files: bool = False) -> Compressor:
    """Turns a text such as "onebit" or "error_feedback(terngrad(bitwidth=4))" into what it names.

    Args:
        text: what a user or another process wrote; arguments by name or by position.
        files: whether the text may name a specification, "my.pse(ratio=0.1)", which is then loaded
            as by `tf_hips.load`. Only for what the user of this process wrote: what came over a
            network must not open files.

    Raises:
        ValueError: an unknown name (the message has the known ones and the nearest), or a wrong
            argument.
        TypeError: `text` is not a string.
        SpecificationError, LibraryError: as for `jit.load` and `jit.algorithm`.
    """
    if not isinstance(text, str):
        raise TypeError(f"`text` must be a string such as 'onebit'. Received: {text!r}")
    limit = _MAX_FILE_TEXT if files else _MAX_TEXT
    call = _CALL.fullmatch(text) if len(text) <= limit else None
    file = _FILE_CALL.fullmatch(text) if files and call is None and len(text) <= limit else None
    if file is not None:
        call = file
    if call is None:
        raise ValueError(
            f"a compressor must read like 'terngrad(bitwidth=2)'. Received: {text[:_MAX_TEXT]!r}"
        )
    name, arguments = call.group(1), (call.group(2) or "").strip()
    if name == ERROR_FEEDBACK:
        if not arguments:
            raise ValueError(f"`error_feedback` must wrap one codec. Received: {text!r}")
        return Compressor(ERROR_FEEDBACK, inner=parse(arguments, files))
    wrapper = WITH_PARAMETERS.get(name)
    if wrapper is not None:
        wrapped, arguments = _wrapped(arguments)
        if wrapped.partition("(")[0].strip() in ("", name):
            raise ValueError(
                f"`{name}` must wrap one compressor that {wrapper.wraps}, as in "
                f"'{name}({wrapper.example})'. Received: {text!r}"
            )
        inner = parse(wrapped, files)
        params = call_text.values(name, {p.name: p for p in wrapper.parameters}, arguments, text)
        return _made(name, params, inner)
    if file is not None:
        name = jit.load(name).name
    if name in SPECIAL:
        make, parameters = SPECIAL[name]
        values = call_text.values(name, {p.name: p for p in parameters}, arguments, text)
        return make(params=tuple(values.items()))
    known = {p.name: p for p in jit.algorithm(name, also=(*WRAPPERS, *SPECIAL)).parameters}
    return _made(name, call_text.values(name, known, arguments, text))


def file_of(text: str) -> str | None:
    """The file that the text of a compressor names, as `my.pse` in "error_feedback(my.pse)".

    Nothing is opened. None where `parse` would load no file.
    """
    call = _CALL.fullmatch(text)
    if call is None:
        file = _FILE_CALL.fullmatch(text)
        return None if file is None else file.group(1)
    name, arguments = call.group(1), (call.group(2) or "").strip()
    if name not in WRAPPERS:
        return None
    return file_of(arguments if name == ERROR_FEEDBACK else _wrapped(arguments)[0])


def _wrapped(arguments: str) -> tuple[str, str]:
    """What stands between the brackets of a wrapper: the compressor, and the parameters behind it.

    Read from the end: the name of a file may hold commas, too.
    """
    head, tail = arguments, ""
    while "," in head:
        before, _, last = head.rpartition(",")
        match = call_text.ARGUMENT.fullmatch(last)
        if match is None or "(" in last or ")" in last:
            break
        if match.group(1) is None and not call_text.is_number(match.group(2)):
            break
        head, tail = before, f"{last},{tail}" if tail else last
    return head.strip(), tail.strip()


def _made(
    name: str, values: Mapping[str, int | float], inner: Compressor | None = None
) -> Compressor:
    try:
        return Compressor(name, params=tuple(values.items()), inner=inner)
    except TypeError as error:
        raise ValueError(str(error)) from error
