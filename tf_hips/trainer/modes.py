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
from tf_hips.trainer import local


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
    split = None if settings.split == "iid" else settings.split
    of_several = {"compression": settings.compression, **settings.links.given, "split": split}
    for name, value in of_several.items():
        if value is not None:
            raise ConfigError(
                f"The mode local trains on one device, without `{name}`. Received: {name}={value}"
            )


def _on_one_process(settings: Any) -> None:
    """What goes over a network is refused.

    Raises:
        ConfigError: something is.
    """
    for name, value in {"compression": settings.compression, **settings.links.given}.items():
        if value is not None:
            raise ConfigError(
                f"The mode simulated sends nothing that could be encoded. Received: {name}={value}"
            )


def _of_fedavg(settings: Any) -> None:
    local.check_fedavg(settings.local)
    if settings.local.local_steps is None and settings.max_steps is not None:
        raise ConfigError(
            "Rounds of whole passes end with `epochs`, since workers may differ in steps; "
            f"`max_steps` goes with `local_steps`. Received: max_steps={settings.max_steps}"
        )


def _of_esync(settings: Any) -> None:
    local.check_esync(settings.local)


OPTIMIZERS = ("sgd", "adam", "adamw")
# What DETOX calls modes, and what they are: rules that make one gradient of those of all.
AGGREGATIONS = (
    *("coord-median", "geometric_median", "krum", "multi-krum", "bulyan"),
    *("sign-sgd", "signSGD", "maj_vote"),
)
_OUTER = ("server_optimizer", "global_lr")
_HIPS_ASYNC = (
    'HiPS\' own -m async is `tf-hips run --rule "asgd(learning_rate=1)" -- tf-hips train -m fedavg '
    "-le {} --rule compat`. "
)


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to train together.

    Attributes:
        text: what it is, for `--help`.
        home: `module:function`, which makes a `ways.Way` of settings and the run's configuration.
        check: raises a `ConfigError` if the settings do not fit the mode.
        options: of `local.Local`, those that mean something here; none: there are no local steps.
        needs: "server", or "workers" where several of one job do as well; None: neither.
    """

    text: str
    home: str
    check: Callable[[Any], None] = _anything
    options: tuple[str, ...] = ()
    needs: str | None = None

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
            needs="server",
        ),
        "dcasgd": Mode(
            "the same, compensated for what the others did meanwhile (DC-ASGD)",
            "tf_hips.trainer.ways:delay_compensated",
            _no_momentum,
            needs="server",
        ),
        "local": Mode(
            "one device by itself",
            "tf_hips.trainer.ways:alone",
            _on_one_device,
        ),
        "simulated": Mode(
            "one process plays N workers: --simulated-workers N",
            "tf_hips.trainer.simulated:crowd",
            _on_one_process,
        ),
        "fedavg": Mode(
            "local steps, then a mean of how far they have led",
            "tf_hips.trainer.rounds:fedavg",
            _of_fedavg,
            (
                *("local_steps", "local_epochs", "weighting", "prox_mu", "participation"),
                *("scaffold", "normalise", "rule", *_OUTER),
            ),
            needs="workers",
        ),
        "esync": Mode(
            "as many local steps as fit until the slowest has made its own",
            "tf_hips.trainer.rounds:esync",
            _of_esync,
            ("rule", "pace", "averaging", "weighting", "state_server", "epsilon", *_OUTER),
            needs="workers",
        ),
        "hfa": Mode(
            "workers meet in their party, and parties more rarely",
            "tf_hips.trainer.rounds:hfa",
            options=("local_steps", "party_rounds", "weighting", *_OUTER),
            needs="server",
        ),
        "diloco": Mode(
            "many local steps, and Nesterov's momentum over the means",
            "tf_hips.trainer.rounds:diloco",
            options=("local_steps", "weighting", "participation", "server_optimizer"),
            needs="workers",
        ),
        "streaming": Mode(
            "the same, a fragment of the model at a time, while training goes on",
            "tf_hips.trainer.rounds:streaming",
            options=("local_steps", "fragments", "overlap", "server_optimizer"),
            needs="workers",
        ),
    }
)


def check_options(mode: str, told: local.Local) -> None:
    """Refuses what a mode has no use for.

    Raises:
        ConfigError: such an option was given.
    """
    for name, value in told.given.items():
        if name not in MODES[mode].options:
            users = [other for other, one in MODES.items() if name in one.options]
            # What HiPS calls async makes local epochs, unlike ours.
            is_of_hips = name == "local_epochs" and mode in ("async", "dcasgd")
            raise ConfigError(
                f"`{name}` is for the mode{'s' if len(users) > 1 else ''} {', '.join(users)}. "
                + (_HIPS_ASYNC.format(value) if is_of_hips else "")
                + f"Received: {name}={value} with the mode {mode}"
            )
