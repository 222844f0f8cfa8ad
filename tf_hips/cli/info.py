# SPDX-License-Identifier: Apache-2.0
"""`tf-hips info`: what is installed and what was built, a line each, missing or not.

Versions come from the packages' metadata and from the build's stamp: nothing heavy is imported.
"""

import argparse
import importlib.metadata
import platform
from typing import Any

import tf_hips
from tf_hips import tables
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
    columns = (tables.Column("name"), tables.Column("value", folds=True))
    tables.show(columns, list(facts().items()), has_head=False)
    return 0


def facts() -> dict[str, str]:
    """Name and value of everything that the table shows."""
    from tf_hips.ops.registry import REGISTRY

    return {
        "tf_hips": tf_hips.__version__,
        "Python": f"{platform.python_version()} on {platform.platform(terse=True)}",
        **{name: _version(names) for name, names in _DISTRIBUTIONS.items()},
        **_build(),
        "native library": _library(),
        "codecs": ", ".join(f"{name} {_state(name)}".rstrip() for name in sorted(REGISTRY)),
    }


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return _MISSING


def _build() -> dict[str, str]:
    from tf_hips.ops import library

    try:
        stamp = library.built_with()
    except LibraryError:
        return dict.fromkeys(("built for", "compiler", "CUDA"), _NOT_BUILT)
    return {
        "built for": f"TensorFlow {stamp.TENSORFLOW}, commit {stamp.GIT_COMMIT}",
        "compiler": stamp.COMPILER,
        "CUDA": stamp.CUDA,
    }


def _library() -> str:
    from tf_hips.ops import library

    try:
        library.native()
    except LibraryError as error:
        return str(error)
    return str(library.NATIVE_PATH)


def _state(codec: str) -> str:
    """Nothing for a codec that the library has, else what is wrong."""
    from tf_hips.ops import compressor, native

    try:
        native.wire_bytes(compressor.parse(codec), 1)
    except LibraryError:
        return "(not built)"
    return ""
