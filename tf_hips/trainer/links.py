# SPDX-License-Identifier: Apache-2.0
"""How gradients travel, beside `compression`: down from a server, and inside a party.

Imports no TensorFlow. What goes together strategies know: they check it.
"""

import dataclasses
from typing import Any

from tf_hips.errors import ConfigError

# What is the server's, or of parties below one.
_OF_A_SERVER = ("downlink", "local_compression")


@dataclasses.dataclass(frozen=True)
class Links:
    """Options of the way down and of the ways inside a party; see `tf_hips.HierarchicalPS`.

    Attributes:
        downlink: encoding of the way down, or "same": as up; None: as the mode has it.
        local_compression: encoding inside a party that has a server; None: there is none.
        topology: which way packets take inside a party; None: by the number of its workers.
        comp_threshold: gradients of fewer elements are summed exactly inside a party.
        plan: file of `tf-hips plan`, or "auto": what is done with each gradient inside a party;
            None: the same with all.
    """

    downlink: str | None = None
    local_compression: str | None = None
    topology: str | None = None
    comp_threshold: int = 0
    plan: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The options that were given, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}

    @property
    def in_party(self) -> dict[str, Any]:
        """What both strategies take, by the names of their arguments."""
        names = ("topology", "comp_threshold", "plan")
        return {name: getattr(self, name) for name in names}

    def check_way(self, *, has_server: bool) -> None:
        """Looks whether there is a server where one is meant.

        Raises:
            ConfigError: there is none.
        """
        given = {name: value for name, value in self.given.items() if name in _OF_A_SERVER}
        if given and not has_server:
            names = " and ".join(f"`{name}`" for name in given)
            raise ConfigError(
                f"{names} must come with a server (`tf-hips run`, `tf-hips party --server`); "
                "without one `compression` is all that encodes. Received: "
                + ", ".join(f"{name}={value}" for name, value in given.items())
            )
