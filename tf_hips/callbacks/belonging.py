# SPDX-License-Identifier: Apache-2.0
"""Of which run and which `fit` a backup is: what it says of that, and whether this is it.

A backup of another run is refused before anything is restored, with what is different.
"""

from collections.abc import Mapping
from typing import Any

import keras

from tf_hips import log
from tf_hips.callbacks import optimizers, seals, snapshot
from tf_hips.callbacks.changes import changes
from tf_hips.callbacks.folder import Backup, BackupFolder
from tf_hips.callbacks.handover import meta_of
from tf_hips.callbacks.peers import Peers
from tf_hips.callbacks.snapshot import Entry

_FORMAT = 3


class Belonging:
    """The `fit` of a model that has begun, as its backups say which it is."""

    def __init__(
        self, model: keras.Model, peers: Peers, folder: BackupFolder, params: Mapping[str, Any]
    ) -> None:
        """Looks at a `fit` that has made no step.

        Args:
            model: whose `fit` it is.
            peers: the ranks of the party.
            folder: of its backups.
            params: what Keras tells callbacks of this `fit`.
        """
        self._model = model
        self._peers = peers
        self._folder = folder
        self._params = params
        self._fit = 1 + folder.num_over
        # Before the first step: steps and callbacks may freeze layers, each time alike.
        self._trainable = snapshot.trainable(model) if model.built else None

    def told(self) -> dict[str, Any]:
        """What a backup says, as JSON values, so that `check` can find it to be of this `fit`."""
        return {
            "format": _FORMAT,
            "facts": self._facts(),
            "steps_per_epoch": self._params.get("steps"),
            "fit": self._fit,
            "trainable": self._trainable,
            "optimizer": self._optimizers(),
        }

    def check(self, backup: Backup) -> None:
        """Looks whether `backup` is of this run, and makes the slots that it has.

        Raises:
            ValueError: it is of another run.
            ConfigError: parts of it are, or are damaged.
        """
        meta = meta_of(self._folder, backup)
        if meta["format"] != _FORMAT:
            raise ValueError(
                f"A backup must have format {_FORMAT}. Received: format {meta['format']} in "
                f"{self._folder.place(backup)}"
            )
        told = self._other_facts(backup, meta)
        if not told and not self._model.built:
            raise ValueError(
                f"The model `{self._model.name}` must be built before `fit` to take up a "
                "backup: call it on a batch, or give its first layer a shape. Received: a "
                "model without weights"
            )
        if not told:
            snapshot.build_optimizers(self._model, meta["trained"])
            told = changes({"optimizer": self._optimizers()}, {"optimizer": meta["optimizer"]})
        if told:
            raise ValueError(self._other_run("; ".join(told)))
        self.entries(meta, metrics=False)
        seals.check(self._folder.place(backup), self._peers.rank, meta)

    def entries(self, meta: dict[str, Any], *, metrics: bool) -> list[Entry]:
        """Variables that a backup has values for. Metrics come last: without them it is a prefix.

        Raises:
            ValueError: it has others.
        """
        has_seed = any(kind[0] == "seed" for kind in meta["entries"])
        entries = snapshot.entries(self._model, metrics=metrics, seed=has_seed)
        saved = [kind for kind in meta["entries"] if metrics or kind[0] != "metric"]
        told = snapshot.first_difference(
            saved, [entry.kind for entry in entries], "when it was saved"
        )
        if told is not None:
            raise ValueError(self._other_run(told))
        return entries

    def _other_facts(self, backup: Backup, meta: dict[str, Any]) -> list[str]:
        """What is different from when a backup was made, in words."""
        told = changes(self._facts(), meta["facts"])
        if None not in (was := meta["trainable"], self._trainable) and was != self._trainable:
            told.append("other layers are frozen than were when it began")
        num_steps, num_epochs = (self._params.get(one) for one in ("steps", "epochs"))
        if backup.step and num_steps != meta["steps_per_epoch"]:
            told.append(f"an epoch has {num_steps} steps and had {meta['steps_per_epoch']}")
        if backup.step % self._model.steps_per_execution and not self._peers.cuts_executions:
            told.append(
                f"`steps_per_execution` is {self._model.steps_per_execution} and does not divide "
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
            "number of workers": self._model.distribute_strategy.num_replicas_in_sync,
            "number of ranks": self._peers.size,
        }

    def _optimizers(self) -> str:
        return ", ".join(optimizers.name(one) for one in optimizers.optimizers_of(self._model))

    def _other_run(self, told: str) -> str:
        return (
            f"The backup in {self._folder.path} must be of this run and this `fit`; give another "
            f"one another directory. Received: {told}"
        )
