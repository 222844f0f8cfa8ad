# SPDX-License-Identifier: Apache-2.0
"""What `horovodrun` starts on each host: unpacks the configuration and becomes the worker.

The configuration is put into an anonymous file in memory, which the worker reads through
`/proc/self/fd`: nothing on the host's disk, nothing to remove.
"""

import dataclasses
import json
import os
import sys

from tf_hips import config

_TEXT_VARIABLE = "TF_HIPS_CONFIG_TEXT"


def environment(told: config.Run) -> dict[str, str]:
    """The variables that carry `told` to the other hosts."""
    return {_TEXT_VARIABLE: json.dumps(dataclasses.asdict(told)), config.ROLE_VARIABLE: "worker"}


def become(command: list[str]) -> None:
    """Replaces this process by `command`, with the configuration as a file; may raise OSError."""
    text = os.environ.pop(_TEXT_VARIABLE)
    descriptor = os.memfd_create("tf-hips-config", 0)
    os.write(descriptor, text.encode())  # JSON is YAML
    os.environ[config.CONFIG_VARIABLE] = f"/proc/self/fd/{descriptor}"
    os.execvp(command[0], command)


if __name__ == "__main__":
    if len(sys.argv) < 2 or _TEXT_VARIABLE not in os.environ:
        sys.exit("tf_hips.cli.worker is started by `tf-hips party` only")
    become(sys.argv[1:])
