# SPDX-License-Identifier: Apache-2.0
"""Robust rules of a server: beside NumPy, with a child that lies, and what is refused."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.parties import SITES as TWO
from tests.ps.parties import Party, serving, together
from tests.ps.test_rules import FP32, MODEL, SITES, gradient, one_round, packet, store_of
from tests.support.certs import Certificates
from tf_hips import robust
from tf_hips.errors import ConfigError, NonFiniteError, ProtocolError, ToleranceError
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.ps.robust.tally import Winners
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.rules.whole import WholeRound
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.terms.quorum import DROP, Quorum
from tf_hips.robust.detox import Detox, draco

pytestmark = pytest.mark.heavy  # every rule with liars

Floats = npt.NDArray[np.float32]
ROBUST = ("median", "trimmed_mean", "meamed", "majority")


@pytest.mark.parametrize("name", ROBUST)
def test_a_chunk_is_what_the_rule_makes_of_its_rows(name: str) -> None:
    store = store_of(name)
    assert store.weigh(0, 1, 1e15)  # it may say so; nobody looks
    found = one_round(store, 0)
    for chunk in range(len(MODEL.chunks)):
        rows = np.stack([gradient(0, child, chunk) for child in range(len(SITES))])
        np.testing.assert_array_equal(found[chunk], robust.parse(name)(rows))
    assert not rules.parse(name).keeps_state


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("sent", [3e38, -1e20, 50.0])
def test_one_of_three_that_lies_is_not_heard(name: str, sent: float) -> None:
    store = store_of(name)
    store.begin(0)
    for chunk, where in enumerate(MODEL.chunks):
        store.add(0, 0, [(chunk, packet(gradient(0, 0, chunk)))])
        store.add(0, 1, [(chunk, packet(np.full(where.size, sent, np.float32)))])
        store.add(0, 2, [(chunk, packet(gradient(0, 2, chunk)))])
    for chunk, result in dict(store.results(0, 0)[1]).items():
        found = native.decode(FP32, result, MODEL.chunks[chunk].size)
        honest = np.stack([gradient(0, 0, chunk), gradient(0, 2, chunk)])
        if name == "majority":
            agreed = np.sign(honest[0]) == np.sign(honest[1])
            np.testing.assert_array_equal(found[agreed], np.sign(honest[0])[agreed])
            continue
        # Of three values one is left, or the two that are nearest to the middle one.
        assert (found <= honest.max(axis=0)).all() or name == "meamed"
        assert (found >= honest.min(axis=0)).all() or name == "meamed"
        assert np.abs(found).max() <= (60.0 if sent == 50.0 else np.abs(honest).max())


@pytest.mark.parametrize("name", ROBUST)
def test_an_absurd_norm_is_named_when_the_round_is_whole(name: str) -> None:
    told: list[tuple[int, dict[int, str]]] = []
    store = store_of(name, note_absurd=lambda number, found: told.append((number, dict(found))))
    one_round(store, 0)
    assert not told  # all are honest
    store.begin(1)
    last = len(MODEL.chunks) - 1
    for chunk, where in enumerate(MODEL.chunks):
        for child in range(len(SITES)):
            values = gradient(1, child, chunk)
            if child == 1 and chunk == 0:
                values = np.full(where.size, 1e7, np.float32)
            assert not told
            store.add(1, child, [(chunk, packet(values))])
    [(number, found)] = told
    assert number == 1 and [*found] == [1] and "times the median" in found[1]
    # Too large for a square of float32, in the chunk that comes first.
    store.begin(2)
    for chunk in reversed(range(last + 1)):
        for child in range(len(SITES)):
            values = gradient(2, child, chunk) * np.float32(
                1e30 if (child, chunk) == (2, last) else 1
            )
            store.add(2, child, [(chunk, packet(values))])
    assert told[1:] == [(2, {2: "a norm whose square float32 does not hold"})]


def test_a_child_that_sends_nan_is_refused_by_name() -> None:
    store = store_of("median")
    store.begin(0)
    bad = gradient(0, 1, 0).copy()
    bad[3] = np.nan
    with pytest.raises(NonFiniteError, match="`b`"):
        store.add(0, 1, [(0, packet(bad))])
    assert store.delivered(0, 1) == frozenset()


@pytest.mark.parametrize("text", ["median", "clip >> trimmed_mean", "majority"])
def test_one_that_goes_on_when_the_others_have_ended_is_not_the_result(text: str) -> None:
    """All could have a row; who has no data left says 0, and a liar does not."""
    rule = rules.parse(text)
    whole = rules.whole.rule_of(rule, SITES, 7, len(SITES))
    updates = Updates([chunk.size for chunk in MODEL.chunks], rule, None, whole, len(SITES))
    store = Store(MODEL, SITES, FP32, FP32, 7, updates=updates)
    for number, ended in enumerate(((), (0, 2))):
        store.begin(number)
        for child in ended:
            store.weigh(number, child, 0.0)
        told = pytest.raises(ToleranceError, match=r"f=auto bears 1 of 3, and none .*n=1.*`a`, `c`")
        with told if ended else contextlib.nullcontext():
            for child in range(len(SITES)):
                for chunk in range(len(MODEL.chunks)):
                    row = packet(gradient(number, child, chunk))
                    store.add(number, child, [(chunk, row)])
            assert not ended


@pytest.mark.parametrize(
    ("text", "quorum", "expected"),
    [("median", None, 5), ("median", 3, 3), ("krum", None, 5)],
)
def test_a_server_knows_how_many_could_have_a_row(
    certificates: Certificates,
    text: str,
    quorum: int | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def note(*terms: Any) -> Updates:
        made.append(terms[4])
        return Updates(*terms)

    monkeypatch.setattr("tf_hips.ps.session.state.Updates", note)
    sites = ("a", "b", "c", "d", "e")
    more = {} if quorum is None else {"quorum": quorum, "late": DROP}
    with serving(certificates, parties=sites, rule=text, **more) as server:
        members = [Party(server.address, site, certificates.party(site)) for site in sites]
        together(*(one.join for one in members))
        for one in members:
            one.client.close()
    assert made == [expected]


def test_one_group_of_three_that_has_a_row_is_not_the_result() -> None:
    rule = rules.parse("detox(r=3) >> median")
    assert rule.votes is not None and rule.robust is not None
    winners = Winners(rule.votes, rule.robust, tuple("abcdefghi"), 5)

    def decode(chunk: int, child: int, packet: Any, out: Floats) -> None:
        out[:] = 1.0

    def round_of(children: tuple[int, ...]) -> WholeRound:
        packets = {0: dict.fromkeys(children, np.zeros(0, np.uint8))}
        return WholeRound(0, children, packets, {0: 4}, decode, lambda chunk: None, {})

    assert winners.decide(round_of((0, 3, 6))).apply(0).tolist() == [1.0] * 4
    with pytest.raises(ToleranceError, match="f=auto bears 1 of 3, and none of those"):
        winners.decide(round_of((0,)))


def test_votes_are_their_text() -> None:
    common = {"r": 3, "then": robust.median()}
    # What nobody says is the same in a script and in a text.
    assert rules.resolve(Detox(**common)) == rules.parse("detox(r=3) >> median")
    for given in (
        {"vote": "tolerant"},
        {"vote": "tolerant", "epsilon": 0.0003},
        {"vote": "digest", "buckets": 5, "q": 2},
        {"fixed": True, "full": True},
    ):
        rule = rules.resolve(Detox(**common, **given))
        assert rules.parse(rule.text) == rule, rule.text
        assert repr(Detox(**common, **given)) == repr(rule) == rule.text
        for name, value in given.items():
            assert getattr(rule.votes, name) == pytest.approx(value)
    for given, message in (
        ({"vote": "tolerant", "epsilon": 0.9}, r"`epsilon` must be in \[1e-07, 0.5\]"),
        ({"buckets": 5000}, r"`buckets` must be in \[0, 1024\]"),
        ({"q": 5000}, r"`q` must be in \[0, 1024\]"),
    ):
        with pytest.raises(ValueError, match=message):
            rules.resolve(Detox(**common, **given))


def test_what_is_no_rule_is_named() -> None:
    for name in ("rule", "robust_global"):
        told = rf"`{name}` must be a rule .* did you forget the parentheses, `krum\(\)`\?"
        with pytest.raises(TypeError, match=told):
            rules.resolve(robust.krum, name)
    with pytest.raises(TypeError, match=r"`rule` must be a rule .*Received: rule=3$"):
        rules.resolve(3)
    with pytest.raises(TypeError, match=r"`then` must be a rule .* forget the parentheses"):
        Detox(3, robust.median)


def test_f_of_votes_is_of_all_children() -> None:
    def config(rule: str, parties: int) -> ServerConfig:
        return ServerConfig(tuple(f"p{i}" for i in range(parties)), insecure=True, rule=rule)

    # 3 of 13 children can spoil two of five groups: the one that is left, and another.
    assert config("detox(r=3, q=2) >> krum", 13).rule
    with pytest.raises(ConfigError, match=r"krum needs n >= 2 f \+ 3 rows. Received: n=5, f=2"):
        config("detox(r=3, q=3) >> krum", 13)
    with pytest.raises(ConfigError, match="r=5 must divide the workers"):
        config(rules.resolve(draco(2)).text, 13)
    assert config(rules.resolve(draco(2)).text, 15).rule


@pytest.mark.parametrize(
    ("text", "quorum", "told"),
    [
        ("krum", None, "3 of 9 children in a round"),
        ("krum(f=1) >> fedavg", None, "1 of 9 children in a round"),
        ("nnm >> trimmed_mean", 7, "3 of 7 children in a round"),
        ("nnm(f=2) >> mean", None, None),  # a liar's own row has itself in it
        ("arc(f=2) >> nnm(f=2) >> mean", None, "2 of 9 children in a round"),
        ("nnm(f=1) >> krum(f=3)", None, "1 of 9 children in a round"),
        ("bucketing(s=3) >> median", None, "1 of 9 children in a round"),
        ("detox(r=3, q=3) >> median", None, "1 of 3 groups"),
        ("detox(r=3) >> mean", None, None),
        ("median(f=1) >> fedbuff(k=4)", None, "1 of 4 rows in a step"),
        ("clip >> mean", None, None),
        ("sketched >> krum", None, None),
        ("momentum(0.1)", None, None),
        ("bulyan(f=2)", None, None),  # the server has refused to start
    ],
)
def test_how_many_a_rule_bears(text: str, quorum: int | None, told: str | None) -> None:
    least = None if quorum is None else Quorum(quorum, DROP)
    assert rules.robust.borne(text, 9, least) == told


def test_a_value_names_a_server_s_rule() -> None:
    assert rules.resolve(robust.median()) == rules.parse("median")
    assert rules.resolve(robust.trimmed_mean(f=2)).text == "trimmed_mean(f=2)"


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("krum(1)", "krum(f=1)"),
        ("nnm(f=1)>>median", "nnm(f=1) >> median(f=auto)"),
        ("krum >> mean", "krum(f=auto)"),
        ("median >> mean", "median(f=auto)"),
        ("sign-sgd", "majority(f=auto)"),
        ("multi-krum(f=2)", "multi_krum(f=2, m=auto)"),
        ("coord-median(f=1) >> sgd(0.1)", "median(f=1) >> sgd(learning_rate=0.1)"),
        ("mean >> mean", "mean"),
        ("krum(f=1) >> fedavg", "krum(f=1) >> fedavg(learning_rate=1)"),
        ("median(f=1) >> sgd(0.1)", "median(f=1) >> sgd(learning_rate=0.1)"),
    ],
)
def test_a_chain_is_its_text(text: str, canonical: str) -> None:
    rule = rules.parse(text)
    assert rule.text == canonical
    assert rules.parse(rule.text) == rule == rules.resolve(rule)
    if rule.name == "mean" and rule.before is not None:
        assert rules.resolve(robust.parse(text.removesuffix(" >> mean"))) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("krum(f=1) >> asgd", "must be a synchronous one that is not robust itself"),
        ("krum(f=1) >> momentum(asynchronous=True)", "must be a synchronous one"),
        ("krum(f=1) >> median", "that is not robust itself"),
        ("krum(f=1) >> fedavg >> fedavg", "there must be one rule"),
        ("fedavg >> krum(f=1)", "before another rule there must be a robust one"),
        ("nnm(f=1)", "a rule must stand at the end"),
        ("nnm(f=1) >> fedavg", "a rule must stand at the end"),
        ("krum(f=1) >> nnm(f=1)", "a rule must stand at the end"),
        ("krum(f=-3)", "`f` must be"),
        ("krum(f=-1)", r"`f` must be in \[0, 1024\]. Received: f=-1"),
        ("median(f=-1)", r"`f` must be in \[0, 1024\]. Received: f=-1"),
        ("multi_krum(f=1, m=0)", r"`m` must be in \[1, 1024\]"),
        # Nothing robust is dropped without a word.
        ("clip >> mean >> krum(f=1)", "one rule that is not robust itself"),
        ("median >> krum", "one rule that is not robust itself"),
        ("krum >> bulyan", "one rule that is not robust itself"),
        ("krum >> clip >> mean", "one rule that is not robust itself"),
        ("detox(r=3) >> mean >> krum", "one rule that is not robust itself"),
        ("sketched >> krum >> cge", "one rule that is not robust itself"),
        ("detox(r=3) >> detox(r=5) >> median", "`detox` must stand there once"),
        ("sketched >> sketched >> krum", "`sketched` must stand there once"),
        ("detox(r=3, q=2) >> krum(f=1)", r"Received: q=2 before krum\(f=1\)"),
        ("detox(r=3, q=2) >> mean", "Received: q=2 before mean"),
        ("krumm(f=1)", "did you mean krum\\?"),
        ("multi-krumm(f=1)", "did you mean multi-krum\\?"),
        ("clip >> detox(r=3) >> median", "`detox` must stand at the beginning"),
        ("krum >> sketched >> krum", "`sketched` must stand at the beginning"),
        ("krumm >> fedavg", "did you mean krum\\?"),
    ],
)
def test_a_chain_that_means_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rules.parse(text)


@pytest.mark.parametrize(
    ("rule", "more", "message"),
    [
        ("krum(f=2)", {}, r"krum needs n >= 2 f \+ 3 rows. Received: n=5, f=2"),
        ("multi_krum(f=1, m=3)", {}, r"needs 1 <= m <= n - f - 2. Received: m=3, n=5, f=1"),
        ("bucketing(s=2) >> krum(f=1)", {}, r"krum needs n >= 2 f \+ 3 rows. Received: n=3"),
        ("krum(f=1)", {"quorum": 4, "late": "drop"}, "cannot work with 4 children"),
        ("cge(f=1)", {"quorum": 4, "late": "next"}, "needs late=drop"),
        ("krum(f=1)", {"shard": (1, 2)}, r"decide together: each but shard 0 must be told.*`lead`"),
        ("krum(f=1)", {"compression": "dgc"}, "packets of all elements"),
        ("nnm(f=1) >> geometric_median", {"compression": "dgc"}, "packets of all elements"),
        ("krum(f=1)", {"compression": "error_feedback(hips2bit)"}, "below a threshold is sent as"),
    ],
)
def test_a_rule_of_whole_rows_that_cannot_work_is_refused(
    rule: str, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(parties=("a", "b", "c", "d", "e"), insecure=True, rule=rule, **more)


def test_rules_that_bound_each_row_take_sparse_packets() -> None:
    common = {"parties": ("a", "b", "c"), "insecure": True, "compression": "dgc"}
    for rule in ("geometric_median", "centred_clipping(f=1)", "clip >> mean"):
        assert ServerConfig(**common, rule=rule).rule == rule


def test_a_quorum_must_bear_the_rule_and_drop_what_is_late() -> None:
    common = {"parties": ("a", "b", "c", "d", "e"), "insecure": True, "rule": "trimmed_mean(f=2)"}
    with pytest.raises(ConfigError, match=r"n >= 2 f \+ 1 children in a round. Received: n=4, f=2"):
        ServerConfig(**common, quorum=4, late="drop")
    common["rule"] = "median"
    with pytest.raises(ConfigError, match="needs late=drop: what comes late is added"):
        ServerConfig(**common, quorum=4, late="next")
    assert ServerConfig(**common, quorum=4, late="drop").quorum == 4


@pytest.mark.parametrize("text", ["median", "krum(f=1)", "median >> fedbuff(k=1025)"])
def test_more_rows_than_passes_over_memory_take_are_refused_at_the_start(text: str) -> None:
    assert rules.robust.why_not(text, 1025, "fp32") == (
        f"Rule {rules.parse(text)} bears 1024 rows at most. Received: 1025"
    )
    assert rules.robust.why_not("median", 1024, "fp32") is None
    # A vote makes one row of three; fedbuff has k.
    assert rules.robust.why_not("detox(r=3) >> median", 3072, "fp32") is None
    assert "1024 rows" in str(rules.robust.why_not("detox(r=3) >> median", 3073, "fp32"))
    assert rules.robust.why_not("median >> fedbuff(k=1024)", 2000, "fp32") is None
    with pytest.raises(ToleranceError, match=r"bears 1024 rows at most. Received: n=1025"):
        robust.krum(f=1).check(1025)
    # Where it begins is one more.
    assert "bears 1023 rows" in str(rules.robust.why_not("centred_clipping(f=1)", 1024, "fp32"))
    assert rules.robust.why_not("centred_clipping(f=1)", 1023, "fp32") is None
    rows = np.ones((1024, 2), np.float32)
    for reference in (None, rows[0]):
        with pytest.raises(ToleranceError, match=r"bears 1023 rows at most. Received: n=1024"):
            robust.centred_clipping().run(rows, reference=reference)
    with pytest.raises(ToleranceError, match=r"bears 1024 rows at most. Received: n=1025"):
        robust.median().run(np.ones((1025, 2), np.float32))
    rows = rows[:1023]
    found = robust.centred_clipping(f=1).run(rows, reference=np.zeros(2, np.float32))
    np.testing.assert_allclose(found.vector, 1.0, rtol=1e-5)


def test_a_server_that_cannot_bear_its_rule_does_not_start() -> None:
    with pytest.raises(ConfigError, match=r"needs n >= 2 f \+ 1 children.*Received: n=2, f=1"):
        ServerConfig(parties=TWO, insecure=True, rule="trimmed_mean(f=1)")
    budget = "budget(max_sync_s=30,wan_mbps=10)"
    with pytest.raises(ConfigError, match=r"a budget may become topk\. .*Received: budget"):
        ServerConfig(parties=TWO, insecure=True, rule="median", compression=budget)
    with pytest.raises(ConfigError, match=r"packets of all elements.*topk"):
        ServerConfig(
            parties=TWO, insecure=True, rule="median", compression="error_feedback(topk(0.01))"
        )


@pytest.mark.parametrize(
    ("rule", "compression", "message"),
    [
        ("meamed(f=1)", "fp32", r"needs n >= 2 f \+ 1 children.*Received: n=2, f=1"),
        ("median", "dgc", "packets of all elements"),
    ],
)
def test_a_child_that_brings_what_cannot_be_is_refused(
    certificates: Certificates, rule: str, compression: str, message: str
) -> None:
    with serving(certificates) as server:
        one = Party(server.address, "a", certificates.party("a"))
        with pytest.raises(ProtocolError, match=message):
            one.client.join(compression, "same", 7, rule)
        one.client.close()


def test_four_children_over_sockets_one_of_whom_lies(certificates: Certificates) -> None:
    sites = ("a", "b", "c", "d")
    with serving(
        certificates, parties=sites, rule="trimmed_mean(f=1)", compression="fp32"
    ) as server:
        members = [
            Party(server.address, site, certificates.party(site), compression="fp32")
            for site in sites
        ]
        together(*(one.join for one in members))
        lie = np.full(72, -1e30, np.float32)
        first = 72 * 4 + 16

        def sent(one: Party, number: int) -> npt.NDArray[np.uint8]:
            packets = one.packets(number).copy()
            if one is members[2]:
                packets[:first] = native.encode(FP32, lie, native.Key(0, 0, 0))
            return packets

        for number in range(2):
            found = together(
                *(
                    lambda one=one, number=number: one.client.exchange(number, sent(one, number))
                    for one in members
                )
            )
            rows = [native.decode(FP32, sent(one, number)[:first], 72) for one in members]
            wanted = np.sort(np.stack(rows), axis=0)[1:3].sum(axis=0) / np.float32(2)
            for answer in found:
                np.testing.assert_array_equal(native.decode(FP32, answer[:first], 72), wanted)
        for one in members:
            one.client.close()


def test_the_page_says_how_far_a_server_goes() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/robust-servers.md").read_text(
        encoding="utf-8"
    )
    for name in ROBUST:
        assert f"`--rule {name}" in page
