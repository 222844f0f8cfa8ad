# SPDX-License-Identifier: Apache-2.0
"""`tf-hips evaluate`: loss, top-1 and top-5 accuracy of a run's checkpoints, as they appear."""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from tf_hips.cli import arguments, config_file, preflight, train
from tf_hips.errors import ConfigError

_PATHS = ("model_dir", "data_dir", "output", "log_dir")


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "evaluate",
        help="follow the checkpoints of a run and evaluate them",
        description="Evaluates the checkpoints of `tf-hips train --train-dir` or of "
        "`tf_hips.callbacks.StepCheckpoint`, in order; one line of JSON for each.",
    )
    parser.add_argument(
        "--model-dir", required=True, metavar="DIR", help="folder of the checkpoints"
    )
    parser.add_argument(
        *("-n", "--network"), metavar="NAME", help="the network, if the checkpoints do not say it"
    )
    parser.add_argument(
        *("-dt", "--dataset", "--data-type"),
        metavar="NAME",
        help="the data set, if the checkpoints do not say it",
    )
    parser.add_argument(
        *("-dd", "--data-dir"), metavar="DIR", help="where files and prepared data sets are"
    )
    parser.add_argument(
        "--image-size", type=arguments.count, metavar="N", help="side of images in pixels"
    )
    parser.add_argument(
        "--eval-freq",
        type=arguments.count,
        metavar="N",
        default=1,
        help="evaluate one checkpoint every N steps (default: all)",
    )
    parser.add_argument(
        *("--eval-batch-size", "--test-batch-size"),
        type=arguments.count,
        metavar="N",
        default=500,
        help="samples of a batch (default 500)",
    )
    parser.add_argument(
        "--follow", action="store_true", help="wait for more until training has ended"
    )
    parser.add_argument(
        "--timeout",
        dest="timeout_s",
        type=arguments.seconds,
        metavar="S",
        default=3600.0,
        help="seconds without a new checkpoint after which --follow gives up (default 3600)",
    )
    parser.add_argument(
        "--poll",
        dest="poll_s",
        type=arguments.seconds,
        metavar="S",
        default=1.0,
        help="seconds between two looks at the folder (default 1)",
    )
    parser.add_argument(
        *("-o", "--output"),
        metavar="FILE",
        help="where lines of JSON go (default: evaluations.jsonl in the folder)",
    )
    parser.add_argument("--log-dir", metavar="DIR", help="folder for event logs")
    parser.add_argument("--cpu", action="store_true", help="leave the GPUs to the trainers")
    file = config_file.add(parser)
    parser.set_defaults(run=lambda options: run(options, file))


def run(options: argparse.Namespace, file: config_file.ConfigFile) -> int:
    """Checks the options and becomes the evaluator."""
    from tf_hips.trainer.settings import Evaluation

    merged = file.merge(options)
    if options.print_config:
        print(file.text(merged), end="")
        return 0
    names = [field.name for field in dataclasses.fields(Evaluation)]
    values = {name: getattr(merged, name) for name in names}
    for name in _PATHS:
        if values[name] is not None:
            values[name] = os.path.abspath(values[name])  # noqa: PTH100 - links stay
    try:
        settings = Evaluation(**values)
    except ConfigError as error:
        raise arguments.UsageError(str(error)) from error
    if not settings.follow and not Path(settings.model_dir).is_dir():
        raise arguments.UsageError(
            "--model-dir must be a folder of checkpoints; --follow waits for one. Received: "
            f"{settings.model_dir}"
        )
    if settings.network is not None:
        preflight.check_network(settings.network)
    if settings.dataset is not None:
        preflight.check_data(settings.dataset, settings.data_dir)
    environment = dict(os.environ)
    if merged.cpu:
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    train.become("evaluate", settings, environment)
