# SPDX-License-Identifier: Apache-2.0
"""Rules on several servers that share one model: each has the state of its own chunks."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from tests.ps.parties import DEADLINE_S, FEEDBACK, SITES, Party, serving, together, train_all
from tests.ps.test_shards import sharded
from tests.support.certs import Certificates
from tf_hips.errors import ProtocolError, TfHipsError
from tf_hips.ops.compressor import CHUNK
from tf_hips.ps.client.welcome import Welcome

pytestmark = pytest.mark.heavy  # many rounds of every rule

SHAPES = ((5, 3), (CHUNK + 3,), (), (300, 7), (11,), (64,))
MIXED = "mixed(error_feedback(onebit), below=100)"


@pytest.mark.parametrize("rule", ["momentum(0.1, nesterov=True)", "adam", "fedyogi"])
def test_steps_are_the_same_for_any_number_of_servers(
    certificates: Certificates, rule: str
) -> None:
    results = []
    for count in (1, 3):
        settings = {"shapes": SHAPES, "compression": FEEDBACK}
        with sharded(certificates, count, {"rule": rule}, **settings) as (_, members):
            results.append(train_all(members, 0, 3))
    assert results[0] == results[1]
    assert len(set(results[0])) == 4


@pytest.mark.parametrize(
    ("rule", "text"), [("dc_asgd(adaptive=True)", FEEDBACK), ("fedbuff(3)", MIXED)]
)
def test_answers_are_the_same_for_any_number_of_servers(
    certificates: Certificates, rule: str, text: str
) -> None:
    results = []
    for count in (1, 3):
        settings = {"shapes": SHAPES, "compression": text}
        with sharded(certificates, count, {"rule": rule}, **settings) as (servers, (a, b)):
            results.append(a.train(0, 0) + b.train(0, 1) + a.train(1, 3) + b.train(2, 2))
            b.client.leave("it has other plans")
            results[-1] += a.train(4, 4)
            a.client.leave()
            for server in servers:
                assert (server._session.is_over, server._session.ended) == (True, None)
    assert results[0] == results[1]
    assert len(set(results[0])) >= 6  # of fedbuff nothing comes before the third update


@pytest.mark.parametrize("hears_of_it", [False, True])
def test_servers_of_one_run_agree_on_the_rule(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, hears_of_it: bool
) -> None:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(certificates, shard=(index, 2), rule=rule))
            for index, rule in enumerate(("sgd(0.1)", "sgd(0.2)"))
        ]
        address = ",".join(server.address for server in servers)
        members = [Party(address, site, certificates.party(site)) for site in SITES]
        errors: list[TfHipsError] = []
        compared = []

        def join(member: Party) -> None:
            with pytest.raises(TfHipsError, match="must agree on `rule`") as refused:
                member.join()
            errors.append(refused.value)

        def look_at(member: Party, must_hear: bool) -> None:
            compare, heard = member.client._compare, threading.Event()
            member.client.on_end(heard.set)

            def compare_late(welcomes: Sequence[Welcome]) -> None:
                compared.append(member)
                assert not must_hear or heard.wait(DEADLINE_S)  # that the other has left
                compare(welcomes)

            monkeypatch.setattr(member.client, "_compare", compare_late)

        for member in members:
            look_at(member, hears_of_it and member is members[1])
        together(*(lambda one=one: join(one) for one in members))
        # Who finds it is told so, also behind the end; who still waits for a server, by the other.
        found = sum(isinstance(error, ProtocolError) for error in errors)
        assert found == len(compared) >= 1
