# SPDX-License-Identifier: Apache-2.0
"""What a site can take of another one by asking for its backup."""

import threading
import types
from typing import Any

import pytest

from tests.support.eventually import eventually
from tf_hips.errors import PeerError
from tf_hips.ps.session.handover import _MOST_PIPES, Handover
from tf_hips.ps.session.members import Caller
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.parcel import Held

DEADLINE_S = 20.0


class Given:
    """Children of a server without one: 0 gives, whose backup has many messages."""

    def __init__(self, leaves: int = 1, patience_s: float = DEADLINE_S) -> None:
        self.changed = threading.Condition()
        members: Any = types.SimpleNamespace(
            site=str,
            is_leaf=lambda child: True,
            doubting_rule=None,
            place=None,
            children={
                child: types.SimpleNamespace(
                    has_left=False,
                    backup=None if child else (1, 0),
                    workers=1,
                    leaves=(1,) * leaves,
                )
                for child in range(_MOST_PIPES + 2)
            },
        )
        presence: Any = types.SimpleNamespace(is_there=lambda child: True)
        self.handover = Handover(self.changed, members, presence, lambda: False, lambda *_: None)
        self.giver = Caller(0, "", patience_s)
        self.gives: list[threading.Thread] = []
        self.errors: list[PeerError] = []

    def ask(self, asker: int) -> Any:
        """What is on its way once the first message has come."""
        messages: Any = self.handover.fetch(Caller(asker, "", DEADLINE_S), Held(), 1)
        head = threading.Thread(target=lambda: next(messages), daemon=True)
        head.start()
        eventually(lambda: self.handover.has_request(0), changed=self.changed)
        with self.changed:
            ticket = self.handover.next_request(0).ticket
        self.gives.append(threading.Thread(target=self._give, args=(ticket,), daemon=True))
        self.gives[-1].start()
        head.join(DEADLINE_S)
        return messages

    def refuses(self, asker: int) -> None:
        messages = self.handover.fetch(Caller(asker, "", 0.01), Held(), 1)
        with pytest.raises(PeerError, match="`0`: it gives as many backups as it can at once"):
            next(messages)
        assert not self.handover.has_request(0)

    def ended(self, give: threading.Thread) -> None:
        give.join(DEADLINE_S)
        assert not give.is_alive()

    def _give(self, ticket: str) -> None:
        try:
            head = wire.to_json(ticket=ticket, error=None)
            self.handover.give(self.giver, [head, *[b"message"] * 100])
        except PeerError as error:
            self.errors.append(error)


def test_who_takes_the_head_alone_keeps_one_call_of_the_giver() -> None:
    given = Given()
    messages = given.ask(1)
    for _ in range(3):
        given.refuses(1)
    messages.close()
    given.ended(given.gives[0])
    assert list(given.ask(1)) == [b"message"] * 99


def test_a_server_asks_for_each_of_its_leaves() -> None:
    given = Given(leaves=2)
    messages = [given.ask(1), given.ask(1)]
    given.refuses(1)
    for one in messages:
        assert len(list(one)) == 99


def test_one_gives_to_a_few_at_once() -> None:
    """Its calls are counted; those that it needs for its rounds must be among them."""
    given = Given()
    messages = [given.ask(1 + number) for number in range(_MOST_PIPES)]
    given.refuses(1 + _MOST_PIPES)
    assert len(list(messages[0])) == 99
    given.ended(given.gives[0])
    messages.append(given.ask(1 + _MOST_PIPES))
    for one in messages:
        one.close()


def test_who_takes_nothing_is_given_up() -> None:
    given = Given(patience_s=0.01)
    messages = given.ask(1)
    given.ended(given.gives[0])
    with pytest.raises(PeerError, match="has taken nothing for 0 s"):
        list(messages)
    assert [str(error) for error in given.errors] == [
        "The site that asked for a backup has taken nothing for 0 s."
    ]
