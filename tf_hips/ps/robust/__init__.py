# SPDX-License-Identifier: Apache-2.0
"""Rounds in which some may lie: by votes, on sketches, over shards, from a buffer.

    voted            rounds whose children sit in groups and vote
    ballots          who has said what in a round, and whose packets were true
    asked            who was asked for packets, when it is looked at again, who was passed over
    tally            what becomes of votes: one row of each group, and who is named
    election         what a run keeps of votes, beside its rounds
    replicas         whether children that vote on equal bytes can compute them
    sketched_party   rounds decided on sketches of all leaves' rows: a party's server
    sketched_top     the same in the topmost server, which decides
    sketch           what travels of them, beside a round's call
    joint            rounds of a shard: complete here, then ruled on by shard 0
    buffered         asynchronous rounds: updates wait for each other, children for nobody
    rejections       whose rows were refused, or borne: counted, logged, told
    choices          whose rows were chosen, by rules that choose some: counted, told

The rules are in `rules` and `tf_hips.robust`; these are stores as in `rounds`. What children
and servers say for them is in `client` and `calls`, in modules of the same name.
"""
