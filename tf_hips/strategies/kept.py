# SPDX-License-Identifier: Apache-2.0
"""What steps keep of gradients, and whether the weights of these were those that all begin with.

Steps may keep what they compute, as gradients that are accumulated by hand, before one reduces and
ranks make their weights equal. It is each worker's own then; and where a worker's weights become
others it is about weights that nobody trains.
"""

from collections.abc import Callable, Collection, Sequence

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.errors import ProtocolError
from tf_hips.strategies.changes import digest_of


def suspected(
    variables: Sequence[tf.Variable], left: Collection[int], exempt: Collection[int]
) -> list[int]:
    """Places of what steps may have computed with weights, among what is `left` to each worker.

    What cannot be gradients is not: integers, and single numbers (sums of losses, say) unless a
    weight is one.

    Args:
        variables: all that ranks meet over.
        left: places of those that steps have changed.
        exempt: ids of those that are trained.
    """
    has_numbers = any(id(one) in exempt and not one.shape.rank for one in variables)
    return [
        place
        for place, one in enumerate(variables)
        if place in left and one.dtype.is_floating and (has_numbers or one.shape.rank)
    ]


def check_kept(
    variables: Sequence[tf.Variable],
    left: Collection[int],
    suspects: Sequence[int],
    is_used: Callable[[tf.Variable], bool],
) -> set[int]:
    """Raises if ranks have computed `suspects`, which differ, with weights that differed.

    Weights that no step of a rank could use yet are no reason: a model that was made behind another
    one's steps has not to do with what these keep.

    Args:
        variables: all that ranks meet over, the same on all of them.
        left: places of those that steps have changed, on any rank.
        suspects: what `suspected` says.
        is_used: whether steps of this rank may have used a weight.

    Returns:
        Places of the weights that steps of any rank could use.

    Raises:
        ProtocolError: on all ranks.
    """
    if not suspects:
        return set()
    digests = {
        place: digest_of(one) for place, one in enumerate(variables) if one.dtype.is_floating
    }
    weights = [place for place in digests if place not in left]
    used = [is_used(variables[place]) for place in weights]
    own = [digests[place] for place in weights], [digests[place] for place in suspects], used
    everyone = primitives.gather_objects(own, "what steps have computed, and with what")
    first = everyone[0][0]
    is_bad = any(
        is_used_there and mine != theirs
        for told, _, flags in everyone
        for mine, theirs, is_used_there in zip(told, first, flags, strict=True)
    )
    values = zip(*(one[1] for one in everyone), strict=True)
    for place, told in zip(suspects, values, strict=True):
        if is_bad and len(set(told)) > 1:
            raise ProtocolError(computed_with_others(variables[place].name))
    flags = zip(*(one[2] for one in everyone), strict=True)
    return {place for place, told in zip(weights, flags, strict=True) if any(told)}


def computed_with_others(name: str) -> str:
    """What is said where a variable of that name keeps what other weights have come to."""
    return (
        "Weights must be equal on all workers before a step computes with them what it keeps. "
        f"Received: {name}, which steps have changed before one that reduces. Call "
        "`strategy.run(lambda: None)` on all workers, outside of a `tf.function`, when the model "
        "is built and before its loop; or build it with one seed everywhere."
    )
