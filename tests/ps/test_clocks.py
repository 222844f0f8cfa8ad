# SPDX-License-Identifier: Apache-2.0
"""Clocks that are wrong by hours: certificates look as if they began or ended at another time."""

import datetime
import types
from pathlib import Path

import pytest

from tests.ps.parties import serving
from tests.ps.test_tls import error_of_join, undisturbed
from tests.support.certs import Certificates
from tf_hips.config import Tls
from tf_hips.errors import PeerError
from tf_hips.ps.security import authority

pytestmark = pytest.mark.heavy  # servers start in most of these

WRONG = datetime.timedelta(hours=5)


class _Fast(datetime.datetime):
    """The clock of a machine that is hours fast."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_Fast":
        return super().now(tz) + WRONG


@pytest.fixture
def made_there(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tls]:
    """Certificates that were made by a clock that is fast: here they are not valid yet."""
    fast = types.SimpleNamespace(
        datetime=_Fast, timedelta=datetime.timedelta, UTC=datetime.UTC, date=datetime.date
    )
    with monkeypatch.context() as patch:
        patch.setattr(authority, "datetime", fast)
        return {
            role: authority.make_certificate(
                role, site, folder=tmp_path, authority=certificates._folder, days=1
            )
            for role, site in (("party", "b"), ("global-server", "hq"))
        }


def test_a_party_with_a_certificate_of_a_fast_clock(
    certificates: Certificates, made_there: dict[str, Tls]
) -> None:
    with undisturbed(certificates) as address:
        error = error_of_join(address, made_there["party"])
    assert isinstance(error, PeerError)
    assert "refuses our certificate" in str(error)
    assert "it is not valid yet: are the clocks right?" in str(error)


def test_a_server_with_a_certificate_of_a_fast_clock(
    certificates: Certificates, made_there: dict[str, Tls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf_hips.ps.server.server.check_server", lambda *_: None)
    with serving(certificates, tls=made_there["global-server"]) as server:
        error = error_of_join(server.address, certificates.party("b"))
    assert isinstance(error, PeerError)
    assert "is not valid yet: are the clocks right?" in str(error)


def test_a_server_that_judges_otherwise(
    certificates: Certificates,
    foreign_certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By our own clock and authority nothing is wrong with our certificate."""
    ours, theirs = certificates.server(), foreign_certificates.server()
    mixed = Tls(theirs.authority, ours.certificate, ours.key)
    monkeypatch.setattr("tf_hips.ps.server.server.check_server", lambda *_: None)
    with serving(certificates, tls=mixed) as server:
        error = error_of_join(server.address, certificates.party("b"), deadline_s=1.0)
    assert isinstance(error, PeerError)
    assert "the clock there is wrong, or its authority another" in str(error)
