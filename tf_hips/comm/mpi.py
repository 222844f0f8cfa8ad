# SPDX-License-Identifier: Apache-2.0
"""Launchers of MPI, whose processes Horovod, built without MPI, does not join to one job.

Imports no TensorFlow: the command line asks here too.
"""

from collections.abc import Mapping

from tf_hips.errors import ConfigError

# Number of ranks, and this rank, as Horovod's own launcher and ours say them.
HOROVOD = ("HOROVOD_SIZE", "HOROVOD_RANK")
# Where Open MPI, MPICH and Slurm's `srun` tell a process how many were started with it. Not
# SLURM_NTASKS: a batch script has it too, in which one process is one process.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def check_alone(environment: Mapping[str, str]) -> None:
    """Looks whether a process that Horovod takes for the only one is one of several.

    Args:
        environment: of this process.

    Raises:
        ConfigError: a launcher of MPI has started it with others, and nothing says that each of
            them is for itself.
    """
    if HOROVOD[0] in environment:
        return
    for name in SIZES:
        if environment.get(name, "1") != "1":
            raise ConfigError(
                "Processes of mpirun or srun do not find each other: Horovod is built without MPI "
                "here. Start them with `horovodrun`, or `tf-hips run --parties 1 --workers N`; set "
                f"{HOROVOD[0]}=1 where each is to train alone. Received: {name}={environment[name]}"
            )
