# SPDX-License-Identifier: Apache-2.0
"""Options of `tf-hips train` for robust rules and for liars, with the spellings of DETOX."""

import argparse
from typing import TYPE_CHECKING

from tf_hips.cli import arguments, hints, votes
from tf_hips.esync import RULES

if TYPE_CHECKING:
    from tf_hips.trainer.robustness import Robust

# Its little that is enough: whatever z the numbers would allow, of all rows, upwards.
_LIS = "alie(z=1, sign=1, statistics=all)"
# What its --err-mode can be, by our names.
_OF_DETOX = ("reversed_gradient", "constant", "gaussian")


def attack(text: str) -> str:
    """The text of an attack; returns its canonical text."""
    from tf_hips.robust import adversary

    if text == adversary.LABEL_FLIP:
        return text
    try:
        return str(adversary.parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def rule(text: str) -> str:
    """`default` or `compat` of local steps, or the text of an update or a robust rule."""
    from tf_hips import robust

    if text in RULES:
        return text
    try:
        return arguments.rule(text)
    except argparse.ArgumentTypeError:
        try:
            return robust.parse(text).text  # of simulated workers, if not of a server
        except ValueError:
            pass
        raise


def lis(text: str) -> str | None:
    """`simulate`, or as DETOX says nothing: `None`."""
    known = ("simulate", "None")
    if text not in known:
        near = hints.near(text, known) or "."
        raise argparse.ArgumentTypeError(f"must be simulate or None{near} Received: {text!r}")
    return None if text == "None" else text


def add(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    group = parser.add_argument_group(
        "liars and robust rules", "for tests and studies: docs/train.md, docs/robustness.md"
    )
    group.add_argument(
        "--simulated-workers",
        type=arguments.count,
        metavar="N",
        help="play N workers in this one process, so that liars know all gradients",
    )
    votes.add_groups(group, "workers", type=arguments.switch, nargs="?", const=True, default=False)
    group.add_argument(
        "--err-mode",
        type=attack,
        metavar="ATTACK",
        help="what liars send: rev_grad, constant, random, alie, inner_product(epsilon=2), ..., "
        "nan, label_flip, lying_scale (rev_grad, with --worker-fail)",
    )
    group.add_argument(
        *("--worker-fail", "--q"),
        type=arguments.index,
        metavar="Q",
        help="how many lie, drawn by the seed, and how many a rule of --approach or --mode bears "
        "that has f=auto (default: nobody lies, and it bears as many as it can); 0: nobody, "
        "whatever --err-mode says, and it bears none",
    )
    group.add_argument(
        "--adversarial",
        type=arguments.number,
        metavar="C",
        help="of rev_grad: what the gradient is multiplied with; of constant: what is sent (-100)",
    )
    group.add_argument(
        "--lis-simulation",
        type=lis,
        metavar="simulate",
        help=f"a little is enough, as DETOX has it, in the place of its --err-mode: '{_LIS}'",
    )
    group.add_argument(
        "--placement",
        choices=("random", "worst"),
        default="random",
        help="of --simulated-workers in groups that vote: worst: liars sit where they own as many "
        "groups as they can, and know those that are drawn (default random)",
    )
    for name, text in (
        ("--redraw", "others lie in each step, as in DETOX"),
        ("--label-flip", "the same as --err-mode label_flip"),
    ):
        group.add_argument(
            name, type=arguments.switch, nargs="?", const=True, default=False, help=text
        )


def near_mode(text: str) -> str:
    """What is to be said behind a mode that is none, where it is a robust rule; or nothing.

    A server's `--mode` takes all of them.
    """
    from tf_hips import robust
    from tf_hips.trainer.modes import AGGREGATIONS

    try:
        rule = robust.parse(text)
    except ValueError:
        return ""
    for one in AGGREGATIONS:
        if one != robust.detox.MAJ_VOTE and robust.parse(one) == rule:
            return f"; did you mean {one}?"
    return f"; `--rule` takes any robust rule, `detox(r=5) >> {text}` for groups."


def mode_of(options: argparse.Namespace, mode: str) -> str:
    """What DETOX's modes and simulated workers make of a mode."""
    from tf_hips.trainer.modes import AGGREGATIONS

    if mode in AGGREGATIONS:
        mode = "sync"
    return "simulated" if options.simulated_workers is not None and mode == "sync" else mode


def robust_of(options: argparse.Namespace) -> "Robust":
    """What a trainer is told.

    Raises:
        UsageError: two options say different things.
        ConfigError: a value is out of range.
    """
    from tf_hips.trainer.modes import AGGREGATIONS
    from tf_hips.trainer.robustness import Robust

    given = options.rule
    return Robust(
        rule=None if given in (None, *RULES) else given,
        approach=options.approach,
        aggregation=options.mode if options.mode in AGGREGATIONS else None,
        group_size=options.group_size,
        bucket_size=options.bucket_size or 0,
        err_mode=_attack_of(options),
        worker_fail=options.worker_fail,
        redraw=bool(options.redraw) and options.worker_fail != 0,
        placement="random" if options.worker_fail == 0 else options.placement,
        simulated_workers=options.simulated_workers,
        vote=options.vote,
        fixed_groups=bool(options.fixed_groups),
    )


def _attack_of(options: argparse.Namespace) -> str | None:
    """The attack that all options together say; None: nobody lies.

    Raises:
        UsageError: they say different things.
    """
    adversarial, err_mode = options.adversarial, options.err_mode
    if options.worker_fail == 0:
        return None  # a study may begin with nobody
    if options.lis_simulation and (err_mode is None or err_mode.partition("(")[0] in _OF_DETOX):
        # Scripts of DETOX give both, and then "the err-mode won't work any more" (its README).
        adversarial = err_mode = None
    said = {
        "--err-mode": err_mode,
        "--lis-simulation": None if options.lis_simulation is None else attack(_LIS),
        "--label-flip": "label_flip" if options.label_flip else None,
    }
    named = {name: text for name, text in said.items() if text is not None}
    if len(set(named.values())) > 1:
        raise arguments.UsageError(
            f"{' and '.join(named)} exclude each other. Received: " + ", ".join(named.values())
        )
    chosen = next(iter(named.values()), None)
    if chosen is not None and options.worker_fail is None:
        raise arguments.UsageError(
            f"{next(iter(named))} needs --worker-fail, how many lie. Received: none"
        )
    if chosen is None and not options.worker_fail:
        if adversarial is not None:
            raise arguments.UsageError(
                "--adversarial needs --worker-fail, how many lie. Received: none"
            )
        return None
    chosen = chosen or attack("rev_grad")
    if adversarial is None:
        return chosen
    name = chosen.partition("(")[0]
    if name not in ("reversed_gradient", "constant"):
        raise arguments.UsageError(
            f"--adversarial is for rev_grad and constant. Received: --err-mode {chosen}"
        )
    return _with_factor(name, adversarial)


def _with_factor(name: str, factor: float) -> str:
    return attack(f"{name}(c={-factor if name == 'reversed_gradient' else factor!r})")
