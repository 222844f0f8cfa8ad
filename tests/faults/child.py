# SPDX-License-Identifier: Apache-2.0
"""A party of one worker as a process of its own, without TensorFlow.

It joins, takes the first weights or goes on from its backup, and then trains as far as it is told,
line by line of standard input: a number is the round to stop before, an empty line means to leave,
{"place": NAME, "round": R} sets a trap: in round R it stops there, says so, and can be killed. It
says what it has done in lines of JSON: {"round": 3} after each round, {"digest": "..."} when it has
left.

Places: `mid-upload`, before its last message; `uploaded`, after it; `mid-download`, when the first
results have come; `done`, when all have; `backed-up`, when its backup is on disk and the server has
not heard of it.
"""

import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.training import Setting, Trainer
from tf_hips.config import Tls, Uplink
from tf_hips.errors import TfHipsError
from tf_hips.ps.client.passage import WayUp
from tf_hips.ps.client.shards import Connection, connect
from tf_hips.ps.rules import parse
from tf_hips.ps.transport.wire import Assembler

PLACES = ("mid-upload", "uploaded", "mid-download", "done", "backed-up")
BACKUP_EVERY = 2  # rounds
DEADLINE_S = 90.0
GATHER_EVERY = 3  # rounds


def main() -> int:
    order = json.loads(sys.argv[1])
    setting, site = Setting.from_json(order["setting"]), order["site"]
    identity = Tls(**order["tls"]) if order["tls"] else None
    if order["resends"]:
        _forget_what_is_held()
    trap = Trap()
    uplink = Uplink(order["server"], site, identity, DEADLINE_S, order.get("role", "global-server"))
    client = connect(uplink, order["run"], 1)
    try:
        _train(client, setting, site, Path(order["backup"]), trap)
    except TfHipsError as error:
        _say(error=str(error))
        return 1
    finally:
        client.close()
    return 0


class Trap:
    """Where the process stops, once."""

    def __init__(self) -> None:
        """Not set; looks at what the client sends and gets."""
        self.round = -1  # that is being done
        self._place, self._at = "", -1
        messages, feed = WayUp.messages, Assembler.feed

        def sending(call: WayUp) -> Iterator[bytes]:
            last: bytes | None = None
            for message in messages(call):
                if last is not None:
                    yield last
                last = message
            self.pass_by("mid-upload")
            if last is not None:
                yield last
            self.pass_by("uploaded")

        def feeding(assembler: Assembler, message: bytes) -> Any:
            self.pass_by("mid-download")
            return feed(assembler, message)

        WayUp.messages = sending  # type: ignore[method-assign]
        Assembler.feed = feeding  # type: ignore[method-assign]

    def set(self, place: str, number: int) -> None:
        """Sets it."""
        self._place, self._at = place, number

    def pass_by(self, place: str) -> None:
        """Stops here for ever if it is set for this place and the round that is being done."""
        if (self._place, self._at) == (place, self.round):
            _say(trapped=place)
            threading.Event().wait()


def _train(client: Connection, setting: Setting, site: str, backup: Path, trap: Trap) -> None:
    welcome = client.join(setting.up, setting.down, setting.seed)
    child = welcome.child
    weight = 1.0 if parse(welcome.rule).is_mean else None
    assert setting.sites[child] == site
    trainer = Trainer(setting, child)
    number = 0
    if welcome.is_back and backup.exists():
        number = trainer.load(backup)
        client.agree_model(setting.shapes, number)
    else:
        client.agree_model(setting.shapes, welcome.round)
        trainer.weights = client.first_sync(trainer.weights)
    _say(joined=child)
    for line in sys.stdin:
        if not line.strip():
            break
        if line.startswith("{"):
            order = json.loads(line)
            trap.set(order["place"], order["round"])
            _say(set=True)
            continue
        while number < int(line):
            trap.round = number
            trainer.apply(client.exchange(number, trainer.packets(number), weight))
            trap.pass_by("done")
            _say(round=number)
            number += 1
            if number % GATHER_EVERY == 0:
                values = client.gather(number // GATHER_EVERY - 1, "site", site.encode())
                for one, value in zip(setting.sites, values, strict=True):
                    assert value in (None, one.encode())  # a quorum may go on without some
                assert None not in values or setting.has_quorum
            if number % BACKUP_EVERY == 0:
                trainer.save(backup, number)
                trap.pass_by("backed-up")
                client.backed_up(number, number // GATHER_EVERY)
    client.leave()
    _say(digest=trainer.digest())


def _forget_what_is_held() -> None:
    """Lets a call that is repeated send all packets again, whatever the server says that it has."""
    resume = WayUp.resume

    def forgetful(self: WayUp, held: Iterable[int] | None) -> None:
        resume(self, None if held is None else ())

    WayUp.resume = forgetful  # type: ignore[method-assign]


def _say(**fields: object) -> None:
    os.write(1, (json.dumps(fields) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
