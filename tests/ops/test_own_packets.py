# SPDX-License-Identifier: Apache-2.0
"""Error feedback around a codec that refuses a packet of its own: the gradient is not counted."""

from pathlib import Path

import numpy as np
import pytest

import tf_hips
from tests.compll.support import OWN
from tests.support import hurried
from tf_hips.errors import PacketError
from tf_hips.ops import Key, error_feedback, native

CHUNK = 1 << 20


@pytest.mark.heavy
def test_the_residual_is_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurried.cache_of_its_own(tmp_path, monkeypatch)
    file = tmp_path / "own.pse"
    file.write_text(OWN)
    codec = error_feedback(tf_hips.load(file)())
    n = CHUNK + 10
    x = np.ones(n, np.float32)
    old = np.arange(n, dtype=np.float32) % 50
    residual = old.copy()
    x[CHUNK] = 1000  # the second chunk alone is refused
    for _ in range(3):
        with pytest.raises(PacketError, match="contradicts"):
            native.encode(codec, x, Key(1, 0, 0), residual)
        np.testing.assert_array_equal(residual[CHUNK:], old[CHUNK:])
    assert residual[:4].tolist() == [0, 0, 0, 0]  # the first one was done
    assert residual[4] == old[4] + 3
    x[CHUNK] = 1
    native.encode(codec, x, Key(1, 0, 0), residual)
    np.testing.assert_array_equal(residual[CHUNK + 4 :], old[CHUNK + 4 :] + 1)
