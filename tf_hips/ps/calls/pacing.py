# SPDX-License-Identifier: Apache-2.0
"""ESync's state service: part of a server, one call of each child in a round.

    child                                         server
    local steps end --Pace(round, report)-->      the arrival, on the server's own clock
                    <--steps, seconds--           when all children have arrived: the next round's
    local steps     <--stop--                     when all others have arrived, or it is late
    local steps end --Pace(round + 1, ...)-->     the call before this one ends

The assignment travels while the model does, beside it; no step asks for anything. What is decided
is `esync.pacer`'s. All of it is advice: a child that hears nothing goes on with what children say
to each other, and a server that was started again learns anew. In a tree no server sees all leaves,
so none gives advice.

Invariant: nothing here changes a round's packets or its results.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from tf_hips.errors import ProtocolError, TfHipsError
from tf_hips.esync.pacer import Assignment, Pacer, Report
from tf_hips.esync.rule import Pace
from tf_hips.ps.client.shards import Connection
from tf_hips.ps.rounds.round import MAX_ROUND
from tf_hips.ps.session.members import Caller
from tf_hips.ps.session.session import Session
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.wire import Call

METHOD = "Pace"
_CONNECT_S = 30.0


class _Run:
    """The pace of one session."""

    def __init__(self, token: str, pace: Pace, num_children: int, began: float) -> None:
        self.token = token
        self.pacer = Pacer(pace, num_children, began)
        self.latest: dict[int, int] = {}  # the newest round that each child has arrived in
        self.paces: dict[int, tuple[str, Pace]] = {}  # which process of a child keeps what
        self.far: dict[int, int] = {}  # rounds of children that seemed too far


class PaceServer:
    """Answers `Pace` for the children of a server. Thread-safe, by each session's own lock."""

    def __init__(self, num_children: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Knows nothing yet.

        Args:
            num_children: of the server.
            clock: tells seconds.
        """
        self._num_children = num_children
        self._clock = clock
        self._run: _Run | None = None
        self._began: tuple[str, float] = "", math.inf

    def begins(self, session: Session) -> None:
        """All children have joined: none can have done anything in this session before."""
        if self._began[0] != session.token and session.store is None:
            self._began = session.token, self._clock()

    def serve(
        self,
        request: bytes,
        call: Call,
        caller: Caller,
        session: Session,
        context: grpc.ServicerContext,
    ) -> Iterator[bytes]:
        """Takes an arrival; yields the assignment, and a stop if there is reason for one.

        Raises:
            ProtocolError: the report cannot be, or other children keep another pace.
        """
        number, pace, report = _read(request)
        with session.changed:
            members = session.state.members
            child = members.known(caller)
            is_tree = members.place is not None or not all(
                members.is_leaf(place) for place in members.children
            )
        if is_tree:
            yield _assigned(None)
            return
        with session.changed:
            run = self._of(session)
            self._take_pace(run, session, caller, pace)
            is_far = self._is_far(run, session, caller.child, number)
        if is_far:
            yield _assigned(None)  # else the rounds of all others would be of the past
            return
        with session.changed:
            run.pacer.arrived(caller.child, number, self._clock(), report)
            run.latest[caller.child] = max(number, run.latest.get(caller.child, number))
            session.changed.notify_all()

            def is_over() -> bool:
                return session.ended is not None or caller.is_gone or child.has_left

            def has_all() -> bool:
                # Who has missed a round is not waited for: rounds may close without it.
                awaited = [
                    run.latest.get(place, number - 1)
                    for place, one in members.children.items()
                    if not (one.has_left or one.is_lost)
                    and run.latest.get(place, number) >= number - 1
                ]
                return all(latest >= number for latest in awaited)

            def is_past() -> bool:
                return is_over() or run.latest[caller.child] > number

            session.changed.wait_for(lambda: is_past() or has_all())
            if is_over() or (is_past() and not has_all()):
                return  # a call for a later round has come instead
            if pace != run.pacer.pace:
                raise _other_pace(run.pacer.pace, pace)
            found = run.pacer.assignment(caller.child, number)
        yield _assigned(found)
        with session.changed:
            while not is_over() and run.latest[caller.child] == number:
                now = self._clock()
                if caller.child in run.pacer.to_stop(number + 1, now):
                    break
                deadline = run.pacer.deadline(number + 1)
                left = None if deadline is None or now >= deadline else deadline - now
                session.changed.wait(left)
            else:
                return
        yield wire.to_json(stop=number + 1)

    def _of(self, session: Session) -> _Run:
        run = self._run
        if run is None or run.token != session.token:
            token, began = self._began
            began = began if token == session.token else math.inf
            run = self._run = _Run(session.token, Pace(), self._num_children, began)
        return run

    def _take_pace(self, run: _Run, session: Session, caller: Caller, pace: Pace) -> None:
        """Notes what a child keeps. The first one's holds; where some may lie, that of most.

        Raises:
            ProtocolError: it is not that of the first one, and all are believed.
        """
        members = session.state.members
        children = members.children
        # Who comes back may have another script, and so may all.
        run.paces = {
            child: (process, kept)
            for child, (process, kept) in run.paces.items()
            if children[child].process == process
        }
        if members.doubting_rule is None:
            if not run.paces:
                run.pacer.pace = pace
            if pace != run.pacer.pace:
                raise _other_pace(run.pacer.pace, pace)
        run.paces[caller.child] = caller.process, pace
        if members.doubting_rule is not None:
            told = [kept for _, kept in run.paces.values()]
            run.pacer.pace = max(told, key=told.count)  # of as many the first

    def _is_far(self, run: _Run, session: Session, child: int, number: int) -> bool:
        """Whether a round cannot have come, as far as is known of others and of the rounds here.

        A loop counts meetings, too, in which nothing is exchanged, and after a restart of the
        server one that is behind may be the first to call. So what most children say holds.
        """
        store = session.store
        begun = store.of(child).round if store is not None else 0
        others = (latest for place, latest in run.latest.items() if place != child)
        if number <= max(begun, max(others, default=begun)) + 1:
            run.far.pop(child, None)
            return False
        run.far[child] = number
        living = session.state.members.living
        num_near = sum(one >= number - 1 for place, one in run.far.items() if place in living)
        return 2 * num_near <= len(living)


def _other_pace(kept: Pace, pace: Pace) -> ProtocolError:
    return ProtocolError(f"All children must keep one pace, {kept.text}. Received: {pace.text}")


def _read(request: bytes) -> tuple[int, Pace, Report]:
    fields = wire.from_json(
        request, number=int, pace=str, steps=int, step_s=(float, int), busy_s=(float, int)
    )
    if not 0 <= fields["number"] <= MAX_ROUND:
        raise ProtocolError(
            f"`number` must be from 0 to 2^31. Received: {str(fields['number'])[:40]}"
        )
    try:
        return (
            fields["number"],
            Pace.parse(fields["pace"]),
            Report(fields["steps"], float(fields["step_s"]), float(fields["busy_s"])),
        )
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"`{METHOD}`: {str(error)[:500]}") from error


def _assigned(found: Assignment | None) -> bytes:
    if found is None:
        return wire.to_json(steps=None, local_s=None, mean_steps=None, round_s=None)
    local_s = found.local_s if math.isfinite(found.local_s) else None
    return wire.to_json(
        steps=found.steps, local_s=local_s, mean_steps=found.mean_steps, round_s=found.round_s
    )


class PaceClient:
    """A child's end. `report`, `assignment` and `is_stopped` belong to one thread."""

    def __init__(self, client: Connection, pace: Pace) -> None:
        """Says nothing yet.

        Args:
            client: the child's connection; of several servers the first one paces.
            pace: the rule's parameters, equal at all children.
        """
        self._link = client.link
        self._pace = pace
        self._call: _Hearing | None = None

    def report(self, number: int, report: Report) -> None:
        """Says that the local steps of round `number` have ended; waits for nothing."""
        request = wire.to_json(
            number=number,
            pace=self._pace.text,
            steps=report.steps,
            step_s=report.step_s,
            busy_s=report.busy_s,
        )
        self._call = None
        with contextlib.suppress(grpc.RpcError, TfHipsError, ValueError):
            call = self._link.stub("unary_stream", METHOD, _CONNECT_S)
            self._call = _Hearing(call(request, metadata=self._link.metadata()))

    def assignment(self, patience_s: float) -> Assignment | None:
        """What the server answers to the last report; None: nothing within `patience_s`.

        Raises:
            ProtocolError: other children keep another pace.
        """
        if self._call is None:
            return None
        self._call.is_heard.wait(patience_s)
        if self._call.error is not None:
            raise self._call.error
        return self._call.assignment

    def is_answered(self, patience_s: float) -> bool:
        """Whether the last report has its answer within `patience_s`, or will have none."""
        return self._call is None or self._call.is_heard.wait(patience_s)

    def is_stopped(self) -> bool:
        """Whether the server has told this child to end its local steps."""
        return self._call is not None and self._call.is_stopped

    def close(self) -> None:
        """Hears no more."""
        if self._call is not None:
            self._call.cancel()
            self._call = None


class _Hearing:
    """What comes for one report, heard by a thread of its own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.is_heard = threading.Event()
        self.assignment: Assignment | None = None
        self.error: ProtocolError | None = None
        self.is_stopped = False
        threading.Thread(target=self._hear, name="tf_hips-pace", daemon=True).start()

    def cancel(self) -> None:
        """Ends the call."""
        self._stream.cancel()

    def _hear(self) -> None:
        try:
            for message in self._stream:
                fields = json.loads(message)
                if "stop" in fields:
                    self.is_stopped = True
                elif fields["steps"] is not None:
                    local_s = fields["local_s"]
                    self.assignment = Assignment(
                        int(fields["steps"]),
                        math.inf if local_s is None else float(local_s),
                        float(fields["mean_steps"]),
                        float(fields["round_s"]),
                    )
                self.is_heard.set()
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                self.error = ProtocolError(str(error.details()))
        except (ValueError, KeyError, TypeError):
            pass  # it is advice, and this is none
        finally:
            self.is_heard.set()
