# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS: credentials for gRPC, and the name in a certificate.

A certificate's common name is `role/site`, and says what its holder may do. A server's certificate
also carries the DNS name `<role>.tf-hips`: clients ask for that name whatever the address is, so
the handshake itself refuses a certificate that this authority gave to somebody who is no server.

Files may be replaced while they are in use: a server reads them again for the next handshake, and a
client for the next connection. `authority` makes such files; so can any other authority.
"""

import dataclasses
import functools
import hashlib
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from tf_hips.config import ROLES, Tls
from tf_hips.errors import ConfigError
from tf_hips.ps.transport.wire import check_name

SERVER_ROLE = "global-server"
CHILD_ROLE = "party"
OPERATOR_ROLE = "operator"
PARTY_SERVER_ROLE = "server"

_BEGIN = b"-----BEGIN"

_Made = TypeVar("_Made")


def server_name(role: str) -> str:
    """The DNS name by which a client recognises a server of `role`, whatever its address."""
    return f"{role}.tf-hips"


@dataclasses.dataclass(frozen=True)
class Identity:
    """Who a certificate speaks for."""

    role: str
    site: str

    @classmethod
    def parse(cls, common_name: str) -> "Identity | None":
        """Reads `role/site`; None where the name is something else."""
        role, slash, site = common_name.partition("/")
        if not slash or role not in ROLES:
            return None
        try:
            return cls(role, check_name("site", site))
        except ValueError:
            return None

    def __str__(self) -> str:
        """The common name."""
        return f"{self.role}/{self.site}"


def read(tls: Tls) -> tuple[bytes, bytes, bytes]:
    """The PEM texts of authority, certificate and key.

    Raises:
        ConfigError: a file cannot be read or is no PEM.
    """
    texts = []
    for key in ("authority", "certificate", "key"):
        path = Path(getattr(tls, key))
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"`tls.{key}`: the file {path} cannot be read: {error.strerror}."
            ) from error
        begin = text.find(_BEGIN)
        if begin < 0:
            raise ConfigError(
                f"`tls.{key}`: the file {path} must be PEM. It holds no `-----BEGIN`."
            )
        texts.append(text[begin:])  # gRPC bears no mark of an editor before it, and OpenSSL does
    return texts[0], texts[1], texts[2]


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Credentials of a client that trusts `tls.authority` alone and shows its own certificate."""
    authority, certificate, key = read(tls)
    return grpc.ssl_channel_credentials(authority, key, certificate)


def server_credentials(
    tls: Tls, check: Callable[[Tls], None], on_change: Callable[[str], None]
) -> grpc.ServerCredentials:
    """Credentials of a server that refuses a peer without a certificate of `tls.authority`.

    The files are read again when they have changed. New ones that do not go together, as when they
    are replaced one after the other, do not count: the old ones are used on.

    Args:
        tls: the server's identity.
        check: raises ConfigError where changed files are not good enough to be used.
        on_change: told in one sentence what has become of changed files.
    """
    watched = _Watched(tls, check, on_change)
    return grpc.dynamic_ssl_server_credentials(
        watched.configuration, watched.fetch, require_client_authentication=True
    )


class _Watched:
    """The configuration of a server's handshakes, as its files have it. Thread-safe."""

    def __init__(
        self, tls: Tls, check: Callable[[Tls], None], on_change: Callable[[str], None]
    ) -> None:
        self._check = check
        self._renewed = Renewed(tls, self._make, on_change)
        self.configuration = self._newest = self._renewed.get()

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """What the next handshake is made with; None: what the last one was."""
        last, self._newest = self._newest, self._renewed.get()
        return None if self._newest is last else self._newest

    def _make(self, tls: Tls) -> grpc.ServerCertificateConfiguration:
        self._check(tls)
        authority, certificate, key = read(tls)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


class Renewed(Generic[_Made]):
    """What is made of an identity's files, made anew when they have changed. Thread-safe."""

    def __init__(
        self, tls: Tls, make: Callable[[Tls], _Made], on_change: Callable[[str], None]
    ) -> None:
        """Makes it.

        Args:
            tls: the identity.
            make: raises ConfigError or OSError where the files do not go together, as while they
                are replaced one after the other; then what was made of the old ones is used on.
            on_change: told in one sentence what has become of changed files.
        """
        self._tls = tls
        self._make = make
        self._on_change = on_change
        self._lock = threading.Lock()
        self._stamps: Stamps | None = stamps_of(tls)  # None: the files could not be read
        self._said = ""  # why changed files are not used
        self._made = make(tls)

    def get(self) -> _Made:
        """What the next connection is made with."""
        with self._lock:
            stamps = stamps_of(self._tls)
            if stamps != self._stamps:
                try:
                    self._made = self._make(self._tls)
                except (ConfigError, OSError) as error:
                    is_unread = could_not_read(error)
                    if not (is_unread and self._stamps is None and str(error) == self._said):
                        self._on_change(f"The changed certificate is not used: {error}")
                    self._stamps, self._said = None if is_unread else stamps, str(error)
                else:
                    self._stamps = stamps
                    self._on_change(f"The changed certificate {self._tls.certificate} is used")
            return self._made


Stamps = list[tuple[int, int, int] | None]


def stamps_of(tls: Tls) -> Stamps:
    """What differs when one of an identity's files was changed or replaced."""
    return [stamp_of(Path(path)) for path in (tls.authority, tls.certificate, tls.key)]


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """What differs when a file was changed or replaced; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def could_not_read(error: Exception) -> bool:
    """Whether an error is of files that could not be read: what is in them may well be right.

    They are looked at again: of files that may be read now, because their owner or mode is another
    one or descriptors are free again, no stamp says so.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, ssl.SSLError)


def load_pair(context: ssl.SSLContext, tls: Tls) -> None:
    """Lets `context` show the certificate of an identity.

    Raises:
        ConfigError: the key has a passphrase.
        OSError: a file cannot be read, or, as ssl.SSLError, the two do not go together.
    """

    def passphrase() -> str:
        # Else OpenSSL asks whoever sits at the terminal, and waits. gRPC takes no such key.
        raise ConfigError(
            f"`tls.key`: the key {tls.key} must have no passphrase: nobody is asked for one. "
            f"`openssl pkey -in {tls.key} -out NEW` writes it without."
        )

    context.load_cert_chain(tls.certificate, tls.key, passphrase)


def check_pair(tls: Tls) -> None:
    """Raises ConfigError where certificate, key and authority cannot be used together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(tls.authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"`tls.authority`: {tls.authority} cannot be used: {error}.") from error
    try:
        load_pair(context, tls)
    except (OSError, ssl.SSLError) as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            text = f"the key {tls.key} does not belong to {tls.certificate}."
        else:
            text = f"{tls.certificate} and {tls.key} cannot be used: {error}."
        raise ConfigError(f"`tls`: {text}") from error


@functools.lru_cache(maxsize=256)
def fingerprint(pem: bytes) -> str:
    """SHA-256 of what the authority has signed of a certificate, as 64 hexadecimal digits.

    Not of the whole: of an ECDSA signature anybody can make another one that is valid, too, so its
    holder could give a certificate another fingerprint.

    Args:
        pem: the certificate.

    Raises:
        ValueError: it is none.
    """
    whole = ssl.PEM_cert_to_DER_cert(pem.decode("ascii").strip())
    begin, end = _content(whole, 0, len(whole))
    _, signed_end = _content(whole, begin, end)
    return hashlib.sha256(whole[begin:signed_end]).hexdigest()


def _content(der: bytes, at: int, limit: int) -> tuple[int, int]:
    """Where the content of the SEQUENCE at byte `at` begins and ends."""
    if at + 2 > limit or der[at] != 0x30:
        raise ValueError("A certificate must be a SEQUENCE of DER.")
    size, begin = der[at + 1], at + 2
    if size & 0x80:
        begin += size & 0x7F
        size = int.from_bytes(der[at + 2 : begin], "big")
    if begin + size > limit:
        raise ValueError("A certificate must be whole.")
    return begin, begin + size
