# SPDX-License-Identifier: Apache-2.0
"""The child's side: a worker, a party, or the server of a party at the one above it.

    client         join, agree on the model, first synchronisation, rounds, leave
    link           the connection: made, lost, made again, watched and measured
    failures       what an error of a call means: a broken connection, a busy server, its word
    patience       how long a call may wait while nothing moves
    views          one round as a party sees it: packets up, and room for those down
    passage        what travels, wherever it comes from and goes to
    exchange       the packets of one round, up to one server and back
    transfers      what moves beside rounds: first weights, payloads of gathers
    welcome        what a server answers a child that has joined
    shards         connections to several global servers that share one model
    vote           what a child that votes says and hears
    seat           where it sits in a round, and what decides on its bits
    sketch         what a party's server says and hears of sketches
    backups        its newest backup for others, another's for itself
    state_client   ESync's state server, asked before every local step
    exits          with which exit code a script ends

It shares values and formats with a server, but nothing of a session.
"""
