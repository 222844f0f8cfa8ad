# SPDX-License-Identifier: Apache-2.0
"""Digits trained through two levels of servers, some of whose children lie.

    3 workers --packets--> server of the party --packet--> server above --packet--> everybody
                           mean or rule                    mean or rule

15 workers in 5 parties. Everything is what the package does: packets of `ops.native`, with the keys
of a run, and residuals of workers, of parties and of the way down; sums of packets are encoded by
`Compressor.for_sums`; rules of coordinates and means are `ps.rules`, others `robust`. A gradient
is one tensor of 2,410 elements. Batches are functions of (seed, step).

Who lies, drawn once by the seed of a run:

    party    one of the three workers of each party; the rule is in the parties, a mean above
    global   one whole party; a mean in the parties, the rule above
    both     one whole party, and a worker of each other one; the rule on both levels

Liars know what all honest ones on their level send, and the codec: what they send is encoded
without a residual. Of a party that lies the server does.
"""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks import robust_accuracy
from benchmarks.robust_accuracy import BATCH, SIZES, Floats
from tf_hips import robust
from tf_hips.errors import NonFiniteError, ToleranceError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ops.compressor import Compressor
from tf_hips.ps import rules
from tf_hips.ps.rules.merging import merging
from tf_hips.robust import attacks

Packet = npt.NDArray[np.uint8]

PARTIES, MEMBERS = 5, 3
WORKERS = PARTIES * MEMBERS
LEVELS = ("party", "global", "both")
CODECS = {
    "none": "fp32",
    "onebit": "error_feedback(onebit)",
    "terngrad": "error_feedback(terngrad(bitwidth=2))",
    "dgc": "dgc(ratio=0.05, momentum=0.9)",
}
# Not in the table: what is left of TernGrad's weakness with more bits.
MORE_CODECS = {
    "terngrad4": "error_feedback(terngrad(bitwidth=4))",
    "qsgd4": "error_feedback(qsgd(bits=4))",
}
MEAN = "mean"
STEPS = 200
# Without momentum: beside error feedback and liars it is one thing more that amplifies.
RATE = 0.5
# Signs are no gradients: a step has one length in each coordinate.
SIGN_RATE = 0.01
LENGTH = sum(SIZES)
SCALE = "scale"
"""The attack that lies about the scale in a packet's header, beside those of `robust_accuracy`."""
FACTOR = 1000.0
ATTACKS = (*robust_accuracy.ATTACKS, SCALE)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training of the table.

    Attributes:
        rule: text of a robust rule, or MEAN.
        level: one of LEVELS.
        codec: one of CODECS or MORE_CODECS.
        attack: one of ATTACKS.
    """

    rule: str
    level: str
    codec: str
    attack: str

    @property
    def compressor(self) -> Compressor:
        """What workers encode with."""
        return compressors.parse({**CODECS, **MORE_CODECS}[self.codec])

    def rule_at(self, level: str) -> str:
        """The rule of a server of that level."""
        return self.rule if self.level in (level, "both") else MEAN

    @property
    def rate(self) -> float:
        """The learning rate of SGD without momentum; a codec may have one of its own."""
        if self.rule.startswith("majority"):
            return SIGN_RATE
        return RATE * (1.0 - dict(self.compressor.codec.params).get("momentum", 0.0))

    def why_not(self) -> str | None:
        """Why the package does not do this; None: it does."""
        sums = self.compressor.for_sums.text
        children = {"party": (MEMBERS, self.compressor.text), "global": (PARTIES, sums)}
        for level in children if self.level == "both" else [self.level]:
            if why := _why_not(self.rule, *children[level]):
                return why
        if self.attack == SCALE and self.compressor.codec.name not in ("onebit", "terngrad"):
            return f"packets of {self.compressor.text} have no scale"
        return None


def _why_not(text: str, n: int, codec: str) -> str | None:
    rule = robust.parse(text)
    if rule.is_coordinate:
        return rules.why_not(text, n, codec)
    try:
        # Whether n rows are enough: of which does not matter.
        rule(np.eye(n, dtype=np.float32))
    except ToleranceError as error:
        return str(error)
    # Where each child sends other elements, most values of a coordinate are 0, and a row of zeros
    # is nearer to each row than they are to each other. These hear all rows, of each a share.
    hears_all = rule.rule.name in ("geometric_median", "centred_clipping")
    return None if hears_all else rules.why_not("median", n, codec)


class Encoder:
    """Who sends packets: a worker, a server of a party, or the server above."""

    def __init__(self, compressor: Compressor, run_seed: int, role: str) -> None:
        self.compressor = compressor
        self._seed = native.derive_seed(run_seed, role)
        self._kept = self._nothing_kept()

    def _nothing_kept(self) -> Floats | None:
        has_state = self.compressor.has_state
        return np.zeros(self.compressor.state_shape((LENGTH,)), np.float32) if has_state else None

    def packet(self, row: Floats, step: int) -> Packet:
        """What is sent of a row; what the codec loses is kept."""
        key = native.Key(self._seed, step, 0)
        return native.encode(self.compressor, row, key, kept=self._kept)

    def lie(self, row: Floats, step: int) -> Packet:
        """A packet that is as near to `row` as the codec can be; nothing is kept."""
        codec = self.compressor.codec
        kept = np.zeros(codec.state_shape((LENGTH,)), np.float32) if codec.has_state else None
        return native.encode(codec, row, native.Key(self._seed, step, 0), kept=kept)


class Merger:
    """What a server makes of packets."""

    def __init__(self, text: str, compressor: Compressor, seed: int) -> None:
        self._aggregator = robust.parse(text)
        self._compressor = compressor
        self._seed = seed
        self._rule = rules.parse(text) if self._aggregator.is_coordinate else None
        self._before: Floats | None = None

    def merged(self, packets: Sequence[Packet], step: int) -> Floats:
        """One row.

        Raises:
            NonFiniteError: it would not be finite.
            ToleranceError: rows are too bad for the rule.
        """
        if self._rule is not None:
            rule = merging(self._rule, self._compressor, {})
            rule.begin(LENGTH)
            for child, packet in enumerate(packets):
                rule.add(child, packet)
            merged = rule.finish()
        else:
            rows = [_decoded(self._compressor, packet) for packet in packets]
            merged = self._aggregator(rows, reference=self._before, seed=self._seed, step=step)
            self._before = merged
        if not np.isfinite(merged).all():
            raise NonFiniteError("the merged gradient must be finite. Received: NaN or infinities")
        return merged


class Fleet:
    """Workers, parties and their servers; all of them, or those that one process is."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell, self.seed = cell, seed
        compressor = cell.compressor
        self.for_sums = compressor.for_sums
        self._workers = [Encoder(compressor, seed, f"worker/{i}") for i in range(WORKERS)]
        self._servers = [Encoder(self.for_sums, seed, f"party/s{p}") for p in range(PARTIES)]
        rule = cell.rule_at("party")
        self._mergers = [Merger(rule, compressor, seed) for _ in range(PARTIES)]
        self.lying_parties, self.lying_workers = liars(cell, seed)

    def packets(
        self, weights: Floats, step: int, before: Floats | None, wanted: Collection[int]
    ) -> dict[int, Packet]:
        """What parties send up.

        Args:
            weights: of the model.
            step: of the run.
            before: what came down in the step before.
            wanted: which parties; the same ones in every step.
        """
        knows_all = self.lying_workers or not self.lying_parties.isdisjoint(wanted)
        here = range(PARTIES) if knows_all else sorted(wanted)
        below = self._of_workers(weights, step, before, here)
        rows = {}
        for party in here:
            mine = [below[worker] for worker in members_of(party)]
            rows[party] = self._mergers[party].merged(mine, step)
        told = self._told(self._servers, rows, self.lying_parties, step, before)
        return {party: told[party] for party in wanted}

    def _of_workers(
        self, weights: Floats, step: int, before: Floats | None, parties: Sequence[int]
    ) -> dict[int, Packet]:
        data = robust_accuracy.digits()
        draw = np.random.default_rng((self.seed, step))
        chosen = draw.integers(0, len(data.rows), (WORKERS, BATCH))
        here = [worker for party in parties for worker in members_of(party)]
        batches = data.rows[chosen[here]], data.labels[chosen[here]]
        found = robust_accuracy.gradients(weights, *batches)
        rows = dict(zip(here, found, strict=True))
        return self._told(self._workers, rows, self.lying_workers, step, before)

    def _told(
        self,
        senders: Sequence[Encoder],
        rows: dict[int, Floats],
        lying: frozenset[int],
        step: int,
        before: Floats | None,
    ) -> dict[int, Packet]:
        """The packets of all, of which some are lies that are made of the others."""
        who = [one for one in rows if one in lying]
        told = {
            one: senders[one].packet(row, step) for one, row in rows.items() if one not in lying
        }
        if who and self.cell.attack == SCALE:
            for one in who:
                codec = senders[one].compressor.codec
                honest = senders[one].packet(rows[one], step)
                told[one] = attacks.lie_about_scale(codec, honest, LENGTH, FACTOR)
        elif who:
            attack = robust_accuracy.ATTACKS[self.cell.attack]
            seen = [_decoded(senders[one].compressor, packet) for one, packet in told.items()]
            own = [rows[one] for one in who]
            options = {"before": before, "seed": self.seed, "step": step}
            for one, lie in zip(who, attack(seen, len(who), own=own, **options), strict=True):
                told[one] = senders[one].lie(lie, step)
        return told


class Trainee:
    """Weights, which are those of all."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.weights: Floats = robust_accuracy.first_weights(np.random.default_rng(seed))
        self.before: Floats | None = None
        self._rate = np.float32(cell.rate)

    def step(self, merged: Floats) -> None:
        """Goes on by what has come down.

        Raises:
            NonFiniteError: the weights would not be finite.
        """
        self.before = merged
        with np.errstate(all="ignore"):
            self.weights = self.weights - self._rate * merged
        if not np.isfinite(self.weights).all():
            raise NonFiniteError("weights must be finite. Received: NaN or infinities")

    def accuracy(self) -> float:
        """Of the digits that were held back, in percent."""
        with np.errstate(all="ignore"):
            return robust_accuracy.accuracy(self.weights)


def trained(cell: Cell, seed: int, steps: int = STEPS) -> float:
    """Accuracy after training, in percent; what stops a run in the package ends it here."""
    fleet, trainee = Fleet(cell, seed), Trainee(cell, seed)
    down = Encoder(fleet.for_sums, seed, "server")
    above = Merger(cell.rule_at("global"), fleet.for_sums, seed)
    try:
        for step in range(steps):
            with np.errstate(all="ignore"):
                up = fleet.packets(trainee.weights, step, trainee.before, range(PARTIES))
                merged = above.merged([up[party] for party in range(PARTIES)], step)
            packet = down.packet(merged, step)
            trainee.step(_decoded(down.compressor, packet))
    except (NonFiniteError, ToleranceError):
        pass
    return trainee.accuracy()


def liars(cell: Cell, seed: int) -> tuple[frozenset[int], frozenset[int]]:
    """Parties that lie, and workers that do."""
    if robust_accuracy.ATTACKS.get(cell.attack, cell.attack) is None:
        return frozenset(), frozenset()
    parties, workers = frozenset[int](), frozenset[int]()
    if cell.level != "party":
        parties = frozenset(attacks.liars(PARTIES, 1, seed, fixed=True))
    if cell.level != "global":
        workers = frozenset(
            members_of(party)[attacks.liars(MEMBERS, 1, seed, party)[0]]
            for party in range(PARTIES)
            if party not in parties
        )
    return parties, workers


def members_of(party: int) -> range:
    """The workers of a party."""
    return range(party * MEMBERS, (party + 1) * MEMBERS)


def _decoded(compressor: Compressor, packet: Packet) -> Floats:
    return native.decode(compressor, packet, LENGTH, out=np.empty(LENGTH, np.float32))
