# SPDX-License-Identifier: Apache-2.0
"""The parameter server over gRPC: rounds, chunks, children, mutual TLS. Imports no TensorFlow.

    server      the process: listens, serves one run after another, stands below another server
    calls       the server's end of calls: who may call, what comes in, what goes out
    disk        what lets a run outlive its server: a journal and snapshots
    session     one run as its server sees it: who takes part, what is due, who waits
    client      the child's side: connections, rounds, backups
    robust      rounds in which some may lie: by votes, on sketches, over shards, from a buffer
    rounds      rounds of all children, or of each by itself: packets in, a merged packet out
    rules       what a server makes of packets: a sum, an optimizer, a robust aggregate
    terms       what both ends go by: model, chunks, shards, the tree, quorums
    security    certificates, and what is wrong with a connection
    transport   what travels, and over what: frames, sockets, folders

Each imports from those below it only, and `session` and `client` nothing of each other; the import
contracts in pyproject.toml say so. Logic is apart from transport: `terms`, `rules`, `rounds`,
`robust` and `session` open no socket.
"""

import os

# gRPC prints lines of its own for every handshake that fails; our errors say it in one sentence.
# It reads this when it is imported, so a user's own setting wins.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Names are found as the system finds them, and our own probes. gRPC's resolver asks name servers
# itself, and knows none that comes from elsewhere: `hub.local`, a directory, systemd-resolved.
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
# What forks (loaders of data, a script) is a process without gRPC. Its core's default is to go on
# there, with threads on the parent's connections, which gRPC for Python does not prepare: such a
# child crashed now and then (grpc/grpc, pull request 41455).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
