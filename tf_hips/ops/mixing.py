# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: large tensors by a compressor, small ones as fp16, as GeoMX's MPQ does.

    mixed(error_feedback(onebit), below=1000)

    kernels of 1000 elements and more   error_feedback(onebit)
    biases, scales, small kernels       fp16

What a small tensor could save is little, and what it would lose is not: it often scales a whole
layer. Which of both a tensor gets depends on its own elements alone, never on those of a chunk, so
`Compressor.of_size` is asked wherever a tensor is known: by a party, and by its server. Between the
ranks of a party a plan decides that, so it is for the slow tier only. Nothing here computes.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tf_hips.ops import jit, registry
from tf_hips.ops.registry import Parameter

if TYPE_CHECKING:
    from tf_hips.ops.compressor import Compressor

MIXED = "mixed"

PARAMETERS = (Parameter("below", default=None, minimum=1, maximum=2**40),)
_SMALL = "fp16"


def checked(
    inner: "Compressor | None", given: Mapping[str, int | float]
) -> tuple[tuple[str, int | float], ...]:
    """Returns (name, value) of the parameters of a mixture with `inner`.

    Raises:
        TypeError: a value is not a number of the right kind.
        ValueError: a parameter is unknown, or its value out of range, or `inner` is none to wrap.
    """
    if inner is None or inner.is_mixed:
        raise ValueError(
            f"`{MIXED}` must wrap one compressor that is not mixed. "
            f"Received: inner={inner and inner.text}"
        )
    values = registry.checked(MIXED, PARAMETERS, given)
    if not inner.makes_packets:
        raise ValueError(f"`{MIXED}` must wrap what makes packets. Received: {inner.text}")
    return tuple(values.items())


def shown(params: Mapping[str, int | float]) -> str:
    """The parameters as text."""
    return f"below={PARAMETERS[0].shown(params['below'])}"


@functools.cache
def small() -> "Compressor":
    """What small tensors travel as."""
    from tf_hips.ops.compressor import Compressor  # the wrapper is made of values of it

    return Compressor(_SMALL, jit.algorithm(_SMALL).checked())
