# SPDX-License-Identifier: Apache-2.0
"""From the events of one run to its numbers: accuracy, and bytes of the slow tier over time.

Read here are the events of workers. Rank 0 of every party writes `model` (`num_elements` of its
gradients), `first_sync` and `round` (bytes `sent` and `received` on its uplink's sockets since the
event before; the first counts from the handshake), and `left` (the same from `joined` to the end
of this process; one that was started again has joined once more).
Every worker writes `epoch` (`test_accuracy`) and `result` (`test_accuracy`, `fingerprint`). A
folder may hold the events of several runs, one after the other: the newest is meant.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from tf_hips.errors import ConfigError
from tf_hips.log import Event

BYTES_PER_FLOAT = 4


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The slow tier over time, all parties together.

    Attributes:
        seconds: time of each point since the first event.
        rounds: number of rounds that all parties have finished by then.
        measured: bytes on all uplink sockets, both ways, so far.
        dense: bytes that gradients in fp32 would have taken by then: rounds x 2 x 4N per party.
    """

    seconds: tuple[float, ...]
    rounds: tuple[int, ...]
    measured: tuple[int, ...]
    dense: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than dense fp32."""
        return self.dense[-1] / self.measured[-1]


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run came to.

    Attributes:
        accuracy: the lowest test accuracy that a worker reported, in [0, 1].
        traffic: bytes of the slow tier over time.
        fingerprints: of the weights of every worker, by `site/worker<rank>`.
        seconds: from the first to the last event.
    """

    accuracy: float
    traffic: Traffic
    fingerprints: Mapping[str, str]
    seconds: float

    @property
    def are_replicas_identical(self) -> bool:
        """Whether all workers ended with the same weights, bit for bit."""
        return len(set(self.fingerprints.values())) == 1


def newest_run(events: Sequence[Event]) -> list[Event]:
    """The events of the run whose workers began last, in the order given.

    A process that appends to its file late, such as a server that is stopped after another run has
    begun, or an evaluator, does not make its run the newest.
    """
    began: dict[str, int] = {}
    for event in [one for one in events if one["role"] == "worker"] or events:
        began[event["run"]] = min(event["time_us"], began.get(event["run"], event["time_us"]))
    newest = max(began, key=lambda run: began[run], default=None)
    return [event for event in events if event["run"] == newest]


def summarise(events: Sequence[Event]) -> Summary:
    """The summary of the newest run, which must have finished.

    Raises:
        ConfigError: an event that every finished run has is missing.
    """
    events = newest_run(events)
    results = [event for event in events if _is(event, "result")]
    if not results:
        raise ConfigError("The events must hold a `result` of every worker. Received: none")
    if any(event["test_accuracy"] is None for event in results):
        raise ConfigError("The `result` of every worker must hold a number. Received: NaN")
    return Summary(
        accuracy=min(event["test_accuracy"] for event in results),
        traffic=traffic(events),
        fingerprints={f"{e['site']}/worker{e['rank']}": e["fingerprint"] for e in results},
        seconds=(events[-1]["time_us"] - events[0]["time_us"]) / 1e6,
    )


def traffic(events: Sequence[Event]) -> Traffic:
    """Bytes of the slow tier of the newest run, over time.

    Raises:
        ConfigError: there is no `model` or no `round` event.
    """
    events = newest_run(events)
    model = next((event for event in events if _is(event, "model")), None)
    if model is None:
        raise ConfigError("The events must hold the `model` of the run. Received: none")
    begin = events[0]["time_us"]
    so_far: dict[str, int] = {}
    before: dict[str, int] = {}  # what earlier processes of a site have moved
    rounds: dict[str, int] = {}
    # Of all sites together: to add them up for each event takes minutes where there are many.
    total = num_rounds = 0
    points = []
    for event in events:
        if _is(event, "joined"):
            before[event["site"]] = so_far.get(event["site"], 0)
        if not _is(event, "first_sync", "round", "left"):
            continue
        site, moved = event["site"], event["sent"] + event["received"]
        is_last, is_round = event["event"] == "left", event["event"] == "round"
        total -= so_far.get(site, 0)
        so_far[site] = (before if is_last else so_far).get(site, 0) + moved
        total += so_far[site]
        rounds[site] = rounds.get(site, 0) + is_round
        num_rounds += is_round
        dense = num_rounds * 2 * BYTES_PER_FLOAT * model["num_elements"]
        points.append(((event["time_us"] - begin) / 1e6, min(rounds.values()), total, dense))
    if not points:
        raise ConfigError("The events must hold the `round`s of the parties. Received: none")
    return Traffic(*zip(*points, strict=True))


def epochs(events: Sequence[Event]) -> list[tuple[float, float]]:
    """The end of every epoch of the newest run, as the first worker that logs them tells it.

    Returns:
        (`time_us`, test accuracy) of each.
    """
    return _tests(events, "epoch")


def result(events: Sequence[Event]) -> tuple[float, float] | None:
    """The end of the newest run, as the first worker that logs it tells it.

    With local steps it is the model after the last meeting, which no `epoch` has tested.

    Returns:
        (`time_us`, test accuracy); None: the run has not ended, or nobody tested it.
    """
    return next(reversed(_tests(events, "result")), None)


def _tests(events: Sequence[Event], name: str) -> list[tuple[float, float]]:
    # A trainer that did not test, or whose loss was no number, has no accuracy.
    found = [
        event
        for event in newest_run(events)
        if _is(event, name) and event.get("test_accuracy") is not None
    ]
    if not found:
        return []
    first = min((event["site"], event["rank"]) for event in found)
    return [
        (event["time_us"], event["test_accuracy"])
        for event in found
        if (event["site"], event["rank"]) == first
    ]


def _is(event: Event, *names: str) -> bool:
    return event["role"] == "worker" and event["event"] in names
