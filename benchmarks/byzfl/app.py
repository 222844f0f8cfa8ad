# SPDX-License-Identifier: Apache-2.0
"""ByzFL's side of `make bench-robust`: reads orders as lines of JSON, answers with seconds.

Runs in a virtual environment of its own and imports nothing of ours.
"""

import importlib
import json
import sys
import time
import types
from unittest import mock

import torch

# Only its training imports torchvision, which would have to be built for this very PyTorch.
for name in ("torchvision", "torchvision.datasets", "torchvision.transforms"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["torchvision"].datasets = mock.Mock()
sys.modules["torchvision"].transforms = mock.Mock()
byzfl = importlib.import_module("byzfl")


def main() -> int:
    """Answers until the input ends."""
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps({"torch": torch.__version__}), flush=True)
    rows = torch.zeros(0)
    for line in sys.stdin:
        order = json.loads(line)
        if tuple(rows.shape) != (order["n"], order["d"]):
            rows = torch.randn(order["n"], order["d"])
        rule = {
            "median": lambda f: byzfl.Median(),
            "trimmed_mean": lambda f: byzfl.TrMean(f=f),
            "krum": lambda f: byzfl.Krum(f=f),
            "multi_krum": lambda f: byzfl.MultiKrum(f=f),
            "geometric_median": lambda f: byzfl.GeometricMedian(),
        }[order["rule"]](order["f"])
        rule(rows)  # as ours: does not count
        count, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < order["least_s"] or not count:
            rule(rows)
            count += 1
        print(json.dumps({"seconds": elapsed / count}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
