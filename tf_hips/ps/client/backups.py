# SPDX-License-Identifier: Apache-2.0
"""The client's side of `handover`: its newest backup for others, another's for itself.

offer     from now on a backup goes to whoever asks, by a thread of its own
fetch     another party's newest backup, whole, over a new connection if need be
stream    the same as it comes, for a server that passes it on
"""

import itertools
import threading
from collections.abc import Callable, Iterator

import grpc

from tf_hips import log
from tf_hips.errors import PeerError, ProtocolError, TfHipsError
from tf_hips.ps.client.failures import detail
from tf_hips.ps.client.link import Link
from tf_hips.ps.client.patience import Patience
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.news import Request
from tf_hips.ps.transport.parcel import Held, Intake

Give = Callable[[Request], Iterator[bytes]]
"""The messages of a parcel; raises an OSError or a TfHipsError where there is none."""

# One whose folder is deleted just then has a newer one.
_ATTEMPTS = 3


class Backups:
    """Of one client. `fetch` and `stream` are one thread's, `offer` any thread's."""

    def __init__(self, link: Link) -> None:
        """Nothing is offered.

        Args:
            link: to the server.
        """
        self._link = link
        self._give: Give | None = None
        self._has_failed = False
        link.on_request = self._answer

    def offer(self, give: Give | None) -> None:
        """Gives what `give` yields to whoever asks; None: nothing any more."""
        self._give = give

    def fetch(self, intake: Intake, workers: int, patience_s: float) -> None:
        """Takes another party's newest backup.

        Args:
            intake: takes it, also what came over a connection that broke.
            workers: those of this party.
            patience_s: seconds in which nothing may come.

        Raises:
            PeerError: no party has one, or it cannot be reached.
            ProtocolError: what came is damaged, or does not fit here.
        """
        before = -1
        while True:
            try:
                self._fetch(intake, workers, patience_s)
                intake.finish()
                return
            except PeerError as error:
                # The one that gave may have gone: another one may have the rest, or another backup.
                if intake.held.num_bytes <= before or self._link.ended is not None:
                    raise
                before = intake.held.num_bytes
                log.warning("A backup of another party has broken off and is asked for: %s", error)

    def stream(self, held: Held, workers: int) -> Iterator[bytes]:
        """The messages of another party's newest backup, over the connection that there is.

        Raises:
            PeerError: no party has one, or it broke off.
        """
        request = wire.to_json(parcel=held.parcel, bytes=held.num_bytes, workers=workers)
        call = self._link.stub("unary_stream", "WantBackup", 1.0)
        try:
            yield from call(request, metadata=self._link.metadata())
        except grpc.RpcError as error:
            raise PeerError(detail(error)) from error
        except ValueError as error:  # gRPC's word for a channel that was closed meanwhile
            raise PeerError(f"The connection must be open. Received: {error}") from error

    def _fetch(self, intake: Intake, workers: int, patience_s: float) -> None:
        def attempt(count: int, patience: Patience) -> None:
            held = intake.held
            request = wire.to_json(parcel=held.parcel, bytes=held.num_bytes, workers=workers)
            call = self._link.stub("unary_stream", "WantBackup", patience.left_s)
            stream = call(request, metadata=self._link.metadata(0, count))
            with patience.bounding(stream):
                intake.begin()
                try:
                    for message in stream:
                        intake.take(message)
                        patience.renew()
                finally:
                    stream.cancel()

        self._link.persist("WantBackup", patience_s, attempt)

    def _answer(self, request: Request) -> None:
        """Called by the thread that watches, which must go on."""
        threading.Thread(
            target=self._send, args=(request,), name="tf_hips-backup", daemon=True
        ).start()

    def _send(self, request: Request) -> None:
        messages, error = self._open(request)
        head = wire.to_json(ticket=request.ticket, error=error)
        try:
            self._link.stub("stream_unary", "GiveBackup", 1.0)(
                self._link.metered(itertools.chain([head], messages)),
                metadata=self._link.metadata(),
            )
            self._has_failed = False
        except (grpc.RpcError, TfHipsError, ValueError) as failure:
            # Who asks without end and takes nothing must not fill the log.
            (log.debug if self._has_failed else log.warning)(
                "A backup has not reached the party that asked: %s", detail(failure)
            )
            self._has_failed = True

    def _open(self, request: Request) -> tuple[Iterator[bytes], str | None]:
        """The messages of the newest backup, whose files are open; or why there are none."""
        for last in (False,) * (_ATTEMPTS - 1) + (True,):
            try:
                if self._give is None:
                    return iter(()), "it makes no backups now"
                messages = iter(self._give(request))
                return itertools.chain([next(messages)], messages), None
            except FileNotFoundError as error:
                if last:
                    return iter(()), f"{error}"
            except (OSError, TfHipsError, StopIteration) as error:
                return iter(()), f"{type(error).__name__}: {error}"
        raise ProtocolError("Attempts must be at least one.")
