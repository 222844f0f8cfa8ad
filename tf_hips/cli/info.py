# SPDX-License-Identifier: Apache-2.0
"""`tf-hips info`: what is installed and what was built, a line each, missing or not.

Versions come from the packages' metadata and from the build's stamp: nothing heavy is imported.
"""

import argparse
import importlib
import importlib.metadata
import platform
from typing import Any

from tf_hips.errors import LibraryError

_DISTRIBUTIONS = {
    "TensorFlow": ("tensorflow", "tensorflow-cpu"),
    "Keras": ("keras",),
    "Horovod": ("horovod",),
    "gRPC": ("grpcio",),
    "NumPy": ("numpy",),
}
_MISSING = "not installed"
_NOT_BUILT = "not built; run `make build`"


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "info",
        help="versions, native library, codecs",
        description="Says what is installed and what was built.",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the table."""
    del options
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts().items():
        table.add_row(name, value)
    Console(highlight=False).print(table)
    return 0


def facts() -> dict[str, str]:
    """Name and value of everything that the table shows."""
    import tf_hips

    stamp = _stamp()
    library, codecs = _native()
    return {
        "tf_hips": tf_hips.__version__,
        "Python": f"{platform.python_version()} on {platform.platform(terse=True)}",
        **{name: _version(names) for name, names in _DISTRIBUTIONS.items()},
        "native library": library,
        "built for": f"TensorFlow {stamp['TENSORFLOW']}" if "TENSORFLOW" in stamp else _NOT_BUILT,
        "compiler": stamp.get("COMPILER", _NOT_BUILT),
        "CUDA": "not compiled",
        "codecs": codecs,
    }


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return _MISSING


def _stamp() -> dict[str, str]:
    try:
        module = importlib.import_module("tf_hips._build_info")
    except ImportError:
        return {}
    return {name: str(value) for name, value in vars(module).items() if name.isupper()}


def _native() -> tuple[str, str]:
    from tf_hips.ops import algorithms, native

    try:
        return str(native.library_path()), ", ".join(sorted(algorithms.REGISTRY))
    except LibraryError as error:
        return str(error), _NOT_BUILT
