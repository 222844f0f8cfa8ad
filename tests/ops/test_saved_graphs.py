# SPDX-License-Identifier: Apache-2.0
"""Graphs with codecs that are read in a process that has done nothing with the codecs yet."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_hips
from tests.support import hurried
from tf_hips.ops import Compressor, Key, graph, native

pytestmark = [pytest.mark.tf, pytest.mark.heavy, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
MINE = Path(__file__).with_name("mine.pse")
RUN = "print(tf.saved_model.load(sys.argv[1]).encoded(tf.ones([10])).numpy().tobytes().hex())"


def saved(compressor: Compressor, folder: Path) -> str:
    """Saves a graph that encodes; returns its folder."""

    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([10])])
        def encoded(self, x: tf.Tensor) -> tf.Tensor:
            return graph.encode(compressor, x, seed=3, step=2, tensor_id=1)[0]

    tf.saved_model.save(Model(), str(folder))
    return str(folder)


@pytest.mark.parametrize(
    "known",
    [
        f"tensorflow as tf, tf_hips; tf_hips.load({str(MINE)!r})",
        f"tf_hips; tf_hips.load({str(MINE)!r}); import tensorflow as tf; "
        "from tf_hips.ops import graph; graph.register()",
        "tensorflow as tf; from tf_hips.ops import graph; graph.register()",
    ],
)
def test_operations_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    hurried.cache_of_its_own(tmp_path, monkeypatch)
    compressor = tf_hips.load(MINE)(2.0, 5) if "load" in known else tf_hips.onebit()
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {known}\n{RUN}", saved(compressor, tmp_path / "m")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    packet = native.encode(compressor, np.ones(10, np.float32), Key(3, 2, 1))
    assert done.stdout.split()[-1] == packet.tobytes().hex()
