# SPDX-License-Identifier: Apache-2.0
"""Rules with a state in servers that are killed: from the journal alone, and from snapshots."""

from pathlib import Path

import pytest

from tests.ps.served import FEEDBACK, MODEL, NOISE, SITES, Served, rounds, undisturbed
from tf_hips.errors import StateError
from tf_hips.ps import rules
from tf_hips.ps.disk import durable
from tf_hips.ps.disk.durable import Keeper
from tf_hips.ps.rules.steps import num_slots
from tf_hips.ps.session.members import Terms

TEXTS = (FEEDBACK, NOISE)
RULES = ("momentum(0.1, nesterov=True)", "adam(0.01)", "fedyogi", "diloco")


@pytest.mark.parametrize("rule", RULES)
def test_a_journal_gives_the_same_state(tmp_path: Path, rule: str) -> None:
    expected = undisturbed(5, TEXTS, rule)
    with Served(tmp_path, texts=TEXTS, rule=rule) as first:
        first.join()
        first.agree()
        assert first.train(0, 2) == expected[:3]
        first.deliver(rounds(3, 3)[:3])
        first.killed(tmp_path / "killed")
    with Served(tmp_path / "killed", texts=TEXTS, rule=rule) as second:
        assert second.train(3, 5) == expected[3:]


@pytest.mark.parametrize("rule", RULES)
def test_a_snapshot_holds_what_the_rule_keeps(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    expected = undisturbed(5, TEXTS, rule)
    with Served(tmp_path, texts=TEXTS, rule=rule) as first:
        first.join()
        first.agree()
        assert first.train(0, 2) == expected[:3]
        first.begin(3)
        first.session._recorder._writer.join(10)  # type: ignore[attr-defined]
        first.killed(tmp_path / "killed")
    [snapshot] = (tmp_path / "killed/state/job").glob("snapshot-*")
    assert snapshot.stat().st_size > 4 * MODEL.num_elements * (1 + num_slots(rules.parse(rule)))
    with Served(tmp_path / "killed", texts=TEXTS, rule=rule) as second:
        store = second.session.store
        assert store is not None
        kept = list(store.slots())
        assert {count for _, _, count, _ in kept} == {3}
        assert len(kept) == num_slots(rules.parse(rule)) * len(MODEL.chunks)
        assert second.train(3, 5) == expected[3:]


def test_weights_of_a_round_outlive_the_server(tmp_path: Path) -> None:
    results = []
    for is_killed in (False, True):
        base = tmp_path / str(is_killed)
        with Served(base, texts=TEXTS, rule="fedavg") as first:
            first.join()
            first.agree()
            for child, weight in ((0, 3.0), (1, 5.0)):
                first.session.begin_round(first.caller(child), 0, weight)
            first.deliver([(0, 0, 1)])
            first.killed(base / "killed")
            if not is_killed:
                results.append(first.train(0, 0))
        if is_killed:
            with Served(base / "killed", texts=TEXTS, rule="fedavg") as second:
                results.append(second.train(0, 0))
    assert results[0] == results[1] != [undisturbed(0, TEXTS, "fedavg")[0]]


def test_a_state_of_another_rule_is_refused(tmp_path: Path) -> None:
    def keeper(rule: str) -> Keeper:
        return Keeper(str(tmp_path), "job", Terms(SITES, None, None, 1 << 30, rule=rule), events)

    with Served(tmp_path / "x") as served:
        events = served.events
        first = keeper("adam")
        first.begin()
        first.close()
        second = keeper("sgd")
        with pytest.raises(
            StateError, match=r"a server with rule=sgd, as this one\. Received: rule"
        ):
            second.restore()
        second.close()
