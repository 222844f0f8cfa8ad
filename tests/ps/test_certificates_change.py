# SPDX-License-Identifier: Apache-2.0
"""Certificates that are revoked, or replaced, while a server and its parties use them."""

import dataclasses
import errno
import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.ps.parties import DEADLINE_S, Party, parties, serving, together, train_all
from tests.ps.relay import Relay
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import log
from tf_hips.config import Tls
from tf_hips.errors import ConfigError, PeerError
from tf_hips.ps.security import authority, revocation, tls
from tf_hips.ps.security.revocation import Revocations
from tf_hips.ps.transport import wire

pytestmark = pytest.mark.heavy  # servers start in most of these

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
    path.write_text(f"# comment\n\n{MARK} party/a 2026-11-22 lost, as they say\nend 1\n")
    found = Revocations(path, told.append)
    line = found.find(MARK)
    assert line is not None
    assert (line.name, line.day.isoformat()) == ("party/a", "2026-11-22")
    assert (line.reason, str(line)) == ("lost, as they say", path.read_text().splitlines()[2])
    assert found.find("cd" * 32) is None
    replace(path, f"{'cd' * 32} party/b 2026-11-23\nend 1\n")
    assert found.find(MARK) is None
    assert found.find("cd" * 32) is not None
    assert told == [f"1 certificates are revoked by {path}"]
    # What cannot be read does not count, and is told once.
    for broken in ("nonsense", f"{MARK} thief/a 2026-11-22", f"{MARK} party/a today"):
        replace(path, f"{broken}\nend 1\n")
        for _ in range(2):
            assert found.find("cd" * 32) is not None
        assert f"{path}, entry 1: " in told[-1]
        assert "is used on" in told[-1]
    # Neither does one that is not there to its last line, as while it is copied.
    for cut in ("", f"{MARK} party/a 2026-11-22\n", f"{MARK} party/a 2026-11-22\nend 2\n"):
        replace(path, cut)
        assert found.find("cd" * 32) is not None
        assert "must end in a line `end N`" in told[-1]
    path.unlink()
    assert found.find("cd" * 32) is not None
    assert "cannot be read" in told[-1]
    assert len(told) == 8


def unreadable(patch: pytest.MonkeyPatch) -> None:
    """Files are there, and belong to somebody else or find no descriptor that is free."""

    def refused(path: Path, *given: Any, **more: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for name in ("open", "read_bytes"):
        patch.setattr(Path, name, refused)


def test_what_could_not_be_read_is_looked_at_again(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy gets its owner and its mode when it is there, and no stamp tells of that."""
    old, new = certificates.party("a"), certificates.party("b")
    identity = Tls(old.authority, *(str(tmp_path / name) for name in ("pem", "key")))
    shutil.copy(old.certificate, identity.certificate)
    shutil.copy(old.key, identity.key)
    path, told = tmp_path / "revoked.txt", []
    path.write_text(f"{MARK} party/a 2026-11-22\nend 1\n")
    renewed, revoked = tls.Renewed(identity, tls.read, told.append), Revocations(path, told.append)
    before = renewed.get()
    shutil.copy(new.certificate, identity.certificate)
    shutil.copy(new.key, identity.key)
    path.write_text(f"{'cd' * 32} party/b 2026-11-23 stolen\nend 1\n")
    with monkeypatch.context() as patch:
        unreadable(patch)
        for _ in range(3):
            assert renewed.get() == before
            assert revoked.find(MARK) is not None
    assert len(told) == 2
    assert all("Permission denied" in one for one in told)
    assert renewed.get() == tls.read(new)
    assert revoked.find("cd" * 32) is not None
    assert revoked.find(MARK) is None
    assert len(told) == 4


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
    path.write_text("end 0\n")
    mark = tls.fingerprint(Path(certificates.party("b").certificate).read_bytes())
    with (
        serving(certificates, revoked=str(path)) as server,
        parties(server, certificates) as members,
    ):
        train_all(members, 0, 0)
        replace(path, f"{mark} party/b 2026-11-22 a lost laptop\nend 1\n")
        a, b = members
        packets = b.packets(1)
        with pytest.raises(PeerError, match=r"`party/b` was revoked on 2026-11-22: a lost laptop"):
            b.client.exchange(1, packets)
        replace(path, "end 0\n")
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
            # A pair that fits together, and is no server's.
            shutil.copy(own["a"].certificate, hub.certificate)
            assert shown_by(server.address) == shown[1]

            issue("party", "b")
            authority.revoke(folder, [old["b"]])
            members[1].client.link._disconnect()
            train_all(members, 1, 1)
        finally:
            for member in members:
                member.client.close()
    assert [line.name for line in authority.revoked(folder).values()] == ["party/b"]


def test_a_party_that_computes_comes_back_with_the_certificate_that_its_files_hold(
    certificates: Certificates, foreign_certificates: Certificates, tmp_path: Path
) -> None:
    """No call of it makes another connection, and gRPC's own tries on with the old one."""

    def taken(name: str, one: Tls) -> Tls:
        here = {field.name: tmp_path / f"{name}.{field.name}" for field in dataclasses.fields(Tls)}
        for field, path in here.items():
            replace(path, Path(getattr(one, field)).read_text())
        return Tls(**{field: str(path) for field, path in here.items()})

    hub, own = taken("hub", certificates.server()), taken("a", certificates.party("a"))
    with serving(certificates, tls=hub, parties=("a",)) as server:
        port = int(server.address.rpartition(":")[2])
        with Relay(port) as relay:
            party = Party(relay.address, "a", own)
            try:
                party.join()
                session = server._session
                calls = session._presence._calls[0]
                eventually(lambda: bool(calls), DEADLINE_S, changed=session.changed)
                first = calls[-1]
                # Of another authority: the one that is in use passes no handshake any more.
                taken("hub", foreign_certificates.server())
                taken("a", foreign_certificates.party("a"))
                relay.cut()
                eventually(
                    lambda: bool(calls) and calls[-1] is not first,
                    DEADLINE_S,
                    changed=session.changed,
                )
                party.train(0, 0)
            finally:
                party.client.close()


def test_another_signature_is_the_same_certificate(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Of an ECDSA signature (r, s) anybody can make (r, n - s), which is as good."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives.asymmetric import utils

    own = certificates.party("b")
    pem = Path(own.certificate).read_bytes()
    signature = x509.load_pem_x509_certificate(pem).signature
    r, s = utils.decode_dss_signature(signature)
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
    der = ssl.PEM_cert_to_DER_cert(pem.decode())
    front = der[: der.index(signature)]
    other = utils.encode_dss_signature(r, order - s)
    # Lengths before it: of the certificate, and of the bit string with the signature.
    tail = b"\x03" + bytes((len(other) + 1, 0)) + other
    inside = front[4:-3] + tail
    changed = b"\x30\x82" + len(inside).to_bytes(2, "big") + inside
    made = ssl.DER_cert_to_PEM_cert(changed).encode()
    assert made != pem
    assert tls.fingerprint(made) == tls.fingerprint(pem)
    (tmp_path / "b.pem").write_bytes(made)
    path = tmp_path / "revoked.txt"
    path.write_text(f"{tls.fingerprint(pem)} party/b 2026-11-22\nend 1\n")
    with serving(certificates, revoked=str(path)) as server:
        stranger = Party(server.address, "b", Tls(own.authority, str(tmp_path / "b.pem"), own.key))
        with pytest.raises(PeerError, match=r"`party/b` was revoked on 2026-11-22\."):
            stranger.join()


def test_a_revoked_certificate_does_not_shut_out_its_successor(
    certificates: Certificates, tmp_path: Path
) -> None:
    stolen, renewed = certificates.identity("party", "b", days=0.5), certificates.party("b")
    path = tmp_path / "revoked.txt"
    mark = tls.fingerprint(Path(stolen.certificate).read_bytes())
    path.write_text(f"{mark} party/b 2026-11-22\nend 1\n")
    with serving(certificates, revoked=str(path), max_refused=2) as server:
        texts = []
        for _ in range(3):
            with pytest.raises(PeerError) as caught:
                Party(server.address, "b", stolen).join()
            texts.append(str(caught.value))
        assert "2 calls of this caller were refused" in texts[-1]
        members = [
            Party(server.address, "a", certificates.party("a")),
            Party(server.address, "b", renewed),
        ]
        try:
            together(*(member.join for member in members))
            train_all(members, 0, 0)
        finally:
            for member in members:
                member.client.close()


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


def test_refusals_that_nobody_is_to_blame_for_are_not_all_written(
    certificates: Certificates, tmp_path: Path
) -> None:
    with (
        serving(certificates, max_refused=3, log_dir=tmp_path) as server,
        parties(server, certificates) as members,
    ):
        train_all(members, 0, 0)
        link = members[1].client.link
        wish = wire.to_json(parcel="", bytes=0, workers=77)
        codes = set()
        for _ in range(8):
            with pytest.raises(grpc.RpcError) as caught:
                list(link.stub("unary_stream", "WantBackup", 10.0)(wish, metadata=link.metadata()))
            codes.add(caught.value.code())
        assert codes == {grpc.StatusCode.ABORTED}  # it is heard each time
        train_all(members, 1, 1)
    refused = [one for one in log.read_events(tmp_path) if one["event"] == "call_refused"]
    assert len(refused) == 3


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028", "\u0085", "\x0b"])
def test_a_reason_of_two_lines_makes_no_list_that_cannot_be_read(end: str, tmp_path: Path) -> None:
    authority.make_authority(tmp_path)
    authority.make_certificate("party", "w", folder=tmp_path)
    with pytest.raises(ConfigError, match="`reason` must be one line"):
        authority.revoke(tmp_path, ["party/w"], f"lost{end}laptop")
    authority.revoke(tmp_path, ["party/w"], "lost laptop")
    assert [one.reason for one in authority.revoked(tmp_path).values()] == ["lost laptop"]
