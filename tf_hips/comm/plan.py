# SPDX-License-Identifier: Apache-2.0
"""What is done with each gradient of a model: compressed or not, how, in how many parts. Values.

A plan is made by `planner` from measurements, or by hand, or comes from HiPress' SeCoPa
(`name,num_elements,y|n,K` lines); a strategy obeys it. Gradients are known by their position and
their number of elements: names are for people, because Keras' differ between ranks and runs.

Imports neither TensorFlow nor Horovod.

Source: HiPress (SOSP 2021), SeCoPa's output; what differs stands in docs/plan.md.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tf_hips import config
from tf_hips.comm.schedules import HOPS
from tf_hips.errors import ConfigError, LibraryError
from tf_hips.ops.compressor import Compressor, check_makes_packets, parse
from tf_hips.ops.native import MAX_ELEMENTS

AUTO = "auto"
"""In place of a plan: one that is made from measurements before the first step."""
EXACT = "allreduce"
"""The topology of sums that are not compressed."""

PS = "ps"
ALLGATHER = "allgather"
HIERARCHICAL = "hierarchical"
HIERARCHICAL_FP16 = "hierarchical_fp16"

COMPRESSED = (PS, *HOPS, ALLGATHER, HIERARCHICAL, HIERARCHICAL_FP16)
"""The topologies of compressed sums; what each does: `topologies`."""
TOPOLOGIES = (EXACT, *COMPRESSED)

LARGE_TABLE_ROWS = 2**18
"""Rows from which on the table of a sparse gradient does not go through a codec: vocabularies of
language models stay below, tables of users and items are above. There a step touches so few rows
that they are fewer bytes than a packet of the whole table, and a residual as large as the table
would be kept on every worker."""

_VERSION = 1
_MAX_RANKS = 1 << 20
_MAX_PARTITIONS = 1 << 16
# HiPress' lines hold no more; anything longer is no plan.
_MAX_LINE = 1 << 16


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is done with one gradient.

    Attributes:
        name: for people; need not be the same on all ranks.
        num_elements: of the gradient; 0: a large table, whose rows travel apart.
        compression: text of the compressor; None for the exact sum.
        topology: one of TOPOLOGIES; "allreduce" if and only if `compression` is None.
        partitions: into how many buckets of its own the gradient is cut; 1: it travels in a bucket
            with its neighbours.
        predicted_seconds: what its sum costs alone, from its being ready; None: not predicted.

    Raises:
        ConfigError: there is no such choice.
    """

    name: str
    num_elements: int
    compression: str | None = None
    topology: str = EXACT
    partitions: int = 1
    predicted_seconds: float | None = None

    def __post_init__(self) -> None:
        _check_integer("num_elements", self.num_elements, 0, MAX_ELEMENTS)
        _check_integer("partitions", self.partitions, 1, _MAX_PARTITIONS)
        _check_seconds(self.predicted_seconds)
        if self.topology not in TOPOLOGIES:
            raise ConfigError(
                f"`topology` must be one of {', '.join(TOPOLOGIES)}. "
                f"Received: {config.shown(self.topology)}"
            )
        if (self.compression is None) != (self.topology == EXACT):
            raise ConfigError(
                f'`topology` must be "{EXACT}" if and only if `compression` is null. Received: '
                f"topology={self.topology}, compression={config.shown(self.compression)}"
            )
        if self.compression is not None:
            object.__setattr__(self, "compression", _canonical(self.compression))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Choices for all gradients of a model, in the order of its trainable variables.

    Attributes:
        num_ranks: ranks that the plan was made for.
        choices: one per gradient.
        predicted_seconds: of all sums of a step, from the first gradient to the last sum.
        facts: where it comes from, for people.

    Raises:
        ConfigError: a number is out of range.
    """

    num_ranks: int
    choices: tuple[Choice, ...]
    predicted_seconds: float | None = None
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_integer("num_ranks", self.num_ranks, 1, _MAX_RANKS)
        _check_seconds(self.predicted_seconds)

    @classmethod
    def read(cls, path: str | Path) -> "Plan":
        """Reads a plan from YAML.

        Raises:
            ConfigError: there is none; names the file, the place, what was expected and what came.
        """
        return config.read(cls, path, _VERSION)

    def write(self, path: str | Path) -> None:
        """Writes the plan as YAML that `read` reads back."""
        config.write(self, path, _VERSION)

    def check(self, gradients: Sequence[tuple[str, int]], num_ranks: int) -> None:
        """Compares the plan with a model.

        Args:
            gradients: name and number of elements of each, in the order of the trainable variables;
                0 elements of a table that travels apart, as rows, for which a choice says nothing.
            num_ranks: ranks of the job.

        Raises:
            ConfigError: the plan is for something else; names the first mismatch. Names alone may
                differ.
        """
        if num_ranks != self.num_ranks:
            raise ConfigError(
                f"the plan must be for the ranks of this job, {num_ranks}. "
                f"Received: a plan for {self.num_ranks}"
            )
        for place, ((name, size), choice) in enumerate(zip(gradients, self.choices, strict=False)):
            # A plan cannot know of each table whether it will travel apart: either may say so.
            if size != choice.num_elements and size and choice.num_elements:
                raise ConfigError(
                    f"the plan must fit the model. Received: gradient {place} of the model, "
                    f"{name}, has {size} elements, and the plan's, {choice.name}, "
                    f"{choice.num_elements}"
                )
        common = min(len(gradients), len(self.choices))
        only = [(one.name, one.num_elements) for one in self.choices[common:]]
        whose = "plan" if only else "model"
        only += gradients[common:]
        if only:
            name, size = only[0]
            raise ConfigError(
                f"the plan must fit the model. Received: {len(gradients)} gradients in the model "
                f"and {len(self.choices)} in the plan; only the {whose} has gradient {common}, "
                f"{name}, with {size} elements"
            )

    def to_secopa(self) -> str:
        """The plan as HiPress' SeCoPa writes it: `name,num_elements,y|n,partitions` lines.

        Algorithms, topologies and times have no place there.
        """
        return "".join(
            f"{' '.join(choice.name.split())},{choice.num_elements},"
            f"{'n' if choice.compression is None else 'y'},{choice.partitions}\n"
            for choice in self.choices
        )

    @classmethod
    def from_secopa(
        cls,
        path: str | Path,
        num_ranks: int,
        compression: str,
        topology: str = PS,
        gradients: Sequence[tuple[str, int]] | None = None,
    ) -> "Plan":
        """Reads what HiPress' SeCoPa writes.

        Args:
            path: file of `name,num_elements,y|n,partitions` lines, or of the three columns
                `name,y|n,partitions` that HiPress' README shows.
            num_ranks: ranks that the plan is for.
            compression: text of the compressor of all gradients marked with `y`.
            topology: theirs.
            gradients: names and elements, which a file of three columns lacks, by position.

        Raises:
            ConfigError: a line is no such line, three columns came without `gradients`, or there
                are more or fewer lines than gradients.
        """
        rows = [_secopa_row(line, f"{path}:{number}") for number, line in _lines(path)]
        if gradients is None and any(size is None for _, size, _, _ in rows):
            raise ConfigError(
                f"{path}: expected `name,num_elements,y|n,partitions` lines, because three columns "
                "do not say how large a gradient is. Received: a line of three columns"
            )
        sizes = [size for _, size, _, _ in rows]
        if gradients is not None:
            if len(gradients) != len(rows):
                raise ConfigError(
                    f"{path}: expected a line for each of {len(gradients)} gradients. "
                    f"Received: {len(rows)}"
                )
            sizes = [
                known if size is None else size
                for size, (_, known) in zip(sizes, gradients, strict=True)
            ]
        plan = cls(
            num_ranks,
            tuple(
                Choice(
                    name,
                    size or 0,
                    compression if is_compressed else None,
                    topology if is_compressed else EXACT,
                    partitions,
                )
                for (name, _, is_compressed, partitions), size in zip(rows, sizes, strict=True)
            ),
            facts={"source": f"SeCoPa columns of {Path(path).name}"},
        )
        if gradients is not None:
            plan.check(gradients, num_ranks)
        return plan


def best_topology(num_ranks: int, compressor: Compressor) -> str:
    """The topology of a job that names none.

    Two ranks send each other as many bytes with either, and `allgather` encodes each element once;
    with more ranks it sends more. What is best on a certain link a plan can tell. What makes no
    packets has but one.
    """
    return ALLGATHER if num_ranks == 2 and compressor.makes_packets else PS


def read_lines(path: str | Path) -> list[tuple[str, int]]:
    """Reads HiPress' `name,num_elements` lines: the gradients of a model.

    Raises:
        ConfigError: the file cannot be read, or a line is no such line.
    """
    gradients = []
    for number, line in _lines(path):
        name, _, size = line.rpartition(",")
        if not name or not _is_size(size):
            raise ConfigError(
                f"{path}:{number}: expected `name,num_elements`. Received: {config.shown(line)}"
            )
        gradients.append((name.strip(), int(size)))
    if not gradients:
        raise ConfigError(f"{path}: expected `name,num_elements` lines. Received: none")
    return gradients


def _lines(path: str | Path) -> list[tuple[int, str]]:
    """Number and text of each line of a file that is not empty."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be text in UTF-8. Received: {error}") from error
    found = [(number, line.strip()) for number, line in enumerate(text.split("\n"), 1)]
    for number, line in found:
        if len(line) > _MAX_LINE:
            raise ConfigError(f"{path}:{number}: expected at most {_MAX_LINE} characters.")
    return [(number, line) for number, line in found if line]


def _secopa_row(line: str, place: str) -> tuple[str, int | None, bool, int]:
    """Name, elements (None: three columns), whether it is compressed, partitions."""
    parts = [part.strip() for part in line.split(",")]
    if (
        len(parts) < 3
        or parts[-2] not in ("y", "n")
        or not _is_size(parts[-1])
        or not 1 <= int(parts[-1]) <= _MAX_PARTITIONS
    ):
        raise ConfigError(
            f"{place}: expected `name,num_elements,y|n,partitions` or `name,y|n,partitions`. "
            f"Received: {config.shown(line)}"
        )
    is_compressed, partitions = parts[-2] == "y", int(parts[-1])
    if len(parts) > 3 and _is_size(parts[-3]):
        return line.rsplit(",", 3)[0].strip(), int(parts[-3]), is_compressed, partitions
    return line.rsplit(",", 2)[0].strip(), None, is_compressed, partitions


def _is_size(text: str) -> bool:
    text = text.strip()
    return text.isascii() and text.isdecimal() and len(text) < 19 and int(text) <= MAX_ELEMENTS


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(
            f"`{name}` must be an integer in [{least}, {most}]. Received: {config.shown(value)}"
        )


def _check_seconds(value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise ConfigError(
            f"`predicted_seconds` must be a number >= 0, or null. Received: {config.shown(value)}"
        )


@functools.lru_cache(maxsize=64)
def _canonical(text: str) -> str:
    try:
        return check_makes_packets(parse(text), "compression").text
    except (TypeError, ValueError, LibraryError) as error:
        raise ConfigError(f"`compression` must name a compressor. Received: {error}") from error
