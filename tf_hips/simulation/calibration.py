# SPDX-License-Identifier: Apache-2.0
"""From the event logs of a run with ESync to a description of its members.

    step_s        the median of what a member has said of its steps
    jitter        how that has varied, by its median deviation, times the root of the steps that
                  it is a mean of
    overhead_ms   the median of what its meetings have lasted without waiting for others: on the
                  way, encoding, merging

Workers of a party that keep step are one member, and rank 0 of them speaks for all. Rounds in which
nothing was known yet, or a member had no data, do not count. The codecs are those that the first
party has joined a server with; without a server there is none to ask, and they are fp32. Links are
not told from the rest of a meeting: what was measured holds for the model, the codecs and the links
of that run.
"""

import collections
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_hips import log
from tf_hips.errors import ConfigError
from tf_hips.simulation.description import Description, Group, Method, Traffic

_Worker = tuple[str, int]  # its site and its rank

_LEAST_ROUNDS = 3
_UNCOUNTED = 3
_OF_MEDIAN = 1.4826  # the standard deviation of a normal distribution over its median deviation


def calibrated(folder: str | Path) -> Description:
    """A description of the members that have written logs to `folder`, for ESync.

    Args:
        folder: that of `tf-hips run --log-dir`, of one run.

    Raises:
        ConfigError: there are no such logs, of several runs, or too few rounds.
    """
    events = log.read_events(folder)
    runs = {one["run"] for one in events if one["event"] == "esync"}
    if len(runs) != 1:
        raise ConfigError(
            f"{folder} must hold the logs of one run with ESync. Received: {len(runs)} runs"
        )
    events = [one for one in events if one["run"] in runs]
    elements = [int(one.get("num_elements", 0)) for one in events if one["event"] == "model"]
    rounds: dict[_Worker, dict[int, dict[str, float]]] = {}
    for event in events:
        if event["event"] not in ("esync", "meeting"):
            continue
        of_worker = rounds.setdefault((event["site"], event["rank"]), {})
        one = of_worker.setdefault(int(event["number"]), {})
        for name in ("steps", "step_s", "waited_s", "seconds"):
            if event.get(name) is not None:  # null is NaN
                one[name] = float(event[name])
    groups = []
    speakers = _speakers(events)
    num_members = collections.Counter(site for site, _ in speakers)
    for site, rank in speakers:
        name = site if num_members[site] == 1 else f"{site}/{rank}"
        whole = [
            one
            for number, one in sorted(rounds[site, rank].items())
            if number >= _UNCOUNTED and one.get("step_s", 0) > 0 and "seconds" in one
        ]
        if len(whole) < _LEAST_ROUNDS:
            raise ConfigError(
                f"{folder} must hold at least {_LEAST_ROUNDS} rounds of each member, after the "
                f"first {_UNCOUNTED}. Received: {len(whole)} of {name}"
            )
        groups.append(_group(name, whole))
    joined = next((one for one in events if one["event"] == "joined"), {})
    codecs = {name: joined[name] for name in ("compression", "downlink") if name in joined}
    traffic = Traffic(parameters=max([1, *elements]), **codecs)
    return Description(traffic, tuple(groups), (Method("esync"),))


def _speakers(events: Sequence[Mapping[str, Any]]) -> list[_Worker]:
    """One worker of each member, that of the lowest rank."""
    below_server = {one["site"] for one in events if one["event"] == "joined"}
    members: dict[_Worker, int] = {}
    for event in events:
        if event["event"] == "esync":
            site, rank = event["site"], event["rank"]
            members[site, rank] = _member(event, is_below_server=site in below_server)
    found: dict[tuple[str, int], _Worker] = {}
    for (site, rank), member in sorted(members.items()):
        found.setdefault((site, member), (site, rank))
    return sorted(found.values())


def _member(event: Mapping[str, Any], *, is_below_server: bool) -> int:
    """Which member of the run, or at least of its site, has written an event `esync`."""
    if "member" in event:
        return int(event["member"])
    # Older logs do not say it. Below a server steps are assigned to a party, and its workers keep
    # step; with the paper's rule nothing is assigned, and each of them is a member.
    return 0 if is_below_server and event.get("assigned") is not None else int(event["rank"])


def _group(name: str, rounds: list[dict[str, float]]) -> Group:
    step_s = statistics.median(one["step_s"] for one in rounds)
    steps = statistics.median(one["steps"] for one in rounds)
    # A round that a busy machine has held up must not count for the others.
    varies = _OF_MEDIAN * statistics.median(abs(one["step_s"] / step_s - 1) for one in rounds)
    overhead_s = statistics.median(max(0.0, one["seconds"] - one["waited_s"]) for one in rounds)
    return Group(
        name,
        1,
        step_s=round(step_s, 9),
        jitter=round(min(varies * max(steps, 1.0) ** 0.5, 10.0), 6),
        overhead_ms=round(1e3 * overhead_s, 6),
    )
