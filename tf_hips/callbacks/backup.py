# SPDX-License-Identifier: Apache-2.0
"""`BackupAndRestore`: a run that is stopped at any moment goes on at the step, bit for bit.

Written together, into one directory for all ranks of a party; of several parties, each has a folder
of its name in there:

    meta.json          what the run must be to go on: workers, compression, seed, model; position,
                       and how the data count their epochs
    shared.*           variables that are equal on all ranks, by rank 0
    rank-<r>.*         variables that are not
    rank-<r>.strategy.* residuals and numbers of steps of the strategy
    rank-<r>.json      History so far, and what Keras' callbacks remember
    best-weights-<n>.* those that an EarlyStopping holds, by rank 0

Restored in two parts: all of it before the first epoch; and in the middle of an epoch once more
after callbacks have begun the epoch, because they and Keras (which resets metrics) have changed
what was right at its beginning.

Invariant: a backup is whole or not seen (see `folder`), and all ranks take up the same one.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips import log
from tf_hips.callbacks import optimizers, others, resuming, seals, snapshot
from tf_hips.callbacks.changes import changes
from tf_hips.callbacks.choosing import Choice
from tf_hips.callbacks.folder import Backup, BackupFolder, damaged, read_json, sync
from tf_hips.callbacks.handover import IS_OF_OTHERS, meta_of
from tf_hips.callbacks.peers import Peers
from tf_hips.callbacks.snapshot import Entry
from tf_hips.callbacks.writing import Writing

_FORMAT = 3
_ALL, _OWN = "all", "own"  # whose training a backup says that it stopped


class BackupAndRestore(keras.callbacks.Callback):
    """Backs a run up while `fit` trains, and goes on from the last backup when it begins.

        model.fit(
            tf_hips.shard((x, y), 32), epochs=10,
            callbacks=[tf_hips.callbacks.BackupAndRestore("backup", save_freq=100)],
        )

    Give it to `fit` on all workers, with one directory for all ranks of a party, on a file system
    that all of them see; parties may share it. It moves itself to the end of the callbacks, so it
    saves what the others have changed. What is restored, and what is not: docs/resume.md. A disk
    that is full ends no run: what could not be written is said, and the older backups stay.
    """

    def __init__(
        self,
        directory: str | Path,
        save_freq: int | str = "epoch",
        *,
        keep: int = 2,
        delete_checkpoint: bool = True,
    ) -> None:
        """Plans backups; nothing is read or written before `fit`.

        Args:
            directory: where backups are, for this run alone.
            save_freq: "epoch", or a number of steps between two backups, counted through all
                epochs.
            keep: backups to keep; the newest is taken up. Parties that stop at different moments
                need 2.
            delete_checkpoint: whether to delete the backups when `fit` has made its last epoch;
                behind a server they stay until this process has left the run, so that one that is
                killed behind `fit` loses nothing. One that was stopped before
                (`model.stop_training`) leaves a backup.

        Raises:
            ValueError: an argument is out of range.
        """
        super().__init__()
        is_number = isinstance(save_freq, int) and not isinstance(save_freq, bool)
        if save_freq != "epoch" and not (is_number and int(save_freq) >= 1):
            raise ValueError(
                '`save_freq` must be "epoch" or a number of steps, at least 1. '
                f"Received: save_freq={save_freq!r}"
            )
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1. Received: keep={keep}")
        if not str(directory):
            raise ValueError("`directory` must not be empty. Received: directory=''")
        self._directory = Path(directory)
        self._folder = BackupFolder(directory)
        self._save_freq = save_freq
        self._keep = keep
        self._delete = delete_checkpoint
        self._forget()

    def _forget(self) -> None:
        self._resumed: Backup | None = None
        self._is_back = False
        self._had_stopped = False  # whether the `fit` that comes back makes no further step
        self._epoch = 0
        self._last_step = 0
        self._steps_since = 0
        self._is_due = False
        self._is_cut = False  # whether an epoch was stopped in its middle
        self._next_epoch = 0

    def set_model(self, model: keras.Model) -> None:
        """Remembers the model, and comes after the other callbacks from now on."""
        super().set_model(model)
        self._peers = Peers(model)
        # Parties count and write their backups each for itself.
        site = self._peers.site
        self._folder = BackupFolder(self._directory / site if site else self._directory)
        self._writing = Writing(self._peers, self._folder)
        self._others = resuming.put_last(self)

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes up the last backup, if there is one.

        Raises:
            ValueError: the backup is of another run; says what is different.
            FileNotFoundError: the ranks do not share the directory.
            PeerError: another rank cannot take it up.
        """
        self._forget()
        self._fit = 1 + self._folder.num_over
        # Before the first step: steps and callbacks may freeze layers, each time alike.
        self._trainable = snapshot.trainable(self.model) if self.model.built else None
        resuming.begin_anew(self.model)
        self._probe()
        num_steps = (self.params or {}).get("steps")
        has_run = self._peers.backups is not None
        first_epoch = resuming.initial_epoch(self.model) if has_run else 0
        choice = Choice(self._peers, self._folder, self._check, num_steps, first_epoch)
        backup = choice.backup()
        self._is_back = choice.is_back
        self._offer(self._folder.newest)
        if backup is None:
            return
        self._peers.together(lambda: self._check(backup))
        self._restore(backup)
        self._resumed = backup
        self._next_epoch = backup.epoch
        meta = meta_of(self._folder, backup)
        if self._peers.strategy is not None:
            resuming.go_on_counting(self.model, meta["data_offset"])
        resuming.go_on(self.model, backup.epoch, backup.step)
        self._outer_epoch = self.model._initial_epoch
        self.model._initial_epoch = backup.epoch
        stops = meta.get("stops")
        if self._is_back and stops and (stops == _ALL or not meta.get(IS_OF_OTHERS)):
            # Behind this backup no step was made. Keras has made this False already.
            self._had_stopped = self.model.stop_training = True
            if not backup.step:
                self.model._initial_epoch = max(backup.epoch, (self.params or {})["epochs"])
        if self._peers.rank == 0:  # a warning, because workers show nothing less
            log.warning("Goes on at step %d of epoch %d.", backup.step, backup.epoch + 1)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Leaves out the steps of a resumed epoch that have been done."""
        self._epoch = epoch
        self._last_step = 0
        self._is_cut = False
        backup = self._resumed
        if backup is None or backup.epoch != epoch:
            return
        # Keras does not reset it: the next `fit` of this model would begin here.
        self.model._initial_epoch = self._outer_epoch
        if self._peers.strategy is None:
            resuming.set_epoch(self.model, epoch)  # a strategy tells its data itself
        if backup.step:
            self._last_step = backup.step
            self._is_cut = self._had_stopped
            resuming.leave_out(
                self.model,
                epoch,
                backup.step,
                lambda batch: self._restore_again(backup, batch),
                is_over=self._had_stopped,
                is_of_others=bool(meta_of(self._folder, backup).get(IS_OF_OTHERS)),
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves every `save_freq` steps, and when something stops the epoch here."""
        step = batch + 1
        self._steps_since += step - self._last_step
        self._last_step = step
        num_steps = (self.params or {}).get("steps")
        is_last = num_steps is not None and step >= num_steps
        is_due = self._save_freq != "epoch" and self._steps_since >= int(self._save_freq)
        if is_due:
            self._steps_since = 0
        if is_last:
            self._is_due = is_due  # after validation, and what the other callbacks do then
        elif self.model.stop_training:
            # All ranks stop here, or none may: one that goes on alone is an error.
            self._is_cut = True
            if all(self._peers.gather(_is_sane(logs))):
                self._save(self._epoch, step)
        elif is_due:
            self._save(self._epoch, step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves at the end of an epoch, and always where it is the last because something stops.

        What stops because of a loss that is no number is not saved: better what was before.
        """
        is_due, self._is_due = self._save_freq == "epoch" or self._is_due, False
        if self._is_cut:
            return
        self._next_epoch = epoch + 1
        wishes = self._peers.gather_from_all(
            [bool(self.model.stop_training), _is_sane(logs)], "backups before a stop"
        )
        if any(stops for stops, _ in wishes):
            is_due = all(is_sane for _, is_sane in wishes)
            # Workers of one party that train apart would go on alone, up to the loop's next
            # meeting, and back up without this one.
            self.model.stop_training = True
        if is_due:
            self._save(epoch + 1, 0)

    def on_train_end(self, logs: Any = None) -> None:
        """Deletes the backups, when all workers have made the last epoch.

        Behind a server they are the only way back into the run, whose older rounds are forgotten:
        they stay, for this party and for others, until it has been left.
        """
        if self._resumed is not None:
            self.model._initial_epoch = self._outer_epoch
        resuming.begin_anew(self.model)
        # Of all parties, also those of a loop: the next run wants a backup of each, or of none.
        everyone = self._peers.gather_from_whole_run(self._has_ended(), "the end of the run")
        if not (self._delete and all(everyone)):
            return
        self._folder.note_over()
        if self._peers.backups is None:
            self._peers.on_first(self._clear_now)
        elif self._peers.rank == 0:
            self._folder.keep()
            # Not what a later `fit` has left there, which begins by clearing what is kept.
            self._peers.backups.when_left(lambda: self._clear(self._folder.clear_kept))

    def _clear_now(self) -> None:
        try:
            self._clear(self._folder.clear)
        except OSError as error:  # all that was trained is there
            self._folder.keep()  # a later `fit` of this process deletes them, or says why not
            log.warning("The backups of a `fit` that is over are still there: %s", error)

    def _clear(self, clear: Callable[[], None]) -> None:
        clear()
        if self._folder.path != self._directory:
            with contextlib.suppress(OSError):
                self._directory.rmdir()  # the last party does

    def _has_ended(self) -> bool:
        """Whether this worker has nothing left to train: not where something stopped it before."""
        num_epochs = (self.params or {}).get("epochs")
        return num_epochs is None or self._next_epoch >= num_epochs

    def _offer(self, newest: Callable[[], Path]) -> None:
        if self._peers.backups is not None and self._peers.rank == 0:
            self._peers.backups.offer(newest)

    def _probe(self) -> None:
        """Raises now, not after an epoch, where the ranks do not see one directory."""

        def begin() -> str:
            self._folder.clear_kept()
            return self._folder.write_probe()

        name = self._peers.on_first(begin)
        try:
            self._peers.together(lambda: self._folder.find_probe(name))
        finally:
            if self._peers.rank == 0:
                self._folder.drop_probe(name)

    # Saving.

    def _save(self, epoch: int, step: int) -> None:
        """Writes one backup, unless the disk does not take it; called on all ranks."""
        peers = self._peers
        has_seed = snapshot.global_seed_generator() is not None
        entries = snapshot.entries(self.model, metrics=step > 0, seed=has_seed)
        trained = snapshot.trained_by_each(self.model)
        own = self._own(entries)
        place = None if peers.backups is None else peers.backups.place()
        data_offset = None
        if peers.strategy is not None:
            data_offset = resuming.data_offset(self.model, self._epoch)
        meta = {
            "format": _FORMAT,
            "facts": self._facts(),
            "entries": [entry.kind for entry in entries],
            "own": own,
            "trained": trained,
            "steps_per_epoch": (self.params or {}).get("steps"),
            "data_offset": data_offset,
            "place": place,
            "fit": self._fit,
            "stops": self._who_stops(),
            "trainable": self._trainable,
            "optimizer": self._optimizers(),
        }
        self._writing.write(
            epoch,
            step,
            lambda draft: self._write(draft, entries, own),
            meta,
            keep=self._keep,
            # Lists of gradients that come later may still read what was taken up.
            protected=self._resumed,
        )

    def _who_stops(self) -> str | None:
        """Whose training ends where this backup is made; None: nobody's."""
        if not self.model.stop_training:
            return None
        loan = None if self._peers.strategy is None else self._peers.strategy.loan
        return _ALL if loan is None or loan.is_over else _OWN

    def _own(self, entries: list[Entry]) -> list[int]:
        """Which variables differ between ranks."""
        if self._peers.size == 1:
            return []
        everyone = self._peers.gather(
            [[entry.kind for entry in entries], snapshot.digests(entries)]
        )
        for rank, (kinds, _) in enumerate(everyone):
            told = snapshot.first_difference(everyone[0][0], kinds, "on rank 0")
            if told is not None:
                raise ValueError(
                    f"All ranks must have the same variables. Received: on rank {rank}, {told}"
                )
        columns = zip(*(values for _, values in everyone), strict=True)
        return [place for place, values in enumerate(columns) if len(set(values)) > 1]

    def _write(self, draft: Path, entries: list[Entry], own: list[int]) -> None:
        rank = self._peers.rank
        draft.mkdir(parents=True, exist_ok=True)  # a remote file system may not show it yet
        if rank == 0:
            chosen = [entry for place, entry in enumerate(entries) if place not in set(own)]
            snapshot.write(draft / "shared", chosen)
            others.write_best_weights(draft, self._others)
        snapshot.write(draft / f"rank-{rank}", [entries[place] for place in own])
        if self._peers.strategy is not None:
            state = self._peers.strategy.state.of_model(self.model)
            tf.train.Checkpoint(state=state).write(str(draft / f"rank-{rank}.strategy"))
        history = getattr(self.model, "history", None)
        told: dict[str, Any] = {"callbacks": others.remembered(self._others)}
        told |= seals.of_files(draft, rank)
        if history is not None:
            told |= {"epoch": history.epoch, "history": history.history}
        (draft / f"rank-{rank}.json").write_text(
            json.dumps(told, default=lambda value: np.asarray(value).tolist()), encoding="utf-8"
        )
        for path in draft.glob(f"rank-{rank}.*"):
            sync(path)

    def _facts(self) -> dict[str, Any]:
        """What must be equal where a backup is taken up."""
        facts: dict[str, Any] = {}
        if self._peers.strategy is not None:
            facts = self._peers.strategy.state.facts()
            facts.pop("rank", None)  # told by the names of the files
            # Orders of data and noise of layers are functions of it, whatever the compression.
            facts["seed"] = self._peers.strategy.config.seed
        return {
            **facts,
            "number of workers": self.model.distribute_strategy.num_replicas_in_sync,
            "number of ranks": self._peers.size,
        }

    def _optimizers(self) -> str:
        return ", ".join(optimizers.name(one) for one in optimizers.optimizers_of(self.model))

    # Restoring.

    def _check(self, backup: Backup) -> None:
        """Raises where `backup` is of another run, or parts of it are."""
        meta = meta_of(self._folder, backup)
        if meta["format"] != _FORMAT:
            raise ValueError(
                f"A backup must have format {_FORMAT}. Received: format {meta['format']} in "
                f"{self._folder.place(backup)}"
            )
        told = self._other_facts(backup, meta)
        if not told and not self.model.built:
            raise ValueError(
                f"The model `{self.model.name}` must be built before `fit` to take up a "
                "backup: call it on a batch, or give its first layer a shape. Received: a "
                "model without weights"
            )
        if not told:
            snapshot.build_optimizers(self.model, meta["trained"])
            told = changes({"optimizer": self._optimizers()}, {"optimizer": meta["optimizer"]})
        if told:
            raise ValueError(self._other_run("; ".join(told)))
        self._entries(meta, metrics=False)
        seals.check(self._folder.place(backup), self._peers.rank, meta)

    def _other_facts(self, backup: Backup, meta: dict[str, Any]) -> list[str]:
        """What is different from when a backup was made, in words."""
        told = changes(self._facts(), meta["facts"])
        if None not in (was := meta["trainable"], self._trainable) and was != self._trainable:
            told.append("other layers are frozen than were when it began")
        num_steps, num_epochs = ((self.params or {}).get(one) for one in ("steps", "epochs"))
        if backup.step and num_steps != meta["steps_per_epoch"]:
            told.append(f"an epoch has {num_steps} steps and had {meta['steps_per_epoch']}")
        if backup.step % self.model.steps_per_execution and not self._peers.cuts_executions:
            told.append(
                f"`steps_per_execution` is {self.model.steps_per_execution} and does not divide "
                f"the step {backup.step}"
            )
        if meta["fit"] > self._fit:
            which = f"this is `fit` number {self._fit} that uses it, and was number {meta['fit']}"
            if num_epochs is not None and backup.epoch > num_epochs:
                told.append(f"{which}, which had made {backup.epoch} epochs")
            elif not told:
                log.warning(
                    "In %s %s. Each needs a directory of its own.", self._folder.path, which
                )
        return told

    def _entries(self, meta: dict[str, Any], *, metrics: bool) -> list[Entry]:
        """Variables that a backup has values for. Metrics come last: without them it is a prefix.

        Raises:
            ValueError: it has others.
        """
        has_seed = any(kind[0] == "seed" for kind in meta["entries"])
        entries = snapshot.entries(self.model, metrics=metrics, seed=has_seed)
        saved = [kind for kind in meta["entries"] if metrics or kind[0] != "metric"]
        told = snapshot.first_difference(
            saved, [entry.kind for entry in entries], "when it was saved"
        )
        if told is not None:
            raise ValueError(self._other_run(told))
        return entries

    def _other_run(self, told: str) -> str:
        return (
            f"The backup in {self._folder.path} must be of this run and this `fit`; give another "
            f"one another directory. Received: {told}"
        )

    def _restore(self, backup: Backup) -> None:
        """Reads everything but metrics; called on all ranks."""
        if self._peers.strategy is not None:
            # Later this would replace what each rank has for itself.
            self._peers.strategy.state.make_equal(self.model)
            if not self._is_back and not self._peers.strategy.state.is_complete():
                log.warning(
                    "Behind a server this run goes on without what its compression had kept there: "
                    "not bit for bit."
                )
        meta = meta_of(self._folder, backup)
        is_of_others = bool(meta.get(IS_OF_OTHERS))
        if self._peers.strategy is not None and is_of_others:
            self._peers.strategy.state.take_from_others()
        shared, own = _parts(self._entries(meta, metrics=False), meta)
        self._peers.together(lambda: self._read(backup, shared, own))
        self._peers.together(lambda: self._read_state(backup))
        # Statistics and accumulated gradients are each worker's own.
        trained = [entry for entry in shared if entry.role == "weight" and entry.variable.trainable]
        digest = snapshot.digest(trained)
        if self._is_back:  # the others are elsewhere
            everyone = self._peers.gather(digest)
        else:
            everyone = self._peers.gather_from_all(digest, "what was restored")
        if any(one != everyone[0] for one in everyone):
            odd = [number for number, one in enumerate(everyone) if one != everyone[0]]
            raise ValueError(
                "All workers must take up the same backup. Received: others than worker 0's on "
                f"the workers {odd}"
            )
        place = self._folder.place(backup)
        told: dict[str, Any] = {}
        # A rank whose file is damaged says so before others rely on it.
        self._peers.together(
            lambda: told.update(read_json(place / f"rank-{self._peers.rank}.json"))
        )
        others.remind(self._others, told["callbacks"])
        self._peers.together(lambda: self._read_best_weights(place))
        if "epoch" in told and getattr(self.model, "history", None) is not None:
            # Another party may have ended epochs that end here later.
            count = sum(one < backup.epoch or not is_of_others for one in told["epoch"])
            self.model.history.epoch = told["epoch"][:count]
            self.model.history.history = {
                name: values[:count] for name, values in told["history"].items()
            }

    def _restore_again(self, backup: Backup, batch: Any) -> None:
        """Reads everything once more, with the metrics of an epoch that has begun."""
        if batch is not None:
            # Without a strategy Keras makes the metrics in the first step only.
            with snapshot.no_more_slots(self.model):
                self.model._symbolic_build(data_batch=batch)

        def read() -> None:
            meta = meta_of(self._folder, backup)
            # Another party's of an epoch's end, which is in the middle of one here, has none.
            metrics = any(kind[0] == "metric" for kind in meta["entries"])
            self._read(backup, *_parts(self._entries(meta, metrics=metrics), meta))

        self._peers.together(read)

    def _read(self, backup: Backup, shared: list[Entry], own: list[Entry]) -> None:
        place = self._folder.place(backup)
        with _naming(place):
            snapshot.read(place / "shared", shared)
            snapshot.read(place / f"rank-{self._peers.rank}", own)

    def _read_state(self, backup: Backup) -> None:
        if self._peers.strategy is not None:
            place = self._folder.place(backup)
            path = place / f"rank-{self._peers.rank}.strategy"
            state = self._peers.strategy.state.of_model(self.model)
            with _naming(place):
                # Lists of gradients that are not there yet take their values when they come; where
                # no step is left they never do, which TensorFlow would warn of.
                snapshot.check_whole(path)
                tf.train.Checkpoint(state=state).read(str(path)).expect_partial()

    def _read_best_weights(self, place: Path) -> None:
        with _naming(place):
            others.read_best_weights(place, self._others)


@contextlib.contextmanager
def _naming(place: Path) -> Iterator[None]:
    """While files of a backup are read by TensorFlow: what is damaged is said as what it is."""
    try:
        yield
    except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError):
        raise  # it may well be whole
    except (tf.errors.OpError, IndexError) as error:  # IndexError: a file that is too short
        raise damaged(place, error) from error


def _is_sane(logs: Any) -> bool:
    loss = (logs or {}).get("loss")
    return loss is None or math.isfinite(float(loss))


def _parts(entries: list[Entry], meta: dict[str, Any]) -> tuple[list[Entry], list[Entry]]:
    """Variables that all ranks share in a backup, and those of each rank."""
    own = set(meta["own"])
    return (
        [entry for place, entry in enumerate(entries) if place not in own],
        [entry for place, entry in enumerate(entries) if place in own],
    )
