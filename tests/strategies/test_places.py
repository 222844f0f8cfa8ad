# SPDX-License-Identifier: Apache-2.0
"""A second strategy of a process, or one of a rank's child, hears at once why it cannot train."""

import dataclasses
import os
import signal
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from tests.support.ranks import ranks
from tf_hips import config
from tf_hips.errors import PeerError, ProtocolError

pytestmark = [pytest.mark.tf, pytest.mark.timeout(60)]


def run_at(server, *, servers_end):
    uplink = config.Uplink(server=server.address, site="a", deadline_s=20.0)
    return config.Run(run="run", uplink=uplink, servers_end=servers_end)


def _end_a_fork(strategy):
    """What the end of a forked process does, which is no end of the worker.

    Nor has it threads of gRPC's, which would be on the worker's connections.
    """
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        strategy.close()
        os._exit(num_threads - 1)
    assert os.waitpid(child, 0) == (child, 0)


def test_a_second_strategy_of_a_run_is_refused_without_waiting(monkeypatch):
    from tests.strategies.test_hierarchical_ps import serving
    from tf_hips import HierarchicalPS
    from tf_hips.ps.client import link

    with serving("run", parties=("a",)) as server:
        run = run_at(server, servers_end=True)
        first = HierarchicalPS(config=run)
        _end_a_fork(first)
        calls = []
        monkeypatch.setattr(link.Link, "persist", lambda *more, **named: calls.append(more))
        with pytest.raises(ProtocolError, match="while the first one of this process is in run `r"):
            HierarchicalPS(config=run)
        monkeypatch.undo()
        assert first.gather_objects(1, "what the first one does") == [1]
        first.close()
        monkeypatch.setattr(link.Link, "persist", lambda *more, **named: calls.append(more))
        with pytest.raises(ProtocolError, match=r"Run `run` is over\. .*`close\(\)` it behind the"):
            HierarchicalPS(config=run)
        monkeypatch.undo()
        assert not calls

        # A server that stays takes in the next run.
        run = run_at(server, servers_end=False)
        second = HierarchicalPS(config=run)
        assert second.gather_objects(2, "what the second one does") == [2]
        second.close()
    monkeypatch.setattr(link, "_FIRST_CONTACT_S", 0.0)
    with pytest.raises(PeerError, match=r"was in run `run` before\. A server of one run"):
        HierarchicalPS(config=run)


def test_after_a_run_that_others_have_ended_a_process_may_join_the_next():
    from tests.strategies.test_hierarchical_ps import serving
    from tf_hips import HierarchicalPS

    with serving("run", parties=("a",)) as server:
        run = run_at(server, servers_end=False)
        first = HierarchicalPS(config=run)
        heard = threading.Event()
        first.client.on_end(heard.set)
        with server._session.changed:
            server._session.end("An operator has ended it.")
        assert heard.wait(20.0)
        with pytest.raises(ProtocolError, match="Run `run` is over"):
            HierarchicalPS(config=dataclasses.replace(run, servers_end=True))
        second = HierarchicalPS(config=run)
        assert second.gather_objects(2, "what the second one does") == [2]
        second.close()
        first.close()


def test_a_strategy_that_has_not_come_to_be_is_none_of_those_that_are_there(monkeypatch):
    from tf_hips import CompressedRing, HierarchicalPS, shard
    from tf_hips.ps.client import link
    from tf_hips.strategies import hooks

    monkeypatch.setattr(hooks, "_strategies", weakref.WeakSet())
    monkeypatch.setattr(link, "_FIRST_CONTACT_S", 0.0)
    nowhere = config.Uplink(server="127.0.0.1:1", site="a", deadline_s=1.0)
    run = config.Run(run="run", uplink=nowhere, seed=1)
    # As a notebook keeps what it shows, and that the frames.
    with pytest.raises(PeerError) as kept:
        HierarchicalPS(config=run)
    with pytest.raises(ValueError, match="`nonfinite` must be") as also_kept:
        HierarchicalPS(config=run, nonfinite="propagate")
    strategy = CompressedRing(config=config.Run(seed=2))
    assert len(hooks.live()) == 3
    assert int(shard(np.ones((4, 1)), 2).cardinality()) == 2
    del kept, also_kept, strategy


@ranks(1, deadline_s=60.0)
def test_a_child_of_a_rank_is_refused():
    import tf_hips

    tf_hips.CompressedRing()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            told = repr(tf_hips.CompressedRing())
        except BaseException as error:  # noqa: BLE001 - whatever it is
            told = f"{type(error).__name__}: {error}"
        os.write(writes, told.encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, encoding="utf-8") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told.startswith("ConfigError: A rank must be one process")
    assert f"a strategy in process {child}, which has the environment of" in told
    tf_hips.CompressedRing()  # this one is the rank, and may have another one
