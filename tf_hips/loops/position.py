# SPDX-License-Identifier: Apache-2.0
"""Where a loop is, in the backups of a run."""

import json
from typing import Any

import tensorflow as tf

from tf_hips.callbacks.changes import changes
from tf_hips.errors import ProtocolError

# Facts that older backups do not have.
_LATER = ("`server_optimizer`", "`reset_optimizer`", "`pace`")


class Position(tf.train.experimental.PythonState):
    """Where a loop is, in the backups of a run."""

    def __init__(self, loop: Any) -> None:
        """Knows the loop, a `Loop`."""
        self._loop = loop

    def serialize(self) -> str:
        """The place, and what must be equal where it is taken up, as JSON."""
        loop = self._loop
        return json.dumps({"facts": loop.facts(), "place": loop.place()}, sort_keys=True)

    def deserialize(self, string_value: str) -> None:
        """Goes on where the run that saved it was.

        Raises:
            ProtocolError: that was a run of another loop.
        """
        saved, loop = json.loads(string_value), self._loop
        current = json.loads(json.dumps(loop.facts()))
        was = saved["facts"]
        known = {name: one for name, one in current.items() if name in was or name not in _LATER}
        told = changes(known, was)
        if told:
            raise ProtocolError(
                f"A backup must be taken up by the loop that made it. Received: {'; '.join(told)}"
            )
        loop.go_on(saved["place"])
