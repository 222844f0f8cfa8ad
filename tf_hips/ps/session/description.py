# SPDX-License-Identifier: Apache-2.0
"""What a run is doing, for those who ask how it goes."""

from collections.abc import Callable
from typing import Any

from tf_hips.ps.rules.robust import borne
from tf_hips.ps.session.closing import Closing
from tf_hips.ps.session.presence import Presence
from tf_hips.ps.session.state import State


def describe(
    state: State,
    presence: Presence,
    why_ended: Callable[[], str | None],
    closing: Closing | None = None,
) -> dict[str, Any]:
    """What the run is doing.

    Args:
        state: of the run; its lock must be free.
        presence: who is there.
        why_ended: why the run has ended, or None.
        closing: closes rounds without some children; None: they wait for all.

    Returns:
        `state` (`waiting` for children, `training`, `over`), `ended` (why, or None), `round` (the
        newest), `tensors`, `parameters`, `compression`, `downlink`, `rule`, `robust` (by which a
        party server merges, or None), `bears` (how many bad rows that of this server bears, as
        text, or None), `residual_rms`, and of each of the `children` its `site`,
        `state` (`absent`, `joining`, `there`, `away`, `lost`, `left`), `workers`, `round`, `chunks`
        (of that round, of `chunks` in all), `lag`, the rounds that it is behind, `late`, updates
        that came after their round was closed, `absent`, rounds that were closed without it, and
        `refused_rows`, its updates that a robust rule has refused, `chosen`, rounds whose result a
        rule that chooses rows has made of its row, of the `chosen_of` in which it had one,
        `outvoted`, `proven`
        and `passed_over`, rounds in which its group has said something else, in which it has sent
        something else than it said, or in which it was asked for its packets and did not send them
        in time; all since the server began. `quorum` is None, or how many children make a round,
        and `deadline_s` when that is enough, if it is known.
    """
    with state.changed:
        store, known = state.store, state.members.children
        newest = store.round if store is not None else 0
        partial = closing.describe() if closing is not None else None
        refused, chosen = state.rejections.counts, state.choices.counts
        children = []
        for place, site in enumerate(state.members.terms.parties):
            child = known.get(place)
            reached, chunks = store.progress(place) if store is not None else (0, 0)
            if partial is not None and partial["reached"].get(place, newest) < newest:
                reached = partial["reached"][place]
                chunks = 0
            children.append(
                {
                    "site": site,
                    "state": _state_of(state, presence, place),
                    "workers": child.workers if child is not None else 0,
                    "round": max(reached, 0),
                    "chunks": chunks,
                    "lag": max(0, newest - reached) if store is not None else 0,
                    "late": partial["late"][place] if partial is not None else 0,
                    "absent": partial["absent"][place] if partial is not None else 0,
                    "refused_rows": refused[place],
                    **chosen[place],
                    **state.electing.counts(place),
                }
            )
        first = known[min(known)] if known else None
        ended = why_ended()
        over = ended is not None or state.members.have_left
        told = {
            "state": "over" if over else "training" if store is not None else "waiting",
            "ended": ended,
            "round": newest,
            "tensors": len(store.model.shapes) if store is not None else 0,
            "parameters": store.model.dense_bytes // 4 if store is not None else 0,
            "chunks": len(store.chunks) if store is not None else 0,
            "compression": store.uplink_text if store else first and first.compression,
            "downlink": store.downlink_text if store else first and first.downlink,
            "rule": first.rule if first is not None else None,
            "robust": state.members.terms.robust,
            "bears": _bears(state),
            "quorum": partial["least"] if partial is not None else None,
            "deadline_s": partial["deadline_s"] if partial is not None else None,
            "children": children,
        }
    # Outside of the lock: it reads much.
    return {**told, "residual_rms": store.residual_rms() if store is not None else 0.0}


def _bears(state: State) -> str | None:
    """How many bad rows the rule that merges here bears."""
    members, terms = state.members, state.members.terms
    first = members.children[min(members.children)].rule if members.children else None
    merges = terms.robust if terms.site is not None else first
    return borne(merges, len(terms.parties), terms.quorum) if merges else None


def _state_of(state: State, presence: Presence, place: int) -> str:
    child = state.members.children.get(place)
    if child is None:
        return "absent"
    if child.has_left:
        return "left"
    if not state.members.is_started:
        return "joining"
    if child.is_lost:
        return "lost"
    return "there" if presence.is_there(place) else "away"
