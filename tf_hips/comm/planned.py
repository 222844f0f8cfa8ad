# SPDX-License-Identifier: Apache-2.0
"""A sum that obeys a plan: some gradients compressed, one way or another, the rest exact.

Gradients of one compressor and one topology are a group, which shares buckets; groups travel
independently of each other. But a norm that gradients are clipped to is that of all of them,
whatever their way, as without a plan: clipping each group separately would change the direction of
the whole gradient and exceed the norm that was asked for.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.allreduce import plain
from tf_hips.comm.plan import Plan
from tf_hips.comm.staged import Reducer
from tf_hips.errors import ConfigError
from tf_hips.ops import graph
from tf_hips.ops.compressor import Compressor, parse

# Shapes (those that are not in the group empty), compressor's text, topology, partitions by
# position, and a label, in; a reducer out.
MakeGroup = Callable[[list[Sequence[int]], str, str, dict[int, int], str], Reducer]


@dataclasses.dataclass(frozen=True)
class _Group:
    places: tuple[int, ...]
    reducer: Reducer


class PlannedSum:
    """The sum of one list of float32 vectors, each in the way that a plan says."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], plan: Plan, label: str, make_group: MakeGroup
    ) -> None:
        """Makes the groups, in the order of their first gradients.

        Args:
            shapes: of the gradients; an empty one has no way, whatever the plan says.
            plan: has as many choices.
            label: part of the collectives' names.
            make_group: makes the reducer of one group.

        Raises:
            ConfigError: gradients are to be clipped to several norms.
        """
        self._label = label
        self._partitions = {
            place: choice.partitions
            for place, choice in enumerate(plan.choices)
            if choice.partitions > 1
        }
        groups: dict[tuple[str, str], list[int]] = {}
        self._exact: list[int] = []
        for place, choice in enumerate(plan.choices):
            if choice.compression is None:
                self._exact.append(place)
            else:
                groups.setdefault((choice.compression, choice.topology), []).append(place)
        # Of one group, its reducer clips.
        ways = len(groups) + bool(self._exact)
        self._clipped = _clipped([text for text, _ in groups]) if ways > 1 else None
        self._groups = []
        for number, ((compression, topology), places) in enumerate(groups.items()):
            chosen = set(places)
            of_group: list[Sequence[int]] = [
                shape if place in chosen else (0,) for place, shape in enumerate(shapes)
            ]
            partitions = {
                place: count for place, count in self._partitions.items() if place in chosen
            }
            name = f"{label}.group_{number}" if len(groups) > 1 else label
            reducer = make_group(of_group, compression, topology, partitions, name)
            self._groups.append(_Group(tuple(places), reducer))

    def __call__(self, vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Sums `vectors` over the ranks.

        Args:
            vectors: float32 [elements] each.
            step: int64 scalar, the same on all ranks.

        Returns:
            Vectors like `vectors`, equal on all ranks.
        """
        vectors = self._together(vectors)
        sums: list[tf.Tensor] = [tf.zeros([0])] * len(vectors)
        for group in self._groups:
            chosen = set(group.places)
            own = [
                vector if place in chosen else tf.zeros([0]) for place, vector in enumerate(vectors)
            ]
            totals = group.reducer(own, step)
            for place in group.places:
                sums[place] = totals[place]
        cut = [place for place in self._exact if place in self._partitions]
        for place in cut:
            sums[place] = self._in_parts(vectors[place], place)
        whole = [place for place in self._exact if place not in self._partitions]
        totals = plain([vectors[place] for place in whole], f"{self._label}.exact")
        for place, total in zip(whole, totals, strict=True):
            sums[place] = total
        return sums

    def _together(self, vectors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """The vectors, clipped by the norm of all of them where the plan's compressors clip."""
        if self._clipped is None or primitives.size() == 1:
            return vectors
        return graph.clip(self._clipped, vectors, primitives.size())

    def _in_parts(self, vector: tf.Tensor, place: int) -> tf.Tensor:
        """The exact sum of one vector in buckets of its own."""
        size = int(vector.shape[0])
        if not size:
            return vector
        count = min(self._partitions[place], size)
        cuts = [size * cut // count for cut in range(count + 1)]
        parts = [
            primitives.allreduce(
                vector[begin:end], f"{self._label}.exact.tensor_{place}.part_{number}"
            )
            for number, (begin, end) in enumerate(itertools.pairwise(cuts))
        ]
        return tf.concat(parts, 0)


def _clipped(texts: Sequence[str]) -> Compressor | None:
    """The first compressor that clips, in all of its stages; None: none does.

    Raises:
        ConfigError: several clip to different norms.
    """
    found = {one.clip_norm: one for one in map(parse, reversed(texts)) if one.clip_norm}
    if len(found) > 1:
        said = ", ".join(f"{norm:g}" for norm in sorted(found))
        raise ConfigError(
            "All of a gradient is clipped to one norm, so all compressors of a plan that clip must "
            f"name the same `clip_norm`. Received: {said}"
        )
    return next(iter(found.values()), None)
