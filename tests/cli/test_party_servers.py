# SPDX-License-Identifier: Apache-2.0
"""`tf-hips run --intra ps`: a server for each party, and workers that are single processes."""

import json
from pathlib import Path

import pytest

from tests.support import launched, ranks
from tf_hips import log
from tf_hips.cli import arguments, party_servers, run

TRAIN = """
import json, pathlib, sys
import keras, numpy as np
import tf_hips

strategy = tf_hips.HierarchicalPS("error_feedback(onebit)", local_compression="fp16")
keras.utils.set_random_seed(strategy.global_rank)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(256), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=2)
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
rows = tf_hips.shard((x, x[:, :1]), batch_size=4)
history = model.fit(rows, epochs=2, verbose=0)
told = {
    "fingerprint": tf_hips.fingerprint(model),
    "loss": history.history["loss"],
    "replicas": strategy.num_replicas_in_sync,
}
(pathlib.Path(sys.argv[1]) / f"{strategy.global_rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.tf
@pytest.mark.timeout(120)
@pytest.mark.parametrize("parties", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_train_through_the_servers_of_their_parties(tmp_path: Path, parties: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    logs = tmp_path / "logs"
    line = f"run --parties {parties} --workers 2 --intra ps --log-dir {logs} {script} {tmp_path}"
    done = launched.run(line.split(), timeout=110, zygote=ranks.the_zygote())
    assert done.returncode == 0, done.stderr + done.stdout
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2 * parties)]
    assert all(one == told[0] for one in told)
    assert told[0]["replicas"] == 2 * parties
    events = log.read_events(logs)
    joined = {one["site"]: one for one in events if one["event"] == "joined_above"}
    assert sorted(joined) == ["party0", "party1"][:parties]
    leaves = ["party0-0", "party0-1", "party1-0", "party1-1"][: 2 * parties]
    assert all(one["parties"] == leaves for one in joined.values())
    assert all(one["compression"] == "error_feedback(onebit)" for one in joined.values())
    rounds = [one for one in events if one["event"] == "round" and one["role"] == "server"]
    # The leaves send halves, 2 bytes an element; what comes down are bits.
    assert all(one["received_bytes"] > 3 * one["sent_bytes"] > 0 for one in rounds)
    assert not [one for one in events if one.get("reason")]


SKETCHED = """
import json, pathlib, sys
import keras, numpy as np
import tf_hips
from tf_hips import robust

strategy = tf_hips.HierarchicalPS(
    intra="ps", robust_global=robust.sketched(robust.krum(f=1), k=64)
)
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
x = np.random.default_rng(0).normal(size=(240, 8)).astype("float32")
y = x @ np.arange(8, dtype="float32")[:, None]
y = y if strategy.global_rank != 4 else -100 * y
rows = tf_hips.shard((x, y), batch_size=8)
model.fit(rows, epochs=16, verbose=0)
told = {"weights": model.get_weights()[0][:, 0].tolist(), "rule": strategy.rule.text}
(pathlib.Path(sys.argv[1]) / f"{strategy.global_rank}.json").write_text(json.dumps(told))
"""


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_rule_over_the_workers_of_all_parties(tmp_path: Path) -> None:
    """One of six trains on other labels, and the model is that of the others."""
    script = tmp_path / "train.py"
    script.write_text(SKETCHED)
    done = launched.run(
        [
            *("run", "--parties", "2", "--workers", "3", "--intra", "ps"),
            *("--rule", "sketched(k=64) >> krum(f=1)", str(script), str(tmp_path)),
        ],
        timeout=230,
        zygote=ranks.the_zygote(),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(6)]
    assert all(one == told[0] for one in told)
    assert told[0]["rule"] == "sketched(k=64) >> krum(f=1)"
    assert all(abs(found - k) < 0.2 for k, found in enumerate(told[0]["weights"])), told[0]


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_parties_keep_step_inside_and_not_with_each_other(tmp_path: Path) -> None:
    """An asynchronous rule of the global server: HiPS's dist_async."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("keras.optimizers.Adam(0.01)", "keras.optimizers.SGD(1.0)"))
    done = launched.run(
        [
            *("run", "--parties", "2", "--workers", "2", "--intra", "ps"),
            *("--rule", "asgd(learning_rate=0.02)", str(script), str(tmp_path)),
        ],
        timeout=170,
        zygote=ranks.the_zygote(),
    )
    assert done.returncode == 0, done.stderr + done.stdout
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    prints = [one["fingerprint"] for one in told]
    assert prints[0] == prints[1]
    assert prints[2] == prints[3]
    assert all(one["replicas"] == 1 for one in told)
    assert all(one["loss"][-1] < one["loss"][0] for one in told)


def test_servers_of_parties_are_told_their_robust_rule(tmp_path: Path) -> None:
    import argparse
    from typing import Any

    from tf_hips import config
    from tf_hips.cli import party_servers

    commands: list[list[str]] = []

    class FakeJob:
        def start_group(self, role: str, begin: Any, restarts: int, only_killed: bool) -> None:
            begin(0)

        def start(self, role: str, command: list[str], *rest: Any, **more: Any) -> None:
            commands.append(command)

        def wait_for_file(self, file: Path, seconds: float) -> str:
            return "127.0.0.1:1"

    identity = config.Tls("a", "b", "c")
    uplink = config.Uplink("127.0.0.1:2", "party0", None)
    below = party_servers.PartyServer(uplink, identity, {"party0-0": identity})
    votes = "detox(r=3) >> median"
    for text, told in (
        ("krum(f=1)", ["--rule", "krum(f=1)"]),
        (votes, ["--rule", votes]),
        (None, []),
    ):
        options = argparse.Namespace(robust_local=text, deadline=None, max_restarts=0)
        job: Any = FakeJob()
        assert party_servers.start(job, options, config.Run(), [below], {}, tmp_path)
        command = commands.pop()
        at = command.index("--rule") if "--rule" in command else len(command)
        assert command[at : at + 2] == told


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_train_through_robust_servers_of_their_parties(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace('="fp16")', '="fp16", robust_local="krum(0)")'))
    logs = tmp_path / "logs"
    line = "run --parties 1 --workers 3 --intra ps --rule mean --robust-local krum(f=0) --log-dir"
    words = [*line.split(), str(logs), str(script), str(tmp_path)]
    done = launched.run(words, timeout=170, zygote=ranks.the_zygote())
    assert done.returncode == 0, done.stderr + done.stdout
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert all(one == told[0] for one in told)
    [joined] = [one for one in log.read_events(logs) if one["event"] == "joined_above"]
    assert joined["rule"] == "mean"


def test_what_goes_up_is_not_what_the_rule_of_a_party_looks_at() -> None:
    parser = arguments.Parser(prog="tf-hips")
    run.add(parser.add_subparsers(dest="command"))
    words = ["run", "--intra=ps", "--workers=3", "--compression=topk", "--robust-local=median"]
    party_servers.check(parser.parse_args([*words, "--rule=mean", "train.py"]))
    # The rule above looks at it.
    options = parser.parse_args([*words, "--rule=median", "train.py"])
    with pytest.raises(arguments.UsageError, match=r"^`--rule`: .* needs packets of all elements"):
        party_servers.check(options)
