# SPDX-License-Identifier: Apache-2.0
"""The image: Debian's Python, the two wheels of `make wheel`, the script; nobody's root."""

from tf_hips.cluster.description import Cluster

# User of the image, and where Kubeflow puts the ssh keys of an MPIJob.
IMAGE_USER = 1000
SSH_FOLDER = "/opt/tf_hips/.ssh"
JOB = "/job"
SSH_PORT = 2222
_OWN_NAME = "tf_hips"


def image(cluster: Cluster) -> str:
    """Name of the cluster's image."""
    if cluster.image is not None:
        return cluster.image
    from tf_hips import __version__

    return f"{_OWN_NAME}:{__version__}"


def containerfile() -> str:
    """The text of the Containerfile; its context has `wheels/` and `job/`."""
    return f"""\
# Written by `tf-hips deploy`. Build it in the folder that has wheels/ and job/.
FROM python:3.11-slim

# `make wheel` made the wheels for this Python and for one build of TensorFlow: cpu or gpu.
ARG TENSORFLOW=cpu

# sshd, for workers of a party on several hosts. g++, for compressions from a specification (.pse).
RUN apt-get update \\
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \\
        g++ openssh-client openssh-server \\
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*

COPY wheels/ /wheels/
RUN pip install --no-cache-dir /wheels/horovod-*.whl \\
        "$(echo /wheels/tf_hips-*.whl)[$TENSORFLOW,metrics]" \\
    && rm -rf /wheels

# Kubeflow makes the keys of an MPIJob, one pair for all its pods, and puts them into
# {SSH_FOLDER}. sshd runs without root, so on a port above 1024, and its host key is that key.
RUN groupadd --gid {IMAGE_USER} tf_hips \\
    && useradd --uid {IMAGE_USER} --gid tf_hips --home-dir /opt/tf_hips --create-home tf_hips \\
    && install -d -o tf_hips -g tf_hips {JOB} \\
    && mkdir {SSH_FOLDER}_config \\
    && printf '%s\\n' 'Port {SSH_PORT}' 'HostKey {SSH_FOLDER}/id_rsa' \\
        'AuthorizedKeysFile {SSH_FOLDER}/authorized_keys' 'StrictModes no' 'UsePAM no' \\
        'PidFile none' 'PasswordAuthentication no' >{SSH_FOLDER}_config/sshd_config \\
    && printf '%s\\n' 'Host *' '  Port {SSH_PORT}' '  StrictHostKeyChecking no' \\
        '  UserKnownHostsFile /dev/null' '  LogLevel ERROR' >/etc/ssh/ssh_config.d/tf_hips.conf

# The script may write beside itself: models, and backups for `party.max_restarts`.
COPY --chown={IMAGE_USER}:{IMAGE_USER} job/ {JOB}/
USER {IMAGE_USER}
WORKDIR {JOB}
ENTRYPOINT ["tf-hips"]
"""
