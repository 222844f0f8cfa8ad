# SPDX-License-Identifier: Apache-2.0
"""The flags that are ours. Everything else is upstream's.

Imports no TensorFlow: a wrong flag is told at once.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

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


@dataclasses.dataclass(frozen=True)
class Options:
    """Our flags.

    Attributes:
        directory: folder of upstream's scripts.
        sums: whether the gradients are summed by us; else upstream is left to itself.
        compressor: how they are encoded; None: exact sums.
        threshold: gradients of fewer elements are summed exactly.
    """

    directory: Path
    sums: bool
    compressor: Compressor | None
    threshold: int

    @property
    def description(self) -> str:
        """What is done to gradients, for people."""
        text = EXACT if self.compressor is None else self.compressor.text
        if self.compressor is not None and self.threshold:
            text += f", from {self.threshold} elements on"
        return text


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
    made.add_argument(
        "--comp_threshold",
        type=elements,
        default=0,
        metavar="N",
        help="gradients of fewer elements are summed exactly (default 0; HiPress: 262144)",
    )
    return made


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
    if found.comp_alg is None and found.comp_threshold:
        reader.error("--comp_threshold must go with --comp_alg")
    compressor = found.comp_alg if isinstance(found.comp_alg, Compressor) else None
    if compressor is None and found.comp_threshold:
        reader.error("--comp_threshold must go with a compression. Received: --comp_alg=none")
    return (
        Options(
            found.tf_cnn_benchmarks_dir,
            found.comp_alg is not None,
            compressor,
            found.comp_threshold,
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


def elements(text: str) -> int:
    """The value of --comp_threshold; raises what argparse wants."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0. Received: {text!r}")
    return int(text)
