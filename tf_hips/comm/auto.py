# SPDX-License-Identifier: Apache-2.0
"""A plan at the start of training: measured in some seconds, kept on disk, the same on all ranks.

A profile belongs to hosts, ranks, versions, cores and candidates. One that is found on disk is
believed only if an allreduce takes about as long as it says: links change, names of hosts do not.
"""

import dataclasses
import hashlib
import json
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tf_hips import config, log
from tf_hips.comm import links, primitives, profiling
from tf_hips.comm.cost_model import Backward
from tf_hips.comm.plan import Choice, Plan
from tf_hips.comm.planner import DEFAULT_CANDIDATES, make_plan
from tf_hips.comm.profile import Profile
from tf_hips.errors import ConfigError
from tf_hips.ops.compressor import check_makes_packets, parse
from tf_hips.ops.specifications import cache_folder

BUDGET_S = 3.0

_CHECKED_BYTES = 1 << 20
# A kept profile is measured again where the link is this much faster or slower than it says.
_TRUSTED = 2.0


def auto_plan(
    gradients: Sequence[tuple[str, int]],
    candidates: Iterable[str] = DEFAULT_CANDIDATES,
    backward: Backward | None = None,
    *,
    budget_seconds: float = BUDGET_S,
    folder: Path | None = None,
) -> Plan:
    """Makes a plan for this model on these ranks. Eager; called by all ranks alike.

    Args:
        gradients: name and number of elements of each, in the order of the trainable variables.
        candidates: texts of the compressors that may be used.
        backward: when gradients become ready; None: all at once.
        budget_seconds: about how long measuring may take, if it has to be done.
        folder: where profiles are kept; None: `profiles` in the cache of tf_hips.

    Returns:
        The same plan on all ranks.

    Raises:
        ValueError: a candidate is no compressor, or makes no packets.
        ConfigError: on all ranks, where they have different models or candidates.
    """
    texts = [check_makes_packets(parse(text), "compression").text for text in candidates]
    sizes = [size for _, size in gradients]
    if primitives.size() == 1:
        return Plan(1, tuple(Choice(name, size) for name, size in gradients), 0.0)
    key = _agreed(texts, sizes)
    folder = folder if folder is not None else cache_folder() / "profiles"
    path = folder / f"{key}.yaml"
    profile = _kept(path)
    if profile is None:
        profile = profiling.measure(texts, budget_seconds)
        if primitives.rank() == 0:
            _keep(profile, path)
    told: dict[str, Any] = {}
    if primitives.rank() == 0:
        try:
            told = {"plan": dataclasses.asdict(make_plan(profile, gradients, texts, backward))}
        except ConfigError as error:  # the others wait for an answer
            told = {"error": str(error)}
    told = primitives.broadcast_object(told, what="a plan")
    if "error" in told:
        raise ConfigError(told["error"])
    return config.build(Plan, told["plan"], "the plan of rank 0")


def _agreed(texts: list[str], sizes: list[int]) -> str:
    """What a profile is kept by.

    Raises:
        ConfigError: ranks have different candidates or gradients.
    """
    model = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()
    cores = len(os.sched_getaffinity(0))
    mine = [texts, len(sizes), model]
    everyone = primitives.gather_objects(
        [mine, socket.gethostname(), cores, profiling.versions()], "what a plan is for"
    )
    for rank, (theirs, *_) in enumerate(everyone):
        if theirs != everyone[0][0]:
            raise ConfigError(
                "all ranks must plan for the same gradients and compressors. Received: "
                f"{everyone[0][0][1]} gradients and {everyone[0][0][0]} on rank 0; {theirs[1]} "
                f"gradients and {theirs[0]} on rank {rank}"
                + ("" if theirs[:2] != everyone[0][0][:2] else ", of other sizes")
            )
    facts = [texts, primitives.nodes(), [entry[1:] for entry in everyone]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _kept(path: Path) -> Profile | None:
    """The profile on rank 0's disk, if there is one and it is still true."""
    found: dict[str, Any] | None = None
    if primitives.rank() == 0:
        try:  # the others wait for an answer
            kept = Profile.read(path) if path.exists() else None
            if kept is not None and kept.num_ranks == primitives.size():
                found = dataclasses.asdict(kept)
        except (ConfigError, OSError) as error:  # or the folder above may not be looked into
            log.warning("%s; it is measured again.", error)
    found = primitives.broadcast_object(found, what="a kept profile")
    if found is None:
        return None
    profile = config.build(Profile, found, "the profile of rank 0")
    expected = profile.allreduce.delay + profile.allreduce(_CHECKED_BYTES)
    seconds = links.seconds_of_allreduce(_CHECKED_BYTES)
    if not expected / _TRUSTED <= seconds <= expected * _TRUSTED:
        if primitives.rank() == 0:
            log.info(
                "The link is another than in %s (%.3g s, and not %.3g s, for 1 MiB): it is "
                "measured again.", path, seconds, expected,
            )  # fmt: skip
        return None
    return profile


def _keep(profile: Profile, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        profile.write(path)
    except OSError as error:
        log.warning("The profile cannot be kept in %s: %s", path.parent, error.strerror)
