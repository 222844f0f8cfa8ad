# SPDX-License-Identifier: Apache-2.0
"""A C++ compiler in a hurry: for tests of what is done with a library, not of what is in it."""

import shlex
import shutil
from pathlib import Path

import pytest

from tests.compll import hurry
from tf_hips.ops import loaded, registry
from tf_hips.ops.specifications import CACHE

# Set to anything: without it the compiler is the system's as it is.
HURRY = "TEST_HURRY"


# What a compiler in a hurry made of a text it gives again, for as long as these tests run. Only one
# command from text to library, which says nothing: others are as they are. All of it is for this
# machine, as the headers are that have been read.
_SCRIPT = """#!/bin/bash
[ -n "${{{hurry}}}" ] || exec {compiler} "$@"
set -- "${{@/#-O3/-O0}}"
library= given= key=()
for one in "$@"; do
  if [ "$before" = -o ]; then library=$one
  elif [ -f "$one" ]; then key+=("$(sha256sum <"$one")"); given+=${{one##*.}}
  else key+=("$one"); fi
  before=$one
done
[[ -n "$library" && $given = cc && " $* " = *" -shared "* ]] || exec {compiler} "$@"
kept={kept}/$(printf '%s\\0' "${{key[@]}}" | sha256sum | cut -c-32)
if [ ! -f "$kept" ]; then
  for one in "$@"; do
    case $one in -m*|-DTF_HIPS_ONE_MACHINE) ;; *) any+=("$one") ;; esac
  done
  said=$({compiler} "${{any[@]}}" {more} 2>&1)
  code=$?
  if [ $code != 0 ] || [ -n "$said" ]; then echo "$said" >&2; exit $code; fi
  mkdir -p {kept} && cp "$library" "$kept.$$" && mv "$kept.$$" "$kept"
  exit
fi
exec cp "$kept" "$library"
"""


def compiler(folder: Path) -> Path:
    """Makes a script in `folder` that is g++, and does not optimise where HURRY is set.

    To set HURRY changes no hash of a cache, so what was compiled with care before is found. What
    it compiled lies beside `folder`: in pytest's folder for all tests of a process.
    """
    script = folder / "hurried-g++"
    kept = folder.parent / "hurried"
    script.write_text(
        _SCRIPT.format(
            compiler=shutil.which("g++"),
            hurry=HURRY,
            kept=shlex.quote(str(kept)),
            more=shlex.join(hurry.flags()),
        )
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
