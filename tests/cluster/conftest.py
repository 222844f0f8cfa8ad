# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of clusters."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import sshd
from tests.cluster.sshd import Served, Site

TRAIN = """
import os, pathlib, sys, time
from tests.ps.parties import Party
from tf_hips import config

uplink = config.current().uplink
party = Party(uplink.server, uplink.site, uplink.tls)
party.join()
party.train(0, 2)
print(f"trained in {pathlib.Path.cwd()}: {sys.argv[1:]} {os.environ.get('GREETING')}", flush=True)
while not pathlib.Path("finish").exists():
    time.sleep(0.05)
party.train(3, 4)
party.client.leave()
"""


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An sshd on loopback."""
    if sshd.missing():
        pytest.skip(sshd.missing())
    with sshd.serving(tmp_path_factory.mktemp("sshd")) as served:
        yield served


@pytest.fixture
def site(tmp_path: Path, served: Served) -> Iterator[Site]:
    """A server and two parties that exchange three rounds; ended when the test is."""
    site = sshd.site(tmp_path, served.options(), TRAIN)
    told = site.file.read_text()
    yield site
    if list(tmp_path.glob("*/*/pid")):
        site.file.write_text(told)
        site.run("down", "--grace", "5")
