# SPDX-License-Identifier: Apache-2.0
"""Updates that wait in a buffer count once, whoever is killed between its push and its pull.

Children are killed when they have delivered a part of a round, or all of it and have not heard the
answer; the server is killed, too. A process that comes back does the rounds since its backup again.
Each answer must be the one that a server gives to whom nothing happens, which has the staleness of
every update in it.
"""

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.ps import test_asynchronous_durable, test_buffered_durable
from tests.ps.served import SHAPES, SITES, Delivery, Served, accepted, packet_of
from tests.ps.test_asynchronous_durable import NUM_CHUNKS, TEXTS, answer, eager, finished, schedule
from tf_hips.ps.terms.recorder import Kind

pytestmark = pytest.mark.heavy  # servers are killed and restored

assert eager  # a fixture
PLAIN = "fedbuff(3, 0.8, 0.5)"


def expected(rule: str, order: list[Delivery]) -> list[bytes]:
    if rule == PLAIN:
        return test_asynchronous_durable.expected(rule, order)
    return test_buffered_durable.expected(rule.partition(" >> ")[0], order)


class Killed:
    """A run of which anybody may be killed."""

    def __init__(self, base: Path, rule: str, seed: int, order: list[Delivery]) -> None:
        self.draw = random.Random(seed)
        self.num_killed: Counter[str] = Counter()
        self._base, self._rule, self._order = base, rule, order
        self._answers = expected(rule, order)
        self._backups = dict.fromkeys(range(len(SITES)), 0)  # the round that comes next
        self.served = Served(base / "0", texts=TEXTS, rule=rule)
        self.served.join()
        self.served.agree()

    def push(self, place: int) -> None:
        """Delivers a packet, and is gone before the answer, or not."""
        number, child, chunk = self._order[place]
        if self.draw.random() < 0.5:
            assert answer(self.served, self._order[place]) == self._answers[place]
            return
        lane = self.served.session.begin_round(self.served.caller(child), number)
        finished(self.served)
        packet = packet_of(TEXTS[0], number, child, chunk)
        assert lane.add(number, child, [(chunk, packet)]) == 1

    def back_up(self, child: int, number: int) -> None:
        session = self.served.session
        session.back_up(self.served.caller(child), session.token, number, 0)
        self._backups[child] = number

    def kill_child(self, child: int, place: int) -> None:
        """Another process goes on from the backup: all up to `place` was delivered before."""
        self.num_killed["child"] += 1
        name = f"{child}-{self.num_killed['child']}"
        session, new = self.served.session, self.served.caller(child, name)
        assert session.join(new, 2, *TEXTS, 7, self._rule)["is_back"]
        session.agree_model(new, SHAPES, self._backups[child])
        self.served.processes[child] = name
        for known, one in enumerate(self._order[: place + 1]):
            if one[1] == child and one[0] >= self._backups[child]:
                assert answer(self.served, one) == self._answers[known]

    def kill_server(self) -> None:
        self.num_killed["server"] += 1
        base = self._base / str(self.num_killed["server"])
        finished(self.served)
        self.served.killed(base)
        processes = self.served.processes
        self.served.close()
        self.served = Served(base, texts=TEXTS, rule=self._rule)
        assert self.served.is_restored
        self.served.processes = processes


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", [PLAIN, *map(test_buffered_durable.text_of, ("median", "mean"))])
def test_an_update_counts_once_whoever_is_killed(tmp_path: Path, rule: str, seed: int) -> None:
    order = schedule(60)
    run = Killed(tmp_path, rule, seed, order)
    try:
        for place, (number, child, _) in enumerate(order):
            run.push(place)
            done = sum(one[:2] == (number, child) for one in order[: place + 1])
            if done == NUM_CHUNKS and run.draw.random() < 0.4:
                run.back_up(child, number + 1)
            if run.draw.random() < 0.15:
                run.kill_server()
            if run.draw.random() < 0.2:
                run.kill_child(run.draw.randrange(len(SITES)), place)
        for child in range(len(SITES)):
            run.kill_child(child, len(order) - 1)
        assert min(run.num_killed["child"], run.num_killed["server"]) > 3
    finally:
        run.served.close()


@pytest.mark.parametrize("rule", [PLAIN, test_buffered_durable.text_of("median")])
def test_the_journal_has_each_update_once(tmp_path: Path, rule: str) -> None:
    order = schedule(40)
    run = Killed(tmp_path, rule, 7, order)
    try:
        for place in range(len(order)):
            run.push(place)
            if place % 5 == 4:
                run.kill_child(order[place][1], place)
            if place % 11 == 10:
                run.kill_server()
        base = run.served.killed(tmp_path / "whole")
    finally:
        run.served.close()
    packets = [
        (fields["round"], fields["child"], fields["chunk"])
        for kind, fields in accepted(base)
        if kind == Kind.PACKET
    ]
    assert packets == order
