# SPDX-License-Identifier: Apache-2.0
"""Three parties of one worker each under a quorum of two, of which one stands still for a while."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.ranks import run_parties
from tf_hips import config, log

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
    from tf_hips.ps.server import Server, ServerConfig

    for site in SITES[:-1]:
        os.mkfifo(folder / f"{site}.fifo")
    logs = folder / "log"
    told = {"parties": SITES, "run": "late", "insecure": True, "log_dir": str(logs)}
    server = Server(ServerConfig(**told, quorum=2, round_deadline=0.2, **settings))
    server.start()
    try:
        environments = []
        for site in SITES:
            path = folder / f"{site}.yaml"
            uplink = config.Uplink(server=server.address, site=site, deadline_s=60.0)
            config.dump(config.Run(run="late", seed=7, uplink=uplink), path)
            environments.append({"TEST_CONFIG": str(path)})
        run_parties(train, {"folder": folder}, [1, 1, 1], environments, deadline_s=120)
    finally:
        server.stop(0.0)
    north, south, east = (json.loads((folder / f"{site}.json").read_text()) for site in SITES)
    assert north == south == east
    return list(log.read_events(logs))
