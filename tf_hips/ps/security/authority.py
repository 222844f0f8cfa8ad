# SPDX-License-Identifier: Apache-2.0
"""An authority: makes certificates, keeps a list of them, revokes them.

    authority.pem, .key     of the authority; the key never leaves its folder
    issued.txt              a line for each certificate: fingerprint, `role/site`, last day
    revoked.txt             a line for each that servers must refuse (revocation.py)

A run with an authority of its own needs only certificates of the form that `tls` says. Needs the
package `cryptography`; nothing else of `ps` does.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tf_hips.config import ROLES, SERVER_ROLES, Tls
from tf_hips.errors import ConfigError
from tf_hips.ps.security import revocation
from tf_hips.ps.security.tls import Identity, fingerprint, server_name
from tf_hips.ps.transport.wire import check_name

KEY_FILE = "authority.key"
CERTIFICATE_FILE = "authority.pem"
_ISSUED_FILE = "issued.txt"
REVOKED_FILE = "revoked.txt"
DAYS = 30
"""Days that a certificate is valid, unless told otherwise."""
AUTHORITY_DAYS = 3650


@dataclasses.dataclass(frozen=True)
class Issued:
    """A certificate that an authority has made.

    Attributes:
        fingerprint: 64 hexadecimal digits (tls.fingerprint).
        name: `role/site`.
        until: the day on which it ends.
    """

    fingerprint: str
    name: str
    until: datetime.date


def make_authority(
    folder: str | Path, *, name: str = "tf_hips authority", days: int = AUTHORITY_DAYS
) -> Path:
    """Makes `authority.pem` and `authority.key` in `folder`, and an empty list of the revoked.

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
    if (folder / KEY_FILE).exists():
        raise ConfigError(
            f"{folder} holds an authority already. Remove {KEY_FILE} to make a new one."
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
    _replace(folder / REVOKED_FILE, revocation.to_bytes([]))
    _write(folder, "authority", certificate, key)
    return folder / CERTIFICATE_FILE


def make_certificate(
    role: str,
    site: str,
    *,
    folder: str | Path,
    authority: str | Path | None = None,
    days: float = DAYS,
) -> Tls:
    """Makes `<role>-<site>.pem` and `.key` in `folder`, signed by the authority.

    Files that are there are replaced, each at once: a server that uses them goes on.

    Args:
        role: one of `config.ROLES`.
        site: name of the site, 1 to 50 letters, digits, dots, dashes or underscores.
        folder: where to write.
        authority: folder of `make_authority`; None: the same folder.
        days: how long it is valid; a negative number gives a certificate that has expired.

    Returns:
        The paths of the identity.

    Raises:
        ConfigError: the role is unknown, the authority is missing, damaged or expires before, or
            `cryptography` is not installed.
    """
    x509, ec, hashes, serialization = _cryptography()
    if role not in ROLES:
        raise ConfigError(f"`role` must be one of {', '.join(ROLES)}. Received: {role!r}")
    identity = Identity(role, check_name("site", site))
    home = Path(authority) if authority is not None else Path(folder)
    try:
        issuer_key = _load_key(home / KEY_FILE)
        issuer = _issuer(home / CERTIFICATE_FILE, issuer_key.public_key())
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
    is_server = role in SERVER_ROLES
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
    # The list first: what is not on it could not be revoked by name.
    mark = fingerprint(certificate.public_bytes(serialization.Encoding.PEM))
    _append(home / _ISSUED_FILE, f"{mark} {identity} {end.date().isoformat()}")
    _write(target, stem, certificate, key)
    return Tls(
        str(home / CERTIFICATE_FILE), str(target / f"{stem}.pem"), str(target / f"{stem}.key")
    )


def _load_key(path: Path) -> Any:
    """The key of an authority.

    Raises:
        OSError: the file cannot be read.
        ConfigError: it holds none, or one with a passphrase.
    """
    *_, serialization = _cryptography()
    try:
        return serialization.load_pem_private_key(path.read_bytes(), None)
    except TypeError as error:
        raise ConfigError(
            f"The authority's key {path} must have no passphrase: nobody is asked for one. "
            f"`openssl pkey -in {path} -out NEW` writes it without."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"The authority's key {path} must be a private key in PEM: {error}"
        ) from error


def _issuer(path: Path, public_key: Any) -> Any:
    """The certificate of the authority whose key it is; of two authorities a file may have both.

    Raises:
        OSError: the file cannot be read.
        ConfigError: it holds none.
    """
    x509, *_ = _cryptography()
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} must be a certificate in PEM: {error}") from error
    for one in found:
        if one.public_key() == public_key:
            return one
    raise ConfigError(
        f"{path} must hold the certificate of {KEY_FILE} beside it. Received: {len(found)} of "
        "other keys"
    )


def issued(folder: str | Path) -> list[Issued]:
    """The certificates that an authority has made, oldest first.

    Raises:
        ConfigError: the list has a line that is none.
    """
    path = Path(folder) / _ISSUED_FILE
    found = []
    with contextlib.suppress(FileNotFoundError):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            fields = line.split()
            try:
                mark, name, day = fields
                found.append(Issued(mark, name, datetime.date.fromisoformat(day)))
            except ValueError as error:
                raise ConfigError(
                    f"{path}, line {number}: `<fingerprint> <role/site> <yyyy-mm-dd>` is expected. "
                    f"Received: {line[:120]!r}"
                ) from error
    return found


def revoked(folder: str | Path) -> dict[str, revocation.Revoked]:
    """The certificates that an authority has revoked, by fingerprint.

    Raises:
        ConfigError: the list cannot be read.
    """
    path = Path(folder) / REVOKED_FILE
    return revocation.read(path) if path.exists() else {}


def revoke(folder: str | Path, which: Sequence[str], reason: str = "") -> list[revocation.Revoked]:
    """Adds certificates to the list of an authority, which servers must be given (`--revoked`).

    Args:
        folder: that of the authority.
        which: names (`role/site`: all certificates that were made for it and have not ended),
            fingerprints or beginnings of these, or files of certificates.
        reason: why; one line.

    Returns:
        What is new on the list.

    Raises:
        ConfigError: one of them is none of this authority, or revoked already, or the beginning of
            several fingerprints; then nothing is revoked.
    """
    if f"{reason}.".splitlines() != [f"{reason}."]:  # also by what Unicode calls an end of line
        raise ConfigError(f"`reason` must be one line. Received: {reason!r}")
    list_of = Path(folder) / _ISSUED_FILE
    # Who revokes at the same time must not write the list without these.
    with _alone(list_of) if list_of.exists() else contextlib.nullcontext():
        return _revoke(Path(folder), which, reason)


def _revoke(folder: Path, which: Sequence[str], reason: str) -> list[revocation.Revoked]:
    known = issued(folder)
    already = revoked(folder)
    today = datetime.datetime.now(datetime.UTC).date()
    new: dict[str, revocation.Revoked] = {}
    for one in which:
        found = [match for match in _matches(one, known) if match.fingerprint not in already]
        if Identity.parse(one):
            found = [match for match in found if match.until >= today]
        if not found:
            raise ConfigError(
                f"`{one}` must be a certificate that {folder} has issued, that has not ended and "
                "is not revoked: its `role/site`, its file or its fingerprint."
            )
        for match in found:
            new[match.fingerprint] = revocation.Revoked(
                match.fingerprint, match.name, today, reason.strip()
            )
    everything = [*already.values(), *new.values()]
    _replace(folder / REVOKED_FILE, revocation.to_bytes(everything))
    return list(new.values())


def _matches(one: str, known: Sequence[Issued]) -> list[Issued]:
    if Identity.parse(one):
        return [match for match in known if match.name == one]
    mark = one.lower()
    if Path(one).is_file():
        try:
            mark = fingerprint(Path(one).read_bytes())
        except ValueError as error:
            raise ConfigError(f"{one} must be a certificate in PEM: {error}") from error
    found = [match for match in known if len(mark) >= 8 and match.fingerprint.startswith(mark)]
    if len(found) > 1:
        raise ConfigError(f"`{one}` must be the beginning of one fingerprint, not of several.")
    return found


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a certificate says.

    Attributes:
        name: its common name, `role/site` where it is one of ours.
        fingerprint: that by which it is revoked.
        begins: when it becomes valid.
        ends: when it ends.
        is_authority: whether it may sign others.
    """

    name: str
    fingerprint: str
    begins: datetime.datetime
    ends: datetime.datetime
    is_authority: bool


def show(path: str | Path) -> Iterator[Shown]:
    """The certificates in a PEM file.

    Raises:
        ConfigError: the file cannot be read or holds none.
    """
    x509, *_ = _cryptography()
    try:
        found = x509.load_pem_x509_certificates(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} must be a certificate in PEM: {error}") from error
    for one in found:
        names = one.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        try:
            kind = one.extensions.get_extension_for_class(x509.BasicConstraints)
            is_authority = kind.value.ca
        except x509.ExtensionNotFound:
            is_authority = False
        yield Shown(
            str(names[0].value) if names else one.subject.rfc4514_string(),
            hashlib.sha256(one.tbs_certificate_bytes).hexdigest(),
            one.not_valid_before_utc,
            one.not_valid_after_utc,
            bool(is_authority),
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
    _replace(folder / f"{stem}.key", secret)
    _replace(folder / f"{stem}.pem", certificate.public_bytes(serialization.Encoding.PEM))


def _replace(path: Path, data: bytes) -> None:
    """Writes a file at once, readable by its owner alone; it is on the disk afterwards.

    Raises:
        OSError: with its name, the disk is full or the like; nothing is left behind.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    # The mode is set as the file is made: no moment in which another user could open it.
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with _naming(path), os.fdopen(file, "wb") as stream:
            stream.write(data)
            _sync(stream)
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _append(path: Path, line: str) -> None:
    with _alone(path) as file:
        size = os.fstat(file).st_size
        try:
            with _naming(path), os.fdopen(file, "ab", closefd=False) as stream:
                stream.write(f"{line}\n".encode())
                _sync(stream)
        except OSError:
            # Half a line would make one with the next, and the list one that nobody can read.
            with contextlib.suppress(OSError):
                os.ftruncate(file, size)
            raise
    _sync_folder(path.parent)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[int]:
    """A descriptor to append to a file; meanwhile nobody else writes a list of this authority."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of writing say which file it is."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _sync(stream: IO[bytes]) -> None:
    """A name that is on the disk before the bytes are is an empty file after a power failure."""
    stream.flush()
    os.fsync(stream.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
