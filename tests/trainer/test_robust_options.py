# SPDX-License-Identifier: Apache-2.0
"""Robust rules and liars of `tf-hips train`: what DETOX's flags and our own come to."""

import argparse
import itertools
import re

import pytest

from tests.trainer.test_command import WHAT
from tf_hips import robust
from tf_hips.cli import arguments, train, votes
from tf_hips.errors import ConfigError
from tf_hips.ps import rules
from tf_hips.robust import detox
from tf_hips.trainer.modes import AGGREGATIONS
from tf_hips.trainer.robustness import Robust, check, server_rule


def test_the_tuning_script_of_detox_means_what_it_meant(settings):
    told = settings(
        *("--approach=draco_lite", "--mode=coord-median", "--err-mode=rev_grad"),
        *("--worker-fail=5", "--adversarial=-100", "--lis-simulation=None", "--group-size=3"),
        *("--bucket-size=5", "--redraw", "--simulated-workers", "45"),
        *("--batch-size=32", "--lr=0.1", "--momentum=0.9", "--max-steps=200"),
    )
    assert told.mode == "simulated"
    detox = told.robust.detox()
    assert (detox.r, detox.buckets, detox.fixed) == (3, 5, False)
    # 5 liars own 2 of 15 groups at worst.
    assert (detox.then, detox.q, detox.check(45)) == (robust.median(), 5, 2)
    adversary = told.robust.adversary(7)
    assert adversary.attack == robust.attacks.reversed_gradient(100)
    assert (adversary.q, adversary.is_redrawn) == (5, True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--worker-fail", "2"], "reversed_gradient(c=100.0)"),
        (["--worker-fail", "2", "--adversarial", "-3"], "reversed_gradient(c=3.0)"),
        (["--q", "2", "--err-mode", "constant", "--adversarial", "7"], "constant(c=7.0)"),
        (["--q", "2", "--adversarial", "-1234567"], "reversed_gradient(c=1234567.0)"),
        (["--q", "2", "--adversarial=-1.23e-17"], "reversed_gradient(c=1.23e-17)"),
        (["--q", "2", "--err-mode", "random"], "gaussian(mean=0.0, sigma=200.0)"),
        (
            ["--q", "2", "--lis-simulation", "simulate"],
            "alie(z=1, sign=1, statistics=all, ddof=0)",
        ),
        (["--q", "2", "--err-mode", "lying_scale(factor=50)"], "lying_scale(factor=50)"),
        (["--q", "2", "--label-flip"], "label_flip"),
        (["--q", "2", "--label-flip", "--err-mode", "label_flip"], "label_flip"),
        (["--q", "2", "--err-mode", "ipm(epsilon=0.5)"], "inner_product(epsilon=0.5)"),
        (
            [
                "--q",
                "2",
                "--err-mode",
                "rev_grad",
                "--adversarial",
                "-100",
                "--lis-simulation",
                "simulate",
            ],
            "alie(z=1, sign=1, statistics=all, ddof=0)",
        ),
        (
            ["--q", "2", "--err-mode", "constant", "--lis-simulation", "simulate"],
            "alie(z=1, sign=1, statistics=all, ddof=0)",
        ),
        (["--worker-fail", "0"], None),
        (["--q", "0", "--err-mode", "rev_grad", "--adversarial", "-100", "--redraw"], None),
        (["--q", "0", "--lis-simulation", "simulate", "--label-flip"], None),
        (["--lis-simulation", "None"], None),
    ],
)
def test_what_liars_send(words, text, settings):
    told = settings(*words).robust
    assert told.err_mode == text
    assert (told.adversary(0) is None) == (text is None)
    if text is not None:
        assert told.adversary(0).q == 2
        assert told.adversary(0) == told.adversary(0) != told.adversary(1)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_every_mode_of_detox_is_a_rule_of_simulated_workers(mode, settings):
    told = settings("-m", mode, "--simulated-workers", "15", "--worker-fail", "2")
    assert told.mode == "simulated"
    assert told.robust.detox().then.rule.name in robust.NAMES


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ([], None),
        (["--rule", "median"], "median(f=auto)"),
        (["--rule", "trimmed_mean(f=1)"], "trimmed_mean(f=1)"),
        (["-m", "coord-median"], "median(f=auto)"),
        (["-m", "coord-median", "--approach", "baseline", "--worker-fail", "2"], "median(f=2)"),
        (["--approach", "baseline"], "mean"),
        (["-m", "sign-sgd", "--worker-fail", "1"], "majority(f=1)"),
    ],
)
def test_a_server_is_asked_for_a_rule(words, rule, settings):
    told = settings(*words)
    assert told.mode == "sync"
    assert server_rule(told.robust) == rule
    if rule is not None:
        assert rules.parse(rule).text == rule, "a server knows it"


def test_local_rules_and_rules_of_a_server_share_an_option(settings):
    told = settings("-m", "fedavg", "--rule", "compat")
    assert (told.local.rule, told.robust.rule) == ("compat", None)
    told = settings("-m", "fedavg", "--rule", "fedbuff(k=4)")
    assert told.local.rule is None
    assert told.robust.rule.startswith("fedbuff(k=4")
    assert settings("--rule", "nnm(f=1) >> krum(f=1)", "--simulated-workers", "9").robust.rule


DETOX = ["--simulated-workers", "45", "--approach", "detox", "-m", "coord-median", "--group-size",
         "3", "--err-mode", "rev_grad"]  # fmt: skip


@pytest.mark.parametrize("is_fixed", [False, True])
def test_the_worst_placement_is_of_the_groups_of_the_run(is_fixed, settings):
    words = [*DETOX, "--q", "9", "--placement", "worst", *(["--fixed-groups"] if is_fixed else [])]
    told = settings(*words).robust
    adversary = told.adversary(11)
    for step in range(3):
        liars = set(adversary.liars(45, step))
        groups = detox.groups(45, told.detox().r, 11, step, fixed=is_fixed)  # as `Crowd` has them
        assert sum(len(liars & set(one)) > 1 for one in groups) == 4
    assert settings(*DETOX, "--q", "9").robust.adversary(11).placement == "random"
    assert settings(*DETOX, "--q", "0", "--placement", "worst").robust.adversary(11) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--q", "2", "--placement", "worst"], "groups that vote, of `simulated_workers`"),
        ([*DETOX[:2], "--q", "2", "--placement", "worst"], "Received: placement=worst without"),
        ([*DETOX[:-2], "--placement", "worst"], "`placement` is about liars: give `err_mode`"),
        ([*DETOX, "--q", "9", "--placement", "worst", "--redraw"], "`redraw` exclude each other"),
    ],
)
def test_a_placement_needs_groups_and_liars(words, message, refused):
    refused(words, message)


def test_groups_that_vote_are_a_rule_of_a_server():
    told = Robust(approach="detox", aggregation="krum", group_size=3, bucket_size=4, worker_fail=2)
    assert server_rule(told) == (
        "detox(r=3, vote=digest, buckets=4, fixed=False, q=2) >> krum(f=auto)"
    )
    told = Robust(aggregation="maj_vote")
    assert server_rule(told) == "detox(r=5, vote=digest, buckets=0, fixed=False) >> mean"


def test_nan_in_every_step_is_for_robust_rules():
    liar = {"err_mode": "nan", "worker_fail": 1}
    check("sync", Robust(rule="median", **liar))
    check("sync", Robust(approach="detox", aggregation="krum", **liar))
    for mode, rule in (("sync", None), ("sync", "mean"), ("async", None)):
        with pytest.raises(ConfigError, match="ends the run on its own worker"):
            check(mode, Robust(rule=rule, **liar))


def test_votes_and_fixed_groups_are_those_of_a_server(settings):
    words = ["--approach", "detox", "-m", "bulyan", "--group-size", "3"]
    words += ["--vote", "tolerant", "--fixed-groups"]
    for more in ([], ["--simulated-workers", "27"]):
        told = settings(*words, *more)
        chosen = told.robust.detox()
        assert (chosen.r, chosen.vote, chosen.fixed) == (3, "tolerant", True)
        assert chosen.then.text.startswith("bulyan(f=auto, compat=False")
        assert server_rule(told.robust) == of_a_server(words)
    assert settings("--approach", "detox").robust.detox().vote == "digest"


def of_a_server(words) -> str:
    """The rule that the same words of `tf-hips server` name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule")
    votes.add(parser)
    return votes.rule_of(parser.parse_args(["--mode" if word == "-m" else word for word in words]))


@pytest.mark.parametrize("approach", ["baseline", "maj_vote", "detox", "draco_lite"])
def test_equal_words_of_a_server_and_of_its_workers_are_equal_rules(approach, settings):
    is_detox = approach in ("detox", "draco_lite")
    modes = [] if approach == "maj_vote" else [one for one in AGGREGATIONS if one != "maj_vote"]
    sizes = [] if approach == "baseline" else [["--group-size", "1"], ["--group-size", "3"]]
    fails = [["--worker-fail", "0"], ["--worker-fail", "2"]]
    buckets = [["--bucket-size", "4"]] if is_detox else []
    for mode, *more in itertools.product(
        [None, *modes], [[], *sizes], [[], *fails], [[], *buckets]
    ):
        size, fail, bucket = more
        is_code = approach == "maj_vote" and not size  # of 5, which bear 2
        if not is_code and (mode is None or not robust.parse(mode).is_auto):
            fail = []  # a server knows no liars but by f
        words = ["--approach", approach, *([] if mode is None else ["-m", mode])]
        words += [*size, *fail, *bucket]
        assert server_rule(settings(*words).robust) == of_a_server(words), words


def test_a_study_may_have_more_liars_than_its_rule_bears(settings):
    for words, text in (
        (["--approach", "maj_vote", "--group-size", "3"], "detox(r=3, .*) >> mean"),
        (["-m", "maj_vote"], "detox(r=5, .*) >> mean"),
        (["--approach", "detox"], "detox(r=5, .*) >> mean"),
    ):
        told = settings(*words, "--worker-fail", "4").robust
        assert told.adversary(0).q == 4
        assert re.fullmatch(text.replace("(", r"\(").replace(")", r"\)"), server_rule(told))


@pytest.mark.parametrize("simulated", [[], ["--simulated-workers", "27"]])
def test_nobody_lies_is_not_the_same_as_nothing_said(simulated, settings):
    words = ["-m", "krum", *simulated]
    for more, texts in (
        (["--worker-fail", "0"], ("krum(f=0)", "q=0) >> krum(f=auto)")),
        ([], ("krum(f=auto)", "fixed=False) >> krum(f=auto)")),
    ):
        for approach, text in zip(("baseline", "detox"), texts, strict=True):
            told = settings("--approach", approach, *words, *more).robust
            assert told.adversary(0) is None
            assert server_rule(told).endswith(text)
            assert ("worker_fail" in told.given) == bool(more)


def test_labels_are_flipped_where_each_has_its_own_rows(settings):
    for words in (["--rule", "median"], ["--rule", "detox(r=1) >> median"], ["-m", "krum"]):
        assert settings(*words, *FLIP).robust.adversary(0).text == "label_flip"


def test_groups_of_one_have_buckets_and_what_liars_spoil(settings):
    words = ["--approach", "detox", "-m", "krum", "--group-size", "1", "--bucket-size", "5"]
    told = settings(*words, "--worker-fail", "1").robust
    assert server_rule(told) == (
        "detox(r=1, vote=digest, buckets=5, fixed=False, q=1) >> krum(f=auto)"
    )


def test_a_rule_that_votes_is_one_of_simulated_workers(settings):
    told = settings("--rule", "detox(r=3, buckets=4, fixed=True) >> krum", *SIMULATED)
    chosen = told.robust.detox()
    assert (chosen.r, chosen.buckets, chosen.fixed) == (3, 4, True)
    assert chosen.then == robust.krum()
    assert settings("--rule", "median", *SIMULATED).robust.detox().r == 1


def test_the_help_names_every_mode(capsys):
    parser = arguments.Parser(prog="tf-hips")
    train.add(parser.add_subparsers(dest="command"))
    with pytest.raises(SystemExit):
        parser.parse_args(["train", "--help"])
    said = "".join(capsys.readouterr().out.split())  # lines end behind hyphens, too
    assert f"ofDETOX,syncwitharule:{','.join(AGGREGATIONS)}(defaultsync)" in said


SIMULATED = ["--simulated-workers", "27"]
FLIP = ["--q", "1", "--label-flip"]
REFUSED = [
    (["--vote", "exact"], "`vote` is for `approach` maj_vote and detox"),
    (["--fixed-groups", "--approach", "baseline"], "`fixed_groups` is for `approach` maj_vote"),
    (["--fixed-groups", "--rule", "median", *SIMULATED], "`fixed_groups` is for `approach`"),
    (["--rule", "detox(r=3) >> median >> fedavg", *SIMULATED], "fedavg"),
    (["--rule", "detox(r=3) >> median", "--q", "1", "--label-flip", *SIMULATED], "groups share"),
    (["--rule", "detox(r=3) >> median", *FLIP], "groups share"),
    (["--rule", "detox >> median >> fedavg", "-m", "fedavg", *FLIP], "groups share"),
    (["--err-mode", "rev_grad"], "--err-mode needs --worker-fail"),
    (["--lis-simulation", "simulate"], "--lis-simulation needs --worker-fail"),
    (["--err-mode", "rev_grad", "--lis-simulation", "simulate"], "--lis-simulation needs"),
    (["--label-flip"], "--label-flip needs --worker-fail"),
    (["--adversarial", "3"], "--adversarial needs --worker-fail"),
    (["--q", "1", "--err-mode", "alie", "--adversarial", "3"], "--adversarial is for rev_grad"),
    (
        ["--q", "1", "--err-mode", "mimic", "--lis-simulation", "simulate"],
        "--err-mode and --lis-simulation exclude",
    ),
    (["--q", "1", "--err-mode", "alie", "--label-flip"], "--err-mode and --label-flip exclude"),
    (["--redraw"], "`redraw` is about liars"),
    (["--q", "1", "--label-flip", "--redraw"], "who lies must stay the same"),
    (["--group-size", "3"], "`group_size` is for `approach` maj_vote and detox"),
    (["--approach", "baseline", "--bucket-size", "3"], "`bucket_size` is for `approach` detox"),
    (["--approach", "maj_vote", "--bucket-size", "3"], "buckets are of the approach detox"),
    (["--rule", "median", "--approach", "baseline"], "`rule` excludes `approach`"),
    (["--rule", "median", "-m", "krum"], "`rule` excludes `approach` and DETOX's modes"),
    (["--rule", "median", "-m", "async"], "The mode async has no rule over workers"),
    (["-m", "local", "--q", "1"], "Liars are simulated in the modes sync,"),
    (["-m", "streaming", "--q", "1"], "Liars are simulated in the modes sync,"),
    (["-m", "fedavg", "--simulated-workers", "3"], "`simulated_workers` is a mode of its own"),
    (["-m", "simulated"], "--simulated-workers N. Received: none"),
    (["--simulated-workers", "3", "--q", "3"], "fit 3 simulated workers: somebody must be honest"),
    (
        ["--simulated-workers", "5", "--q", "1", "--err-mode", "alie"],
        "nothing is attacked; give z a number. Received: 2/4, of n=5, f=1",
    ),
    (
        ["--simulated-workers", "5", "--q", "2", "--err-mode", "lying_scale"],
        "rows that are at hand were never packets",
    ),
    (
        ["--simulated-workers", "5", "--q", "2", "--err-mode", "mimic(target=3)"],
        "must be less than the 3 honest rows",
    ),
    (
        ["--q", "1", "--err-mode", "optimal(rule=median)"],
        "The attack optimal is made of the rows of all: it is for --simulated-workers.",
    ),
    (
        ["--simulated-workers", "5", "--q", "2", "--err-mode", "optimal(rule=krum(f=2))"],
        "krum needs n >= 2 f + 3 rows. Received: n=5, f=2",
    ),
    (
        ["--simulated-workers", "9", "--q", "1", "--err-mode", "alie(z=1, statistics=own)"],
        "`q` must be 2 or more for alie(z=1, sign=-1, statistics=own, ddof=0)",
    ),
    (["--simulated-workers", "3", "--compression", "onebit"], "nothing that could be encoded"),
    (["--q", "1", "--err-mode", "nan"], "ends the run on its own worker"),
    (
        ["--simulated-workers", "9", "--approach", "detox", "--q", "1", "--label-flip"],
        "groups share theirs",
    ),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_does_not_fit_is_one_line(words, message, refused):
    refused(words, message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--err-mode", "evil"], "an attack must be one of reversed_gradient"),
        (["--approach", "cyclic"], "`approach` must be one of baseline, maj_vote, detox"),
        (["--approach", "detoxx"], "draco-lite, maj-vote; did you mean detox? Received"),
        (["--err-mode", "rev_grd"], "did you mean rev_grad?"),
        (["--lis-simulation", "yes"], "must be simulate or None. Received"),
        (["--lis-simulation", "simulat"], "must be simulate or None; did you mean simulate?"),
        (["--mode", "coord-medain"], "did you mean coord-median?"),
        (["--mode", "median"], "did you mean coord-median?"),
        (["--mode", "majority"], "did you mean sign-sgd?"),
        (["--mode", "krum(f=1)"], "`--rule` takes any robust rule, `detox(r=5) >> krum(f=1)` for"),
        (["--rule", "kurm(f=1)"], "argument --rule"),
        (["--group-size", "0"], "must be a whole number >= 1"),
    ],
)
def test_a_text_that_is_none_is_refused_where_it_is_read(words, message, capsys):
    parser = arguments.Parser(prog="tf-hips")
    train.add(parser.add_subparsers(dest="command"))
    with pytest.raises(SystemExit):
        parser.parse_args(["train", *WHAT, *words])
    assert message in capsys.readouterr().err
