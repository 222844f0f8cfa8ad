# SPDX-License-Identifier: Apache-2.0
"""Stand-in for upstream's module of this name: its interface, code of our own."""


class VariableMgrIndependent:
    """Each rank has its own variables."""

    def __init__(self, benchmark_cnn):
        self.benchmark_cnn = benchmark_cnn

    def preprocess_device_grads(self, device_grads):
        return self.benchmark_cnn.raw_devices, device_grads
