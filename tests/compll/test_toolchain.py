# SPDX-License-Identifier: Apache-2.0
"""The C++ compiler: its flags, what names it, and the cache of what it makes."""

import contextlib
import errno
import fcntl
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import compll
from compll.backends import cache, makefile, toolchain
from compll.backends.toolchain import BuildError
from tests.compll.support import SPECS
from tf_hips.errors import LibraryError
from tf_hips.ops import loaded, specifications
from tf_hips.ops.library import NATIVE_PATH

ROOT = SPECS.parents[2]
V3 = frozenset(["fpu", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"])
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def test_a_codec_is_compiled_alike_by_all_who_compile_one():
    built = (ROOT / "tf_hips/cc/defs.bzl").read_text()
    listed = re.search(r"^COPTS = \[(.*?)^\]", built, re.MULTILINE | re.DOTALL)
    flags = {flag for flag in re.findall(r'"(-[^"]+)"', listed[1]) if not flag.startswith("-W")}
    assert "-fno-math-errno" in flags
    assert set(toolchain.FLAGS) == {*flags, "-fPIC", "-shared"}
    generated = re.search(r"^FLAGS := (.*)\\\n(.*),,(.*)\)$", makefile.TEXT, re.MULTILINE)
    listed = {*generated[1].split(), *generated[3].split(), "-shared"}
    assert listed == set(toolchain.FLAGS)
    assert set(generated[3].split()) == toolchain.OF_GCC


def test_clang_is_not_told_what_it_does_not_know(tmp_path):
    for says, left_out in (("Debian clang version 14.0.6", toolchain.OF_GCC), ("g++ 12", set())):
        command = tmp_path / says.split()[0]
        command.write_text(f"#!/bin/sh\necho '{says}'\n")
        command.chmod(0o755)
        assert set(toolchain.FLAGS) - set(toolchain.flags((str(command),))) == left_out


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
    entry = cache.build("source", "foo")
    assert cache.build("source", "foo") == entry and len(made) == 1
    assert entry.parent.stat().st_mode & 0o777 == 0o700
    whole = entry.stat().st_size
    for times, size in enumerate((0, 9000, whole // 2, whole - 1), 2):
        os.truncate(entry, size)
        assert not toolchain.is_whole(entry)
        assert cache.build("source", "foo") == entry and len(made) == times
    assert entry.stat().st_size == whole


def test_a_cache_that_others_write_is_not_believed(made, monkeypatch):
    folder = cache.build("source", "foo").parent
    folder.chmod(0o777)
    with pytest.raises(BuildError, match=r"closed to others: set XDG_CACHE_HOME. .*mode 777"):
        cache.build("source", "foo")
    folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    if folder.stat().st_uid == 0:  # whom everybody believes
        os.chown(folder, 4321, -1)
    with pytest.raises(BuildError, match="must be ours"):
        cache.build("source", "foo")


def test_one_process_compiles_while_others_wait(made, monkeypatch):
    compile_codec = toolchain.compile_codec

    def while_it_is_ours(source, identity, output, command):
        with output.with_suffix(".lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        compile_codec(source, identity, output, command)

    monkeypatch.setattr(toolchain, "compile_codec", while_it_is_ours)
    cache.build("source", "foo")
    assert len(made) == 1


def test_who_has_waited_takes_what_another_process_has_made(made, monkeypatch):
    @contextlib.contextmanager
    def turn(file):
        file.with_suffix(".so").write_bytes(NATIVE_PATH.read_bytes())
        yield

    monkeypatch.setattr(cache, "_turn", turn)
    assert toolchain.is_whole(cache.build("source", "foo")) and not made


def test_a_full_disk_is_told(made, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(toolchain, "compile_codec", write)
    with pytest.raises(BuildError, match=r"can be written: set XDG_CACHE_HOME.*No space left"):
        cache.build("source", "foo")


def test_a_compiler_may_have_arguments(made, tmp_path, monkeypatch):
    plain = cache.build("source", "foo")
    compiler = toolchain.compiler()
    assert len(compiler) == 1
    monkeypatch.setenv("CXX", "env 'g++' -m64")
    assert toolchain.compiler()[1:] == ("g++", "-m64")
    assert cache.build("source", "foo") != plain
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
        "from compll.backends.cache import BUILT\n"
        "from compll.backends.toolchain import BuildError\n"
        "from tf_hips.errors import LibraryError\n"
        "from tf_hips.ops import specifications\n"
        "for folder in (lambda: BUILT.folder), specifications.cache_folder:\n"
        "    try:\n"
        "        folder()\n"
        "    except (BuildError, LibraryError) as error:\n"
        "        print(error)\n"
    )
    hidden = ("HOME", "XDG_CACHE_HOME", specifications.CACHE)
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
    assert f"set {specifications.CACHE} or XDG_CACHE_HOME" in ours


@pytest.fixture
def cross(tmp_path):
    """A compiler that says it makes code for another processor, and is not asked for any."""
    path = tmp_path / "other-g++"
    path.write_text('#!/bin/sh\n[ "$1" = -dumpmachine ] && echo riscv64-unknown-linux-gnu\n')
    path.chmod(0o755)
    return (str(path),)


def test_a_compiler_for_another_processor(cross, monkeypatch):
    """It is not given this one's flags, and what it makes is not for loading here."""
    assert toolchain.target(toolchain.compiler()) == platform.machine()
    toolchain.check_here(toolchain.compiler())
    assert toolchain.target(("/bin/true",)) == toolchain.target(("/none",)) == platform.machine()
    monkeypatch.delenv("TF_HIPS_CPU", raising=False)
    monkeypatch.setattr(toolchain, "_instructions", lambda: V4)
    odd = Path(cross[0]).with_name("odd-g++")
    for says, found in {
        "Using built-in specs.": platform.machine(),
        "x86_64": platform.machine(),
        "arm64-linux-gnu": "aarch64",
    }.items():
        odd.write_text(f"#!/bin/sh\necho '{says}'\n")
        odd.chmod(0o755)
        assert toolchain.target.__wrapped__((str(odd),)) == found
    assert toolchain.target(cross) == "riscv64"
    assert toolchain.machine_flags(cross) == ()
    with pytest.raises(BuildError, match=r"must compile for this processor.*Received: .*riscv64"):
        toolchain.check_here(cross)
    monkeypatch.setenv("CXX", *cross)
    source = specifications.read(ROOT / "tests/compll/momentum.pse", None)
    with pytest.raises(LibraryError, match="must compile for this processor"):
        specifications.library(source)


def test_a_library_for_another_processor_is_told(tmp_path):
    """The system's loader says that there is no such file."""
    file = tmp_path / "other.so"
    here = bytearray(Path(sys.executable).resolve().read_bytes())
    file.write_bytes(here)
    toolchain.check_whole(file)
    here[18:20] = (243).to_bytes(2, "little")
    file.write_bytes(here)
    with pytest.raises(OSError, match=f"for number 243.*this processor is {platform.machine()}"):
        toolchain.check_whole(file)
    assert toolchain.is_whole(file)
    with pytest.raises(LibraryError, match="it is for number 243 of ELF"):
        loaded.identity(file)


def test_unlike_processors_share_a_cache(monkeypatch):
    """Their compilers may have the same path, version and flags."""
    compiler = toolchain.compiler()
    keys = {cache.key(compiler, compiler), cache.key(compiler, compiler)}
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert len(keys | {cache.key(compiler, compiler)}) == 2


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.heavy  # compiles
def test_a_library_is_for_the_machine_at_hand(tmp_path, monkeypatch):
    """Machines that share a cache do not take each other's entries, and compile what they can."""
    monkeypatch.delenv("TF_HIPS_CPU", raising=False)
    text = """
        void RowEncode(float* g, uint8* out) {
            out = concat(map(g, [&](float x) -> uint8 { return x + 128; }));
        }
    """
    made = compll.generate(compll.compile_text(text, "row"))["row.codec.cc"]
    source = tmp_path / "row.codec.cc"
    source.write_text(made)
    entries, rows = {}, {}
    compiler = toolchain.compiler()

    def flags():
        return (*compiler, *toolchain.FLAGS, *toolchain.machine_flags(compiler))

    for name, found in {"v4": V4, "v3": V3, "less": V3 - {"fma"}}.items():
        monkeypatch.setattr(toolchain, "_instructions", lambda found=found: found)
        command = flags()
        entries[name] = cache.key(command, compiler)
        assert ("-DTF_HIPS_ONE_MACHINE" in command) == (name in ("v3", "v4"))
        assert ("-mavx512bw" in command) == (name == "v4")
        done = subprocess.run(
            [flag for flag in command if flag != "-shared"]
            + ["-O0", "-Wall", "-Werror", "-S", "-I", str(ROOT), str(source), "-o", "-"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr[:2000]
        rows[name] = set(re.findall(r"(avx2|avx512)\d+rows_of_", done.stdout))
    assert rows == {"v4": {"avx512"}, "v3": {"avx2"}, "less": {"avx2", "avx512"}}
    assert len(set(entries.values())) == 3

    monkeypatch.setattr(toolchain, "_instructions", lambda: V4)
    monkeypatch.setenv("TF_HIPS_CPU", "base")
    assert cache.key(flags(), compiler) == entries["less"]
