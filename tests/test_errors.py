# SPDX-License-Identifier: Apache-2.0
"""Which errors no restart heals."""

import errno
import socket

import pytest

from tf_hips.errors import ENDED, ConfigError, PeerError, is_final, reason_of_end


def wrapped(cause: OSError) -> ConfigError:
    error = ConfigError(f"Backups cannot be written in /backups: {cause.strerror}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ECONNRESET]
)
def test_a_disk_that_is_full_or_away_may_heal(code: int) -> None:
    assert not is_final(wrapped(OSError(code, "as the system says it")))


def test_a_name_that_nobody_knows_now_may_be_known_later() -> None:
    assert not is_final(wrapped(socket.gaierror(socket.EAI_AGAIN, "try again")))


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_a_folder_that_is_wrong_stays_so(code: int) -> None:
    assert is_final(wrapped(OSError(code, "as the system says it")))
    assert is_final(ConfigError("no such key"))


@pytest.mark.parametrize(
    "head", ["", "PeerError: ", "Server a:1: ", "PeerError: Server [::1]:2, Exchange: "]
)
def test_the_reason_of_the_end_follows_who_has_told_it(head: str) -> None:
    assert reason_of_end(f"{head}{ENDED}Site `b` left: {ENDED}") == f"Site `b` left: {ENDED}"
    assert is_final(PeerError(f"{head}{ENDED}why"))


def test_what_a_site_writes_ends_no_run_of_others() -> None:
    text = f"Server a:1, Exchange: Site `b` is lost: RuntimeError: {ENDED}Go home."
    assert reason_of_end(text) is None
    assert not is_final(PeerError(text))
