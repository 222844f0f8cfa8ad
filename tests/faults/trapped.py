# SPDX-License-Identifier: Apache-2.0
"""A server that stops at a place it is told of, so that it can be killed there.

    python -m tests.faults.trapped '{"options": [...], "archive": DIR, "is_eager": false,
                                     "is_sketched": false, "trap": null}'

A line of JSON on standard input, {"place": NAME, "round": R, "count": N}, sets a trap: from round R
on, the N-th thread that comes to the place says so on standard output and goes no further. The
others go on, as they do in a server that is killed from outside; that is what the harness does
next. Nothing else is changed, but for the journals, which are linked to DIR before they are
deleted: they are the proof that each update counted once.
"""

import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tf_hips import cli
from tf_hips.ps.calls.traffic import Traffic
from tf_hips.ps.client.passage import WayUp
from tf_hips.ps.disk import durable
from tf_hips.ps.disk.journal import Folder, SnapshotWriter
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.server.server import Server


class Trap:
    """At most one trap is set at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._place = ""
        self._round = 0
        self._left = 0
        self._newest = 0

    def set(self, place: str, round: int, count: int) -> None:
        """Sets a trap."""
        with self._lock:
            self._place, self._round, self._left = place, round, count

    def begins(self, number: int) -> None:
        """A round begins."""
        with self._lock:
            self._newest = max(self._newest, number)

    def is_hit(self, place: str) -> bool:
        """Counts a thread at `place`; whether it is to go no further."""
        with self._lock:
            if place != self._place or self._newest < self._round:
                return False
            self._left -= 1
            return self._left == 0

    def spring(self, place: str) -> None:
        """Says that a thread is at `place`, and holds it there."""
        _say(trapped=place)
        threading.Event().wait()


TRAP = Trap()


def _before(owner: type, name: str, place: str) -> None:
    """Holds threads before a method does anything."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *values: Any, **named: Any) -> Any:
        if TRAP.is_hit(place):
            TRAP.spring(place)
        return original(self, *values, **named)

    setattr(owner, name, method)


def _lay(*, is_sketched: bool) -> None:
    """Lays the places of traps into the classes of the server.

    `is_sketched`: whether party servers send sketches before their sums.
    """
    begin = Store.begin

    def begun(self: Store, number: int) -> bool:
        TRAP.begins(number)
        return begin(self, number)

    Store.begin = begun  # type: ignore[method-assign]
    add = Store.add

    def half(self: Store, number: int, child: int, packets: Any) -> int:
        if TRAP.is_hit("mid-upload"):
            add(self, number, child, packets[: len(packets) // 2])
            TRAP.spring("mid-upload")
        return add(self, number, child, packets)

    Store.add = half  # type: ignore[method-assign]
    merge = Store._merge

    def recorded(self: Store, *values: Any) -> None:
        if TRAP.is_hit("recorded"):
            self._recorder.settle()  # durable, hence acknowledged to whoever asks what is held
            TRAP.spring("recorded")
        merge(self, *values)

    Store._merge = recorded  # type: ignore[method-assign]
    messages = WayUp.messages

    def going_up(call: WayUp) -> Iterator[bytes]:
        if is_sketched:
            # What follows a sketch is there when that has been answered: nothing is held back, and
            # the trap is behind the first message.
            for message in messages(call):
                yield message
                if TRAP.is_hit("going-up"):
                    TRAP.spring("going-up")
            return
        last: bytes | None = None
        for message in messages(call):
            if last is not None:
                yield last
            last = message
        if TRAP.is_hit("going-up"):
            TRAP.spring("going-up")
        if last is not None:
            yield last

    WayUp.messages = going_up  # type: ignore[method-assign]
    start = Server.start

    def started(self: Server) -> None:
        start(self)
        _say(listens=self.address)

    Server.start = started  # type: ignore[method-assign]
    _before(Traffic, "sent", "mid-download")
    _before(Store, "finish", "going-down")
    _before(SnapshotWriter, "add", "snapshot")
    _before(SnapshotWriter, "finish", "snapshot-whole")
    # The snapshot has its name, and what it replaces is still there.
    _before(Folder, "remove_before", "snapshot-named")


def _archive(folder: Path) -> None:
    """Keeps what the server deletes."""
    remove = Folder.remove_before

    def kept(self: Folder, number: int) -> None:
        for other in self.numbers("journal"):
            with contextlib.suppress(FileExistsError):
                os.link(self.file("journal", other), folder / self.file("journal", other).name)
        remove(self, number)

    Folder.remove_before = kept  # type: ignore[method-assign]


def _listen(heard: Callable[..., None]) -> None:
    for line in sys.stdin:
        heard(**json.loads(line))
        _say(set=True)


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main() -> int:
    order = json.loads(sys.argv[1])
    _archive(Path(order["archive"]))
    _lay(is_sketched=order.get("is_sketched", False))
    if order["is_eager"]:
        durable.SNAPSHOT_AFTER_BYTES = durable.SNAPSHOT_AFTER_SNAPSHOTS = 0
    if order.get("trap"):
        TRAP.set(*order["trap"])
    threading.Thread(target=_listen, args=(TRAP.set,), daemon=True).start()
    return cli.main(["server", *order["options"]])


if __name__ == "__main__":
    sys.exit(main())
