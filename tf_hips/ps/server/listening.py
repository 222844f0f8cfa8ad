# SPDX-License-Identifier: Apache-2.0
"""What a server's socket is opened with."""

import concurrent.futures
import socket

import grpc

from tf_hips.errors import ConfigError
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.sockets import split_address

# Beside those of `keepalive`. A server that counts pings of children as abuse would cut the
# connection.
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", wire.MESSAGE_BYTES),
    ("grpc.max_receive_message_length", wire.MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 20),
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


def are_known(credentials: grpc.ServerCredentials) -> bool:
    """Whether gRPC can use a server's credentials, at an address that is free in any case."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        try:
            server.add_secure_port("127.0.0.1:0", credentials)
        except RuntimeError:
            return False
        finally:
            server.stop(None)
    return True
