# SPDX-License-Identifier: Apache-2.0
"""Shards that rule on rounds together beside one server: bits, liars, kills. No sockets."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ps.joint import Shards, bring, merged, mutations, rule_on, tell
from tests.ps.test_restart import free_port
from tests.ps.test_rules_whole import (
    CLIPPING,
    FP32,
    MODEL,
    SEED,
    SITES,
    WHOLE,
    Floats,
    packet,
    rows_of,
    store_of,
)
from tests.support.eventually import eventually
from tf_hips import robust
from tf_hips.errors import ConfigError, NonFiniteError, ProtocolError, ToleranceError
from tf_hips.ops import compressor as compressors
from tf_hips.ps import rules
from tf_hips.ps.calls.joint import Follower, judge_of
from tf_hips.ps.client import link
from tf_hips.ps.disk import durable
from tf_hips.ps.robust.joint import JointStore
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.rules.joint import Report, Verdict, of_rows
from tf_hips.ps.rules.robust import OWN_REFUSAL
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.rules.whole import Distances, rule_of
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.terms.assignment import Shard
from tf_hips.ps.terms.model import Model
from tf_hips.ps.transport.wire import REFUSED_WEIGHT

pytestmark = pytest.mark.heavy  # many rounds of many shards

RULES = (*WHOLE, CLIPPING, f"{CLIPPING} >> fedadam(0.1)")
Rows = Sequence[Sequence[Floats]]


def stores_of(
    text: str, count: int, codec: str = "fp32", model: Model = MODEL, **more: Any
) -> list[JointStore]:
    rule = rules.parse(text)
    sizes = [chunk.size for chunk in model.chunks]
    found = []
    for index in range(count):
        whole = rule_of(rule, SITES, SEED)
        assert isinstance(whole, Distances)
        found.append(
            JointStore(
                model,
                SITES,
                compressors.parse(codec),
                FP32,
                SEED,
                joint=whole,
                shard=Shard(index, count),
                updates=Updates(sizes, rule, whole=whole),
                **more,
            )
        )
    return found


def deliver(
    stores: Sequence[Store],
    number: int,
    rows: Rows,
    weights: Sequence[Mapping[int, float]] | None = None,
) -> None:
    """One round to each of the stores, what children say that they stand for by store."""
    for place, store in enumerate(stores):
        store.begin(number)
        for child, weight in (weights[place] if weights is not None else {}).items():
            store.weigh(number, child, weight)
        for child, row in enumerate(rows):
            for chunk in store.chunks:
                store.add(number, child, [(chunk, packet(row[chunk]))])


def of_one(store: Store, number: int) -> list[bytes]:
    return [found.tobytes() for _, found in sorted(store.results(number, 0)[1])]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (CLIPPING, 5),
        (CLIPPING, 2),
        *((text, 3) for text in RULES),
        *(
            pytest.param(text, count, marks=pytest.mark.slow)
            for text in RULES
            for count in (2, 5)
            if text != CLIPPING
        ),
    ],
)
def test_shards_have_the_bits_of_one_server(text: str, count: int) -> None:
    """Of five shards the last has no chunk."""
    alone, stores = store_of(text), stores_of(text, count)
    seen = set()
    for number in range(3):
        deliver([alone], number, rows_of(number))
        deliver(stores, number, rows_of(number))
        assert merged(stores, number) == []  # complete, and not ruled on
        rule_on(stores, number)
        found = merged(stores, number)
        assert found == of_one(alone, number)
        seen.add(b"".join(found))
    assert len(seen) == 3


def test_all_shards_are_of_the_same_rows() -> None:
    # Of each chunk alone another row would be the best one; the liar lies in one shard's only.
    rows = rows_of(0)
    rows[2] = [one.copy() for one in rows[0]]
    rows[2][Shard(1, 3).chunks(MODEL)[0]] += 100.0
    stores = stores_of("krum(f=1)", 3)
    deliver(stores, 0, rows)
    verdict = rule_on(stores, 0)
    assert verdict.decision is not None and verdict.decision.selected is not None
    [chosen] = verdict.decision.selected
    assert chosen != 2
    assert merged(stores, 0) == [packet(one).tobytes() for one in rows[chosen]]


def test_all_shards_refuse_a_round_in_which_all_rows_are_refused() -> None:
    stores = stores_of("krum(f=1)", 2)
    said = dict.fromkeys(range(len(SITES)), REFUSED_WEIGHT)
    deliver(stores, 0, rows_of(0), (said, said))
    verdict = rule_on(stores, 0)
    assert verdict.decision is None and verdict.refusal is not None
    assert Verdict.from_bytes(verdict.to_bytes(), len(SITES)) == verdict
    for store in stores:
        [told] = store.refusals(0)
        assert isinstance(told, ToleranceError)
        assert all(f"site `{site}`: {OWN_REFUSAL}" in str(told) for site in SITES)


LIES = {
    "it sits the round out, it says to some": ({3: 0.0}, {3: 1.0}, {3: 5.0}),
    "it has refused its update, it says to some": ({3: REFUSED_WEIGHT}, {}, {3: 0.0}),
    "it stands for much, and for nothing elsewhere": ({3: 9.0}, {3: 0.0}, {3: REFUSED_WEIGHT}),
    "all but shard 0 hear that nobody takes part": (
        {},
        dict.fromkeys(range(len(SITES)), 0.0),
        dict.fromkeys(range(len(SITES)), 0.0),
    ),
    "only shard 0 hears that nobody takes part": (
        dict.fromkeys(range(len(SITES)), 0.0),
        {},
        {},
    ),
}


@pytest.mark.parametrize("text", ["krum(f=1)", CLIPPING])
@pytest.mark.parametrize("lie", LIES)
def test_who_takes_part_is_what_shard_0_has_heard(text: str, lie: str) -> None:
    heard: list[dict[int, str]] = []
    alone = store_of(text, refuse=lambda _, why: heard.append(dict(why)))
    told: list[dict[int, str]] = []
    stores = stores_of(text, 3, refuse=lambda _, why: told.append(dict(why)))
    for number in range(2):  # in the second all tell the truth: the reference is one, too
        weights = LIES[lie] if number == 0 else ({}, {}, {})
        deliver([alone], number, rows_of(number), weights[:1])
        deliver(stores, number, rows_of(number), weights)
        rule_on(stores, number)
        assert merged(stores, number) == of_one(alone, number)
    assert told == [why for why in heard for _ in stores]


def test_a_row_that_is_absurd_in_one_shard_is_refused_in_all() -> None:
    told: list[dict[int, str]] = []
    stores = stores_of("krum(f=1)", 3, refuse=lambda _, why: told.append(dict(why)))
    rows = rows_of(0)
    chunk = Shard(2, 3).chunks(MODEL)[0]
    rows[4] = [*rows[4]]
    rows[4][chunk] = rows[4][chunk] * np.float32(1e9)
    deliver(stores, 0, rows)
    verdict = rule_on(stores, 0)
    assert verdict.decision is not None
    [rejected] = verdict.decision.rejected
    assert rejected.row == 4 and "times the median" in rejected.reason
    assert told == [{4: rejected.reason}] * 3


def test_a_round_of_which_nothing_can_be_made_is_refused_at_all_shards() -> None:
    stores = stores_of("krum(f=1)", 2)
    rows = rows_of(0)
    for child in (1, 5):
        rows[child] = [one * np.float32(1e7) for one in rows[child]]
    deliver(stores, 0, rows)
    verdict = rule_on(stores, 0)
    assert verdict.decision is None and verdict.refusal is not None
    assert "bears f=1 bad rows. Received: 2 that were refused" in verdict.refusal
    assert "row 5 is site `f`" in verdict.refusal
    for store in stores:
        assert [str(error) for error in store.refusals(0)] == [verdict.refusal]
        assert store.is_closed(0)  # it cannot be done again: the run ends
        assert store.results(0, 0) == (0, [])


def test_who_says_that_it_has_no_row_is_named_as_by_one_server() -> None:
    text, weights = "bulyan(f=1)", {2: 0.0}
    alone = store_of(text)
    with pytest.raises(ToleranceError) as caught:
        deliver([alone], 0, rows_of(0), [weights])
    assert str(caught.value).endswith("(with weight 0 took no part: `c`)")
    stores = stores_of(text, 3)
    deliver(stores, 0, rows_of(0), [weights, {}, {3: 0.0}])  # what shard 0 has heard counts
    assert rule_on(stores, 0).refusal == str(caught.value)


def test_a_reference_that_is_too_long_is_a_refusal() -> None:
    stores = stores_of(CLIPPING, 2)
    deliver(stores, 0, rows_of(0))
    rule_on(stores, 0)
    for store in stores:
        for _, _, _, values in store.slots():
            values.fill(1e18)
    deliver(stores, 1, rows_of(1))
    refusal = rule_on(stores, 1).refusal
    assert refusal is not None and "the reference must be finite" in refusal
    for store in stores:
        [error] = store.refusals(1)
        assert (type(error), str(error)) == (NonFiniteError, refusal)


def test_the_first_report_and_the_first_verdict_count() -> None:
    alone, stores = store_of("krum(f=1)"), stores_of("krum(f=1)", 2)
    deliver([alone], 0, rows_of(0))
    deliver(stores, 0, rows_of(0))
    bring(stores, 0, [1])
    assert stores[0].lacks(0) == [0]
    other = stores[1].report()
    stores[0].take(0, Report(other.shard, other.agreed, of_rows(other.measures, [6, 5])))
    assert stores[0].awaited() == "the measures of shard 0 of 2 have not come"
    assert stores[1].awaited() == "shard 0 has not ruled on it"
    with pytest.raises(ProtocolError, match="must be measured by all shards"):
        stores[0].judge()
    bring(stores, 0, [0])
    verdict = stores[0].judge()
    stores[0].rule(0, verdict)
    stores[0].rule(0, Verdict(refusal="another one"))
    bring(stores, 0, [1])  # again, as of a shard that was killed
    tell(stores, 0, [1])
    assert merged(stores, 0) == of_one(alone, 0)
    assert stores[0].awaited() == "" and stores[0].unruled is None
    with pytest.raises(ProtocolError, match="must be complete before"):
        stores[0].report()


def test_reports_of_other_runs_and_rounds_are_refused() -> None:
    stores = stores_of("krum(f=1)", 2)
    for number in (0, 1):
        deliver(stores, number, rows_of(number))
        if number == 0:
            rule_on(stores, 0)
    report = stores[1].report()
    others = [
        *stores_of("krum(f=1)", 3)[1:2],
        *stores_of("krum(f=0)", 2)[1:],
        *stores_of("krum(f=1)", 2, "fp16")[1:],
        *stores_of("krum(f=1)", 2, first_round=1)[1:],
        *stores_of("krum(f=1)", 2, model=Model(((5, 3), (), (70,), (9,))))[1:],
    ]
    for other in others:
        assert other.agreed != report.agreed
        with pytest.raises(ProtocolError, match=r"must be of one run.*Received: shard 1 of [23]"):
            stores[0].take(1, Report(other.shard, other.agreed, report.measures))
    for number in (3, 7):
        with pytest.raises(
            ProtocolError, match=f"must be 1 or 2. Received: {number} from shard 1 of 2"
        ):
            stores[0].take(number, report)
    stores[0].take(0, report)  # it was ruled on: what comes is of no use
    stores[0].take(2, report)  # one that children have begun elsewhere
    wrong = of_rows(report.measures, range(len(SITES) - 1))
    stores[0].take(1, Report(report.shard, report.agreed, wrong))
    bring(stores, 1, [0])
    with pytest.raises(ProtocolError, match="must measure the same rows"):
        stores[0].judge()


def test_measures_of_some_rows_are_those_of_their_rows() -> None:
    rule = robust.parse("krum(f=1)")
    rows = [np.concatenate(row) for row in rows_of(0)]
    for chosen in ([0, 1, 2, 3, 4, 5, 6], [1, 4, 6], [2]):
        found, wanted = (
            of_rows(rule.measure(rows), chosen),
            rule.measure([rows[place] for place in chosen]),
        )
        np.testing.assert_array_equal(found.squares, wanted.squares)
        np.testing.assert_array_equal(found.pairs, wanted.pairs)
    alone = of_rows(robust.parse("cge(f=1)").measure(rows), [0, 3])
    assert (alone.squares.shape, alone.pairs.shape) == ((1, 2), (1, 0))


@pytest.mark.parametrize("text", ["krum(f=1)", "nnm(f=2) >> trimmed_mean(f=2)", CLIPPING])
def test_what_travels_is_read_as_it_was_or_refused(text: str) -> None:
    stores = stores_of(text, 2)
    children = len(SITES)
    for number in range(2):
        deliver(stores, number, rows_of(number), ({3: REFUSED_WEIGHT}, {}))
        report = stores[1].report().to_bytes()
        verdict = rule_on(stores, number)
    told = verdict.to_bytes()
    assert Report.from_bytes(report, MODEL, children).to_bytes() == report
    again = Verdict.from_bytes(told, children)
    assert again.to_bytes() == told
    assert again.missing == verdict.missing == {3: OWN_REFUSAL}
    refused = 0
    for payload, read in ((report, _read_report), (told, _read_verdict)):
        for other in mutations(payload):
            try:
                found = read(other)
            except ProtocolError:
                refused += 1
            else:  # a number or a text is another one, and nothing else
                assert len(found.to_bytes()) == len(other) or b"\\u" in found.to_bytes()
    assert refused > 50
    for fields in ("krum", "{}", "[]"):
        with pytest.raises(ProtocolError):
            _read_verdict(len(fields).to_bytes(4, "little") + fields.encode())
    nobody = Verdict()
    assert Verdict.from_bytes(nobody.to_bytes(), children) == nobody
    unfit = Verdict(refusal="the reference must be finite", has_too_few=False)
    assert Verdict.from_bytes(unfit.to_bytes(), children) == unfit


def _read_report(payload: bytes) -> Report:
    return Report.from_bytes(payload, MODEL, len(SITES))


def _read_verdict(payload: bytes) -> Verdict:
    return Verdict.from_bytes(payload, len(SITES))


KILLED = ("centred_clipping(f=1, tau=0.5) >> fedavgm(0.5)", "error_feedback(onebit)")
DOWN = "error_feedback(terngrad(bitwidth=2))"


@pytest.mark.parametrize("is_eager", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_who_is_killed_at_any_point_of_a_round_does_as_it_would_have(
    tmp_path: Path, is_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a round after two that nothing disturbs; with a snapshot in each round, too."""
    if is_eager:
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    rule, up = KILLED
    with Shards(tmp_path / "calm", 3, rule, up, DOWN) as calm:
        expected = calm.train(0, 3)
    with Shards(tmp_path / "killed", 3, rule, up, DOWN) as run:
        assert run.train(0, 1) == expected[:2]
        for shard in range(3):
            run.deliver(2, shard, children=range(3))
            run.kill(shard)  # before the round is complete
            run.deliver(2, shard)
        run.kill(1)  # complete, and not measured
        assert run.stores[1].unruled == 2
        bring(run.stores, 2, [1, 2])
        run.kill(0)  # it has reports, which come again
        assert run.stores[0].lacks(2) == [0, 1, 2]
        bring(run.stores, 2, range(3))
        run.stores[0].rule(2, run.stores[0].judge())
        run.kill(0)  # it has ruled, and nobody else knows
        tell(run.stores, 2, [1])
        run.kill(1)  # it has merged
        run.kill(2)  # it has not heard yet, and asks once more
        bring(run.stores, 2, [2])
        tell(run.stores, 2, [2])
        assert run.results(2) == expected[2]
        # The next round has begun at shard 0, when another one has lost what it was told.
        run.deliver(3, 0, children=[0])
        run.kill(0)
        found = run.stores[0].verdict(2)
        assert found is not None and found.decision is not None
        assert run.round(3) == expected[3]


def test_a_verdict_is_told_when_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Shards(tmp_path, 2, "krum(f=1)", "fp32", "fp32") as run:
        for shard in range(2):
            run.deliver(0, shard)
        bring(run.stores, 0, range(2))
        lead = run.stores[0]
        before = lead._recorder.durable
        monkeypatch.setattr(type(lead._recorder), "durable", before)
        lead.rule(0, lead.judge())
        assert lead.verdict(0) is None and lead.results(0, 0) == (0, [])
        monkeypatch.undo()
        run.sessions[0].settle()
        assert lead.verdict(0) is not None and len(lead.results(0, 0)[1]) == len(lead.chunks)


@pytest.mark.parametrize(
    ("is_restored", "tried"), [(True, "Tried for 1 s"), (False, "Tried for 0")]
)
def test_a_lead_of_a_run_that_goes_on_is_looked_for_as_one_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_restored: bool, tried: str
) -> None:
    monkeypatch.setattr(link, "_FIRST_CONTACT_S", 0.0)
    with Shards(tmp_path, 2, "krum(f=1)", "fp32", "fp32") as run:
        session = run.sessions[1]
        nobody = f"127.0.0.1:{free_port()}"
        config = ServerConfig(
            parties=tuple("abcde"),
            insecure=True,
            shard=(1, 2),
            lead=nobody,
            round_timeout_s=1.0,
        )
        found = judge_of(config, session)
        assert isinstance(found, Follower)
        found._link._has_connected = is_restored and found._link._has_connected
        found.start()
        eventually(lambda: session.is_over, 20.0, changed=session.changed)
        found.close()
        assert f"the lead, cannot be asked. Moving: Nothing listens at {nobody}" in str(
            session.ended
        )
        assert tried in str(session.ended)


def test_what_shards_cannot_do_together_is_refused() -> None:
    common: dict[str, Any] = {"parties": tuple("abcde"), "insecure": True, "rule": "krum(f=1)"}
    lead = "127.0.0.1:7070"
    assert ServerConfig(**common, shard=(0, 2)).lead is None
    assert ServerConfig(**common, shard=(1, 2), lead=lead).lead == lead
    for more, message in (
        ({"shard": (1, 2)}, r"`lead` \(--lead HOST:PORT\). Received: shard 1 of 2 without it"),
        ({"shard": (0, 2), "quorum": 4, "late": "drop"}, "waits for all children: no `quorum`"),
        ({"shard": (0, 2), "lead": lead}, "for the shards from 1 on"),
        ({"lead": lead}, "for the shards from 1 on"),
        ({"shard": (1, 2), "lead": "nowhere"}, "host:port|HOST:PORT"),
        ({"shard": (1, 2), "lead": "hub.example:7070"}, "`insecure` is for loopback only"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServerConfig(**common, **more)
    with pytest.raises(ConfigError, match="one server must have all"):
        ServerConfig(
            parties=tuple("abcdef"),
            insecure=True,
            rule="detox(r=3) >> median",
            shard=(1, 2),
            lead=lead,
        )


def test_shards_know_how_many_could_have_a_row() -> None:
    whole = rule_of(rules.parse("krum"), SITES, SEED, len(SITES))
    assert isinstance(whole, Distances)
    store = JointStore(
        *(MODEL, SITES, FP32, FP32, SEED),
        joint=whole,
        shard=Shard(0, 1),
        updates=Updates([chunk.size for chunk in MODEL.chunks], rules.parse("krum"), whole=whole),
    )
    deliver([store], 0, rows_of(0), [dict.fromkeys(range(1, len(SITES)), 0.0)])
    store.take(0, store.report())
    told = store.judge().refusal
    assert told is not None and "none of those that have come. Received: n=1" in told
