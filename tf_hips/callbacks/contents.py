# SPDX-License-Identifier: Apache-2.0
"""The files of a backup, written and read by the ranks of a party together.

    shared.*           variables that are equal on all ranks, by rank 0
    rank-<r>.*         variables that are not
    rank-<r>.strategy.* residuals and numbers of steps of the strategy
    rank-<r>.json      History so far, and what Keras' callbacks remember
    best-weights-<n>.* those that an EarlyStopping holds, by rank 0

Which variables are equal is found each time when they are written, and said in `meta.json`.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips import log
from tf_hips.callbacks import others, seals, snapshot
from tf_hips.callbacks.belonging import Belonging
from tf_hips.callbacks.folder import Backup, BackupFolder, damaged, read_json, sync
from tf_hips.callbacks.handover import IS_OF_OTHERS, meta_of
from tf_hips.callbacks.peers import Peers
from tf_hips.callbacks.snapshot import Entry


class Contents:
    """What the backups of one `fit` hold; its methods are called on all ranks."""

    def __init__(
        self,
        model: keras.Model,
        peers: Peers,
        folder: BackupFolder,
        belonging: Belonging,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        """Nothing is read or written yet.

        Args:
            model: whose `fit` it is.
            peers: the ranks of the party.
            folder: of its backups.
            belonging: knows which variables a backup must have.
            callbacks: those of the `fit`, but for the one that backs up.
        """
        self._model = model
        self._peers = peers
        self._folder = folder
        self._belonging = belonging
        self._callbacks = callbacks

    def choose(self, *, metrics: bool) -> tuple[dict[str, Any], Callable[[Path], None]]:
        """What a backup of this moment says of its variables, and what writes this rank's files.

        Args:
            metrics: whether the state of metrics is in it.
        """
        has_seed = snapshot.global_seed_generator() is not None
        entries = snapshot.entries(self._model, metrics=metrics, seed=has_seed)
        trained = snapshot.trained_by_each(self._model)
        own = self._own(entries)
        told = {"entries": [entry.kind for entry in entries], "own": own, "trained": trained}
        return told, lambda draft: self._write(draft, entries, own)

    def restore(self, backup: Backup, *, is_back: bool) -> None:
        """Reads everything but metrics.

        Args:
            backup: of this run.
            is_back: whether it leads into a run that goes on, in which the others are elsewhere.

        Raises:
            ValueError: other workers have taken up another one.
            ConfigError: a file is damaged.
            PeerError: another rank cannot read it.
        """
        if self._peers.strategy is not None:
            # Later this would replace what each rank has for itself.
            self._peers.strategy.state.make_equal(self._model)
            if not is_back and not self._peers.strategy.state.is_complete():
                log.warning(
                    "Behind a server this run goes on without what its compression had kept there: "
                    "not bit for bit."
                )
        meta = meta_of(self._folder, backup)
        is_of_others = bool(meta.get(IS_OF_OTHERS))
        if self._peers.strategy is not None and is_of_others:
            self._peers.strategy.state.take_from_others()
        entries = self._belonging.entries(meta, metrics=False)
        shared, own = _parts(entries, meta)
        self._peers.together(lambda: self._read(backup, shared, own))
        self._peers.together(lambda: self._read_state(backup))
        # Statistics and accumulated gradients are each worker's own, and so is all that differs
        # where a loop keeps workers apart. Else weights differ in a backup by rounding alone.
        is_apart = self._peers.strategy is not None and self._peers.strategy.loan is not None
        compared = shared if is_apart else entries
        trained = [one for one in compared if one.role == "weight" and one.variable.trainable]
        weights = [one.variable for one in trained]
        # While the others are elsewhere, those of this party agree alone.
        different = self._peers.settle(weights, "weights that were restored", in_party=is_back)
        if different:
            raise ValueError(f"All workers must take up the same backup. Received: {different}")
        place = self._folder.place(backup)
        told: dict[str, Any] = {}
        # A rank whose file is damaged says so before others rely on it.
        self._peers.together(
            lambda: told.update(read_json(place / f"rank-{self._peers.rank}.json"))
        )
        others.remind(self._callbacks, told["callbacks"])
        self._peers.together(lambda: self._read_best_weights(place))
        if "epoch" in told and getattr(self._model, "history", None) is not None:
            # Another party may have ended epochs that end here later.
            count = sum(one < backup.epoch or not is_of_others for one in told["epoch"])
            self._model.history.epoch = told["epoch"][:count]
            self._model.history.history = {
                name: values[:count] for name, values in told["history"].items()
            }

    def restore_again(self, backup: Backup, batch: Any) -> None:
        """Reads everything once more, with the metrics of an epoch that has begun."""
        if batch is not None:
            # Without a strategy Keras makes the metrics in the first step only.
            with snapshot.no_more_slots(self._model):
                self._model._symbolic_build(data_batch=batch)

        def read() -> None:
            meta = meta_of(self._folder, backup)
            # Another party's of an epoch's end, which is in the middle of one here, has none.
            metrics = any(kind[0] == "metric" for kind in meta["entries"])
            self._read(backup, *_parts(self._belonging.entries(meta, metrics=metrics), meta))

        self._peers.together(read)

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
            left_out = set(own)
            chosen = [entry for place, entry in enumerate(entries) if place not in left_out]
            snapshot.write(draft / "shared", chosen)
            others.write_best_weights(draft, self._callbacks)
        snapshot.write(draft / f"rank-{rank}", [entries[place] for place in own])
        if self._peers.strategy is not None:
            state = self._peers.strategy.state.of_model(self._model)
            tf.train.Checkpoint(state=state).write(str(draft / f"rank-{rank}.strategy"))
        history = getattr(self._model, "history", None)
        told: dict[str, Any] = {"callbacks": others.remembered(self._callbacks)}
        told |= seals.of_files(draft, rank)
        if history is not None:
            told |= {"epoch": history.epoch, "history": history.history}
        (draft / f"rank-{rank}.json").write_text(
            json.dumps(told, default=lambda value: np.asarray(value).tolist()), encoding="utf-8"
        )
        for path in draft.glob(f"rank-{rank}.*"):
            sync(path)

    def _read(self, backup: Backup, shared: list[Entry], own: list[Entry]) -> None:
        place = self._folder.place(backup)
        with _naming(place):
            snapshot.read(place / "shared", shared)
            snapshot.read(place / f"rank-{self._peers.rank}", own)

    def _read_state(self, backup: Backup) -> None:
        if self._peers.strategy is not None:
            place = self._folder.place(backup)
            path = place / f"rank-{self._peers.rank}.strategy"
            state = self._peers.strategy.state.of_model(self._model)
            with _naming(place):
                # Lists of gradients that are not there yet take their values when they come; where
                # no step is left they never do, which TensorFlow would warn of.
                snapshot.check_whole(path)
                tf.train.Checkpoint(state=state).read(snapshot.as_read(path)).expect_partial()

    def _read_best_weights(self, place: Path) -> None:
        with _naming(place):
            others.read_best_weights(place, self._callbacks)


@contextlib.contextmanager
def _naming(place: Path) -> Iterator[None]:
    """While files of a backup are read by TensorFlow: what is damaged is said as what it is."""
    try:
        yield
    except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError):
        raise  # it may well be whole
    except (tf.errors.OpError, IndexError) as error:  # IndexError: a file that is too short
        raise damaged(place, error) from error


def _parts(entries: list[Entry], meta: dict[str, Any]) -> tuple[list[Entry], list[Entry]]:
    """Variables that all ranks share in a backup, and those of each rank."""
    own = set(meta["own"])
    return (
        [entry for place, entry in enumerate(entries) if place not in own],
        [entry for place, entry in enumerate(entries) if place in own],
    )
