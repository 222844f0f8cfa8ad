# SPDX-License-Identifier: Apache-2.0
"""From a description to the results of all its methods."""

from collections.abc import Callable

from tf_hips.esync.rule import Pace
from tf_hips.simulation import events, rounds
from tf_hips.simulation.description import Description, Method
from tf_hips.simulation.results import Result
from tf_hips.simulation.sites import Sites


def simulate(description: Description, tell: Callable[[str], object] = str) -> list[Result]:
    """Simulates all methods of a description, one after the other.

    Args:
        description: what to simulate.
        tell: hears the label of each method before it begins.
    """
    results = []
    for number, method in enumerate(description.methods):
        tell(method.label)
        results.append(_play(method, Sites(description, number), description.rounds))
    return results


def _play(method: Method, sites: Sites, num_rounds: int) -> Result:
    if method.name == "esync-compat":
        return events.compat(method.label, sites, method.epsilon, num_rounds)
    if method.name == "fedbuff":
        return events.fedbuff(method.label, sites, method.steps, method.k, num_rounds)
    if method.name == "esync":
        paced = rounds.Paced(len(sites), Pace.parse(method.pace))
        return rounds.play(method.label, sites, paced, num_rounds)
    steps = method.steps if method.name == "fedavg" else 1
    return rounds.play(method.label, sites, rounds.Fixed(len(sites), steps), num_rounds)
