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


def test_a_description_written_by_hand_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "log", rounds=12)
    file = tmp_path / "sites.yaml"
    file.write_text("# ours\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", str(file), "--calibrate", str(tmp_path / "log")])
    assert (ended.value.code, file.read_text()) == (2, "# ours\n")
    assert capsys.readouterr().err.endswith(
        f"remove the old one or name another. Received: {file}, which is there already\n"
    )


def write_workers(
    folder: Path, sites: dict[str, list[float]], *, member: str | None, **more: object
) -> None:
    """Logs of several workers of each site, which take so many seconds a step.

    Args:
        folder: of the logs.
        sites: seconds of each worker.
        member: what members are, "party" or "worker"; None: logs do not say.
        more: what events `esync` have beside times.
    """
    number = 0
    for child, (site, steps_s) in enumerate(sites.items()):
        for rank, step_s in enumerate(steps_s):
            events = log.EventLog(folder, run="r", role="worker", site=site, rank=rank)
            if rank == 0 and site != "local":
                events.write("joined", child=child)
            of = {} if member is None else {"member": child if member == "party" else number}
            for one in range(8):
                events.write(
                    "esync", number=one, steps=4, step_s=step_s, waited_s=0.1, **of, **more
                )
                events.write("meeting", number=one, local_steps=4, seconds=0.2)
            events.close()
            number += 1


PARTIES = {"north": [0.4, 0.5], "south": [0.1, 0.2]}
FOUR = ["north/0", "north/1", "south/0", "south/1"]


@pytest.mark.parametrize("member", ["party", None])
def test_workers_that_keep_step_are_one_site(member: str | None, tmp_path: Path) -> None:
    write_workers(tmp_path, PARTIES, member=member, assigned=4)
    groups = calibrated(tmp_path).groups
    assert [(group.name, group.count) for group in groups] == [("north", 1), ("south", 1)]
    assert [group.step_s for group in groups] == [0.4, 0.1]  # of rank 0


@pytest.mark.parametrize("member", ["worker", None])
def test_workers_that_ask_for_each_step_are_sites(member: str | None, tmp_path: Path) -> None:
    """With the paper's rule, which assigns nothing."""
    write_workers(tmp_path, PARTIES, member=member, assigned=None)
    groups = calibrated(tmp_path).groups
    assert [group.name for group in groups] == FOUR
    assert [group.step_s for group in groups] == [0.4, 0.5, 0.1, 0.2]


@pytest.mark.parametrize("member", ["worker", None])
def test_without_a_server_each_worker_is_a_site(member: str | None, tmp_path: Path) -> None:
    write_workers(tmp_path, {"local": [0.4, 0.1, 0.2]}, member=member, assigned=4)
    groups = calibrated(tmp_path).groups
    assert [group.name for group in groups] == ["local/0", "local/1", "local/2"]
    assert [group.step_s for group in groups] == [0.4, 0.1, 0.2]


def test_a_run_of_another_loop_does_not_count(tmp_path: Path) -> None:
    write(tmp_path)
    events = log.EventLog(tmp_path, run="fedavg", role="worker", site="slow", rank=1)
    events.write("model", num_elements=10**6)
    events.write("meeting", number=5, local_steps=9, seconds=90.0)
    events.close()
    found = calibrated(tmp_path)
    assert [group.name for group in found.groups] == ["fast", "slow"]
    assert found.model.parameters == 1234


def test_codecs_are_those_of_the_run(tmp_path: Path) -> None:
    write(tmp_path, rounds=12)
    alone = calibrated(tmp_path).model
    assert (alone.compression, alone.downlink) == ("fp32", "same")
    events = log.EventLog(tmp_path, run="r", role="worker", site="fast", rank=0)
    events.write("joined", child=0, compression="error_feedback(onebit)", downlink="fp16")
    events.close()
    of_run = calibrated(tmp_path).model
    assert (of_run.compression, of_run.downlink) == ("error_feedback(onebit)", "fp16")
    up, down = of_run.packets()
    assert up < down < 4 * 1234


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
