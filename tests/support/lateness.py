# SPDX-License-Identifier: Apache-2.0
"""Three parties of one worker each under a quorum of two, of which one stands still for a while."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import sites
from tf_hips import log

SITES = ("north", "south", "east")
LATE = SITES[-1]


def stand_still(folder: Path) -> None:
    """The late party waits until both others have called `go_on`."""
    for other in SITES[:-1]:
        with (folder / f"{other}.fifo").open() as heard:  # waits for its other end
            assert heard.read() == "on"


def go_on(folder: Path, site: str) -> None:
    """One of the others lets the late party go on."""
    with (folder / f"{site}.fifo").open("w") as other:
        other.write("on")


def run_with_one_late(
    folder: Path, train: Callable[..., None], **settings: Any
) -> list[dict[str, Any]]:
    """Runs `train(folder=folder)` as each party; all must leave the same in `SITE.json`.

    Args:
        folder: gets fifos, configurations, logs and what parties leave.
        train: finds its configuration in the file that `TEST_CONFIG` names.
        settings: more of the server.

    Returns:
        The server's events.
    """
    for site in SITES[:-1]:
        os.mkfifo(folder / f"{site}.fifo")
    with sites.trained(folder, train, SITES, quorum=2, round_deadline=0.2, **settings):
        pass
    north, south, east = (json.loads((folder / f"{site}.json").read_text()) for site in SITES)
    assert north == south == east
    return list(log.read_events(folder / "log"))
