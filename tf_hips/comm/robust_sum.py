# SPDX-License-Identifier: Apache-2.0
"""A robust rule in place of a sum: of all ranks' gradients one that most of them could have given.

    ps         every rank sends each packet to the owner of its chunk (alltoall), who applies the
               rule to the rows that they decode to, encodes the result and sends it to everyone
    allgather  every rank sends all of its packets to everyone, and everyone applies the rule:
               nobody has to be believed about anything but its own gradient

Rules of coordinates do so bucket by bucket, as sums do. Rules that look at distances need those of
whole rows, so that the same rows are chosen in all tensors: sums of squares of each chunk go to
everyone once in a step, between the packets and the results (decision 0039).

Invariant: all ranks decode the same bytes, so their results are equal bit for bit.
Invariant: nothing raises before all collectives of the step have ended, and then on all ranks.
Invariant: a result depends on the number of ranks and the codec, not on the buckets.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tf_hips.comm import looks, primitives
from tf_hips.comm.compressed import CompressedSum, MakeVariable, cut, encoded
from tf_hips.comm.partition import Piece
from tf_hips.comm.plan import ALLGATHER, PS
from tf_hips.comm.robust_rows import (
    Decider,
    Refused,
    Share,
    by_rank,
    check,
    measures_of,
    most_refused,
)
from tf_hips.comm.robust_wire import Packets, Values, Wire, parts
from tf_hips.comm.staged import Reducer, StagedSum
from tf_hips.comm.topologies import Bucket
from tf_hips.errors import ToleranceError
from tf_hips.ops import graph
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.flow import opaque, yielded
from tf_hips.robust import Aggregator

TOPOLOGIES = (PS, ALLGATHER)

# Step, who is refused, and why the rule could not be applied, if so; raises that.
Tell: TypeAlias = Callable[[int, Sequence[Refused], ToleranceError | None], None]
# Step, the ranks that the rule has chosen, and all that it has chosen among.
TellChosen: TypeAlias = Callable[[int, Sequence[int], Sequence[int]], None]
# Results by piece, and what says who is refused.
_Found: TypeAlias = tuple[dict[Piece, tf.Tensor], tf.Tensor]


class RobustSum(CompressedSum):
    """The robust aggregate of one list of float32 vectors, with the residuals that belong to it.

    Make it once per list of gradients, outside of graphs, on every rank alike.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        compressor: Compressor,
        rule: Aggregator,
        *,
        label: str,
        worker_seed: int,
        owner_seed: int,
        rule_seed: int,
        make_variable: MakeVariable,
        tell: Tell,
        tell_chosen: TellChosen | None = None,
        topology: str = PS,
        scale: float = 1.0,
        shares: CompressedSum | None = None,
    ) -> None:
        """Plans the buckets and makes the residuals.

        Args:
            sizes: elements of each vector.
            compressor: how to encode, on the way to the owners and back; no warm-up.
            rule: what is made of the ranks' vectors.
            label: part of the collectives' names.
            worker_seed: seed of this rank's encoder of gradients.
            owner_seed: seed of this rank's encoder of results.
            rule_seed: of what the rule draws, the same on all ranks.
            make_variable: makes a non-trainable variable from an initial value and a name.
            tell: called on all ranks alike in steps in which rows are refused.
            tell_chosen: called on all ranks alike in steps in which the rule has chosen rows, if it
                is one that chooses; None: nobody hears it.
            topology: which way packets take, one of `TOPOLOGIES`.
            scale: what results are multiplied with, as if rows were; not those of `majority`, which
                are signs.
            shares: as for `CompressedSum`.

        Raises:
            ToleranceError: the rule needs more ranks.
            ValueError: there is no such topology.
        """
        if topology not in TOPOLOGIES:
            raise ValueError(
                f"`topology` of a robust rule must be one of {', '.join(TOPOLOGIES)}. Received: "
                f"topology={topology!r}"
            )
        check(rule, primitives.size())
        is_exact = compressor.codec.name == "fp32" and not compressor.has_state
        wire = Values if is_exact else Packets
        super().__init__(
            sizes,
            compressor,
            label=label,
            worker_seed=worker_seed,
            owner_seed=owner_seed,
            make_variable=make_variable,
            topology=topology,
            shares=shares,
            bucket_elements=wire.bucket_elements,
            piece_elements=wire.grain,
        )
        self._wire: Wire = Values() if is_exact else Packets(self, self._recoded)
        self._rule = rule
        self._tell = tell
        self._tell_chosen = tell_chosen
        # Of all other rules the result is so many times longer when rows are.
        self._scale = 1.0 if rule.rule.name == "majority" else scale
        self._decider = Decider(rule, primitives.size(), rule_seed)
        self._width = measures_of(primitives.size())
        self._label = f"{label}.{topology}"

    def __call__(self, vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Applies the rule to the ranks' `vectors`.

        Args:
            vectors: float32 [sizes[i]] each.
            step: int64 scalar, the same on all ranks.

        Returns:
            Vectors like `vectors`, equal on all ranks; exactly `vectors` where there is one rank.
        """
        if primitives.size() == 1 or not self._buckets:
            return [tf.identity(vector) for vector in vectors]
        own = graph.clip(self.compressor, vectors, primitives.size())
        aggregate = self._by_coordinates if self._rule.is_coordinate else self._by_distances
        results, told = aggregate(self._travelled(own, step), step)
        sums = self._whole(results)

        def look() -> list[tf.Tensor]:
            return self._looked(told, step)

        if looks.later(look):
            return sums
        with tf.control_dependencies([*sums, told]):
            seen = look()
        with tf.control_dependencies(seen):
            return list(opaque(sums))

    def _by_coordinates(self, arriving: Iterator[list[tf.Tensor]], step: tf.Tensor) -> _Found:
        """Results by piece, and faults, uint8 [pieces, ranks]."""
        results: dict[Piece, tf.Tensor] = {}
        faults = []
        for bucket, came in zip(self._buckets, arriving, strict=True):
            share = self._share(bucket)
            vector, own = _run(share.merged, came, [tf.float32, tf.uint8])
            results |= self._handed_on(bucket, vector, step)
            faults.append(tf.ensure_shape(own, [len(share.sizes), share.num_ranks]))
        return results, self._told(tf.concat(faults, 0), "faults")

    def _by_distances(self, arriving: Iterator[list[tf.Tensor]], step: tf.Tensor) -> _Found:
        """Results by piece, and measures, float64 [pieces, measures_of(ranks)]."""
        received = list(arriving)
        shares = [self._share(bucket) for bucket in self._buckets]
        own = [
            tf.ensure_shape(
                _run(share.measured, came, [tf.float64])[0], [len(share.sizes), self._width]
            )
            for share, came in zip(shares, received, strict=True)
        ]
        measures = self._told(tf.concat(own, 0), "measures")
        results: dict[Piece, tf.Tensor] = {}
        before: list[tf.Tensor] = []
        for bucket, share, came in zip(self._buckets, shares, received, strict=True):
            # In one order: ranks that began with different buckets would wait for each other.
            with tf.control_dependencies([yielded(one) for one in before]):
                decided = tf.identity(measures)
            [vector] = _run(
                functools.partial(self._applied, share), [decided, step, *came], [tf.float32]
            )
            before = [vector]
            results |= self._handed_on(bucket, vector, step)
        return results, measures

    def _told(self, own: tf.Tensor, what: str) -> tf.Tensor:
        """What all ranks say of their pieces, in the order of `_tensors`; the same on all ranks."""
        if self._is_everywhere:
            return own
        everyone = primitives.allgather(own, f"{self._label}.{what}")
        return tf.ensure_shape(everyone, [len(self._tensors()), own.shape[1]])

    def _applied(
        self, share: Share, measures: np.ndarray, step: np.int64, *came: np.ndarray
    ) -> np.ndarray:
        return share.applied(*came, decision=self._decider(measures, int(step)))

    @property
    def _is_everywhere(self) -> bool:
        """Whether everyone gets everyone's packets."""
        return self._topology.gathers

    def _places(self, bucket: Bucket) -> list[int]:
        """Pieces whose rows come to this rank."""
        if self._is_everywhere:
            return list(range(len(bucket.pieces)))
        return bucket.of(primitives.rank())

    def _share(self, bucket: Bucket) -> Share:
        own = [bucket.pieces[place] for place in self._places(bucket)]
        return Share(
            sizes=tuple(piece.num_elements for piece in own),
            lengths=tuple(self._wire.lengths(own)),
            rooms=tuple(self._wire.rooms(own)),
            compressor=self._wire.compressor,
            rule=self._rule,
            num_ranks=primitives.size(),
            scale=self._scale,
        )

    def _travelled(
        self, vectors: Sequence[tf.Tensor], step: tf.Tensor
    ) -> Iterator[list[tf.Tensor]]:
        """Yields what comes of each bucket; see `Share.merged`."""
        rank, count = primitives.rank(), primitives.size()
        sent: list[tf.Tensor] = []
        for bucket in self._buckets:
            # As in `CompressedSum`: whole buckets one after the other.
            with tf.control_dependencies([yielded(one) for one in sent]):
                values = [cut(vectors[piece.tensor], piece) for piece in bucket.pieces]
            if self._is_everywhere:
                targets, order = [list(range(len(values)))], [0]
            else:
                targets = [bucket.of(owner) for owner in range(count)]
                order = [(rank + 1 + after) % count for after in range(count)]
            messages, last = self._wire.messages(bucket, targets, order, values, step)
            lengths = [
                self._wire.length([bucket.pieces[place] for place in places]) for places in targets
            ]
            if self._is_everywhere:
                came = [primitives.allgather(messages[0], f"{bucket.label}.gathered")]
            else:
                came = primitives.exchange_apart(messages, lengths, f"{bucket.label}.packets")
            sent = [last]
            yield came

    def _handed_on(
        self, bucket: Bucket, vector: tf.Tensor, step: tf.Tensor
    ) -> dict[Piece, tf.Tensor]:
        """Results of a bucket by piece, on all ranks, as they travel.

        Args:
            bucket: what has travelled.
            vector: results of the pieces whose rows came here; see `Share.merged`.
            step: number of the step.
        """
        places = self._places(bucket)
        own = [bucket.pieces[place] for place in places]
        rooms = self._wire.rooms(own)
        vector = tf.ensure_shape(vector, [sum(rooms)])
        if self._is_everywhere:
            return dict(zip(own, parts(vector, own, rooms), strict=True))
        found = self._wire.results(bucket, places, vector, step)
        return dict(zip(bucket.pieces, found, strict=True))

    def _recoded(self, piece: Piece, value: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """The packet of a result that this rank owns; once per step."""
        kept = self.owner_residuals.get(piece)
        return encoded(self._sums, value, piece, step, seed=self._owner_seed, kept=kept)

    def _whole(self, results: Mapping[Piece, tf.Tensor]) -> list[tf.Tensor]:
        """The vectors that results, or their packets, are of."""
        if not self._is_everywhere and self._wire.compressor is not None:
            return self._decode(results)
        vectors = [tf.zeros([0]) for _ in self._sizes]
        in_order = sorted(results, key=lambda piece: (piece.tensor, piece.offset))
        for tensor, run in itertools.groupby(in_order, key=lambda piece: piece.tensor):
            parts = [results[piece] for piece in run]
            vectors[tensor] = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        return vectors

    def _looked(self, told: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor]:
        """What raises, on all ranks alike, if too few rows were left."""
        if not self._rule.is_coordinate:
            return _run(self._tell_of_measures, [step, told], [tf.int64], is_pure=False)
        return [
            tf.cond(
                tf.reduce_any(told != 0),
                lambda: _run(self._tell_of_faults, [step, told], [tf.int64], is_pure=False)[0],
                lambda: tf.constant(0, tf.int64),
            )
        ]

    def _tell_of_faults(self, step: np.int64, faults: np.ndarray) -> np.int64:
        self._say(int(step), by_rank(faults, self._tensors()), most_refused(faults))
        return np.int64(0)

    def _tell_of_measures(self, step: np.int64, measures: np.ndarray) -> np.int64:
        if self._decider.rejected(measures):
            found = self._decider.refused(measures, self._tensors())
            self._say(int(step), found, len(found))
        if self._tell_chosen is not None:
            decision = self._decider(measures, int(step))
            if decision is not None and decision.selected is not None:
                self._tell_chosen(int(step), decision.selected, decision.accepted)
        return np.int64(0)

    def _tensors(self) -> list[int]:
        """The tensor of each row of what `_told` returns."""
        if self._is_everywhere:
            return [piece.tensor for bucket in self._buckets for piece in bucket.pieces]
        return [
            bucket.pieces[place].tensor
            for rank in range(primitives.size())
            for bucket in self._buckets
            for place in bucket.of(rank)
        ]

    def _say(self, step: int, found: Sequence[Refused], missing: int) -> None:
        error = None
        try:
            check(self._rule, primitives.size(), missing)
        except ToleranceError as too_few:
            error = too_few
        self._tell(step, found, error)


def make_robust_reducer(
    shapes: Sequence[Sequence[int]], compressor: Compressor, rule: Aggregator, **how: Any
) -> Reducer:
    """How one list of gradients is aggregated; called eagerly, once per list, on every rank alike.

    Stages of a warm-up that send exact values apply the rule, too.

    Args:
        shapes: of the gradients, which come and go as float32 vectors.
        compressor: how to encode.
        rule: what is made of the ranks' gradients.
        **how: the other arguments of `RobustSum`, but `shares`.

    Returns:
        A function of vectors and the number of the step.

    Raises:
        ToleranceError, ValueError: as for `RobustSum`.
    """
    sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
    label = how.pop("label")
    if not compressor.is_warmup or primitives.size() == 1:
        return RobustSum(sizes, compressor.stages[-1][1], rule, label=label, **how)
    found: list[tuple[int, Reducer]] = []
    last: RobustSum | None = None
    for place, (first, stage) in reversed(list(enumerate(compressor.stages))):
        name = f"{label}.stage{place}"
        if stage.codec.name == "fp32" and not stage.has_momentum:
            # What later stages keep stays as it is meanwhile.
            found.append((first, RobustSum(sizes, stage.codec, rule, label=name, **how)))
        else:
            last = RobustSum(sizes, stage, rule, label=name, shares=last, **how)
            found.append((first, last))
    return StagedSum(found[::-1])


def _run(
    function: Callable[..., Any],
    inputs: Sequence[tf.Tensor],
    types: Sequence[tf.DType],
    *,
    is_pure: bool = True,
) -> list[tf.Tensor]:
    """What a function of NumPy arrays returns, in a graph; `is_pure`: it may run at any time."""
    with tf.device("/cpu:0"):
        found = tf.numpy_function(function, inputs, list(types), stateful=not is_pure)
    return list(found) if isinstance(found, list | tuple) else [found]
