# SPDX-License-Identifier: Apache-2.0
"""The trainer of `tf-hips train`, and the evaluator that follows it.

    settings      what the command line says, as one value
    modes         the table of modes: how workers train together
    ways          what a mode is made of: a strategy, an optimizer, a fit
    links         how gradients travel, beside `compression`
    local         what the modes with local steps are told
    rounds        how the modes with local steps train
    sources       each worker's batches
    training      one run on one worker
    robustness    robust rules, liars, and workers that a trainer plays itself
    simulated     one process that plays all workers
    verdicts      what the rule of simulated workers found out about them
    resuming      going on from HiPS's `net.meta`
    backing_up    backups, whose errors are one line
    progress      what is said while it trains
    tensorboard   TensorBoard's scalars
    evaluator     a process that evaluates checkpoints as they appear
    data_sets     `tf-hips data`

`tf_hips.cli` checks the options and becomes `python -m tf_hips.trainer`, so that the command line
itself starts without TensorFlow.
"""
