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
        rows = tensor.view(-1, 128)
        scales = rows.abs().amax(dim=1, keepdim=True) / 127
        return (rows / scales).round().to(torch.int8), scales

    def qsgd(tensor: Any) -> Any:
        rows = tensor.view(-1, 512)
        steps = rows.abs().amax(dim=1, keepdim=True) / 7
        level = rows / steps + 7 + torch.rand_like(rows)
        return level.floor().clamp(0, 14).to(torch.uint8), steps

    def natural(tensor: Any) -> Any:
        fraction, exponent = torch.frexp(tensor)
        up = torch.rand_like(tensor) < 2 * fraction.abs() - 1
        return (exponent + up).to(torch.int16), fraction < 0

    def hips2bit(tensor: Any) -> Any:
        return torch.where(tensor >= 0.5, 3, torch.where(tensor <= -0.5, 2, 0)).to(torch.uint8)

    def fp16(tensor: Any) -> Any:
        return tensor.half()

    def bf16(tensor: Any) -> Any:
        return tensor.bfloat16()

    def topk(tensor: Any) -> Any:
        _, places = torch.topk(tensor.abs(), max(1, int(tensor.numel() * RATIO)), sorted=False)
        return places.to(torch.int32), tensor[places]

    all_of_them = (onebit, terngrad, tbq, int8, qsgd, natural, hips2bit, fp16, bf16, topk)
    return {function.__name__: function for function in all_of_them}


def timer(
    name: str, n: int, *, compiled: bool, sets: int, head_start_bytes: int
) -> Callable[[int], float]:
    """Measures milliseconds of an encoding of n floats as ours are (device.cu), given the calls."""
    import torch

    function = encoders()[name]
    if compiled:
        function = torch.compile(function, dynamic=False)
    tensors = [torch.randn(n, device="cuda", dtype=torch.float32) for _ in range(sets)]
    room = torch.empty(head_start_bytes, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    head_starts = 16

    def measure(calls: int) -> float:
        nonlocal head_starts
        while True:
            for k in range(max(3, sets)):
                function(tensors[k % sets])
            torch.cuda.synchronize()
            for _ in range(head_starts):
                room.zero_()
            begin.record()
            for k in range(calls):
                function(tensors[k % sets])
            # PyTorch's launches take longer than ours: the GPU must not wait for them.
            is_late = begin.query()
            end.record()
            end.synchronize()
            if not is_late or head_starts >= 1024:
                return float(begin.elapsed_time(end)) / calls
            head_starts *= 2

    return measure
