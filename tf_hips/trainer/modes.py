# SPDX-License-Identifier: Apache-2.0
"""The table of modes. A mode is an entry here and a function that makes its `Way`.

Imports no TensorFlow: the command line reads the table, and only a trainer loads what it names.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tf_hips.errors import ConfigError


def _anything(settings: Any) -> None:
    del settings


def _steps_of_a_server(settings: Any) -> None:
    """What modes ask whose server makes the steps.

    Raises:
        ConfigError: the optimizer is one that no rule stands for.
    """
    if settings.optimizer != "sgd" or settings.optimizer_options:
        raise ConfigError(
            f"The mode {settings.mode} has its optimizer on the server, SGD. Received: "
            f"optimizer={settings.optimizer}"
            + "".join(f", optimizer.{name}" for name in settings.optimizer_options)
        )


def _no_momentum(settings: Any) -> None:
    _steps_of_a_server(settings)
    if settings.momentum:
        raise ConfigError(
            f"The mode dcasgd has no momentum. Received: momentum={settings.momentum}"
        )


def _on_one_device(settings: Any) -> None:
    """What is for several workers is refused.

    Raises:
        ConfigError: something is.
    """
    for name, default in (("compression", None), ("split", "iid")):
        value = getattr(settings, name)
        if value != default:
            raise ConfigError(
                f"The mode local trains on one device, without `{name}`. Received: {name}={value}"
            )


OPTIMIZERS = ("sgd", "adam")


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to train together.

    Attributes:
        text: what it is, for `--help`.
        home: `module:function`, which makes a `ways.Way` of settings and the run's configuration.
        check: raises a `ConfigError` if the settings do not fit the mode.
    """

    text: str
    home: str
    check: Callable[[Any], None] = _anything

    def make(self, *arguments: Any) -> Any:
        """Loads and calls what `home` names."""
        module, _, function = self.home.partition(":")
        return getattr(importlib.import_module(module), function)(*arguments)


MODES: Mapping[str, Mode] = MappingProxyType(
    {
        "sync": Mode(
            "in every step the gradients of all workers are summed",
            "tf_hips.trainer.ways:synchronous",
        ),
        "async": Mode(
            "the server makes a step of each party's gradients as they come (ASGD)",
            "tf_hips.trainer.ways:asynchronous",
            _steps_of_a_server,
        ),
        "dcasgd": Mode(
            "the same, compensated for what the others did meanwhile (DC-ASGD)",
            "tf_hips.trainer.ways:delay_compensated",
            _no_momentum,
        ),
        "local": Mode(
            "one device by itself",
            "tf_hips.trainer.ways:alone",
            _on_one_device,
        ),
    }
)
