# SPDX-License-Identifier: Apache-2.0
"""The packets of one round, up to one server and back, over connections that may break.

Invariant: a packet is taken once, however often its bytes travel.
"""

import contextlib
import functools
from collections.abc import Sequence

from tf_hips.errors import ProtocolError
from tf_hips.ps.client.link import Link
from tf_hips.ps.client.passage import Passage, WayUp, moving, read_held, say_held
from tf_hips.ps.client.patience import Patience
from tf_hips.ps.client.sketch import Fixed
from tf_hips.ps.client.views import Halt
from tf_hips.ps.client.vote import Ballot
from tf_hips.ps.transport import wire


class Exchange:
    """One round with one server; `attempt` is made until one of them ends it."""

    def __init__(
        self,
        link: Link,
        server: str,
        passage: Passage,
        chunks: Sequence[int],
        lengths: Sequence[int],
        ballot: Ballot | Fixed,
        *,
        said: tuple[tuple[str, str], ...],
        is_begun: bool,
        halt: Halt,
    ) -> None:
        """Nothing has moved.

        Args:
            link: to the server.
            server: its address, for messages.
            passage: what goes up, and takes what comes down.
            chunks: of the model, at this server.
            lengths: bytes of the packet that comes down, for each chunk of the model; 0 elsewhere.
            ballot: what is said and heard where children vote or are sketched.
            said: further metadata.
            is_begun: whether a process before this one may have delivered something.
            halt: by which another thread may end it.
        """
        self._link = link
        self._server = server
        self._passage = passage
        self._chunks = chunks
        self._lengths = list(lengths)
        self._ballot = ballot
        self._said = said
        self._first = int(is_begun)
        self._halt = halt
        self._have: set[int] = set()
        self._most_held = 0

    def attempt(self, count: int, patience: Patience) -> None:
        """Sends what the server lacks, takes what has not come; as `Link.persist` calls it."""
        count += self._first
        self._halt.check(self._server)
        call = WayUp(
            functools.partial(self._passage.batches, self._chunks),
            resumes=self._ballot.waits(count == 0),
        )
        stream = self._link.stub("stream_stream", "Exchange", patience.left_s)(
            self._link.metered(moving(call.messages(), patience, count == self._first)),
            metadata=(
                *self._link.metadata(self._passage.number, count),
                *say_held(self._have),
                *self._said,
                *self._ballot.metadata,
            ),
        )
        with contextlib.ExitStack() as stack:
            stack.callback(stream.cancel)
            stack.callback(call.resume, None)
            stack.enter_context(patience.bounding(stream))
            stack.enter_context(self._halt.bound(stream, self._server))
            if count > 0:
                held = read_held(stream.initial_metadata(), len(self._lengths))
                if len(held) > self._most_held:
                    patience.renew()
                self._most_held = max(self._most_held, len(held))
                self._ballot.resume(call, held)
            assembler = wire.Assembler(self._ballot.limits(self._lengths))
            for message in stream:
                # What comes once more is no progress before it is a whole packet. An empty message
                # says that others go on.
                if count == self._first or not message:
                    patience.renew()
                if not message:
                    self._passage.go_on()
                for chunk, packet in assembler.feed(message):
                    if not self._ballot.hears(call, chunk, len(self._lengths), packet):
                        self._take(chunk, packet)
                        patience.renew()
            assembler.finish()
        if len(self._have) != len(self._chunks):
            raise ProtocolError(
                f"Round {self._passage.number} has {len(self._chunks)} chunks at server "
                f"{self._server}, which ended it after {len(self._have)}."
            )

    def _take(self, chunk: int, packet: memoryview) -> None:
        if len(packet) != self._lengths[chunk]:
            raise ProtocolError(
                f"The packet of chunk {chunk} must have {self._lengths[chunk]} bytes. "
                f"Received: {len(packet)} from server {self._server}"
            )
        self._passage.take(chunk, packet)
        self._have.add(chunk)
