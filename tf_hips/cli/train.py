# SPDX-License-Identifier: Apache-2.0
"""`tf-hips train`: trains a network on a data set, as one worker of a run or by itself.

Flags of the trainers that this one replaces are known: of ESync, HiPS, PyTorch-parameter-server and
DETOX. What has another place now is refused with the name of that place.

The options become one value, and this process becomes `python -m tf_hips.trainer`.
"""

import argparse
import dataclasses
import itertools
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from tf_hips import config
from tf_hips.cli import (
    arguments,
    config_file,
    hints,
    links,
    local_training,
    preflight,
    robust_training,
)
from tf_hips.errors import ConfigError
from tf_hips.trainer.modes import AGGREGATIONS, MODES, OPTIMIZERS

if TYPE_CHECKING:
    from tf_hips.trainer.settings import Training

_MODULE = "tf_hips.trainer"
_CPU = "cpu"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"cpu|gpu(\d+)")
_LOCAL_RANKS = (
    config.LOCAL_WORKER_VARIABLE,
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)
# MXNet's quantisation, with a threshold of the size of gradients: HiPS's own, 1e-6, hardly moves
# weights, and MXNet's, 0.5, sends next to nothing.
_TWO_BITS = "error_feedback(hips2bit(threshold=0.01))"
# Flags of the seeds whose meaning is elsewhere now, and where.
REPLACED: Mapping[tuple[str, ...], str] = {
    ("-ds", "--data-slice-idx"): "each worker has its own part; see --split and --split-over",
    ("--num-workers",): "the launcher knows; see `tf-hips run --workers`",
    ("--hostfile",): "hosts are the launcher's; see `tf-hips party --hostfile`",
    ("--comm-type",): "it had no effect; see --mode and --compression",
    ("--gather-type",): "it had no effect; see --mode",
    ("--num-aggregate",): "it had no effect; see `tf-hips server --close-at`",
    ("--kill-threshold",): "it had no effect; see `tf-hips run --deadline`",
    ("--compress-grad",): "see --compression",
    ("--log-interval",): "there is a line after each test; see --eval-duration",
    **local_training.REPLACED,
}


def mode(text: str) -> str:
    """A mode, or one of DETOX's; `normal`, as the seeds have it, is sync."""
    if text == "normal":
        return "sync"
    if text not in (*MODES, *AGGREGATIONS):
        known = (*MODES, *AGGREGATIONS)
        near = robust_training.near_mode(text) or hints.near(text, known) or "."
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(known)}{near} Received: {text!r}"
        )
    return text


def split(text: str) -> str:
    """The text of a split."""
    from tf_hips.data import splits

    try:
        return splits.parse(text).text
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def device(text: str) -> str:
    """`cpu`, `gpu0`, or several with commas: the k-th is that of a machine's k-th worker."""
    parts = [part.strip() for part in text.split(",")]
    if not all(_DEVICE.fullmatch(part) for part in parts):
        raise argparse.ArgumentTypeError(f"must be cpu, gpuN, or a list. Received: {text!r}")
    return ",".join(parts)


class _Replaced(argparse.Action):
    """A flag of a seed that is refused, with the name of what replaced it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        """Says so and exits with 2."""
        del namespace, values
        parser.error(f"{option_string} is not an option here: {self.metavar}")


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "train",
        help="train a network on a data set, in any mode",
        description="Trains one worker. Alone: this command. With others: tf-hips run [options] -- "
        "tf-hips train [options], or the same behind `tf-hips party`.",
    )
    _add_what(parser)
    _add_how(parser)
    _add_where(parser)
    links.add(parser)
    local_training.add(parser)
    robust_training.add(parser)
    file = config_file.add(parser)
    # Behind the file: it has keys for options, and these are none.
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="sets a key of --config, or `optimizer.KEY`: one of --optimizer-options, such as "
        "optimizer.weight_decay=1e-4; may be given again",
    )
    for names, advice in REPLACED.items():
        parser.add_argument(
            *names, action=_Replaced, nargs="?", metavar=advice, help=argparse.SUPPRESS
        )
    parser.set_defaults(run=lambda options: run(options, file))


def _add_what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n",
        "--network",
        required=True,
        metavar="NAME",
        help="lenet, alexnet, resnet18_v1, ...: docs/models.md",
    )
    parser.add_argument(
        *("-dt", "--dataset", "--data-type"),
        required=True,
        metavar="NAME",
        help="digits, synthetic, mnist, fashion_mnist, cifar10, image_folder, ...: docs/data.md",
    )
    parser.add_argument(
        *("-dd", "--data-dir"), metavar="DIR", help="where files and prepared data sets are"
    )
    parser.add_argument(
        "--image-size", type=arguments.count, metavar="N", help="side of images in pixels"
    )


def _add_how(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("-m", "--mode"),
        type=mode,
        metavar="MODE",
        default="sync",
        help="; ".join(f"{name}: {one.text}" for name, one in MODES.items())
        + f"; of DETOX, sync with a rule: {', '.join(AGGREGATIONS)} (default sync)",
    )
    parser.add_argument(
        *("-dcasgd", "--use-dcasgd"),
        type=arguments.switch,
        nargs="?",
        const=True,
        default=False,
        help="the mode async becomes dcasgd",
    )
    parser.add_argument(
        *("-b", "--batch-size"),
        type=arguments.count,
        metavar="N",
        default=64,
        help="samples of a step of one worker (default 64)",
    )
    parser.add_argument(
        "--epochs",
        type=arguments.count,
        metavar="N",
        help="passes through the data (default 10, or what --max-steps needs)",
    )
    parser.add_argument(
        "--max-steps", type=arguments.count, metavar="N", help="steps at which training ends"
    )
    parser.add_argument(
        *("-l", "--learning-rate", "--lr"),
        type=arguments.number,
        metavar="RATE",
        help="of the optimizer, here or on the server (default 0.01)",
    )
    parser.add_argument(
        "--momentum", type=arguments.number, metavar="M", default=0.0, help="of SGD (default 0)"
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="sgd",
        help="of modes without one on the server (default sgd)",
    )
    parser.add_argument(
        "--optimizer-options",
        type=arguments.mapping,
        metavar="JSON",
        help="""further arguments of the Keras optimizer, as '{"weight_decay": 1e-4}'; a mapping """
        "in the file of --config",
    )
    parser.add_argument(
        "--compression",
        type=arguments.codec,
        metavar="TEXT",
        help="how gradients are encoded (default: as the launcher says, or not at all)",
    )
    parser.add_argument(
        *("-gc", "--use-2bit-compression"),
        type=arguments.switch,
        nargs="?",
        const=True,
        default=False,
        help=f"the same as --compression '{_TWO_BITS}'",
    )
    parser.add_argument(
        "--split",
        type=split,
        metavar="TEXT",
        default="iid",
        help="how rows are dealt out: iid, class, class(compat), dirichlet(ALPHA), quantity(ALPHA) "
        "(default iid)",
    )
    parser.add_argument(
        *("-s", "--split-by-class"),
        type=arguments.switch,
        nargs="?",
        const=True,
        default=False,
        help="the same as --split class",
    )
    parser.add_argument(
        "--split-over",
        choices=("worker", "party"),
        default="worker",
        help="whether every worker or every party gets such a part (default worker)",
    )
    parser.add_argument(
        "--seed",
        type=arguments.seed,
        help="of everything that is random (default: the launcher's, or 0)",
    )
    parser.add_argument(
        "--steps-per-execution",
        type=arguments.count,
        metavar="N",
        default=1,
        help="steps that TensorFlow runs at a time (default 1)",
    )


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("-e", "--eval-duration"),
        type=arguments.count,
        metavar="N",
        help="steps, in modes with local steps rounds, between two tests (default: a pass through "
        "the data)",
    )
    parser.add_argument(
        *("--eval-batch-size", "--test-batch-size"),
        type=arguments.count,
        metavar="N",
        default=500,
        help="samples of a batch of tests (default 500)",
    )
    parser.add_argument(
        "--train-dir", metavar="DIR", help="write checkpoints for `tf-hips evaluate` into DIR"
    )
    parser.add_argument(
        "--eval-freq",
        type=arguments.count,
        metavar="N",
        default=50,
        help="steps between two checkpoints (default 50)",
    )
    parser.add_argument(
        "--backup-dir", metavar="DIR", help="back up into DIR, and go on from what is there"
    )
    parser.add_argument(
        "--resume-from",
        metavar="FILE",
        help="go on from a net.meta and the weights beside it, as --tree-dir writes them",
    )
    parser.add_argument("--log-dir", "-ld", metavar="DIR", help="folder for event logs")
    parser.add_argument(
        "--tensorboard", metavar="DIR", help="write scalars for TensorBoard while training goes on"
    )
    parser.add_argument(
        "--tree-dir",
        metavar="DIR",
        help="write logs as HiPS and ESync do, DIR/SITE/DEVICE/iter-N.txt and net.meta",
    )
    parser.add_argument(
        "--device",
        type=device,
        metavar="LIST",
        help="cpu or gpuN; with several, gpu0,gpu1,cpu: one for each worker of a machine (default: "
        "a GPU for each, if there are any)",
    )
    parser.add_argument(
        "-g", "--gpu", type=arguments.index, metavar="N", help="the same as --device gpuN"
    )
    parser.add_argument(
        "-c",
        *("--cpu", "--no-cuda"),
        type=arguments.switch,
        nargs="?",
        const=True,
        default=False,
        help="the same as --device cpu",
    )
    parser.add_argument(
        "--enable-gpu",
        type=arguments.switch,
        nargs="?",
        const=True,
        metavar="SWITCH",
        help="on: it is an error to have no GPU; off: the same as --device cpu",
    )


def run(options: argparse.Namespace, file: config_file.ConfigFile) -> int:
    """Checks the options and becomes the trainer."""
    optimizer_options = _set(options, file)
    merged = file.merge(options)
    if optimizer_options:
        merged.optimizer_options = {**(merged.optimizer_options or {}), **optimizer_options}
    if options.print_config:
        sys.stdout.write(file.text(merged))
        return 0
    try:
        settings = settings_of(merged)
    except ConfigError as error:
        raise arguments.UsageError(str(error)) from error
    preflight.check(settings)
    environment = dict(os.environ)
    mine = own_device(merged, environment)
    if mine is not None:
        environment[_VISIBLE] = "-1" if mine == _CPU else _visible(mine, environment)
    become("train", settings, environment)


def settings_of(options: argparse.Namespace) -> "Training":
    """What a trainer is told.

    Raises:
        UsageError: two options exclude each other.
        ConfigError: values do not fit together.
    """
    from tf_hips.trainer.settings import Training

    values = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(Training)
        if hasattr(options, field.name)
    }
    if options.split_by_class:
        if options.split not in ("iid", "class", "class(compat)"):
            raise arguments.UsageError(
                f"--split-by-class and --split exclude each other. Received: {options.split}"
            )
        values["split"] = "class" if options.split == "iid" else options.split
    values["mode"] = local_training.mode_of(options)
    values["learning_rate"] = local_training.rate_of(options)
    if options.use_dcasgd:
        if options.mode not in ("async", "dcasgd"):
            raise arguments.UsageError(f"--use-dcasgd needs --mode async. Received: {options.mode}")
        values["mode"] = "dcasgd"
    if options.use_2bit_compression:
        if options.compression not in (None, _TWO_BITS):
            raise arguments.UsageError(
                "--use-2bit-compression and --compression exclude each other"
            )
        values["compression"] = arguments.codec(_TWO_BITS)
    mine = own_device(options, os.environ)
    values["needs_gpu"] = mine not in (None, _CPU) or (mine is None and options.enable_gpu is True)
    for name in (
        *("data_dir", "train_dir", "backup_dir", "resume_from"),
        *("log_dir", "tensorboard", "tree_dir"),
    ):
        if values[name] is not None:
            values[name] = os.path.abspath(values[name])  # noqa: PTH100 - links stay
    values["links"] = links.links_of(options)
    values["local"] = local_training.local_of(options)
    values["robust"] = robust_training.robust_of(options)
    values["optimizer_options"] = options.optimizer_options or {}
    if values["learning_rate"] is not None and "learning_rate" in values["optimizer_options"]:
        raise arguments.UsageError("--learning-rate and optimizer.learning_rate exclude each other")
    return Training(**values)


def own_device(options: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """The device of this worker, `cpu` or such as `gpu0`; None: what there is.

    An evaluator whose launcher gave it no GPU has none: what the options say is for the workers.

    Raises:
        UsageError: the options say different things.
    """
    asked = [
        *([options.device] if options.device is not None else []),
        *([f"gpu{options.gpu}"] if options.gpu is not None else []),
        *([_CPU] if options.cpu or options.enable_gpu is False else []),
    ]
    if len(set(asked)) > 1 or (options.enable_gpu and asked == [_CPU]):
        raise arguments.UsageError("--device, --gpu, --cpu and --enable-gpu exclude each other")
    if config.role() == "evaluator" and environment.get(_VISIBLE) == "-1":
        return _CPU
    if not asked:
        return None
    devices = asked[0].split(",")
    local = next((int(environment[one]) for one in _LOCAL_RANKS if one in environment), 0)
    return str(devices[local % len(devices)])


def _visible(device: str, environment: Mapping[str, str]) -> str:
    """What CUDA calls `gpuN`: the N-th of what this process may see, as everywhere.

    Raises:
        UsageError: it may see fewer.
    """
    number = device.removeprefix("gpu")
    if environment.get(_VISIBLE) is None:
        return number
    given = [one.strip() for one in environment[_VISIBLE].split(",")]
    seen = list(itertools.takewhile(lambda one: one not in ("", "-1"), given))
    if int(number) >= len(seen):
        raise arguments.UsageError(
            f"--device {device} must be below the {len(seen)} GPUs that may be seen. Received: "
            f"{_VISIBLE}={environment[_VISIBLE]}"
        )
    return seen[int(number)]


def become(verb: str, settings: Any, environment: Mapping[str, str] | None = None) -> NoReturn:
    """Replaces this process by `python -m tf_hips.trainer`; settings are a dataclass."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", _MODULE, verb, json.dumps(dataclasses.asdict(settings))]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", **(os.environ if environment is None else environment)}
    os.execve(command[0], command, quiet)


def _set(options: argparse.Namespace, file: config_file.ConfigFile) -> dict[str, Any]:
    """Puts what `--set` says among the options that are given; returns the optimizer's arguments.

    Raises:
        UsageError: a key is unknown, or a value is refused.
    """
    optimizer_options: dict[str, Any] = {}
    for text in options.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise arguments.UsageError(f"--set must be KEY=VALUE. Received: {text!r}")
        if key.startswith("optimizer.") and key != "optimizer.":
            optimizer_options[key.removeprefix("optimizer.")] = arguments.plain(value)
            continue
        action = file.actions.get(key)
        if action is None:
            raise arguments.UsageError(
                f"--set must have a key of --config or optimizer.KEY. Received: {key!r}"
            )
        try:
            made = action.type(value) if callable(action.type) else value
        except argparse.ArgumentTypeError as error:
            raise arguments.UsageError(f"--set {key}: {error}") from error
        if action.choices is not None and made not in action.choices:
            raise arguments.UsageError(
                f"--set {key} must be one of {', '.join(action.choices)}. Received: {value!r}"
            )
        setattr(options, action.dest, made)
    return optimizer_options
