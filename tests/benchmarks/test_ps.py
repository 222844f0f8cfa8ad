# SPDX-License-Identifier: Apache-2.0
"""What `make bench-ps` computes, and that each of its targets is about a figure."""

import dataclasses
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from benchmarks import (
    closing,
    collectives,
    harness,
    ps,
    ps_accuracy,
    ps_bytes,
    ps_flower,
    ps_processes,
    ps_server,
)
from benchmarks.ps_options import ONEBIT, Options
from tf_hips.ops import compressor as compressors

TARGETS = tomllib.loads((harness.ROOT / "benchmarks/targets.toml").read_text(encoding="utf-8"))


def test_every_target_is_about_something_that_is_measured() -> None:
    named = {f"ps-aggregation-{name}" for name in ps_server.AGGREGATED}
    named |= {f"ps-memory-{name}" for name in ("dense", "onebit")}
    named |= {"ps-faster-flower", "ps-faster-flower-100", "ps-start-seconds", "ps-load-flat"}
    named |= {f"ps-bytes-{name}" for name in ("computed", "onebit", "two-level")}
    named |= {f"ps-accuracy-{name}" for name in ("faster-10", "points", "onebit")}
    known = {one["id"] for one in TARGETS["target"] if one["command"] == ps.COMMAND}
    assert known == named
    folder = Path(ps.__file__).parent
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("ps_*.py"))
    for name in named:
        stem = name.rpartition("-")[0]
        assert f'"{name}"' in sources or f'"{stem}-{{name}}"' in sources, name


def test_targets_are_those_of_the_command() -> None:
    rows = closing.targets([], ps.COMMAND)
    assert len(rows) == 15
    assert {row["met"] for row in rows} == {closing.NOT_MEASURED}
    assert not {row["id"] for row in rows} & {
        row["id"] for row in closing.targets([], collectives.COMMAND)
    }


def test_bytes_are_computed_from_the_packets_on() -> None:
    # One packet of 4 MB and 16 bytes of its own: 4 messages of 1 MiB with 16 bytes of header each,
    # and of what HTTP/2 and TLS add for each 16 KiB: 64 + 64 + 64 + 53 of them.
    packet = 4_000_016
    stream = packet + 4 * (16 + 5) + (64 + 64 + 64 + 53) * (9 + 22)
    assert ps_bytes.computed("fp32", [(1000, 1000)], 3) == pytest.approx(
        3 * stream * (1 + 66 / 1448)
    )
    few = ps_bytes.computed(ONEBIT, ps_bytes.SHAPES, 3)
    assert ps_bytes.computed("fp32", ps_bytes.SHAPES, 3) / few > 30
    assert ps_bytes.computed(ONEBIT, ps_bytes.SHAPES, 6) == 2 * few


def test_what_is_smaller_is_not_stored() -> None:
    assert Options().is_complete
    for less in ({"rounds": 4}, {"tensors": 2}, {"load_rounds": 999}):
        assert not dataclasses.replace(Options(), **less).is_complete
    assert 4 * sum(int(np.prod(shape)) for shape in Options().shapes) == 100_000_000


def test_flower_is_pinned_and_no_dependency_of_ours() -> None:
    assert ps_flower.version() == "flwr==1.29.0"
    assert "flwr" not in (harness.ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_gradients_of_the_accuracy_part_are_those_of_its_loss() -> None:
    trainer = ps_accuracy.Trainer(0, 0, "fp32", ps_accuracy.STEPS)
    x, y = trainer._data
    picked = np.random.default_rng((0, 0)).integers(0, len(x), ps_accuracy.BATCH)

    def loss() -> float:
        a = x[picked].astype(np.float64)
        for layer in (0, 2):
            a = np.maximum(a @ trainer.weights[layer] + trainer.weights[layer + 1], 0)
        logits = a @ trainer.weights[4] + trainer.weights[5]
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(len(picked)), y[picked]]
        return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen))

    trainer.weights = [weight.astype(np.float64) for weight in trainer.weights]
    places = [(0, (20, 7)), (2, (3, 5)), (3, (11,)), (4, (9, 2)), (5, (4,))]
    expected = []
    for tensor, place in places:
        kept = trainer.weights[tensor][place]
        values = []
        for step in (1e-4, -1e-4):
            trainer.weights[tensor][place] = kept + step
            values.append(loss())
        trainer.weights[tensor][place] = kept
        expected.append((values[0] - values[1]) / 2e-4)
    packets, at, gradients = trainer.packets(), 0, []
    for shape in ps_accuracy.SHAPES:
        compressor, size = compressors.parse("fp32"), int(np.prod(shape))
        length = sum(map(compressor.chunk_packet_bytes, [size]))
        found = ps_accuracy.native.decode(compressor, packets[at : at + length], size)
        gradients.append(found.reshape(shape))
        at += length
    found = [float(gradients[tensor][place]) for tensor, place in places]
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert any(abs(one) > 1e-4 for one in expected)


@pytest.mark.heavy
def test_children_and_a_server_make_rounds() -> None:
    with ps_processes.server(4) as server, ps_processes.children(4, num_processes=2) as children:
        assert children.join(server, [(100, 10), (7,)], ONEBIT, ONEBIT) > 0
        found = children.rounds(0, 3)
        assert len(found["seconds"]) == len(found["exchanges"]) == 3
        assert all(
            0 < inner <= outer
            for inner, outer in zip(found["exchanges"], found["seconds"], strict=True)
        )
        now, most = server.memory()
        assert 10e6 < now <= most < 500e6
        assert "tensorflow" not in server.libraries()
        assert server.start_s > 0
        children.leave()


@pytest.mark.heavy
def test_a_core_is_measured_through_the_store() -> None:
    order = json.dumps({"shapes": [[300, 300]], "text": ONEBIT, "rounds": 2})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ps_merge", order],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert set(found) == {"stored", "kernel", "copy", "median"}
    assert all(len(found[name]) == 2 and min(found[name]) > 0 for name in found["median"])
