# SPDX-License-Identifier: Apache-2.0
"""Replicas on machines that round unlike: told from mistakes, and made equal again.

All workers apply the same sum, each by the arithmetic of its own machine. TensorFlow adds a norm up
in an order that depends on the number of threads, and approximates some functions by what the
processor has; so a step that clips by a norm differs in its last bits between a machine of 2 cores
and one of 16. Where digests differ, the values of the first worker travel, and each compares its
own with them:

    rounding may have made it    all take the first worker's, and are equal again
    more than that               an error on all: something was done on one that all had to do

Nothing feeds on such a difference until then: all steps are made of the same sums.

Where some parties may lie each keeps its own, if they are near those of most (`near_most`).
"""

import bisect
import functools
import hashlib
import itertools
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import tensorflow as tf

from tf_hips import log
from tf_hips.comm import primitives
from tf_hips.errors import ProtocolError
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.terms.weights import Refill, cut_weights
from tf_hips.strategies import agreeing, near_most
from tf_hips.strategies.logs import digests
from tf_hips.strategies.nearness import Gap, distance_of, measure, scales_of
from tf_hips.strategies.references import unique
from tf_hips.strategies.replicas import SPREAD_BYTES, on_rank_0, spread, value_of
from tf_hips.strategies.replicated import difference, name_of

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy

_FARTHEST = 1e9  # JSON has no infinity

# Who has said at length what it does.
_told: "weakref.WeakSet[PartyStrategy]" = weakref.WeakSet()

# Digests of a worker's variables (`logs.digests`); None: it is absent.
Told = Sequence[int | None] | None


def settle(
    strategy: "PartyStrategy",
    variables: Sequence[Any],
    told_by_all: Sequence[Told],
    mine: Told,
    what: str,
    *,
    in_party: bool = False,
) -> str:
    """Makes equal what differs by rounding alone; says what differs by more.

    Eager; called by all workers that `strategy` gathers from, with what they have gathered.

    Args:
        strategy: of the worker.
        variables: in an order that all have.
        told_by_all: their digests, by worker; None for one of which all tell None, as it gets the
            first worker's value later.
        mine: this worker's.
        what: they are, for messages, the same on all: "the model after epoch 1".
        in_party: whether only the ranks of this party call it.

    Returns:
        Which variable of whom is not that of whom; "" where nothing differs any more.
    """
    parties = None if in_party else agreeing.doubted(strategy)
    told_by_all = agreeing.sound(
        parties, told_by_all, lambda one: are_digests(one, may_lack=True), what
    )
    count, known = len(variables), _known(parties, told_by_all, len(variables))
    variables = [variables[place] for place in known]
    [*told_by_all, mine] = [
        row if row is None or len(row) != count else [row[place] for place in known]
        for row in (*told_by_all, mine)
    ]
    if parties is not None and len({*_whole(told_by_all, len(variables))} - {None}) > 1:
        return _compare_with_most(strategy, parties, variables, told_by_all, what)
    different = difference(
        variables, agreeing.compared(parties, told_by_all, mine, lambda one: one, what)
    )
    if parties is not None or not different:
        return different
    rows = {worker: row for worker, row in enumerate(told_by_all) if row is not None}
    places = _places(list(rows.values()), len(variables))
    if places is None:
        return different
    if not places:  # only this worker, which is absent, and nobody else hears of it now
        log.debug("Absent when all compared %s: %s.", what, different)
        return ""
    listed = [_of_tensorflow(one) for one in variables]
    if not all(listed[place].dtype.is_floating for place in places):
        return different
    names = [name_of(variables[place]) for place in places]
    chosen = [listed[place] for place in places]
    welcome = None if in_party else strategy._together()
    return _Settling(strategy, welcome, chosen, names, listed, min(rows), what).run()


def are_digests(told: Any, *, may_lack: bool = False) -> bool:
    """Whether a worker may say so of its variables; `may_lack`: None of some of them."""
    return isinstance(told, list) and all(
        isinstance(one, int) or (may_lack and one is None) for one in told
    )


def _known(
    parties: agreeing.Doubted | None, told_by_all: Sequence[Told], count: int
) -> Sequence[int]:
    """Places of the variables that are compared: not all tell None of them, or most parties."""
    lacks = [
        None
        if row is None
        else frozenset(place for place, one in enumerate(row) if one is None)
        if len(row) == count
        else frozenset[int]()
        for row in told_by_all
    ]
    if parties is None:
        present = [one for one in lacks if one is not None]
        lacking = frozenset[int].intersection(*present) if present else frozenset[int]()
    else:
        votes = [
            None if None in one else frozenset.intersection(*one) for one in parties.by_party(lacks)
        ]
        lacking = parties.most(votes) or frozenset[int]()
    return [place for place in range(count) if place not in lacking]


def _whole(told_by_all: Sequence[Told], count: int) -> list[tuple[int | None, ...] | None]:
    """Digests of each worker, if they are of all of so many variables."""
    rows = (None if row is None or len(row) != count or None in row else row for row in told_by_all)
    return [None if row is None else tuple(row) for row in rows]


def _compare_with_most(
    strategy: "PartyStrategy",
    parties: agreeing.Doubted,
    variables: Sequence[Any],
    told_by_all: Sequence[Told],
    what: str,
) -> str:
    """Within a party all are believed; other parties' values are nobody's own."""
    welcome = strategy._together()
    own = parties.by_party(told_by_all)[0 if welcome is None else welcome.child]
    here = digests(variables)
    if None not in own and any(row != own[0] for row in own):
        different = settle(strategy, variables, own, here, what, in_party=True)
        if different:
            return different
        here = digests(variables)
    listed = [_of_tensorflow(one) for one in variables]
    return near_most.compare(strategy, parties, variables, listed, here, what)


def _places(rows: Sequence[Sequence[int | None]], count: int) -> list[int] | None:
    """Which variables differ; None: values cannot be compared, as not all have all of them."""
    if any(len(row) != count or None in row for row in rows):
        return None
    return [place for place in range(count) if len({row[place] for row in rows}) > 1]


class _Settling:
    """One time that workers differ."""

    def __init__(
        self,
        strategy: "PartyStrategy",
        welcome: Welcome | None,
        chosen: Sequence[tf.Variable],
        names: Sequence[str],
        listed: Sequence[tf.Variable],
        first: int,
        what: str,
    ) -> None:
        """Compares nothing yet.

        Args:
            strategy: of the worker.
            welcome: what the run is, if workers are those of several parties.
            chosen: the variables that differ.
            names: what they are called.
            listed: these and all others that were compared.
            first: the worker whose values are taken.
            what: they are, for messages.
        """
        self._strategy = strategy
        self._welcome = welcome
        self._chosen = chosen
        self._names = names
        self._first = first
        self._what = what
        kinds = ", ".join(f"{one.dtype.name}{one.shape.as_list()}" for one in chosen)
        digest = hashlib.sha256(kinds.encode()).hexdigest()[:8]
        # What parties compare before they take it for the same.
        self._title = f"{len(chosen)} variables that differ in {what} ({digest})"
        self._scales = scales_of(listed)
        self._gaps: list[Gap] = []

    def run(self) -> str:
        """Returns what `settle` does."""
        began = time.monotonic()
        num_bytes = sum(one.shape.num_elements() * one.dtype.size for one in self._chosen)
        kinds = [(one.dtype.as_numpy_dtype, one.shape) for one in self._chosen]
        if not self._receive(Refill(kinds, self._take), num_bytes):
            log.warning(
                "Workers differ in %s, and go on so: the server's quorum has gone on without "
                "worker %d, whose values all were to take.",
                self._what,
                self._first,
            )
            return ""
        far = [place for place, one in enumerate(self._gaps) if not one.is_rounding]
        share = self._gaps[far[0]].share if far else max(one.share for one in self._gaps)
        mine = [far[0] if far else None, min(share, _FARTHEST)]
        is_one_party = self._welcome is None
        gather = primitives.gather_objects if is_one_party else self._strategy.gather_objects
        told_by_all = gather(mine, f"how far {self._what} is apart")
        told = [(worker, one) for worker, one in enumerate(told_by_all) if one is not None]
        apart = [(one[0], worker, one[1]) for worker, one in told if one[0] is not None]
        if apart:
            place, worker, share = min(apart)
            return (
                f"`{self._names[place]}` of worker {worker} is not that of "
                f"worker {self._first}, by {share:.2g} of its norm"
            )
        self._tell(num_bytes, max(one[1] for _, one in told), time.monotonic() - began)
        return ""

    def _take(self, value: npt.NDArray[Any]) -> None:
        """The next variable's value at the first worker."""
        variable = self._chosen[len(self._gaps)]
        scale = self._scales[bool(variable.trainable)]
        found = measure(value_of(variable), value, scale, distance_of(variable.dtype))
        self._gaps.append(found)
        if found.is_rounding:
            variable.assign(value, read_value=False)

    def _receive(self, refill: Refill, num_bytes: int) -> bool:
        """Takes the first worker's bytes, on all; False where its party is absent."""
        strategy, welcome = self._strategy, self._welcome
        leader, leads, size = 0, primitives.rank() == 0, SPREAD_BYTES
        if welcome is not None:
            leader = bisect.bisect_right(list(itertools.accumulate(welcome.workers)), self._first)
            leads = leads and leader == welcome.child
            size = min(size, on_rank_0(strategy.most_gather_bytes) or size)
        own = cut_weights(map(value_of, self._chosen), 0, size) if leads else iter(())
        while refill.held < num_bytes:
            sent = next(own, b"")
            piece: bytes | None = sent
            if welcome is not None:
                ask = functools.partial(strategy.from_party, leader, self._title, sent)
                piece = on_rank_0(ask)
            # As the first worker's party has cut them: servers of a tree may let others send less.
            length = primitives.broadcast_object(
                None if piece is None else len(piece), what="the length of what was there"
            )
            if length is None:
                return False
            if not 0 < length <= num_bytes - refill.held:
                raise ProtocolError(
                    f"Of {self._title} a piece must have 1 to {num_bytes - refill.held} bytes. "
                    f"Received: {length}"
                )
            refill.take(spread(piece or bytes(length)))
        return True

    def _tell(self, num_bytes: int, share: float, seconds: float) -> None:
        """Says in the log and in an event what was done."""
        strategy = self._strategy
        if primitives.rank() != 0:
            return
        strategy.write_event(
            "made_equal",
            what=self._what,
            variables=len(self._chosen),
            bytes=num_bytes,
            share=share,
            first=self._first,
            seconds=seconds,
        )
        if strategy in _told:
            log.info("Made equal: %s, which were %.2g of a norm apart.", self._what, share)
            return
        _told.add(strategy)
        log.warning(
            "Workers differ by rounding in %s, by up to %.2g of a variable's norm, as machines do "
            "that are unlike (docs/assumptions.md#unlike-machines). All have taken the values of "
            "worker %d, %.3g MB in %.1f s, and will each time that they differ so.",
            self._what,
            share,
            self._first,
            num_bytes / 1e6,
            seconds,
        )


def _of_tensorflow(variable: Any) -> tf.Variable:
    [found] = unique([variable])
    return found
