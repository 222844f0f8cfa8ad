# SPDX-License-Identifier: Apache-2.0
"""Warm-up: what a compressor is in which step, while gradients change too fast to drop much.

    warmup(error_feedback(topk(ratio=0.001)), steps=400, stages=4)

    step 0    error_feedback(topk(ratio=0.2512))
    step 100  error_feedback(topk(ratio=0.0631))
    step 200  error_feedback(topk(ratio=0.01585))
    step 300  error_feedback(topk(ratio=0.003981))
    step 400  error_feedback(topk(ratio=0.001)), from here on

A codec with a share of elements (a parameter `ratio`) comes down to it geometrically, as DGC does
(Lin et al., 2018, section 3.3: 75, 93.75, 98.4, 99.6 and 99.9 % are dropped). For others there is
nothing in between: `fp32` stands in the codec's place, as PowerSGD's `start_powerSGD_iter` and the
`freeze_step` of 1-bit Adam do for theirs.

All stages keep the same, so residuals and momentum go from one to the next. Nothing here computes;
values of `Compressor` come in and go out.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from tf_hips.ops import jit, registry
from tf_hips.ops.registry import Parameter

if TYPE_CHECKING:
    from tf_hips.ops.compressor import Compressor

WARMUP = "warmup"

PARAMETERS = (
    Parameter("steps", default=None, minimum=1, maximum=2**32 - 1),
    # Each is a computation of its own in the graph.
    Parameter("stages", default=4, minimum=1, maximum=32),
    # Above 1 for sums: of four packets with a share of 1 % each, 4 % of a sum may be there.
    Parameter("start", default=1.0, minimum=0.001, maximum=1e6),
)
_EXACT = "fp32"
_SHARE = "ratio"

Stages: TypeAlias = "tuple[tuple[int, Compressor], ...]"


def checked(
    inner: "Compressor | None", given: Mapping[str, int | float]
) -> tuple[tuple[str, int | float], ...]:
    """Returns (name, value) of all parameters of a warm-up of `inner`, with defaults filled in.

    Raises:
        TypeError: a value is not a number of the right kind.
        ValueError: a parameter is unknown, or its value out of range for `inner`, or `inner` is
            none to wrap.
    """
    if inner is not None and inner.is_mixed:
        raise ValueError(
            f"`{WARMUP}` must stand inside of `mixed`: write mixed({WARMUP}(...), below=...). "
            f"Received: {inner.text}"
        )
    if inner is None or inner.name == WARMUP:
        raise ValueError(
            f"`{WARMUP}` must wrap one compressor that is no warm-up. "
            f"Received: inner={inner and inner.text}"
        )
    steps, stages, start = registry.checked(WARMUP, PARAMETERS, given).values()
    share = _share(inner.codec)
    if "stages" not in given:
        stages = 1 if share is None else min(stages, steps)
    if stages > steps:
        raise ValueError(f"`stages` must be at most `steps`, {steps}. Received: stages={stages}")
    if share is None:
        if inner.has_state and not inner.has_residual and not inner.has_momentum:
            raise ValueError(
                f"`{WARMUP}` must wrap a codec with a parameter `ratio`, a share from 0 to 1, if "
                "it has state: exact values in its place would leave the state without the "
                f"gradients of these steps. Received: {inner.text}"
            )
        if stages != 1 or start != 1.0:
            raise ValueError(
                "`stages` and `start` must be 1 for a codec without a parameter `ratio`: before "
                f"it there are exact values only. Received: stages={stages}, start={start:g} for "
                f"{inner.text}"
            )
    elif start < share:
        raise ValueError(
            f"`start` must be at least the codec's ratio. Received: start={start:g} for "
            f"{inner.text}"
        )
    params = {"steps": steps, "stages": stages, "start": start}
    # What it keeps goes from stage to stage; this also makes them, and raises what they do.
    if any(stage.state_names != inner.state_names for _, stage in of_warmup(inner, params)):
        raise ValueError(f"all stages of a warm-up must keep the same. Received: {inner.text}")
    return tuple(params.items())


def shown(params: Mapping[str, int | float]) -> str:
    """The parameters as text; a `start` of 1 goes without saying."""
    return ", ".join(
        f"{parameter.name}={parameter.shown(params[parameter.name])}"
        for parameter in PARAMETERS
        if parameter.name != "start" or params["start"] != 1.0
    )


def of_warmup(inner: "Compressor", params: Mapping[str, int | float]) -> Stages:
    """First step and compressor of each stage, `inner` last; params as `checked` returns them."""
    steps, stages, start = int(params["steps"]), int(params["stages"]), float(params["start"])
    share = _share(inner.codec)
    if share is None:
        return ((0, _with_codec(inner, _EXACT, ())), (steps, inner))
    codec = inner.codec
    most = next(p.maximum for p in jit.algorithm(codec.name).parameters if p.name == _SHARE)
    found = []
    for stage in range(stages):
        ratio = start * (share / start) ** ((stage + 1) / (stages + 1))
        values = {**dict(codec.params), _SHARE: max(share, min(most, _rounded(ratio)))}
        found.append((-(-steps * stage // stages), _with_codec(inner, codec.name, values.items())))
    return (*found, (steps, inner))


def for_sums(inner: "Compressor", params: Mapping[str, int | float]) -> "Compressor":
    """What encodes sums of a warm-up's packets, where its codec does not do that itself.

    A warm-up of what encodes the codec's sums, in the same stages, and with as many times the ratio
    in each of them as in the last one.
    """
    sums = inner.for_sums
    mine, its = _share(inner.codec), _share(sums.codec)
    # Stages before the last one have more: if that sends all of a sum, so do they.
    if mine is None or its is None or its == 1:
        return sums
    start = params["start"] * _rounded(its / mine)
    return dataclasses.replace(
        sums, name=WARMUP, params=tuple({**params, "start": start}.items()), inner=sums
    )


def joint(one: "Compressor", other: "Compressor") -> "list[tuple[int, Compressor, Compressor]]":
    """First steps of all stages of two compressors, with what each of them is then."""
    firsts = sorted({first for first, _ in (*one.stages, *other.stages)})
    return [(first, one.at(first), other.at(first)) for first in firsts]


def _share(codec: "Compressor") -> float | None:
    """The share of elements that the codec sends, if it has a parameter that says so."""
    for parameter in jit.algorithm(codec.name).parameters:
        is_share = not parameter.is_integer and 0 <= parameter.minimum <= parameter.maximum <= 1
        if parameter.name == _SHARE and is_share:
            return float(dict(codec.params)[_SHARE])
    return None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _with_codec(
    inner: "Compressor", name: str, params: Iterable[tuple[str, int | float]]
) -> "Compressor":
    if inner.inner is not None:
        return dataclasses.replace(inner, inner=_with_codec(inner.inner, name, params))
    return dataclasses.replace(inner, name=name, params=tuple(params))
