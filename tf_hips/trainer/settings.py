# SPDX-License-Identifier: Apache-2.0
"""What a trainer and an evaluator are told: frozen values, checked, without TensorFlow."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tf_hips.data import splits
from tf_hips.errors import ConfigError
from tf_hips.trainer import robustness
from tf_hips.trainer.links import Links
from tf_hips.trainer.local import Local
from tf_hips.trainer.modes import MODES, OPTIMIZERS, check_options
from tf_hips.trainer.robustness import Robust


@dataclasses.dataclass(frozen=True)
class Training:
    """One run of `tf-hips train`, as one worker is told.

    Attributes:
        network: name of a network, as `tf_hips.models.make` knows it.
        dataset: name of a data set, as `tf_hips.data.sets.load` knows it.
        data_dir: where files and prepared data sets are; None: tensorflow-datasets' own folder.
        image_size: side in pixels that images are given; None: as they are.
        mode: one of `MODES`.
        batch_size: samples of a worker's step.
        epochs: passes through the data; None: 10, or as many as `max_steps` needs.
        max_steps: steps of a worker after which training ends; None: only `epochs` counts.
        learning_rate: of the optimizer, here or on the server; None: that of the server's rule, or
            0.01.
        momentum: of SGD.
        optimizer: one of `OPTIMIZERS`.
        optimizer_options: further arguments of the Keras optimizer.
        compression: how gradients are encoded; None: as the launcher says, or not at all.
        split: how rows are dealt out, as `tf_hips.data.splits` reads it.
        split_over: whether every worker or every party gets a part of that kind.
        eval_duration: steps, or in modes with local steps rounds, between two tests; None: one
            after each pass.
        eval_batch_size: samples of a batch of the tests.
        train_dir: folder of checkpoints for an evaluator; None: there are none.
        eval_freq: steps between two checkpoints.
        backup_dir: folder of backups to go on from; None: there are none.
        resume_from: a `net.meta` to go on from, or the folder that has one; None: there is none.
        log_dir: folder for event logs; None: as the launcher says.
        tensorboard: folder for TensorBoard's scalars; None: there are none.
        tree_dir: folder for logs as HiPS and ESync write them; None: there are none.
        seed: of everything that is random; None: that of the run.
        steps_per_execution: steps that TensorFlow runs at a time.
        needs_gpu: whether it is an error to have no GPU.
        links: how gradients travel, beside `compression`.
        local: options of modes with local steps.
        robust: options of robust rules and of liars.
    """

    network: str
    dataset: str
    data_dir: str | None = None
    image_size: int | None = None
    mode: str = "sync"
    batch_size: int = 64
    epochs: int | None = None
    max_steps: int | None = None
    learning_rate: float | None = None
    momentum: float = 0.0
    optimizer: str = "sgd"
    optimizer_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compression: str | None = None
    split: str = "iid"
    split_over: str = "worker"
    eval_duration: int | None = None
    eval_batch_size: int = 500
    train_dir: str | None = None
    eval_freq: int = 50
    backup_dir: str | None = None
    resume_from: str | None = None
    log_dir: str | None = None
    tensorboard: str | None = None
    tree_dir: str | None = None
    seed: int | None = None
    steps_per_execution: int = 1
    needs_gpu: bool = False
    links: Links = dataclasses.field(default_factory=Links)
    local: Local = dataclasses.field(default_factory=Local)
    robust: Robust = dataclasses.field(default_factory=Robust)

    def __post_init__(self) -> None:
        """Checks what can be checked without the data.

        Raises:
            ConfigError: a value is out of range, or two exclude each other.
        """
        _check_one_of("mode", self.mode, MODES)
        _check_one_of("optimizer", self.optimizer, OPTIMIZERS)
        _check_one_of("split_over", self.split_over, splits.LEVELS)
        splits.parse(self.split)
        for name in (
            *("batch_size", "epochs", "max_steps", "image_size", "eval_duration"),
            *("eval_batch_size", "eval_freq", "steps_per_execution"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` must be at least 1. Received: {name}={value}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise ConfigError(
                f"`learning_rate` must be positive. Received: learning_rate={self.learning_rate}"
            )
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"`momentum` must be in [0, 1). Received: {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(
                f"`momentum` is for sgd. Received: momentum={self.momentum}, "
                f"optimizer={self.optimizer}"
            )
        if self.resume_from is not None and self.backup_dir is not None:
            raise ConfigError(
                "`resume_from` and `backup_dir` exclude each other: a backup holds all that a run "
                f"needs. Received: resume_from={self.resume_from}, backup_dir={self.backup_dir}"
            )
        check_options(self.mode, self.local)
        robustness.check(self.mode, self.robust)
        MODES[self.mode].check(self)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One run of `tf-hips evaluate`.

    Attributes:
        model_dir: folder of checkpoints, as `tf_hips.callbacks.StepCheckpoint` writes them.
        network: name of the network; None: as the checkpoints say.
        dataset: name of the data set; None: as the checkpoints say.
        data_dir: where files and prepared data sets are; None: tensorflow-datasets' own folder.
        image_size: side in pixels that images are given; None: as the checkpoints say.
        eval_freq: steps between two checkpoints that are evaluated; 1: all of them.
        eval_batch_size: samples of a batch.
        follow: whether to wait for more checkpoints until training has ended.
        timeout_s: seconds without a new checkpoint after which a follower gives up; None: it does
            not, since somebody else ends it where training does not.
        poll_s: seconds between two looks at the folder.
        output: file of JSON lines; None: `evaluations.jsonl` in `model_dir`.
        log_dir: folder for event logs; None: as the launcher says.
    """

    model_dir: str
    network: str | None = None
    dataset: str | None = None
    data_dir: str | None = None
    image_size: int | None = None
    eval_freq: int = 1
    eval_batch_size: int = 500
    follow: bool = False
    timeout_s: float | None = 3600.0
    poll_s: float = 1.0
    output: str | None = None
    log_dir: str | None = None

    def __post_init__(self) -> None:
        """Checks all numbers.

        Raises:
            ConfigError: one is out of range.
        """
        for name in ("eval_freq", "eval_batch_size", "timeout_s", "poll_s", "image_size"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"`{name}` must be positive. Received: {name}={value}")


@dataclasses.dataclass(frozen=True)
class Show:
    """`tf-hips data show`.

    Attributes:
        name: the data set to read and describe; None: list those that are known by name.
        data_dir: where files and prepared data sets are; None: tensorflow-datasets' own folder.
        image_size: side in pixels that images are given; None: as they are.
        split: how rows would be dealt out; None: they are not.
        split_over: whether every worker or every party gets a part of that kind.
        parties: workers of each party.
        seed: of the split.
    """

    name: str | None = None
    data_dir: str | None = None
    image_size: int | None = None
    split: str | None = None
    split_over: str = "worker"
    parties: tuple[int, ...] = (1,)
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Prepare:
    """`tf-hips data prepare`.

    Attributes:
        name: the data set.
        data_dir: where to; None: tensorflow-datasets' own folder.
        source: folder of its publisher's files or of images; None: it is fetched.
        manual_dir: folder of files that tensorflow-datasets cannot fetch itself.
        image_size: side in pixels that images of a folder are given.
    """

    name: str
    data_dir: str | None = None
    source: str | None = None
    manual_dir: str | None = None
    image_size: int | None = None


def _check_one_of(name: str, value: str, known: Any) -> None:
    if value not in known:
        raise ConfigError(f"`{name}` must be one of {', '.join(known)}. Received: {value!r}")
