# SPDX-License-Identifier: Apache-2.0
"""Certificates that are revoked, or replaced, while a server and its parties use them."""

import shutil
import ssl
from pathlib import Path

import pytest

from tests.ps.parties import Party, parties, serving, together, train_all
from tests.support.certs import Certificates
from tf_hips.config import Tls
from tf_hips.errors import ConfigError, PeerError
from tf_hips.ps import authority, revocation, tls
from tf_hips.ps.revocation import Revocations

MARK = "ab" * 32


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def shown_by(address: str) -> str:
    """The fingerprint of the certificate that a server shows now."""
    host, _, port = address.rpartition(":")
    return tls.fingerprint(ssl.get_server_certificate((host, int(port))).encode())


def test_a_list_is_read_and_followed(tmp_path: Path) -> None:
    path, told = tmp_path / "revoked.txt", []
    path.write_text(f"# comment\n\n{MARK} party/a 2026-11-22 lost, as they say\n")
    found = Revocations(path, told.append)
    line = found.find(MARK)
    assert line is not None
    assert (line.name, line.day.isoformat()) == ("party/a", "2026-11-22")
    assert (line.reason, str(line)) == ("lost, as they say", path.read_text().splitlines()[2])
    assert found.find("cd" * 32) is None
    replace(path, f"{'cd' * 32} party/b 2026-11-23\n")
    assert found.find(MARK) is None
    assert found.find("cd" * 32) is not None
    assert told == [f"1 certificates are revoked by {path}"]
    # What cannot be read does not count, and is told once.
    for broken in ("nonsense\n", f"{MARK} thief/a 2026-11-22\n", f"{MARK} party/a today\n"):
        replace(path, broken)
        for _ in range(2):
            assert found.find("cd" * 32) is not None
        assert f"{path}, line 1: " in told[-1]
        assert "is used on" in told[-1]
    path.unlink()
    assert found.find("cd" * 32) is not None
    assert "cannot be read" in told[-1]
    assert len(told) == 5


def test_a_list_must_be_there_and_needs_tls(certificates: Certificates, tmp_path: Path) -> None:
    missing = str(tmp_path / "none.txt")
    with (
        pytest.raises(ConfigError, match=r"revoked certificates .* cannot be read"),
        serving(certificates, revoked=missing),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="`revoked` needs `tls`"),
        serving(certificates, revoked=missing, insecure=True),
    ):
        pass
    (tmp_path / "long.txt").write_bytes(b"#" * ((16 << 20) + 1))
    with pytest.raises(ConfigError, match="at most 16777216 bytes"):
        revocation.read(tmp_path / "long.txt")


def test_a_revoked_party_is_refused_at_its_next_call(
    certificates: Certificates, tmp_path: Path
) -> None:
    path = tmp_path / "revoked.txt"
    path.write_text("")
    mark = tls.fingerprint(Path(certificates.party("b").certificate).read_bytes())
    with (
        serving(certificates, revoked=str(path)) as server,
        parties(server, certificates) as members,
    ):
        train_all(members, 0, 0)
        replace(path, f"{mark} party/b 2026-11-22 a lost laptop\n")
        a, b = members
        packets = b.packets(1)
        with pytest.raises(PeerError, match=r"`party/b` was revoked on 2026-11-22: a lost laptop"):
            b.client.exchange(1, packets)
        replace(path, "")
        # Nothing of the refused call has counted; the same packets are taken now.
        first, second = together(
            lambda: a.train(1, 1), lambda: [b.client.exchange(1, packets).tobytes()]
        )
        assert first == second


def test_files_are_replaced_under_a_server_and_its_parties(
    certificates: Certificates, tmp_path: Path
) -> None:
    folder = tmp_path / "pki"
    authority.make_authority(folder, days=2)

    def issue(role: str, site: str) -> Tls:
        return authority.make_certificate(role, site, folder=folder, days=1)

    hub, own = issue("global-server", "hq"), {site: issue("party", site) for site in "ab"}
    old = {name: tls.fingerprint(Path(one.certificate).read_bytes()) for name, one in own.items()}
    (folder / "revoked.txt").write_text("")
    settings = {"tls": hub, "revoked": str(folder / "revoked.txt")}
    with serving(certificates, **settings) as server:
        members = [Party(server.address, site, own[site]) for site in "ab"]
        try:
            together(*(member.join for member in members))
            train_all(members, 0, 0)
            shown = [shown_by(server.address)]
            issue("global-server", "hq")
            shown.append(shown_by(server.address))
            assert shown[1] == tls.fingerprint(Path(hub.certificate).read_bytes())
            assert shown[0] != shown[1]
            # A key that is not the certificate's, as while files are copied one by one.
            shutil.copy(own["a"].key, hub.key)
            assert shown_by(server.address) == shown[1]

            issue("party", "b")
            authority.revoke(folder, [old["b"]])
            members[1].client._link._disconnect()
            train_all(members, 1, 1)
        finally:
            for member in members:
                member.client.close()
    assert [line.name for line in authority.revoked(folder).values()] == ["party/b"]


def test_who_is_refused_too_often_is_turned_away(certificates: Certificates) -> None:
    with (
        serving(certificates, max_refused=3) as server,
        parties(server, certificates) as members,
    ):
        train_all(members, 0, 0)
        texts = []
        for _ in range(5):
            stranger = Party(server.address, "c", certificates.party("c"))
            with pytest.raises(PeerError) as caught:
                stranger.join()
            texts.append(str(caught.value))
        assert all("The site must be one of a, b" in text for text in texts[:3])
        assert all("3 calls of this caller were refused" in text for text in texts[3:])
        train_all(members, 1, 1)
