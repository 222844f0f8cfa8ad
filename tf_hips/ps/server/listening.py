# SPDX-License-Identifier: Apache-2.0
"""What a server's socket is opened with."""

import socket

from tf_hips.errors import ConfigError
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.sockets import split_address

# An idle child pings once a minute; a server that counts such pings as abuse would cut the
# connection.
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", wire.MESSAGE_BYTES),
    ("grpc.max_receive_message_length", wire.MESSAGE_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
)


def keepalive(lost_after_s: float) -> tuple[tuple[str, int], ...]:
    """Options by which a link that is silently dead is noticed within half of `lost_after_s`.

    A ping goes out only where nothing has come in for a while, so traffic pays nothing for it.
    """
    quarter_ms = int(250 * min(120.0, max(4.0, lost_after_s)))
    return (
        ("grpc.keepalive_time_ms", quarter_ms),
        ("grpc.keepalive_timeout_ms", quarter_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.ping_timeout_ms", quarter_ms),
    )


def check_free(bind: str) -> None:
    """Raises ConfigError where the port is taken: gRPC would not say so in one sentence."""
    host, port = split_address(bind)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"`bind` must be a free address of this machine. Received: {bind} ({error.strerror})"
        ) from error
