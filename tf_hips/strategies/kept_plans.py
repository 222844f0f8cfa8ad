# SPDX-License-Identifier: Apache-2.0
"""Plans that were measured, kept with the state of a strategy.

A measured plan depends on the link at that moment, and what encoding keeps depends on the plan. So
a run that goes on takes the plan that it was saved with, and does not measure again.
"""

import dataclasses
import json
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from tf_hips import config
from tf_hips.comm.plan import Plan
from tf_hips.errors import ProtocolError


class Keeper(Protocol):
    """What keeps the plan of the list of gradients that is being made."""

    def kept_plan(self) -> str | None:
        """The text of the plan that was restored for it; None: none was."""

    def keep_plan(self, text: str) -> None:
        """Keeps the text of its plan."""


class KeptPlans(tf.train.experimental.PythonState):
    """The plans of several lists, as they are saved and restored.

    Restored plans wait for lists that are made later; those that exist must have them already.
    """

    def __init__(self, plans: Callable[[], dict[str, str]]) -> None:
        """Has none.

        Args:
            plans: a method that gives the plans of all lists, by their names; its owner has this as
                an attribute, and is not kept alive.
        """
        self._plans = weakref.WeakMethod(plans)
        self.restored: dict[str, str] = {}

    def serialize(self) -> str:
        """All plans, as JSON."""
        return json.dumps({**self.restored, **self._made()}, sort_keys=True)

    def deserialize(self, string_value: str) -> None:
        """Takes the plans that were saved.

        Raises:
            ProtocolError: a list has another one.
        """
        restored = json.loads(string_value)
        made = self._made()
        for name in sorted({*made, *restored}):
            if name in made and name in restored and _ways(made[name]) != _ways(restored[name]):
                raise ProtocolError(
                    "The state of a strategy with a measured plan must be restored before the "
                    "first step, which then takes the plan that it was saved with. Received: "
                    f"{name} has been summed by another plan already"
                )
        self.restored = restored

    def _made(self) -> dict[str, str]:
        plans = self._plans()
        return {} if plans is None else plans()


def text_of(plan: Plan) -> str:
    """A plan as text."""
    return json.dumps(dataclasses.asdict(plan), sort_keys=True)


def plan_of(text: str) -> Plan:
    """The plan that `text_of` made the text of."""
    return config.build(Plan, json.loads(text), "the plan of the saved state")


def _ways(text: str) -> list[Any]:
    """What a plan does; not what it predicts."""
    return [
        [one.num_elements, one.compression, one.topology, one.partitions]
        for one in plan_of(text).choices
    ]
