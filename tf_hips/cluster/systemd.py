# SPDX-License-Identifier: Apache-2.0
"""Units of systemd: one for each server, and one for each party on its first host.

A server is started again when it was killed, which is what `--state` is for; one that was told to
end, or whose run is over, stays away. So does one that ends with an error, as below its quorum: a
new process would begin a new run and wait for parties that nobody starts. A party is started again
when its launcher was killed, and comes back from its last backup; one that ended with an error has
left the run, after as many restarts as `max_restarts` gave it.
"""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from tf_hips.cluster import archive, layout
from tf_hips.cluster.description import PATHS, Cluster, PartySite, Role, ServerSite
from tf_hips.ops.specifications import CACHE

_FIRST_FREE_PORT = 1024
# Words that need no quotes; a unit knows `%` and `$` beside quotes and backslashes.
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@+-]+")


def units(cluster: Cluster) -> dict[str, str]:
    """The text of each unit, by file name."""
    found = {}
    for server in cluster.all_servers:
        found[unit_name(cluster, server)] = _server(cluster, server)
    for party in cluster.parties:
        found[unit_name(cluster, party)] = _party(cluster, party)
    return found


def unit_name(cluster: Cluster, role: Role) -> str:
    """Name of a role's unit."""
    return f"tf-hips-{cluster.run}-{layout.role_name(role)}.service"


def command_text(words: Iterable[str]) -> str:
    """Words as `ExecStart=` takes them."""
    return " ".join(_quoted(word.replace("%", "%%").replace("$", "$$")) for word in words)


def _quoted(word: str) -> str:
    if _PLAIN.fullmatch(word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _server(cluster: Cluster, server: ServerSite) -> str:
    home = layout.home(cluster, server)
    # Ports below belong to root, whose right to take them the server then needs.
    rights = "CAP_NET_BIND_SERVICE" if server.port < _FIRST_FREE_PORT else ""
    options = layout.server_options(cluster, server, layout.on_machine(cluster, server))
    # One that is not there is the server's to tell; systemd would name its own machinery.
    elsewhere = "".join(
        f" -{options[key]}"
        for key in PATHS
        if options.get(key) and home not in PurePosixPath(options[key]).parents
    )
    # What it compiles must lie where it may write.
    is_compiling = bool(archive.specifications(cluster, server))
    cache = f"Environment={CACHE}={home / layout.CACHE}\n" if is_compiling else ""
    return f"""\
# Written by `tf-hips deploy`.
[Unit]
Description=tf_hips server of run {cluster.run} at {server.site}
Wants=network-online.target
After=network-online.target
# A server that dies whenever it is started is not tried for ever.
StartLimitIntervalSec=300
StartLimitBurst=10

[Service]
Type=exec
User={cluster.user}
WorkingDirectory={home}
{cache}ExecStart={command_text(layout.server_command(cluster, server))}
# Killed, it goes on with its run; one that ended with an error has ended that, and needs a look.
Restart=on-abnormal
RestartSec=5
TimeoutStopSec=30
UMask=0077
# All that it writes, its state included, lies here.
ReadWritePaths={home}{elsewhere}
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
NoNewPrivileges=yes
CapabilityBoundingSet={rights}
AmbientCapabilities={rights}
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""


def _party(cluster: Cluster, party: PartySite) -> str:
    home = layout.home(cluster, party)
    variables = "".join(
        f"Environment={_quoted(f'{name}={value}'.replace('%', '%%'))}\n"
        for name, value in party.environment.items()
    )
    return f"""\
# Written by `tf-hips deploy`. For {party.launcher}, the first host of the party.
[Unit]
Description=tf_hips party {party.site} of run {cluster.run}
Wants=network-online.target
After=network-online.target

[Service]
Type=exec
User={cluster.user}
WorkingDirectory={home / layout.JOB}
{variables}ExecStart={command_text(layout.party_on_machine(cluster, party))}
# Killed, a party can come back into the run; one that ended with an error has left it.
Restart=on-abnormal
RestartSec=5
# What the launcher ends with where it was told to: `systemctl stop` is no failure.
SuccessExitStatus=143
# Only the launcher is told to end: it ends the workers, those of other hosts included.
KillMode=mixed
TimeoutStopSec=60
UMask=0077
# A training script reads data, writes checkpoints and uses devices as it likes, so less is closed
# than for a server.
ProtectSystem=full
NoNewPrivileges=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
RestrictSUIDSGID=yes

[Install]
WantedBy=multi-user.target
"""
