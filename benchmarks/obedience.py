# SPDX-License-Identifier: Apache-2.0
"""The other end of `jobs.Job`: a process that does what it is told.

Imports nothing of ours: what imports take is measured in such processes.
"""

import json
import os
import sys
from typing import Any


def obey(worker: Any) -> None:
    """Does what standard input says until it ends; then so does the process.

    A command is the name of a method of `worker` under "do", and its arguments; its answer is what
    the method returns. What libraries print goes to standard error.
    """
    with os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(worker, command.pop("do"))(**command)
            answers.write(json.dumps(answer) + "\n")
    # Horovod's end waits for the other ranks, TensorFlow's costs seconds: nothing is left to do.
    os._exit(0)
