# SPDX-License-Identifier: Apache-2.0
"""Stand-in for upstream's script of this name: its interface, code of our own."""

import sys

import benchmark_cnn
import tensorflow.compat.v1 as tf

if __name__ == "__main__":
    tf.disable_v2_behavior()
    params = benchmark_cnn.setup(benchmark_cnn.parse(sys.argv[1:]))
    bench = benchmark_cnn.BenchmarkCNN(params)
    bench.print_info()
    bench.run()
