# SPDX-License-Identifier: Apache-2.0
"""The encoders that a user would take instead, in PyTorch: eager, and by torch.compile.

They compute what ours do, without packing bits, as GRACE (Xu et al., ICDCS 2021) writes them.
"""

from collections.abc import Callable
from typing import Any

RATIO = 0.01


def encoders() -> dict[str, Callable[[Any], Any]]:
    """Encoders by codec, of a float32 tensor [n] on the GPU. Raises ImportError without PyTorch."""
    import torch

    def onebit(tensor: Any) -> Any:
        mask = tensor < 0
        number = mask.sum()
        total = torch.where(mask, tensor, 0.0).sum()
        rest = torch.where(mask, 0.0, tensor).sum()
        return mask, total / number, rest / (tensor.numel() - number)

    def terngrad(tensor: Any) -> Any:
        low, high = tensor.min(), tensor.max()
        level = (tensor - low) / ((high - low) / 3) + torch.rand_like(tensor)
        return level.clamp(0, 3).to(torch.uint8), low, high

    def tbq(tensor: Any) -> Any:
        return ((tensor >= 0.05).to(torch.int8) - (tensor <= -0.05).to(torch.int8)) + 1

    def int8(tensor: Any) -> Any:
        rows = tensor.view(-1, 64)
        scales = rows.abs().amax(dim=1, keepdim=True) / 127
        return (rows / scales).round().to(torch.int8), scales

    def topk(tensor: Any) -> Any:
        _, places = torch.topk(tensor.abs(), max(1, int(tensor.numel() * RATIO)), sorted=False)
        return places.to(torch.int32), tensor[places]

    return {function.__name__: function for function in (onebit, terngrad, tbq, int8, topk)}


def milliseconds(name: str, n: int, calls: int, *, compiled: bool) -> float:
    """Time of one encoding of n floats."""
    import torch

    function = encoders()[name]
    if compiled:
        function = torch.compile(function)
    tensor = torch.randn(n, device="cuda", dtype=torch.float32)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        function(tensor)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        function(tensor)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls
