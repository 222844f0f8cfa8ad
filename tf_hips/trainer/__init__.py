# SPDX-License-Identifier: Apache-2.0
"""The trainer of `tf-hips train`, and the evaluator that follows it.

    settings     what the command line says, as one value
    modes        the table of modes: how workers train together
    ways         what a mode is made of: a strategy, an optimizer, a fit
    sources      each worker's batches
    training     one run
    evaluator    a process that evaluates checkpoints as they appear
    data_sets    `tf-hips data`

`tf_hips.cli` checks the options and becomes `python -m tf_hips.trainer`, so that the command line
itself starts without TensorFlow.
"""
