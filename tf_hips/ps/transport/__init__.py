# SPDX-License-Identifier: Apache-2.0
"""What travels between a child and its server, and over what.

    wire            frames of packets, metadata of calls, JSON of small calls
    sockets         addresses, and how many bytes have crossed a socket
    parcel          a folder of files as a stream of messages
    news            what a server tells over the `Watch` call that a child holds open
    keepalive       how dead links are found, and slow ones are not taken for dead
    calls_at_once   how many calls of one child are open at a time

Lowest of `ps`: it knows bytes, addresses and calls, but no run.
"""
