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
        time.sleep(order["settle_s"])
        rule(rows)  # as ours: the caches held other rows
        began = time.perf_counter()
        rule(rows)
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
