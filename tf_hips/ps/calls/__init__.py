# SPDX-License-Identifier: Apache-2.0
"""The server's end of calls: who may call, what comes in, what goes out.

    service       every call: gRPC in, what the session makes of it out
    entrance      what every call goes through: who calls, what an error becomes
    streams       what comes in over the streams of calls
    traffic       what children have sent and got, counted as it moves
    written       what has been written of each child, so that it is written once
    admission     who calls, and whether that call may be heard
    refusals      how many refused calls a peer may make
    wait_limits   how long a server waits for its children and its uplink
    seat          tells children their groups, and asks them before they vote
    vote          of a round with votes: hears digests, asks for packets
    sketch        of a round that is decided on sketches
    joint         between shards: reports to shard 0, verdicts from it
    pacing        ESync's state service, and the client's end of it

What is due, and who waits for it, knows the session.
"""
