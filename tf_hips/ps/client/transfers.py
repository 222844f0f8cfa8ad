# SPDX-License-Identifier: Apache-2.0
"""What a client moves beside rounds: the first weights, and the payloads of gathers.

Calls persist over broken connections: only what the other side lacks is sent again.
"""

import contextlib
from collections.abc import Callable

from tf_hips.errors import ProtocolError
from tf_hips.ps.client.link import Link
from tf_hips.ps.client.passage import ReadWeights, WayUp, moving, read_held, say_held
from tf_hips.ps.client.patience import Patience
from tf_hips.ps.rounds.gather import bits_bytes, from_bits
from tf_hips.ps.terms.weights import Described
from tf_hips.ps.transport import wire


class Transfers:
    """Transfers over one link."""

    def __init__(self, link: Link) -> None:
        """Nothing has moved."""
        self._link = link

    def send_weights(self, what: Described, read: ReadWeights, wait_s: float) -> bool:
        """See `Client.send_weights`; gives up when nothing moves for `wait_s`."""
        kinds, total = what
        request = wire.to_json(kinds=kinds, bytes=total)

        def upload(attempt: int, patience: Patience) -> bool:
            answer = self._link.once("BeginSync", request, attempt, patience.left_s)
            fields = wire.from_json(answer, held=int, fetches=bool)
            if fields["fetches"]:
                return True
            call = self._link.stub("stream_unary", "Upload", patience.left_s).future(  # type: ignore[attr-defined]
                self._link.metered(moving(read(fields["held"]), patience)),
                metadata=self._link.metadata(fields["held"], attempt),
            )
            with patience.bounding(call):
                call.result()
            return False

        return self._link.persist("Upload", wait_s, upload)

    def fetch_weights(
        self,
        what: Described,
        held: Callable[[], int],
        take: Callable[[bytes], object],
        wait_s: float,
    ) -> None:
        """See `Client.fetch_weights`; gives up when nothing moves for `wait_s`."""
        kinds, total = what
        request = wire.to_json(kinds=kinds, bytes=total)

        def download(attempt: int, patience: Patience) -> None:
            self._link.once("BeginSync", request, attempt, patience.left_s)
            call = self._link.stub("unary_stream", "Download", patience.left_s)
            stream = call(b"", metadata=self._link.metadata(held(), attempt))
            with patience.bounding(stream):
                for message in stream:
                    if held() + len(message) > total:
                        raise ProtocolError(f"The weights have {total} bytes. Received: more")
                    take(message)
                    patience.renew()

        self._link.persist("Download", wait_s, download)
        if held() != total:
            raise ProtocolError(f"The weights have {total} bytes. Received: {held()}")

    def gather(
        self,
        number: int,
        packet: wire.Buffer,
        limit: int,
        num_leaves: int,
        wait_s: float,
        go_on: Callable[[], object] | None,
    ) -> list[bytes | None]:
        """One gather.

        Args:
            number: the gather.
            packet: what goes up.
            limit: greatest length of a payload in bytes.
            num_leaves: leaves of the whole tree.
            wait_s: seconds after which it gives up when nothing moves.
            go_on: called when the server says that others go on, if given.

        Returns:
            The payloads of all leaves, in their order; None of those that are absent.
        """
        results: dict[int, bytes] = {}

        def attempt(count: int, patience: Patience) -> None:
            call = WayUp(lambda held: iter([() if held else [(0, packet)]]), resumes=count > 0)
            stream = self._link.stub("stream_stream", "Gather", patience.left_s)(
                self._link.metered(moving(call.messages(), patience, count == 0)),
                metadata=(*self._link.metadata(number, count), *say_held(set(results))),
            )
            with contextlib.ExitStack() as stack:
                stack.callback(stream.cancel)
                stack.callback(call.resume, None)
                stack.enter_context(patience.bounding(stream))
                if count > 0:
                    call.resume(read_held(stream.initial_metadata(), 1))
                assembler = wire.Assembler([limit] * num_leaves + [bits_bytes(num_leaves)])
                for message in stream:
                    if count == 0 or not message:
                        patience.renew()
                    if not message and go_on is not None:
                        go_on()
                    for child, other in assembler.feed(message):
                        results[child] = bytes(other)
                        patience.renew()
                assembler.finish()

        self._link.persist("Gather", wait_s, attempt)
        absent = from_bits(results.get(num_leaves, b""), num_leaves)
        return [
            None if is_absent else results.get(leaf, b"") for leaf, is_absent in enumerate(absent)
        ]
