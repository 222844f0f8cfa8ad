# SPDX-License-Identifier: Apache-2.0
"""Rounds, of all children or of each by itself: packets in, a merged packet out.

    round          one synchronous round; what the calls of one child see of rounds
    store          synchronous rounds: packets of all children in, one merged packet out
    combining      what the packets of one chunk become: rule, residual, one packet
    whole          rounds of a rule that looks at whole rows: decided once
    partial        rounds that close without some children; updates that come late
    progress       how far rounds are, whose packets came, what came of them
    norms          norms of rows whose chunks are merged each by itself
    asynchronous   each child has rounds of its own, and waits for nobody
    lanes          the asynchronous rounds of each child, and the answers
    periods        asynchronous rounds below a server that has another one above it
    gather         small values of all children, for all children, unchanged

No socket, no file, and nobody waits in here: `session` does that.
"""
