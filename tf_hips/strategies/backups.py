# SPDX-License-Identifier: Apache-2.0
"""How a party comes back to a run that goes on without it.

Where a backup was made is a place: a session, a round, a number of gathers, and which `fit`. A
process that is started again comes back to it once, before it has made anything of its own.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_hips import log
from tf_hips.callbacks.party import Backups
from tf_hips.comm import watchdog
from tf_hips.errors import PeerError
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.transport import parcel
from tf_hips.ps.transport.parcel import Intake

if TYPE_CHECKING:
    from tf_hips.strategies.connected import ConnectedStrategy


class PartyBackups(Backups):
    """Of a strategy that has joined a server."""

    def __init__(self, strategy: "ConnectedStrategy") -> None:
        """Has not come back yet."""
        self._strategy = strategy

    def place(self) -> dict[str, Any] | None:
        """Where this run is; None where there was no round yet."""
        strategy, welcome = self._strategy, self._strategy.welcome
        loan = strategy.loan
        step = strategy.round_step if loan is None else loan.round_step
        if welcome is None or step is None:
            return None
        place = {"session": welcome.session, "round": int(step.numpy())}
        return {**place, "gathers": strategy._num_gathers, "fit": strategy._fitting.num_fits}

    def note(self, place: dict[str, Any]) -> None:
        """Tells the server that a backup of `place` is whole."""
        strategy = self._strategy
        if strategy.loan is not None and strategy.loan.is_busy:
            return  # it is told of the next backup; until then it keeps more than it needs
        try:
            strategy._connected().backed_up(place["round"], place["gathers"])
        except PeerError as error:
            # The backup stands, and another site's end may have come before this note of it. A run
            # that goes on says in its next round what is wrong.
            log.warning("The server was not told of a backup, and keeps what is older. %s", error)
            return
        strategy.write_event("backed_up", **place)

    def can_come_back(self, place: dict[str, Any] | None) -> bool:
        """Whether the run that goes on is the one that `place` is of, and keeps its rounds."""
        welcome = self._strategy.welcome
        if welcome is None or place is None or not welcome.is_back or not self._is_new():
            return False
        is_own = place["session"] == welcome.session
        is_own = is_own and place["fit"] == self._strategy._fitting.num_fits
        return is_own and place["round"] >= welcome.oldest

    def come_back(self, place: dict[str, Any]) -> None:
        """Goes on from `place`."""
        strategy = self._strategy
        strategy._num_gathers = int(place["gathers"])
        strategy._is_resumed = True
        strategy._open_round(int(place["round"]))
        strategy.write_event("came_back", **place)

    def is_lacking(self) -> bool:
        """Whether only another party's backup leads into the run that goes on."""
        welcome = self._with_others()
        return welcome is not None and welcome.is_back and self._is_new() and not welcome.keeps_all

    def fetch(self, intake: Intake) -> None:
        """Fetches another party's newest backup, if a loop bears that."""
        loan = self._strategy.loan
        if loan is not None:
            loan.owner.check_taking()
        began = time.monotonic()
        with watchdog.doing("a backup of another party", has_deadline=True):
            self._strategy._connected().fetch_backup(intake)
        self._strategy.write_event(
            "fetched_backup",
            name=intake.name,
            bytes=intake.held.num_bytes,
            seconds=time.monotonic() - began,
        )

    def offer(self, newest: Callable[[], Path]) -> None:
        """Gives the newest backup to parties that have lost theirs."""
        strategy = self._strategy
        if self._with_others() is None or strategy._is_closed:
            return
        strategy._connected().offer(lambda request: parcel.send(newest(), request.held))

    def when_left(self, action: Callable[[], None]) -> None:
        """Calls `action` when this process has left the run in peace."""
        self._strategy._when_left += (action,)

    def _with_others(self) -> Welcome | None:
        """What the run is, if its parties have the same weights where they meet.

        Parties of a loop train apart between two meetings, and callbacks are at work there.
        """
        strategy = self._strategy
        if strategy.loan is None:
            return strategy._together()
        with strategy.loan.whole():
            return strategy._together()

    def _is_new(self) -> bool:
        """Once, and at the beginning: later backups of this process are its own."""
        return not self._strategy._sums and not self._strategy._is_resumed
