# SPDX-License-Identifier: Apache-2.0
"""Certificates that end soon: when they do, and who hears of it."""

import ssl
from pathlib import Path

import pytest

from tests.ps.parties import Party, serving, together, train_all
from tests.support.certs import Certificates
from tf_hips import log
from tf_hips.cli.status import _certificates
from tf_hips.ps.security import authority, expiry
from tf_hips.ps.security.expiry import Expiry, Own, Validity, span, validity_of

DAY_S = 86_400.0


def test_the_validity_is_what_openssl_reads(certificates: Certificates, tmp_path: Path) -> None:
    authority.make_authority(tmp_path, days=20_000)
    # Beyond 2049 years have four digits.
    far = authority.make_certificate("party", "a", folder=tmp_path, days=15_000)
    for identity in (certificates.party("a"), certificates.server(), far):
        for path in (identity.certificate, identity.authority):
            decoded = ssl._ssl._test_decode_cert(path)  # type: ignore[attr-defined]
            begins, ends = (
                ssl.cert_time_to_seconds(decoded[key]) for key in ("notBefore", "notAfter")
            )
            assert validity_of(Path(path).read_bytes()) == Validity(begins, ends)


def test_what_is_no_certificate_has_no_validity(certificates: Certificates) -> None:
    pem = Path(certificates.party("a").certificate).read_bytes()
    whole = ssl.PEM_cert_to_DER_cert(pem.decode())
    for text in (b"", b"nonsense", pem[:100], Path(certificates.party("a").key).read_bytes()):
        with pytest.raises(ValueError, match="must be PEM"):
            validity_of(text)
    for size in range(len(whole)):
        with pytest.raises(ValueError):
            validity_of(ssl.DER_cert_to_PEM_cert(whole[:size]).encode())


def test_it_is_told_once_a_day_until_it_is_renewed() -> None:
    now, told = [0.0], []
    watch = Expiry(lambda name, left_s: told.append((name, left_s)), lambda: now[0])
    month, short = Validity(0.0, 30 * DAY_S), Validity(0.0, DAY_S)
    for hour in range(32 * 24):
        now[0] = hour * 3600.0
        assert watch.look("month", month) == month.ends - now[0]
    days = [left_s / DAY_S for _, left_s in told]
    assert days[0] == pytest.approx(6, abs=0.05)
    assert len(days) == 8
    assert days[-1] < 0
    told.clear()
    for hour in range(24):
        now[0] = hour * 3600.0
        watch.look("short", short)
        watch.look("renewed", short if hour < 20 else month)
    assert told == [("short", 4 * 3600.0)]
    # One name may have several certificates, which are shown in turn.
    told.clear()
    for number in range(100):
        now[0] = 40 * DAY_S + number
        watch.look("two", month if number % 2 else short)
    assert [name for name, _ in told] == ["two"] * 2
    now[0] += DAY_S
    watch.look("two", month)
    assert len(told) == 3
    assert len(watch._told) == 1  # what is older than a day is forgotten
    # A clock that was far ahead, and is set right, has not told for years.
    for day in (1000, 41):
        now[0] = day * DAY_S
        watch.look("ahead", month)
    assert [name for name, _ in told[3:]] == ["ahead"] * 2
    assert [span(one * DAY_S) for one in (26.9, 1.3, 0.05)] == ["26 days", "31 h", "72 min"]


def test_a_process_is_told_of_its_own_once(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soon = certificates.identity("party", "b", days=0.004)
    for _ in range(3):  # as many connections
        left_s = expiry.own(soon).look()
        assert left_s is not None
        assert 0 < left_s < 0.004 * DAY_S
    expiry.own(certificates.party("b")).look()
    [line] = [one.getMessage() for one in caplog.records]
    assert f"The certificate of {soon.certificate} ends in 5 min." in line
    assert Own(None, Expiry(print), "nobody").look() is None


@pytest.mark.heavy  # a server starts
def test_a_server_tells_of_its_own_and_of_those_of_its_children(
    certificates: Certificates, tmp_path: Path
) -> None:
    hub, soon = (
        certificates.identity(*who, days=0.0033)
        for who in (("global-server", "hq"), ("party", "b"))
    )
    with serving(certificates, tls=hub, log_dir=tmp_path) as server:
        a = Party(server.address, "a", certificates.party("a"))
        b = Party(server.address, "b", soon)
        together(a.join, b.join)
        train_all((a, b), 0, 1)
        told = server.snapshot()
        a.client.close()
        b.client.close()
    left = {child["site"]: child["certificate_s"] for child in told["children"]}
    assert left["b"] < 0.0033 * DAY_S < left["a"] < DAY_S
    assert _certificates(told) == (
        "certificate: ends in 4 min; of those below that of b is the first: ends in 4 min"
    )
    told["children"][1]["certificate_s"] = told["certificate_s"] = -1.0
    assert _certificates(told) == (
        "certificate: has ended; of those below that of b is the first: has ended"
    )
    events = [one for one in log.read_events(tmp_path) if one["event"] == "certificate_ends"]
    assert [one["who"] for one in events] == ["global-server", "party/b"]
    assert all(0 < one["left_s"] < 0.0033 * DAY_S for one in events)
