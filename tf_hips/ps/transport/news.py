# SPDX-License-Identifier: Apache-2.0
"""What a server tells a child over the `Watch` call that the child holds open."""

import dataclasses

from tf_hips.errors import PeerError, ProtocolError, TfHipsError
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.parcel import Held


@dataclasses.dataclass(frozen=True)
class Request:
    """What a child hears over its `Watch`.

    Attributes:
        ticket: by which its answer is known.
        held: what the receiver has.
        workers: those of the site that receives.
    """

    ticket: str
    held: Held
    workers: int


@dataclasses.dataclass(frozen=True)
class Tick:
    """Nothing new: the server is there (`keepalive`)."""


@dataclasses.dataclass(frozen=True)
class Notice:
    """Something about others for the child's log; the run goes on.

    Attributes:
        text: a line.
    """

    text: str


News = Request | Tick | Notice | tuple[str, type[TfHipsError]]
"""What a child hears over its `Watch`: what it is asked for, a notice, or why the run has ended."""

TICK = b""
"""A `Tick` as it travels, and what a child sends over its `Watch` to show that it is there."""


def news_to_message(news: News) -> bytes:
    """As it travels."""
    if isinstance(news, Tick):
        return TICK
    if isinstance(news, Notice):
        return wire.to_json(notice=news.text)
    if isinstance(news, Request):
        return wire.to_json(
            ticket=news.ticket,
            parcel=news.held.parcel,
            bytes=news.held.num_bytes,
            workers=news.workers,
        )
    reason, error = news
    return wire.to_json(reason=reason, error=error.__name__)


def news_from_message(message: bytes) -> News:
    """What a server has sent.

    Raises:
        ProtocolError: it is something else.
    """
    if message == TICK:
        return Tick()
    if b'"ticket"' in message[:20]:
        fields = wire.from_json(message, ticket=str, parcel=str, bytes=int, workers=int)
        held = Held.told(fields["parcel"], fields["bytes"])
        return Request(fields["ticket"], held, fields["workers"])
    if b'"notice"' in message[:20]:
        return Notice(wire.from_json(message, notice=str)["notice"])
    fields = wire.from_json(message, reason=str, error=str)
    is_dispute = fields["error"] == ProtocolError.__name__
    return fields["reason"], ProtocolError if is_dispute else PeerError
