# SPDX-License-Identifier: Apache-2.0
"""The facts about each algorithm that Python needs: one entry of REGISTRY per file in specs/.

The specification decides what an algorithm does and what its parameters are; a test compares this
table with what the native library says. Algorithms that were loaded while the program runs
(ops.jit) stand beside it; what is known of them comes from their libraries. Nothing here computes,
and nothing imports TensorFlow.
"""

import dataclasses
import difflib
import numbers
import struct
from collections.abc import Callable, Collection, Iterable, Mapping

YES_OR_NO = (("False", 0), ("True", 1))
"""Words of a `Parameter` that is a truth value."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A number that a specification leaves open. An integer default makes it an integer parameter.

    Attributes:
        name: as in the specification and in `Compressor.text`.
        default: value when the caller gives none; None: a value must be given.
        minimum: smallest value allowed.
        maximum: largest value allowed.
        is_power_of_two: only powers of two are allowed.
        words: names of values, such as ("e4m3", 3), which may be written in their place. Such a
            value need not be in the range.
        is_codec: whether the specification has it; else it is for what stands around the codec.
    """

    name: str
    default: int | float | None
    minimum: int | float
    maximum: int | float
    is_power_of_two: bool = False
    words: tuple[tuple[str, int], ...] = ()
    is_codec: bool = True

    @property
    def is_integer(self) -> bool:
        """Whether only integers are values."""
        return isinstance(self.minimum if self.default is None else self.default, int)

    def checked(self, value: object) -> int | float:
        """Returns `value` as this parameter holds it: an int, or a float that float32 can hold.

        Raises:
            TypeError: `value` is not a number of the right kind.
            ValueError: `value` is out of range.
        """
        if value is None and self.default is None:
            raise ValueError(f"`{self.name}` must be given: it has no default.")
        is_integer = self.is_integer
        kind = self._choices or ("an integer" if is_integer else "a number")
        wanted = numbers.Integral if is_integer else numbers.Real
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise TypeError(f"`{self.name}` must be {kind}. Received: {self.name}={value!r}")
        # NumPy's numbers among them.
        value = int(value) if isinstance(value, numbers.Integral) else float(value) + 0.0  # no -0
        given = value
        # Attributes of TensorFlow ops are float32, and the value enters the hash in each packet.
        low, high = self.minimum, self.maximum
        if not is_integer:
            low, high, value = (_as_float32(number) for number in (low, high, value))
        if not low <= value <= high and value not in dict(self.words).values():
            kind = self._choices or f"in [{self.minimum}, {self.maximum}]"
            if self.readable == YES_OR_NO:
                kind = "True or False"
            raise ValueError(f"`{self.name}` must be {kind}. Received: {self.name}={given!r}")
        if self.is_power_of_two and (not isinstance(value, int) or value & (value - 1)):
            raise ValueError(
                f"`{self.name}` must be a power of two. Received: {self.name}={value!r}"
            )
        return value

    @property
    def _choices(self) -> str:
        """Where all values have names, but for truth values, these, as messages say it."""
        named = [number for _, number in self.words if self.minimum <= number <= self.maximum]
        has_all = self.is_integer and len(set(named)) == self.maximum - self.minimum + 1
        is_choice = has_all and self.words != YES_OR_NO
        return f"one of {_names(word for word, _ in self.words)}" if is_choice else ""

    @property
    def readable(self) -> tuple[tuple[str, int], ...]:
        """Names that may be written for values: `words`, or else those of 0 and 1."""
        is_truth = self.is_integer and (self.minimum, self.maximum) == (0, 1)
        return self.words or (YES_OR_NO if is_truth else ())

    def number(self, value: int | float | str) -> int | float:
        """What a word stands for; numbers as they are.

        Raises:
            ValueError: there is no such word.
        """
        if not isinstance(value, str):
            return value
        names = dict(self.readable)
        if value not in names:
            known = "an integer" if self.is_integer else "a number"
            if self._choices or self.readable == YES_OR_NO:
                known = f"one of {_names(names)}"
            elif names:
                known += f" or {_names(names)}"
            raise ValueError(f"`{self.name}` must be {known}. Received: {self.name}={value!r}")
        return names[value]

    def shown(self, value: int | float) -> str:
        """A checked value as text that `checked` or a number's parser turns into it again."""
        words = {number: word for word, number in self.words}
        if isinstance(value, int):
            return words.get(value, str(value))
        for digits in range(1, 9):
            text = f"{value:.{digits}g}"
            if _as_float32(float(text)) == value:
                return text
        return f"{value:.9g}"


def check_names(owner: str, parameters: Iterable[Parameter], given: Mapping[str, object]) -> None:
    """Looks whether all values are of parameters that there are.

    Args:
        owner: what takes them, for the message.
        parameters: those that it takes.
        given: values by name.

    Raises:
        ValueError: one is not.
    """
    known = [parameter.name for parameter in parameters]
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"`{owner}` takes {_names(known) or 'no parameters'}. Received: {name}={value!r}"
            )


def checked(
    owner: str, parameters: Collection[Parameter], given: Mapping[str, object]
) -> dict[str, int | float]:
    """The values of all parameters by name, in their order, with defaults filled in.

    Args:
        owner: what takes them, for messages.
        parameters: those that it takes.
        given: values by name.

    Raises:
        TypeError: a value is not a number of the right kind.
        ValueError: a parameter is unknown or missing, or its value out of range.
    """
    check_names(owner, parameters, given)
    return {one.name: one.checked(given.get(one.name, one.default)) for one in parameters}


def _as_float32(value: int | float) -> int | float:
    """The nearest float32; what is too large for one, as it is."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except (OverflowError, struct.error):
        return value
    return rounded


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What is known of an algorithm without running it.

    Attributes:
        name: stem of its specification's file; what users write.
        op: its ops are `tf_hips_<op>_encode` and so on.
        parameters: in the order of the specification, which is the order in the hash of a packet.
        is_unbiased: the mean of decode(encode(x)) over seeds is x.
        feedback_minimum: (parameter, value) below which error feedback diverges: the codec loses
            more than it is given, so residuals grow without bound.
        reach: name of the parameter that is the most which an element passes on per step, and what
            it must reach, or else it is sent as 0; None where there is no such limit. Error
            feedback needs gradients that are mostly smaller, so most are sent as 0.
        state_names: vectors that its encoder keeps from call to call, in the specification's order.
        sums: for a codec with state, the text of the compressor that encodes sums of its packets
            again, by values of its parameters; None: fp32.
        makes_packets: whether there is a codec of it; else ranks sum with it, and only they can.
        is_sparse: its packets say something of some elements only; all others are decoded as 0.
        draws_alike: all encoders of a run have one seed, and so draw alike in a step.
        rounds_each: an element is decoded as itself but for a share of itself, whatever stands
            beside it and however great it is.
        mixes: a block is rotated, so an error in one element is in all of its block: equal elements
            arrive unequal.
    """

    name: str
    op: str
    parameters: tuple[Parameter, ...] = ()
    is_unbiased: bool = False
    feedback_minimum: tuple[tuple[str, int | float], ...] = ()
    reach: str | None = None
    state_names: tuple[str, ...] = ()
    sums: Callable[[Mapping[str, int | float]], str] | None = None
    makes_packets: bool = True
    is_sparse: bool = False
    draws_alike: bool = False
    rounds_each: bool = False
    mixes: bool = False

    @property
    def is_loaded(self) -> bool:
        """Whether it came while the program runs; its name then holds the specification's hash."""
        return "@" in self.name

    def checked(self, /, **values: object) -> tuple[tuple[str, int | float], ...]:
        """Returns (name, value) of all parameters, with defaults filled in.

        Raises:
            TypeError: a value is not a number of the right kind.
            ValueError: a parameter is unknown, or its value out of range.
        """
        return tuple(checked(self.name, self.parameters, values).items())


def _threshold(name: str) -> Parameter:
    return Parameter(name, default=0.5, minimum=1e-6, maximum=1e6)


def _block(name: str, default: int) -> Parameter:
    return Parameter(name, default, minimum=16, maximum=1024, is_power_of_two=True)


# The share of the elements that a sparse codec sends.
_RATIO = Parameter("ratio", default=0.01, minimum=0.001, maximum=1.0)


def _sums_of_dgc(params: Mapping[str, int | float]) -> str:
    """What sends on sums of dgc's packets: the momentum is in them already (decision 0016).

    Four workers whose largest elements do not meet fill 4 * ratio of a sum: for up to four, all of
    it goes on (but for rounding in small tensors). What is more waits in a residual.
    """
    return f"error_feedback(topk(ratio={min(1.0, 4 * params['ratio']):.6g}))"


REGISTRY: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("bf16", op="bf16", rounds_each=True),
        Algorithm("bisparse", op="bisparse", parameters=(_RATIO,), is_sparse=True),
        Algorithm(
            "dgc",
            op="dgc",
            parameters=(
                _RATIO,
                Parameter("momentum", default=0.9, minimum=0.0, maximum=0.9999),
                Parameter("nesterov", default=0, minimum=0, maximum=1),
                Parameter("clip_norm", default=0.0, minimum=0.0, maximum=1e6, is_codec=False),
            ),
            state_names=("velocity", "residual"),
            sums=_sums_of_dgc,
            is_sparse=True,
        ),
        Algorithm(
            "eden",
            op="eden",
            parameters=(Parameter("bits", default=1, minimum=1, maximum=4), _block("block", 1024)),
            mixes=True,
        ),
        Algorithm("fp16", op="fp16"),  # above 65504 it is infinity
        Algorithm("fp32", op="fp32", is_unbiased=True, rounds_each=True),
        Algorithm(
            "fp8",
            op="fp8",
            parameters=(
                Parameter(
                    "format", default=3, minimum=2, maximum=3, words=(("e4m3", 3), ("e5m2", 2))
                ),
                _block("block", 128),
            ),
        ),
        Algorithm(
            "graddrop",
            op="graddrop",
            parameters=(_RATIO, Parameter("sampled", default=0.001, minimum=0.0001, maximum=1.0)),
            is_sparse=True,
        ),
        Algorithm(
            "hips2bit",
            op="hips2bit",
            parameters=(_threshold("threshold"),),
            reach="threshold",
        ),
        Algorithm("int8", op="int8", parameters=(_block("block", 128),)),
        Algorithm("natural", op="natural", is_unbiased=True, rounds_each=True),
        Algorithm("onebit", op="onebit"),
        Algorithm(
            "qsgd",
            op="qsgd",
            parameters=(Parameter("bits", default=4, minimum=2, maximum=8), _block("bucket", 512)),
            is_unbiased=True,
            # An element's error is below a step, the bucket's largest over 2^(bits - 1) - 1. From 3
            # bits on that is a third, so residuals stay below half the largest gradient. With 2 a
            # residual may be as large as what was encoded, and grow at each step.
            feedback_minimum=(("bits", 3),),
        ),
        # Sums of packets with other elements each would have more than the way back keeps.
        Algorithm("randomk", op="randomk", parameters=(_RATIO,), is_sparse=True, draws_alike=True),
        Algorithm("tbq", op="tbq", parameters=(_threshold("tau"),), reach="tau"),
        Algorithm(
            "terngrad",
            op="tern_grad",
            parameters=(Parameter("bitwidth", default=2, minimum=1, maximum=8),),
            is_unbiased=True,
            # An element's error is below (max - min) / (2^bitwidth - 1) on either side. What is
            # encoded next spans at most the gradient's range and twice that: with 2 bits at most 3
            # times the gradient's range for ever, with 1 bit twice as much at each step.
            feedback_minimum=(("bitwidth", 2),),
        ),
        Algorithm("topk", op="topk", parameters=(_RATIO,), is_sparse=True),
    )
}

# What is no codec, and so fits no specification: see comm.low_rank.
WITHOUT_PACKETS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm(
            "powersgd",
            op="",
            parameters=(
                Parameter("rank", default=4, minimum=1, maximum=256),
                Parameter("min_compression_rate", default=2.0, minimum=1.0, maximum=1e6),
            ),
            makes_packets=False,
        ),
    )
}


# By full name, `my@0123456789abcdef`; and which of them a stem alone means.
_loaded: dict[str, Algorithm] = {}
_newest: dict[str, str] = {}


def add(algorithm: Algorithm, *, is_ours: bool = True) -> None:
    """Adds a loaded algorithm.

    Args:
        algorithm: one with a hash in its name.
        is_ours: whether its stem alone means this one from now on; not of what another process
            named, and nobody here chose.
    """
    _loaded[algorithm.name] = algorithm
    if is_ours:
        _newest[algorithm.name.partition("@")[0]] = algorithm.name


def holds(name: str) -> bool:
    """Whether an algorithm of that full name was loaded."""
    return name in _loaded


def newest(stem: str) -> str | None:
    """Full name of the loaded algorithm that a stem alone means; None if there is none."""
    return _newest.get(stem)


def find(name: str, also: Iterable[str] = ()) -> Algorithm:
    """Returns the algorithm called `name`.

    Args:
        name: what the user wrote: one of the tables here, or one that was loaded, with its hash or
            not.
        also: further names that would have been valid in its place, for the message.

    Raises:
        ValueError: there is none; the message names all and the nearest.
    """
    for built_in in (REGISTRY, WITHOUT_PACKETS):
        if name in built_in:
            return built_in[name]
    full = _newest.get(name, name)
    if full in _loaded:
        return _loaded[full]
    names = sorted([*REGISTRY, *WITHOUT_PACKETS, *_newest, *also])
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"a compressor must be one of {_names(names)}. Received: {name!r}{hint}")


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
