# SPDX-License-Identifier: Apache-2.0
"""What `horovodrun` starts on each host: unpacks the configuration and becomes the worker.

The configuration is put into an anonymous file in memory, which the worker reads through
`/proc/self/fd`: nothing on the host's disk, nothing to remove. If its compression names a
specification, that comes along, and goes into this host's cache of codecs.

On another host the worker is a child of sshd, which tells nobody when the connection ends. So a
process beside the worker watches its standard output, whose other end goes away with sshd's, and
ends the worker then.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys

from tf_hips import config
from tf_hips.errors import ConfigError, TfHipsError

_TEXT_VARIABLE = "TF_HIPS_CONFIG_TEXT"
_SPECIFICATIONS_VARIABLE = "TF_HIPS_CONFIG_SPECIFICATIONS"
_MAX_CHARACTERS = 1 << 16  # Linux takes 128 KiB for a variable, and for all of a command of ssh
# Milliseconds between SIGTERM and SIGKILL.
_GRACE_MS = 5000
_OUTPUT = 1


def environment(told: config.Run) -> dict[str, str]:
    """The variables that carry `told` to the other hosts.

    Raises:
        ConfigError: the specifications of its compression are too long for that.
    """
    made = {_TEXT_VARIABLE: json.dumps(dataclasses.asdict(told)), config.ROLE_VARIABLE: "worker"}
    if told.compression is not None:
        from tf_hips.ops.specifications import carried

        text = json.dumps(carried(told.compression))
        if len(text) > _MAX_CHARACTERS:
            raise ConfigError(
                f"`compression` must be of specifications of at most {_MAX_CHARACTERS} characters "
                f"to be sent to other hosts. Received: {len(text)} in {told.compression}"
            )
        made[_SPECIFICATIONS_VARIABLE] = text
    return made


def become(command: list[str]) -> None:
    """Replaces this process by `command`, with the configuration as a file; may raise OSError."""
    text = os.environ.pop(_TEXT_VARIABLE)
    specifications = json.loads(os.environ.pop(_SPECIFICATIONS_VARIABLE, "{}"))
    if specifications:
        from tf_hips.ops.specifications import keep

        keep(specifications)
    end_with_output()
    descriptor = os.memfd_create("tf-hips-config", 0)
    os.write(descriptor, text.encode())  # JSON is YAML
    os.environ[config.CONFIG_VARIABLE] = f"/proc/self/fd/{descriptor}"
    os.execvp(command[0], command)


def end_with_output() -> None:
    """Has this process ended when nobody can read its standard output any more.

    SIGTERM, then SIGKILL. The process that sees to it ends with this one.
    """
    worker = os.pidfd_open(os.getpid())
    child = os.fork()
    if child == 0:
        # Not a child of the worker, which may wait for its own.
        if os.fork() == 0:
            with contextlib.suppress(OSError):
                _watch(worker)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(worker)


def _watch(worker: int) -> None:
    """Ends the process of the descriptor `worker` when the other end of the output is closed."""
    os.fstat(_OUTPUT)  # without any output there is nothing to watch
    both = select.poll()
    both.register(worker, select.POLLIN)  # it has ended
    both.register(_OUTPUT, 0)  # errors and hang-ups are told in any case
    if any(descriptor == worker for descriptor, _ in both.poll()):
        return
    signal.pidfd_send_signal(worker, signal.SIGTERM)
    one = select.poll()
    one.register(worker, select.POLLIN)
    if not one.poll(_GRACE_MS):
        signal.pidfd_send_signal(worker, signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) < 2 or _TEXT_VARIABLE not in os.environ:
        sys.exit("tf_hips.cli.worker is started by `tf-hips party` only")
    try:
        become(sys.argv[1:])
    except TfHipsError as error:  # what it should have is not here
        sys.exit(f"tf_hips.cli.worker: {type(error).__name__}: {error}")
