# SPDX-License-Identifier: Apache-2.0
"""Callbacks for `keras.Model.fit`: resuming at the step, learning rates, checkpoints to evaluate.

They work under a strategy of tf_hips and without one. Give them to `fit` on all workers. Loss and
metrics over all workers, equal initial weights, and who writes which file are the strategies' own
business and need no callback.
"""

from tf_hips.callbacks.backup import BackupAndRestore
from tf_hips.callbacks.learning_rate import LearningRateMultiplier, LearningRateWarmup
from tf_hips.callbacks.resuming import first_step as first_step  # of the strategies only
from tf_hips.callbacks.step_checkpoint import StepCheckpoint

__all__ = ["BackupAndRestore", "LearningRateMultiplier", "LearningRateWarmup", "StepCheckpoint"]
