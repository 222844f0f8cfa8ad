# SPDX-License-Identifier: Apache-2.0
"""Collectives over Horovod: the fast tier, inside one party.

What ranks do:

    primitives    the one door to Horovod's collectives: start, ranks, collectives with a name
    allreduce     exact sums
    sparse        exact sums of rows (`tf.IndexedSlices`)
    compressed    a compressed sum of a list of gradients, in buckets
    topologies    how the packets of one bucket become those of its sum
    hierarchy     exact inside a node, compressed between nodes
    schedules     who sends what to whom, hop by hop
    staged        sums that change with the step: the stages of a warm-up
    low_rank      PowerSGD
    reducers      from a compressor to what sums with it
    planned       a sum that obeys a plan
    robust_sum    a robust rule in place of a sum
    robust_rows   everyone's packets of some pieces: rows, a rule, who is refused
    robust_wire   what ranks send each other for a robust rule
    partition     who owns which chunk, what travels together: arithmetic
    parts         tensors of more elements than Horovod counts
    looks         when it is looked whether gradients were finite

What is worth compressing:

    plan          what is done with each gradient: values
    profile       what codecs and collectives cost: values, and their file
    profiling     measures a profile
    links         measures collectives
    cost_model    how long a step's sums take under a plan
    tasks         buckets, and the chain of tasks that each one is
    overlap       chains of tasks on the cores and the link of a rank
    planner       from a profile to a plan
    auto          a plan at the start of training
    keras_file    gradients of a Keras model in a file

Starting and ending:

    launch        the environment of ranks that all live on this machine
    launchers     those whose processes Horovod does not join
    claims        a rank is one process, and none of its children
    rendezvous    a client of the store through which ranks find each other
    here          what this process is at, as others may ask
    verdicts      what keeps ranks waiting, judged from what each says
    watchdog      ends a job whose ranks wait for ever
    foreign       other people's scripts that call Horovod themselves

Nothing is imported here: half of the modules must load without TensorFlow.
"""
