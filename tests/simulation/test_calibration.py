# SPDX-License-Identifier: Apache-2.0
"""From logs of a run to a simulation of the same run."""

from pathlib import Path

import pytest

from tf_hips import cli, log, simulation
from tf_hips.errors import ConfigError
from tf_hips.simulation import calibrated
from tf_hips.simulation.description import Description


def write(folder: Path, run: str = "r", rounds: int = 8) -> None:
    """Logs of two parties of .5 s and .1 s a step whose meetings take .2 s beside waiting."""
    for site, step_s, steps, waited_s in (("slow", 0.5, 4, 0.0), ("fast", 0.1, 18, 0.2)):
        events = log.EventLog(folder, run=run, role="worker", site=site, rank=0)
        events.write("model", num_elements=1234, num_tensors=2, round=0)
        for number in range(rounds):
            # The first ones are of other lengths, and one round is odd.
            odd = 9.0 if number in (0, 1, 5) else 1.0
            events.write(
                "esync", number=number, steps=steps, step_s=step_s * odd, waited_s=waited_s
            )
            events.write("meeting", number=number, steps=steps, seconds=waited_s + 0.2 * odd)
        events.write("esync", number=rounds, steps=0, step_s=0.0, waited_s=3.0)
        events.write("meeting", number=rounds, steps=0, seconds=4.0)
        events.close()


def test_members_are_those_of_the_run(tmp_path: Path) -> None:
    write(tmp_path, rounds=12)
    found = calibrated(tmp_path)
    assert [group.name for group in found.groups] == ["fast", "slow"]
    assert [group.step_s for group in found.groups] == pytest.approx([0.1, 0.5])
    assert [group.overhead_ms for group in found.groups] == pytest.approx([200, 200])
    assert found.model.parameters == 1234


def test_the_command_writes_what_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "log", rounds=12)
    file = tmp_path / "sites.yaml"
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", str(file), "--calibrate", str(tmp_path / "log")])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"wrote {file}\n"
    description = Description.read(file)
    assert description == calibrated(tmp_path / "log")
    (result,) = simulation.simulate(description)
    assert result.idle_share < 0.05
    assert result.round_s == pytest.approx(0.2 + 3 * 0.5, rel=0.2)
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", str(file), "--calibrate", str(tmp_path), "--json", "-"])
    assert ended.value.code == 2


def test_logs_that_do_not_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="logs of one run with ESync"):
        calibrated(tmp_path)
    write(tmp_path / "few", rounds=4)
    with pytest.raises(ConfigError, match="at least 3 rounds of each member"):
        calibrated(tmp_path / "few")
    write(tmp_path / "two")
    write(tmp_path / "two", run="other")
    with pytest.raises(ConfigError, match="Received: 2 runs"):
        calibrated(tmp_path / "two")
