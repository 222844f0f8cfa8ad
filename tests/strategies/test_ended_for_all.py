# SPDX-License-Identifier: Apache-2.0
"""That the run has ended, which one rank has heard, is final on all ranks of its party."""

from typing import Any

import pytest

from tf_hips.errors import ENDED, PeerError, is_final

pytestmark = pytest.mark.tf

HEARD = PeerError(f"Server hub:7070, Exchange: {ENDED}Site `b` was lost.")
# What a site writes is quoted, and ends nothing for good.
QUOTED = PeerError(f"Server hub:7070: Site `b` left with PeerError: Server hub:7070: {ENDED}")


def others_error_of_a_step(error: Exception) -> None:
    from tf_hips.strategies.from_rank_0 import HEADER_BYTES, _Relay

    def fail(*_: Any) -> Any:
        raise error

    _Relay(fail, 4).check(_Relay(fail, 4).run()[:HEADER_BYTES])


def others_error_of_an_action(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    from tf_hips.comm import primitives
    from tf_hips.strategies.replicas import on_rank_0

    def fail() -> None:
        raise error

    told: list[Any] = []
    monkeypatch.setattr(primitives, "broadcast_object", lambda value, **_: told.append(value))
    monkeypatch.setattr(primitives, "rank", lambda: 0)
    with pytest.raises(PeerError):
        on_rank_0(fail)
    monkeypatch.setattr(primitives, "broadcast_object", lambda value, **_: told[0])
    monkeypatch.setattr(primitives, "rank", lambda: 1)
    on_rank_0(fail)


def others_error_of_a_callback(error: Exception) -> None:
    from tf_hips.callbacks.peers import Peers

    class OfTwo(Peers):
        def __init__(self) -> None:
            self.told: list[Any] = []

        def gather(self, value: Any) -> list[Any]:
            self.told.append(value)
            return self.told

    def fail() -> None:
        raise error

    peers = OfTwo()
    with pytest.raises(PeerError, match="Server"):
        peers.together(fail)
    peers.together(lambda: None)


def others_error_of_a_watchdog(error: Exception) -> None:
    from tf_hips.comm.verdicts import State, View, Wait, judge

    waits = View(State(wait=Wait("collective a", "a", 10.0)), 0.0, 10.0)
    failure = f"{type(error).__name__}: {error}"
    left = View(State(doing="the action of step 3", failure=failure, failed_s=9.0), 0.0, 10.0)
    found: Any = judge(1, {0: left, 1: waits}, 600.0)
    raise PeerError(found.text)


def test_a_run_that_has_ended_for_one_rank_is_final_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error in (HEARD, QUOTED):
        for others_error in (
            others_error_of_a_step,
            lambda one: others_error_of_an_action(one, monkeypatch),
            others_error_of_a_callback,
            others_error_of_a_watchdog,
        ):
            with pytest.raises(Exception, match=r"Rank 0 .*Site `b`") as caught:
                others_error(error)
            assert is_final(caught.value) == (error is HEARD), caught.value
