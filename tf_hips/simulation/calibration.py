# SPDX-License-Identifier: Apache-2.0
"""From the event logs of a run with ESync to a description of its members.

    step_s        the median of what a member has said of its steps
    jitter        how that has varied, by its median deviation, times the root of the steps that
                  it is a mean of
    overhead_ms   the median of what its meetings have lasted without waiting for others: on the
                  way, encoding, merging

Rounds in which nothing was known yet, or a member had no data, do not count. Links are not told
from the rest of a meeting: what was measured holds for the model, the codec and the links of that
run.
"""

import statistics
from pathlib import Path

from tf_hips import log
from tf_hips.errors import ConfigError
from tf_hips.simulation.description import Description, Group, Method, Traffic

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
    rounds: dict[tuple[str, int], dict[int, dict[str, float]]] = {}
    runs, elements = set(), 0
    for event in log.read_events(folder):
        if event["event"] == "model":
            elements = max(elements, int(event.get("num_elements", 0)))
        if event["event"] not in ("esync", "meeting"):
            continue
        runs.add(event["run"])
        of_member = rounds.setdefault((event["site"], event["rank"]), {})
        one = of_member.setdefault(int(event["number"]), {})
        for name in ("steps", "step_s", "waited_s", "seconds"):
            if event.get(name) is not None:  # null is NaN
                one[name] = float(event[name])
    if len(runs) != 1:
        raise ConfigError(
            f"{folder} must hold the logs of one run with ESync. Received: {len(runs)} runs"
        )
    groups = []
    for (site, rank), of_member in sorted(rounds.items()):
        name = site if rank == 0 and (site, 1) not in rounds else f"{site}/{rank}"
        whole = [
            one
            for number, one in sorted(of_member.items())
            if number >= _UNCOUNTED and one.get("step_s", 0) > 0 and "seconds" in one
        ]
        if len(whole) < _LEAST_ROUNDS:
            raise ConfigError(
                f"{folder} must hold at least {_LEAST_ROUNDS} rounds of each member, after the "
                f"first {_UNCOUNTED}. Received: {len(whole)} of {name}"
            )
        groups.append(_group(name, whole))
    return Description(Traffic(parameters=max(elements, 1)), tuple(groups), (Method("esync"),))


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
