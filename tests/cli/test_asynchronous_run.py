# SPDX-License-Identifier: Apache-2.0
"""`tf-hips run --rule` with parties apart: workers and the server are killed, both parties end."""

from pathlib import Path

import pytest

from tests.cli import test_max_restarts
from tests.cli.test_max_restarts import train
from tf_hips import log

RULE = "momentum(learning_rate=0.01, asynchronous=True)"


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_parties_apart_come_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = test_max_restarts.TRAIN
    assert "keras.optimizers.Adam(0.01)" in script
    plain = script.replace("keras.optimizers.Adam(0.01)", "keras.optimizers.SGD(1.0)")
    monkeypatch.setattr(test_max_restarts, "TRAIN", plain)
    ends, printed = train(tmp_path / "run", "disturbed", 2, "--max-restarts", "2", "--rule", RULE)
    assert len(ends) == 2  # parties have weights of their own
    for text in (
        "party1/worker0 failed (killed by SIGKILL); party1 starts again (1 of 2)",
        "party0/worker0 failed (exit code 1); party0 starts again (1 of 2)",
        "server failed (killed by SIGKILL); server starts again (1 of 2)",
        "Site party1 has come back as another process",
    ):
        assert text in printed
    events = log.read_events(tmp_path / "run" / "logs")
    rounds = {
        site: {one["round"] for one in events if one["event"] == "round" and one["site"] == site}
        for site in ("party0", "party1")
    }
    assert rounds == {site: set(range(32)) for site in ("party0", "party1")}
    assert sum(one["event"] == "restored" for one in events) == 1
