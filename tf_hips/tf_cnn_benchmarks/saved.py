# SPDX-License-Identifier: Apache-2.0
"""What encoding keeps, saved beside upstream's checkpoints.

Upstream writes and reads checkpoints on rank 0 alone, and broadcasts what it has read. Residuals
and momenta are another thing on every rank, so each rank has a folder of its own in its
`--train_dir`:

    model.ckpt-120                      upstream's: weights, slots, the global step
    tf_hips/rank0of2/state.ckpt-120     of rank 0
    tf_hips/rank1of2/state.ckpt-120     of rank 1, on its machine

Invariant: a checkpoint of upstream's is begun when all ranks have written theirs for the same step,
so whoever finds the one finds the others, wherever the job was killed.
"""

import json
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.errors import ProtocolError
from tf_hips.tf_cnn_benchmarks.sums import eager

_ABOUT = "tf_hips/about"
_NOT_THERE, _FITS, _IS_OTHERS = 0, 1, 2


class SavedState:
    """The variables of one rank and their files."""

    def __init__(
        self, variables: Mapping[str, Any], facts: Mapping[str, Any], max_to_keep: int
    ) -> None:
        """Builds what saves and restores them; the graph must not be final yet.

        Args:
            variables: of the present graph, by name; not empty.
            facts: JSON values by name; what must be the same when they are restored.
            max_to_keep: files of how many steps are kept.
        """
        self._facts = dict(facts)
        with tf.compat.v1.name_scope("tf_hips/"):
            about = tf.compat.v1.Variable(
                json.dumps(self._facts, sort_keys=True),
                trainable=False,
                use_resource=True,
                collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
                name="about",
            )
            named = {f"tf_hips/{name}": variable for name, variable in variables.items()}
            self._saver = tf.compat.v1.train.Saver(
                {_ABOUT: about, **named}, max_to_keep=max_to_keep, save_relative_paths=True
            )

    def save(self, session: Any, train_dir: str, step: int) -> None:
        """Writes the files of one step, and returns when all ranks have.

        Args:
            session: where the variables live.
            train_dir: upstream's `--train_dir`.
            step: upstream's global step.
        """
        folder = _folder(train_dir)
        tf.io.gfile.makedirs(folder)
        self._saver.save(session, f"{folder}/state.ckpt", global_step=step, write_meta_graph=False)
        with eager():
            primitives.barrier(f"the files of step {step}")

    def restore(self, session: Any, train_dir: str, step: int) -> bool:
        """Takes up the files of one step, if all ranks have them.

        Args:
            session: where the variables live.
            train_dir: upstream's `--train_dir`.
            step: upstream's global step, as it was restored.

        Returns:
            Whether they were there; otherwise everything stays as it is.

        Raises:
            ProtocolError: on all ranks, if files of any were written for something else.
        """
        path = f"{_folder(train_dir)}/state.ckpt-{step}"
        found, differences = _NOT_THERE, ""
        if tf.compat.v1.train.checkpoint_exists(path):
            differences = self._differences(path)
            found = _IS_OTHERS if differences else _FITS
        with eager():
            told = primitives.gather_objects([found, differences], "what was saved on all ranks")
        for rank, (one, text) in enumerate(told):
            if one == _IS_OTHERS:
                raise ProtocolError(
                    "What encoding keeps must be restored where it was saved; give the flags of "
                    f"the run that wrote {train_dir}, or remove its folder tf_hips to begin with "
                    f"nothing kept. Received on rank {rank}: {text}"
                )
        if any(one != _FITS for one, _ in told):
            return False
        self._saver.restore(session, path)
        return True

    def _differences(self, path: str) -> str:
        saved = json.loads(tf.train.load_checkpoint(path).get_tensor(_ABOUT))
        return "; ".join(
            f"{name} is {self._facts.get(name, 'not known')} and was {saved.get(name, 'not known')}"
            for name in sorted({*saved, *self._facts})
            if saved.get(name) != self._facts.get(name)
        )


def _folder(train_dir: str) -> str:
    return f"{train_dir}/tf_hips/rank{primitives.rank()}of{primitives.size()}"
