# SPDX-License-Identifier: Apache-2.0
"""Going on from HiPS's `net.meta`: the number of steps, when training began, and weights beside it.

With the weights come the slots of the optimizer, where it is the same. Residuals, what a server
keeps, and the order of data begin anew; all of that is in a backup (docs/resume.md).
"""

import dataclasses
import warnings
from pathlib import Path

import keras

from tf_hips.callbacks import weights_file
from tf_hips.callbacks.optimizers import counter
from tf_hips.errors import ConfigError
from tf_hips.report import trees

_OF_MXNET = "net.params"


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Where a run goes on.

    Attributes:
        steps: that were made.
        begin_s: when training began, seconds since 1970.
        weights: the file that holds them.
    """

    steps: int
    begin_s: float
    weights: Path


def is_of(path: str | Path, tree: str | Path) -> bool:
    """Whether a `net.meta`, or a folder with one, lies in a tree."""
    return Path(path).resolve().is_relative_to(Path(tree).resolve())


def find(path: str | Path) -> Resumed:
    """What a `net.meta`, or a folder with one, has to go on from.

    Raises:
        ConfigError: it is no such file, or there are no weights beside it.
    """
    meta = Path(path) / trees.META if Path(path).is_dir() else Path(path)
    told = trees.read_meta(meta)
    steps, begin_s = told.get("global_iters"), told.get("begin_time")
    is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0
    if steps is None or begin_s is None or not is_count or not isinstance(begin_s, int | float):
        raise ConfigError(
            f"{meta} must say `global_iters` and `begin_time`. Received: {steps!r}, {begin_s!r}"
        )
    weights = meta.with_name(trees.WEIGHTS)
    if not weights.is_file():
        found = "none"
        if meta.with_name(_OF_MXNET).exists():
            found = f"{_OF_MXNET} of HiPS, which holds MXNet's arrays and no Keras model"
        raise ConfigError(
            f"Beside {meta} there must be {trees.WEIGHTS}, as --tree-dir writes it. Received: "
            f"{found}"
        )
    return Resumed(int(steps), float(begin_s), weights)


def load(model: keras.Model, found: Resumed, what: str) -> None:
    """Gives a model the weights, and its optimizer the number of the step.

    Args:
        model: a built and compiled Keras model.
        found: where it goes on.
        what: the model is.

    Raises:
        ConfigError: they are of another model, or damaged.
    """
    rate = model.optimizer.learning_rate
    asked_for = float(rate) if isinstance(rate, keras.Variable) else None
    try:
        with warnings.catch_warnings():
            # Keras warns where it finds no weights for a layer, and leaves it as it began.
            warnings.simplefilter("error", UserWarning)
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model.load_weights(found.weights)
    except (OSError, KeyError, ValueError, UserWarning) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"The weights to go on from must be of {what}. Received: {found.weights}, of another "
            f"model or damaged ({first})"
        ) from error
    counter(model.optimizer).assign(found.steps)
    if asked_for is not None:
        rate.assign(asked_for)  # that of the file was the last run's


def save(model: keras.Model, folder: Path) -> None:
    """Writes the weights beside a `net.meta`; who reads them sees the whole old or new ones."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{trees.WEIGHTS}"
    weights_file.write(model, draft)
    draft.replace(folder / trees.WEIGHTS)
