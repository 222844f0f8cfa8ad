# SPDX-License-Identifier: Apache-2.0
"""A party that says that it is the server of many parties, below a robust rule: it has one vote."""

import json
from typing import Any

import numpy as np
import pytest

from tests.ps.parties import DEADLINE_S, serving, together
from tf_hips.config import Uplink
from tf_hips.ps.client.client import Client
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.terms import tree

pytestmark = pytest.mark.tf

HONEST = tuple("abcd")
CLAIMED = tuple(f"evil/x{n}" for n in range(5))
TREE = ("west/a", "west/b", "west/evil/x", "west/evil/y", "west/evil/z", "east/c", "north/d")


def doubted(paths: Any = (*HONEST, *CLAIMED)) -> tuple[Any, list[Any]]:
    from tf_hips.strategies.agreeing import Doubted

    events: list[Any] = []

    def write_event(event: str, **values: Any) -> None:
        events.append(values["sites"])

    return Doubted(paths, (1,) * len(paths), write_event), events


def joined_and_gathered(rule: str) -> tuple[Welcome, list[bytes | None]]:
    """What `a` is told and hears, where `evil` says that five parties are below it."""
    sites = (*HONEST, "evil")
    with serving(None, insecure=True, parties=sites, rule=rule) as server:
        clients = [
            Client(
                Uplink(server.address, site, None, DEADLINE_S, "global-server"),
                "local",
                len(CLAIMED) if site == "evil" else 1,
                leaves=tuple((f"x{n}", 1) for n in range(5)) if site == "evil" else (),
            )
            for site in sites
        ]
        said = [json.dumps(["honest"]).encode()] * len(HONEST)
        said.append(tree.bundle([json.dumps(["a lie"]).encode()] * len(CLAIMED)))
        try:
            told = together(*(lambda one=one: one.join("fp32", "fp32", 7, rule) for one in clients))
            heard = together(
                *(
                    lambda one=one, payload=payload: one.gather(0, "a digest", payload)
                    for one, payload in zip(clients, said, strict=True)
                )
            )
        finally:
            for one in clients:
                one.close()
    return told[0], [None if one is None else bytes(one) for one in heard[0]]


@pytest.mark.heavy  # a server starts
def test_claimed_leaves_outvote_nobody_in_a_run() -> None:
    from tf_hips.strategies import agreeing

    welcome, payloads = joined_and_gathered("multi_krum(f=1)")
    assert welcome.paths == (*HONEST, *CLAIMED)
    events: list[Any] = []

    class Strategy:
        def _together(self) -> Welcome:
            return welcome

        def write_event(self, event: str, **values: Any) -> None:
            events.append(values["sites"])

    parties: Any = agreeing.doubted(Strategy())  # type: ignore[arg-type]
    texts = agreeing.as_texts(payloads, parties)
    told = zip(texts, welcome.workers, welcome.parties, strict=True)
    everyone = agreeing.from_texts(list(told), "a digest", parties)
    assert everyone == ["honest"] * 4 + ["a lie"] * 5
    found = agreeing.compared(parties, everyone, "honest", lambda one: one, "a digest")
    assert found == [(agreeing.MOST, "honest"), (agreeing.THIS, "honest")]
    assert events == [["evil"]]  # and not its leaves, whose names it has made up


def test_where_leaves_are_rows_each_has_a_vote() -> None:
    """Their servers are trusted there for whom they have below them."""
    from tf_hips.strategies.agreeing import MOST, compared, doubted

    class Strategy:
        parties, workers = ("a", "b", "c", "d"), (1, 1, 1, 1)
        paths = ("west/a", "west/b", "west/c", "east/d")
        bears_liars = looks_at_leaves = True

        def _together(self) -> "Strategy":
            return self

        def write_event(self, event: str, **values: Any) -> None:
            pass

    parties = doubted(Strategy())  # type: ignore[arg-type]
    assert compared(parties, [1, 1, 1, 2], 1, lambda one: one, "x")[0] == (MOST, 1)
    Strategy.looks_at_leaves = False
    parties = doubted(Strategy())  # type: ignore[arg-type]
    assert len(compared(parties, [1, 1, 1, 2], 1, lambda one: one, "x")) == 5  # one against one


def test_a_worker_of_a_party_server_claims_no_votes_either() -> None:
    """Of west's three children two are honest, so west has an honest vote."""
    from tf_hips.strategies.agreeing import MOST, compared

    parties, events = doubted(TREE)
    told = [1, 1, 9, 9, 9, 1, 1]
    assert compared(parties, told, 1, lambda one: one, "x")[0] == (MOST, 1)
    assert events == [["west/evil"]]
    # All of west lies, and is one of three.
    assert compared(parties, [9] * 5 + [1, 1], 1, lambda one: one, "x")[0] == (MOST, 1)
    assert events[1:] == [["west"]]
    parties.name([False, True, True, False, False, False, True], "x", "another reason")
    assert events[2:] == [["west/b", "west/evil/x", "north"]]


@pytest.mark.parametrize(
    ("steps", "most"),
    [
        ([7, 7, 7, None] + [9] * 5, 7),
        ([7, 7, None, None] + [9] * 5, None),  # too few of five know it
        ([7, 7, 7, 9] + [None] * 5, 7),
    ],
)
def test_a_number_that_not_all_know_is_that_of_most_children(steps: list[Any], most: Any) -> None:
    from tf_hips.strategies.agreeing import MOST, compared

    parties, events = doubted()
    told = [[one] for one in steps]
    found = compared(parties, told, [7], lambda one: one[0], "steps", may_be_unknown=True)
    assert found[0] == (MOST, most)
    assert not {"a", "b", "c"} & {site for sites in events for site in sites}


def test_who_says_that_it_is_a_leaf_too_gains_nothing() -> None:
    parties, _ = doubted(("a", "b", "c", "evil", "evil/x", "evil/y"))
    assert parties.most([1, 1, 2, 2, 2, 2]) == ""
    assert parties.most([1, 1, 1, 2, 2, 2]) == 1
    assert parties.most([None, None, 1, 2, 2, None]) == ""
    assert parties.most([None] * 6) is None


def test_claimed_leaves_end_no_sum() -> None:
    from tf_hips.strategies.failures import Failures
    from tf_hips.strategies.over_parties import ExactReduction

    parties, events = doubted()
    own = np.ones(1, np.float32).tobytes()
    payloads: list[bytes | None] = [own] * 4 + [own + b"x"] * 5
    exact = ExactReduction(lambda *_: payloads, Failures(), lambda: (1,) * 9, lambda: parties)
    kinds = [(np.dtype(np.float32), False, 1)]
    total = exact._combine("x", ["sum"], kinds, np.zeros(4, np.uint8))
    assert total.view(np.float32).tolist() == [4.0]
    assert events == [["evil"]]


def test_claimed_leaves_decide_no_round_of_a_meeting() -> None:
    from tf_hips.loops.hearing import check_samples, read_all
    from tf_hips.loops.meeting import Told, met

    parties, events = doubted()
    said = [[4, Told(2, 16).fields]] * 4 + [[5, Told(2, 16).fields]] * 5
    told = read_all(said, parties.sites, {}, 0, parties, 4)
    assert [one.is_absent for one in told] == [False] * 4 + [True] * 5
    idle = [Told(2, 16)] * 4 + [Told(0, 0, ends=True)] * 5
    names = [[site] for site in parties.sites]
    check_samples(met(idle, [1] * 9, "samples", True, None), names, 0, parties)
    assert events == [["evil"], ["evil"]]


def test_a_server_of_one_child_is_that_child() -> None:
    """However long a way a liar claims, nothing is merged on it, and its first name is told."""
    paths = ("a", "b", "/".join(("evil", *map(str, range(60)), "x")))
    sizes: list[int] = []

    def merge(values: list[int]) -> int:
        sizes.append(len(values))
        return sum(values)

    assert tree.merged(paths, [1, 2, 4], merge) == 7 and sizes == [3]
    assert tree.merged(paths, [None, None, 4], merge) == 4
    with pytest.raises(ValueError, match=r"Each of 3 leaves .* Received: 2"):
        tree.merged(paths, [1, 2], merge)
    parties, events = doubted(paths)
    parties.name([False, False, True], "x", "it is another")
    assert events == [["evil"]]
