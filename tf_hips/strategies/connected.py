# SPDX-License-Identifier: Apache-2.0
"""A strategy with a connection to a server: what moves over it."""

from tf_hips.errors import ProtocolError
from tf_hips.ps.shards import Connection
from tf_hips.ps.welcome import Welcome
from tf_hips.strategies.grouped import GroupedStrategy


class ConnectedStrategy(GroupedStrategy):
    """What of a strategy is about its connection; without a server nothing."""

    _bytes = (0, 0)
    _num_gathers = 0
    _gathered_bytes = 0
    _is_resumed = False  # this process has taken over where its backup was made

    def _together(self) -> Welcome | None:
        """What the run is, where all parties keep step; None: this one is by itself."""
        is_apart = self.rule is not None and self.rule.is_asynchronous
        return None if is_apart or self._apart else self.welcome

    def _connected(self) -> Connection:
        if self.client is None or self._is_closed:
            raise ProtocolError("The strategy has left its run; make a new one to train on.")
        return self.client

    def _connected_or_closing(self) -> Connection:
        if self.client is None:
            raise ProtocolError("Only rank 0 of a party with an uplink counts bytes.")
        return self.client

    def _read_bytes(self) -> tuple[int, int]:
        count = self._connected_or_closing().wire_bytes()
        return count.sent, count.received

    def _new_bytes(self) -> tuple[int, int]:
        """Bytes sent and received on the uplink since the last call."""
        before, self._bytes = self._bytes, self._read_bytes()
        return self._bytes[0] - before[0], self._bytes[1] - before[1]
