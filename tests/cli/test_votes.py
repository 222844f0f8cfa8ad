# SPDX-License-Identifier: Apache-2.0
"""Options of DETOX on the command line: together they name one rule."""

import argparse

import pytest

from tf_hips import cli
from tf_hips.cli import arguments, votes
from tf_hips.ps import rules


def rule_of(text: str) -> str | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule")
    votes.add(parser)
    return votes.rule_of(parser.parse_args(text.split()))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("--approach detox", "detox(r=5) >> mean"),
        ("--approach detox --mode coord-median --group-size 3", "detox(r=3) >> median"),
        ("--approach draco_lite --mode sign-sgd --vote exact", "detox(5, exact) >> majority"),
        ("--approach maj_vote --group-size 7", "detox(r=7) >> mean"),
        ("--approach maj_vote --worker-fail 2", "detox(r=5) >> mean"),
        ("--approach maj-vote --group-size 7", "detox(r=7) >> mean"),
        ("--approach maj_vote --vote exact", "detox(5, exact) >> mean"),
        (
            "--approach draco-lite --mode multi-krum --worker-fail 5 --fixed-groups --group-size 3",
            "detox(r=3, fixed=True, q=5) >> multi_krum",
        ),
        (
            "--approach detox --mode bulyan --worker-fail 2 --fixed-groups --group-size 3",
            "detox(r=3, fixed=True, q=2) >> bulyan",
        ),
        ("--approach detox --mode krum(f=2) --bucket-size 7", "detox(5, buckets=7) >> krum(f=2)"),
        ("--approach detox --vote tolerant", "detox(r=5, vote=tolerant) >> mean"),
        ("--approach baseline --mode coord-median", "median"),
        ("--approach baseline --mode krum --worker-fail 2", "krum(f=2)"),
        ("--approach baseline --mode krum --worker-fail 0", "krum(f=0)"),
        ("--approach detox --mode krum --worker-fail 0", "detox(r=5, q=0) >> krum"),
        ("--approach detox --mode arc>>krum --worker-fail 4", "detox(r=5, q=4) >> arc >> krum"),
        ("--rule median", "median"),
    ],
)
def test_the_authors_words_name_a_rule(text: str, rule: str) -> None:
    found = rule_of(text)
    assert found is not None
    assert rules.parse(found) == rules.parse(rule)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--vote exact", "--vote is of --approach"),
        ("--fixed-groups", "--fixed-groups is of --approach"),
        ("--rule median --worker-fail 0", "--worker-fail is of --approach"),
        ("--approach detox --rule median", "excludes --rule"),
        ("--approach maj_vote --mode krum", "mean of the votes"),
        ("--approach detox --mode crumb", "must be one of"),
        ("--approach maj_vote --bucket-size 2", "buckets are of the approach detox"),
        ("--approach maj_vote --worker-fail 3", r"at least 2 worker_fail \+ 1"),
        ("--approach detox --mode krum(f=1) --worker-fail 2", "`worker_fail` says what f=auto is"),
        ("--approach detox --worker-fail 0", "`worker_fail` says what f=auto is"),
        ("--approach baseline --group-size 3", "baseline has no --group-size"),
        ("--approach baseline --vote exact", "baseline has no --vote"),
        ("--approach baseline --fixed-groups", "baseline has no --fixed-groups"),
        ("--approach baseline --bucket-size 3", "baseline has no --bucket-size"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, message: str) -> None:
    with pytest.raises(arguments.UsageError, match=message):
        rule_of(text)


def test_a_file_may_say_them(capsys: pytest.CaptureFixture[str]) -> None:
    told = "--parties a,b,c --insecure --approach detox --mode coord-median --group-size 3"
    with pytest.raises(SystemExit, match="0"):
        cli.main(["server", *told.split(), "--print-config"])
    assert "approach: detox\ngroup_size: 3\nmode: coord-median\n" in capsys.readouterr().out
