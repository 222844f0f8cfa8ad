# SPDX-License-Identifier: Apache-2.0
"""Everything of a Keras model that changes while it trains, in files and back.

Weights, optimizer variables, random states, states of recurrent layers and, in the middle of an
epoch, metrics. What is equal on all ranks is written once, the rest by each rank; which is which is
found by comparing digests, so that statistics of BatchNormalization, accumulated gradients and the
variables of a user's own layers need no rule.

Files are TensorFlow checkpoints: any type, checked by checksums, read by any TensorFlow.
"""

import contextlib
import dataclasses
import hashlib
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tf_hips import log
from tf_hips.callbacks.optimizers import optimizers_of
from tf_hips.ps.terms.weights import bytes_of

_OF_PATTERNS = frozenset("*?[]\\")
_opened: dict[tuple[int, int], int] = {}  # folders that are read from, by device and inode
# Optimizers of which was said that they are not saved.
_told: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Entry:
    """One variable.

    Attributes:
        role: what it is to the model, for messages: "weight", "optimizer", "seed", "state" (of a
            recurrent layer), "metric".
        variable: the TensorFlow variable.
    """

    role: str
    variable: tf.Variable

    @property
    def kind(self) -> list[Any]:
        """Role, type and shape, as JSON values."""
        return [self.role, self.variable.dtype.name, list(self.variable.shape)]


def entries(model: keras.Model, *, metrics: bool, seed: bool) -> list[Entry]:
    """All variables of a model that change while it trains, in an order that its code decides.

    Args:
        model: a built model whose optimizers have the slots that they will have.
        metrics: whether to include the state of its metrics; they come last.
        seed: whether to include Keras' global seed generator, which is made if need be.
    """
    groups: list[tuple[str, Iterable[Any]]] = [
        ("weight", model.variables),
        ("optimizer", [slot for one in optimizers_of(model) for slot in _saved(model, one)]),
    ]
    if seed:
        groups.append(("seed", [global_seed_generator(make=True).state]))
    # Keras does not count what recurrent layers with `stateful=True` keep among their variables.
    groups.append(("state", _states(model)))
    if metrics:
        groups.append(("metric", model.metrics_variables))
    found: dict[int, Entry] = {}
    for role, variables in groups:
        for one in variables:
            variable = raw(one)
            found.setdefault(id(variable), Entry(role, variable))
    return list(found.values())


def _states(model: keras.Model) -> list[Any]:
    stateful = (one for one in model._flatten_layers() if getattr(one, "stateful", False))
    states = keras.tree.flatten([getattr(one, "states", None) for one in stateful])
    return [one for one in states if isinstance(one, keras.Variable)]


def _saved(model: keras.Model, optimizer: Any) -> list[Any]:
    """Variables of an optimizer; of one that trains other things than weights, what counts."""
    if optimizer is model.optimizer or not _foreign(model, optimizer):
        return list(optimizer.variables)
    counts = (optimizer.iterations, getattr(optimizer, "_learning_rate", None))
    return [slot for slot in optimizer.variables if any(slot is one for one in counts)]


def _foreign(model: keras.Model, optimizer: Any) -> list[Any]:
    """What an optimizer trains that is no weight of the model, and so is not saved."""
    if not optimizer.built:
        return []
    known = {id(one.value) for one in model.variables}
    trained = [raw(one) for one in optimizer._trainable_variables]
    return [one for one in trained if id(one) not in known]


def raw(variable: Any) -> tf.Variable:
    """The TensorFlow variable behind one of Keras."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def digests(chosen: Sequence[Entry]) -> list[str]:
    """A digest of the value of each variable."""
    return [
        hashlib.blake2b(bytes_of(entry.variable.numpy()), digest_size=16).hexdigest()
        for entry in chosen
    ]


def first_difference(there: Sequence[Any], here: Sequence[Any], where: str) -> str | None:
    """Says where two lists of kinds differ, or None.

    Args:
        there: kinds to compare with.
        here: kinds of this moment.
        where: where or when `there` is.
    """
    for place in range(max(len(there), len(here))):
        was = there[place] if place < len(there) else None
        now = here[place] if place < len(here) else None
        if was != now:
            return f"variable {place} is {_text(now)}, and {_text(was)} {where}"
    return None


def write(path: Path, chosen: Sequence[Entry]) -> None:
    """Writes variables to files whose names begin with `path`."""
    _checkpoint(chosen).write(str(path))


def read(path: Path, chosen: Sequence[Entry]) -> None:
    """Reads what `write` wrote, or its beginning, into variables of the same kinds.

    Raises:
        tf.errors.NotFoundError: there is no such file.
        tf.errors.OpError, IndexError: the file is damaged.
    """
    status = _checkpoint(chosen).read(as_read(path))
    status.assert_existing_objects_matched().expect_partial()


def as_read(path: Path) -> str:
    """`path` of a checkpoint, as TensorFlow reads what it has written there.

    It takes what it reads for a pattern, in which a folder called `lr=[0.1]` is not found. The path
    that is returned holds while this process lives, also where values are taken up later.
    """
    if _OF_PATTERNS.isdisjoint(str(path)):
        return str(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    status = os.fstat(folder)
    kept = _opened.setdefault((status.st_dev, status.st_ino), folder)
    if kept != folder:
        os.close(folder)
    return f"/proc/self/fd/{kept}/{path.name}"


def check_whole(path: Path) -> None:
    """Reads all of a checkpoint whose values may be taken up later, when nobody asks for errors.

    Raises:
        tf.errors.OpError, IndexError: as `read`.
    """
    reader = tf.train.load_checkpoint(as_read(path))
    for name in reader.get_variable_to_dtype_map():
        reader.get_tensor(name)


def trained_by_each(model: keras.Model) -> list[list[int] | None]:
    """What each optimizer has slots for: places among the model's variables; None: has none yet.

    Raises:
        ValueError: the compiled one trains what is no weight of the model, and is not saved.
    """
    places = {id(one.value): place for place, one in enumerate(model.variables)}
    found: list[list[int] | None] = []
    for optimizer in optimizers_of(model):
        foreign = _foreign(model, optimizer)
        if foreign and optimizer is model.optimizer:
            raise ValueError(
                "What the model's optimizer trains must be a weight of it, as a keras.Variable "
                f"among its attributes is, to be backed up. Received: {foreign[0].name}"
            )
        if foreign and optimizer not in _told:
            _told.add(optimizer)
            log.warning(
                "%s trains %s, which is no weight of the model: neither it nor what the optimizer "
                "keeps is backed up. A keras.Variable among the model's attributes is.",
                optimizer.name,
                foreign[0].name,
            )
        is_saved = optimizer.built and not foreign
        trained = optimizer._trainable_variables if is_saved else []
        found.append([places[id(raw(one))] for one in trained] if is_saved else None)
    return found


def trainable(model: keras.Model) -> list[int]:
    """Places of the weights that are trained, among the model's variables."""
    trained = {id(one) for one in model.trainable_variables}
    return [place for place, one in enumerate(model.variables) if id(one) in trained]


def build_optimizers(model: keras.Model, trained: Sequence[list[int] | None]) -> None:
    """Makes the slots that a backup has, as the first steps would; no others.

    Where the model is another one this leaves it to `first_difference` to say so.

    Args:
        model: a built model.
        trained: what `trained_by_each` said when it was saved.
    """
    variables = model.variables
    for optimizer, places in zip(optimizers_of(model), trained, strict=False):
        if places is None or optimizer.built or max(places, default=0) >= len(variables):
            continue
        with model.distribute_strategy.scope():
            optimizer.build([variables[place] for place in places])


@contextlib.contextmanager
def no_more_slots(model: keras.Model) -> Iterator[None]:
    """While this holds Keras makes no slots for the compiled optimizer, which may never step."""
    optimizer = model.optimizer
    if optimizer is None:
        yield
        return
    before, optimizer.built = optimizer.built, True
    try:
        yield
    finally:
        optimizer.built = before


def global_seed_generator(make: bool = False) -> Any:
    """Keras' generator for random operations without a seed; None before the first of them.

    Args:
        make: whether to make it where there is none.
    """
    # Keras has no public name for it. Making it draws from Python's random numbers, so looking
    # must not.
    module = sys.modules[keras.random.SeedGenerator.__module__]
    if make:
        return module.global_seed_generator()
    return module.global_state.get_global_attribute(module.GLOBAL_SEED_GENERATOR)


def _checkpoint(chosen: Sequence[Entry]) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(variables=[entry.variable for entry in chosen])


def _text(kind: Any) -> str:
    return "missing" if kind is None else f"{kind[0]} {kind[1]}{kind[2]}"
