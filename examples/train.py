# SPDX-License-Identifier: Apache-2.0
"""`tf-hips train` as a script, for `cluster.yaml`, which copies and starts scripts.

tf-hips run --parties 2 --workers 1 examples/train.py -n lenet -dt synthetic --epochs 3
"""

import sys

from tf_hips.cli import main

main(["train", *sys.argv[1:]])
