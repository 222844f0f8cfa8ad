# SPDX-License-Identifier: Apache-2.0
"""Folders as streams: whole, in pieces, and what is refused."""

import dataclasses
import hashlib
import itertools
import os
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps.transport import parcel, wire
from tf_hips.ps.transport.parcel import Header, Held, Intake

SIZES = {"a": 0, "b": 3, "c": (1 << 20) + 5, "d.index": 1, "e": 0, "f": 2 << 20}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "00000003-epoch-1-step-2"
    place.mkdir()
    random = np.random.default_rng(0)
    for name, size in SIZES.items():
        (place / name).write_bytes(random.bytes(size))
    return place


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_comes_is_what_was_sent(folder: Path, tmp_path: Path) -> None:
    intake = Intake(tmp_path / "taken")
    for message in parcel.send(folder, intake.held):
        assert len(message) <= wire.MESSAGE_BYTES
        intake.take(message)
    intake.finish()
    assert intake.name == folder.name
    assert content(tmp_path / "taken") == content(folder)


@pytest.mark.parametrize("num_messages", range(1, 7))
def test_what_broke_off_goes_on(folder: Path, tmp_path: Path, num_messages: int) -> None:
    intake = Intake(tmp_path / "taken")
    for message in itertools.islice(parcel.send(folder, intake.held), num_messages):
        intake.take(message)
    held = intake.held
    intake.begin()
    rest = list(parcel.send(folder, held))
    assert Header.from_message(rest[0]).start == held.num_bytes
    assert sum(map(len, rest[1:])) == sum(SIZES.values()) - held.num_bytes
    for message in rest:
        intake.take(message)
    intake.finish()
    assert content(tmp_path / "taken") == content(folder)


def test_another_parcel_begins_anew(folder: Path, tmp_path: Path) -> None:
    intake = Intake(tmp_path / "taken")
    for message in itertools.islice(parcel.send(folder, intake.held), 3):
        intake.take(message)
    (folder / "b").write_bytes(b"new")
    intake.begin()
    for message in parcel.send(folder, intake.held):
        intake.take(message)
    intake.finish()
    assert content(tmp_path / "taken") == content(folder)


def test_files_are_read_once_for_their_digests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks and breaks off, again and again, must not have a whole backup read each time."""
    read = []

    def counted(*arguments: Any) -> Any:
        read.append(arguments)
        return hashlib.file_digest(*arguments)

    monkeypatch.setattr(
        parcel, "hashlib", types.SimpleNamespace(blake2b=hashlib.blake2b, file_digest=counted)
    )
    before = next(parcel.send(folder, Held()))
    assert next(parcel.send(folder, Held())) == before
    assert len(read) == 2 * len(SIZES)  # they are so new that they may be written to
    for path in folder.iterdir():
        os.utime(path, (1.0, 1.0))
    for _ in range(3):
        assert next(parcel.send(folder, Held())) == before
    assert len(read) == 3 * len(SIZES)
    (folder / "b").write_bytes(b"new")
    assert next(parcel.send(folder, Held())) != before
    assert len(read) == 3 * len(SIZES) + 1


def test_files_that_are_deleted_while_they_are_sent_are_sent(folder: Path, tmp_path: Path) -> None:
    before = content(folder)
    intake = Intake(tmp_path / "taken")
    messages = parcel.send(folder, intake.held)
    intake.take(next(messages))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    for message in messages:
        intake.take(message)
    intake.finish()
    assert content(tmp_path / "taken") == before


def test_what_is_damaged_is_refused_and_asked_for_anew(folder: Path, tmp_path: Path) -> None:
    intake = Intake(tmp_path / "taken")
    header, first, *rest = parcel.send(folder, intake.held)
    for message in (header, bytes([first[0] ^ 1]) + first[1:], *rest):
        intake.take(message)
    with pytest.raises(ProtocolError, match="The file b of a parcel is damaged"):
        intake.finish()
    assert intake.held == Held()
    with pytest.raises(PeerError, match="must begin with its header"):
        intake.finish()


def test_what_is_cut_off_or_too_long_is_refused(folder: Path, tmp_path: Path) -> None:
    intake = Intake(tmp_path / "taken")
    *messages, last = parcel.send(folder, intake.held)
    for message in messages:
        intake.take(message)
    # As if nobody was there any more: who asked may ask another one.
    with pytest.raises(PeerError, match=f"must have {sum(SIZES.values())} bytes"):
        intake.finish()
    with pytest.raises(ProtocolError, match="must end after"):
        intake.take(last + b"x")
    intake.take(last)
    intake.finish()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ".hidden"},
        {"name": "a/b"},
        {"name": ""},
        {"files": []},
        {"files": [["../outside", 1, "0"]]},
        {"files": [["..", 1, "0"]]},
        {"files": [["/etc/passwd", 1, "0"]]},
        {"files": [["a", -1, "0"]]},
        {"files": [["a", 1.5, "0"]]},
        {"files": [["a", 1]]},
        {"files": ["a"]},
        {"files": [["a", 1, "0"], ["a", 1, "0"]]},
        {"files": [["a", 1 << 62, "0"]]},
        {"files": [["a", 1, "0"]] * (parcel.MAX_FILES + 1)},
        {"start": -1},
        {"start": 2},
        {"start": 1},
    ],
)
def test_a_header_that_lies_writes_nothing(tmp_path: Path, changes: dict[str, object]) -> None:
    fields = {"name": "n", "files": [["a", 1, "0"]], "start": 0} | changes
    intake = Intake(tmp_path / "inner" / "taken")
    with pytest.raises(ProtocolError):
        intake.take(wire.to_json(**fields))
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == []


def test_a_sender_goes_on_only_with_the_same_parcel(folder: Path) -> None:
    [header] = itertools.islice(parcel.send(folder, Held("another", 7)), 1)
    assert Header.from_message(header).start == 0
    whole = dataclasses.replace(Header.from_message(header), start=0)
    [header] = itertools.islice(parcel.send(folder, Held(whole.identity, whole.num_bytes + 1)), 1)
    assert Header.from_message(header).start == 0
