# SPDX-License-Identifier: Apache-2.0
"""The C++ compiler: its flags, what names it, and the cache of what it makes."""

import os
import re
import subprocess
import sys

import pytest

from compll.backends import makefile, toolchain
from compll.backends.toolchain import BuildError
from tests.compll.support import SPECS
from tf_hips.ops import jit
from tf_hips.ops.library import NATIVE_PATH

ROOT = SPECS.parents[2]


def test_a_codec_is_compiled_alike_by_all_who_compile_one():
    built = (ROOT / "tf_hips/cc/defs.bzl").read_text()
    listed = re.search(r"^COPTS = \[(.*?)^\]", built, re.MULTILINE | re.DOTALL)
    flags = {flag for flag in re.findall(r'"(-[^"]+)"', listed[1]) if not flag.startswith("-W")}
    assert "-fno-math-errno" in flags
    assert set(toolchain.FLAGS) == {*flags, "-fPIC", "-shared"}
    assert jit._FLAGS == toolchain.FLAGS
    generated = re.search(r"^FLAGS := (.*)$", makefile.TEXT, re.MULTILINE)
    assert {*generated[1].split(), "-shared"} == set(toolchain.FLAGS)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Commands that were run: each leaves a library that is a copy of one that is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    library = NATIVE_PATH.read_bytes()
    commands = []

    def compile_codec(source, identity, output, command):
        commands.append(command)
        output.write_bytes(library)

    monkeypatch.setattr(toolchain, "compile_codec", compile_codec)
    return commands


def test_what_was_cut_off_is_made_again(made):
    entry = toolchain.build("source", "foo")
    assert toolchain.build("source", "foo") == entry and len(made) == 1
    assert entry.parent.stat().st_mode & 0o777 == 0o700
    whole = entry.stat().st_size
    for times, size in enumerate((0, 9000, whole // 2, whole - 1), 2):
        os.truncate(entry, size)
        assert not toolchain.is_whole(entry)
        assert toolchain.build("source", "foo") == entry and len(made) == times
    assert entry.stat().st_size == whole


def test_a_cache_that_others_write_is_not_believed(made, monkeypatch):
    folder = toolchain.build("source", "foo").parent
    folder.chmod(0o777)
    with pytest.raises(BuildError, match=r"closed to others: set XDG_CACHE_HOME. .*mode 777"):
        toolchain.build("source", "foo")
    folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    if folder.stat().st_uid == 0:  # whom everybody believes
        os.chown(folder, 4321, -1)
    with pytest.raises(BuildError, match="must be ours"):
        toolchain.build("source", "foo")


def test_a_compiler_may_have_arguments(made, tmp_path, monkeypatch):
    plain = toolchain.build("source", "foo")
    compiler = toolchain.compiler()
    assert len(compiler) == 1
    monkeypatch.setenv("CXX", "env 'g++' -m64")
    assert toolchain.compiler()[1:] == ("g++", "-m64")
    assert toolchain.build("source", "foo") != plain
    assert made[-1][1:4] == ("g++", "-m64", "-O3")
    monkeypatch.setenv("CXX", " ")
    assert toolchain.compiler() == compiler
    for wrong, told in (("'g++", "must be a command"), ("no-such -m64", "Received: no no-such")):
        monkeypatch.setenv("CXX", wrong)
        with pytest.raises(BuildError, match=told):
            toolchain.compiler()


def test_without_a_home_the_cache_must_be_named(tmp_path):
    """A user without HOME and without an entry in the list of users, as in a container."""
    program = (
        "import pathlib, sys\n"
        "def nobody(): raise RuntimeError('Could not determine home directory.')\n"
        "pathlib.Path.home = nobody\n"
        "pathlib.Path.expanduser = lambda self: nobody()\n"
        "from compll.backends.toolchain import BuildError, cache_folder\n"
        "from tf_hips.errors import LibraryError\n"
        "from tf_hips.ops import jit\n"
        "for folder in cache_folder, jit.cache_folder:\n"
        "    try:\n"
        "        folder()\n"
        "    except (BuildError, LibraryError) as error:\n"
        "        print(error)\n"
    )
    hidden = ("HOME", "XDG_CACHE_HOME", jit.CACHE)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={name: value for name, value in os.environ.items() if name not in hidden},
        capture_output=True,
        text=True,
        timeout=50,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    theirs, ours = done.stdout.splitlines()
    assert "set XDG_CACHE_HOME" in theirs
    assert f"set {jit.CACHE} or XDG_CACHE_HOME" in ours
