# SPDX-License-Identifier: Apache-2.0
"""What the packets of one chunk become: rule, residual, one packet; and what rounds leave behind.

    packets --decode--> rule (sum in child order) --> residual + sum --> encode --> one packet
                        or an optimizer's step

Kept from round to round: the residual of the way on, down to the children or up to a server above,
and what the rule keeps. `store` knows which packets belong together.

Invariant: what is refused leaves all of that as it was.
"""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from tf_hips.errors import NonFiniteError, PacketError, ToleranceError
from tf_hips.ops import native, native_updates
from tf_hips.ops.compressor import CHUNK, Compressor
from tf_hips.ops.native import Floats
from tf_hips.ps.rounds.norms import Norms
from tf_hips.ps.rounds.partial import LatePacket
from tf_hips.ps.rounds.round import Packet, TooFewRowsError
from tf_hips.ps.rules.robust import OWN_REFUSAL, Rows, is_refused, with_no_row
from tf_hips.ps.rules.rule import Rule
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.rules.whole import Ruling, WholeRound
from tf_hips.ps.terms.model import Model
from tf_hips.ps.transport.wire import Buffer


class Combining:
    """Combines the packets of a chunk. Thread-safe but for two calls that combine one chunk."""

    def __init__(
        self,
        model: Model,
        chunks: Sequence[int],
        sites: Sequence[str],
        uplink: Compressor,
        downlink: Compressor,
        seed: int,
        updates: Updates | None,
        norms: Norms | None = None,
    ) -> None:
        """All residuals are zero.

        Args:
            model: the model all children have agreed on.
            chunks: which of its chunks are here.
            sites: names of the children in child order, for messages.
            uplink: what the children's packets are encoded with; of a warm-up the stage of the
                round.
            downlink: what is encoded here; error feedback, if any, is kept here.
            seed: of what is encoded here.
            updates: the rule, with its state; None: the sum.
            norms: hears of the rows of a robust rule of coordinates; None: nobody does.
        """
        self._norms = norms
        self.updates = updates or Updates([chunk.size for chunk in model.chunks])
        self._model = model
        self._chunks = chunks
        self._sites = sites
        self._uplink = uplink
        self._downlink = downlink
        self._seed = seed
        self._residuals: list[Floats | None] = [None] * len(model.chunks)
        self._scratch = threading.local()

    def check(self, number: int, child: int, chunk: int, packet: Packet) -> None:
        """Looks at a packet of round `number`.

        Raises:
            PacketError: it is cut off, too long or of another codec.
            NonFiniteError: it decodes to NaN or an infinity.
        """
        size = self._model.chunks[chunk].size
        if not hasattr(self._scratch, "values"):
            self._scratch.values = np.empty(CHUNK, np.float32)
        values = self._scratch.values[:size]
        try:
            native.decode(self._uplink_of(number, chunk), packet, size, out=values)
        except PacketError as error:
            raise PacketError(
                f"{self._where(number, self._sites[child], chunk)}: {error}"
            ) from error
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"{self._where(number, self._sites[child], chunk)}: a gradient must be finite. "
                f"Received: {int(np.count_nonzero(~np.isfinite(values)))} values that are not"
            )

    def row(
        self, number: int, chunks: Sequence[int], packets: Sequence[Packet | None]
    ) -> Floats | None:
        """The values of packets of `chunks`, one after the other; None: some are not to be read."""
        sizes = [self._model.chunks[chunk].size for chunk in chunks]
        found = np.empty(sum(sizes), np.float32)
        at = 0
        for chunk, size, packet in zip(chunks, sizes, packets, strict=True):
            if packet is None:
                return None
            try:
                native.decode(
                    self._uplink_of(number, chunk), packet, size, out=found[at : at + size]
                )
            except PacketError:
                return None
            at += size
        return found

    def combine(
        self,
        number: int,
        chunk: int,
        packets: Mapping[int, Packet],
        weights: Mapping[int, float],
        late: Sequence[LatePacket] = (),
        share: float | None = None,
        ruling: Ruling | None = None,
    ) -> Packet:
        """Makes one packet of those of a round.

        Args:
            number: the round.
            chunk: whose they are.
            packets: by child.
            weights: what children stand for, of those that have said so.
            late: packets of older rounds that count in this one, in their order.
            share: what a sum is multiplied by, to stand for children that are not in it; None: by
                nothing. A mean stands for them as it is.
            ruling: of a rule of whole rounds what it has decided; None: chunks are merged each by
                itself.

        Raises:
            NonFiniteError: the sum, or what the rule makes of it, is not finite.
            TooFewRowsError: the rule makes nothing of what has come.
        """
        where = self._model.chunks[chunk]
        rule: Rule | None = None
        try:
            if ruling is not None:
                merged = ruling.apply(chunk)
            elif self.updates.whole is not None:
                merged = np.zeros(where.size, np.float32)  # nobody takes part
            else:
                rule = self.updates.merging(self._uplink_of(number, chunk), weights)
                rule.begin(where.size)
                for child, packet in packets.items():
                    rule.add(child, packet)
                merged = self._with_late(rule.finish(), chunk, [*packets], weights, late)
            if share is not None and not self.updates.rule.is_mean:
                merged = native_updates.scale(merged, share)
            if not np.isfinite(merged).all():
                raise NonFiniteError("the sum")
            has_rows = ruling is not None or self.updates.whole is None
            step, slots = self.updates.step(chunk, merged, has_rows=has_rows)
        except ToleranceError as error:
            raise TooFewRowsError(
                f"Round {number}, {self._model.describe(chunk)}: {error}"
                f"{self._refusals(packets, weights)}{self.absent(packets, weights)}"
            ) from error
        except NonFiniteError:
            raise NonFiniteError(self._describe_overflow(number, chunk, packets)) from None
        residual = self._residuals[chunk]
        downlink = self._model.codec(self._downlink, chunk)
        if downlink.has_state and residual is None:
            residual = self._residuals[chunk] = np.zeros(where.size, np.float32)
        key = native.Key(self._seed, number, where.tensor, where.offset)
        packet = native.encode(downlink, step, key, kept=residual)
        self.updates.keep(chunk, slots)
        if self._norms is not None and isinstance(rule, Rows):
            self._norms.add(number, chunk, rule.squares)
        return packet

    def decide(
        self,
        number: int,
        packets: Mapping[int, Mapping[int, Packet]],
        children: Sequence[int],
        weights: Mapping[int, float],
    ) -> Ruling | None:
        """Lets a rule of whole rounds decide; None: the rule is none, or nobody takes part.

        Args:
            number: the round.
            packets: by chunk, each by child.
            children: who counts, in order.
            weights: what children stand for; who says 0 takes no part.

        Raises:
            ToleranceError: nothing can be made of the packets.
        """
        whole = self.updates.whole
        round = None if whole is None else self.weighed_round(number, packets, children, weights)
        if whole is not None and round is not None:
            try:
                return whole.decide(round)
            except ToleranceError as error:
                raise ToleranceError(f"{error}{self.absent(children, weights)}") from error
        named = self._refusals(children, weights)
        if whole is not None and named:
            raise ToleranceError(f"{self.updates.rule} needs a row. Received: none{named}")
        return None

    def weighed_round(
        self,
        number: int,
        packets: Mapping[int, Mapping[int, Packet]],
        children: Sequence[int],
        weights: Mapping[int, float],
    ) -> WholeRound | None:
        """The rows of those who say that they take part, as for `decide`; None: nobody does."""
        present = [child for child in children if weights.get(child, 1.0) > 0]
        if not present:
            return None
        missing = {child: OWN_REFUSAL for child in children if is_refused(weights.get(child, 1.0))}
        return self.whole_round(number, packets, present, missing)

    def whole_round(
        self,
        number: int,
        packets: Mapping[int, Mapping[int, Packet]],
        present: Sequence[int],
        missing: Mapping[int, str],
    ) -> WholeRound:
        """A round as rules of whole rounds see it.

        Args:
            number: the round.
            packets: by chunk, each by child.
            present: children that take part, in order.
            missing: as of `WholeRound`.
        """

        def decode(chunk: int, child: int, packet: Packet, out: Floats) -> None:
            del child  # all have encoded with the same
            native.decode(self._uplink_of(number, chunk), packet, out.size, out=out)

        sizes = {chunk: self._model.chunks[chunk].size for chunk in packets}
        reference = self.updates.reference
        return WholeRound(number, present, packets, sizes, decode, reference, missing)

    def _with_late(
        self,
        merged: Floats,
        chunk: int,
        children: Sequence[int],
        weights: Mapping[int, float],
        late: Sequence[LatePacket],
    ) -> Floats:
        """Adds late packets to a sum, or puts them into a mean by their weights."""
        if not late:
            return merged
        total = 1.0
        if self.updates.rule.is_mean:
            present = sum(weights.get(child, 1.0) for child in children)
            total = present + sum(one.weight for one in late)
            merged = native_updates.scale(merged, present / total if total else 0.0)
        for one in late:
            row = native.decode(self._uplink_of(one.number, chunk), one.packet, merged.size)
            factor = 1.0
            if self.updates.rule.is_mean:
                factor = one.weight / total if total else 0.0
            merged = native_updates.add_scaled(merged, row, factor)
        return merged

    def _refusals(self, children: Iterable[int], weights: Mapping[int, float]) -> str:
        """Which of `children` have refused their own updates, in brackets; "": none."""
        refused = [child for child in sorted(children) if is_refused(weights.get(child, 1.0))]
        named = "; ".join(f"site `{self._sites[child]}`: {OWN_REFUSAL}" for child in refused)
        return f" ({named})" if named else ""

    def absent(self, children: Iterable[int], weights: Mapping[int, float]) -> str:
        """Which of `children` say that they take no part, in brackets; "": none."""
        sites = [
            self._sites[child]
            for child in sorted(children)
            if weights.get(child, 1.0) == 0 and not is_refused(weights.get(child, 1.0))
        ]
        return with_no_row(sites)

    def residual_rms(self) -> float:
        """Root mean square of what packets of the way down have missed so far; 0 without any.

        Merges go on meanwhile, so it is a value of about now.
        """
        held = [one for one in self._residuals if one is not None]
        total = sum(float(np.square(one, dtype=np.float64).sum()) for one in held)
        elements = sum(self._model.chunks[chunk].size for chunk in self._chunks)
        return math.sqrt(total / max(1, elements))

    def residuals(self) -> Iterator[tuple[int, Floats]]:
        """Pairs of chunk number and residual, as they are; while merges are held they stay so."""
        for chunk, residual in enumerate(self._residuals):
            if residual is not None:
                yield chunk, residual

    def slots(self) -> Iterator[tuple[int, int, int, Floats]]:
        """Chunk, slot, number of steps and values of what the rule keeps, as `residuals` does."""
        return self.updates.kept()

    def restore_residual(self, chunk: int, values: Buffer) -> None:
        """Gives a chunk its residual, float32 as bytes."""
        residual = np.frombuffer(values, np.float32).copy()
        if residual.size != self._model.chunks[chunk].size:
            raise ValueError(f"the residual of chunk {chunk} has {residual.size} elements")
        self._residuals[chunk] = residual

    def restore_slot(self, chunk: int, place: int, count: int, values: Buffer) -> None:
        """Gives the rule a slot of a chunk, float32 as bytes."""
        self.updates.restore(chunk, place, count, values)

    def _uplink_of(self, number: int, chunk: int) -> Compressor:
        return self._model.codec(self._uplink.at(number), chunk)

    def _where(self, number: int, site: str, chunk: int) -> str:
        return f"Site `{site}`, round {number}, {self._model.describe(chunk)}"

    def _describe_overflow(self, number: int, chunk: int, packets: Mapping[int, Packet]) -> str:
        size = self._model.chunks[chunk].size
        uplink = self._uplink_of(number, chunk)
        peaks = {
            child: float(np.abs(native.decode(uplink, packet, size)).max())
            for child, packet in packets.items()
        }
        worst = max(peaks, key=lambda child: peaks[child])
        rule = self.updates.rule
        what = f"what rule {rule} makes of all" if rule.is_robust else "the sum over all sites"
        return (
            f"{self._where(number, self._sites[worst], chunk)}: {what} must be finite. "
            f"Received: an overflow; the largest value, {peaks[worst]:.3g}, is this site's"
        )
