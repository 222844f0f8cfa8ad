# SPDX-License-Identifier: Apache-2.0
"""Why a connection fails, in one sentence; and whether a server's own certificate will do.

A client of gRPC sees nothing but "Socket closed" when a handshake fails. `diagnose` connects once
more with `ssl` and says what is wrong. `check_server` is a handshake in memory: it tells a server,
before it listens, what its children would find wrong with its certificate.
"""

import contextlib
import dataclasses
import socket
import ssl
import typing

from tf_hips.config import Tls
from tf_hips.errors import ConfigError
from tf_hips.ps.security import tls as identities
from tf_hips.ps.transport.sockets import Meter

_CLIENT_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_TLS_ALERT, _TLS_HANDSHAKE = 0x15, 0x16
# What OpenSSL says where the other side answers in plain text. 3.0: the first two; 3.2: the last.
_PLAIN_TEXT = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
# In alerts that are about a certificate; others are about the connection.
_OF_CERTIFICATES = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED")
# OpenSSL's X509_V_ERR_* values.
_VERIFY_NOT_YET, _VERIFY_EXPIRED, _VERIFY_PURPOSE, _VERIFY_HOST = 9, 10, 26, 62


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Why a connection does not come about.

    Attributes:
        text: says it.
        may_pass: whether trying again can help.
        is_refused: whether the host is there, and nobody listens at the port.
    """

    text: str
    may_pass: bool
    is_refused: bool = False


def diagnose(
    host: str,
    port: int,
    tls: Tls | None,
    name: str,
    *,
    meter: Meter | None = None,
    timeout_s: float = 5.0,
    was_there: bool = False,
) -> Diagnosis:
    """Connects once to find out what is wrong between a client and `host:port`.

    Args:
        host: host of the server.
        port: port of the server.
        tls: the client's identity, or None for plain text.
        name: the DNS name that the server's certificate must carry.
        meter: counts the bytes of the probe.
        timeout_s: seconds for each step.
        was_there: whether the client was connected before; its host's name may be found again
            then, as that of a container that is started again, and it goes on with the certificate
            that it had where the files hold none now.
    """
    where = f"{host}:{port}"
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except socket.gaierror as error:
        # A name server that does not answer says nothing of the host: the link to it may be gone.
        may_pass = was_there or error.errno == socket.EAI_AGAIN
        return Diagnosis(f"The host of {where} is not known: {error.strerror}.", may_pass)
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        is_refused = isinstance(error, ConnectionRefusedError)
        return Diagnosis(f"Nothing listens at {where} ({reason}).", True, is_refused)
    with connection:
        try:
            if tls is None:
                return _diagnose_plain(connection, where)
            return _diagnose_tls(connection, where, tls, name, was_there=was_there)
        finally:
            if meter is not None:
                with contextlib.suppress(OSError):
                    meter.count(connection)


def _diagnose_plain(connection: socket.socket, where: str) -> Diagnosis:
    address = None
    answer = b""
    with contextlib.suppress(OSError):  # it may die just now
        address = connection.getpeername()[:2]
        connection.sendall(_CLIENT_PREFACE)
        answer = connection.recv(9)
    if len(answer) >= 4 and answer[3] == 4 and answer[0] == 0:
        return Diagnosis(
            f"{where} answers in plain text now; the connection was lost before.", may_pass=True
        )
    if answer[:1] == bytes((_TLS_ALERT,)) or (
        not answer and address is not None and _speaks_tls(address)
    ):
        return Diagnosis(
            f"{where} speaks TLS and this side plain text. Give this side certificates: "
            "--authority, --certificate and --key of a command, `uplink.tls` in a script.",
            False,
        )
    return Diagnosis(
        f"{where} is no tf_hips server: it answered {answer!r} to HTTP/2.", may_pass=not answer
    )


def _speaks_tls(address: tuple[str, int]) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(address, 5.0) as raw, context.wrap_socket(raw):
            return True
    except ssl.SSLError as error:
        return "ALERT" in str(error).upper()
    except OSError:
        return False


def _diagnose_tls(
    connection: socket.socket, where: str, tls: Tls, name: str, *, was_there: bool
) -> Diagnosis:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(tls.authority)
        identities.load_pair(context, tls)
    except (ConfigError, OSError) as error:
        kept = " The one before it is used on, in vain." if was_there else ""
        said = str(error).rstrip(".")
        return Diagnosis(
            f"The own certificate {tls.certificate} cannot be used: {said}.{kept}",
            may_pass=was_there,
        )
    try:
        with context.wrap_socket(connection, server_hostname=name) as secure:
            # With TLS 1.3 the server judges our certificate when our side is done.
            secure.sendall(_CLIENT_PREFACE)
            if secure.recv(9):
                return Diagnosis(
                    f"{where} accepts TLS now; the connection was lost before.", may_pass=True
                )
    except ssl.SSLCertVerificationError as error:
        return Diagnosis(_explain_verification(where, error, tls, name), may_pass=False)
    except ssl.SSLError as error:
        said = error.reason or ""
        if said in _PLAIN_TEXT:
            return Diagnosis(f"{where} speaks plain text and this side TLS.", may_pass=False)
        reason = None
        if "ALERT" in said:
            reason = _own_fault(tls)
            if reason is None and any(word in said for word in _OF_CERTIFICATES):
                reason = f"it sent an alert ({str(error)[:120]})"
        if reason is None:
            return Diagnosis(f"The TLS handshake with {where} failed: {error}.", may_pass=True)
    except OSError as error:
        return Diagnosis(
            f"{where} broke off the TLS handshake ({error.strerror or error}); "
            "it may speak plain text.",
            may_pass=True,
        )
    else:
        # gRPC closes the connection without an alert when it refuses a certificate.
        found = _own_fault(tls)
        if found is None:
            return Diagnosis(
                f"{where} closed the connection after the TLS handshake. Here our certificate is "
                "good: if this goes on, the clock there is wrong, or its authority another.",
                may_pass=True,
            )
        reason = found
    return Diagnosis(
        f"{where} refuses our certificate {tls.certificate}: {reason}.", may_pass=False
    )


def _own_fault(tls: Tls) -> str | None:
    """What a server with our authority finds wrong with our certificate; None: nothing.

    Shows the certificate to such a server in memory, so the verdict is that of a real handshake.
    """
    try:
        _shake_hands(*_shower_and_judge(tls))
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _VERIFY_EXPIRED:
            return "it has expired"
        if error.verify_code == _VERIFY_NOT_YET:
            return "it is not valid yet: are the clocks right?"
        return f"it does not come from {tls.authority} ({error.verify_message})"
    except OSError as error:  # of `ssl`, too
        return f"it cannot be used ({getattr(error, 'reason', None) or error})"
    return None


def check_server(tls: Tls, role: str = identities.SERVER_ROLE) -> None:
    """Finds out whether children would take a server with this identity for theirs.

    Args:
        tls: the identity.
        role: what it must be: `global-server`, or `server` where there is a server above.

    Raises:
        ConfigError: a file cannot be used, the key is another's, the certificate has expired, comes
            from another authority or is of another role.
    """
    identities.read(tls)
    identities.check_pair(tls)
    server, child = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    child.load_verify_locations(tls.authority)
    identities.load_pair(server, tls)
    try:
        subject = _common_name(_shake_hands(child, server, identities.server_name(role))[0])
    except ssl.SSLCertVerificationError as error:
        text = _explain_verification(
            f"this server, {tls.certificate},", error, tls, identities.server_name(role)
        )
        raise ConfigError(f"`tls`: {text}") from error
    except ssl.SSLError as error:
        raise ConfigError(f"`tls`: {tls.certificate} cannot be used: {error}.") from error
    held = identities.Identity.parse(subject)
    if held is None or held.role != role:
        raise ConfigError(
            f"`tls`: the certificate must be one of role {role}. Received: {tls.certificate}, "
            f"which is for `{subject}`"
        )


def own_identity(tls: Tls) -> identities.Identity:
    """Who the certificate of a client speaks for.

    Raises:
        ConfigError: the files cannot be used, or the name is not `role/site`.
    """
    identities.check_pair(tls)
    fault = _own_fault(tls)
    if fault is not None:
        raise ConfigError(f"The certificate {tls.certificate} cannot be used: {fault}.")
    name = _common_name(_shake_hands(*_shower_and_judge(tls))[1])
    found = identities.Identity.parse(name)
    if found is None:
        raise ConfigError(
            f"A certificate must be for `role/site`. Received: {tls.certificate}, which is for "
            f"`{name[:100]}`"
        )
    return found


def _shower_and_judge(tls: Tls) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A client that shows a certificate, and a server that asks whether its authority made it."""
    judge, shower = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    judge.verify_mode = ssl.CERT_REQUIRED
    judge.load_verify_locations(tls.authority)
    shower.check_hostname = False
    shower.verify_mode = ssl.CERT_NONE
    for context in (judge, shower):
        identities.load_pair(context, tls)
    return shower, judge


def _shake_hands(
    client: ssl.SSLContext, server: ssl.SSLContext, name: str | None = None
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends of a handshake in memory."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(down, up, server_hostname=name)
    far = server.wrap_bio(up, down, server_side=True)
    for _ in range(4):  # a handshake needs fewer turns
        for end in (near, far):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return near, far


def _common_name(end: ssl.SSLObject) -> str:
    """The common name in the certificate of the other end, if this one asks for it."""
    for key, value in (pair for part in _subject(end) for pair in part):
        if key == "commonName":
            return value
    return ""


def _subject(end: ssl.SSLObject) -> tuple[tuple[tuple[str, str], ...], ...]:
    return typing.cast(
        "tuple[tuple[tuple[str, str], ...], ...]", (end.getpeercert() or {}).get("subject", ())
    )


def _explain_verification(
    where: str, error: ssl.SSLCertVerificationError, tls: Tls, name: str
) -> str:
    if error.verify_code == _VERIFY_EXPIRED:
        return f"The certificate of {where} has expired."
    if error.verify_code == _VERIFY_NOT_YET:
        return f"The certificate of {where} is not valid yet: are the clocks right?"
    if error.verify_code in (_VERIFY_HOST, _VERIFY_PURPOSE):
        role = name.partition(".")[0]
        return (
            f"The certificate of {where} must be one of role {role}: it does not carry "
            f"the name {name}. A server of another role is named by --server-role, or as the one "
            "above another server by --uplink-role."
        )
    return (
        f"The certificate of {where} must come from the authority {tls.authority}. "
        f"Received: one that does not ({error.verify_message})."
    )
