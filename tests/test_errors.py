# SPDX-License-Identifier: Apache-2.0
"""Which errors no restart heals."""

import errno
import socket

import pytest

from tf_hips.errors import ConfigError, is_final


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
