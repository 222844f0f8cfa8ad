# SPDX-License-Identifier: Apache-2.0
"""Manifests for Kubernetes, and MPIJobs (kubeflow.org/v2beta1) for parties of several hosts.

Our Horovod is built with Gloo and without MPI, so an MPIJob's launcher does not run `mpirun`. What
an MPIJob brings is what `horovodrun --gloo` needs, too: workers that run sshd, keys with which the
launcher may log in, and their names in `/etc/mpi/hostfile`, in horovodrun's own format. A party of
one host needs none of it and is a Job.

No key is in any manifest: certificates come from a Secret that `kubectl create secret` makes.
"""

import base64
import hashlib
import json
import math
import re
import shlex
from pathlib import PurePosixPath
from typing import Any

from tf_hips.cluster import archive, layout, text
from tf_hips.cluster.container import IMAGE_USER, JOB, SSH_FOLDER, SSH_PORT, image
from tf_hips.cluster.description import (
    PATHS,
    Cluster,
    PartyServerSite,
    PartySite,
    Role,
    ServerSite,
)
from tf_hips.cluster.layout import Place
from tf_hips.errors import ConfigError
from tf_hips.ops.specifications import CACHE

_IDENTITY = PurePosixPath("/etc/tf_hips/identity")
_CONFIG = PurePosixPath("/etc/tf_hips/config")
_DATA = PurePosixPath("/var/lib/tf_hips")
_UPLINK = ("uplink-certificate.pem", "uplink-key.pem")
_PLACE = Place(_IDENTITY, "certificate.pem", "key.pem", _DATA, PurePosixPath(JOB), _UPLINK)
# Kubernetes puts up to 12 characters behind a job's name, and a name may have 63.
_MAX_NAME = 50
# In a container any port can be had without root; the Service has that of the address.
_PORT = 7070
# Of pods; an MPIJob's workers meet over nothing else.
_INTERFACE = "eth0"


def manifests(cluster: Cluster) -> dict[str, str]:
    """The text of each manifest, by file name.

    Raises:
        ConfigError: the cluster cannot be as it is described under Kubernetes.
    """
    if cluster.server.get("once"):
        raise ConfigError(
            "`server.once` must be false for Kubernetes: a Deployment starts a server again that "
            "has ended. --only leaves Kubernetes out"
        )
    for section in ("server", "party"):
        for key in PATHS:
            _check_relative(f"{section}.{key}", getattr(cluster, section).get(key))
    for one in cluster.party_servers:
        for key in PATHS:
            _check_relative(f"party_servers.{one.site}.options.{key}", one.options.get(key))
    names: dict[str, str] = {}
    found = {}
    for role in cluster.roles:
        name = object_name(cluster, role)
        if name in names:
            raise ConfigError(
                f"sites must have distinct names under Kubernetes. Received: {names[name]} and "
                f"{role.site}, both {name}"
            )
        names[name] = role.site
        parts = _server(cluster, role) if isinstance(role, ServerSite) else [_party(cluster, role)]
        written = f"# Written by `tf-hips deploy`.\n{text.documents(*parts)}"
        found[f"{layout.role_name(role)}.yaml"] = written
    return found


def _check_relative(what: str, value: str | None) -> None:
    if value is not None and value.startswith("/"):
        raise ConfigError(
            f"`{what}` must be a relative path for Kubernetes, where it lies in the volume. "
            f"Received: {value!r}"
        )


def object_name(cluster: Cluster, role: Role) -> str:
    """Name of a role's objects: lower case letters, digits and '-'.

    Raises:
        ConfigError: it would be too long.
    """
    name = re.sub(r"[^a-z0-9]+", "-", f"{cluster.run}-{layout.role_name(role)}".lower()).strip("-")
    if len(name) > _MAX_NAME:
        raise ConfigError(
            f"names of run and site must be short under Kubernetes, {_MAX_NAME} characters with "
            f"the role. Received: {name}"
        )
    # A Service's name begins with a letter.
    return name if name[0].isalpha() else f"r{name}"


def secret_command(cluster: Cluster, role: Role, certificates: str) -> str:
    """The command that makes the Secret of a role from its certificate files."""
    certificate, key = layout.identity_files(role)
    files = {layout.AUTHORITY: layout.AUTHORITY, "certificate.pem": certificate, "key.pem": key}
    if isinstance(role, ServerSite):
        files[layout.REVOKED] = layout.REVOKED
    if isinstance(role, PartyServerSite):
        files |= dict(zip(_UPLINK, layout.uplink_files(role), strict=True))
    parts = [
        f"--from-file={name}={shlex.quote(f'{certificates}/{file}')}"
        for name, file in files.items()
    ]
    name = f"{object_name(cluster, role)}-identity"
    return " \\\n    ".join([f"kubectl create secret generic {name}", *parts])


def _server(cluster: Cluster, server: ServerSite) -> list[dict[str, Any]]:
    name = object_name(cluster, server)
    labels = _labels(cluster, server)
    options = {
        **layout.server_options(cluster, server, _PLACE),
        "bind": f"0.0.0.0:{_PORT}",
    }
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels},
        "data": {layout.SERVER_FILE: text.documents(options)},
    }
    config_volume: dict[str, Any] = {"name": name}
    specifications = archive.specifications(cluster, server)
    if specifications:
        # A key has no slashes; the path of its file may have some.
        keys = {f"specification-{i}": one for i, one in enumerate(specifications)}
        config["binaryData"] = {
            key: base64.b64encode(one.content).decode() for key, one in keys.items()
        }
        paths = {layout.SERVER_FILE: layout.SERVER_FILE}
        paths |= {key: one.name for key, one in keys.items()}
        config_volume["items"] = [{"key": key, "path": path} for key, path in paths.items()]
    is_durable = bool(layout.server_options(cluster, server, _PLACE).get("state"))
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": cluster.volume}},
        },
    }
    probe = {"tcpSocket": {"port": "rounds"}}
    container: dict[str, Any] = {
        "name": "server",
        "image": image(cluster),
        "args": ["server", "--config", str(_CONFIG / layout.SERVER_FILE)],
        "ports": [{"name": "rounds", "containerPort": _PORT}],
        # What it compiles must lie where it may write.
        **({"env": [_cache()]} if specifications else {}),
        # A durable server reads its state before it listens.
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": 120},
        "readinessProbe": {**probe, "periodSeconds": 10},
        "livenessProbe": {**probe, "periodSeconds": 20, "failureThreshold": 3},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            *_mounts(),
            {"name": "config", "mountPath": str(_CONFIG), "readOnly": True},
        ],
    }
    data = {"persistentVolumeClaim": {"claimName": name}} if is_durable else {"emptyDir": {}}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 1,
            # The old server must be gone before the new one opens the state, which has one owner.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {
                # Other options are another pod: one that runs reads its file no more.
                "metadata": {"labels": labels, "annotations": {"checksum/config": _sum(config)}},
                "spec": {
                    **_pod(),
                    "containers": [container],
                    "volumes": [
                        *_volumes(name, data),
                        {"name": "config", "configMap": config_volume},
                    ],
                },
            },
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            # Parties at other sites reach it from outside.
            "type": "LoadBalancer",
            "selector": labels,
            "ports": [
                {
                    "name": "rounds",
                    "port": int(server.address.rpartition(":")[2]),
                    "targetPort": "rounds",
                }
            ],
        },
    }
    return [config, *([claim] if is_durable else []), deployment, service]


def _sum(config: dict[str, Any]) -> str:
    """SHA-256 of what a ConfigMap holds."""
    held = [config.get("data"), config.get("binaryData")]
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def _cache() -> dict[str, str]:
    return {"name": CACHE, "value": str(_DATA / layout.CACHE)}


def _party(cluster: Cluster, party: PartySite) -> dict[str, Any]:
    return _job(cluster, party) if len(party.hosts) == 1 else _mpi_job(cluster, party)


def _job(cluster: Cluster, party: PartySite) -> dict[str, Any]:
    name = object_name(cluster, party)
    labels = _labels(cluster, party)
    container = _launcher(cluster, party, ["--num-proc", str(party.slots)])
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            # A new pod has no backups; `party.max_restarts` starts workers again in this one.
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    **_pod(),
                    "restartPolicy": "Never",
                    "containers": [container],
                    "volumes": _volumes(name, {"emptyDir": {}}),
                },
            },
        },
    }


def _mpi_job(cluster: Cluster, party: PartySite) -> dict[str, Any]:
    name = object_name(cluster, party)
    labels = _labels(cluster, party)
    # All workers of an MPIJob have the same slots: as many as go into those of every host.
    slots = math.gcd(*party.hosts.values())
    where = ["--hostfile", "/etc/mpi/hostfile", "--interface", _INTERFACE]
    volumes = _volumes(name, {"emptyDir": {}})

    def replica(number: int, container: dict[str, Any]) -> dict[str, Any]:
        return {
            "replicas": number,
            "restartPolicy": "Never",
            "template": {
                "metadata": {"labels": labels},
                "spec": {**_pod(), "containers": [container], "volumes": volumes},
            },
        }

    worker = {
        "name": "worker",
        "image": image(cluster),
        "command": ["/usr/sbin/sshd"],
        "args": ["-De", "-f", f"{SSH_FOLDER}_config/sshd_config"],
        # The launcher is made when the workers are ready, and must find sshd there.
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2},
        "volumeMounts": _mounts(),
    }
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "slotsPerWorker": slots,
            "mpiImplementation": "OpenMPI",  # of which nothing but the hostfile's format is used
            "sshAuthMountPath": SSH_FOLDER,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "mpiReplicaSpecs": {
                "Launcher": replica(1, _launcher(cluster, party, where)),
                "Worker": replica(party.slots // slots, worker),
            },
        },
    }


def _launcher(cluster: Cluster, party: PartySite, where: list[str]) -> dict[str, Any]:
    _, *arguments = layout.party_command(cluster, party, _PLACE, where)
    variables = [
        {"name": name, "value": _as_it_is(value)} for name, value in party.environment.items()
    ]
    return {
        "name": "launcher",
        "image": image(cluster),
        "command": ["tf-hips"],
        "args": [_as_it_is(argument) for argument in arguments],
        "workingDir": JOB,
        **({"env": variables} if variables else {}),
        "volumeMounts": _mounts(),
    }


def _as_it_is(text: str) -> str:
    """What Kubernetes makes `text` of: it puts values of variables in the place of `$(NAME)`.

    To it `$$` is a `$`, wherever it stands.
    """
    return text.replace("$", "$$")


def _labels(cluster: Cluster, role: Role) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "tf-hips",
        "app.kubernetes.io/instance": object_name(cluster, role),
    }


def _pod() -> dict[str, Any]:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": IMAGE_USER,
            "runAsGroup": IMAGE_USER,
            # With it the Secret's files can be read by the user of the image.
            "fsGroup": IMAGE_USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _mounts() -> list[dict[str, Any]]:
    return [
        {"name": "identity", "mountPath": str(_IDENTITY), "readOnly": True},
        {"name": "data", "mountPath": str(_DATA)},
        {"name": "scratch", "mountPath": "/tmp"},
    ]


def _volumes(name: str, data: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": "identity", "secret": {"secretName": f"{name}-identity", "defaultMode": 0o440}},
        {"name": "data", **data},
        {"name": "scratch", "emptyDir": {}},
    ]
