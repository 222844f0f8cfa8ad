# SPDX-License-Identifier: Apache-2.0
"""Whose rows rules have chosen is counted and told, by every kind of server that has such rules."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ps import test_buffered as buffered
from tests.ps import test_joint as joint
from tests.ps.joint import rule_on
from tests.ps.quorums import Run
from tests.ps.test_sketched import SHAPES, children, one_round, rows_of, tree
from tests.ps.test_votes import one_round as one_vote
from tests.ps.trees import addresses_of, leaves_of, serving_tree
from tests.ps.voters import voting
from tests.support.certs import Certificates
from tf_hips import log, robust
from tf_hips.ps import rules
from tf_hips.ps.robust.choices import Choices
from tf_hips.ps.transport.wire import REFUSED_WEIGHT
from tf_hips.robust.detox import Detox


def counts_of(told: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {one["site"]: (one["chosen"], one["chosen_of"]) for one in told["children"]}


def test_rows_are_counted_and_told_by_name() -> None:
    choices, events = Choices(("a", "b", "c")), []
    choices.tell = lambda event, **fields: events.append((event, fields))
    choices.note(4, (1,), (0, 1, 2))
    choices.note(5, (0, 1), (0, 1), (["a/w1", "b/w2"], ["a/w1", "a/w2", "b/w2"]))
    with choices.quiet():
        choices.note(5, (1,), (0, 1, 2))
    assert choices.counts == [
        {"chosen": 1, "chosen_of": 2},
        {"chosen": 2, "chosen_of": 2},
        {"chosen": 0, "chosen_of": 1},
    ]
    assert events == [
        ("rows_chosen", {"round": 4, "sites": ["b"], "among": ["a", "b", "c"]}),
        (
            "rows_chosen",
            {"round": 5, "sites": ["a/w1", "b/w2"], "among": ["a/w1", "a/w2", "b/w2"]},
        ),
    ]


def test_a_restored_server_does_not_tell_again_whom_it_has_chosen(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    with Run(None, base=first, rule="cge(f=1)").begin() as run:
        run.session._state.choices.tell = run._tell
        run.deliver(0, 0)
        run.deliver(1, 0, weight=REFUSED_WEIGHT)  # has no row
        run.deliver(2, 0)
        run.rounds(1, 1)
        told = run.told("rows_chosen")
        assert [one["round"] for one in told] == [0, 1]
        assert [one["among"] for one in told] == [["a", "c"], ["a", "b", "c"]]
        assert [len(one["sites"]) for one in told] == [2, 2]
        found = counts_of(run.session.describe())
        assert sum(chosen for chosen, _ in found.values()) == 4
        assert [of for _, of in found.values()] == [2, 1, 2]
        second = run.killed(tmp_path / "second")
    with Run(None, base=second, rule="cge(f=1)") as run:
        assert {*counts_of(run.session.describe()).values()} == {(0, 0)}
        run.session._state.choices.tell = run._tell
        run.rounds(2, 2)
        assert [one["round"] for one in run.told("rows_chosen")] == [2]


@pytest.mark.parametrize("rule", ["geometric_median(f=1)", "median(f=1)", "mean"])
def test_a_rule_that_chooses_no_rows_tells_nothing(rule: str) -> None:
    with Run(None, rule=rule).begin() as run:
        run.session._state.choices.tell = run._tell
        run.rounds(0, 0)
        assert not run.told("rows_chosen")
        assert {*counts_of(run.session.describe()).values()} == {(0, 0)}


def test_all_shards_tell_the_same() -> None:
    heard: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    stores = joint.stores_of("krum(f=1)", 3, choose=lambda *told: heard.append(told))
    rows = joint.rows_of(0)
    joint.deliver(stores, 0, rows)
    rule_on(stores, 0)
    whole = [np.concatenate(row) for row in rows]
    selected = robust.krum(f=1).run(whole).selected
    assert heard == [(0, selected, tuple(range(len(rows))))] * 3


def test_steps_of_a_buffer_tell() -> None:
    heard: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    store = buffered.store_of("krum(f=1)", choose=lambda *told: heard.append(told))
    for child in range(1, 6):
        buffered.send(store, child, 0)
    rows = [buffered.row_of(child, 0) for child in range(1, 6)]
    [row] = robust.krum(f=1).run(rows).selected or ()
    assert heard == [(0, (row + 1,), (1, 2, 3, 4, 5))]


@pytest.mark.heavy
def test_sketches_choose_leaves_and_both_levels_say_so(
    certificates: Certificates, tmp_path: Path
) -> None:
    node = tree()
    settings = {"rule": "sketched(k=512) >> multi_krum(f=1, m=2)", "log_dir": str(tmp_path)}
    with (
        serving_tree(certificates, node, **settings) as servers,
        leaves_of(certificates, node, addresses_of(servers), shapes=SHAPES) as members,
    ):
        said = [1.0, 1.0, 1.0, 1.0, 0.0, 1.0]  # east1 sits it out
        one_round(members, 0, rows_of(0, 6), said)
        one_round(members, 1, rows_of(1, 6), [0.0] * 6)  # nothing to choose from
        assert [one["chosen_of"] for one in children(servers[""]).values()] == [1, 1]
        below = {
            f"{party}/{leaf}": (one["chosen"], one["chosen_of"])
            for party in ("west", "east")
            for leaf, one in children(servers[party]).items()
        }
        parties = {path.partition("/")[0] for path, (chosen, _) in below.items() if chosen}
        for party, one in children(servers[""]).items():
            assert one["chosen"] == (party in parties)
    assert sum(chosen for chosen, _ in below.values()) == 2
    assert {path for path, (_, of) in below.items() if not of} == {"east/east1"}
    events = [one for one in log.read_events(tmp_path) if one["event"] == "rows_chosen"]
    [told] = [one for one in events if one["role"] == "global-server"]
    assert {*told["sites"]} == {path for path, (chosen, _) in below.items() if chosen}
    assert {*told["among"]} == {path for path, (_, of) in below.items() if of}
    assert len(events) == 3


@pytest.mark.heavy
def test_a_chosen_vote_is_that_of_all_who_agreed_on_it(tmp_path: Path) -> None:
    chosen = Detox(3, robust.krum(f=0), "digest", fixed=True)
    with voting(rules.resolve(chosen).text, {}, log_dir=str(tmp_path)) as (server, members):
        one_vote(members, 0)
        found = counts_of(server.snapshot())
    [told] = [one for one in log.read_events(tmp_path) if one["event"] == "rows_chosen"]
    assert {*told["sites"]} == {site for site, (times, _) in found.items() if times}
    assert len(told["sites"]) in (1, 3)  # the last group has one member
    assert [of for _, of in found.values()] == [1] * 7
