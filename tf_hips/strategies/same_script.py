# SPDX-License-Identifier: Apache-2.0
"""Whether a process that comes back runs the script that the one before it ran.

It does again what that one did: the server answers with what was sent then, whatever is computed
now. Of a script that was changed (stopped, tuned and started again) the rounds of the old one would
be taken for its own. So each process says at the beginning of a `fit` how it trains, beside what
else is gathered there; one that comes back hears what the process before it has said, for the
server keeps that.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tf_hips.callbacks import optimizers
from tf_hips.callbacks.changes import changes
from tf_hips.errors import ProtocolError
from tf_hips.strategies.settings import configs_of

Facts = dict[str, Any]
"""How a process trains, by what it is: JSON values."""


def facts_of(model: keras.Model) -> Facts:
    """How `model` is trained, as it is compiled; to be asked before anything changes a rate."""
    facts = {"loss": getattr(model, "loss", None), **configs_of(optimizers.parts_of(model))}
    read: Facts = json.loads(json.dumps(facts, default=_plain, skipkeys=True))
    return read


def check_same(own: int, facts: Facts, told_by_all: Sequence[Facts | None]) -> None:
    """Raises where a process that has come back trains in another way than the one before it.

    Not where others train as it does: then the one before it was the odd one.

    Args:
        own: number of this worker among all.
        facts: its own.
        told_by_all: of all workers, None of absent ones: of this one what its site said first.

    Raises:
        ProtocolError: names what is other than it was.
    """
    was = told_by_all[own]
    if was is None or was == facts:
        return
    if any(one == facts for number, one in enumerate(told_by_all) if number != own):
        return
    raise ProtocolError(
        "A process that comes back to a run must train as the one before it did, whose rounds it "
        "does again; for a script that was changed, give the run another name (`--run`), or remove "
        f"what the server keeps of it (`--state`). Received: {'; '.join(changes(facts, was))}"
    )


def is_facts(told: Any) -> bool:
    """Whether a worker may say so."""
    return isinstance(told, dict)


def _plain(value: Any) -> Any:
    """What is no JSON value as one, the same in each process."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, keras.losses.Loss):
        try:
            return {**value.get_config(), "name": type(value).__name__}
        except Exception:  # noqa: BLE001 - as of an optimizer
            return type(value).__name__
    if isinstance(value, np.generic):
        return value.item()
    return getattr(value, "__name__", type(value).__name__)
