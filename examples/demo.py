# SPDX-License-Identifier: Apache-2.0
"""What `make demo` shows: two parties train on digits over a slow tier; all claims are checked.

Starts `tf-hips run` on `examples/digits.py`, follows its events, then checks what it says: the
accuracy on the held-out images, the bytes on the parties' uplink sockets against dense fp32, and
that all replicas are bit-identical. Writes `accuracy_and_bytes.png`, the events and the run's
output into `demo-out/`.
"""

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path

import demo_figure
from rich.console import Console
from rich.table import Table

from tf_hips import log, report
from tf_hips.cli import arguments
from tf_hips.errors import TfHipsError

HERE = Path(__file__).resolve().parent
MIN_ACCURACY = 0.95
MIN_RATIO = 20.0
TAIL_LINES = 30


def main() -> int:
    """Runs, checks, draws; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="demo", description="Train on digits over two parties, and check the claims."
    )
    for name, default, what in (
        ("--parties", 2, "number of parties"),
        ("--workers", 2, "workers per party"),
        ("--epochs", 16, "passes through the data"),
    ):
        parser.add_argument(
            name,
            type=arguments.count,
            default=default,
            metavar="N",
            help=f"{what} (default {default})",
        )
    parser.add_argument(
        "--seed", type=arguments.seed, default=0, metavar="N", help="seed of the run (default 0)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="folder to write (default demo-out)",
    )
    options = parser.parse_args()
    try:
        return demonstrate(options)
    except (TfHipsError, OSError) as error:
        sys.stderr.write(f"demo: failed: {' '.join(str(error).split())}\n")
        return 1


def demonstrate(options: argparse.Namespace) -> int:
    """Runs, checks, draws; returns the exit code.

    Raises:
        TfHipsError: the run's events lack what a report needs, or matplotlib is missing.
    """
    console = Console(highlight=False)
    events_dir = options.out / "events"
    events_dir.mkdir(parents=True, exist_ok=True)
    # Of the demo before; a folder of this name may hold something else, too.
    for old in events_dir.glob("*.jsonl"):
        old.unlink()
    begin = time.monotonic()
    code = train(options, events_dir, console)
    if code:
        return code
    events = log.read_events(events_dir)
    summary = report.summarise(events)
    figure = options.out / "accuracy_and_bytes.png"
    demo_figure.draw(events, figure, f"Digits over {kind(options)}, 1 bit per gradient element")
    workers = options.parties * options.workers
    return conclude(summary, workers, time.monotonic() - begin, figure, console)


def kind(options: argparse.Namespace) -> str:
    """Parties and workers in words."""
    parties = "1 party" if options.parties == 1 else f"{options.parties} parties"
    return f"{parties} x {options.workers} worker{'s' if options.workers > 1 else ''}"


def train(options: argparse.Namespace, events_dir: Path, console: Console) -> int:
    """Runs the training to its end and shows a line per epoch; returns its exit code."""
    command = [sys.executable, "-m", "tf_hips.cli", "run"]
    command += ["--parties", str(options.parties), "--workers", str(options.workers), "--server"]
    command += ["--seed", str(options.seed), "--log-dir", str(events_dir), str(HERE / "digits.py")]
    command += ["--epochs", str(options.epochs), "--seed", str(options.seed)]
    log_file = options.out / "run.log"
    console.print(
        f"1 global server, {kind(options)}, mutual TLS; output in {log_file}",
        soft_wrap=True,
    )
    shown = 0
    with (
        log_file.open("w", encoding="utf-8") as output,
        console.status("starting ...") as status,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as run,
    ):
        try:
            for line in run.stdout or ():
                output.write(line)
                shown = show_epochs(events_dir, shown, options.epochs, console)
                status.update("training ..." if shown else "starting ...")
            code = run.wait()
        except KeyboardInterrupt:  # the run has got it, too, and ends by itself
            code = run.wait()
    show_epochs(events_dir, shown, options.epochs, console)
    if code:
        lines = log_file.read_text(encoding="utf-8").splitlines()
        sys.stderr.write(
            "\n".join(lines[-TAIL_LINES:]) + f"\ndemo: failed: the run ended with {code}\n"
        )
    return code


def show_epochs(events_dir: Path, shown: int, epochs: int, console: Console) -> int:
    """Prints a line for every epoch that is new; returns how many are printed."""
    try:
        events = log.read_events(events_dir)
    except ValueError:  # a line that is being written
        return shown
    for time_us, accuracy in report.epochs(events)[shown:]:
        try:
            so_far = report.traffic([event for event in events if event["time_us"] <= time_us])
        except TfHipsError:  # no round yet: there is nothing to show, the end will say why
            return shown
        shown += 1
        console.print(
            f"epoch {shown:2}/{epochs}   test accuracy {accuracy:.3f}   "
            f"slow tier {so_far.measured[-1] / 1e6:6.2f} MB"
            f"   dense fp32 would be {so_far.dense[-1] / 1e6:6.1f} MB",
            soft_wrap=True,
        )
    return shown


def conclude(
    summary: report.Summary, workers: int, seconds: float, figure: Path, console: Console
) -> int:
    """Prints the checks and the last line; returns 0 if all hold."""
    traffic = summary.traffic
    measured, dense = traffic.measured[-1], traffic.dense[-1]
    all_there = len(summary.fingerprints) == workers
    identical = all_there and summary.are_replicas_identical
    checks = [
        (
            "test accuracy",
            f"{summary.accuracy:.4f}",
            f">= {MIN_ACCURACY}",
            summary.accuracy >= MIN_ACCURACY,
        ),
        ("slow-tier bytes", f"{measured:,}", "", True),
        (f"dense fp32 bytes, {traffic.rounds[-1]} rounds", f"{dense:,}", "", True),
        ("times less", f"{traffic.ratio:.1f}x", f">= {MIN_RATIO:g}x", traffic.ratio >= MIN_RATIO),
        (
            "replicas",
            "identical" if identical else "different",
            f"{workers} fingerprints equal",
            identical,
        ),
        ("wall time", f"{seconds:.0f} s", "", True),
    ]
    table = Table(title_justify="left", header_style="bold")
    for name, justify in (("", "left"), ("measured", "right"), ("wanted", "left"), ("", "left")):
        table.add_column(name, justify=justify)
    for name, value, wanted, holds in checks:
        table.add_row(
            name, value, wanted, "" if holds and not wanted else "ok" if holds else "[red]FAILED[/]"
        )
    console.print(table)
    console.print(f"figure: {figure}", soft_wrap=True)
    failed = [
        f"{name} is {value}, wanted {wanted}" for name, value, wanted, holds in checks if not holds
    ]
    if failed:
        for worker, fingerprint in sorted(summary.fingerprints.items()) if not identical else ():
            sys.stderr.write(f"{worker}: {fingerprint}\n")
        sys.stderr.write(f"demo: failed: {'; '.join(failed)}\n")
    print(
        f"demo: accuracy={math.floor(summary.accuracy * 100) / 100:.2f} "
        f"slow_tier_bytes={measured} dense_bytes={dense} "
        f"replicas={'identical' if identical else 'different'}",
        flush=True,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
