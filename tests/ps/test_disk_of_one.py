# SPDX-License-Identifier: Apache-2.0
"""The disk of one of several servers of a run fails: the run is over at all of them."""

import contextlib
import errno
import functools
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ps.parties import (
    DEADLINE_S,
    SITES,
    Party,
    expected_rounds,
    parties,
    serving,
    train_all,
)
from tests.ps.test_restart import Later
from tests.support.eventually import eventually
from tf_hips.config import Uplink
from tf_hips.errors import PeerError
from tf_hips.ps.client.shards import SEPARATOR
from tf_hips.ps.server.server import Server

pytestmark = pytest.mark.heavy  # servers of several shards

OPEN: Any = None  # no certificates


def shards(stack: contextlib.ExitStack, base: Path) -> list[Server]:
    return [
        stack.enter_context(
            serving(
                OPEN, insecure=True, run="local", shard=(index, 2), state_dir=str(base / str(index))
            )
        )
        for index in range(2)
    ]


def joint(servers: Sequence[Server]) -> str:
    return SEPARATOR.join(one.address for one in servers)


def fail_disk(patch: pytest.MonkeyPatch, folder: Path, members: Sequence[Party]) -> None:
    """Ends the run of `members` in round 2: nothing can be written in `folder`."""
    real = os.writev

    def full(descriptor: int, pieces: Any) -> int:
        if str(folder) in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, pieces)

    patch.setattr(os, "writev", full)
    for later in [Later(functools.partial(one.train, 2, 2)) for one in members]:
        with pytest.raises(PeerError, match="No space left on device"):
            later.result()


def test_a_full_disk_at_one_shard_ends_the_run_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        servers = shards(stack, tmp_path)
        with (
            parties(servers[0], OPEN, insecure=True, address=joint(servers)) as members,
            monkeypatch.context() as patch,
        ):
            train_all(members, 0, 1)
            fail_disk(patch, tmp_path / "1", members)
            eventually(lambda: all(one._session.is_over for one in servers))
        with parties(servers[0], OPEN, insecure=True, address=joint(servers)) as members:
            assert not any(one.is_back for party in members for one in party.client._clients)
            assert train_all(members, 0, 2) == expected_rounds(3)


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers of a run, of which the second goes on in round 2, and the first has no state."""
    with contextlib.ExitStack() as stack:
        servers = shards(stack, tmp_path / "first")
        with parties(servers[0], OPEN, insecure=True, address=joint(servers)) as members:
            train_all(members, 0, 2)
            servers[1]._session.settle()
            shutil.copytree(tmp_path / "first/1", tmp_path / "second/1")
    with contextlib.ExitStack() as stack:
        yield shards(stack, tmp_path / "second")


MIXED = r"in the same one\. Received: a run in round 2"


def test_a_restored_run_and_a_new_one_are_not_mixed(restored: list[Server]) -> None:
    found = [Party(joint(restored), site, None) for site in SITES]
    for later in [Later(one.join) for one in found]:
        with pytest.raises(PeerError, match=MIXED):
            later.result()
    eventually(lambda: all(one._session.is_over for one in restored))
    with parties(restored[0], OPEN, insecure=True, address=joint(restored)) as members:
        assert train_all(members, 0, 2) == expected_rounds(3)


@pytest.mark.parametrize("comes", ["before", "behind"])
def test_a_party_hears_why_the_run_ended_while_it_joined(
    restored: list[Server], monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """One server has answered it when the run ends; the other one would begin a new run with it.

    Its call there comes before it has left that server, or behind that.
    """
    early, late = (Party(joint(restored), site, None) for site in SITES)
    answered, over, left = (threading.Event() for _ in range(3))

    def before(client: Any, name: str, event: threading.Event) -> None:
        real = getattr(client, name)

        def call(*values: Any) -> Any:
            assert event.wait(DEADLINE_S)
            return real(*values)

        monkeypatch.setattr(client, name, call)

    def behind(client: Any, name: str, event: threading.Event) -> None:
        real = getattr(client, name)

        def call(*values: Any) -> Any:
            result = real(*values)
            event.set()
            return result

        monkeypatch.setattr(client, name, call)

    behind(late.client._clients[0], "join", answered)
    before(early.client._clients[1], "join", answered)
    there = late.client._clients[1]
    if comes == "before":
        before(there, "join", over)
        before(there, "leave", left)
    else:
        behind(there, "leave", left)
        before(there, "join", left)
    first, second = Later(early.join), Later(late.join)
    with pytest.raises(PeerError, match=MIXED):
        first.result()
    over.set()
    if comes == "before":
        eventually(lambda: 1 in restored[1]._session._members.children)
        left.set()
    with pytest.raises(PeerError, match=MIXED):
        second.result()


def test_a_full_disk_of_a_party_server_ends_the_run_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(OPEN, insecure=True, run="local", parties=("west",)) as top:
        uplink = Uplink(top.address, "west", None, DEADLINE_S, "global-server")
        with serving(
            OPEN, insecure=True, run="local", state_dir=str(tmp_path), uplink=uplink
        ) as middle:
            with parties(middle, OPEN, insecure=True) as members, monkeypatch.context() as patch:
                train_all(members, 0, 1)
                fail_disk(patch, tmp_path, members)
                eventually(lambda: top._session.is_over)
            with parties(middle, OPEN, insecure=True) as members:
                assert not any(one.client.is_back for one in members)
                train_all(members, 0, 2)
