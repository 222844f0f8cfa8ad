# SPDX-License-Identifier: Apache-2.0
"""What lies where on a machine, and what each role is started with.

A role has a folder of its own, `FOLDER/server-SITE` or `FOLDER/party-SITE`, with its certificate
and key, `authority.pem`, a log and the number of its process; a server also `server.yaml` and the
specifications that this names, a party also `job/`, the script's folder, and `hostfile`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tf_hips.cluster import text
from tf_hips.cluster.description import (
    PATHS,
    TOPMOST,
    Cluster,
    PartyServerSite,
    PartySite,
    Role,
    ServerSite,
)

AUTHORITY = "authority.pem"
REVOKED = "revoked.txt"
SERVER_FILE = "server.yaml"
HOSTFILE = "hostfile"
JOB = "job"
READY = "ready"
CACHE = ".cache"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a role finds its files: on a machine, or in a container.

    Attributes:
        identity: folder of its certificate and key, of `authority.pem` and `revoked.txt`.
        certificate: name of the certificate's file there.
        key: name of the key's file there.
        data: folder for what it writes.
        job: folder of the script.
        uplink: names of the certificate and the key of a party server towards the one above it.
    """

    identity: PurePosixPath
    certificate: str
    key: str
    data: PurePosixPath
    job: PurePosixPath
    uplink: tuple[str, str] = ("", "")

    @property
    def tls(self) -> dict[str, str]:
        """The options that name the identity."""
        return {
            "authority": str(self.identity / AUTHORITY),
            "certificate": str(self.identity / self.certificate),
            "key": str(self.identity / self.key),
        }


def role_name(role: Role) -> str:
    """`server-SITE` or `party-SITE`."""
    return f"{'server' if isinstance(role, ServerSite) else 'party'}-{role.site}"


def identity_files(role: Role) -> tuple[str, str]:
    """Names of a role's certificate and key, as `tf-hips certs issue` calls them."""
    kind = "global-server" if isinstance(role, ServerSite) else "party"
    if isinstance(role, PartyServerSite):
        kind = "server"
    return f"{kind}-{role.site}.pem", f"{kind}-{role.site}.key"


def uplink_files(role: Role) -> tuple[str, str]:
    """Names of the certificate and the key of a party server towards the one above it."""
    return f"party-{role.site}.pem", f"party-{role.site}.key"


def home(cluster: Cluster, role: Role) -> PurePosixPath:
    """The role's folder on its machine."""
    return PurePosixPath(role.folder or cluster.folder) / role_name(role)


def program(cluster: Cluster, role: Role) -> str:
    """`tf-hips` on the role's machine."""
    return role.program or cluster.program


def on_machine(cluster: Cluster, role: Role) -> Place:
    """Where the role finds its files on its machine."""
    folder = home(cluster, role)
    return Place(folder, *identity_files(role), folder, folder / JOB, uplink_files(role))


def server_options(cluster: Cluster, server: ServerSite, place: Place) -> dict[str, Any]:
    """What a server is told, by key."""
    if isinstance(server, PartyServerSite):
        return _party_server_options(cluster, server, place)
    shard = cluster.servers.index(server)
    own = {"shard": f"{shard}/{len(cluster.servers)}"} if len(cluster.servers) > 1 else {}
    if shard > 0:
        own["lead"] = cluster.servers[0].address
    return {
        "parties": list(cluster.sites),
        "run": cluster.run,
        "bind": server.listens_at,
        **own,
        **place.tls,
        "revoked": str(place.identity / REVOKED),
        **_placed(cluster.server, place.data),
    }


def _party_server_options(
    cluster: Cluster, server: PartyServerSite, place: Place
) -> dict[str, Any]:
    above, role = cluster.addresses_above(server.site)
    common = {key: value for key, value in cluster.server.items() if key not in TOPMOST}
    certificate, key = place.uplink
    return {
        "parties": list(server.parties),
        "run": cluster.run,
        "bind": server.listens_at,
        **place.tls,
        "revoked": str(place.identity / REVOKED),
        "uplink": above,
        "site": server.site,
        "uplink_role": role,
        "uplink_certificate": str(place.identity / certificate),
        "uplink_key": str(place.identity / key),
        **_placed({**common, **server.options}, place.data),
    }


def server_file(cluster: Cluster, server: ServerSite, place: Place) -> str:
    """The text of a server's `server.yaml`."""
    options = server_options(cluster, server, place)
    return text.documents(options)


def server_command(cluster: Cluster, server: ServerSite) -> list[str]:
    """How a server is started on its machine."""
    return [
        *(program(cluster, server), "server"),
        *("--config", str(home(cluster, server) / SERVER_FILE)),
    ]


def party_command(
    cluster: Cluster, party: PartySite, place: Place, where: list[str], *, ready: bool = False
) -> list[str]:
    """How a party is started, in its folder `job`.

    Args:
        cluster: what it is a party of.
        party: the party.
        place: where it finds its files.
        where: the options that say on which hosts it has how many workers.
        ready: whether it says in the file `ready` that its workers are started.
    """
    above, role = cluster.addresses_above(party.site)
    is_below = cluster.server_of(party.site) is not None
    told = dict(cluster.party)
    if told.get("intra") == "ps" and not (is_below and party.slots == 1):
        del told["intra"]  # it meets no server of a party, or its workers meet by Horovod
    options = {
        "server": above,
        **({"server_role": role} if is_below else {}),
        "site": party.site,
        "run": cluster.run,
        **place.tls,
        **_placed(told, place.data),
        **({"announce": str(place.data / READY)} if ready else {}),
    }
    return [
        *(program(cluster, party), "party", *command_line(options), *where, "--"),
        *(Path(cluster.script).name, *cluster.arguments),
    ]


def party_on_machine(cluster: Cluster, party: PartySite, *, ready: bool = False) -> list[str]:
    """How a party is started on its first host."""
    if len(party.hosts) == 1:
        where = ["--num-proc", str(party.slots)]
    else:
        where = ["--hostfile", str(home(cluster, party) / HOSTFILE)]
        where += ["--interface", party.interface] if party.interface else []
    return party_command(cluster, party, on_machine(cluster, party), where, ready=ready)


def hostfile(party: PartySite) -> str:
    """A party's hosts as horovodrun reads them: it takes neither comments nor empty lines."""
    return "".join(f"{host} slots={slots}\n" for host, slots in party.hosts.items())


def command_line(values: Mapping[str, Any]) -> list[str]:
    """Options of a command, by key, as its command line has them."""
    found = []
    for key, value in values.items():
        name = f"--{key.replace('_', '-')}"
        if value is True:
            found.append(name)
        elif value is not None and value is not False:
            found.append(f"{name}={value}")
    return found


def _placed(options: Mapping[str, Any], data: PurePosixPath) -> dict[str, Any]:
    """Options with absolute paths."""
    return {
        key: str(data / value) if key in PATHS and value is not None else value
        for key, value in options.items()
    }
