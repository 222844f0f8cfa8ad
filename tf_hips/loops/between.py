# SPDX-License-Identifier: Apache-2.0
"""What was set between two `fit`s of a loop, and not by a step, becomes what all have.

Weights that were loaded, or that EarlyStopping has restored. Digests say who has what.

    all are believed             all take those of the first worker, where one differs
    some may lie                 those of most parties stay: who differs is named, and hears an
                                 error if it is this worker
    no majority, or more differ  all go back to the last meeting: honest ones differ, too
    than may lie

One liar could else undo what all others have set, or have all send weights of the model's size.

What layers learn by `adapt` is no weight, and nothing makes it equal: there a difference is an
error (`check_adapted`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_hips import log
from tf_hips.errors import ProtocolError
from tf_hips.loops.bearing import Bearing
from tf_hips.loops.hearing import is_pair
from tf_hips.loops.meeting import shown
from tf_hips.strategies import agreeing
from tf_hips.strategies.adapted import adapted, check_equal, is_adapted
from tf_hips.strategies.agreeing import Doubted
from tf_hips.strategies.logs import digests
from tf_hips.strategies.party import PartyStrategy

_WHAT, _ENDED = "the weights between two `fit`s", "whether a `fit` has ended"
_LEARNED = "what layers have learned between two `fit`s"
End = tuple[bool, list[Any]]
"""Whether nothing was done since the end of a `fit`, and digests of weights."""


class Between:
    """Agrees on what some variables are."""

    def __init__(
        self,
        strategy: PartyStrategy,
        variables: Sequence[tf.Variable],
        go_back: Callable[[], None],
        bearing: Bearing | None,
        *,
        bears_liars: bool,
    ) -> None:
        """For one moment between two `fit`s.

        Args:
            strategy: inside `whole()` of its loan.
            variables: what may have been set.
            go_back: sets them to what they were after the last meeting.
            bearing: how many of the parties may lie.
            bears_liars: whether some parties, or ranks, may lie.
        """
        self._strategy = strategy
        self._variables = variables
        self._go_back = go_back
        self._bearing = bearing
        self._bears_liars = bears_liars

    def agree(self, names: Iterable[str], *, has_ended: bool) -> bool:
        """Sets the variables to the same values on all, which call it at the same moment.

        Args:
            names: of the workers.
            has_ended: whether nothing was done here since the end of a `fit`.

        Returns:
            False: some are in the middle of a round, in which members differ rightly.

        Raises:
            ProtocolError: somebody that is believed has sent something else; or some may lie, and
                most parties have set other values than this worker.
        """
        mine = has_ended, digests(self._variables)
        parties = agreeing.doubted(self._strategy)
        gathered = self._strategy.gather_objects([*mine], "weights between two fits")
        told_by_all = read_ends(gathered, names, parties)
        if parties is not None:
            return self._agree_with_most(told_by_all, mine, parties)
        present = [one for one in told_by_all if one is not None]
        if not all(ended for ended, _ in present):
            return False
        if any(one != mine[1] for _, one in [*present, present[0]]):
            worker = next(n for n, one in enumerate(told_by_all) if one is not None)
            _warn("the last meeting" if self._bears_liars else f"worker {worker}")
            if self._bears_liars:
                self._go_back()
            else:
                self._take(worker)
        return True

    def _agree_with_most(
        self, told_by_all: Sequence[End | None], mine: End, parties: Doubted
    ) -> bool:
        who, has_ended = agreeing.compared(parties, told_by_all, mine, lambda one: one[0], _ENDED)[
            0
        ]
        if who != agreeing.MOST or not has_ended:
            return False
        who, wanted = agreeing.compared(parties, told_by_all, mine, lambda one: one[1], _WHAT)[0]
        differ = [
            any(one is not None and one[1] != wanted for one in told)
            for told in parties.by_party(told_by_all)
        ]
        if who != agreeing.MOST or (self._bearing is not None and self._bearing.stops(differ)):
            _warn("the last meeting")
            self._go_back()
        elif mine[1] != wanted:
            raise ProtocolError(
                "All workers must set the same weights between two `fit`s. Received: those of this "
                "worker are not those of most parties; load them on all workers, and give an "
                "EarlyStopping that restores the best ones the same decisions."
            )
        return True

    def _take(self, worker: int) -> None:
        """Takes what one worker has; of nobody where that one has gone since."""
        mine = float(self._strategy.global_rank == worker)
        values = [
            one.read_value() if mine else tf.zeros(one.shape, one.dtype) for one in self._variables
        ]
        *totals, count = self._strategy.reduce_exactly(
            [*values, tf.constant([mine], tf.float64)], is_mean=False
        )
        if not float(count[0]):
            self._go_back()
            return
        for variable, total in zip(self._variables, totals, strict=True):
            variable.assign(total, read_value=False)


def check_adapted(strategy: PartyStrategy, model: keras.Model) -> None:
    """Looks whether layers have learned the same; called by all, at the same moment.

    Args:
        strategy: inside `whole()` of its loan.
        model: which may have been given to `adapt` since a `fit`.

    Raises:
        ProtocolError: a worker's have learned something else.
    """
    mine = adapted(model)
    if not mine:
        return
    parties = agreeing.doubted(strategy)
    told_by_all = strategy.gather_objects(mine, _LEARNED)
    told_by_all = agreeing.sound(parties, told_by_all, is_adapted, _LEARNED)
    check_equal(agreeing.compared(parties, told_by_all, mine, lambda one: one, _LEARNED))


def read_ends(
    gathered: Iterable[Any], names: Iterable[str], parties: Doubted | None
) -> list[End | None]:
    """What all workers say between two `fit`s; None of absent ones.

    Args:
        gathered: of each worker what has come; None: it is absent.
        names: of the workers.
        parties: of which some may lie: one that has sent something else is absent. None: all are
            believed.

    Raises:
        ProtocolError: a worker that is believed has sent something else.
    """
    told_by_all = list(gathered)
    if parties is not None:
        told_by_all = agreeing.sound(parties, told_by_all, _is_end, _WHAT)
    for who, told in zip(names, told_by_all, strict=True):
        if told is not None and not _is_end(told):
            raise ProtocolError(
                f"What {who} says between two `fit`s must be whether one has ended, and digests of "
                f"weights. Received: {shown(told, 200)}"
            )
    return [None if told is None else (told[0], told[1]) for told in told_by_all]


def _is_end(told: Any) -> bool:
    return is_pair(told) and isinstance(told[0], bool) and isinstance(told[1], list)


def _warn(whose: str) -> None:
    log.warning(
        "Something other than the loop has set weights on some workers only, such as an "
        "EarlyStopping that restores the best ones. Those of %s are taken.",
        whose,
    )
