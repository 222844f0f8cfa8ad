# SPDX-License-Identifier: Apache-2.0
"""Throw-away certificates: one authority for the whole test session, identities on demand."""

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tf_hips.config import Tls
from tf_hips.ps.security import authority


class Certificates:
    """An authority in a folder of its own, and the identities it has signed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        authority.make_authority(folder, days=2)

    @functools.cache  # noqa: B019 - lives as long as the session
    def identity(self, role: str, site: str, days: float = 1) -> Tls:
        """The identity of `role/site`; each validity has a folder of its own."""
        folder = self._folder / f"{days}"
        return authority.make_certificate(
            role, site, folder=folder, authority=self._folder, days=days
        )

    def party(self, site: str) -> Tls:
        """The identity of a party."""
        return self.identity("party", site)

    def server(self) -> Tls:
        """The identity of a global server."""
        return self.identity("global-server", "hq")


@pytest.fixture(scope="session")
def certificates() -> Iterator[Certificates]:
    """The authority that servers and parties of the tests trust."""
    with tempfile.TemporaryDirectory() as folder:
        yield Certificates(Path(folder) / "ours")


@pytest.fixture(scope="session")
def foreign_certificates() -> Iterator[Certificates]:
    """Another authority, that they do not trust."""
    with tempfile.TemporaryDirectory() as folder:
        yield Certificates(Path(folder) / "theirs")
