# SPDX-License-Identifier: Apache-2.0
"""Writes what starts a cluster by other means: the same files for the same cluster.

A file that somebody else put into the folder is never overwritten: the names of ours are kept in
the folder, and what is no longer needed goes away.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from tf_hips.cluster import archive, container, kubernetes, layout, skypilot, systemd
from tf_hips.cluster.description import Cluster
from tf_hips.errors import ConfigError

README = "README.md"
_JOB = "job"


@dataclasses.dataclass(frozen=True)
class _File:
    content: bytes
    mode: int = 0o644


def write(cluster: Cluster, folder: Path, kinds: Sequence[str]) -> list[str]:
    """Writes the files of `kinds` into `folder`; returns their names.

    Args:
        cluster: the cluster.
        folder: made if need be. Files of an earlier call that are not written again are removed.
        kinds: some of systemd, kubernetes, horovod, skypilot and container.

    Raises:
        ConfigError: the cluster cannot be so, or the folder holds a file of this name that is not
            ours. Nothing has been written then.
    """
    certificates = os.path.relpath(cluster.certificates, folder.resolve())
    files = _files(cluster, kinds, certificates)
    mark = folder / archive.MARK
    before = mark.read_text(encoding="utf-8").splitlines() if mark.is_file() else []
    for name in sorted(files):
        if os.path.lexists(folder / name) and name not in before:
            raise ConfigError(
                f"{folder / name} must not be there already: it was not written by `tf-hips deploy`"
            )
    for name in before:
        if name not in files:
            (folder / name).unlink(missing_ok=True)
    names = sorted(files)
    folder.mkdir(parents=True, exist_ok=True)
    # First the names: what an interrupted call leaves is ours for the next one.
    mark.write_text("".join(f"{name}\n" for name in sorted({*before, *names})), encoding="utf-8")
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(files[name].content)
        path.chmod(files[name].mode)
    mark.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    return names


def _files(cluster: Cluster, kinds: Sequence[str], certificates: str) -> dict[str, _File]:
    texts: dict[str, str] = {}
    if "systemd" in kinds:
        texts |= {f"systemd/{name}": text for name, text in systemd.units(cluster).items()}
        for server in cluster.all_servers:
            name = f"systemd/{layout.role_name(server)}/{layout.SERVER_FILE}"
            place = layout.on_machine(cluster, server)
            texts[name] = layout.server_file(cluster, server, place)
    if "kubernetes" in kinds:
        texts |= {
            f"kubernetes/{name}": text for name, text in kubernetes.manifests(cluster).items()
        }
    if "horovod" in kinds:
        for party in cluster.parties:
            texts[f"horovod/{layout.role_name(party)}.hosts"] = layout.hostfile(party)
    if "skypilot" in kinds:
        for party in cluster.parties:
            name = f"skypilot/{layout.role_name(party)}.yaml"
            texts[name] = skypilot.task(cluster, party, certificates)
    if "container" in kinds:
        texts["Containerfile"] = container.containerfile()
    texts[README] = _readme(cluster, kinds, certificates)
    files = {name: _File(text.encode()) for name, text in texts.items()}
    if "systemd" in kinds:
        for server in cluster.all_servers:
            for entry in archive.specifications(cluster, server):
                name = f"systemd/{layout.role_name(server)}/{entry.name}"
                files[name] = _File(entry.content)
    if {"skypilot", "container"} & set(kinds):
        files |= _job(cluster)
    return files


def _job(cluster: Cluster) -> dict[str, _File]:
    """The script's folder, as `sync` would send it."""
    found = {}
    for entry in archive.job_files(cluster):
        if entry.link is not None or isinstance(entry.source, bytes):
            raise ConfigError(
                f"the script's folder must have no symbolic links for skypilot and container. "
                f"Received: {entry.name}; `exclude` leaves it out"
            )
        mode = 0o755 if entry.is_program else 0o644
        found[f"{_JOB}/{entry.name}"] = _File(entry.source.read_bytes(), mode)
    return found


def _readme(cluster: Cluster, kinds: Sequence[str], certificates: str) -> str:
    parts = [
        f"# Run {cluster.run}\n\nWritten by `tf-hips deploy`; written anew by the next call. Every "
        "command is for this folder.\n"
    ]
    if "container" in kinds:
        parts.append(
            "## container\n\nThe image of servers and parties, with the script in `/job`. The "
            "wheels are those of `make wheel`.\n\n"
            "```\n"
            "mkdir wheels && cp .../dist/*.whl wheels/\n"
            f"podman build -t {container.image(cluster)} -f Containerfile .\n"
            "```\n"
        )
    if "kubernetes" in kinds:
        parts.append(_kubernetes_text(cluster, certificates))
    if "systemd" in kinds:
        parts.append(_systemd_text(cluster))
    if "horovod" in kinds:
        parts.append(
            "## horovod\n\nEach party's hosts, for `tf-hips party --hostfile FILE` and "
            "`horovodrun --hostfile FILE`.\n"
        )
    if "skypilot" in kinds:
        lines = "\n".join(
            f"sky launch -c {cluster.run}-{party.site} skypilot/{layout.role_name(party)}.yaml"
            for party in cluster.parties
        )
        parts.append(
            "## skypilot\n\nA party on machines of a cloud. The party's certificate and key go to "
            "its machines. The wheels are those of `make wheel`; say in the file which machines "
            "you want.\n\n"
            f"```\nmkdir wheels && cp .../dist/*.whl wheels/\n{lines}\n```\n"
        )
    return "\n".join(parts)


def _kubernetes_text(cluster: Cluster, certificates: str) -> str:
    secrets = "\n".join(
        kubernetes.secret_command(cluster, role, certificates) for role in cluster.roles
    )
    applied = "\n".join(
        f"kubectl apply -f kubernetes/{layout.role_name(role)}.yaml" for role in cluster.roles
    )
    return (
        "## kubernetes\n\nKeys are in no file here. Each role's Secret is made from its "
        "certificate files, and from nobody else's; a site of its own gets its own alone.\n\n"
        f"```\n{secrets}\n```\n\n"
        f"Then, each in the cluster of its site, with the image {container.image(cluster)}:\n\n"
        f"```\n{applied}\n```\n\n"
        "Parties of several hosts are MPIJobs and need Kubeflow's MPI operator (v2beta1). They run "
        "`horovodrun --gloo` over the operator's ssh keys, and no MPI. A server's address is that "
        "of its Service; `address` in cluster.yaml must be the name or address that parties reach "
        "it at.\n"
    )


def _systemd_text(cluster: Cluster) -> str:
    copied = "\n".join(
        f"{role.launcher}: {systemd.unit_name(cluster, role)}" for role in cluster.roles
    )
    return (
        "## systemd\n\n`tf-hips sync` copies the files of each role to its machine; the user "
        f"{cluster.user} must own them. Then, on the machine of each role, its unit goes to "
        "`/etc/systemd/system`:\n\n"
        f"```\n{copied}\n```\n\n"
        "`systemctl daemon-reload && systemctl enable --now UNIT` starts it, servers first, and "
        "again when the machine has lost power; `systemctl disable --now UNIT` when the run is "
        "over.\n"
    )
