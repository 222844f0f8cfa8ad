# SPDX-License-Identifier: Apache-2.0
"""Who may call whom: a wrong certificate is refused in one sentence, and the server goes on."""

import contextlib
import errno
import os
import resource
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.ps.parties import (
    SITES,
    Party,
    parties,
    raw_channel,
    raw_exchange,
    serving,
    together,
    train_all,
)
from tests.support.certs import Certificates
from tf_hips.config import Tls, Uplink
from tf_hips.errors import ConfigError, PeerError, TfHipsError
from tf_hips.ps.client.client import Client
from tf_hips.ps.security import authority, tls
from tf_hips.ps.security.diagnosis import diagnose, own_identity
from tf_hips.ps.security.tls import Identity
from tf_hips.ps.transport import wire

pytestmark = pytest.mark.heavy  # servers start in most of these


@contextlib.contextmanager
def undisturbed(certificates: Certificates, **settings: object) -> Iterator[str]:
    """The address of a server whose parties train before and after the body."""
    with serving(certificates, **settings) as server:
        insecure = bool(settings.get("insecure"))
        with parties(server, certificates, insecure=insecure) as members:
            train_all(members, 0, 0)
            yield server.address
            train_all(members, 1, 1)


def error_of_join(
    address: str, identity: Tls | None, site: str = "b", deadline_s: float = 10.0
) -> TfHipsError:
    party = Party(address, site, identity, deadline_s=deadline_s)
    try:
        with pytest.raises(TfHipsError) as caught:
            party.join()
        return caught.value
    finally:
        party.client.close()


def test_a_certificate_of_another_authority_is_refused(
    certificates: Certificates, foreign_certificates: Certificates
) -> None:
    mixed = Tls(
        certificates.party("b").authority,
        foreign_certificates.party("b").certificate,
        foreign_certificates.party("b").key,
    )
    with undisturbed(certificates) as address:
        error = error_of_join(address, mixed)
    assert isinstance(error, PeerError)
    assert "refuses our certificate" in str(error)
    assert mixed.certificate in str(error)


def test_a_server_of_another_authority_is_refused(
    certificates: Certificates, foreign_certificates: Certificates
) -> None:
    with undisturbed(certificates) as address:
        error = error_of_join(address, foreign_certificates.party("b"))
    assert isinstance(error, PeerError)
    assert "must come from the authority" in str(error)
    assert foreign_certificates.party("b").authority in str(error)


def test_an_expired_certificate_is_refused(certificates: Certificates) -> None:
    with undisturbed(certificates) as address:
        error = error_of_join(address, certificates.identity("party", "b", days=-1))
    assert isinstance(error, PeerError)
    assert "refuses our certificate" in str(error)
    assert "expired" in str(error)


def test_a_server_with_an_expired_certificate_is_refused(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf_hips.ps.server.server.check_server", lambda *_: None)
    expired = certificates.identity("global-server", "hq", days=-1)
    with serving(certificates, tls=expired) as server:
        error = error_of_join(server.address, certificates.party("b"))
    assert isinstance(error, PeerError)
    assert "has expired" in str(error)


@pytest.mark.parametrize(
    ("role", "site", "text"),
    [
        ("worker", "b", "must be `party/b`. Received: `worker/b`"),
        ("global-server", "hq", "must be `party/b`. Received: `global-server/hq`"),
        ("party", "a", "must be `party/b`. Received: `party/a`"),
    ],
)
def test_a_certificate_of_another_role_or_site_is_refused(
    certificates: Certificates, role: str, site: str, text: str
) -> None:
    with undisturbed(certificates) as address:
        error = error_of_join(address, certificates.identity(role, site))
    assert isinstance(error, PeerError)
    assert text in str(error)


def test_a_site_that_is_not_of_the_run_is_refused(certificates: Certificates) -> None:
    with undisturbed(certificates) as address:
        error = error_of_join(address, certificates.party("c"), site="c")
    assert "The site must be one of a, b. Received: `c`" in str(error)


def test_every_call_is_checked(certificates: Certificates) -> None:
    with (
        undisturbed(certificates) as address,
        raw_channel(address, certificates.identity("worker", "b")) as channel,
    ):
        for kind, method in [
            ("unary_unary", "Join"),
            ("unary_unary", "AgreeModel"),
            ("unary_unary", "BeginSync"),
            ("unary_unary", "Leave"),
            ("stream_unary", "Upload"),
            ("unary_stream", "Download"),
            ("stream_stream", "Exchange"),
        ]:
            request = iter([b""]) if kind.startswith("stream") else b""
            metadata = ((wire.METADATA_KEY, "local/b/p/0/0"),)
            stub = getattr(channel, kind)(f"/{wire.SERVICE}/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                answer = stub(request, timeout=10, metadata=metadata)
                list(answer)
            assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED, method


def test_another_run_is_refused(certificates: Certificates) -> None:
    with (
        undisturbed(certificates) as address,
        raw_channel(address, certificates.party("b")) as channel,
    ):
        code, text = raw_exchange(channel, wire.Call("other", "b", "p", 1), [])
    assert (code, text) == (
        grpc.StatusCode.PERMISSION_DENIED,
        "The run must be `local`. Received: `other`. Both sides take it from --run, or `run` of "
        "their configuration",
    )


def test_a_server_must_have_the_role(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf_hips.ps.server.server.check_server", lambda *_: None)
    for role in ("party", "server"):
        with serving(certificates, tls=certificates.identity(role, "hq")) as server:
            error = error_of_join(server.address, certificates.party("b"))
        assert isinstance(error, PeerError)
        assert "must be one of role global-server" in str(error)


def test_a_server_looks_at_its_own_certificate(
    certificates: Certificates, foreign_certificates: Certificates, tmp_path: Path
) -> None:
    good, foreign = certificates.server(), foreign_certificates.server()
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    for identity, text in [
        (certificates.identity("party", "a"), "must be one of role global-server"),
        (certificates.identity("server", "hq"), "must be one of role global-server"),
        (certificates.identity("global-server", "hq", days=-1), "has expired"),
        (Tls(foreign.authority, good.certificate, good.key), "must come from the authority"),
        (Tls(good.authority, good.certificate, foreign.key), "the key .* does not belong to"),
        (Tls(good.authority, str(garbage), good.key), "cannot be used"),
        (Tls(str(garbage), good.certificate, good.key), "cannot be used"),
    ]:
        with pytest.raises(ConfigError, match=text), serving(certificates, tls=identity):
            pass


def test_plain_text_to_a_tls_port(certificates: Certificates) -> None:
    with undisturbed(certificates) as address:
        error = error_of_join(address, None)
    assert isinstance(error, PeerError)
    assert "speaks TLS and this side plain text" in str(error)
    assert "--authority, --certificate and --key" in str(error)


def test_tls_to_a_plain_port(certificates: Certificates) -> None:
    with undisturbed(certificates, insecure=True) as address:
        error = error_of_join(address, certificates.party("b"))
    assert isinstance(error, PeerError)
    assert "speaks plain text and this side TLS" in str(error)


def test_nothing_listens(certificates: Certificates) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        error = error_of_join(address, certificates.party("b"), deadline_s=1.0)
    assert isinstance(error, PeerError)
    assert f"Nothing listens at {address} (Connection refused)" in str(error)


def test_a_peer_that_says_nothing(certificates: Certificates) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        closing = threading.Thread(target=lambda: close_all(mute), daemon=True)
        closing.start()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        error = error_of_join(address, certificates.party("b"), deadline_s=1.0)
        mute.shutdown(socket.SHUT_RDWR)
        closing.join(10)
    assert isinstance(error, PeerError)
    assert address in str(error)
    assert "handshake" in str(error)


def close_all(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def test_a_client_without_a_certificate_is_refused(certificates: Certificates) -> None:
    with undisturbed(certificates) as address:
        host, port = address.split(":")
        context = ssl.create_default_context(cafile=certificates.server().authority)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), 10) as raw,
            context.wrap_socket(raw, server_hostname="global-server.tf-hips") as secure,
        ):
            # A server that accepts a connection speaks first: its settings.
            try:
                assert secure.recv(1) == b""
            except ssl.SSLError as error:
                assert "ALERT" in str(error).upper()


@pytest.mark.parametrize("server", ["10.0.0.1:5", "example.org:5", "nowhere", ":5", "a:b"])
def test_plain_text_is_for_loopback_only(server: str) -> None:
    with pytest.raises(ConfigError, match=r"loopback only|host:port"):
        Client(Uplink(server, "a"), "local", 1)


def test_an_identity_is_role_and_site() -> None:
    assert Identity.parse("party/a") == Identity("party", "a")
    for text in ("party", "party/", "thief/a", "party/a/b", "/a", "party/a b", "Party/a"):
        assert Identity.parse(text) is None


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    authority.make_authority(folder)
    identity = authority.make_certificate("global-server", "hq", folder=folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "authority.key", "authority.pem", "global-server-hq.key", "global-server-hq.pem",
        "issued.txt", "revoked.txt",
    ]  # fmt: skip
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    decoded = ssl._ssl._test_decode_cert(identity.certificate)  # type: ignore[attr-defined]
    assert decoded["subject"] == ((("commonName", "global-server/hq"),),)
    assert decoded["subjectAltName"] == (("DNS", "global-server.tf-hips"),)
    days_left = (ssl.cert_time_to_seconds(decoded["notAfter"]) - time.time()) / 86400
    assert 29.9 < days_left <= 30
    with pytest.raises(ConfigError, match="holds an authority already"):
        authority.make_authority(folder)
    with pytest.raises(ConfigError, match="`role` must be one of"):
        authority.make_certificate("thief", "a", folder=folder)
    with pytest.raises(ConfigError, match=r"must not outlast its authority, .* days=4000"):
        authority.make_certificate("party", "a", folder=folder, days=4000)
    with pytest.raises(ConfigError, match=r"authority's file .* cannot be read"):
        authority.make_certificate("party", "a", folder=tmp_path / "other")


def test_files_of_an_authority_are_on_the_disk_before_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int, bool]] = []  # inode, bytes, whether it is a folder
    fsync, replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        told = os.fstat(descriptor)
        synced.append((told.st_ino, told.st_size, stat.S_ISDIR(told.st_mode)))
        fsync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        told = path.stat()
        assert (told.st_ino, told.st_size, False) in synced, target
        synced.clear()
        return replace(path, target)

    monkeypatch.setattr(authority.os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    folder = (tmp_path.stat().st_ino, True)
    authority.make_authority(tmp_path)
    assert folder in [(inode, is_folder) for inode, _, is_folder in synced]
    synced.clear()
    authority.make_certificate("party", "b", folder=tmp_path)
    assert folder in [(inode, is_folder) for inode, _, is_folder in synced]
    synced.clear()
    authority._append(tmp_path / "issued.txt", f"{'0' * 64} party/c 2026-01-01")
    told = (tmp_path / "issued.txt").stat()
    assert [(inode, is_folder) for inode, _, is_folder in synced] == [
        (told.st_ino, False),
        folder,
    ]
    assert synced[0][1] == told.st_size
    authority.revoke(tmp_path, ["party/b"])


def test_a_full_disk_leaves_no_part_of_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.make_authority(tmp_path)
    room = [2]  # for what is noted of the certificate before it is there, and its folder
    sync = os.fsync

    def full(descriptor: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(authority.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*/party-a\.key"):
        authority.make_certificate("party", "a", folder=tmp_path, authority=tmp_path)
    assert not [path for path in tmp_path.iterdir() if "party-a" in path.name]


def test_an_authority_whose_key_has_a_passphrase_says_so(tmp_path: Path) -> None:
    authority.make_authority(tmp_path)
    lock(tmp_path / authority.KEY_FILE, tmp_path / authority.KEY_FILE)
    with pytest.raises(ConfigError, match="must have no passphrase"):
        authority.make_certificate("party", "a", folder=tmp_path)


@pytest.mark.parametrize("is_first", [True, False])
def test_while_an_authority_is_changed_its_own_certificate_signs(
    tmp_path: Path, is_first: bool
) -> None:
    """Its file holds that of the one before, too, until all have certificates of the new one."""
    old, new = tmp_path / "old", tmp_path / "new"
    pems = [authority.make_authority(folder).read_bytes() for folder in (new, old)]
    (new / "authority.pem").write_bytes(b"".join(pems if is_first else pems[::-1]))
    made = authority.make_certificate("party", "a", folder=new)
    assert own_identity(made) == Identity("party", "a")
    (new / "authority.pem").write_bytes(pems[1])
    with pytest.raises(ConfigError, match=r"authority\.pem must hold the certificate of .*\.key"):
        authority.make_certificate("party", "a", folder=new)
    for name in ("pem", "key"):
        (old / f"authority.{name}").write_text("-----BEGIN NOTHING")
        with pytest.raises(ConfigError, match=rf"authority\.{name} must be .* in PEM"):
            authority.make_certificate("party", "a", folder=old)


def test_half_a_line_does_not_stay_on_the_list_of_certificates(tmp_path: Path) -> None:
    """A disk that is full takes a part, and what cannot be read could not be revoked."""
    authority.make_authority(tmp_path)
    authority.make_certificate("party", "a", folder=tmp_path)
    path = tmp_path / "issued.txt"
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*issued\.txt"):
            authority._append(path, f"{'0' * 64} party/b 2026-01-01")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    authority.make_certificate("party", "b", folder=tmp_path)
    assert [one.name for one in authority.revoke(tmp_path, ["party/b"])] == ["party/b"]


def test_who_revokes_at_the_same_time_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.make_authority(tmp_path)
    for site in "ab":
        authority.make_certificate("party", site, folder=tmp_path)
    read, both = authority.revoked, threading.Barrier(2)

    def revoked(folder: Path) -> Any:
        found = read(folder)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # so the second one has read as well, where it may
        return found

    monkeypatch.setattr(authority, "revoked", revoked)
    together(*(lambda site=site: authority.revoke(tmp_path, [f"party/{site}"]) for site in "ab"))
    assert sorted(one.name for one in read(tmp_path).values()) == ["party/a", "party/b"]


def test_unreadable_files_are_named(certificates: Certificates, tmp_path: Path) -> None:
    good = certificates.party("a")
    (tmp_path / "empty").write_text("")
    for bad, text in [
        (Tls(str(tmp_path / "none"), good.certificate, good.key), r"`tls.authority`: .*No such"),
        (Tls(good.authority, good.certificate, str(tmp_path / "empty")), "`tls.key`: .*be PEM"),
    ]:
        with pytest.raises(ConfigError, match=text):
            Client(Uplink("127.0.0.1:5", "a", bad), "local", 1)


def test_files_as_editors_of_other_systems_leave_them(
    certificates: Certificates, tmp_path: Path
) -> None:
    def edited(identity: Tls, folder: Path) -> Tls:
        folder.mkdir()
        for name in ("authority", "certificate", "key"):
            text = Path(getattr(identity, name)).read_bytes().replace(b"\n", b"\r\n")
            (folder / name).write_bytes(b"\xef\xbb\xbf" + text)
        return Tls(*(str(folder / name) for name in ("authority", "certificate", "key")))

    with serving(certificates, tls=edited(certificates.server(), tmp_path / "hub")) as server:
        members = [
            Party(server.address, site, edited(certificates.party(site), tmp_path / site))
            for site in SITES
        ]
        try:
            together(*(member.join for member in members))
        finally:
            for member in members:
                member.client.close()


def test_keys_that_grpc_does_not_know_are_no_matter_of_the_address(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = grpc.ssl_server_credentials([(b"no key", b"no certificate")])
    monkeypatch.setattr(tls, "server_credentials", lambda *_: strange)
    with (
        pytest.raises(ConfigError, match="must be of a kind that gRPC knows, RSA or P-256"),
        serving(certificates),
    ):
        pass


def lock(key: Path, locked: Path) -> None:
    """Writes a key once more, with a passphrase."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    found = serialization.load_pem_private_key(key.read_bytes(), None)
    locked.write_bytes(
        found.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )


def test_an_address_that_grpc_does_not_know_is_no_matter_of_the_keys(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `0:7070` with a resolver of gRPC's own, or a port that was taken until a moment ago."""
    real = grpc.server

    def server(*given: Any, **more: Any) -> Any:
        made = real(*given, **more)
        add = made.add_secure_port

        def add_secure_port(address: str, credentials: Any) -> int:
            if address != "127.0.0.1:0":
                raise RuntimeError("Failed to bind to address")
            return int(add(address, credentials))

        monkeypatch.setattr(made, "add_secure_port", add_secure_port)
        return made

    monkeypatch.setattr(grpc, "server", server)
    with (
        pytest.raises(ConfigError, match=r"`bind` must be a free .*localhost:0, which gRPC cannot"),
        serving(certificates, bind="localhost:0"),
    ):
        pass


def test_nobody_is_asked_for_a_passphrase(certificates: Certificates, tmp_path: Path) -> None:
    """A server that is started by a person would wait for one in the middle of a handshake."""
    good, locked = certificates.party("a"), tmp_path / "locked.key"
    lock(Path(good.key), locked)
    bad = Tls(good.authority, good.certificate, str(locked))
    text = f"the key {locked} must have no passphrase: nobody is asked for one"
    with pytest.raises(ConfigError, match=text):
        tls.check_pair(bad)
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        found = diagnose("127.0.0.1", port, bad, tls.server_name("global-server"))
    assert not found.may_pass
    assert text in found.text


def test_without_cryptography_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography.x509", None)
    with pytest.raises(ConfigError, match=r"tf_hips\[certs\]"):
        authority.make_authority(tmp_path)


def test_a_client_that_waits_for_its_server_joins(certificates: Certificates) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
    members = [Party(address, site, certificates.party(site)) for site in SITES]
    started = threading.Event()

    def serve_late() -> None:
        with serving(certificates, bind=address):
            started.set()
            finished.wait(20)

    finished = threading.Event()
    late = threading.Timer(0.3, serve_late)
    late.start()
    try:
        together(*(member.join for member in members))
        train_all(members, 0, 0)
    finally:
        finished.set()
        late.join(20)
        for member in members:
            member.client.close()
    assert started.is_set()
