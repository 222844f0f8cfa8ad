# SPDX-License-Identifier: Apache-2.0
"""What both ends of a run, and all parts of a server, go by.

    model        shapes of gradients, and the chunks cut from them
    assignment   which of several global servers holds which chunks
    tree         where servers and children stand: leaves, and what comes from above
    quorum       how many children make a round, and how long it waits for the others
    weights      the first weights of a run, passed on as they come
    past         results of rounds that are over, for children that come back
    spans        sets of numbers most of which follow one another
    recorder     what a session accepts, in the words of a journal

Plain values and small containers: no socket, no file, no rule.
"""
