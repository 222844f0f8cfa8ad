# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's script in this process, after what it needs has been put in place."""

import contextlib
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tf_hips.errors import ConfigError
from tf_hips.tf_cnn_benchmarks import options as own_options
from tf_hips.tf_cnn_benchmarks.options import PROGRAM, SCRIPT

_HELP = ("--help", "-h", "-help", "--helpfull", "-helpfull", "--helpshort", "-helpshort")


def main(arguments: Sequence[str]) -> int:
    """Runs tf_cnn_benchmarks.

    Args:
        arguments: of the command line: ours, and upstream's.

    Returns:
        The exit code.
    """
    if any(one in _HELP for one in arguments):
        own_options.parser().print_help()
        if not any(one.startswith("--tf_cnn_benchmarks_dir") for one in arguments):
            return 0
    options, rest = own_options.parse(arguments)
    # Not before: TensorFlow takes seconds, and a wrong flag none.
    from tf_hips.tf_cnn_benchmarks import hooks, old_names

    script = options.directory / SCRIPT
    try:
        with _as_program(script, rest), contextlib.ExitStack() as stack:
            old_names.install()
            if options.sums:
                stack.enter_context(hooks.installed(options))
            runpy.run_path(str(script), run_name="__main__")
    except ConfigError as error:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        return 2
    except SystemExit as end:
        return _exit_code(end)
    except Exception as error:
        text = _of_another_update(error)
        if text is None:
            raise
        sys.stderr.write(f"{PROGRAM}: error: {text}\n")
        return 1
    return 0


def _of_another_update(error: Exception) -> str | None:
    """What to say where upstream looks for variables that another `--variable_update` names so."""
    found = re.search(r"Key (v0?/\S+) not found in checkpoint", str(error))
    if type(error).__name__ != "NotFoundError" or found is None:
        return None
    return (
        "a checkpoint must be read with the --model, --optimizer and --variable_update of the run "
        "that wrote it; upstream names variables by the last (v0/... with horovod and independent, "
        f"v/... with parameter_server). Received: no {found[1]} in the checkpoint of --train_dir"
    )


@contextlib.contextmanager
def _as_program(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """While the context is open, this process looks as if it had been started with `script`.

    Upstream's modules have names such as `flags` and `models`; its folder comes first, as for a
    program that is started there.
    """
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    sys.stderr.write(f"{end.code}\n")
    return 1
