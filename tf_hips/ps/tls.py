# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS: credentials for gRPC, the name in a certificate, a development authority.

A certificate's common name is `role/site`, and says what its holder may do. A server's certificate
also carries the DNS name `<role>.tf-hips`: clients ask for that name whatever the address is, so
the handshake itself refuses a certificate that this authority gave to somebody who is no server.

The authority is for trials and tests; a site with an authority of its own needs only certificates
of this form. Only the functions that make certificates need the package `cryptography`.
"""

import dataclasses
import datetime
import importlib
import os
from pathlib import Path
from typing import Any

import grpc

from tf_hips.config import ROLES, Tls
from tf_hips.errors import ConfigError
from tf_hips.ps.wire import check_name

SERVER_ROLE = "global-server"
CHILD_ROLE = "party"
_SERVER_ROLES = ("server", "global-server")


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
        if b"-----BEGIN" not in text:
            raise ConfigError(
                f"`tls.{key}`: the file {path} must be PEM. It holds no `-----BEGIN`."
            )
        texts.append(text)
    return texts[0], texts[1], texts[2]


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Credentials of a client that trusts `tls.authority` alone and shows its own certificate."""
    authority, certificate, key = read(tls)
    return grpc.ssl_channel_credentials(authority, key, certificate)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Credentials of a server that refuses a peer without a certificate of `tls.authority`."""
    authority, certificate, key = read(tls)
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)


def make_authority(
    folder: str | Path, *, name: str = "tf_hips development authority", days: int = 3650
) -> Path:
    """Makes `authority.pem` and `authority.key` in `folder`.

    Args:
        folder: where to write; made, for its owner alone, if need be.
        name: the authority's common name.
        days: how long it is valid.

    Returns:
        The path of `authority.pem`.

    Raises:
        ConfigError: there is an authority already, or `cryptography` is not installed.
    """
    x509, ec, hashes, _ = _cryptography()
    folder = _make_folder(folder)
    if (folder / "authority.key").exists():
        raise ConfigError(
            f"{folder} holds an authority already. Remove authority.key to make a new one."
        )
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    usage = _key_usage(x509, key_cert_sign=True, crl_sign=True)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder, "authority", certificate, key)
    return folder / "authority.pem"


def make_certificate(
    role: str,
    site: str,
    *,
    folder: str | Path,
    authority: str | Path | None = None,
    days: float = 365,
) -> Tls:
    """Makes `<role>-<site>.pem` and `.key` in `folder`, signed by the authority.

    Args:
        role: one of `config.ROLES`.
        site: name of the site, 1 to 50 letters, digits, dots, dashes or underscores.
        folder: where to write.
        authority: folder of `make_authority`; None: the same folder.
        days: how long it is valid; a negative number gives a certificate that has expired.

    Returns:
        The paths of the identity.

    Raises:
        ConfigError: the role is unknown, the authority is missing or expires before, or
            `cryptography` is not installed.
    """
    x509, ec, hashes, serialization = _cryptography()
    if role not in ROLES:
        raise ConfigError(f"`role` must be one of {', '.join(ROLES)}. Received: {role!r}")
    identity = Identity(role, check_name("site", site))
    home = Path(authority) if authority is not None else Path(folder)
    try:
        issuer = x509.load_pem_x509_certificate((home / "authority.pem").read_bytes())
        issuer_key = serialization.load_pem_private_key((home / "authority.key").read_bytes(), None)
    except OSError as error:
        raise ConfigError(
            f"The authority's file {error.filename} cannot be read: {error.strerror}."
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    # One that is asked to last as long as an authority made a moment ago ends with it.
    if end > issuer.not_valid_after_utc + datetime.timedelta(days=1):
        raise ConfigError(
            f"A certificate must not outlast its authority, which is valid until "
            f"{issuer.not_valid_after_utc:%Y-%m-%d}. Received: days={days:g}"
        )
    end = min(end, issuer.not_valid_after_utc)
    is_server = role in _SERVER_ROLES
    uses = [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    if is_server:  # a server of a party is the child of another server, so it has both uses
        uses.append(x509.ExtendedKeyUsageOID.SERVER_AUTH)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, str(identity))]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(
            min(end, datetime.datetime.now(datetime.UTC)) - datetime.timedelta(hours=1)
        )
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(x509, digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False
        )
    )
    if is_server:
        # No host and no address: clients ask for this name wherever the server is.
        name = x509.DNSName(server_name(role))
        builder = builder.add_extension(x509.SubjectAlternativeName([name]), critical=False)
    certificate = builder.sign(issuer_key, hashes.SHA256())
    target = _make_folder(folder)
    stem = f"{role}-{site}"
    _write(target, stem, certificate, key)
    return Tls(
        str(home / "authority.pem"), str(target / f"{stem}.pem"), str(target / f"{stem}.key")
    )


def _cryptography() -> tuple[Any, Any, Any, Any]:
    try:
        return (
            importlib.import_module("cryptography.x509"),
            importlib.import_module("cryptography.hazmat.primitives.asymmetric.ec"),
            importlib.import_module("cryptography.hazmat.primitives.hashes"),
            importlib.import_module("cryptography.hazmat.primitives.serialization"),
        )
    except ImportError as error:
        raise ConfigError(
            "Making certificates needs the package `cryptography`: pip install 'tf_hips[certs]'"
        ) from error


def _key_usage(x509: Any, **used: bool) -> Any:
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: used.get(name, False) for name in names})


def _make_folder(folder: str | Path) -> Path:
    path = Path(folder)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _write(folder: Path, stem: str, certificate: Any, key: Any) -> None:
    *_, serialization = _cryptography()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for suffix, text in (
        (".key", secret),
        (".pem", certificate.public_bytes(serialization.Encoding.PEM)),
    ):
        path = folder / f"{stem}{suffix}"
        # The mode is set as the file is made: no moment in which another user could open it.
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "wb") as stream:
            stream.write(text)
