# SPDX-License-Identifier: Apache-2.0
"""Keras training loops: local phases of steps, each followed by a meeting of all replicas.

A loop owns the uplink of its strategy: in a local phase nothing crosses the slow tier. Another loop
derives from `Loop`; see `engine`.
"""

from tf_hips.loops.engine import Loop
from tf_hips.loops.esync import ESync
from tf_hips.loops.fedavg import FedAvg
from tf_hips.loops.hfa import HFA
from tf_hips.loops.methods import PostLocal
from tf_hips.loops.streaming import StreamingDiLoCo

__all__ = ["HFA", "ESync", "FedAvg", "Loop", "PostLocal", "StreamingDiLoCo"]
