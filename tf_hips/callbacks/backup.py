# SPDX-License-Identifier: Apache-2.0
"""`BackupAndRestore`: a run that is stopped at any moment goes on at the step, bit for bit.

Written together, into one directory for all ranks of a party; of several parties, each has a folder
of its name in there. In it are the files of `contents`, and

    meta.json          what the run must be to go on (`belonging`): workers, compression, seed,
                       model; position, and how the data count their epochs

Restored in two parts: all of it before the first epoch; and in the middle of an epoch once more
after callbacks have begun the epoch, because they and Keras (which resets metrics) have changed
what was right at its beginning.

Invariant: a backup is whole or not seen (see `folder`), and all ranks take up the same one.
"""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tf_hips import log
from tf_hips.callbacks import resuming
from tf_hips.callbacks.belonging import Belonging
from tf_hips.callbacks.choosing import Choice
from tf_hips.callbacks.contents import Contents
from tf_hips.callbacks.folder import Backup, BackupFolder, is_count
from tf_hips.callbacks.handover import IS_OF_OTHERS, meta_of
from tf_hips.callbacks.peers import Peers
from tf_hips.callbacks.writing import Writing

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
        if save_freq != "epoch" and not is_count(save_freq):
            raise ValueError(
                '`save_freq` must be "epoch" or a number of steps, at least 1. '
                f"Received: save_freq={save_freq!r}"
            )
        if not is_count(keep):
            raise ValueError(f"`keep` must be an int, at least 1. Received: keep={keep!r}")
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
        belonging = Belonging(self.model, self._peers, self._folder, self.params or {})
        self._belonging = belonging
        self._contents = Contents(self.model, self._peers, self._folder, belonging, self._others)
        resuming.begin_anew(self.model)
        self._probe()
        num_steps = (self.params or {}).get("steps")
        has_run = self._peers.backups is not None
        first_epoch = resuming.initial_epoch(self.model) if has_run else 0
        choice = Choice(self._peers, self._folder, belonging.check, num_steps, first_epoch)
        backup = choice.backup()
        self._is_back = choice.is_back
        self._offer(self._folder.newest)
        if backup is None:
            return
        self._peers.together(lambda: belonging.check(backup))
        self._contents.restore(backup, is_back=choice.is_back)
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
        if self._peers.rank == 0:
            log.news("Goes on at step %d of epoch %d.", backup.step, backup.epoch + 1)

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
                lambda batch: self._contents.restore_again(backup, batch),
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

    def _save(self, epoch: int, step: int) -> None:
        """Writes one backup, unless the disk does not take it; called on all ranks."""
        peers = self._peers
        told, fill = self._contents.choose(metrics=step > 0)
        place = None if peers.backups is None else peers.backups.place()
        data_offset = None
        if peers.strategy is not None:
            data_offset = resuming.data_offset(self.model, self._epoch)
        meta = {
            **self._belonging.told(),
            **told,
            "data_offset": data_offset,
            "place": place,
            "stops": self._who_stops(),
        }
        self._writing.write(
            epoch,
            step,
            fill,
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


def _is_sane(logs: Any) -> bool:
    loss = (logs or {}).get("loss")
    return loss is None or math.isfinite(float(loss))
