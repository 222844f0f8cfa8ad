# SPDX-License-Identifier: Apache-2.0
"""A state that is older than the run is named, and stays as it is."""

import contextlib
import re
import shutil
from pathlib import Path

import pytest

from tests.ps.parties import DEADLINE_S, SITES, Party, together, train_all
from tests.ps.quorums import Run
from tests.ps.served import SHAPES, Served, rounds
from tests.ps.test_restart import Later, ServerProcess
from tf_hips.errors import PeerError, ProtocolError, StateError
from tf_hips.ps.disk.file_format import Reader
from tf_hips.ps.terms.quorum import Quorum


def files_of(folder: Path) -> dict[str, object]:
    """What each file holds; of a journal without marks, which come behind what is durable."""
    return {path.name: _content(path) for path in folder.iterdir()}


def _content(path: Path) -> object:
    if not path.name.startswith("journal"):
        return path.read_bytes()
    with contextlib.closing(Reader(path)) as reader:
        return reader.header, [(kind, bytes(payload)) for kind, payload in reader.records()]


def test_a_gather_ahead_of_the_state_is_told_and_not_written(tmp_path: Path) -> None:
    with Served(tmp_path) as first:
        first.join()
        for number in range(3):
            first.gather(number, 0, b"", wait=False)
            first.gather(number, 1, b"", wait=True)
        first.killed(tmp_path / "older")
    state = tmp_path / "older/state/job"
    with Served(tmp_path / "older") as second:
        before = files_of(state)
        text = f"Site `a` is in gather 5, and the state in {state} ends at gather 3: it is older"
        with pytest.raises(StateError, match=re.escape(text)) as told:
            second.session.begin_gather(second.caller(0), 5)
        assert second.session.ended == str(told.value)
        assert second.session.is_disowned
        with pytest.raises(PeerError, match=r"The run has ended\. Site `a` is in gather 5"):
            second.session.begin_gather(second.caller(1), 3)
        second.session.leave(second.caller(0), f"PeerError: {told.value}")
        assert files_of(state) == before
    with Served(tmp_path / "older") as third:  # the run is not over
        assert third.is_restored
        third.gather(3, 0, b"", wait=False)
        # By now what comes too early is a mistake.
        with pytest.raises(ProtocolError, match=r"which is next\. Received: gather 6"):
            third.session.begin_gather(third.caller(0), 6)
        assert not third.session.is_disowned


def test_a_round_ahead_of_the_state_is_told(tmp_path: Path) -> None:
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        first.deliver(rounds(0, 1))
        with pytest.raises(ProtocolError, match="Received: round 4"):  # no state was restored
            first.begin(4)
        first.killed(tmp_path / "older")
    with Served(tmp_path / "older") as second:
        with pytest.raises(StateError, match=r"`a` is in round 4, and the state in .* round 1: it"):
            second.begin(4)
        assert second.session.is_over


def test_a_backup_ahead_of_the_state_is_told(tmp_path: Path) -> None:
    """The sites were killed as well, and come back from backups that are newer than the state."""
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        first.deliver(rounds(0, 1))
        first.killed(tmp_path / "older")
    state = tmp_path / "older/state/job"
    with Served(tmp_path / "older") as second:
        second.processes[0] = "after"
        second.session.join(second.caller(0), 2, *second.texts, 7, second.rule)
        second.session.settle()
        before = files_of(state)
        with pytest.raises(StateError, match=r"`a` is in round 7, and the state in .* round 1: it"):
            second.session.agree_model(second.caller(0), SHAPES, 7)
        assert second.session.is_disowned
        assert files_of(state) == before


def test_one_site_alone_cannot_disown_the_state_of_a_quorum(tmp_path: Path) -> None:
    with Run(Quorum(2, 10.0), base=tmp_path) as first:
        first.begin()
        for number in range(2):
            for child in range(3):
                first.deliver(child, number)
        first.killed(tmp_path / "state")
    with Run(Quorum(2, 10.0), base=tmp_path / "state") as second:
        for _ in range(2):  # as often as it likes
            with pytest.raises(ProtocolError, match="Received: round 7"):
                second.deliver(0, 7)
        second.deliver(0, 2)
        # Who has taken a right turn says nothing of the state any more, and said nothing before.
        for child in (0, 1):
            with pytest.raises(ProtocolError, match="Received: round 7"):
                second.deliver(child, 7)
        second.session.leave(second.caller(0), "it was refused")
        assert not second.session.is_over
        assert not second.session.is_disowned
        with pytest.raises(StateError, match=r"is in round 5, and the state in .* round 2: it is"):
            second.deliver(2, 5)
        assert second.session.is_disowned


def test_one_site_alone_cannot_disown_the_state_of_asynchronous_rounds(tmp_path: Path) -> None:
    rule = "fedasync(0.6)"
    with Served(tmp_path, rule=rule) as first:
        first.join()
        first.agree()
        first.deliver(rounds(0, 0))
        first.killed(tmp_path / "state")
    with Served(tmp_path / "state", rule=rule) as second:
        with pytest.raises(ProtocolError, match="Received: round 7"):
            second.begin(7)
        assert not second.session.is_over
        with pytest.raises(StateError, match="it is older than the run"):
            second.session.begin_round(second.caller(1), 7)
        assert second.session.is_disowned


@pytest.mark.heavy
def test_a_server_with_an_older_state_ends_and_leaves_it(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path)
    server.is_once = False
    server.start()
    try:
        a, b = (Party(server.address, site, None) for site in SITES)
        together(a.join, b.join)
        train_all((a, b), 0, 0)
        shutil.copytree(server.state, tmp_path / "copy")
        train_all((a, b), 1, 3)
        server.kill()
        shutil.rmtree(server.state)
        shutil.copytree(tmp_path / "copy", server.state)
        before = files_of(server.state / "local")
        server.start()
        for one in [Later(lambda one=one: one.train(4, 4)) for one in (a, b)]:
            with pytest.raises(PeerError, match="it is older than the run"):
                one.result()
        for one in (a, b):
            one.client.leave("it cannot go on")
        assert server.process is not None
        assert server.process.wait(DEADLINE_S) == 1
    finally:
        server.end()
    assert "error: Site `" in server.lines[-1]
    assert "is in round 4, and the state in" in server.lines[-1]
    assert files_of(server.state / "local") == before
