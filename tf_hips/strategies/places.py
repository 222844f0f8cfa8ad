# SPDX-License-Identifier: Apache-2.0
"""The places that this process has, or had, in runs: a strategy that wants one again hears so.

A server could not tell it from another process of the same site, whose end it would wait for; and
once a run is over, its server may be gone, and nobody would know whether it had ever been there.
"""

import dataclasses
import os

from tf_hips.config import Run
from tf_hips.errors import ProtocolError
from tf_hips.ps.client.shards import Connection

_ADVICE = (
    "A server of one run (`--once`, `tf-hips run`) ends with it: train all models by one strategy, "
    "and `close()` it behind the last one; or start another run."
)


@dataclasses.dataclass
class _Place:
    """A place.

    Attributes:
        client: the connection by which it was taken.
        process: the number of the process that has taken it; a fork may look here, too.
        has_left: whether the site has left the run, so that no process can come back to it.
    """

    client: Connection
    process: int
    has_left: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether the run was heard to have ended; then its server may have begun another one."""
        return self.client.ended("Join") is not None


_taken: dict[tuple[str, str, str], _Place] = {}


def check(run: Run) -> None:
    """Raises where this process cannot join a run, as it is in it or was.

    Raises:
        ProtocolError: a strategy of this process is in the run; or the run is over, and its servers
            have ended with it.
    """
    place = _taken.get(_key(run))
    if place is None:
        return
    if not (place.client.link.is_closed or place.has_ended):
        is_own = place.process == os.getpid()
        whose = "this process" if is_own else f"process {place.process}, which has forked this one,"
        raise ProtocolError(
            "A process must train by one strategy of a run: use the one that is there for all "
            "models, each built in its scope. Received: a second strategy, while the first one of "
            f"{whose} is in run `{run.run}`"
        )
    if run.servers_end and (place.has_left or place.has_ended):
        raise ProtocolError(f"Run `{run.run}` is over. {_ADVICE}")


def told_of(run: Run) -> str:
    """What an error of joining `run` may come from, if this process has been in it; else ""."""
    place = _taken.get(_key(run))
    if place is None or not (place.has_left or place.has_ended):
        return ""
    return f" This process was in run `{run.run}` before. {_ADVICE}"


def take(run: Run, client: Connection) -> None:
    """This process has joined a run."""
    _taken[_key(run)] = _Place(client, os.getpid())


def leave(run: Run) -> None:
    """This process has left a run for good."""
    place = _taken.get(_key(run))
    if place is not None:
        place.has_left = True


def _key(run: Run) -> tuple[str, str, str]:
    uplink = run.uplink
    return (run.run, uplink.server, uplink.site) if uplink is not None else (run.run, "", "")
