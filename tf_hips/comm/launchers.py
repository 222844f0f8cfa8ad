# SPDX-License-Identifier: Apache-2.0
"""Launchers whose processes Horovod does not join to one job, so that each would train alone.

Imports no TensorFlow: the command line asks here too.
"""

import json
from collections.abc import Mapping

from tf_hips.config import CONFIG_VARIABLE
from tf_hips.errors import ConfigError

# Number of ranks, and this rank, as Horovod's own launcher and ours say them.
HOROVOD = ("HOROVOD_SIZE", "HOROVOD_RANK")
# Where Open MPI, MPICH and Slurm's `srun` tell a process how many were started with it. Not
# SLURM_NTASKS: a batch script has it too, in which one process is one process.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
# What the start scripts of `tf.distribute` (or Kubeflow) and of HiPS and HiPress set.
TF_CONFIG = "TF_CONFIG"
DMLC = ("DMLC_NUM_WORKER", "DMLC_NUM_ALL_WORKER")
# Tasks of `tf.distribute` that train together.
_TRAINING = ("chief", "master", "worker")


def check_alone(environment: Mapping[str, str]) -> None:
    """Looks whether a process that Horovod takes for the only one is one of several.

    Args:
        environment: of this process.

    Raises:
        ConfigError: a launcher has started it with others that it will not find, and nothing says
            that each of them is for itself.
    """
    if HOROVOD[0] in environment:
        return
    for name in SIZES:
        if environment.get(name, "1") != "1":
            raise _refusal(
                "mpirun or srun", "Horovod is built without MPI here", f"{name}={environment[name]}"
            )
    if CONFIG_VARIABLE in environment:
        return  # of ours, which has told the process what it belongs to
    number = _num_tasks(environment.get(TF_CONFIG, ""))
    if number > 1:
        raise _refusal(
            "a cluster of `tf.distribute`",
            f"{TF_CONFIG} is not read for that",
            f"a {TF_CONFIG} of {number} tasks that train",
        )
    for name in DMLC:
        if environment.get(name, "1").strip() not in ("", "0", "1"):
            raise _refusal(
                "the start scripts of MXNet, HiPS and HiPress",
                "DMLC_* variables are not read",
                f"{name}={environment[name]}",
            )


def _refusal(whose: str, why: str, received: str) -> ConfigError:
    return ConfigError(
        f"Processes of {whose} do not find each other: {why}. Start them with `horovodrun`, or "
        f"`tf-hips run --parties 1 --workers N`; set {HOROVOD[0]}=1 where each is to train alone. "
        f"Received: {received}"
    )


def _num_tasks(text: str) -> int:
    """How many tasks of a `TF_CONFIG` train; 0 where this process has none of them."""
    try:
        told = json.loads(text or "{}")
        if told["task"]["type"] not in _TRAINING:
            return 0
        return sum(len(told["cluster"].get(kind, ())) for kind in _TRAINING)
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0
