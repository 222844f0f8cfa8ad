# SPDX-License-Identifier: Apache-2.0
"""What may stand around a codec, and what a compressor's value and its text ask of each of it.

    error_feedback(onebit)           `feedback`; has no parameters
    momentum(onebit, beta=0.9)       `smoothing`
    warmup(onebit, steps=400)        `stages`
    mixed(onebit, below=1000)        `mixing`

Nothing here computes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from tf_hips.ops import mixing, smoothing, stages
from tf_hips.ops.feedback import ERROR_FEEDBACK
from tf_hips.ops.mixing import MIXED
from tf_hips.ops.registry import Parameter
from tf_hips.ops.smoothing import MOMENTUM
from tf_hips.ops.stages import WARMUP

if TYPE_CHECKING:
    from tf_hips.ops.compressor import Compressor

_Check: TypeAlias = (
    "Callable[[Compressor | None, Mapping[str, int | float]], tuple[tuple[str, int | float], ...]]"
)


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A wrapper with parameters.

    Attributes:
        parameters: in order.
        checked: gets what is wrapped and which values are given; (name, value) of all parameters.
            Raises ValueError, or TypeError for what is no number.
        shown: the parameters as text.
        wraps: which compressor it wraps, for messages.
        example: what stands between its brackets.
    """

    parameters: tuple[Parameter, ...]
    checked: _Check
    shown: Callable[[Mapping[str, int | float]], str]
    wraps: str
    example: str


WITH_PARAMETERS = {
    MOMENTUM: Wrapper(
        smoothing.PARAMETERS,
        smoothing.checked,
        smoothing.shown,
        wraps="has no momentum",
        example="error_feedback(onebit), beta=0.9",
    ),
    WARMUP: Wrapper(
        stages.PARAMETERS,
        stages.checked,
        stages.shown,
        wraps="is no warm-up",
        example="onebit, steps=400",
    ),
    MIXED: Wrapper(
        mixing.PARAMETERS,
        mixing.checked,
        mixing.shown,
        wraps="is not mixed",
        example="onebit, below=1000",
    ),
}

WRAPPERS = (ERROR_FEEDBACK, *WITH_PARAMETERS)
