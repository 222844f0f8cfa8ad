# SPDX-License-Identifier: Apache-2.0
"""Which of Keras' optimizers round alike on unlike machines, and how far others come apart.

Two machines apply the same sums in every step, each with its own optimizer. Here they do so with
gradients that are functions of the step, so two processes can be compared without a run:

    python -m benchmarks.unlike                      # this machine with 1 thread, and with 8
    python -m benchmarks.unlike --write here.npz     # on one machine, with all its threads
    python -m benchmarks.unlike --compare here.npz   # on the other one: both, side by side

`--steps 300` of each optimizer; `--only rms` takes those with that text in their names. A gap is
the norm of a variable's difference, as a share of its own norm, the largest of all variables:
tf_hips takes up to 1e-3 for rounding (`strategies.nearness`). Prints only.
"""

import argparse
import functools
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import harness

THREADS = (1, 8)
# Kernels of a network, of which TensorFlow cuts the larger ones into pieces for its threads.
SHAPES = ((64, 1024), (1024,), (1024, 512), (512,), (3, 3, 32, 64), (64,), (512, 10), (10,))
_BELOW = 1 << 15


def optimizers():
    """What makes each optimizer, by its name here."""
    import keras

    of, rate = keras.optimizers, keras.optimizers.schedules
    return {
        "SGD": lambda: of.SGD(0.05),
        "SGD(momentum, nesterov)": lambda: of.SGD(0.05, momentum=0.9, nesterov=True),
        "SGD(momentum, weight_decay)": lambda: of.SGD(0.05, momentum=0.9, weight_decay=1e-3),
        "SGD(CosineDecay)": lambda: of.SGD(rate.CosineDecay(0.05, 200)),
        "SGD(ExponentialDecay)": lambda: of.SGD(rate.ExponentialDecay(0.05, 20, 0.97)),
        "SGD(clipvalue)": lambda: of.SGD(0.05, clipvalue=0.5),
        "SGD(clipnorm)": lambda: of.SGD(0.05, clipnorm=1.0),
        "SGD(global_clipnorm)": lambda: of.SGD(0.05, momentum=0.9, global_clipnorm=1.0),
        "SGD(use_ema)": lambda: of.SGD(0.05, use_ema=True),
        "Adam": lambda: of.Adam(1e-3),
        "Adam(amsgrad)": lambda: of.Adam(1e-3, amsgrad=True),
        "Adam(global_clipnorm)": lambda: of.Adam(1e-3, global_clipnorm=1.0),
        "AdamW": lambda: of.AdamW(1e-3),
        "Adamax": lambda: of.Adamax(1e-3),
        "Nadam": lambda: of.Nadam(1e-3),
        "Ftrl": lambda: of.Ftrl(0.01),
        "Lion": lambda: of.Lion(1e-4),
        "Lion(global_clipnorm)": lambda: of.Lion(1e-4, global_clipnorm=1.0),
        "RMSprop": lambda: of.RMSprop(1e-3),
        "RMSprop(centered, momentum)": lambda: of.RMSprop(1e-3, momentum=0.9, centered=True),
        "Adagrad": lambda: of.Adagrad(0.01),
        "Adadelta": lambda: of.Adadelta(0.1),
        "Adafactor": lambda: of.Adafactor(1e-3),
        "Lamb": lambda: of.Lamb(1e-3),
        "Muon": lambda: of.Muon(1e-3),
    }


def main(argv=None) -> int:
    """Runs the processes, and prints the table."""
    options = _parser().parse_args(argv)
    if options.worker:
        return _train(options)
    if not any(options.only.lower() in name.lower() for name in optimizers()):
        raise SystemExit(f"--only must be in the name of an optimizer. Received: {options.only!r}")
    if options.compare:
        _check_steps(options.compare, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        if options.write:
            return _start(options, None, options.write)
        if options.compare:
            files = [options.compare, Path(folder) / "here.npz"]
            codes = [_start(options, None, files[1])]
            titles = [options.compare.name, "this machine"]
        else:
            files = [Path(folder) / f"{count}.npz" for count in THREADS]
            codes = [_start(options, *pair) for pair in zip(THREADS, files, strict=True)]
            titles = [f"{count} thread{'s' * (count > 1)}" for count in THREADS]
        if any(codes):
            return 1
        rows = _compared(*files)
    harness.show("unlike", rows)
    facts = harness.environment()
    print(
        f"{' and '.join(titles)}, {options.steps} steps; {harness.named(facts)}, TensorFlow "
        f"{facts['versions']['tensorflow']}, Keras {facts['versions']['keras']}, {facts['date']}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unlike", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=_positive, default=300, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--write", type=Path, metavar="FILE")
    ends.add_argument("--compare", type=Path, metavar="FILE")
    ends.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return number


def _start(options, threads, file) -> int:
    """Trains in a process of its own: threads are chosen once."""
    command = [sys.executable, "-m", "benchmarks.unlike", "--worker", str(file.resolve())]
    command += ["--steps", str(options.steps), "--only", options.only]
    command += [] if threads is None else ["--threads", str(threads)]
    return subprocess.run(command, cwd=harness.ROOT, check=False).returncode


def _train(options) -> int:
    """Writes weights and slots of each optimizer after its steps."""
    import keras
    import numpy as np
    import tensorflow as tf

    if options.threads:
        tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    found = {"steps": np.array(options.steps)}
    for name, make in optimizers().items():
        if options.only.lower() not in name.lower():
            continue
        keras.utils.clear_session()
        draw = np.random.default_rng(2026)
        # Sums of integers: a normal distribution's tails ask the machine for a logarithm.
        weights = [keras.Variable(_values(draw, shape) * np.float32(0.05)) for shape in SHAPES]
        optimizer = make()
        optimizer.build(weights)
        step = tf.function(functools.partial(_apply, optimizer, weights))
        for _ in range(options.steps):
            step([tf.constant(_values(draw, shape)) for shape in SHAPES])
        for kind, variables in (("weights", weights), ("slots", optimizer.variables)):
            for place, one in enumerate(variables):
                found[f"{name}/{kind}/{place}"] = one.numpy()
        print(f"{name}: {options.steps} steps", file=sys.stderr, flush=True)
    with options.worker.open("wb") as file:  # NumPy would put .npz behind another name
        np.savez(file, **found)
    return 0


def _apply(optimizer, weights, gradients):
    optimizer.apply(gradients, weights)


def _values(draw, shape):
    """About normal, of a standard deviation of about 1, and exact on every machine."""
    import numpy as np

    total = sum(draw.integers(-_BELOW, _BELOW, shape, np.int32) for _ in range(3))
    return (total / np.float32(_BELOW)).astype(np.float32)


def _check_steps(file, steps) -> None:
    """Before minutes are spent on another number of them."""
    import numpy as np

    try:
        with np.load(file) as found:
            told = int(found["steps"])
    except (OSError, ValueError, KeyError, EOFError, IndexError) as error:
        raise SystemExit(f"--compare must be a file that --write has made: {error}") from error
    if told != steps:
        raise SystemExit(
            f"Both must make as many steps. Received: {told} in {file}, --steps {steps}"
        )


def _compared(first, other) -> list[dict[str, str]]:
    """A row for each optimizer that both files have."""
    import numpy as np

    from tf_hips.strategies.nearness import measure

    rows = []
    with np.load(first) as here, np.load(other) as there:
        names = {key.split("/")[0]: None for key in here.files if "/" in key and key in there.files}
        for name in names:
            row = {"optimizer": name}
            for kind in ("weights", "slots"):
                keys = [key for key in here.files if key.startswith(f"{name}/{kind}/")]
                pairs = [(here[key], there[key]) for key in keys]
                is_alike = all(a.tobytes() == b.tobytes() for a, b in pairs)
                gaps = [measure(a, b).share for a, b in pairs if a.dtype.kind == "f"]
                row[kind] = "bit-identical" if is_alike else f"{max(gaps):.1e} apart"
                if kind == "weights" and not is_alike:
                    elements = sum(a.size for a, _ in pairs)
                    odd = sum(int((a != b).sum()) for a, b in pairs)
                    row[kind] += f", {100 * odd / elements:.2g} % of them"
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
