# SPDX-License-Identifier: Apache-2.0
"""Jobs of small Python scripts."""

import io
import os
import sys
import textwrap

from tf_hips.cli.children import Failure
from tf_hips.cli.processes import Job

SLEEP = "import time; time.sleep(600)"


class Output:
    """Two streams that remember what was written."""

    def __init__(self) -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()

    def lines(self) -> list[str]:
        return self.out.getvalue().decode().splitlines()

    def errors(self) -> list[str]:
        return self.err.getvalue().decode().splitlines()


def python(body: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(body)]


def run(
    scripts: dict[str, str], *, services: tuple[str, ...] = (), grace_s: float = 5.0
) -> tuple[Failure | None, Output]:
    output = Output()
    with Job(out=output.out, err=output.err, grace_s=grace_s) as job:
        for role, body in scripts.items():
            job.start(role, python(body), os.environ, is_service=role in services)
        return job.wait(), output
