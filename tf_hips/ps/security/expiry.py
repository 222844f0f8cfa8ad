# SPDX-License-Identifier: Apache-2.0
"""When certificates end, and who hears of it in time.

An open connection outlives its certificate, so nothing would tell before the first one that breaks.
A certificate ends soon when a fifth of its life is left, and a week at most. Whoever has it is told
once a day from then on, and so is a server of those that its children show.
"""

import calendar
import dataclasses
import functools
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tf_hips import log
from tf_hips.config import Tls

_WEEK_S, _DAY_S, _HOUR_S = 604_800.0, 86_400.0, 3600.0
_READ_AGAIN_S = 60.0
_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17


@dataclasses.dataclass(frozen=True)
class Validity:
    """Between which times a certificate is valid, in seconds since 1970."""

    begins: float
    ends: float

    def is_near(self, left_s: float) -> bool:
        """Whether `left_s` seconds before the end are few."""
        return left_s < min(_WEEK_S, (self.ends - self.begins) / 5)


@functools.lru_cache(maxsize=256)
def validity_of(pem: bytes) -> Validity:
    """The validity of the first certificate of a text.

    Raises:
        ValueError: there is none.
    """
    text = pem.decode("ascii", "replace")
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if begin < 0 or end < 0:
        raise ValueError("A certificate must be PEM.")
    der = ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)])
    try:
        _, at, _ = _element(der, 0)  # the certificate
        _, at, _ = _element(der, at)  # what its authority has signed
        if der[at] == _VERSION:
            at = _element(der, at)[2]
        for _ in range(3):  # serial number, algorithm, issuer
            at = _element(der, at)[2]
        kind, at, _ = _element(der, at)
        if kind != _SEQUENCE:
            raise ValueError("The validity of a certificate must be a SEQUENCE.")
        kind, begin, end = _element(der, at)
        then, after, last = _element(der, end)
        return Validity(_time(kind, der[begin:end]), _time(then, der[after:last]))
    except IndexError as error:
        raise ValueError("A certificate must be whole.") from error


class Expiry:
    """Who is told that certificates end soon, once a day. Thread-safe."""

    def __init__(
        self, tell: Callable[[str, float], None], clock: Callable[[], float] = time.time
    ) -> None:
        """Nobody was told.

        Args:
            tell: gets a name, and for how many seconds its certificate is valid; below 0 it has
                ended.
            clock: seconds since 1970.
        """
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[tuple[str, Validity], float] = {}  # when, within the last day

    def look(self, name: str, validity: Validity) -> float:
        """How many seconds are left of the certificate that `name` has now."""
        now = self._clock()
        left_s = validity.ends - now
        if validity.is_near(left_s):
            with self._lock:
                # By both: two certificates of one name may be shown by turns.
                when = self._told.get((name, validity))
                # Either way: a clock that was far ahead may have been set back since.
                is_news = when is None or abs(now - when) >= _DAY_S
                if is_news:
                    self._told = {k: t for k, t in self._told.items() if abs(now - t) < _DAY_S}
                    self._told[name, validity] = now
            if is_news:
                self._tell(name, left_s)
        return left_s


class Own:
    """The certificate that this process shows, as its file has it. Thread-safe."""

    def __init__(self, identity: Tls | None, expiry: Expiry, name: str) -> None:
        """Not looked at yet; without an identity there is none."""
        self._identity = identity
        self._expiry = expiry
        self._name = name
        self._validity: Validity | None = None
        self._fresh_until = 0.0  # of `time.monotonic`

    def look(self) -> float | None:
        """Seconds that are left of it; None: there is none, or it cannot be read."""
        if self._identity is None:
            return None
        if time.monotonic() >= self._fresh_until:
            self._fresh_until = time.monotonic() + _READ_AGAIN_S
            try:
                self._validity = validity_of(Path(self._identity.certificate).read_bytes())
            except (OSError, ValueError):  # half of it is copied; others say what is wrong
                self._validity = None
        return None if self._validity is None else self._expiry.look(self._name, self._validity)


def text_of(name: str, left_s: float) -> str:
    """A warning, in one sentence."""
    when = f"ends in {span(left_s)}" if left_s > 0 else "has ended"
    return (
        f"The certificate of {name} {when}. Copy a new one and its key over the old, at any time "
        "(`tf-hips certs issue --renew`): without it the next connection that breaks is the last."
    )


def span(left_s: float) -> str:
    """A time as people say it, rounded down: `26 days`, `31 h`, `12 min`."""
    if left_s >= 2 * _DAY_S:
        return f"{left_s // _DAY_S:.0f} days"
    return f"{left_s // _HOUR_S:.0f} h" if left_s >= 2 * _HOUR_S else f"{left_s // 60:.0f} min"


# Of all connections of a process, of which there may be many with one certificate.
_OF_PROCESS = Expiry(lambda name, left_s: log.warning("%s", text_of(name, left_s)))


def own(identity: Tls | None) -> Own:
    """The certificate of a connection of this process, of whose end its log tells."""
    name = "" if identity is None else identity.certificate
    return Own(identity, _OF_PROCESS, name)


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag of the element of DER at byte `at`, and where its content begins and ends."""
    kind, size, begin = der[at], der[at + 1], at + 2
    if size & 0x80:
        begin += size & 0x7F
        size = int.from_bytes(der[at + 2 : begin], "big")
    if begin + size > len(der):
        raise ValueError("A certificate must be whole.")
    return kind, begin, begin + size


def _time(kind: int, text: bytes) -> float:
    """Seconds since 1970 of a time of X.509, which is UTC: `YYMMDDHHMMSSZ`, or with four digits."""
    digits = text.decode("ascii", "replace")
    if kind == _UTC_TIME:
        digits = ("19" if digits[:2] >= "50" else "20") + digits
    return float(calendar.timegm(time.strptime(digits, "%Y%m%d%H%M%SZ")))
