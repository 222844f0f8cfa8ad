# SPDX-License-Identifier: Apache-2.0
"""A server whose children vote in groups: results of `tf_hips.robust.detox`, and who lies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ps.parties import together
from tests.ps.test_restart import Later
from tests.ps.voters import (
    SITES,
    Behaviour,
    Floats,
    Voter,
    children,
    expected,
    gradient,
    one_round,
    rows_of,
    secret_of,
    voting,
)
from tf_hips import log, robust
from tf_hips.config import Uplink
from tf_hips.errors import ConfigError, PeerError, ProtocolError, ToleranceError
from tf_hips.ps import rules
from tf_hips.ps.client import vote as asked
from tf_hips.ps.client.client import Client
from tf_hips.ps.client.passage import Passage
from tf_hips.ps.client.vote import Ballot
from tf_hips.ps.robust import replicas
from tf_hips.ps.server.server import Server, ServerConfig
from tf_hips.robust import detox
from tf_hips.robust.detox import Detox

pytestmark = pytest.mark.heavy  # many rounds of many children

LOOPBACK = "127.0.0.1:0"


def reverse(number: int, own: Floats) -> Floats:
    """What a liar sends."""
    return -100 * own


@pytest.mark.parametrize(
    ("vote", "fixed"),
    [("digest", False), ("digest", True), ("exact", False), ("tolerant", False)],
)
def test_seven_children_one_of_whom_lies_are_what_the_function_makes_of_them(
    vote: str, fixed: bool
) -> None:
    chosen = Detox(3, robust.median(), vote, fixed=fixed)
    rule = rules.resolve(chosen).text
    with voting(rule, {"c": Behaviour(reverse)}) as (server, members):
        for number in range(3):
            found = one_round(members, number)
            rows = rows_of(members, number)
            np.testing.assert_array_equal(found, expected(server, chosen, number, rows))
        counts = children(server)
        alone = sum(
            detox.groups(7, 3, secret_of(server), number, fixed=fixed)[-1] == (2,)
            for number in range(3)
        )
        # Who sits alone outvotes itself never.
        assert counts["c"]["outvoted"] == 3 - alone
        assert all(one["outvoted"] == 0 for site, one in counts.items() if site != "c")
        assert all(one["proven"] == 0 for one in counts.values())


@pytest.mark.parametrize(
    ("r", "then", "buckets"),
    [
        (2, "mean", 2),
        (3, "krum(f=0)", 0),
        (2, "trimmed_mean(f=1)", 0),
        (3, "nnm(f=0) >> median(f=0)", 2),
    ],
)
def test_votes_go_through_buckets_to_any_rule(r: int, then: str, buckets: int) -> None:
    chosen = Detox(r, robust.parse(then), "digest", buckets)
    with voting(rules.resolve(chosen).text, {"b": Behaviour(reverse)}) as (server, members):
        for number in range(2):
            found = one_round(members, number)
            rows = rows_of(members, number)
            wanted = expected(server, chosen, number, rows)
            np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-7)


def test_an_optimizer_makes_steps_of_what_the_votes_come_to() -> None:
    chosen = Detox(3, robust.median(), "digest")
    rule = rules.resolve(chosen).text + " >> momentum(learning_rate=0.5, momentum=0.5)"
    with voting(rule, {"a": Behaviour(reverse)}) as (server, members):
        velocity = np.zeros_like(gradient(0, 0))
        for number in range(2):
            found = one_round(members, number)
            merged = expected(server, chosen, number, rows_of(members, number))
            velocity = np.float32(0.5) * velocity + merged
            np.testing.assert_allclose(found, np.float32(0.5) * velocity, rtol=1e-6, atol=1e-7)


def test_groups_are_drawn_anew_and_a_child_hears_nothing_but_its_number() -> None:
    rule = "detox(r=3) >> median"
    with voting(rule) as (server, members):
        for number in range(3):
            one_round(members, number)
        secret = secret_of(server)
        seats = [detox.groups(7, 3, secret, number) for number in range(3)]
        for child, one in enumerate(members):
            for number in range(3):
                assert child in seats[number][one.seats[number]]
        # Of 70 ways to sit; the secret is the server's, so that a few of 30 are equal by chance.
        assert len({detox.groups(7, 3, secret, number) for number in range(30)}) > 10
        assert members[0].asks.seat(1).group == members[0].seats[1]  # also later, the same
        assert members[0].asks.seat(3).groups == 3
        with pytest.raises(ProtocolError, match="when the round before it is over"):
            members[0].asks.seat(4)


@pytest.mark.parametrize("first", [0, 5])
def test_before_all_have_agreed_on_the_model_no_seat_is_told_but_of_round_0(first: int) -> None:
    with voting("detox(r=3) >> median", are_agreed=False) as (_, members):
        assert members[0].asks.seat(0).groups == 3
        agreeing = [lambda one=one: one.client.agree_model(one.shapes, first) for one in members]
        # Whoever reads ahead waits until it is known with which round all begin.
        early = [Later(lambda one=one: one.asks.seat(first)) for one in members]
        too_early = Later(lambda: members[0].asks.seat(first + 1))
        together(*agreeing)
        assert {one.result().groups for one in early} == {3}
        with pytest.raises(ProtocolError, match="when the round before it is over"):
            too_early.result()


def test_who_sends_other_packets_than_it_said_is_proven_and_the_next_is_asked() -> None:
    truth: dict[int, str] = {}

    def say(number: int, own: str) -> str:
        return truth[number]

    liar = Behaviour(reverse, say)
    chosen = Detox(3, robust.median(f=0), "digest", fixed=True)
    # Two of a group of three say what the third says: one of them is asked before it.
    with voting(rules.resolve(chosen).text, {"a": liar, "b": liar}) as (server, members):
        honest = members[2]
        for number in range(2):
            packets = honest.packets(number)
            ballot = honest.client._ballot(honest.client.open_round(number, packets))
            truth[number] = ballot.metadata[0][1]
            found = one_round(members, number)
            rows = rows_of(members, number)
            rows[0] = rows[1] = rows[2]
            np.testing.assert_array_equal(found, expected(server, chosen, number, rows))
        counts = children(server)
        assert counts["a"]["proven"] + counts["b"]["proven"] >= 2
        assert all(counts[site]["proven"] == 0 for site in "cdefg")


def test_a_group_without_a_majority_is_dropped_and_counts_as_a_bad_row() -> None:
    chosen = Detox(2, robust.trimmed_mean(f=1), "digest", fixed=True)
    rule = rules.resolve(chosen).text
    with voting(rule, {"b": Behaviour(reverse)}) as (server, members):
        found = one_round(members, 0)
        rows = rows_of(members, 0)
        np.testing.assert_array_equal(found, expected(server, chosen, 0, rows))
        votes = [rows[2], rows[4], rows[6]]
        np.testing.assert_array_equal(found, robust.trimmed_mean(f=0)(votes))
        # Of two who differ nobody can say which one lies.
        assert all(one["outvoted"] == 0 for one in children(server).values())


@pytest.mark.parametrize("vote", ["digest", "exact", "tolerant"])
def test_a_refused_row_is_that_of_all_who_agreed_on_it(tmp_path: Path, vote: str) -> None:
    """Whose packets the server has is chance; who was outvoted has not sent them."""
    chosen = Detox(3, robust.parse("nnm(f=1) >> median(f=1)"), vote, fixed=True)
    huge = Behaviour(lambda number, own: np.full_like(own, 1e9))
    text = rules.resolve(chosen).text
    with voting(text, {"a": huge, "b": huge}, log_dir=str(tmp_path)) as (server, members):
        one_round(members, 0)
        counts = {site: one["refused_rows"] for site, one in children(server).items()}
    assert {site for site, count in counts.items() if count} == {*"ab"}
    told = [one for one in log.read_events(tmp_path) if one["event"] == "row_refused"]
    assert [one["child_site"] for one in told] == ["a", "b"]
    for one in told:
        assert one["reason"].endswith(", in the vote of its group")
        assert "norm" in one["reason"]


@pytest.mark.parametrize("liars", ["ac", "aceg"])
def test_more_groups_without_a_majority_than_the_rule_bears_end_the_run(liars: str) -> None:
    chosen = Detox(2, robust.trimmed_mean(f=1), "digest", fixed=True)
    lies = {
        site: Behaviour(lambda number, own, k=k: own + np.float32(1 + k))
        for k, site in enumerate(liars)
    }
    if len(liars) == 4:
        lies["g"] = Behaviour(lambda number, own: np.full_like(own, np.nan))
    with (
        voting(rules.resolve(chosen).text, lies) as (_, members),
        pytest.raises(ToleranceError, match=r"bad|must agree"),
    ):
        one_round(members, 0)


def test_a_quorum_goes_on_without_who_says_nothing() -> None:
    chosen = Detox(3, robust.median(f=0), "digest", fixed=True)
    away = Behaviour(is_silent=lambda number: number == 1)
    with voting(
        rules.resolve(chosen).text,
        {"b": away},
        quorum=6,
        late="drop",
        round_deadline=0.3,
    ) as (server, members):
        one_round(members, 0)
        found = one_round(members, 1)
        rows = [gradient(1, k // 3) for k in range(7)]
        np.testing.assert_array_equal(found, expected(server, chosen, 1, rows))
        # It comes later, for a round that is over, and gets the same.
        members[1].does.is_silent = lambda number: False
        again = members[1].exchange(1)
        assert again is not None
        np.testing.assert_array_equal(again, found)
        assert children(server)["b"]["absent"] == 1
        one_round(members, 2)


class _HangsUp(Exception):
    """What a child does when it is asked."""


def test_who_hangs_up_when_it_is_asked_is_passed_over() -> None:
    chosen = Detox(3, robust.median(f=0), "digest", fixed=True)
    with voting(rules.resolve(chosen).text) as (server, members):
        hung_up = []

        def hang_up_once(member: Voter) -> None:
            make = member.client._ballot

            def ballot(passage: Passage) -> Ballot:
                found = make(passage)
                hears = found.hears

                def other(call: Any, chunk: int, num_chunks: int, packet: Any) -> bool:
                    if chunk == num_chunks and member.site not in hung_up:
                        hung_up.append(member.site)
                        raise _HangsUp
                    return hears(call, chunk, num_chunks, packet)

                found.hears = other  # type: ignore[method-assign]
                return found

            member.client._ballot = ballot  # type: ignore[method-assign]

        def exchange(member: Voter) -> Floats | None:
            try:
                return member.exchange(0)
            except _HangsUp:
                return member.exchange(0)

        for member in members[:2]:
            hang_up_once(member)
        found = together(*(lambda one=one: exchange(one) for one in members))
        assert hung_up
        wanted = expected(server, chosen, 0, [gradient(0, k // 3) for k in range(7)])
        for one in found:
            np.testing.assert_array_equal(one, wanted)
        assert all(one["proven"] == 0 for one in children(server).values())


def test_digests_bring_a_third_of_the_bytes_of_whole_votes() -> None:
    sites = tuple("abcdefghi")
    shapes = [[200, 1000], [100]]
    received: dict[str, int] = {}
    for vote in ("digest", "exact"):
        rule = f"detox(r=3, vote={vote}) >> median"
        with voting(rule, sites=sites, shapes=shapes) as (_, members):
            before = sum(one.client.wire_bytes().sent for one in members)
            for number in range(2):
                one_round(members, number)
            received[vote] = sum(one.client.wire_bytes().sent for one in members) - before
    assert received["exact"] >= 2 * 9 * 4 * 200_100
    assert received["digest"] <= (1 / 3 + 0.05) * received["exact"]


ALIKE = asked.facts_to_json({"threads": "2", "probe": "aa"})
OTHER = asked.facts_to_json({"threads": "4", "probe": "bb"})
APART = r"Site `%s` cannot compute the bytes of most sites, as `%s` does: probe is aa and bb; thr"


def test_one_that_lies_about_its_replica_is_named_and_the_others_go_on() -> None:
    for liar in (0, 6):
        with voting("detox(r=3) >> median") as (_, members):
            packets = members[1].packets(0)
            one, others = members[liar], [other for other in members if other != members[liar]]
            message = APART % (one.site, others[0].site)
            if liar == 0:  # it is first, when nobody can know who is right
                assert one.asks.say_replica(OTHER) is None
            for other in others:
                assert other.asks.say_replica(ALIKE) is None
            with pytest.raises(ProtocolError, match=message):
                one.asks.say_replica(OTHER)
            if liar == 0:
                with pytest.raises(ProtocolError, match=message):
                    one.asks.seat(0)
                with pytest.raises(ProtocolError, match=message):
                    one.client.exchange(0, packets)
            assert one.asks.say_replica(ALIKE) is None  # it has been mended
            one_round(members, 0)


def test_replicas_of_which_most_do_not_agree_end_the_run() -> None:
    with voting("detox(r=3) >> median") as (_, members):
        for one in members[:3]:
            assert one.asks.say_replica(ALIKE) is None
        for one in members[3:6]:
            assert one.asks.say_replica(OTHER) is None
        with pytest.raises(ProtocolError, match=r"`a` and `g` cannot compute equal bytes: probe"):
            members[6].asks.say_replica(asked.facts_to_json({"probe": "cc"}))
        with pytest.raises(ProtocolError, match=r"run has ended.*cannot compute equal bytes"):
            members[4].asks.say_replica(OTHER)  # nor goes it on for the others


def test_a_replica_that_changes_is_refused_alone() -> None:
    with voting("detox(r=3) >> median") as (_, members):
        for one in members:
            assert one.asks.say_replica(ALIKE) is None
        for number in range(2):
            one_round(members, number)
        with pytest.raises(ProtocolError, match=APART % ("d", "a")):
            members[3].asks.say_replica(OTHER)
        assert members[4].asks.say_replica(ALIKE) is None
        one_round(members, 2)  # the others can go on without it, or wait for it to be mended


def test_replicas_that_vote_tolerantly_may_differ() -> None:
    with voting("detox(r=3, vote=tolerant) >> median") as (_, members):
        assert members[0].asks.say_replica(ALIKE) is None
        told = members[1].asks.say_replica(OTHER)
        assert told is not None and "threads is 2 and 4" in told
        one_round(members, 0)


def test_what_most_say_of_their_replicas() -> None:
    one, other, third = {"a": "1"}, {"a": "2"}, {"b": "1"}
    assert replicas.most({0: one, 1: one}, 4) is None  # half are not most
    assert replicas.most({0: one, 1: one}, 3) == one
    assert replicas.is_open({0: one, 1: other}, 3)
    assert not replicas.is_open({0: one, 1: other}, 2)
    assert not replicas.is_open({0: one, 1: other, 2: third, 3: {}}, 5)
    assert replicas.difference(one, third) == "a is 1 and not said; b is not said and 1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rule": "detox(r=3) >> krum(f=1)"},
            r"krum needs n >= 2 f \+ 3 rows. Received: n=3, f=1 \(n counts votes of groups\)$",
        ),
        ({"rule": "detox(r=3, full=True) >> mean"}, r"must divide .*Received: 7 workers$"),
        ({"rule": "detox(r=1) >> median(f=4)"}, r"n >= 2 f \+ 1"),
        (
            {"rule": "detox(r=1, q=17) >> mda", "parties": tuple(map(str, range(40)))},
            r"Rule detox\(r=1.*cannot work with 40 .*: mda\(f=auto\) cannot bear f=17, the groups",
        ),
        (
            {"rule": "detox(r=3) >> median", "compression": "error_feedback(onebit)"},
            "without error feedback",
        ),
        ({"rule": "detox(r=3) >> median", "shard": (0, 2)}, "one server must have all"),
        ({"rule": "detox(r=3) >> median", "quorum": 6}, "needs late=drop"),
        ({"rule": "detox(r=0) >> median"}, r"`r` must be in \[1"),
    ],
)
def test_what_cannot_be_is_refused_when_the_server_is_told(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**{"parties": SITES, "insecure": True, **settings})


def test_error_feedback_is_taken_with_groups_that_stay() -> None:
    ServerConfig(
        parties=SITES,
        insecure=True,
        rule="detox(r=3, fixed=True) >> median",
        compression="error_feedback(onebit)",
    )


def test_children_with_other_numbers_of_workers_cannot_vote() -> None:
    server = Server(
        ServerConfig(parties=("a", "b"), insecure=True, rule="detox(r=2) >> mean", bind=LOOPBACK)
    )
    server.start()
    try:
        one, two = (
            Client(Uplink(server.address, site, None, 5.0), "local", workers)
            for site, workers in (("a", 1), ("b", 2))
        )
        errors = []

        def join(client: Client) -> None:
            try:
                client.join("fp32", "fp32", 7)
            except (ProtocolError, PeerError) as error:
                errors.append(str(error))
                one.close()
                two.close()

        together(lambda: join(one), lambda: join(two))
        assert any("equally many workers" in text for text in errors)
    finally:
        server.stop(0.0)


def test_a_call_without_its_digest_is_refused() -> None:
    with voting("detox(r=3) >> median") as (_, members):
        members[0].client._votes_by_digest = False
        with pytest.raises(ProtocolError, match="come with the digest"):
            members[0].exchange(0)
