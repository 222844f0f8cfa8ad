# SPDX-License-Identifier: Apache-2.0
"""Part `accuracy` of `make bench-ps`: seconds to an accuracy on digits, at several rates.

Two parties train an MLP of 1.1 million weights on real handwritten digits, each on its half,
synchronously: NumPy on one core, whose steps take milliseconds, so that bytes decide. Three ways
count: dense; HiPS's 2-bit as HiPS has it (the way up only, dense down); ours, TernGrad of 2 bits
both ways with feedback at both ends. onebit stands beside them: on a layer of a million weights its
two means per chunk take more steps than the bits save, so what it costs in the end is looked at
after twice as many steps, beside dense of as many (part `longer`). SGD with momentum and cosine
decay, at one learning rate for all ways; it was chosen by hand, and no command looks for a better.

Every rate moves the same bits, so the weights after a step are the same at every rate, and what a
rate changes is the time of a step. So a way is trained once, on loopback, for the steps that it
needs, and the time of a step is measured at each rate: the product is the time to the accuracy.
With FULL=1 the training is made at 10 Mbit/s, too, as far as needed, and its time is measured.
"""

import argparse
import contextlib
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import obedience, ps_processes
from benchmarks.collectives_jobs import Row, link_of, row
from benchmarks.network import Network, network
from benchmarks.ps_options import ONEBIT, Options
from benchmarks.ps_processes import Process, Server, sites_of
from tf_hips.config import Tls, Uplink
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.client.client import Client
from tf_hips.ps.terms.model import Model

PARTIES = 2
RATES = (1, 10, 100, None)  # Mbit/s
THRESHOLD = 0.01  # of 2-bit: the best of 0.0003, 0.002 and 0.01
_TERNGRAD = "error_feedback(terngrad(bitwidth=2))"
WAYS = {
    "dense": ("fp32", "fp32"),
    "2-bit up": (f"error_feedback(hips2bit(threshold={THRESHOLD}))", "fp32"),
    "onebit": (ONEBIT, ONEBIT),
    "ours": (_TERNGRAD, _TERNGRAD),
}
GOAL = 0.95
BATCH, STEPS, RATE, MOMENTUM = 64, 200, 0.05, 0.9
SHAPES = [(64, 1000), (1000,), (1000, 1000), (1000,), (1000, 10), (10,)]
TEST_SHARE, TEST_SEED = 0.2, 2026  # as examples/digits.py
SEEDS = 3
_STEPS = 4  # that are measured at a rate, after one that is not; one where it takes a minute

Floats = npt.NDArray[np.float32]


class Trainer:
    """The weights of one party, which are those of all."""

    def __init__(self, seed: int, child: int, compressor: str, steps: int) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = (digits.images.reshape(-1, 64) / 16.0).astype(np.float32)
        order = np.random.default_rng(TEST_SEED).permutation(len(images))
        test, train = np.split(order, [round(TEST_SHARE * len(images))])
        self._test = images[test], digits.target[test]
        mine = train[child::PARTIES]
        self._data = images[mine], digits.target[mine]
        self._draw = np.random.default_rng((seed, child))
        first = np.random.default_rng(seed)
        self.weights: list[Floats] = [
            np.zeros(shape, np.float32)
            if len(shape) == 1
            else (first.standard_normal(shape) * np.sqrt(2 / shape[0])).astype(np.float32)
            for shape in SHAPES
        ]
        self._moments = [np.zeros_like(one) for one in self.weights]
        self._up = compressors.parse(compressor)
        self._kept = [
            np.zeros(one.size, np.float32) if self._up.has_residual else None
            for one in self.weights
        ]
        self._child, self._steps, self._all_steps = child, 0, steps

    def packets(self) -> npt.NDArray[np.uint8]:
        """The gradients of the next batch, encoded."""
        x, y = self._data
        picked = self._draw.integers(0, len(x), BATCH)
        x, y = x[picked], y[picked]
        a, hidden = x, [x]
        for layer in (0, 2):
            a = np.maximum(a @ self.weights[layer] + self.weights[layer + 1], 0)
            hidden.append(a)
        logits = a @ self.weights[4] + self.weights[5]
        logits -= logits.max(axis=1, keepdims=True)
        delta = np.exp(logits)
        delta /= delta.sum(axis=1, keepdims=True)
        delta[np.arange(BATCH), y] -= 1
        delta /= BATCH
        gradients: list[Floats] = []
        for layer in (4, 2, 0):
            gradients = [hidden[layer // 2].T @ delta, delta.sum(axis=0), *gradients]
            if layer:
                delta = (delta @ self.weights[layer].T) * (hidden[layer // 2] > 0)
        return np.concatenate(
            [
                native.encode(
                    self._up,
                    np.ascontiguousarray(gradient, np.float32).reshape(-1),
                    native.Key(self._child, self._steps, tensor),
                    kept=self._kept[tensor],
                )
                for tensor, gradient in enumerate(gradients)
            ]
        )

    def step(self, sums: list[Floats]) -> None:
        """A step of SGD with momentum and cosine decay, with the sums over all parties."""
        rate = np.float32(
            RATE / PARTIES * (1 + math.cos(math.pi * self._steps / self._all_steps)) / 2
        )
        self._steps += 1
        for weight, moment, total in zip(self.weights, self._moments, sums, strict=True):
            moment *= np.float32(MOMENTUM)
            moment += total.reshape(weight.shape)
            weight -= rate * moment

    def accuracy(self) -> float:
        """The share of the held-out digits that it knows."""
        a, y = self._test
        for layer in (0, 2):
            a = np.maximum(a @ self.weights[layer] + self.weights[layer + 1], 0)
        return float(np.mean((a @ self.weights[4] + self.weights[5]).argmax(axis=1) == y))


class Worker:
    """One party."""

    def join(self, server: str, site: str, identity: dict[str, str], **how: Any) -> dict[str, Any]:
        """Joins with a fresh model."""
        self._client = Client(Uplink(server, site, Tls(**identity), 600.0), ps_processes.RUN, 1)
        child = self._client.join(how["up"], how["down"], how["seed"]).child
        self._client.agree_model(SHAPES)
        self._trainer = Trainer(how["seed"], child, how["up"], how["steps"])
        self._down, self._model = compressors.parse(how["down"]), Model(tuple(SHAPES))
        self._round = 0
        return {}

    def train(self, steps: int) -> dict[str, Any]:
        """Makes steps; seconds and accuracy after each."""
        seconds, accuracies = [], []
        for _ in range(steps):
            began = time.perf_counter()
            merged = self._client.exchange(self._round, self._trainer.packets())
            sums = [np.empty(int(np.prod(shape)), np.float32) for shape in SHAPES]
            at = 0
            lengths = self._model.packet_bytes(self._down)
            for where, length in zip(self._model.chunks, lengths, strict=True):
                out = sums[where.tensor][where.offset : where.offset + where.size]
                native.decode(self._down, merged[at : at + length], where.size, out=out)
                at += length
            self._trainer.step(sums)
            self._round += 1
            seconds.append(time.perf_counter() - began)
            accuracies.append(self._trainer.accuracy())
        return {"seconds": seconds, "accuracies": accuracies}

    def leave(self) -> dict[str, Any]:
        """Leaves the run."""
        self._client.leave()
        return {}


def measured(options: Options) -> Iterator[Row]:
    """Steps to the accuracy, seconds of a step, and their product."""
    needed: dict[str, int] = {}
    best: dict[str, float] = {}
    for way in WAYS:
        curves = [_curve(way, seed) for seed in range(SEEDS)]
        mean = np.mean(curves, axis=0)
        reached = np.flatnonzero(mean >= GOAL)
        best[way] = _last(curves)
        yield row(
            "accuracy", f"{way}: accuracy of the last 20 of {STEPS} steps", 100 * best[way],
            "points", against=f"mean of {SEEDS} seeds",
        )  # fmt: skip
        if not reached.size:
            yield row("accuracy", f"{way}: {100 * GOAL:g} points not reached", STEPS, "steps")
            continue
        needed[way] = int(reached[0]) + 1
        yield row("accuracy", f"{way}: steps to {100 * GOAL:g} points", needed[way], "steps")
    yield row(
        "accuracy",
        "accuracy that 2-bit TernGrad both ways costs",
        100 * (best["dense"] - best["ours"]),
        "points",
        against="dense",
        about="ps-accuracy-points",
    )
    for mbit in RATES:
        times = {}
        for way in needed:
            whole = options.is_full and mbit == 10
            steps = needed[way] if whole else 1 if mbit == 1 else 1 + _STEPS
            seconds = _steps(way, mbit, steps)
            step_s = statistics.median(seconds[1:] or seconds)
            times[way] = sum(seconds) if whole else needed[way] * step_s
            yield row(
                "accuracy",
                f"{way}: seconds to {100 * GOAL:g} points",
                times[way],
                "s",
                link=link_of(mbit),
                against="measured as a whole"
                if whole
                else f"{needed[way]} steps of {step_s:.3g} s",
            )
        for way in [one for one in needed if one != "dense"]:
            yield row(
                "accuracy",
                f"dense over {way}, time to {100 * GOAL:g} points",
                times["dense"] / times[way],
                "x",
                link=link_of(mbit),
                about="ps-accuracy-faster-10" if (way, mbit) == ("ours", 10) else "",
            )


def longer(options: Options) -> Iterator[Row]:
    """Part `longer`: what onebit costs after twice as many steps."""
    del options
    ends = {way: _end(way, 2 * STEPS) for way in ("dense", "onebit")}
    for way, end in ends.items():
        yield row(
            "longer", f"{way}: accuracy of the last 20 of {2 * STEPS} steps", 100 * end,
            "points", against=f"mean of {SEEDS} seeds",
        )  # fmt: skip
    yield row(
        "longer",
        f"accuracy that onebit both ways costs after {2 * STEPS} steps",
        100 * (ends["dense"] - ends["onebit"]),
        "points",
        against="dense",
        about="ps-accuracy-onebit",
    )


@contextlib.contextmanager
def _parties(
    way: str, seed: int, net: Network | None, steps: int = STEPS
) -> Iterator[list[Process]]:
    """The parties of a run of so many steps, joined."""
    up, down = WAYS[way]
    with contextlib.ExitStack() as stack:
        server: Server = stack.enter_context(ps_processes.server(PARTIES, network=net))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hips-bench")))
        made = []
        for number, site in enumerate(sites_of(PARTIES)):
            command = [sys.executable, "-m", "benchmarks.ps_accuracy", "party"]
            if net is not None:
                command = net.hosts[number].command(*command)
            one = Process(
                command, log=folder / f"{site}.log", settings={"OPENBLAS_NUM_THREADS": "1"}
            )
            stack.callback(one.end)
            identity = vars(server.identities[site])
            order = {"server": server.address, "site": site, "identity": identity}
            how = {"up": up, "down": down, "seed": seed, "steps": steps}
            one.tell(json.dumps({"do": "join", **order, **how}))
            made.append(one)
        for one in made:
            one.hear()
        yield made


def _asked(parties: list[Process], **command: Any) -> list[dict[str, Any]]:
    for one in parties:
        one.tell(json.dumps(command))
    return [one.hear() for one in parties]


def _end(way: str, steps: int) -> float:
    """The accuracy of the last 20 of so many steps, the mean of all seeds."""
    return _last([_curve(way, seed, steps) for seed in range(SEEDS)])


def _last(curves: list[list[float]]) -> float:
    return float(np.mean([np.mean(curve[-20:]) for curve in curves]))


def _curve(way: str, seed: int, steps: int = STEPS) -> list[float]:
    """Accuracy after each of so many steps."""
    with _parties(way, seed, None, steps) as parties:
        answers = _asked(parties, do="train", steps=steps)
        _asked(parties, do="leave")
    if answers[0]["accuracies"] != answers[1]["accuracies"]:
        raise SystemExit(f"the parties of {way} have different weights")
    return answers[0]["accuracies"]


def _steps(way: str, mbit: int | None, steps: int) -> list[float]:
    """Seconds of steps at a rate, the slower party's."""
    with network(PARTIES) as net, _parties(way, 0, net) as parties:
        net.limit(mbit)
        answers = _asked(parties, do="train", steps=steps)
        net.limit(None)
        _asked(parties, do="leave")
    return [max(pair) for pair in zip(*(one["seconds"] for one in answers), strict=True)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["party"])
    parser.parse_args()
    obedience.obey(Worker())
