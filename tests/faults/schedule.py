# SPDX-License-Identifier: Apache-2.0
"""Which faults there are, the table of roles and phases, and random schedules from a seed."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

from tests.faults import child as children
from tests.faults import job as jobs
from tests.faults.job import Failed, Job
from tests.faults.training import (
    LARGE,
    RULED,
    RULED_TOGETHER,
    RULED_TREES,
    SETTINGS,
    SHARDED,
    SMALL,
    TREES,
    Setting,
)
from tf_hips.ps.terms.assignment import Shard
from tf_hips.ps.terms.model import Model

GAP = 2  # rounds from one fault to the next, at least
DELAYS_S = (0.0, 5.0)


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that happens once.

    Attributes:
        kind: `party` kills a child, at a place of `child`, or anywhere between two rounds; `trap`
            kills the server at a place of `trapped`; `idle` when all children have ended
            the round before and none calls; `moment` as soon as a child says that it has ended the
            round, whatever the server does then; `cut` breaks the link that carries a byte.
        round: in which it happens, or the first in which it can.
        place: of a trap, or in a child; of a cut the direction, `up` or `down`.
        count: of a trap, how many threads come to the place; of a moment or a party, which
            child; of a cut, how many bytes pass before.
        delay_s: between kill and restart.
        again: the server is killed once more when it has just restored the run.
        server: which one, by name; None: the first of the topmost.
    """

    kind: str
    round: int
    place: str = ""
    count: int = 1
    delay_s: float = 0.0
    again: bool = False
    server: str | None = None

    def strike(self, job: Job, stop: int) -> None:
        """Makes it happen; the children go on up to round `stop`."""
        job.reach(self.round - 1)
        victim = job.servers[self.server] if self.server is not None else job.top
        if self.kind == "idle":
            victim.kill(self.delay_s, again=self.again)
            job.train(stop)
        elif self.kind == "trap":
            victim.trap(self.place, self.round, self.count)
            job.train(stop)
            victim.running.wait_for("trapped", self.place)
            victim.kill(self.delay_s, again=self.again)
        elif self.kind == "party":
            self._strike_party(job, self.count % len(job.children), stop)
        elif self.kind == "moment":
            job.train(stop)
            job.children[self.count % len(job.children)].wait_for("round", self.round)
            victim.kill(self.delay_s, again=self.again)
        else:
            victim.relay.cut_after(self.place, self.count)
            job.train(stop)

    def _strike_party(self, job: Job, child: int, stop: int) -> None:
        if self.place:
            # Backups are made after every second round.
            is_odd = self.place == "backed-up" and self.round % children.BACKUP_EVERY == 0
            job.trap_child(child, self.place, self.round + is_odd)
        job.train(stop)
        if self.place:
            job.children[child].wait_for("trapped", self.place)
        for _ in range(1 + self.again):
            job.kill_child(child, self.delay_s, stop)


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of a role, and how a fault hits it.

    Attributes:
        name: in words.
        kind: of the fault.
        place: of the fault.
        count: of the fault.
        is_eager: whether the server must make a snapshot in every round.
        resends: whether children send again what the server has.
    """

    name: str
    kind: str
    place: str = ""
    count: int = 1
    is_eager: bool = False
    resends: bool = False


_OF_SERVERS = (
    Phase("idle", "idle"),
    Phase("mid-upload", "trap", "mid-upload", 2),
    Phase("recorded", "trap", "recorded", 2),  # acknowledged, not applied
    Phase("mid-download", "trap", "mid-download", 2),
    Phase("snapshot", "trap", "snapshot", 3, is_eager=True),
    Phase("resent", "trap", "mid-download", 2, resends=True),
)
_OF_CHILDREN = (
    Phase("any-time", "party"),
    *(Phase(place, "party", place) for place in children.PLACES),
    Phase("resent", "party", "mid-upload", resends=True),
)
PLAIN = tuple(SETTINGS.values())


@dataclasses.dataclass(frozen=True)
class Role:
    """Who is killed, in which phases, where."""

    phases: tuple[Phase, ...]
    settings: tuple[Setting, ...]
    server: str | None = None  # by name; None: a child, or the first of the topmost


# One more role is one more entry here, and what `Fault.strike` does to it.
ROLES: dict[str, Role] = {
    "global-server": Role(_OF_SERVERS, PLAIN),
    "party": Role(_OF_CHILDREN, PLAIN),
    "shard": Role(_OF_SERVERS, SHARDED, "top-1"),
    "party-server": Role(
        (
            *_OF_SERVERS,
            Phase("going-up", "trap", "going-up"),
            Phase("going-down", "trap", "going-down", 2),
        ),
        TREES,
        "west",
    ),
    "above-a-party-server": Role(_OF_SERVERS, TREES[:1]),
    "leaf": Role(_OF_CHILDREN, TREES[:1]),  # the first child, which a party server serves
    "ruling-server": Role(_OF_SERVERS, RULED),
    "ruling-shard": Role(_OF_SERVERS, RULED_TOGETHER, "top-1"),
    "lead-of-shards": Role(_OF_SERVERS, RULED_TOGETHER[:1]),
    "ruled-party": Role(_OF_CHILDREN, RULED[:1]),
    "sketching-server": Role(
        (*_OF_SERVERS, Phase("going-up", "trap", "going-up")), RULED_TREES, "west"
    ),
    "sketched-server": Role(_OF_SERVERS, RULED_TREES),
}
CASE_ROUND = 3
_WAITING = 2  # settings of a role in which nobody is there for long


@dataclasses.dataclass(frozen=True)
class Case:
    """One role killed in one phase of one setting."""

    role: str
    phase: Phase
    delay_s: float
    setting: Setting

    @property
    def name(self) -> str:
        """By which command lines know it."""
        return f"{self.role}/{self.phase.name}/{self.delay_s:g}s/{self.setting.name}"

    def run(self, base: Path) -> str:
        """Runs it; what happened, in words."""
        phase = self.phase
        count = phase.count if phase.kind == "trap" else 0  # the first child
        fault = Fault(
            *(phase.kind, CASE_ROUND, phase.place, count, self.delay_s),
            server=ROLES[self.role].server,
        )

        def act(job: Job) -> None:
            job.train(CASE_ROUND)
            fault.strike(job, self.setting.rounds)

        more = {"is_eager": self.phase.is_eager, "resends": self.phase.resends}
        job = jobs.run(base, self.setting, act, **more)
        if job.num_kills != 1:
            raise Failed(f"one kill must have been made. Received: {job.num_kills}")
        return "1 kill"


def cases() -> list[Case]:
    """The table: every role in every phase, both delays, all settings; the longer one in some."""
    return [
        Case(name, phase, delay_s, setting)
        for name, role in ROLES.items()
        for phase, delay_s in itertools.product(role.phases, DELAYS_S)
        for setting in role.settings[: _WAITING if delay_s else None]
    ]


# Places of traps, and up to how many threads come there in a round at least.
_PLACES = {"mid-upload": 2, "recorded": 3, "mid-download": 2}
_SNAPSHOT_PLACES = {"snapshot": 4, "snapshot-whole": 1, "snapshot-named": 1}
_PARTY_PLACES = {"going-up": 1, "going-down": 2}
_CODECS = ("fp32", "fp16", "error_feedback(onebit)", "error_feedback(tbq)")
_ONEWAY = ("error_feedback(topk(ratio=0.05))", "error_feedback(qsgd)")
_MAX_DELAY_S = 0.5
_MAX_CUT_BYTES = 20_000


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a seed says: a setting and faults, in order."""

    seed: int
    setting: Setting
    is_eager: bool
    faults: tuple[Fault, ...]
    resends: bool = False

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        """The schedule of a seed; the same on every machine."""
        draw = random.Random(f"faults {seed}")
        num_faults = draw.randint(1, 4)
        is_eager = draw.random() < 0.4
        setting = Setting(
            f"seed-{seed}",
            draw.choice(_CODECS + _ONEWAY),
            draw.choice(_CODECS),
            sites=("a", "b", "c")[: draw.choice((2, 2, 3))],
            shapes=draw.choice((SMALL, SMALL, LARGE)),
            is_secure=draw.random() < 0.3,
            rounds=2 + num_faults * (1 + GAP) + draw.randrange(3),
            seed=seed,
        )
        places = _PLACES | (_SNAPSHOT_PLACES if is_eager else {})
        faults = []
        for number in range(num_faults):
            kind = draw.choice(("trap", "trap", "party", "party", "moment", "idle", "cut"))
            place, count = "", draw.randrange(1, 4)
            if kind == "trap":
                place = draw.choice(sorted(places))
                count = draw.randint(1, places[place])
            elif kind == "party":
                place = draw.choice(("", *children.PLACES))
            elif kind == "cut":
                place, count = draw.choice(("up", "down")), draw.randint(1, _MAX_CUT_BYTES)
            faults.append(
                Fault(
                    kind,
                    1 + number * (1 + GAP),
                    place,
                    count,
                    delay_s=draw.choice((0.0, draw.uniform(0.0, _MAX_DELAY_S))),
                    again=draw.random() < 0.2,
                )
            )
        resends = draw.random() < 0.3
        return cls(seed, *_spread(setting, is_eager, faults), resends)

    @property
    def name(self) -> str:
        """Which schedule it is."""
        return f"seed {self.seed}"

    def run(self, base: Path) -> str:
        """Runs it; what happened, in words."""

        def act(job: Job) -> None:
            job.train(self.faults[0].round)
            for fault, after in itertools.pairwise((*self.faults, None)):
                fault.strike(job, after.round if after is not None else self.setting.rounds)

        job = jobs.run(base, self.setting, act, is_eager=self.is_eager, resends=self.resends)
        return f"{_SHAPES[_shape(self.setting)]}, {job.num_kills} kills, {job.num_cuts} cuts"


# Shards and party servers of a schedule; of each in how many parts of ten.
_SHAPES = {(1, False): "one server", (2, False): "two servers", (1, True): "a tree"} | {
    (2, True): "a tree below two servers"
}
_DRAWN = ((1, False),) * 4 + ((2, False),) + ((1, True),) * 2 + ((2, True),) * 3


def _shape(setting: Setting) -> tuple[int, bool]:
    return setting.shards, bool(setting.parties)


def _spread(
    setting: Setting, is_eager: bool, faults: Sequence[Fault]
) -> tuple[Setting, bool, tuple[Fault, ...]]:
    """The same over several servers, which faults hit in turn."""
    draw = random.Random(f"servers {setting.seed}")
    shards, is_tree = draw.choice(_DRAWN)
    if is_tree:
        setting = dataclasses.replace(
            setting, sites=("a", "b", "c"), parties=(("west", ("a", "b")),)
        )
    setting = dataclasses.replace(setting, shards=shards)
    model = Model(setting.shapes)
    chunks = {"top": len(Shard(0, shards).chunks(model))}
    if shards == 2:
        chunks["top-1"] = len(Shard(1, 2).chunks(model))
    if is_tree:
        chunks["west"] = len(model.chunks)
    found = []
    for fault in faults:
        server, place, count = draw.choice(sorted(chunks)), fault.place, fault.count
        if fault.kind == "trap" and server == "west" and draw.random() < 0.4:
            place = draw.choice(sorted(_PARTY_PLACES))
            count = draw.randint(1, _PARTY_PLACES[place])
        if place in ("recorded", "going-down"):
            count = min(count, chunks[server])
        found.append(dataclasses.replace(fault, server=server, place=place, count=count))
    return setting, is_eager, tuple(found)
