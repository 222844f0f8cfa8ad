# SPDX-License-Identifier: Apache-2.0
"""A sum that obeys a plan: some gradients compressed, one way or another, the rest exact.

Gradients of one compressor and one topology are a group, which shares buckets; groups travel
independently of each other.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.allreduce import plain
from tf_hips.comm.plan import Plan
from tf_hips.comm.staged import Reducer

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

    def _in_parts(self, vector: tf.Tensor, place: int) -> tf.Tensor:
        """The exact sum of one vector in buckets of its own."""
        size = int(vector.shape[0])
        count = min(self._partitions[place], max(1, size))
        cuts = [size * cut // count for cut in range(count + 1)]
        parts = [
            primitives.allreduce(
                vector[begin:end], f"{self._label}.exact.tensor_{place}.part_{number}"
            )
            for number, (begin, end) in enumerate(itertools.pairwise(cuts))
        ]
        return tf.concat(parts, 0)
