# SPDX-License-Identifier: Apache-2.0
"""Weights of parties of which some may lie: each keeps its own, near those of most parties.

Nobody takes another's value here, not even one that is near: a liar would move everybody's weights
a little in each epoch. Where digests differ, parties tell a sketch of each variable (`nearness`)
and compare it with what lies in the middle: of each number the median of a server's children, so
on up the tree. With more honest children than liars that is next to an honest one.

    near most parties         rounding may have made the difference, and it stays
    this worker is not        an error here, and only here
    another party is not      it is named, and the run goes on
    no majority is near       an error on all
"""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_hips.ps.terms.tree import merged
from tf_hips.robust.rows import lesser_median
from tf_hips.strategies import agreeing
from tf_hips.strategies.agreeing import Doubted
from tf_hips.strategies.nearness import (
    are_sketches_near,
    distance_of,
    scales_of,
    sketch,
)
from tf_hips.strategies.replicas import value_of
from tf_hips.strategies.replicated import name_of

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy


def compare(
    strategy: "PartyStrategy",
    parties: Doubted,
    variables: Sequence[Any],
    listed: Sequence[tf.Variable],
    mine: Sequence[int],
    what: str,
) -> str:
    """Says whether this worker's variables are near those of most parties.

    Called by all workers, those of each party having the same.

    Args:
        strategy: of the worker.
        parties: of which some may lie.
        variables: in an order that all have.
        listed: TensorFlow's variables behind them.
        mine: digests of them.
        what: they are, for messages, the same on all.

    Returns:
        Which variable is not near, of this worker or, without a majority, of whom; "" for none.
    """
    scales = scales_of(listed)
    exact = [place for place, one in enumerate(listed) if not one.dtype.is_floating]
    rounded = [place for place, one in enumerate(listed) if one.dtype.is_floating]
    # Digests of what is not rounded, and a sketch of each other variable.
    own = [[mine[place] for place in exact], [sketch(value_of(listed[one])) for one in rounded]]
    told_by_all = strategy.gather_objects(own, f"sketches of {what}")
    told_by_all = agreeing.sound(parties, told_by_all, lambda one: _is_like(one, own), what)
    votes = [
        None if None in values or any(one != values[0] for one in values) else values[0]
        for values in parties.by_party(told_by_all)
    ]
    middle = merged(parties.paths, votes, _middle)

    def apart(one: Any) -> int | None:
        """The first place in which a vote is not near the middle; None: there is none."""
        if middle is None or one[0] != middle[0]:
            return exact[0] if exact else 0
        for place, near, theirs in zip(rounded, one[1], middle[1], strict=True):
            variable = listed[place]
            size, scale = int(variable.shape.num_elements()), scales[bool(variable.trainable)]
            if not are_sketches_near(near, theirs, size, scale, distance_of(variable.dtype)):
                return place
        return None

    told = [
        (site, None if one is None else apart(one))
        for site, one in zip(parties.sites, votes, strict=True)
    ]
    is_near = [
        None if vote is None else place is None
        for vote, (_, place) in zip(votes, told, strict=True)
    ]
    here = apart(own)
    if parties.most(is_near) is True:
        parties.name([one is False for one in is_near], what, "it is not that of most parties")
        if here is None:
            return ""
        return f"`{name_of(variables[here])}` of this worker is not that of most parties"
    far = [(site, place) for site, place in told if place is not None]
    near = [site for (site, _), one in zip(told, is_near, strict=True) if one]
    site, place = far[0] if far else ("this worker", here or 0)
    other = next((one for one in [*near, *parties.sites] if one != site), "others")
    return f"`{name_of(variables[place])}` of party {site} is not that of party {other}"


def _middle(children: list[Any]) -> Any:
    """What lies in the middle of the votes of a server's children."""
    exact = agreeing.majority([json.dumps(one[0]) for one in children])
    sketches = [
        [lesser_median(numbers) for numbers in zip(*of_variable, strict=True)]
        for of_variable in zip(*(one[1] for one in children), strict=True)
    ]
    return [json.loads(exact) if exact else None, sketches]


def _is_like(told: Any, own: Any) -> bool:
    """Whether a worker may say so, which has the variables of this one."""
    if not (
        isinstance(told, list) and len(told) == 2 and all(isinstance(one, list) for one in told)
    ):
        return False
    exact, sketches = told
    return (
        len(exact) == len(own[0])
        and all(isinstance(one, int) for one in exact)
        and len(sketches) == len(own[1])
        and all(_are_numbers(one, mine) for one, mine in zip(sketches, own[1], strict=True))
    )


def _are_numbers(told: Any, own: Sequence[float]) -> bool:
    return (
        isinstance(told, list)
        and len(told) == len(own)
        # No integers, which workers do not tell, and which may be too large for a float.
        and all(isinstance(one, float) and math.isfinite(one) for one in told)
    )
