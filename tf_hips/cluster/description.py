# SPDX-License-Identifier: Apache-2.0
"""`cluster.yaml`: the servers, parties and machines of a run, read strictly and checked at once."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_hips import config
from tf_hips.config import NAME
from tf_hips.errors import ConfigError

VERSION = 1
# Keys of `server` and `party` that follow from the rest of the file.
SERVER_DERIVED = (
    *("parties", "bind", "run", "shard", "lead", "announce"),
    *("authority", "certificate", "key", "revoked", "insecure"),
    *("uplink", "site", "uplink_role"),
    *("uplink_authority", "uplink_certificate", "uplink_key"),
    # Of servers of parties, each of which may be told others.
    *("uplink_compression", "period"),
)
_OF_PARTY_SERVERS = ("uplink_compression", "period")
# Options of `server` that only the topmost servers are told.
TOPMOST = (
    *("compression", "downlink", "rule", "metrics"),
    *("approach", "mode", "group_size", "worker_fail", "bucket_size", "vote", "fixed_groups"),
    *("quorum", "round_deadline", "deadline_mads", "late", "close_at", "below_quorum_s"),
)
PARTY_DERIVED = (
    *("server", "site", "run", "num_proc", "hosts", "hostfile", "interface", "announce"),
    *("authority", "certificate", "key", "insecure"),
)
# Keys of both that are paths: relative ones are meant from the role's folder on its machine.
PATHS = ("state", "log_dir")
# Keys of `server` that are texts of compressors, which may name a specification beside the script.
COMPRESSIONS = ("compression", "downlink", "uplink_compression")

# Horovod puts a folder into commands of a shell as it is.
_FOLDER = re.compile(r"/[A-Za-z0-9._/-]*[A-Za-z0-9_-]")
_PROGRAM = re.compile(r"/?[A-Za-z0-9._][A-Za-z0-9._/-]*")
# What horovodrun takes as a host.
_HOST = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_DESTINATION = re.compile(
    r"(?:[A-Za-z0-9_][\w.-]*@)?(?:[A-Za-z0-9][\w.-]*|[0-9a-fA-F:]+)", re.ASCII
)
_IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/@-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_VOLUME = re.compile(r"[1-9][0-9]*(?:[KMGTP]i)?")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_OWN_VARIABLES = (
    config.CONFIG_VARIABLE,
    config.ROLE_VARIABLE,
    config.LOCAL_WORKER_VARIABLE,
)


@dataclasses.dataclass(frozen=True)
class ServerSite:
    """One server. Where there are several, each is a shard, in the order of the file.

    Attributes:
        site: its name, as in its certificate `global-server/SITE`.
        host: destination of ssh.
        address: `host:port` at which parties reach it.
        bind: `host:port` that it listens at; None: the port of `address` on all interfaces, those
            of IPv6 where it is one of these, or `address` itself where that is on loopback.
        folder: where its files lie on the machine; None: the cluster's.
        program: `tf-hips` there; None: the cluster's.
    """

    site: str
    host: str
    address: str
    bind: str | None = None
    folder: str | None = None
    program: str | None = None

    def __post_init__(self) -> None:
        """Checks all values.

        Raises:
            ConfigError: one of them is wrong.
        """
        _check("site", self.site, NAME, "1 to 50 letters, digits, '.', '_' or '-'")
        _check("host", self.host, _DESTINATION, "a destination of ssh, HOST or USER@HOST")
        _check_address("address", self.address)
        if self.bind is not None:
            _check_address("bind", self.bind)
        _check_places(self.folder, self.program)

    @property
    def launcher(self) -> str:
        """Where it is started."""
        return self.host

    @property
    def port(self) -> int:
        """The port it listens at."""
        return int(self.listens_at.rpartition(":")[2])

    @property
    def listens_at(self) -> str:
        """What it is told to bind."""
        from tf_hips.ps.transport.sockets import is_loopback

        host, _, port = self.address.rpartition(":")
        if self.bind is not None or is_loopback(host.strip("[]")):
            return self.bind or self.address
        return f"[::]:{port}" if ":" in host else f"0.0.0.0:{port}"


@dataclasses.dataclass(frozen=True)
class PartyServerSite(ServerSite):
    """The server of a party of several sites, below the global server or another such one.

    Attributes:
        parties: sites that it serves: parties, or servers of parties.
        options: options of `tf-hips server` for it alone, as `rule` and `period`.
    """

    parties: tuple[str, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks all values.

        Raises:
            ConfigError: one of them is wrong.
        """
        super().__post_init__()
        _check_distinct(f"party_servers.{self.site}.parties", "sites", self.parties)
        for key in self.options:
            if key in SERVER_DERIVED and key not in _OF_PARTY_SERVERS:
                raise ConfigError(
                    f"`party_servers.{self.site}.options.{key}` follows from the rest of the file "
                    "and may not be set"
                )


@dataclasses.dataclass(frozen=True)
class PartySite:
    """One party: a Horovod group on one or more hosts.

    Attributes:
        site: its name, as in its certificate `party/SITE`.
        hosts: slots of each host; the first is the one where the party is started and where worker
            0 runs. Each is a destination of ssh from here and, for the first, from there.
        interface: network interfaces that workers on several hosts meet over; None: all that they
            have in common.
        environment: variables of the workers.
        folder: where its files lie on each host; None: the cluster's.
        program: `tf-hips` there; None: the cluster's.
    """

    site: str
    hosts: Mapping[str, int]
    interface: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folder: str | None = None
    program: str | None = None

    def __post_init__(self) -> None:
        """Checks all values.

        Raises:
            ConfigError: one of them is wrong.
        """
        _check("site", self.site, NAME, "1 to 50 letters, digits, '.', '_' or '-'")
        if not self.hosts:
            raise ConfigError("`hosts` must name a host at least, `host: slots`. Received: {}")
        for host, slots in self.hosts.items():
            _check("hosts", host, _HOST, "names or addresses of hosts (users belong to ssh_config)")
            if slots < 1:
                raise ConfigError(
                    f"`hosts.{host}` must be a number of slots >= 1. Received: {slots}"
                )
        for name, value in self.environment.items():
            _check("environment", name, _VARIABLE, "names of variables")
            if name in _OWN_VARIABLES:
                raise ConfigError(f"`environment.{name}` is set by tf-hips itself")
            if not value.isprintable():
                raise ConfigError(
                    f"`environment.{name}` must be one line. Received: {config.shown(value)}"
                )
        if self.interface is not None:
            _check("interface", self.interface, re.compile(r"[\w.,:@-]+"), "names, with commas")
            if len(self.hosts) == 1:
                raise ConfigError("`interface` is for a party of several hosts")
        _check_places(self.folder, self.program)

    @property
    def launcher(self) -> str:
        """The host where the party is started."""
        return next(iter(self.hosts))

    @property
    def slots(self) -> int:
        """Workers of the party."""
        return sum(self.hosts.values())


Role = ServerSite | PartySite


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Everything that `cluster.yaml` says.

    Attributes:
        run: identity of the run.
        script: the training script (.py); its folder is what the sites get.
        servers: the global server, or the shards of one.
        parties: the parties, in the order of their sums.
        certificates: folder of `tf-hips certs`, on the machine of who reads this file.
        folder: where files lie on every machine; each role has a folder of its own in it.
        arguments: arguments of the script.
        exclude: patterns of names, or of paths, in the script's folder that are not copied.
        image: container image for Kubernetes; None: `tf_hips:VERSION`.
        program: `tf-hips` on every machine, a name on the path or an absolute path.
        user: who runs it under systemd.
        volume: size of a server's volume under Kubernetes.
        ssh_options: options of every ssh command.
        server: options of `tf-hips server`, by key; checked by that command.
        party: options of `tf-hips party`, by key; checked by that command.
        party_servers: servers of parties between these and the global server.
    """

    run: str
    script: str
    servers: tuple[ServerSite, ...]
    parties: tuple[PartySite, ...]
    certificates: str
    folder: str
    arguments: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    image: str | None = None
    program: str = "tf-hips"
    user: str = "tf_hips"
    volume: str = "10Gi"
    ssh_options: tuple[str, ...] = ()
    server: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    party: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    party_servers: tuple[PartyServerSite, ...] = ()

    def __post_init__(self) -> None:
        """Checks all values that can be checked without the machines.

        Raises:
            ConfigError: one of them is wrong.
        """
        _check("run", self.run, NAME, "1 to 50 letters, digits, '.', '_' or '-'")
        if Path(self.script).suffix != ".py":
            raise ConfigError(f"`script` must be a .py file. Received: {self.script!r}")
        _check_places(self.folder, self.program)
        _check("user", self.user, _USER, "the name of a user")
        _check("volume", self.volume, _VOLUME, "a size such as 10Gi")
        if self.image is not None:
            _check("image", self.image, _IMAGE, "the name of a container image")
        for key, texts in (("arguments", self.arguments), ("ssh_options", self.ssh_options)):
            for text in texts:
                if not text.isprintable():
                    raise ConfigError(
                        f"`{key}` must be lines of text. Received: {config.shown(text)}"
                    )
        if not self.servers:
            raise ConfigError("`servers` must have an entry at least. Received: none")
        every = self.all_servers
        _check_distinct("servers", "sites", [one.site for one in every])
        _check_distinct("servers", "addresses", [one.address for one in every])
        below = [one.site for one in self.party_servers]
        _check_distinct("parties", "sites", [*(one.site for one in self.parties), *below])
        self._check_tree()
        hosts = [(one.host, one.port) for one in every]
        _check_distinct("servers", "ports on a host", [f"{host}:{port}" for host, port in hosts])
        for section, derived in (("server", SERVER_DERIVED), ("party", PARTY_DERIVED)):
            for key, value in getattr(self, section).items():
                if key in derived:
                    raise ConfigError(
                        f"`{section}.{key}` follows from the rest of the file, or is not for it, "
                        "and may not be set"
                    )
                _check_path(f"{section}.{key}", key, value)
        for key, value in self.server.items():
            _check_specification(f"server.{key}", key, value)
        for one in self.party_servers:
            for key, value in one.options.items():
                _check_path(f"party_servers.{one.site}.options.{key}", key, value)
                _check_specification(f"party_servers.{one.site}.options.{key}", key, value)

    def _check_tree(self) -> None:
        below: tuple[Role, ...] = (*self.party_servers, *self.parties)
        known = {one.site for one in below}
        served: dict[str, str] = {}
        for server in self.party_servers:
            for site in server.parties:
                key = f"party_servers.{server.site}.parties"
                if site not in known:
                    raise ConfigError(
                        f"`{key}` must be sites of `parties` or `party_servers`. Received: {site!r}"
                    )
                if site in served:
                    raise ConfigError(
                        f"`{key}` must be sites that no other server has. Received: {site!r}, "
                        f"which {served[site]!r} has"
                    )
                served[site] = server.site
        for site in served:
            above, seen = served.get(site), [site]
            while above is not None and above not in seen:
                seen.append(above)
                above = served.get(above)
            if above is not None:
                raise ConfigError(
                    f"`party_servers` must be a tree. Received: {above!r} below itself"
                )

    @property
    def all_servers(self) -> tuple[ServerSite, ...]:
        """The topmost servers, then those of parties."""
        return (*self.servers, *self.party_servers)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Servers, then parties."""
        return (*self.all_servers, *self.parties)

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of those that the topmost servers serve, in the order of their sums."""
        roles: tuple[Role, ...] = (*self.party_servers, *self.parties)
        return tuple(one.site for one in roles if self.server_of(one.site) is None)

    def server_of(self, site: str) -> PartyServerSite | None:
        """The party server that serves a site; None: the topmost ones do."""
        return next((one for one in self.party_servers if site in one.parties), None)

    def addresses_above(self, site: str) -> tuple[str, str]:
        """Where a site finds who serves it, and the role of that server's certificate."""
        server = self.server_of(site)
        if server is None:
            return ",".join(one.address for one in self.servers), "global-server"
        return server.address, "server"


def load(path: str | Path) -> Cluster:
    """Reads `cluster.yaml`; its `script` and `certificates` become absolute paths.

    Raises:
        ConfigError: as for `config.read`, or the script or the folder of certificates is not there.
    """
    path = Path(path)
    read = config.read(Cluster, path, VERSION)
    folder = path.resolve().parent
    script, certificates = folder / read.script, folder / read.certificates
    if not script.is_file():
        raise ConfigError(f"{path}: `script` must be a file. Received: {read.script!r}")
    if not certificates.is_dir():
        raise ConfigError(
            f"{path}: `certificates` must be a folder, as `tf-hips certs init` makes it. "
            f"Received: {read.certificates!r}"
        )
    return dataclasses.replace(
        read,
        script=os.path.normpath(script),
        certificates=os.path.normpath(certificates),
    )


def _check(key: str, value: str, pattern: re.Pattern[str], expected: str) -> None:
    if not pattern.fullmatch(value):
        raise ConfigError(f"`{key}` must be {expected}. Received: {config.shown(value)}")


def _check_places(folder: str | None, program: str | None) -> None:
    if folder is not None:
        _check("folder", folder, _FOLDER, "an absolute path of letters, digits, '.', '_', '-'")
        if {".", ".."} & set(folder.split("/")) or "//" in folder:
            raise ConfigError(f"`folder` must be a plain path without `..`. Received: {folder!r}")
    if program is not None:
        _check("program", program, _PROGRAM, "a program's name or absolute path")
        if "/" in program and not program.startswith("/"):
            raise ConfigError(
                f"`program` must be a program's name or absolute path. Received: {program!r}"
            )


def _check_path(what: str, key: str, value: object) -> None:
    if key in PATHS and isinstance(value, str):
        place = value if value.startswith("/") else f"/{value}"
        if not _FOLDER.fullmatch(place) or ".." in place.split("/"):
            raise ConfigError(
                f"`{what}` must be a path of letters, digits, '.', '_' and '-'. Received: {value!r}"
            )


def _check_specification(what: str, key: str, value: object) -> None:
    from tf_hips.ops.compressor import file_of

    if key not in COMPRESSIONS or not isinstance(value, str):
        return
    named = file_of(value)
    if named is not None and (named.startswith("/") or ".." in named.split("/")):
        raise ConfigError(
            f"`{what}` must name a file in the script's folder, by its path from there. "
            f"Received: {named!r}"
        )


def _check_address(key: str, text: str) -> None:
    from tf_hips.ps.transport.sockets import lacks_brackets

    host, _, port = text.rpartition(":")
    if not _DESTINATION.fullmatch(host.strip("[]")) or "@" in host or not port.isdecimal():
        raise ConfigError(f"`{key}` must be HOST:PORT. Received: {config.shown(text)}")
    if lacks_brackets(host):
        raise ConfigError(
            f"`{key}` must have an IPv6 address in brackets, as [::1]:7070. Received: {text!r}"
        )
    if not 0 < int(port) < 65536:
        raise ConfigError(f"`{key}` must have a port from 1 to 65535. Received: {text!r}")


def _check_distinct(key: str, what: str, values: Sequence[str]) -> None:
    if not values:
        raise ConfigError(f"`{key}` must have an entry at least. Received: none")
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ConfigError(f"`{key}` must have distinct {what}. Received: {twice[0]!r} twice")
