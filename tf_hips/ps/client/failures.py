# SPDX-License-Identifier: Apache-2.0
"""What an error of a call means: a broken connection, a busy server, or the server's own word.

Whoever classifies errors of gRPC does it here: the link, and so all that call over one (parties,
servers below others, shards, `tf-hips status`).
"""

import contextlib

import grpc

from tf_hips.errors import (
    NonFiniteError,
    PacketError,
    PeerError,
    ProtocolError,
    TfHipsError,
    ToleranceError,
)
from tf_hips.ps.transport.calls_at_once import TOO_MANY

_ERRORS: dict[grpc.StatusCode, type[TfHipsError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: PacketError,
    grpc.StatusCode.OUT_OF_RANGE: NonFiniteError,
    grpc.StatusCode.NOT_FOUND: ToleranceError,
    grpc.StatusCode.FAILED_PRECONDITION: ProtocolError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ProtocolError,
}
# What gRPC's server says when `maximum_concurrent_rpcs` is reached, and ours to one child.
_BUSY = ("Concurrent RPC limit", TOO_MANY)
# How gRPC begins where a method of its server, or this side's iterator of requests, has raised what
# is no error of ours.
_RAISED = (
    "Exception calling application: ",
    "Exception iterating responses: ",
    "Exception iterating requests!",
)


def is_broken(error: Exception) -> bool:
    """Whether the connection has broken under a call, or never came about.

    UNKNOWN has two meanings. gRPC says it of a stream that ends without a status: of a TLS record
    that does not decrypt, because a bit has changed on the way, it is "Stream removed". And it says
    so of a mistake in the code of either side, which trying again would only repeat; then its text
    begins as `_RAISED`. Errors of ours have codes of their own (`calls.entrance`).
    """
    if not isinstance(error, grpc.RpcError):
        return False
    code = error.code()
    is_mistake = detail(error).startswith(_RAISED)
    return code == grpc.StatusCode.UNAVAILABLE or (
        code == grpc.StatusCode.UNKNOWN and not is_mistake
    )


def is_busy(error: Exception) -> bool:
    """Whether the server had no thread to spare for a call."""
    return (
        isinstance(error, grpc.RpcError)
        and error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        and any(text in detail(error) for text in _BUSY)
    )


def code_of(error: Exception) -> grpc.StatusCode:
    """The code of a call's error; that of a future that was cancelled is CANCELLED."""
    return error.code() if isinstance(error, grpc.RpcError) else grpc.StatusCode.CANCELLED


def kind_of(code: grpc.StatusCode) -> type[TfHipsError]:
    """The error of ours that a server has told by `code`."""
    return _ERRORS.get(code, PeerError)


def detail(error: Exception) -> str:
    """What the other side says, or else the error's own text."""
    with contextlib.suppress(AttributeError):
        return str(error.details())  # type: ignore[attr-defined]
    return str(error)
