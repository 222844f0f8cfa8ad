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
from tests.support.ranks import run_parties
from tf_hips.ops import Key, graph, native

pytestmark = [pytest.mark.tf, pytest.mark.heavy, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
MINE = Path(__file__).with_name("mine.pse")
REGISTER = "from tf_hips.ops import graph; graph.register()"
READ = """
import sys
{known}
found = tf.saved_model.load({folder!r}).encoded(tf.ones([10])).numpy().tobytes().hex()
assert found == {packet!r}, found
"""


def made(folder: Path, *, is_loaded: bool) -> dict[str, str]:
    """Saves a graph that encodes; its folder, and the packet that it must give of ones."""
    compressor = tf_hips.load(MINE)(2.0, 5) if is_loaded else tf_hips.onebit()

    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([10])])
        def encoded(self, x: tf.Tensor) -> tf.Tensor:
            return graph.encode(compressor, x, seed=3, step=2, tensor_id=1)[0]

    tf.saved_model.save(Model(), str(folder))
    packet = native.encode(compressor, np.ones(10, np.float32), Key(3, 2, 1))
    return {"folder": str(folder), "packet": packet.tobytes().hex()}


def read(folder: str, program: str) -> None:
    """In a forked process, which has imported TensorFlow and ours, and made no operations known."""
    with pytest.raises(RuntimeError, match="Op type not registered"):
        tf.saved_model.load(folder)
    exec(program, {})


@pytest.mark.parametrize(
    "known",
    [
        f"import tensorflow as tf, tf_hips; tf_hips.load({str(MINE)!r})",
        f"import tensorflow as tf; {REGISTER}",
    ],
    ids=["loaded", "registered"],
)
def test_operations_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    hurried.cache_of_its_own(tmp_path, monkeypatch)
    told = made(tmp_path / "m", is_loaded="load" in known)
    program = READ.format(known=known, **told)
    run_parties(read, {"folder": told["folder"], "program": program}, [1], deadline_s=90)


@pytest.mark.slow
def test_operations_of_what_was_loaded_before_tensorflow_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried.cache_of_its_own(tmp_path, monkeypatch)
    known = f"import tf_hips; tf_hips.load({str(MINE)!r}); import tensorflow as tf; {REGISTER}"
    program = READ.format(known=known, **made(tmp_path / "m", is_loaded=True))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
