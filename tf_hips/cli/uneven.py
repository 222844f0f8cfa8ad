# SPDX-License-Identifier: Apache-2.0
"""`--slowdown` and `--clock-skew`: workers of one machine as uneven as those of many sites."""

import argparse
import math

from tf_hips.cli import arguments, quota

_WORKER = "worker="
_CPU = "cpu="
_MOST_PERCENT = 100_000  # of a thousand cores
_SKEW = "TF_HIPS_CLOCK_SKEW"


def add(parser: argparse.ArgumentParser) -> None:
    """Declares both options."""
    group = parser.add_argument_group("uneven workers, for experiments", "docs/esync.md")
    group.add_argument(
        "--slowdown",
        action="append",
        type=_slowdown,
        metavar="worker=N:20x",
        help="pad the training steps of worker N, counted from 0 over all parties, with sleep: to "
        "20 times their length, or as worker=N:50ms or worker=N:0.5s to that at least; or, as "
        "worker=N:cpu=20%%, hold its process to that share of a core; may be given for several "
        "workers",
    )
    group.add_argument(
        "--clock-skew",
        action="append",
        type=_skew,
        metavar="worker=N:-5s",
        help="set the wall clock of worker N wrong, for rules that read it",
    )


def environments(options: argparse.Namespace, workers: int) -> list[dict[str, str]]:
    """The variables that make each worker what the options say.

    Args:
        options: with both.
        workers: number of workers of all parties.

    Raises:
        UsageError: there is no such worker, or one is named twice.
    """
    found: list[dict[str, str]] = [{} for _ in range(workers)]
    for name, given in (
        ("--slowdown", options.slowdown),
        ("--clock-skew", [(worker, _SKEW, text) for worker, text in options.clock_skew or ()]),
    ):
        for worker, variable, text in given or ():
            if worker >= workers:
                raise arguments.UsageError(
                    f"{name} must be of a worker from 0 to {workers - 1}. Received: "
                    f"{_WORKER}{worker}"
                )
            if variable in found[worker]:
                raise arguments.UsageError(
                    f"{name} must be given once for a worker. Received: {_WORKER}{worker} twice"
                )
            found[worker][variable] = text
    return found


def _slowdown(text: str) -> tuple[int, str, str]:
    example = "worker=N:20x, worker=N:0.5s, worker=N:50ms or worker=N:cpu=20%"
    worker, value = _of_worker(text, example)
    if value.startswith(_CPU):
        percent = _number(value.removeprefix(_CPU).removesuffix("%"))
        if not (value.endswith("%") and 0.1 <= percent <= _MOST_PERCENT):
            raise argparse.ArgumentTypeError(
                f"must be a share of a core from 0.1% to {_MOST_PERCENT}%, such as cpu=20%. "
                f"Received: {text!r}"
            )
        return worker, quota.VARIABLE, f"{percent / 100:g}"
    unit = next((unit for unit in ("x", "ms", "s") if value.endswith(unit)), "")
    least = 1.0 if unit == "x" else 0.0
    number = _number(value.removesuffix(unit)) if unit else math.nan
    if not (number >= least and 0 < number < math.inf):
        raise argparse.ArgumentTypeError(
            f"must be a factor >= 1 such as 20x, or a time such as 0.5s or 50ms. Received: {text!r}"
        )
    return worker, "TF_HIPS_SLOWDOWN", f"{number:g}{unit}"


def _skew(text: str) -> tuple[int, str]:
    worker, value = _of_worker(text, "worker=N:-5s")
    number = _number(value.removesuffix("s"))
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a number of seconds. Received: {text!r}")
    return worker, repr(number)


def _of_worker(text: str, example: str) -> tuple[int, str]:
    worker, colon, value = text.removeprefix(_WORKER).partition(":")
    if not (text.startswith(_WORKER) and colon and worker.isascii() and worker.isdigit()):
        raise argparse.ArgumentTypeError(f"must be {example}. Received: {text!r}")
    return int(worker[:9]), value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
