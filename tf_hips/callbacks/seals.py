# SPDX-License-Identifier: Apache-2.0
"""Which files of a backup belong together, so that no run goes on with parts of two.

    meta.json        digest of the rank-<r>.json of each rank
    rank-<r>.json    digests of the indexes of the checkpoints that rank has written
    *.index          checksums of the values, which TensorFlow writes, and compares as it reads

Names of backups begin anew with each run of a folder. A copy over another run's that was broken
off, or a rank's files from elsewhere, would pass for whole, and be taken up as a mixture.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tf_hips.callbacks.folder import damaged, read_json

_FILES = "files"
_RANKS = "ranks"


def of_files(draft: Path, rank: int) -> dict[str, Any]:
    """What rank `rank` says in its JSON of the checkpoints that it has written to `draft`."""
    patterns = [f"rank-{rank}.index", f"rank-{rank}.strategy.index"]
    if rank == 0:
        patterns += ["shared.index", "best-weights-*.index"]
    paths = sorted(path for one in patterns for path in draft.glob(one))
    return {_FILES: {path.name: _digest(path) for path in paths}}


def of_ranks(draft: Path, size: int) -> dict[str, Any]:
    """What rank 0 says in `meta.json` of the JSON of all ranks."""
    return {_RANKS: [_digest(draft / f"rank-{rank}.json") for rank in range(size)]}


def check(place: Path, rank: int, meta: Mapping[str, Any]) -> None:
    """Looks whether what rank `rank` has written is of the backup that has `meta`.

    Args:
        place: of the backup; one that was made without digests is taken as it is.
        rank: whose files are looked at.
        meta: what rank 0 has said.

    Raises:
        ConfigError: a file is another one, damaged, or not there.
    """
    if _RANKS not in meta:
        return
    path = place / f"rank-{rank}.json"
    _compare(path, meta[_RANKS][rank])
    for name, digest in read_json(path)[_FILES].items():
        _compare(place / name, digest)


def _compare(path: Path, digest: str) -> None:
    try:
        found = _digest(path)
    except FileNotFoundError as error:
        raise damaged(path, "it is not there") from error
    if found != digest:
        raise damaged(path, "it is not of this backup")


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
