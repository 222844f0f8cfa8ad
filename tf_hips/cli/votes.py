# SPDX-License-Identifier: Apache-2.0
"""Options by which parties vote in groups, in the words of DETOX; together they are one rule."""

import argparse

from tf_hips.cli import arguments

_DESTS = ("mode", "group_size", "worker_fail", "bucket_size", "vote", "fixed_groups")
_GROUP_SIZE = 5  # `robust.detox.GROUP_SIZE`, which is not imported for `--help`


def add(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "--approach",
        choices=("baseline", "maj_vote", "detox", "draco_lite", "draco-lite"),
        help="instead of --rule: parties in groups compute the same gradient and vote, and the "
        "votes go to --mode (docs/robustness.md); baseline: no groups",
    )
    parser.add_argument(
        "--mode",
        metavar="NAME",
        help="of --approach: normal, coord-median, krum, multi-krum, bulyan, geometric_median, "
        "sign-sgd, or any robust rule (default normal)",
    )
    parser.add_argument(
        "--group-size",
        type=arguments.count,
        metavar="R",
        help=f"of --approach: parties of a group (default {_GROUP_SIZE})",
    )
    parser.add_argument(
        "--worker-fail",
        type=arguments.index,
        metavar="Q",
        help="of --approach: how many parties may lie, by which --mode gets its f, 0: nobody "
        "(default: as many as it bears); of maj_vote, whose groups must be of 2 Q + 1 or more",
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
        action="store_true",
        help="of --approach: neighbours are a group, and stay; else the server draws groups for "
        "each round, in secret",
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
    import dataclasses

    from tf_hips.ps import rules
    from tf_hips.robust import detox

    for dest in ("group_size", "bucket_size", "vote", "fixed_groups"):
        if options.approach == "baseline" and getattr(options, dest) not in (None, False):
            raise arguments.UsageError(f"--approach baseline has no --{dest.replace('_', '-')}")
    try:
        chosen = detox.approach(
            options.approach,
            options.mode or "normal",
            group_size=options.group_size or _GROUP_SIZE,
            worker_fail=options.worker_fail,
            bucket_size=options.bucket_size or 0,
            fixed=options.fixed_groups,
        )
        if options.approach == "baseline":
            return rules.resolve(chosen.then).text
        return rules.resolve(dataclasses.replace(chosen, vote=options.vote or "digest")).text
    except ValueError as error:
        raise arguments.UsageError(f"--approach: {error}") from error
