# SPDX-License-Identifier: Apache-2.0
"""What keeps the ranks of a job waiting, judged from what each says about itself.

Pure: states in, a warning or a verdict out. No clock, no network, no TensorFlow.

    deadlock   two ranks wait, for a while, in collectives that are not the same: for ever, unless
               one of them has only ended the other's a little earlier
    left       a rank waits for one whose step failed, or whose process ended
    stalled    a rank waits for one that is alive, or silent, and has not come: a warning first, a
               verdict when the limit is reached

A rank that computes, traces, evaluates or writes is none of these before the limit.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Seconds.
DEADLOCK_S = 4.0  # that each of two ranks waits elsewhere
STABLE_S = 2.0  # between the first and the last look at them
LEFT_S = 8.0  # for a rank whose step failed, to try again
SILENT_S = 10.0  # without a sign of life
WARNING_S = 30.0  # for a rank that is merely late
STALL_S = 600.0

STALL_VARIABLE = "TF_HIPS_STALL_S"

_SAME_ORDER = (
    "Give all ranks the same number of steps (`tf_hips.shard`, `steps_per_epoch`), and call `fit`, "
    "`evaluate` and `strategy.reduce` on all of them alike, or inside `tf_hips.local()`."
)
_END_ALIKE = (
    "Let the error end the process, or catch it on all ranks alike and make the same steps after "
    "it."
)
_CALL_ALIKE = (
    "All workers must call the same methods of Keras (`fit`, `evaluate`, `train_on_batch`), with "
    "the same number of steps; what one does alone belongs inside `with tf_hips.local():`."
)
AS_ROWS = " as rows"
"""How the text of a sum ends that says which gradients this rank hands over as rows, if any."""
_ROWS_ALIKE = (
    "Hand over the gradient of a variable alike on all ranks, as rows (`tf.IndexedSlices`) or "
    "dense (`tf.convert_to_tensor`); a rank that looked nothing up has rows, none of them."
)


@dataclasses.dataclass(frozen=True)
class Wait:
    """A collective that a rank waits in.

    Attributes:
        text: what is waited for, for a reader.
        key: what the other ranks must wait in too.
        seconds: for how long.
    """

    text: str
    key: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class State:
    """What a rank says about itself.

    Attributes:
        beat: a number that is larger every time.
        begun: collectives begun, those of a turn of a graph as one.
        wait: what it waits in, None when in none.
        doing: what it is at, or what had the failure, where that is known.
        place: file and line, where that is known.
        has_deadline: whether it waits for something that ends, or fails, by itself.
        failure: the error that ended its last step, None when there was none or when it has begun a
            collective since.
        failed_s: seconds since then.
        is_freed: whether that error was only the end of the others' collectives.
        has_ended: whether its process is at its end.
    """

    beat: int = 0
    begun: int = 0
    wait: Wait | None = None
    doing: str = ""
    place: str = ""
    has_deadline: bool = False
    failure: str | None = None
    failed_s: float = 0.0
    is_freed: bool = False
    has_ended: bool = False

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> "State":
        """The state that `to_json` gave.

        Raises:
            ValueError: `value` is no such thing.
        """
        try:
            wait = value["wait"]
            return cls(**{**value, "wait": None if wait is None else Wait(**wait)})
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"A state must have the fields of `State`. Received: {value}"
            ) from error


@dataclasses.dataclass(frozen=True)
class View:
    """A rank as another one sees it.

    Attributes:
        state: the last that it said, None when nothing yet.
        silent_s: seconds since it last said something new.
        stable_s: seconds for which it has been seen where it is.
    """

    state: State | None
    silent_s: float
    stable_s: float


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why a job cannot go on.

    Attributes:
        kind: "protocol" where ranks disagree, "peer" where one is gone.
        text: names ranks, what is waited for, and the remedy.
    """

    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Notice:
    """What a user should know about a wait that may yet end."""

    text: str


def judge(
    rank: int, views: Mapping[int, View], stall_s: float = STALL_S
) -> Verdict | Notice | None:
    """What there is to say about the wait of `rank`.

    Args:
        rank: the rank that waits; its own view is new and stable by definition.
        views: all ranks of the job, itself included.
        stall_s: seconds after which a rank that has not come is given up.

    Returns:
        A verdict if it cannot end, a warning if it is long, otherwise None.
    """
    own = views[rank].state
    if own is None or own.wait is None or own.wait.seconds < DEADLOCK_S:
        return None
    others = {other: view for other, view in sorted(views.items()) if other != rank and view.state}
    elsewhere = [other for other, view in others.items() if _waits_elsewhere(view, own, stall_s)]
    if elsewhere:
        return _deadlock(rank, own, views, elsewhere)
    left = [other for other, view in others.items() if has_left(view)]
    if left:
        return Verdict(
            "peer", f"{_departure(left, views)} {_waiting(rank, own)} {_remedy(left, views)}"
        )
    late = [
        other
        for other, view in sorted(views.items())
        if other != rank and (view.silent_s >= SILENT_S or view.state is None or _is_busy(view))
    ]
    return _late(rank, own, views, late, stall_s) if late else None


def has_left(view: View) -> bool:
    """Whether a rank's own error, or its end, keeps it from the others' collectives."""
    state = view.state
    if state is None:
        return False
    has_failed = state.failure is not None and state.wait is None and not state.is_freed
    return state.has_ended or (has_failed and state.failed_s + view.silent_s >= LEFT_S)


def departed(views: Mapping[int, View]) -> tuple[str, str] | None:
    """Who ended a job whose collectives have failed.

    Args:
        views: the other ranks.

    Returns:
        Who, in a sentence, and the remedy; None where nobody says that it was him.
    """
    # A rank that was itself freed by an error of Horovod is no cause, unless nobody else is one.
    ended = {
        rank: view.state
        for rank, view in sorted(views.items())
        if view.state is not None and (view.state.has_ended or view.state.failure is not None)
    }
    causes = [rank for rank, state in ended.items() if not state.is_freed]
    failed = [rank for rank in causes if ended[rank].failure is not None]
    found = failed or causes
    return (_departure(found, views), _remedy(found, views)) if found else None


def _waits_elsewhere(view: View, own: State, stall_s: float) -> bool:
    wait = view.state.wait if view.state is not None else None
    if wait is None or own.wait is None or wait.key == own.wait.key:
        return False
    # A rank that has ended a collective knows that all have come to it, and it begins just one more
    # before the others have ended it, too. Of a slow broadcast the root may be through long before
    # the last; whoever is one behind will come. The limit is for ranks that have counted otherwise.
    is_next = view.state is not None and abs(view.state.begun - own.begun) == 1
    least = max(DEADLOCK_S, stall_s) if is_next else DEADLOCK_S
    return (
        min(wait.seconds, own.wait.seconds) >= least
        and view.stable_s >= STABLE_S
        and view.silent_s < SILENT_S
    )


def _is_busy(view: View) -> bool:
    return view.state is not None and view.state.wait is None


def _deadlock(rank: int, own: State, views: Mapping[int, View], others: list[int]) -> Verdict:
    parts = [f"rank {rank} waits in {_wait_text(own)}"]
    seen = {own.wait.key if own.wait else ""}
    texts = [own.wait.text if own.wait else ""]
    for other in others:
        state = views[other].state
        if state is not None and state.wait is not None and state.wait.key not in seen:
            seen.add(state.wait.key)
            texts.append(state.wait.text)
            parts.append(f"rank {other} in {_wait_text(state)}")
    return Verdict(
        "protocol",
        "All ranks must come to the same collectives in the same order. Received: "
        f"{', '.join(parts)}, and none can go on. {_order_remedy(texts)}",
    )


def _order_remedy(texts: list[str]) -> str:
    """What helps ranks that wait in different collectives, of one sum or of several."""
    sums = {text.partition(", ")[0] for text in texts}
    are_rows = any(text.endswith(AS_ROWS) for text in texts)
    return _ROWS_ALIKE if are_rows and len(sums) == 1 and len({*texts}) > 1 else _SAME_ORDER


def _departure(left: list[int], views: Mapping[int, View]) -> str:
    parts = []
    for rank in left:
        state = views[rank].state or State()
        at = f" in {state.doing}" if state.doing else ""
        if state.failure is not None:
            verb = "ended" if state.has_ended else "left its step"
            parts.append(f"rank {rank} {verb}{at} with {state.failure}")
        else:
            parts.append(f"rank {rank} ended{at}, without an error")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _remedy(left: list[int], views: Mapping[int, View]) -> str:
    has_failed = any((views[rank].state or State()).failure is not None for rank in left)
    return _END_ALIKE if has_failed else _CALL_ALIKE


def _late(
    rank: int, own: State, views: Mapping[int, View], late: list[int], stall_s: float
) -> Verdict | Notice | None:
    seconds = own.wait.seconds if own.wait is not None else 0.0
    parts = []
    for other in late:
        view = views[other]
        if view.state is None or view.silent_s >= SILENT_S:
            parts.append(f"rank {other} gives no sign of life (stopped, or its machine is gone?)")
        else:
            parts.append(f"rank {other} is busy: {_busy_text(view.state)}")
    whom = "; ".join(parts)
    # What has a deadline of its own knows better why it is late.
    is_bounded = any(_has_deadline(views[other]) for other in late)
    if seconds >= stall_s and not is_bounded:
        return Verdict(
            "peer",
            f"All ranks must come to a collective within {STALL_VARIABLE}={stall_s:g} s of the "
            f"first. Received: {whom}. {_waiting(rank, own)} Raise {STALL_VARIABLE} where ranks "
            "may be that far apart.",
        )
    if seconds >= min(WARNING_S, stall_s / 2):
        return Notice(f"{_waiting(rank, own)} It waits for others: {whom}.")
    return None


def _has_deadline(view: View) -> bool:
    return view.state is not None and view.state.has_deadline and view.silent_s < SILENT_S


def _waiting(rank: int, own: State) -> str:
    seconds = own.wait.seconds if own.wait is not None else 0.0
    return f"Rank {rank} has waited {seconds:.0f} s in {_wait_text(own)}."


def _wait_text(state: State) -> str:
    text = state.wait.text if state.wait is not None else ""
    return f"{text} ({state.place})" if state.place else text


def _busy_text(state: State) -> str:
    at = f"({state.place})" if state.place else ""
    return " ".join(part for part in (state.doing, at) if part) or "nothing is known of what with"
