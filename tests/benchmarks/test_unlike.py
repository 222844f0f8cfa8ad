# SPDX-License-Identifier: Apache-2.0
"""Optimizers on two machines, compared by what each has written."""

import numpy as np
import pytest

from benchmarks import unlike

pytestmark = pytest.mark.tf


def _trained(file, steps=2):
    told = ["--worker", str(file), "--only", "nesterov", "--steps", str(steps)]
    assert unlike.main(told) == 0
    return file


def test_machines_are_compared_by_their_files(tmp_path):
    one, other = (_trained(tmp_path / name) for name in ("a.npz", "b"))
    same = {"weights": "bit-identical", "slots": "bit-identical"}
    name = "SGD(momentum, nesterov)"
    assert unlike._compared(one, other) == [{"optimizer": name, **same}]

    with np.load(other) as file:
        found = dict(file)
    assert {key.split("/")[1] for key in found if "/" in key} == {"weights", "slots"}
    weights = found[f"{name}/weights/0"]
    assert 0.1 < weights.std() < 1.0, "steps have made them others"
    weights[:, ::2] *= np.float32(1 + 1e-6)
    with other.open("wb") as file:
        np.savez(file, **found)
    [row] = unlike._compared(one, other)
    gap, _, share = row["weights"].partition(" apart, ")
    assert 0 < float(gap) < 1e-5 and share.endswith("% of them")
    assert row["slots"] == "bit-identical"

    # Before a step is made.
    with pytest.raises(SystemExit, match=r"as many steps. Received: 2 in .*, --steps 300"):
        unlike.main(["--compare", str(one)])
    for text in ("no file", ""):
        (tmp_path / "odd").write_text(text)
        with pytest.raises(SystemExit, match="must be a file that --write has made"):
            unlike.main(["--compare", str(tmp_path / "odd")])
    with pytest.raises(SystemExit, match="must be a file that --write has made"):
        unlike.main(["--compare", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="--only must be in the name"):
        unlike.main(["--only", "sgdd"])


@pytest.mark.parametrize("told", [["--steps", "0"], ["--write", "a", "--compare", "b"]])
def test_what_makes_no_sense_is_refused(told, capsys):
    with pytest.raises(SystemExit):
        unlike.main(told)
    assert "must be at least 1" in (said := capsys.readouterr().err) or "not allowed with" in said
