# SPDX-License-Identifier: Apache-2.0
"""Certificates that a server refuses, from a file that may change while it is used.

    # a comment
    <fingerprint of the certificate (tls.fingerprint)> <role/site> <day> <reason>
    end <number of certificates>

The last line tells a whole list from one that is just being copied.

The file is trusted as the server's other files are; it needs no signature. It is looked at for
every call, and read again when it has changed. One that cannot be read then does not count: the
last good list stands, and the server says so.
"""

import dataclasses
import datetime
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from tf_hips.errors import ConfigError
from tf_hips.ps.security.tls import Identity, could_not_read, stamp_of

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
# About 100,000 lines. A list is read whole, between two calls.
_MAX_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Revoked:
    """One line of the list.

    Attributes:
        fingerprint: of the certificate (tls.fingerprint).
        name: `role/site`.
        day: the day on which it was revoked.
        reason: why, in one line; may be empty.
    """

    fingerprint: str
    name: str
    day: datetime.date
    reason: str

    def __str__(self) -> str:
        """The line, without its end."""
        return f"{self.fingerprint} {self.name} {self.day.isoformat()} {self.reason}".rstrip()


def read(path: Path) -> dict[str, Revoked]:
    """The list in a file, by fingerprint.

    Raises:
        ConfigError: the file cannot be read, is too long, or has a line that is none.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The list of revoked certificates {path} cannot be read: {error}"
        ) from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"The list of revoked certificates {path} must have at most {_MAX_BYTES} bytes."
        )
    found: dict[str, Revoked] = {}
    *lines, last = [line for line in text.splitlines() if line.strip()] or [""]
    if last.split() != ["end", str(sum(not line.startswith("#") for line in lines))]:
        raise ConfigError(
            f"{path} must end in a line `end N`, N being the number of certificates. "
            f"Received: {last[:120]!r} behind {len(lines)} lines"
        )
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            continue
        one = _parse(line)
        if one is None:
            raise ConfigError(
                f"{path}, entry {number}: `<fingerprint> <role/site> <yyyy-mm-dd> <reason>` is "
                f"expected. Received: {line[:120]!r}"
            )
        found[one.fingerprint] = one
    return found


def to_bytes(revoked: Iterable[Revoked]) -> bytes:
    """The bytes of a list that `read` reads."""
    lines = ["# Certificates that servers must refuse.", *map(str, revoked)]
    return "".join(f"{line}\n" for line in [*lines, f"end {len(lines) - 1}"]).encode()


def _parse(line: str) -> Revoked | None:
    fields = line.split(maxsplit=3)
    if len(fields) < 3 or not _FINGERPRINT.fullmatch(fields[0]) or not Identity.parse(fields[1]):
        return None
    try:
        day = datetime.date.fromisoformat(fields[2])
    except ValueError:
        return None
    return Revoked(fields[0], fields[1], day, fields[3] if len(fields) > 3 else "")


class Revocations:
    """A list that follows its file. Thread-safe."""

    def __init__(self, path: str | Path, on_change: Callable[[str], None]) -> None:
        """Reads the list.

        Args:
            path: the file.
            on_change: told in one sentence what has become of a changed file.

        Raises:
            ConfigError: the file cannot be read.
        """
        self._path = Path(path)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._stamp = stamp_of(self._path)
        self._unread = ""  # why the file could not be read when it was last looked at
        self._revoked = read(self._path)

    def find(self, fingerprint: str) -> Revoked | None:
        """The line about a certificate; None: it is not revoked."""
        with self._lock:
            stamp = stamp_of(self._path)
            if stamp != self._stamp or self._unread:
                self._stamp = stamp
                self._reload()
            return self._revoked.get(fingerprint)

    def _reload(self) -> None:
        said, self._unread = self._unread, ""
        try:
            self._revoked = read(self._path)
        except ConfigError as error:
            if could_not_read(error):
                self._unread = str(error)
            if not said or said != str(error):
                self._on_change(f"{error}. The list as it was before is used on.")
            return
        self._on_change(f"{len(self._revoked)} certificates are revoked by {self._path}")
