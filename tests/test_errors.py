# SPDX-License-Identifier: Apache-2.0
"""Which errors no restart heals."""

import errno
import socket

import pytest

from tf_hips.errors import (
    ENDED,
    ConfigError,
    PeerError,
    ended_in_a_step,
    is_final,
    left_the_run,
    reason_of_end,
    which_rank_ended,
    who_left,
)


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


@pytest.mark.parametrize("reason", [None, "", "SystemExit: no more disk", "e" * 2000])
@pytest.mark.parametrize("when", ["", " before it began"])
def test_who_has_left_is_read_from_what_says_so(reason: str | None, when: str) -> None:
    left = left_the_run("b", reason, when)
    assert len(left) < 1100
    for text in (left, f"PeerError: Server a:1, Step: {ENDED}{left}"):
        assert who_left(text) == "b"
    # A server below another says it of its own child, by the error that it has had itself or not.
    for prefix in ("", "PeerError: "):
        assert who_left(ENDED + left_the_run("tree", prefix + left)) == "b"
    # What is quoted is said by nobody that can know it.
    assert who_left(f"`a` is wrong: {left}") is None
    assert who_left(f"{ENDED}Site `a` was lost: {left}") is None


@pytest.mark.parametrize(
    "who", ["Rank 12 ended in `fit` with KeyError: 'x'.", "Rank 12 left its step with 3; rank 4"]
)
def test_which_rank_has_ended_is_read_from_what_says_so(who: str) -> None:
    assert which_rank_ended(who) == which_rank_ended(ended_in_a_step(who)) == 12
    assert which_rank_ended(ended_in_a_step(None)) is None
    assert which_rank_ended(f"Rank 3 of this party failed. {who}") == 3
    # What is quoted is said by nobody that can know it.
    assert which_rank_ended(f"ValueError: {who}") is None
