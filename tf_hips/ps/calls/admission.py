# SPDX-License-Identifier: Apache-2.0
"""Whether a call may be heard: who calls, revocation, site and run, and how often it was refused.

All of that is checked for every call. Whether a certificate is of the authority and has not ended
is a matter of the handshake: a connection may outlive it.
"""

import contextlib
from collections.abc import Callable
from typing import NoReturn

import grpc

from tf_hips import log
from tf_hips.errors import TfHipsError
from tf_hips.ps.calls.refusals import Refusals
from tf_hips.ps.security import tls
from tf_hips.ps.security.expiry import Expiry, Validity, validity_of
from tf_hips.ps.security.revocation import Revocations
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.transport.wire import Call

# What a caller is to blame for. Gradients that are not finite and parties that do not come are not.
_COUNTED = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
)


class RefusedError(TfHipsError):
    """A call that is not heard; its text goes to the caller."""


class TurnedAwayError(RefusedError):
    """A call of somebody who was refused too often; not worth a line of log."""


class Admission:
    """Who may call a server. Thread-safe."""

    def __init__(
        self, config: ServerConfig, on_change: Callable[[str], None], expiry: Expiry
    ) -> None:
        """Reads what is needed.

        Args:
            config: what the server is told.
            on_change: told in one sentence what has become of a changed file.
            expiry: tells of children's certificates that end soon.

        Raises:
            ConfigError: the list of revoked certificates cannot be read.
        """
        self._config = config
        self._expiry = expiry
        self._validities: dict[str, Validity] = {}  # by site, as its last call has shown
        self._refusals = Refusals(config.max_refused)
        self._blameless = Refusals(config.max_refused)
        self._revocations = (
            Revocations(config.revoked, on_change) if config.revoked is not None else None
        )

    def admit(self, context: grpc.ServicerContext) -> None:
        """Turns away who was refused too often.

        Raises:
            TurnedAwayError: the caller must wait.
        """
        wait_s = self._refusals.wait_s(self._peer(context))
        if wait_s > 0:
            raise TurnedAwayError(
                f"{self._config.max_refused} calls of this caller were refused within a minute. "
                f"Calls are heard again in {wait_s:.0f} s."
            )

    def check(
        self, context: grpc.ServicerContext, call: Call, *, may_operate: bool = False
    ) -> None:
        """Finds out whether a call comes from where it says.

        Args:
            context: of the call.
            call: what it says.
            may_operate: an operator may make this call, too.

        Raises:
            RefusedError: it does not, or its certificate is revoked, or it is for another run.
        """
        is_operator = may_operate and self._config.tls is None
        if self._config.tls is not None:
            is_operator = self._check_certificate(context, call, may_operate=may_operate)
        if not is_operator and call.site not in self._config.parties:
            _refuse(
                f"The site must be one of {', '.join(self._config.parties)}. Received: "
                f"`{call.site}`"
            )
        self._check_run(call)
        if self._config.tls is not None and not is_operator:
            self._note_end(context, call.site)

    def certificate_s(self, site: str) -> float | None:
        """Seconds that are left of the certificate that a site showed last; None: none was."""
        validity = self._validities.get(site)
        return None if validity is None else self._expiry.look(_name_of(site), validity)

    def _note_end(self, context: grpc.ServicerContext, site: str) -> None:
        with contextlib.suppress(ValueError):  # one that nobody here can read is the authority's
            validity = validity_of(b"".join(context.auth_context().get("x509_pem_cert", ())))
            self._validities[site] = validity
            self._expiry.look(_name_of(site), validity)

    def check_shard(self, context: grpc.ServicerContext, call: Call) -> None:
        """Finds out whether a call comes from another global server of the run.

        Raises:
            RefusedError: it does not, or its certificate is revoked.
        """
        if self._config.tls is not None:
            names = _names(context)
            held = tls.Identity.parse(names[0]) if len(names) == 1 else None
            if held is None or held.role != tls.SERVER_ROLE:
                _refuse(
                    f"The certificate must be of role `{tls.SERVER_ROLE}`. Received: "
                    f"`{', '.join(names)[:100]}`"
                )
            self._check_revoked(context, held)
        self._check_run(call)

    def is_told(self, context: grpc.ServicerContext, code: grpc.StatusCode) -> bool:
        """Whether a refused call is worth an event and a line of log.

        What no caller is to blame for turns nobody away. It must not fill disks either.
        """
        if self._config.tls is None or code in _COUNTED:
            return True
        peer = self._peer(context)
        if self._blameless.wait_s(peer) > 0:
            return False
        if self._blameless.note(peer):
            log.warning(
                "%d refused calls of `%s` that it may not be to blame for: the rest of this "
                "minute's are counted, and not written down",
                self._config.max_refused,
                ", ".join(_names(context)),
            )
        return True

    def note(self, context: grpc.ServicerContext, code: grpc.StatusCode) -> str | None:
        """Counts a refused call; who is turned away from now on, if this was the last one."""
        if self._config.tls is None or code not in _COUNTED:
            return None
        peer = self._peer(context)
        return f"{', '.join(_names(context))}, {peer[:12]}" if self._refusals.note(peer) else None

    def _check_certificate(
        self, context: grpc.ServicerContext, call: Call, *, may_operate: bool
    ) -> bool:
        """Whether it is an operator's."""
        names = _names(context)
        held = tls.Identity.parse(names[0]) if len(names) == 1 else None
        wanted = tls.Identity(tls.CHILD_ROLE, call.site)
        is_operator = may_operate and held == tls.Identity(tls.OPERATOR_ROLE, call.site)
        if held is None or (held != wanted and not is_operator):
            _refuse(f"The certificate must be `{wanted}`. Received: `{', '.join(names)[:100]}`")
        self._check_revoked(context, held)
        return is_operator

    def _check_revoked(self, context: grpc.ServicerContext, held: tls.Identity) -> None:
        if self._revocations is not None:
            found = self._revocations.find(_fingerprint(context))
            if found is not None:
                reason = f": {found.reason}" if found.reason else ""
                _refuse(f"The certificate of `{held}` was revoked on {found.day}{reason[:200]}.")

    def _check_run(self, call: Call) -> None:
        if call.run != self._config.run:
            _refuse(
                f"The run must be `{self._config.run}`. Received: `{call.run}`. Both sides take "
                "it from --run, or `run` of their configuration"
            )

    def _peer(self, context: grpc.ServicerContext) -> str:
        """Who is counted: a certificate, so that one cannot be shut out by another of its name.

        In plain text, on loopback, all are one, who is never turned away.
        """
        return _fingerprint(context) if self._config.tls is not None else ""


def _name_of(site: str) -> str:
    return str(tls.Identity(tls.CHILD_ROLE, site))


def _fingerprint(context: grpc.ServicerContext) -> str:
    try:
        return tls.fingerprint(b"".join(context.auth_context().get("x509_pem_cert", ())))
    except ValueError as error:
        raise RefusedError(f"The certificate cannot be read: {error}") from error


def _names(context: grpc.ServicerContext) -> list[str]:
    names = context.auth_context().get("x509_common_name", ())
    return [bytes(name).decode("utf-8", "replace") for name in names]


def _refuse(text: str) -> NoReturn:
    raise RefusedError(text)
