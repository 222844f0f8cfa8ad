# SPDX-License-Identifier: Apache-2.0
"""What codecs and collectives cost on the machines and the link at hand. Values, and their file.

`profiling` measures them, `cost_model` computes with them. Every cost is linear: seconds of a call
plus seconds per element or byte, none of them negative. Collectives are told in the bytes that one
rank sends or receives, so that their cost per byte is the link's.

Imports neither TensorFlow nor Horovod.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tf_hips import config
from tf_hips.errors import ConfigError

Point: TypeAlias = tuple[list[float], float]
"""Factors of each coefficient of a cost, and the seconds that were measured."""

# 2: `alltoall` is what one receiver costs. 3: `tiers`, where there are two kinds of links.
_VERSION = 3
_MAX_RANKS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of work: `fixed` for a call, `each` per element."""

    fixed: float = 0.0
    each: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)

    def __call__(self, num_elements: float, calls: float = 1) -> float:
        """Seconds of `calls` calls that together work on so many elements."""
        return self.fixed * calls + self.each * num_elements


@dataclasses.dataclass(frozen=True)
class MergeCost:
    """Seconds of merging packets: per call, per element of the sum, per element of each packet."""

    fixed: float = 0.0
    each: float = 0.0
    per_packet: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)

    def __call__(self, num_elements: float, packets: int, calls: float = 1) -> float:
        """Seconds of `calls` calls for sums of so many elements, each of so many packets."""
        return self.fixed * calls + (self.each + self.per_packet * packets) * num_elements


@dataclasses.dataclass(frozen=True)
class Collective:
    """Seconds of one collective of all ranks.

    Attributes:
        delay: until it begins: others may run meanwhile.
        fixed: that it keeps the link busy, whatever it carries.
        per_byte: more for each byte. Of `alltoall` bytes that a rank sends to one other; of
            `allgather` bytes that it receives from others; of `allreduce` and `broadcast` bytes of
            the tensor.
        cpu: share of this rank's cores that it needs while it runs, in [0, 1].
    """

    delay: float = 0.0
    fixed: float = 0.0
    per_byte: float = 0.0
    cpu: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.cpu > 1:
            raise ConfigError(f"`cpu` must be in [0, 1]. Received: {self.cpu}")

    def __call__(self, num_bytes: float) -> float:
        """Seconds that the link is busy with it."""
        return self.fixed + self.per_byte * num_bytes


@dataclasses.dataclass(frozen=True)
class Tiers:
    """The two kinds of links of ranks on several hosts, where a host has several.

    Attributes:
        hosts: how many.
        per_host: ranks of the host that has most.
        slices: ranks of the host that has least.
        inside: an `alltoall` in which each rank sends to one other of its host, all hosts at once.
        between: one in which `slices` ranks of each host send to one of another host each, at once.
    """

    hosts: int
    per_host: int
    slices: int
    inside: Collective
    between: Collective

    def __post_init__(self) -> None:
        for name in ("hosts", "per_host", "slices"):
            _check_count(name, getattr(self, name), 2)


@dataclasses.dataclass(frozen=True)
class Codec:
    """What one compressor costs on these cores, all ranks of the machine at work.

    Attributes:
        compression: text of the compressor.
        packet: bytes of packets: per chunk, per element.
        sum_packet: the same of the packets that carry sums.
        encode: of gradients, what is kept included.
        decode: of packets of gradients.
        decode_sum: of packets of sums.
        merge: of packets of gradients to a sum.
        recode: the same, and the sum's encoding.
    """

    compression: str
    packet: Cost
    sum_packet: Cost
    encode: Cost
    decode: Cost
    decode_sum: Cost
    merge: MergeCost
    recode: MergeCost


@dataclasses.dataclass(frozen=True)
class Profile:
    """Costs on one set of hosts.

    Attributes:
        num_ranks: ranks that took part.
        ranks_per_host: the most ranks that share a host.
        cores: processors of a host.
        allreduce, alltoall, allgather, broadcast: of these ranks.
        add: of one vector to another.
        copy: of joining vectors, and of cutting the result.
        codecs: of each compressor that was measured.
        tiers: links inside of hosts and between them; None: there is one kind.
        facts: where and when, for people.

    Raises:
        ConfigError: a number is out of range.
    """

    num_ranks: int
    ranks_per_host: int
    cores: int
    allreduce: Collective
    alltoall: Collective
    allgather: Collective
    broadcast: Collective
    add: Cost
    copy: Cost
    codecs: tuple[Codec, ...] = ()
    tiers: Tiers | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("num_ranks", "ranks_per_host", "cores"):
            _check_count(name, getattr(self, name), 1)
        names = [codec.compression for codec in self.codecs]
        if len(set(names)) != len(names):
            raise ConfigError(f"`codecs` must have each compressor once. Received: {names}")

    @classmethod
    def read(cls, path: str | Path) -> "Profile":
        """Reads a profile from YAML.

        Raises:
            ConfigError: there is none; names the file, the place, what was expected and what came.
        """
        return config.read(cls, path, _VERSION)

    def write(self, path: str | Path) -> None:
        """Writes the profile as YAML that `read` reads back."""
        config.write(self, path, _VERSION)

    def codec(self, compression: str) -> Codec:
        """The costs of one compressor.

        Raises:
            ConfigError: it was not measured.
        """
        for codec in self.codecs:
            if codec.compression == compression:
                return codec
        known = ", ".join(codec.compression for codec in self.codecs) or "none"
        raise ConfigError(
            f"the profile must have the costs of {compression}: measure it with `tf-hips profile "
            f"--compression`. Received: a profile of {known}"
        )

    def for_ranks(self, num_ranks: int) -> "Profile":
        """The same hosts and link with another number of ranks, as far as that can be told.

        Bytes that a rank sends or receives cost what they cost. Latencies grow with the number of
        peers (of a broadcast: with the depth of its tree); an allreduce moves `2 (N - 1) / N` of
        its bytes. As many ranks share a host as before.

        Raises:
            ConfigError: one rank was measured, who has no link.
        """
        if num_ranks == self.num_ranks:
            return self
        if self.num_ranks == 1:
            raise ConfigError(
                f"a profile for {num_ranks} ranks must be measured by two ranks at least. "
                "Received: one of a single rank"
            )
        if num_ranks == 1:
            none = Collective()
            return dataclasses.replace(
                self,
                num_ranks=1,
                ranks_per_host=1,
                allreduce=none,
                alltoall=none,
                allgather=none,
                broadcast=none,
                tiers=None,
            )
        peers = (num_ranks - 1) / (self.num_ranks - 1)
        depth = math.ceil(math.log2(num_ranks)) / math.ceil(math.log2(self.num_ranks))
        moved = peers * self.num_ranks / num_ranks
        return dataclasses.replace(
            self,
            num_ranks=num_ranks,
            ranks_per_host=min(self.ranks_per_host, num_ranks),
            allreduce=_scaled(self.allreduce, peers, moved),
            alltoall=_scaled(self.alltoall, peers, 1.0),
            allgather=_scaled(self.allgather, peers, 1.0),
            broadcast=_scaled(self.broadcast, depth, depth),
            tiers=_tiers(self.tiers, num_ranks, peers),
            facts={**self.facts, "scaled": f"from {self.num_ranks} ranks to {num_ranks}"},
        )


def fit(points: Sequence[Point]) -> list[float]:
    """Non-negative coefficients whose relative errors have the least squares.

    Args:
        points: factors of each coefficient, and the value that was measured.

    Returns:
        One coefficient per factor. With few of them, all subsets are tried.
    """
    factors = np.array([units for units, _ in points], np.float64)
    values = np.maximum(np.array([value for _, value in points], np.float64), 1e-12)
    scaled = factors / values[:, None]
    count = factors.shape[1]
    best, least = [0.0] * count, float("inf")
    for size in range(1, count + 1):
        for active in itertools.combinations(range(count), size):
            part = scaled[:, active]
            scale = np.linalg.norm(part, axis=0)
            scale[scale == 0] = 1.0
            solved = np.linalg.lstsq(part / scale, np.ones(len(values)), rcond=None)[0] / scale
            if (solved < 0).any():
                continue
            error = float(np.square(part @ solved - 1).sum())
            if error < least - 1e-12:
                least, best = error, [0.0] * count
                for place, coefficient in zip(active, solved, strict=True):
                    best[place] = float(coefficient)
    return best


def _tiers(tiers: Tiers | None, num_ranks: int, peers: float) -> Tiers | None:
    """Tiers of another number of ranks, `peers` times as many others: hosts are filled in turn."""
    if tiers is None:
        return None
    hosts, rest = divmod(num_ranks, tiers.per_host)
    slices, hosts = (rest, hosts + 1) if rest else (tiers.per_host, hosts)
    if hosts < 2 or slices < 2:
        return None
    inside, between = (_scaled(one, peers, 1.0) for one in (tiers.inside, tiers.between))
    return Tiers(hosts, tiers.per_host, slices, inside, between)


def _scaled(cost: Collective, latency: float, per_byte: float) -> Collective:
    return Collective(
        cost.delay * latency, cost.fixed * latency, cost.per_byte * per_byte, cost.cpu
    )


def _check_count(name: str, value: int, least: int) -> None:
    if not least <= value <= _MAX_RANKS:
        raise ConfigError(
            f"`{name}` must be an integer in [{least}, {_MAX_RANKS}]. "
            f"Received: {config.shown(value)}"
        )


def _check_numbers(costs: Cost | MergeCost | Collective) -> None:
    for name, value in dataclasses.asdict(costs).items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"`{name}` must be a number >= 0. Received: {config.shown(value)}")
