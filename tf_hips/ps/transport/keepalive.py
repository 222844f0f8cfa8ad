# SPDX-License-Identifier: Apache-2.0
"""How both sides find out that a link is silently dead, and do not take a slow one for it.

A side that has received nothing for a while sends a ping, and gives the connection up if the answer
does not come in the same time again. Both take half of `lost_after_s` together, so that a child has
the other half, and more, to come back over another connection.

An answer stands behind all that lies in buffers, of this machine and of tunnels and routers on the
way, which a slow link takes minutes to empty. So nobody should have to ping who is being sent to,
or whose bytes are being taken: while a child takes part both sides send a message without content,
a tick, several to each time after which the other side would ping. Then bytes that move one way
alone are no reason to doubt the other. Who ticks shows no more than who answers pings, and buys
nobody time in a round, for which only bytes of the round count (`session.moves`).
"""

# What a child assumes before its server has told it.
LOST_AFTER_S = 120.0
# Shorter and longer ones count as these: a busy machine must have time for a ping, and a router
# must not forget a connection that is quiet.
_LEAST_S, _MOST_S = 4.0, 120.0
# gRPC makes this one the kernel's TCP_USER_TIMEOUT, which ends a connection whose other end takes
# no bytes for as long: a tunnel into a slow link does not read for seconds. The time that a ping
# has is the other one. It is also how long the kernel keeps what was not sent of a connection that
# is closed already, so not for ever: a quarter of an hour.
_KERNEL_MS = 900_000
# To each time after which the other side pings: so many a busy machine may be late with.
_TICKS = 4


def options(lost_after_s: float) -> tuple[tuple[str, int], ...]:
    """Options of a channel, or of a server, for children that are lost after `lost_after_s`."""
    quarter_ms = int(250 * _bounded(lost_after_s))
    return (
        ("grpc.keepalive_time_ms", quarter_ms),
        ("grpc.keepalive_timeout_ms", _KERNEL_MS),
        ("grpc.http2.ping_timeout_ms", quarter_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def tick_s(lost_after_s: float) -> float:
    """Seconds from one tick to the next."""
    return _bounded(lost_after_s) / 4 / _TICKS


def _bounded(lost_after_s: float) -> float:
    return min(_MOST_S, max(_LEAST_S, lost_after_s))
