# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's scalars, written as things happen: one file for each worker, `DIR/SITE/workerN`.

They are the numbers of the worker's events: of each test by the step, of each round or meeting by
its number. The format is TensorFlow's own records; TensorBoard itself is needed only to look.
"""

import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tf_hips import log
from tf_hips.errors import ConfigError

# By event: what counts it, and its scalars.
SCALARS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "epoch": (
            "step",
            ("loss", "test_loss", "test_accuracy", "samples", "seconds", "rounds_s"),
        ),
        "round": ("round", ("seconds", "sent", "received")),
        "meeting": ("number", ("local_steps", "seconds")),
        "result": ("", ("test_accuracy", "seconds")),
    }
)
_NAMES = {"epoch": "test", "result": "result"}
_VERSION = "brain.Event:2"


class Board:
    """The scalars of one worker."""

    def __init__(self, folder: str | Path, site: str, rank: int) -> None:
        """Begins a file of its own.

        Args:
            folder: what TensorBoard is given as `--logdir`.
            site: of the worker.
            rank: in its party.

        Raises:
            ConfigError: it cannot be written.
        """
        place = Path(folder) / site.replace("/", "-") / f"worker{rank}"
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._lock = threading.Lock()
        self._is_whole = True
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._writer = tf.io.TFRecordWriter(str(place / name))
            self._add(tf.compat.v1.Event(wall_time=time.time(), file_version=_VERSION))
        except (OSError, tf.errors.OpError) as error:
            text = getattr(error, "strerror", None) or getattr(error, "message", "") or str(error)
            raise ConfigError(f"Scalars cannot be written to {place}: {text}") from error

    def hear(self, event: str, values: Mapping[str, Any]) -> None:
        """Writes what an event has; a disk that is full ends no run."""
        if event not in SCALARS or not self._is_whole:
            return
        counter, names = SCALARS[event]
        found = [
            tf.compat.v1.Summary.Value(
                tag=f"{_NAMES.get(event, event)}/{name}",
                simple_value=float(values[name]),
                metadata=_METADATA,
            )
            for name in names
            if isinstance(values.get(name), int | float)
        ]
        summary = tf.compat.v1.Summary(value=found)
        step = int(values[counter]) if counter else 0
        try:
            with self._lock:
                self._add(tf.compat.v1.Event(wall_time=time.time(), step=step, summary=summary))
        except tf.errors.OpError as error:
            self._is_whole = False
            log.warning("Scalars are no longer written for TensorBoard: %s", error)

    def _add(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()  # who looks meanwhile sees it


_METADATA = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
)
