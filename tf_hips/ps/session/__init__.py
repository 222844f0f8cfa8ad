# SPDX-License-Identifier: Apache-2.0
"""One run as its server sees it: who takes part, what is due, who waits.

    session       what calls ask of: the parts below, and who may do what when
    settings      what a server is told: one frozen value, checked when it is made
    members       the terms that a run was begun on, and the children that have joined
    joining       a child joins on the terms that it brings, and says which model it trains
    alike         what all children must have in common when they join
    presence      which children are there: each holds one call open
    state         what a run consists of, and what a server has to keep of it
    first_sync    child 0 sends its weights, the others fetch them
    round_call    a child delivers its packets, and waits for what all have made
    gather_call   a child delivers its payload, and waits for those of all
    closing       when rounds and gathers are closed without some children
    below         whether fewer children are there than a quorum, and for how long
    waiting       calls that wait for other children, and the end of the run
    moves         whether anything goes on, which buys them time
    departing     how children leave or are lost, and whether the others go on
    away          why processes have ended in whose place others may come, and who hears it
    comeback      another process of a site takes over from one that was killed
    ahead         whether a child is further than what was restored: a state that is older
    handover      backups, from a site that has one to a site that has lost its own
    description   what a run is doing, for those who ask how it goes

Of each call of a child the part that is no transport. No socket, no file.
"""
