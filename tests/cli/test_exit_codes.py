# SPDX-License-Identifier: Apache-2.0
"""A script that ends with an exit code of its own has failed: it is started again, or ends the run
for all.
"""

from pathlib import Path

import pytest

from tests.cli import test_max_restarts
from tests.support import disturbed

LEAVES = """
import sys
import tf_hips

strategy = tf_hips.HierarchicalPS()
if strategy.global_rank == 1:
    sys.exit("no more disk")
strategy.gather_objects("x", "names")
"""


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(330)
def test_a_script_that_exits_is_started_again(
    tmp_path: Path,
) -> None:
    script = test_max_restarts.TRAIN
    # The server is left alone.
    for before, after in (
        ('raise RuntimeError("this worker gives up")', "sys.exit(3)"),
        ('once("server")', "False"),
    ):
        assert script.count(before) == 1
        script = script.replace(before, after)
    undisturbed, _ = disturbed.train(tmp_path / "undisturbed", script, "undisturbed", parties=1)
    ends, printed = disturbed.train(
        *(tmp_path / "disturbed", script, "disturbed"), parties=1, options=("--max-restarts", "1")
    )
    assert ends == undisturbed
    for text in (
        "party0/worker0 failed (exit code 3); party0 starts again (1 of 1)",
        "Site party0 has come back as another process",
    ):
        assert text in printed


@pytest.mark.tf
@pytest.mark.timeout(120)
def test_others_hear_that_a_script_has_exited(tmp_path: Path) -> None:
    code, printed = disturbed.launch(tmp_path, LEAVES, timeout_s=110)
    assert code == 1
    assert "Site `party1` left the run: SystemExit: no more disk" in printed
    assert "tf-hips: party1/worker0 failed first (exit code 1)" in printed
