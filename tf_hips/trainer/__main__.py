# SPDX-License-Identifier: Apache-2.0
"""`python -m tf_hips.trainer VERB SETTINGS`: what `tf-hips train` and its like become.

SETTINGS is one line of JSON, which the command line has made and checked.
"""

import json
import os
import sys
from types import TracebackType
from typing import Any

from tf_hips import config, errors

_NAMES = {"show": "data show", "prepare": "data prepare"}


def main(verb: str, text: str) -> None:
    """Does what the verb says; errors of ours are one line, as those of `tf-hips` are."""
    name = f"tf-hips {_NAMES.get(verb, verb)}"
    _complain_as(name)
    with errors.packages_wanted(name):
        _do(verb, json.loads(text))


def _do(verb: str, told: Any) -> None:
    if verb == "train":
        from tf_hips.trainer import training
        from tf_hips.trainer.settings import Training

        training.run(_build(Training, told))
    elif verb == "evaluate":
        from tf_hips.trainer import evaluator
        from tf_hips.trainer.settings import Evaluation

        evaluator.run(_build(Evaluation, told))
    else:
        from tf_hips.trainer import data_sets
        from tf_hips.trainer.settings import Prepare, Show

        if verb == "show":
            data_sets.show(_build(Show, told))
        else:
            data_sets.prepare(_build(Prepare, told))


def _complain_as(name: str) -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_ours = isinstance(error, errors.TfHipsError)
        if os.environ.get(errors.TRACEBACK_VARIABLE) == "1" or not (
            is_ours or isinstance(error, KeyboardInterrupt)
        ):
            before(kind, error, trace)
        elif is_ours:
            sys.stderr.write(f"{name}: error: {' '.join(str(error).split())}\n")
            errors.end_launched(error)

    sys.excepthook = hook


def _build(kind: Any, told: Any) -> Any:
    return config.build(kind, told, "the command line")


if __name__ == "__main__":
    main(*sys.argv[1:])
