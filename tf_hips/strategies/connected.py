# SPDX-License-Identifier: Apache-2.0
"""A strategy with a connection to a server: what moves over it, and how a party comes back.

Where a backup was made is a place: a session, a round, a number of gathers, and which `fit`. A
process that is started again comes back to it once, before it has made anything of its own.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tf_hips import log
from tf_hips.comm import watchdog
from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps import parcel
from tf_hips.ps.parcel import Intake
from tf_hips.ps.rules import UpdateRule
from tf_hips.ps.shards import Connection
from tf_hips.ps.welcome import Welcome
from tf_hips.strategies.grouped import GroupedStrategy


class ConnectedStrategy(GroupedStrategy):
    """What of a strategy is about its connection; without a server nothing."""

    _client: Connection | None = None  # of rank 0
    _welcome: Welcome | None = None
    _rule: UpdateRule | None = None  # of the server
    _bytes = (0, 0)
    _num_gathers = 0
    _gathered_bytes = 0
    _is_resumed = False  # this process has taken over where its backup was made

    def _together(self) -> Welcome | None:
        """What the run is, where all parties keep step; None: this one is by itself."""
        is_apart = self._rule is not None and self._rule.is_asynchronous
        return None if is_apart or self._apart else self._welcome

    def _place(self) -> dict[str, Any] | None:
        if self._loan is not None:
            step = self._loan.round_step
        else:
            step = next((made.step for made in self._sums.values()), None)
        if self._welcome is None or step is None:
            return None
        place = {"session": self._welcome.session, "round": int(step.numpy())}
        return {**place, "gathers": self._num_gathers, "fit": self._fitting.num_fits}

    def _note_place(self, place: dict[str, Any]) -> None:
        if self._loan is not None and self._loan.is_busy:
            return  # it is told of the next backup; until then it keeps more than it needs
        try:
            self._connected().backed_up(place["round"], place["gathers"])
        except PeerError as error:
            # The backup stands, and another site's end may have come before this note of it. A run
            # that goes on says in its next round what is wrong.
            log.warning("The server was not told of a backup, and keeps what is older. %s", error)
            return
        self.write_event("backed_up", **place)

    def _can_come_back(self, place: dict[str, Any] | None) -> bool:
        welcome = self._welcome
        is_own = welcome is not None and place is not None and place["session"] == welcome.session
        is_own = is_own and place is not None and place["fit"] == self._fitting.num_fits
        # Once, and at the beginning: later backups of this process are its own.
        is_new = not self._sums and not self._is_resumed
        is_kept = welcome is not None and place is not None and place["round"] >= welcome.oldest
        return welcome is not None and welcome.is_back and is_own and is_new and is_kept

    def _lacks_backup(self) -> bool:
        welcome = self._together()
        is_new = not self._sums and not self._is_resumed
        return welcome is not None and welcome.is_back and is_new and not welcome.keeps_all

    def _fetch_backup(self, intake: Intake) -> None:
        began = time.monotonic()
        with watchdog.doing("a backup of another party", has_deadline=True):
            self._connected().fetch_backup(intake)
        self.write_event(
            "fetched_backup",
            name=intake.name,
            bytes=intake.held.num_bytes,
            seconds=time.monotonic() - began,
        )

    def _offer_backups(self, newest: Callable[[], Path] | None) -> None:
        if self._together() is None or self._is_closed:
            return
        self._connected().offer(
            None if newest is None else lambda request: parcel.send(newest(), request.held)
        )

    def _come_back(self, place: dict[str, Any]) -> None:
        self._num_gathers = int(place["gathers"])
        self._is_resumed = True
        self._open_round(int(place["round"]))
        self.write_event("came_back", **place)

    def _connected(self) -> Connection:
        if self._client is None or self._is_closed:
            raise ProtocolError("The strategy has left its run; make a new one to train on.")
        return self._client

    def _connected_or_closing(self) -> Connection:
        if self._client is None:
            raise ProtocolError("Only rank 0 of a party with an uplink counts bytes.")
        return self._client

    def _read_bytes(self) -> tuple[int, int]:
        count = self._connected_or_closing().wire_bytes()
        return count.sent, count.received

    def _new_bytes(self) -> tuple[int, int]:
        """Bytes sent and received on the uplink since the last call."""
        before, self._bytes = self._bytes, self._read_bytes()
        return self._bytes[0] - before[0], self._bytes[1] - before[1]
