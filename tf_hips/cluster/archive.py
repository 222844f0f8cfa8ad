# SPDX-License-Identifier: Apache-2.0
"""What `sync` sends to one machine: never the key of another site, nor the authority's.

The script's folder goes as a whole, but for what is no part of a program: version control, caches,
what `exclude` names, the folder of certificates, and output of `tf-hips deploy`. A private key that
lies elsewhere in it is an error, because it would be sent to all sites.
"""

import dataclasses
import fnmatch
import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tf_hips.cluster import layout
from tf_hips.cluster.description import (
    COMPRESSIONS,
    Cluster,
    PartyServerSite,
    Role,
    ServerSite,
)
from tf_hips.errors import ConfigError

MARK = ".tf-hips-deploy"
_LEFT_OUT = (".git", ".hg", ".svn", ".venv", "__pycache__", "*.pyc", ".ipynb_checkpoints")
# Anywhere in a file: a certificate may stand before it. Not where a program only speaks of keys.
# One with a passphrase may say so in lines of its own (`Proc-Type: 4,ENCRYPTED`).
_KEY = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+(?:[A-Z][A-Za-z-]*: [^\n]*\n\s*){0,8}[A-Za-z0-9+/=]{16}"
)
_KEY_BYTES = 1 << 20
# A program and its small files; data belong elsewhere.
_MAX_BYTES = 1 << 29


@dataclasses.dataclass(frozen=True)
class Entry:
    """One file of an archive: its name there, and what is in it.

    Attributes:
        name: path in the role's folder.
        source: the file here, or its bytes.
        link: target of a symbolic link, which has no source.
        is_program: whether it may be executed.
    """

    name: str
    source: Path | bytes = b""
    link: str | None = None
    is_program: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        if isinstance(self.source, bytes):
            return len(self.source)
        return self.source.stat().st_size

    @property
    def content(self) -> bytes:
        """What is in it."""
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()


def entries(cluster: Cluster, role: Role, host: str) -> list[Entry]:
    """What `host` gets for `role`.

    Raises:
        ConfigError: a certificate or a key is missing, or the script's folder holds a private key
            or too much.
    """
    found: list[Entry] = []
    is_server = isinstance(role, ServerSite)
    # Only where the role itself is started; other hosts of a party have workers alone.
    if host == role.launcher:
        found += _identity(cluster, role)
    if isinstance(role, ServerSite):
        text = layout.server_file(cluster, role, layout.on_machine(cluster, role))
        found.append(Entry(layout.SERVER_FILE, text.encode()))
        found += specifications(cluster, role)
    elif host == role.launcher and len(role.hosts) > 1:
        found.append(Entry(layout.HOSTFILE, layout.hostfile(role).encode()))
    if not is_server:
        found += [
            dataclasses.replace(one, name=f"{layout.JOB}/{one.name}") for one in job_files(cluster)
        ]
    return found


def specifications(cluster: Cluster, server: ServerSite) -> list[Entry]:
    """The files that the compressors of a server's settings name, as they lie beside `server.yaml`.

    Raises:
        SpecificationError: one of them is not there.
    """
    from tf_hips.ops import compressor
    from tf_hips.ops.specifications import files as files_of

    base = Path(cluster.script).parent
    told = layout.server_options(cluster, server, layout.on_machine(cluster, server))
    texts = [told[key] for key in COMPRESSIONS if told.get(key) is not None]
    named = {file for text in texts if (file := compressor.file_of(text)) is not None}
    files = {path for file in named for path in files_of(base / file)}
    return [Entry(path.relative_to(base).as_posix(), path) for path in sorted(files)]


def job_files(cluster: Cluster) -> list[Entry]:
    """The files of the script's folder, by name.

    Raises:
        ConfigError: there is a private key among them, or more than a program has.
    """
    base = Path(cluster.script).parent
    kept = Path(cluster.certificates).resolve()
    found = []
    total = 0
    excluded = tuple(one.removeprefix("./").rstrip("/") for one in cluster.exclude)
    # Where `deploy` has written into the script's folder itself.
    mark = base / MARK
    ours = mark.read_text(encoding="utf-8").splitlines() if mark.is_file() else []
    for path in _walk(base, kept, (*_LEFT_OUT, MARK, *excluded), base):
        name = path.relative_to(base).as_posix()
        if name in ours:
            continue
        if path.is_symlink():
            found.append(Entry(name, link=str(path.readlink())))
            continue
        with path.open("rb") as file:
            if _KEY.search(file.read(_KEY_BYTES)):
                raise ConfigError(
                    f"{path} is a private key, and would be sent to all sites with the script; "
                    "move it out of the script's folder, or name it in `exclude`"
                )
        status = path.stat()
        total += status.st_size
        if total > _MAX_BYTES:
            raise ConfigError(
                f"{base} must have at most {_MAX_BYTES >> 20} MiB to be sent. Received: more, with "
                f"{name}; `exclude` leaves out what is no program"
            )
        found.append(Entry(name, path, is_program=bool(status.st_mode & 0o100)))
    return found


def pack(found: list[Entry]) -> bytes:
    """The entries as a compressed archive, readable by their owner alone."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        for entry in found:
            told = tarfile.TarInfo(entry.name)
            told.mode = 0o700 if entry.is_program else 0o600
            if entry.link is not None:
                told.type, told.linkname = tarfile.SYMTYPE, entry.link
                archive.addfile(told)
                continue
            data = entry.content
            told.size = len(data)
            if isinstance(entry.source, Path):
                told.mtime = int(entry.source.stat().st_mtime)
            archive.addfile(told, io.BytesIO(data))
    return raw.getvalue()


def _identity(cluster: Cluster, role: Role) -> Iterator[Entry]:
    names = [layout.AUTHORITY, *layout.identity_files(role)]
    if isinstance(role, ServerSite):
        names.append(layout.REVOKED)
    if isinstance(role, PartyServerSite):
        names += layout.uplink_files(role)
    for name in names:
        path = Path(cluster.certificates) / name
        if not path.is_file():
            kind = "server" if isinstance(role, ServerSite) else "party"
            kind = "party-server" if isinstance(role, PartyServerSite) else kind
            raise ConfigError(
                f"{path} must be there for {layout.role_name(role)}; `tf-hips certs issue "
                f"{cluster.certificates} --{kind} {role.site}` makes certificates"
            )
        yield Entry(name, path)


def _walk(folder: Path, kept: Path, patterns: tuple[str, ...], base: Path) -> Iterator[Path]:
    """Files and links below `folder`, sorted, without `kept` and what matches a pattern.

    A pattern is that of a name, or with a slash that of a path from `base` on.
    """
    for path in sorted(folder.iterdir()):
        named = (path.name, path.relative_to(base).as_posix())
        if any(fnmatch.fnmatch(named["/" in pattern], pattern) for pattern in patterns):
            continue
        if path.is_symlink() or path.is_file():
            yield path
        elif path.is_dir() and path.resolve() != kept and not (path / MARK).exists():
            yield from _walk(path, kept, patterns, base)
