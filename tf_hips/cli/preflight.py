# SPDX-License-Identifier: Apache-2.0
"""What `tf-hips train` can know of a run before TensorFlow is there: seconds, not minutes, lost."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tf_hips import config
from tf_hips.cli import arguments
from tf_hips.errors import ConfigError, TfHipsError

if TYPE_CHECKING:
    from tf_hips.trainer.settings import Training

_TEXT_SETS = ("synthetic_text",)
# Folders that a run writes into, some of them long after it began.
_FOLDERS = ("train_dir", "backup_dir", "log_dir", "tensorboard", "tree_dir")
_WORKERS_VARIABLE = "HOROVOD_SIZE"


def check(settings: "Training") -> None:
    """Looks at names, files, the launcher and the rule of simulated workers.

    Raises:
        UsageError: the run would end at once, or in its first step.
    """
    check_network(settings.network)
    check_data(settings.dataset, settings.data_dir)
    _check_fit(settings.network, settings.dataset)
    if settings.resume_from is not None and not Path(settings.resume_from).exists():
        raise arguments.UsageError(
            "--resume-from must be a net.meta, or a folder with one. Received: "
            f"{settings.resume_from}, which is not there"
        )
    for name in _FOLDERS:
        _check_folder(f"--{name.replace('_', '-')}", getattr(settings, name))
    _check_tolerance(settings)
    if config.role() == "worker":
        _check_launcher(settings)


def check_network(name: str) -> None:
    """Raises UsageError where there is no such network."""
    from tf_hips.models import names

    try:
        names.canonical(name)
    except ValueError as error:
        raise arguments.UsageError(_of_option("--network", "name", error)) from error


def check_data(name: str, folder: str | None) -> None:
    """Raises UsageError where a data set is neither known nor prepared."""
    from tf_hips.data.sets import names

    place = names.default_folder() if folder is None else Path(folder)
    wrong = names.unknown(name, place)
    if wrong is not None:
        raise arguments.UsageError(f"--dataset {wrong}")


def _check_folder(option: str, folder: str | None) -> None:
    """Raises UsageError where a folder is none and cannot become one, or takes no files."""
    if folder is None:
        return
    path = Path(folder)
    there = next(one for one in (path, *path.parents) if one.exists())
    try:
        # Permissions alone do not tell: of a file system without room or for reading only.
        with tempfile.TemporaryFile(dir=there):
            return
    except NotADirectoryError:
        why = "which is a file"
    except OSError as error:
        why = f"which takes no files: {error.strerror}"
    what = "" if there == path else f"{there}, "
    raise arguments.UsageError(
        f"{option} must be a folder, or one that can be made. Received: {path}: {what}{why}"
    )


def _check_fit(network: str, dataset: str) -> None:
    """Raises UsageError where one is of texts and the other, which is one of ours, of images."""
    from tf_hips.data.sets import names as sets
    from tf_hips.models import names as models

    network, dataset = models.canonical(network), sets.canonical(dataset)
    takes_texts = network in models.TEXT_NETWORKS
    if dataset in sets.NAMES and takes_texts != (dataset in _TEXT_SETS):
        wanted, found = ("texts", "images") if takes_texts else ("images", "texts")
        raise arguments.UsageError(
            f"--network {network} needs a data set of {wanted}. Received: --dataset {dataset}, "
            f"which is of {found}"
        )


def _check_tolerance(settings: "Training") -> None:
    """Raises UsageError where simulated workers are too few for their rule."""
    told = settings.robust
    rule = told.detox() if told.simulated_workers is not None else None
    if told.simulated_workers is None or rule is None:
        return
    try:
        rule.check(told.simulated_workers)
    except (TfHipsError, ValueError) as error:
        liars = "" if told.worker_fail is None else f" and --worker-fail {told.worker_fail}"
        raise arguments.UsageError(
            f"--simulated-workers {told.simulated_workers} must be enough for the rule{liars}: "
            f"{error}"
        ) from error


def _check_launcher(settings: "Training") -> None:
    """Raises UsageError where a mode or an option needs others, and this process is by itself."""
    from tf_hips.trainer.modes import MODES

    mode, is_served = settings.mode, config.current().uplink is not None
    if MODES[mode].needs == "server" and not is_served:
        raise arguments.UsageError(
            f"--mode {mode} needs a server: `tf-hips run`, `tf-hips party --server`. Received: none"
        )
    # Not a number: the trainer says so.
    is_alone = os.environ.get(_WORKERS_VARIABLE, "1") == "1"
    if MODES[mode].needs == "workers" and is_alone and not is_served:
        raise arguments.UsageError(
            f"--mode {mode} is for several workers: `tf-hips run`, `tf-hips party --server`; one "
            "by itself trains with --mode local. Received: one worker"
        )
    try:
        settings.links.check_way(has_server=is_served)
    except ConfigError as error:
        raise arguments.UsageError(str(error)) from error


def _of_option(option: str, name: str, error: ValueError) -> str:
    """An error of an argument as one of the option: without its name at both ends."""
    return str(error).replace(f"`{name}`", option).replace(f"{name}=", "")
