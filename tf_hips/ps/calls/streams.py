# SPDX-License-Identifier: Apache-2.0
"""What comes in over the streams of a server's calls."""

import contextlib
import threading
from collections.abc import Iterable

import grpc

from tf_hips.errors import ProtocolError
from tf_hips.ps.rounds.round import Rounds
from tf_hips.ps.session.members import Caller
from tf_hips.ps.session.session import Session
from tf_hips.ps.transport import wire


class Reader(threading.Thread):
    """Takes in the packets of one exchange, while the call's own thread sends results."""

    def __init__(
        self,
        messages: Iterable[bytes],
        store: Rounds,
        session: Session,
        caller: Caller,
        number: int,
        step_bytes: float,
    ) -> None:
        """A thread that has not begun.

        Args:
            messages: what comes.
            store: the caller's rounds.
            session: of the run.
            caller: the call.
            number: the round.
            step_bytes: of what comes, so much buys time; see `Moves.brought`.
        """
        super().__init__(name="tf_hips-reader", daemon=True)
        self._messages = messages
        self._store = store
        self._session = session
        self._caller = caller
        self._number = number
        self._step_bytes = step_bytes
        self._error: Exception | None = None

    def has_failed(self) -> bool:
        """Whether something has gone wrong."""
        return self._error is not None

    def check(self) -> None:
        """Raises what has gone wrong."""
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Takes in all that comes."""
        try:
            assembler = wire.Assembler(self._store.packet_limits(self._number))
            round_of = self._number, len(self._store.refusals(self._number))
            child = self._caller.child
            for message in self._messages:
                packets = assembler.feed(message)
                is_new = self._store.add(self._number, child, packets)
                pieces = [(chunk, len(packet)) for chunk, packet in packets]
                pieces += assembler.begun
                self._session.moves.brought(child, round_of, pieces, self._step_bytes)
                if is_new:
                    self._session.goes_on(child)
            assembler.finish()
            self._check_complete()
        except grpc.RpcError:
            return  # the connection is gone, and the call's own thread knows
        except Exception as error:  # noqa: BLE001 - handed to the call's own thread, which raises it
            with self._session.changed:
                self._error = error
                self._session.changed.notify_all()

    def _check_complete(self) -> None:
        total = len(self._store.chunks)
        owed = len(self._store.delivered(self._number, self._caller.child))
        if owed < total and not self._store.has_refused(self._number):
            raise ProtocolError(
                f"A round has {total} chunks. The stream ended with {owed} delivered."
            )


def tell_held(context: grpc.ServicerContext, held: Iterable[int], limit: int) -> set[int]:
    """Tells a caller that tries again what the server holds; what the caller holds."""
    metadata = dict(context.invocation_metadata() or ())
    have = wire.ranges_from_text(str(metadata.get(wire.HELD_KEY, "")), limit)
    context.send_initial_metadata(((wire.HELD_KEY, wire.ranges_to_text(held)),))
    return have


def weight_of(context: grpc.ServicerContext) -> float | None:
    """What a caller says that it stands for in a round; None: nothing."""
    metadata = dict(context.invocation_metadata() or ())
    text = metadata.get(wire.WEIGHT_KEY)
    return None if text is None else wire.weight_from_text(str(text))


def read_ticks(messages: Iterable[bytes], context: grpc.ServicerContext, tick_s: float) -> None:
    """Takes a child's ticks, in a thread of its own, until the call is over.

    gRPC takes a message only when it is asked for one: unread, they would stop once the window of
    the stream is full. They are read twice as fast as they come, and no faster, so whoever sends
    without end is held up by the window.

    Args:
        messages: the ticks.
        context: of the call.
        tick_s: seconds from one tick to the next.
    """
    is_over = threading.Event()

    def read() -> None:
        with contextlib.suppress(grpc.RpcError):  # the child has hung up
            for _ in messages:
                if is_over.wait(tick_s / 2):
                    return

    if context.add_callback(is_over.set):
        # A machine that has no thread to spare can do without for as long as the window lasts.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=read, name="tf_hips-ticks", daemon=True).start()
