# SPDX-License-Identifier: Apache-2.0
"""The flags that are ours. Everything else is upstream's.

Imports no TensorFlow: a wrong flag is told at once.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tf_hips.comm import plan
from tf_hips.errors import TfHipsError
from tf_hips.ops import compressor as compressors
from tf_hips.ops.compressor import Compressor

PROGRAM = "tf_cnn_benchmarks"
SCRIPT = "tf_cnn_benchmarks.py"

# What HiPress calls its algorithms, where a name alone means more than the codec: those that keep
# what they did not send keep it there, too. A text with brackets, such as `onebit()`, is taken as
# it is.
HIPRESS_NAMES = {
    "onebit": "error_feedback(onebit)",
    "tbq": "error_feedback(tbq)",
    "graddrop": "error_feedback(graddrop)",
}
EXACT = "none"
_YAML = (".yaml", ".yml")


@dataclasses.dataclass(frozen=True)
class Options:
    """Our flags.

    Attributes:
        directory: folder of upstream's scripts.
        sums: whether the gradients are summed by us; else upstream is left to itself.
        compressor: how they are encoded; None: exact sums.
        threshold: gradients of fewer elements are summed exactly.
        topology: which way packets take; None: as a strategy chooses.
        plan: file that says what is done with each gradient: YAML, which says everything, or
            SeCoPa's columns, which say how what is compressed is cut; or `plan.AUTO`: measured
            before the first step.
    """

    directory: Path
    sums: bool
    compressor: Compressor | None
    threshold: int = 0
    topology: str | None = None
    plan: Path | str | None = None

    @property
    def has_columns(self) -> bool:
        """Whether the plan is SeCoPa's."""
        return self.plan is not None and not says_all(self.plan)

    @property
    def description(self) -> str:
        """What is done to gradients, for people."""
        parts = [] if self.compressor is None else [self.compressor.text]
        if self.plan is not None:
            parts.append(f"plan {Path(self.plan).name}")
        if self.topology is not None:
            parts.append(f"topology {self.topology}")
        if self.threshold:
            parts.append(f"from {self.threshold} elements on")
        return ", ".join(parts) or EXACT


def parser() -> argparse.ArgumentParser:
    """The parser of our flags; what it does not know is upstream's."""
    made = argparse.ArgumentParser(
        prog=PROGRAM,
        usage="python -m tf_hips.tf_cnn_benchmarks --tf_cnn_benchmarks_dir DIR [flags]",
        description="Runs upstream's tf_cnn_benchmarks.py; flags that are not listed here are its.",
        allow_abbrev=False,
        add_help=False,
    )
    made.add_argument(
        "--tf_cnn_benchmarks_dir",
        type=_directory,
        required=True,
        metavar="DIR",
        help=f"folder with upstream's {SCRIPT}",
    )
    made.add_argument(
        "--comp_alg",
        type=algorithm,
        metavar="TEXT",
        help="how gradients are encoded with --variable_update=horovod: dgc, terngrad, tbq, "
        "onebit, graddrop as HiPress means them, any compressor such as "
        "'warmup(dgc(ratio=0.001), steps=100)', or none: exact sums. Without it upstream sums "
        "itself, tensor by tensor",
    )
    add_ways(made)
    return made


def add_ways(made: argparse.ArgumentParser) -> None:
    """Adds what goes with --comp_alg; `check_ways` checks it."""
    made.add_argument(
        "--comp_plan",
        type=_plan,
        metavar="FILE",
        help="what is done with each gradient: YAML of `tf-hips plan`, instead of --comp_alg; "
        "auto: a plan that is measured first, instead of it, too; or SeCoPa's lines "
        "`name,elements,y|n,partitions`, where y is what --comp_alg says",
    )
    made.add_argument(
        "--comp_topology",
        choices=plan.COMPRESSED,
        help="which way packets take (default: allgather for two ranks, else ps)",
    )
    made.add_argument(
        "--comp_threshold",
        type=elements,
        default=0,
        metavar="N",
        help="gradients of fewer elements are summed exactly (default 0; HiPress: 262144)",
    )


def check_ways(reader: argparse.ArgumentParser, found: argparse.Namespace) -> None:
    """Ends the program where flags of `add_ways` and --comp_alg do not go together."""
    given = {
        "--comp_alg": found.comp_alg is not None,
        "--comp_topology": found.comp_topology is not None,
        "--comp_threshold": found.comp_threshold > 0,
    }
    if found.comp_plan is not None and says_all(found.comp_plan):
        others = [name for name, is_given in given.items() if is_given]
        if others:
            reader.error(
                f"--comp_plan must go without {others[0]}: a plan in YAML, or auto, says it itself"
            )
        return
    if found.comp_plan is not None and given["--comp_threshold"]:
        reader.error("--comp_plan must go without --comp_threshold: its lines say y or n")
    if isinstance(found.comp_alg, Compressor):
        return
    needs = "--comp_plan" if found.comp_plan is not None else ""
    for name in ("--comp_topology", "--comp_threshold"):
        needs = needs or (name if given[name] else "")
    if needs:
        received = EXACT if given["--comp_alg"] else "none given"
        reader.error(f"{needs} must go with a --comp_alg that encodes. Received: {received}")


def says_all(given: Path | str) -> bool:
    """Whether a plan is `plan.AUTO` or in YAML; else it has SeCoPa's columns."""
    return given == plan.AUTO or Path(given).suffix in _YAML


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Reads our flags.

    Args:
        arguments: of the command line, without the program.

    Returns:
        Our flags, and the arguments that are upstream's, in their order.

    Raises:
        SystemExit: a flag of ours is wrong; one line on standard error says how.
    """
    reader = parser()
    found, rest = reader.parse_known_args(list(arguments))
    check_ways(reader, found)
    return (
        Options(
            found.tf_cnn_benchmarks_dir,
            found.comp_alg is not None or found.comp_plan is not None,
            found.comp_alg if isinstance(found.comp_alg, Compressor) else None,
            found.comp_threshold,
            found.comp_topology,
            found.comp_plan,
        ),
        rest,
    )


def _directory(text: str) -> Path:
    path = Path(text)
    if not (path / SCRIPT).is_file():
        raise argparse.ArgumentTypeError(
            f"must be the folder of upstream's {SCRIPT} (scripts/tf_cnn_benchmarks of "
            f"github.com/tensorflow/benchmarks). Received: {text!r}"
        )
    return path.resolve()


def algorithm(text: str) -> Compressor | str:
    """The value of --comp_alg: a compressor, or `EXACT`; raises what argparse wants."""
    if text.strip() == EXACT:
        return EXACT
    try:
        return compressors.resolve(HIPRESS_NAMES.get(text.strip(), text))
    except (ValueError, TfHipsError) as error:
        raise argparse.ArgumentTypeError(f"{error}") from error


def _plan(text: str) -> Path | str:
    if text == plan.AUTO:
        return text
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f'must be a file or "{plan.AUTO}". Received: {text!r}')
    return path


def elements(text: str) -> int:
    """The value of --comp_threshold; raises what argparse wants."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0. Received: {text!r}")
    return int(text)
