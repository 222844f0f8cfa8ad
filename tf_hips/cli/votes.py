# SPDX-License-Identifier: Apache-2.0
"""Options by which parties or workers vote in groups, in the words of DETOX.

A server and the workers of a run say them alike; of a server they are one rule, together.
"""

import argparse
from typing import Any

from tf_hips.cli import arguments

_DESTS = ("mode", "group_size", "worker_fail", "bucket_size", "vote", "fixed_groups")
_GROUP_SIZE = 5  # `robust.detox.GROUP_SIZE`, which is not imported for `--help`


def approach(text: str) -> str:
    """One of DETOX's approaches."""
    from tf_hips.robust import detox

    try:
        detox.approach(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_groups(parser: argparse._ActionsContainer, who: str, **flag: Any) -> None:
    """Declares the options that all commands have which know groups.

    Args:
        parser: gets them.
        who: are in the groups, for the help.
        flag: how this command declares an option that is there or not.
    """
    parser.add_argument(
        "--approach",
        type=approach,
        metavar="baseline|maj_vote|detox",
        help=f"instead of --rule: no groups; {who} in groups that compute the same gradient and "
        "vote, and the mean of the votes; groups, buckets and the rule that --mode names",
    )
    parser.add_argument(
        "--group-size",
        type=arguments.count,
        metavar="R",
        help=f"of --approach: {who} of a group (default {_GROUP_SIZE})",
    )
    parser.add_argument(
        "--bucket-size",
        type=arguments.index,
        metavar="N",
        help="of --approach detox: how many means of votes --mode gets at most (default 0: the "
        "votes themselves)",
    )
    parser.add_argument(
        "--vote",
        choices=("digest", "exact", "tolerant"),
        help="of --approach: by SHA-256, so that one of a group sends its packets, by all bytes, "
        "or nearly equal, for machines that round differently (default digest)",
    )
    parser.add_argument(
        "--fixed-groups",
        **flag,
        help="of --approach: neighbours are a group, and stay; else groups are drawn for each "
        "round, by a server in secret",
    )


def add(parser: argparse.ArgumentParser) -> None:
    """Declares the options of a server."""
    group = parser.add_argument_group("parties that vote in groups", "docs/detox.md")
    add_groups(group, "parties", action="store_true")
    group.add_argument(
        "--mode",
        metavar="NAME",
        help="of --approach: normal, coord-median, krum, multi-krum, bulyan, geometric_median, "
        "sign-sgd, or any robust rule (default normal)",
    )
    group.add_argument(
        "--worker-fail",
        type=arguments.index,
        metavar="Q",
        help="of --approach: how many parties may lie, by which --mode gets its f, 0: nobody "
        "(default: as many as it bears); of maj_vote, whose groups must be of 2 Q + 1 or more",
    )


def rule_of(options: argparse.Namespace) -> str | None:
    """The rule that the options name; that of `--rule` where they name none.

    Raises:
        UsageError: they do not go together.
    """
    if options.approach is None:
        for dest in _DESTS:
            value = getattr(options, dest)
            if value is not None and value is not False:  # 0 says something: nobody lies
                raise arguments.UsageError(f"--{dest.replace('_', '-')} is of --approach")
        rule: str | None = options.rule
        return rule
    if options.rule is not None:
        raise arguments.UsageError("--approach names a rule, so it excludes --rule")
    from tf_hips.ps import rules
    from tf_hips.robust import detox

    is_baseline = options.approach == detox.BASELINE
    for dest in detox.OF_GROUPS:
        if is_baseline and getattr(options, dest) not in (None, False):
            raise arguments.UsageError(f"--approach baseline has no --{dest.replace('_', '-')}")
    try:
        chosen = detox.approach(
            options.approach,
            options.mode or "normal",
            group_size=options.group_size,
            worker_fail=options.worker_fail,
            bucket_size=options.bucket_size,
            vote=options.vote,
            fixed=options.fixed_groups,
        )
        return rules.resolve(chosen.then if is_baseline else chosen).text
    except ValueError as error:
        raise arguments.UsageError(f"--approach: {error}") from error
