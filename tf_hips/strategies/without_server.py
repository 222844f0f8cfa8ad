# SPDX-License-Identifier: Apache-2.0
"""What scripts ask of every strategy, as it is for one without a server.

So a script changes its strategy by one line, and nothing else of it.
"""

import sys
from typing import Any

import tensorflow as tf

from tf_hips import log
from tf_hips.errors import ProtocolError
from tf_hips.ops.compressor import Compressor


class WithoutServer:
    """Names of a strategy that mean more where there is a server."""

    events: log.EventLog
    _nonfinite: str
    _is_closed = False  # it has left its run

    def close(self, reason: str | None = None) -> None:
        """Ends the log. There is no run to leave: training may go on.

        Later calls do nothing.

        Args:
            reason: why, for other parties; here there are none.
        """
        del reason
        self.events.close()

    @property
    def seconds_in_rounds(self) -> float:
        """Seconds that rounds with other parties have taken so far: none."""
        return 0.0

    def most_gather_bytes(self) -> int:
        """What a party may send at a time to others, on rank 0; without others, anything."""
        return sys.maxsize

    def from_party(self, party: int, label: str, payload: bytes) -> bytes | None:
        """Bytes of one party, at all that keep step; this one's, where there is no other."""
        del party, label
        return payload

    def sampling_seed(self, step: Any = None) -> tf.Tensor:
        """The seed of this worker's group in a step, where parties vote in groups.

        Args:
            step: the number of the step.

        Raises:
            ProtocolError: they do not.
        """
        del step
        raise ProtocolError(
            "Only parties that vote have groups: "
            "`HierarchicalPS(rule=tf_hips.robust.detox.Detox(...))` with a server. "
            f"Received: {self!r}"
        )

    def _codecs(self) -> dict[str, Compressor | None]:
        """How gradients are encoded, by the name of the argument that says so."""
        return {}

    def _way_facts(self) -> dict[str, Any]:
        """What else decides about sums: JSON values by name, compared where state is restored."""
        return {}

    def _settings(self) -> dict[str, Any]:
        """What was chosen, by name: for `repr`."""
        return {**self._codecs(), **self._way_facts(), "nonfinite": self._nonfinite}

    def __repr__(self) -> str:
        told = self._settings()
        return f"<{type(self).__name__}: {', '.join(f'{name}={told[name]}' for name in told)}>"
