# SPDX-License-Identifier: Apache-2.0
"""`@ranks(n)`: the body of a test runs in n real Horovod processes.

The decorated test, called by pytest, starts n processes (see `zygote`) that import its module, find
it by name and run its body with the same arguments. A failing rank is shown with its traceback and
output. Ranks that do not end in time are killed with their whole process group, so no test leaves a
process behind.
"""

import contextlib
import functools
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.zygote import Child, Zygote
from tf_hips.comm.launch import local_rank_environments

_ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 10.0
_LAST_CHARACTERS = 6000


def ranks(
    num_ranks: int, deadline_s: float = 120.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs the decorated test body in `num_ranks` Horovod processes.

    Arguments of the test (fixtures, parameters) must be JSON values or paths.

    Args:
        num_ranks: processes to start.
        deadline_s: seconds after which all of them are killed and the test fails.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def run(**arguments: Any) -> None:
            __tracebackhide__ = True
            run_parties(body, arguments, [num_ranks], deadline_s=deadline_s)

        # pytest's own deadline comes last, so that the report above is what a reader sees.
        return pytest.mark.ranks(num_ranks)(pytest.mark.timeout(deadline_s + 3 * _GRACE_S)(run))

    return decorate


@contextlib.contextmanager
def process_groups() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Yields a `Popen` that starts each process as a group of its own; all groups are killed at the
    end.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(command, process_group=0, **options)
        started.append(process)
        return process

    with _ended(started):
        yield start


@contextlib.contextmanager
def _ended(started: Sequence["subprocess.Popen[bytes] | Child"]) -> Iterator[None]:
    """Kills the groups that `started` lead, at the end."""
    try:
        yield
    finally:
        for process in started:
            # The group outlives its leader while a grandchild is alive, so it is signalled in any
            # case.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _rank_arguments(body: Callable[..., None], arguments: dict[str, Any]) -> list[str]:
    """What `main` gets to run `body` (the function under `@ranks`) with `arguments` as one rank."""
    encoded = {k: {"path": str(v)} if isinstance(v, Path) else v for k, v in arguments.items()}
    return [body.__code__.co_filename, body.__name__, json.dumps(encoded)]


def rank_environment(extra: dict[str, str]) -> dict[str, str]:
    """This environment plus `extra`, with the repository importable and TensorFlow quiet and
    small.
    """
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    defaults = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # Milliseconds; ours is shorter. Ranks of tests look for work less often: cores are few, and
        # to look 500 times a second takes a twelfth of one.
        "HOROVOD_CYCLE_TIME": "5",
    }
    return {**os.environ, **defaults, "PYTHONPATH": path, **extra}


@functools.cache
def the_zygote() -> Zygote:
    """The one that all ranks of this process are forked from."""
    return Zygote(rank_environment({}))


def _wait_all(processes: Sequence[Child], deadline_s: float) -> list[int | None]:
    """Waits for all to end; once one failed the others get a short grace. None stands for one that
    did not end.
    """
    began = time.monotonic()
    end = began + deadline_s
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + _GRACE_S)
            break
        if time.monotonic() > end:
            break
        # Less often as they take longer: to ask takes a little of a processor each time.
        time.sleep(min(0.2, 0.02 + 0.02 * (time.monotonic() - began)))
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, end - time.monotonic()))
    return [process.poll() for process in processes]


def run_parties(
    body: Callable[..., None],
    arguments: dict[str, Any],
    sizes: Sequence[int],
    environments: Sequence[dict[str, str]] | None = None,
    deadline_s: float = 120.0,
) -> None:
    """Runs `body` in several Horovod jobs at once, one per party.

    Args:
        body: a function of a test module, plain or under `@ranks`.
        arguments: its arguments, JSON values or paths.
        sizes: ranks of each party.
        environments: variables to add for each party; none when None.
        deadline_s: seconds after which all processes are killed.

    Raises:
        AssertionError: a rank failed or was late; shows which, and what it said.
    """
    __tracebackhide__ = True
    body = inspect.unwrap(body)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        names: list[str] = []
        outputs: list[Path] = []
        processes: list[Child] = []
        stack.enter_context(_ended(processes))
        for party, size in enumerate(sizes):
            extra = environments[party] if environments is not None else {}
            for rank, environment in enumerate(stack.enter_context(local_rank_environments(size))):
                names.append(f"rank {rank}" + (f" of party {party}" if len(sizes) > 1 else ""))
                output = Path(folder) / f"{party}.{rank}.log"
                outputs.append(output)
                processes.append(
                    the_zygote().start(
                        _rank_arguments(body, arguments),
                        # What a rank that is killed leaves behind goes with the folder.
                        environment=rank_environment({"TMPDIR": folder, **environment, **extra}),
                        folder=folder,
                        output=output,
                    )
                )
        codes = _wait_all(processes, deadline_s)
        late = [name for name, code in zip(names, codes, strict=True) if code is None]
        note = f"; not ended within {deadline_s:.0f} s: {', '.join(late)}" if late else ""
        reports = [
            f"--- {name}: {_outcome(code)}\n"
            + output.read_text(errors="replace")[-_LAST_CHARACTERS:]
            for name, code, output in zip(names, codes, outputs, strict=True)
            if code or (code is None and not any(codes))
        ]
        if reports:
            failed = f"{len(reports)} of {len(codes)} ranks failed{note}"
            raise AssertionError("\n".join([failed, *reports]))


def start_alone(body: Callable[[], None], folder: Path, deadline_s: float = 60.0) -> str:
    """Runs `body` in a process of its own, with TensorFlow and without a launcher.

    Args:
        body: a function of a test module.
        folder: where the process runs and its output lies.
        deadline_s: seconds after which it is killed.

    Returns:
        What it wrote.

    Raises:
        AssertionError: it failed; shows what it said.
        subprocess.TimeoutExpired: it did not end in time.
    """
    __tracebackhide__ = True
    output = folder / "output.log"
    process = the_zygote().start(
        _rank_arguments(body, {}),
        environment=rank_environment({}),
        folder=str(folder),
        output=output,
    )
    with _ended([process]):
        code = process.wait(deadline_s)
    told = output.read_text(errors="replace")
    assert code == 0, f"{_outcome(code)}\n{told[-_LAST_CHARACTERS:]}"
    return told


def _outcome(code: int | None) -> str:
    return "did not end in time" if code is None else f"exit code {code}"


def main(file: str, name: str, encoded: str) -> int:
    """Runs function `name` of the module at `file` as one rank; the exit code."""
    from tf_hips.comm import primitives

    specification = importlib.util.spec_from_file_location(Path(file).stem, file)
    if specification is None or specification.loader is None:
        raise ImportError(f"{file} is no Python module.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    arguments = {
        key: Path(value["path"]) if isinstance(value, dict) and set(value) == {"path"} else value
        for key, value in json.loads(encoded).items()
    }
    primitives.init()
    try:
        inspect.unwrap(getattr(module, name))(**arguments)
    except BaseException:  # noqa: BLE001 - pytest's own failures are no Exception
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    if primitives.is_running():
        primitives.barrier()  # so that no rank ends, and stops Horovod, while another still works
    return 0
