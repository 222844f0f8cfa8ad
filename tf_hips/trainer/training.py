# SPDX-License-Identifier: Apache-2.0
"""One run of `tf-hips train` on one worker."""

import dataclasses
import math
import os
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tf_hips import callbacks, config, log, models
from tf_hips.callbacks.optimizers import counter
from tf_hips.callbacks.peers import Peers
from tf_hips.comm import primitives
from tf_hips.data import sets, splits
from tf_hips.errors import ConfigError, is_final
from tf_hips.robust.adversary import Lone
from tf_hips.strategies import simulate_liars
from tf_hips.strategies.hierarchical_ps import HierarchicalPS
from tf_hips.strategies.party import PartyStrategy
from tf_hips.trainer import evaluator, resuming, sources
from tf_hips.trainer.backing_up import Backup, began, has_backup
from tf_hips.trainer.modes import MODES
from tf_hips.trainer.progress import Plan, Progress, StopAt
from tf_hips.trainer.rounds import CountedESync, MetBackup, MetCheckpoint, RoundProgress, Rounds
from tf_hips.trainer.settings import Evaluation, Training
from tf_hips.trainer.tensorboard import Board
from tf_hips.trainer.ways import WORKERS_VARIABLE, Way, rate_of

DEFAULT_EPOCHS = 10
_GPUS = "CUDA_VISIBLE_DEVICES"


def run(settings: Training) -> None:
    """Trains, or evaluates where this process is the run's evaluator.

    Raises:
        ConfigError: settings, data and workers do not fit together.
    """
    if config.role() == "evaluator":
        if settings.train_dir is None:
            raise ConfigError("An evaluator needs checkpoints: --train-dir DIR. Received: none")
        evaluator.run(
            Evaluation(
                model_dir=settings.train_dir,
                network=settings.network,
                dataset=settings.dataset,
                data_dir=settings.data_dir,
                image_size=settings.image_size,
                eval_batch_size=settings.eval_batch_size,
                follow=True,
                # A launcher sees workers fail, and ends the evaluator; its own failure would end
                # them.
                timeout_s=None if evaluator.run_of_launcher() else Evaluation.timeout_s,
                log_dir=settings.log_dir,
            )
        )
        return
    _check_device(settings)
    told = config.current()
    if config.CONFIG_VARIABLE not in os.environ and os.environ.get(WORKERS_VARIABLE, "1") == "1":
        # A folder of logs may hold several runs; only a launcher gives each a name.
        told = dataclasses.replace(told, run=f"train-{uuid.uuid4().hex[:12]}")
    if settings.seed is not None:
        told = dataclasses.replace(told, seed=settings.seed)
    if settings.log_dir is not None:
        told = dataclasses.replace(told, log_dir=settings.log_dir)
    if told.log_dir is not None:
        try:
            Path(told.log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"Events cannot be written to {told.log_dir}: {error.strerror or error}"
            ) from error
    try:
        name = models.canonical(settings.network)
    except ValueError as error:
        raise ConfigError(f"--network: {error}") from error
    data = sets.load(settings.dataset, settings.data_dir, image_size=settings.image_size)
    keras.utils.set_random_seed(told.seed % (1 << 32))
    way = MODES[settings.mode].make(settings, told)
    try:
        _train(settings, told, name, data, way)
    except BaseException as error:
        if isinstance(way.strategy, HierarchicalPS):
            # Else the others wait for this party until they give it up.
            way.strategy.close(f"{type(error).__name__}: {error}")
        raise


def _train(settings: Training, told: config.Run, name: str, data: sets.DataSet, way: Way) -> None:
    strategy = way.strategy
    if settings.tensorboard is not None:
        site = told.uplink.site if told.uplink is not None else "local"
        strategy.events.listen(Board(settings.tensorboard, site, primitives.rank()).hear)
    write_event, rank = strategy.write_event, strategy.global_rank
    workers = sources.num_workers(strategy)
    if way.crowd is None:
        lone = _lone(settings, strategy, told, way.level)
        flips = lone is not None and lone.flips_labels
        source = sources.make(settings, data, strategy, told.seed, way.level, flips_labels=flips)
    else:
        workers = way.crowd.workers
        source = way.crowd.source(settings, data, strategy, told.seed)
    with strategy.scope():
        try:
            model = models.make(name, data.shape, data.classes)
        except ValueError as error:
            raise ConfigError(
                f"The data set {data.name} does not fit --network: {error}"
            ) from error
        model.compile(
            optimizer=way.optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=settings.steps_per_execution,
        )
    if way.crowd is not None:
        way.crowd.play(model, strategy)
    resumed = None if settings.resume_from is None else resuming.find(settings.resume_from)
    if resumed is not None:
        resuming.load(model, resumed, f"{name} for {data.name}")
    rounds = None if way.rounds is None else way.rounds(model, source)
    num_steps = _num_steps(settings, source.steps_of_pass, rounds)
    # Loops count from their first round on.
    done = 0 if resumed is None or rounds is not None else resumed.steps
    if resumed is not None and done == 0:
        counter(model.optimizer).assign(0)
    if done >= num_steps:
        raise ConfigError(
            f"A run that goes on must have steps left. Received: {done} of {num_steps} steps were "
            "made; give more `epochs` or `max_steps`"
        )
    if rounds is None:
        interval = min(settings.eval_duration or source.steps_of_pass, num_steps)
    else:
        interval = rounds.interval(settings, source.steps_of_pass, num_steps)
    varies = rounds is not None and rounds.steps is None
    if not varies:  # else the loop ends its last rounds itself
        model.steps_per_execution = _whole_executions(
            settings.steps_per_execution, interval, num_steps - done, rank == 0
        )
    if rank == 0:
        sys.stdout.write(
            f"{name} of {model.count_params()} parameters on {data.name} ({len(data.train)} rows, "
            f"{data.classes} classes), mode {settings.mode}, {workers} "
            f"worker{'s' if workers > 1 else ''}, "
            f"{f'{num_steps * workers} steps of all' if varies else f'{num_steps} steps'}\n"
        )
        sys.stdout.flush()
    rate = rate_of(settings, way)
    facts = {"network": name, "dataset": data.name, "image_size": settings.image_size}
    write_event(
        "setup",
        mode=settings.mode,
        split=splits.parse(settings.split).text,
        batch_size=settings.batch_size,
        workers=workers,
        rows=source.num_rows,
        steps=num_steps,
        device=_device(),
        **facts,
    )
    # Workers of a group that votes have one batch: one process makes its gradient once.
    batches = 1 if way.crowd is None else way.crowd.seats
    steps_of_pass = source.steps_of_pass
    samples_of_step = float(settings.batch_size * (workers if way.crowd is None else batches))
    if rounds is not None and rounds.epochs and rounds.steps:  # each has its own pass
        steps_of_pass = rounds.steps // rounds.epochs
        samples_of_step = len(data.train) / steps_of_pass
    plan = Plan(
        num_steps=num_steps * workers if varies else num_steps,
        steps_of_pass=steps_of_pass,
        batch_size=settings.batch_size,
        workers=workers,
        samples_of_step=samples_of_step,
        learning_rate=rate,
        tree=_tree(settings, told),
        is_first=rank == 0,
        begin_s=None if resumed is None else resumed.begin_s,
        batches=batches,
    )
    progress, used = _progress(plan, way, rounds, source)
    checkpoint = None
    if settings.train_dir is not None:
        named = {**facts, "run": told.run}
        if settings.backup_dir is not None and primitives.rank() == 0:
            # A run that is killed before its first backup begins again, and may have checkpoints.
            named["began"] = began(
                settings.backup_dir, told, {**facts, **_identity(settings, told, rate)}
            )
        checkpoint = _checkpoint(settings, rounds, named)
        used.append(checkpoint)
    if settings.backup_dir is not None:
        used.append(_backup(settings.backup_dir, rounds, model, num_steps))
    first = -(-done // interval)
    begin = time.monotonic()
    try:
        (model if rounds is None else rounds.loop).fit(
            x=source.train,
            initial_epoch=first,
            epochs=first + -(-(num_steps - done) // interval),
            steps_per_epoch=interval,
            validation_data=None if varies else source.test,
            callbacks=used,
            shuffle=False,
            verbose=0,
        )
    except BaseException as error:
        # Who is told to stop does not come back, nor whom no restart would heal.
        comes_back = told.comes_back and isinstance(error, Exception) and not is_final(error)
        if checkpoint is not None and not comes_back:
            checkpoint.end(f"{type(error).__name__}: {error}")
        raise
    finally:
        progress.end()
    seconds = time.monotonic() - begin
    result = model.evaluate(source.test, verbose=0, return_dict=True)
    accuracy = float(result["accuracy"])
    from tf_hips.strategies import fingerprint

    write_event("result", test_accuracy=accuracy, fingerprint=fingerprint(model), seconds=seconds)
    if rank == 0:
        sys.stdout.write(
            f"test accuracy {accuracy:.4f} after {Peers(model).steps_made(model.optimizer)} steps "
            f"in {seconds:.1f} s\n"
        )
        sys.stdout.flush()


def _lone(
    settings: Training, strategy: PartyStrategy, told: config.Run, level: str | None = None
) -> Lone | None:
    """What this worker is where some lie; None: nobody does.

    Args:
        settings: who lies, and how.
        strategy: of this worker.
        told: the run.
        level: of the loop that will have the uplink; None: there will be none.
    """
    adversary = settings.robust.adversary(told.seed)
    if adversary is None:
        return None
    if strategy.groups is not None:  # the rule may be that of the launcher
        settings.robust.check_groups(strategy.groups.votes.r)
    lone = simulate_liars(strategy, adversary, level=level)
    if lone.may_lie or lone.flips_labels:
        strategy.write_event("lies", attack=adversary.text, is_redrawn=adversary.is_redrawn)
    return lone


def _num_steps(settings: Training, steps_of_pass: int, rounds: Rounds | None = None) -> int:
    """Steps of a worker in the whole run: as many as `epochs` make, and at most `max_steps`.

    Where a round is some passes of a worker's own rows, as many rounds as `epochs` make.
    """
    if rounds is not None and rounds.epochs and rounds.steps and settings.max_steps is None:
        return -(-(settings.epochs or DEFAULT_EPOCHS) // rounds.epochs) * rounds.steps
    if settings.epochs is None and settings.max_steps is not None:
        return settings.max_steps
    whole = (settings.epochs or DEFAULT_EPOCHS) * steps_of_pass
    return min(whole, settings.max_steps or whole)


def _whole_executions(asked: int, interval: int, left: int, is_first: bool) -> int:
    """Steps that TensorFlow runs at a time, at most `asked`, so that none passes a test or the end.

    Of data that go on, Keras takes whole executions: it would train beyond what was asked for.
    """
    common = math.gcd(interval, left)
    number = next(n for n in range(min(asked, common), 0, -1) if common % n == 0)
    if number < asked and is_first:
        log.warning(
            "TensorFlow runs %d steps at a time, not %d: tests are every %d steps, %d are left.",
            number,
            asked,
            interval,
            left,
        )
    return number


def _progress(
    plan: Plan, way: Way, rounds: Rounds | None, source: sources.Source
) -> tuple[Progress, list[keras.callbacks.Callback]]:
    """What tells of the run, and the callbacks that it takes."""
    write_event = way.strategy.write_event
    if rounds is not None and isinstance(rounds.loop, CountedESync):
        progress: Progress = RoundProgress(plan, write_event, rounds.loop, source.test)
        return progress, [progress]
    if rounds is not None:
        loop = rounds.loop
        progress = Progress(plan, write_event, lambda: loop.seconds_in_meetings, is_own=True)
    else:
        strategy = way.strategy
        waited = (
            (lambda: strategy.seconds_in_rounds)
            if isinstance(strategy, HierarchicalPS) and strategy.has_server
            else None
        )
        progress = Progress(plan, write_event, waited)
    return progress, [StopAt(plan.num_steps), progress]


def _checkpoint(
    settings: Training, rounds: Rounds | None, facts: dict[str, Any]
) -> callbacks.StepCheckpoint:
    """Writes checkpoints for an evaluator; of weights that all have."""
    if rounds is None:
        return callbacks.StepCheckpoint(str(settings.train_dir), settings.eval_freq, facts=facts)
    made = MetCheckpoint(str(settings.train_dir), settings.eval_freq, facts=facts)
    made.loop = rounds.loop
    return made


def _backup(
    directory: str, rounds: Rounds | None, model: keras.Model, num_steps: int
) -> callbacks.BackupAndRestore:
    """Backs up after each test."""
    if rounds is not None and isinstance(rounds.loop, CountedESync):
        return MetBackup(directory, rounds.loop)
    return Backup(directory, lambda: num_steps - Peers(model).steps_made(model.optimizer))


def _identity(settings: Training, told: config.Run, rate: float) -> dict[str, Any]:
    """What makes two runs different that train the same network on the same data: JSON values."""
    return {
        "mode": settings.mode,
        "split": splits.parse(settings.split).text,
        "batch_size": settings.batch_size,
        "learning_rate": rate,
        "seed": told.seed,
    }


def _tree(settings: Training, told: config.Run) -> Path | None:
    """The folder of this worker's tree, emptied of an older run's files, unless that goes on."""
    if settings.tree_dir is None:
        return None
    site = told.uplink.site if told.uplink is not None else "local"
    device = _device()
    # Several may share a GPU, and a party's machines a file system.
    devices = primitives.gather_objects(device, "the devices of this party")
    before = devices[: primitives.rank()].count(device)
    folder = Path(settings.tree_dir) / site.replace("/", "-")
    folder /= f"{device}-{before}" if before else device
    goes_on = (
        settings.resume_from is not None and resuming.is_of(settings.resume_from, settings.tree_dir)
    ) or (settings.backup_dir is not None and has_backup(settings.backup_dir, told))
    try:
        if not goes_on:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=goes_on)
    except OSError as error:
        raise ConfigError(
            f"Logs cannot be written to {folder}: {error.strerror or error}"
        ) from error
    return folder


def _device() -> str:
    """`cpu`, or `gpu` and the number that the machine gives it."""
    gpus = tf.config.list_logical_devices("GPU")
    if not gpus:
        return "cpu"
    local = primitives.local_worker() % len(gpus)
    visible = [one for one in os.environ.get(_GPUS, "").split(",") if one]
    return f"gpu{visible[local] if local < len(visible) else local}"


def _check_device(settings: Training) -> None:
    if settings.needs_gpu and not tf.config.list_physical_devices("GPU"):
        visible = os.environ.get(_GPUS)
        named = f" with {_GPUS}={visible}" if visible is not None else ""
        raise ConfigError(
            f"--gpu and --enable-gpu need a GPU that TensorFlow can use. Received: none{named}"
        )
