# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's tf_cnn_benchmarks, unmodified, on today's TensorFlow with compressed gradients.

    horovodrun -np 4 python -m tf_hips.tf_cnn_benchmarks --tf_cnn_benchmarks_dir DIR \
        --model vgg19 --batch_size 16 --variable_update horovod --comp_alg dgc

    launcher   reads our flags, prepares the process, runs upstream's script with the rest
    options    our flags
    old_names  names of TensorFlow 1 that TensorFlow 2.21 has no longer
    hooks      where upstream's modules are wrapped, and what for
    sums       the gradients of a graph of TensorFlow 1, summed over the ranks
    saved      what encoding keeps, beside the checkpoints of upstream

Nothing of upstream is copied here, and none of its files is changed.
"""
