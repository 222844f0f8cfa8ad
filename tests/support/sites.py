# SPDX-License-Identifier: Apache-2.0
"""A server in this process, and parties that find it in `TEST_CONFIG`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.ranks import run_parties
from tf_hips import config

if TYPE_CHECKING:
    from tf_hips.ps.server.server import Server


@contextlib.contextmanager
def trained(
    folder: Path,
    train: Callable[..., None],
    sites: Sequence[str],
    settings: dict[str, Any] | None = None,
    *,
    run: str = "test",
    seed: int = 7,
    deadline_s: float = 120,
    sizes: Sequence[int] | None = None,
    **server: Any,
) -> Iterator["Server"]:
    """Runs `train(folder=folder, **settings)` as each party, to the end; the server, still there.

    Args:
        folder: gets configurations, `log` of the server, and what parties leave.
        train: reads `config.load(os.environ["TEST_CONFIG"])`.
        sites: of the parties.
        settings: more of `train`.
        run: name of the run.
        seed: of the run.
        deadline_s: seconds that all may take.
        sizes: workers of each party; None: one.
        server: more of the server.
    """
    from tf_hips.ps.server.server import Server, ServerConfig

    told = {"run": run, "insecure": True, "log_dir": str(folder / "log"), **server}
    server_here = Server(ServerConfig(parties=tuple(sites), **told))
    server_here.start()
    try:
        environments = []
        for site in sites:
            path = folder / f"{site}.yaml"
            uplink = config.Uplink(server=server_here.address, site=site, deadline_s=60.0)
            config.dump(config.Run(run=run, seed=seed, uplink=uplink), path)
            environments.append({"TEST_CONFIG": str(path)})
        given = {"folder": folder, **(settings or {})}
        run_parties(train, given, sizes or [1] * len(sites), environments, deadline_s=deadline_s)
        yield server_here
    finally:
        server_here.stop(0.0)
