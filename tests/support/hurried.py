# SPDX-License-Identifier: Apache-2.0
"""A C++ compiler in a hurry: for tests of what is done with a library, not of what is in it."""

import shutil
from pathlib import Path

import pytest

from tf_hips.ops import loaded, registry
from tf_hips.ops.specifications import CACHE

# Set to anything: without it the compiler is the system's as it is.
HURRY = "TEST_HURRY"


def compiler(folder: Path) -> Path:
    """Makes a script in `folder` that is g++, and does not optimise where HURRY is set.

    To set HURRY changes no hash of a cache, so what was compiled with care before is found.
    """
    script = folder / "hurried-g++"
    script.write_text(
        "#!/bin/bash\n"
        f'[ -z "${HURRY}" ] || set -- "${{@/#-O3/-O0}}"\n'
        f'exec {shutil.which("g++")} "$@"\n'
    )
    script.chmod(0o755)
    return script


def cache_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that other tests compiled or loaded is there, and what is compiled is in a hurry."""
    for module, names in ((loaded, ("_tables",)), (registry, ("_loaded", "_newest"))):
        for name in names:
            monkeypatch.setattr(module, name, {})
    monkeypatch.setenv(CACHE, str(folder / "cache"))
    monkeypatch.setenv("CXX", str(compiler(folder)))
    monkeypatch.setenv(HURRY, "1")
