# SPDX-License-Identifier: Apache-2.0
"""Keras training loops: local phases of steps, each followed by a meeting of all replicas.

A loop owns the uplink of its strategy: in a local phase nothing crosses the slow tier.
"""

from tf_hips.loops.fedavg import FedAvg

__all__ = ["FedAvg"]
