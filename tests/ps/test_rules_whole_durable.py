# SPDX-License-Identifier: Apache-2.0
"""Rules of whole rounds in servers that are killed, with quorums, and over sockets with windows."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.parties import Party, serving, together
from tests.ps.quorums import MODEL, SITES, Run, decoded, gradient
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import robust
from tf_hips.ops import native
from tf_hips.ps.disk import durable
from tf_hips.ps.rules import parse
from tf_hips.ps.rules.robust import OWN_REFUSAL
from tf_hips.ps.terms.quorum import DROP, Quorum
from tf_hips.ps.transport.wire import MESSAGE_BYTES, REFUSED_WEIGHT

pytestmark = pytest.mark.heavy  # servers are restored at every point

UP, DOWN = "error_feedback(onebit)", "error_feedback(terngrad(bitwidth=2))"
RULES = (
    "krum(f=0)",
    "centred_clipping(f=1, tau=0.5)",
    "centred_clipping(f=1, tau=0.5) >> fedavgm(0.5)",
    "bucketing(s=2) >> mean",
)
Floats = npt.NDArray[np.float32]


def undisturbed(rule: str, last: int) -> list[list[bytes] | None]:
    with Run(None, up=UP, down=DOWN, rule=rule).begin() as run:
        found = []
        for number in range(last + 1):
            run.rounds(number, number)
            found.append(run.results(0, number))
        return found


@pytest.mark.parametrize(
    ("rule", "snapshots"),
    [
        (RULES[0], False),
        (RULES[2], True),
        *(
            pytest.param(rule, snapshots, marks=pytest.mark.slow)
            for rule in RULES
            for snapshots in (False, True)
            if (rule, snapshots) not in ((RULES[0], False), (RULES[2], True))
        ),
    ],
)
def test_a_server_killed_in_mid_round_decides_as_it_would_have(
    tmp_path: Path, rule: str, snapshots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if snapshots:
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    expected = undisturbed(rule, 4)
    first = tmp_path / "first"
    first.mkdir()
    with Run(None, base=first, up=UP, down=DOWN, rule=rule).begin() as run:
        for number in range(3):
            run.rounds(number, number)
            assert run.results(0, number) == expected[number]
        run.deliver(1, 3)
        run.deliver(0, 3, chunks=[2, 0])
        second = run.killed(tmp_path / "second")
    with Run(None, base=second, up=UP, down=DOWN, rule=rule) as run:
        assert run.is_restored
        for child in range(len(SITES)):
            run.deliver(child, 3)
        assert run.results(2, 3) == expected[3]
        run.rounds(4, 4)
        assert run.results(1, 4) == expected[4]


def test_a_restored_server_does_not_tell_again_whom_it_has_refused(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()

    def lie(run: Run) -> None:
        store = run.deliver(0, 0)
        run.deliver(1, 0)
        codec = store._uplink
        for chunk in range(len(MODEL.chunks)):
            values = gradient(2, 0, chunk) * np.float32(1e9)
            store.add(0, 2, [(chunk, native.encode(codec, values, native.Key(0, 0, 0)))])

    with Run(None, base=first, rule="clip >> mean").begin() as run:
        run.session._state.rejections.tell = run._tell
        lie(run)
        [told] = run.told("row_refused")
        assert (told["round"], told["child_site"]) == (0, "c") and "median" in told["reason"]
        children = run.session.describe()["children"]
        assert [one["refused_rows"] for one in children] == [0, 0, 1]
        found = run.results(0, 0)
        second = run.killed(tmp_path / "second")
    with Run(None, base=second, rule="clip >> mean") as run:
        assert run.results(0, 0) == found
        assert run.session.describe()["children"][2]["refused_rows"] == 0
        run.session._state.rejections.tell = run._tell
        run.rounds(1, 1)
        assert not run.told("row_refused")


@pytest.mark.parametrize(
    "rule", ["median(f=1)", "geometric_median(f=1)", "median(f=1) >> fedavg", "fedavg"]
)
def test_who_refuses_its_own_update_is_told(tmp_path: Path, rule: str) -> None:
    first = tmp_path / "first"
    first.mkdir()
    with Run(None, base=first, rule=rule).begin() as run:
        run.session._state.rejections.tell = run._tell
        run.deliver(0, 0, weight=1.0)
        run.deliver(1, 0, weight=REFUSED_WEIGHT)
        run.deliver(2, 0, weight=0.0)
        told = [(one["child_site"], one["reason"]) for one in run.told("row_refused")]
        assert told == [("b", OWN_REFUSAL)] * (rule != "fedavg")
        found = run.results(0, 0)
        assert found is not None
        alone = [gradient(0, 0, chunk) for chunk in range(len(MODEL.chunks))]
        np.testing.assert_allclose(
            np.concatenate(decoded("fp32", found)), np.concatenate(alone), rtol=1e-6
        )
        second = run.killed(tmp_path / "second")
    with Run(None, base=second, rule=rule) as run:
        run.session._state.rejections.tell = run._tell
        assert run.results(1, 0) == found
        assert not run.told("row_refused")


def test_a_quorum_s_round_is_decided_of_those_that_came() -> None:
    quorum = Quorum(2, 1.0, late=DROP)
    with Run(quorum, rule="geometric_median(f=0)").begin() as run:
        run.rounds(0, 0)
        run.deliver(0, 1)
        run.deliver(2, 1)
        run.deliver(1, 1, chunks=[0, 1])
        assert run.results(0, 1) is None
        run.clock.advance(2.0)
        found = run.results(0, 1)
        assert found is not None and run.results(1, 1) == found
        rows = [
            [gradient(child, 1, chunk) for chunk in range(len(MODEL.chunks))] for child in (0, 2)
        ]
        wanted = robust.geometric_median(f=0)([np.concatenate(row) for row in rows])
        np.testing.assert_allclose(np.concatenate(decoded("fp32", found)), wanted, rtol=1e-5)


def test_children_deliver_more_than_all_windows_before_anything_comes(
    certificates: Certificates,
) -> None:
    # The last child delivers when the others have nothing left to send: all that they have sent is
    # then in the server, and nothing of it is merged.
    shapes = [[40, 1024]] * 96  # 15 MiB of each child
    sites = ("a", "b", "c", "d", "e")
    total = 4 * sum(int(np.prod(shape)) for shape in shapes)
    assert total > 3 * max(MESSAGE_BYTES, 4 << 20)
    settings = {"parties": sites, "rule": "krum(f=1)", "compression": "fp32", "downlink": "fp32"}
    with serving(certificates, **settings) as server:
        members = [
            Party(
                server.address,
                site,
                certificates.party(site),
                shapes=shapes,
                compression="fp32",
                downlink="fp32",
            )
            for site in sites
        ]
        together(*(one.join for one in members))
        sent = [one.packets(0) for one in members]
        store = server.session_of(is_join=False).store
        assert store is not None

        def late() -> npt.NDArray[np.uint8]:
            with store.changed:
                eventually(
                    lambda: (
                        store.round == 0
                        and all(store.progress(child)[1] == len(shapes) for child in range(4))
                    ),
                    20.0,
                    changed=store.changed,
                )
                assert store.results(0, 0) == (0, [])
            return members[4].client.exchange(0, sent[4])

        early = [lambda one=one: members[one].client.exchange(0, sent[one]) for one in range(4)]
        found = together(*early, late)
        assert all(np.array_equal(one, found[0]) for one in found)
        assert any(np.array_equal(one, found[0]) for one in sent)  # Krum's is one of the rows
        for one in members:
            one.client.close()


def test_a_chain_travels_and_is_what_status_says(certificates: Certificates) -> None:
    text = "nnm(f=0) >> trimmed_mean(f=0) >> fedadam(0.1)"
    with serving(certificates) as server:
        members = [Party(server.address, site, certificates.party(site)) for site in ("a", "b")]
        welcomes = together(
            *(lambda one=one: one.client.join(one.said, "same", 7, text) for one in members)
        )
        assert {one.rule for one in welcomes} == {parse(text).text}
        assert server.snapshot()["rule"] == parse(text).text
        for one in members:
            one.client.close()
