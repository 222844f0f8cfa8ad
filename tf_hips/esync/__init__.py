# SPDX-License-Identifier: Apache-2.0
"""How many local steps each worker of uneven speed takes, so that all arrive together (ESync).

    rule      what is known of the workers in, steps for each out: the default rule
    pacer     the rule on a server's own clock: arrivals in, assignments and early stops out
    compat    the rule of the paper as its state server has it: a question before every step

Plain Python: no socket, no thread, no TensorFlow. Every function of time takes the time as an
argument, so servers, tests and the simulator run the same code. Formulas: docs/esync.md.
"""

RULES = ("default", "compat")
"""The rules that a job can name: ours, and the one of the paper."""
