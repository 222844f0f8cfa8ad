# SPDX-License-Identifier: Apache-2.0
"""What a simulation is told, read strictly from YAML (docs/esync.md has an example)."""

import dataclasses
import math
from pathlib import Path

from tf_hips import config
from tf_hips.errors import ConfigError
from tf_hips.esync import compat
from tf_hips.esync.rule import Pace
from tf_hips.ops import compressor as compressors
from tf_hips.ps.terms.model import MAX_ELEMENTS, Model

METHODS = ("sync", "fedavg", "esync", "esync-compat", "fedbuff")
VERSION = 1
MAX_SITES = 1_000_000
MAX_ROUNDS = 1_000_000
_MAX_SECONDS = 1e9


def _check(name: str, value: object, is_right: bool, text: str) -> None:
    if not is_right:
        raise ConfigError(f"`{name}` must be {text}. Received: {name}={value!r}")


def _check_rate(name: str, value: float | None) -> None:
    if value is not None:
        _check(name, value, 0 < value < math.inf, "> 0 and finite")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What travels in a round: a model, by its shapes or by its number of parameters.

    Attributes:
        parameters: number of elements; None: `shapes` says.
        shapes: of all gradients.
        compression: text of the compressor of the way up.
        downlink: the same of the way down, or `same`.
    """

    parameters: int | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    compression: str = "fp32"
    downlink: str = "same"

    def __post_init__(self) -> None:
        """Checks all values.

        Raises:
            ConfigError: one of them is wrong.
        """
        if (self.parameters is None) == (not self.shapes):
            raise ConfigError("Either `parameters` or `shapes` must say how large the model is.")
        if self.parameters is not None:
            is_right = 1 <= self.parameters <= MAX_ELEMENTS
            _check("parameters", self.parameters, is_right, "from 1 to 2^40")
        for place, shape in enumerate(self.shapes):
            is_right = all(0 <= side <= MAX_ELEMENTS for side in shape)
            _check(f"shapes[{place}]", shape, is_right, "sizes from 0 to 2^40")
        elements = sum(map(math.prod, self.shapes))
        _check("shapes", elements, elements <= MAX_ELEMENTS, "of at most 2^40 elements in all")
        try:
            up = compressors.resolve(self.compression)
            compressors.check_makes_packets(up, "compression", may_be_mixed=True)
            if self.downlink != "same":
                down = compressors.resolve(self.downlink)
                compressors.check_makes_packets(down, "downlink", may_be_mixed=True)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def packets(self) -> tuple[int, int]:
        """Bytes of all packets of a round, up and down, without their frames."""
        shapes = self.shapes if self.parameters is None else ((self.parameters,),)
        model = Model(tuple(shapes))
        up = model.compressor(self.compression)
        down = up.for_sums if self.downlink == "same" else model.compressor(self.downlink)
        return sum(model.packet_bytes(up)), sum(model.packet_bytes(down))

    def num_chunks(self) -> int:
        """Chunks of the model, of which each has a frame at least."""
        shapes = self.shapes if self.parameters is None else ((self.parameters,),)
        return len(Model(tuple(shapes)).chunks)


@dataclasses.dataclass(frozen=True)
class Group:
    """Sites of one kind.

    Attributes:
        name: the group's name.
        count: how many sites it has.
        step_s: seconds of a local step, the median over the sites.
        spread: how sites differ: standard deviation of the logarithm of a site's mean step.
        jitter: how steps of one site differ: their standard deviation over their mean.
        up_mbps: rate of a site's way up, in Mbit/s; None: unlimited.
        down_mbps: the same of its way down.
        latency_ms: of one way.
        overhead_ms: of a round, beside its steps and bytes: to encode, to merge, to meet.
        clock_s: clocks of sites are off by up to this, evenly drawn; of no effect but on compat.
    """

    name: str
    count: int
    step_s: float
    spread: float = 0.0
    jitter: float = 0.0
    up_mbps: float | None = None
    down_mbps: float | None = None
    latency_ms: float = 0.0
    overhead_ms: float = 0.0
    clock_s: float = 0.0

    def __post_init__(self) -> None:
        """Checks all values.

        Raises:
            ConfigError: one of them is wrong.
        """
        _check("count", self.count, 1 <= self.count <= MAX_SITES, f"from 1 to {MAX_SITES}")
        _check("step_s", self.step_s, 0 < self.step_s <= _MAX_SECONDS, "> 0 and at most 1e9")
        _check("spread", self.spread, 0 <= self.spread <= 5, "from 0 to 5")
        _check("jitter", self.jitter, 0 <= self.jitter <= 10, "from 0 to 10")
        for name in ("up_mbps", "down_mbps"):
            _check_rate(name, getattr(self, name))
        for name in ("latency_ms", "overhead_ms"):
            value = getattr(self, name)
            _check(name, value, 0 <= value < 1e6, "from 0 to 1e6")
        _check("clock_s", self.clock_s, 0 <= self.clock_s <= _MAX_SECONDS, "from 0 to 1e9")


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        name: `sync`, `fedavg`, `esync`, `esync-compat` or `fedbuff`.
        steps: local steps of a round of `fedavg` and `fedbuff`.
        pace: parameters of `esync`, as `margin=0.02,deadline=2`; others have their defaults.
        epsilon: seconds of the margin of `esync-compat`.
        k: updates that `fedbuff` makes one step of.
    """

    name: str
    steps: int = 20
    pace: str = ""
    epsilon: float = 0.5
    k: int = 10

    def __post_init__(self) -> None:
        """Checks all values.

        Raises:
            ConfigError: one of them is wrong.
        """
        if self.name not in METHODS:
            raise ConfigError(f"`name` must be one of {', '.join(METHODS)}. Received: {self.name}")
        _check("steps", self.steps, 1 <= self.steps <= 10**6, "from 1 to 1000000")
        _check("epsilon", self.epsilon, 0 <= self.epsilon < math.inf, ">= 0 and finite")
        _check("k", self.k, 1 <= self.k <= MAX_SITES, f"from 1 to {MAX_SITES}")
        try:
            Pace.parse(self.pace)
        except ValueError as error:
            raise ConfigError(f"`pace`: {error}") from error

    @property
    def label(self) -> str:
        """The method with what makes it differ from others of its name."""
        more = {
            "fedavg": f" {self.steps}",
            "fedbuff": f" {self.steps}, k {self.k}",
            "esync": f" {self.pace}" if self.pace else "",
            "esync-compat": f" {self.epsilon:g} s",
        }
        return self.name + more.get(self.name, "")


@dataclasses.dataclass(frozen=True)
class Server:
    """The links of the server, which all sites share, in Mbit/s; None: unlimited."""

    up_mbps: float | None = None
    down_mbps: float | None = None

    def __post_init__(self) -> None:
        """Checks both.

        Raises:
            ConfigError: one is wrong.
        """
        for name in ("up_mbps", "down_mbps"):
            _check_rate(name, getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Description:
    """A simulation.

    Attributes:
        model: what travels.
        groups: the sites.
        methods: what is compared.
        server: its links.
        rounds: how many are simulated of each method; the first three do not count. Of `fedbuff`
            the fewest steps of the server that count, after three updates of every site.
        seed: of all that is drawn.
    """

    model: Traffic
    groups: tuple[Group, ...]
    methods: tuple[Method, ...] = (Method("sync"), Method("fedavg"), Method("esync"))
    server: Server = dataclasses.field(default_factory=Server)
    rounds: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks all values.

        Raises:
            ConfigError: one of them is wrong.
        """
        if not self.groups or not self.methods:
            raise ConfigError("`groups` and `methods` must have an entry at least.")
        _check("groups", self.num_sites, self.num_sites <= MAX_SITES, f"at most {MAX_SITES} sites")
        if any(method.name == "esync-compat" for method in self.methods):
            is_right = self.num_sites <= compat.MAX_WORKERS
            text = f"at most {compat.MAX_WORKERS} sites for esync-compat"
            _check("groups", self.num_sites, is_right, text)
        _check("rounds", self.rounds, 4 <= self.rounds <= MAX_ROUNDS, f"from 4 to {MAX_ROUNDS}")
        _check("seed", self.seed, 0 <= self.seed < 1 << 63, "from 0 to 2^63")

    @classmethod
    def read(cls, path: str | Path) -> "Description":
        """Reads a file.

        Raises:
            ConfigError: it is missing or says something else.
        """
        return config.read(cls, path, version=VERSION)

    @property
    def num_sites(self) -> int:
        """Sites of all groups."""
        return sum(group.count for group in self.groups)
