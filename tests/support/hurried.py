# SPDX-License-Identifier: Apache-2.0
"""A C++ compiler in a hurry: for tests of what is done with a library, not of what is in it."""

import shutil
from pathlib import Path

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
