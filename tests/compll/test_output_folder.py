# SPDX-License-Identifier: Apache-2.0
"""`compll gen` beside what already lies in the folder: files of others, and codecs like its own."""

import os
import subprocess

import pytest

from compll.cli import main
from tests.compll.support import SPECS

FP32 = SPECS / "fp32.pse"
# The back end for GPUs refuses it.
REFUSED = SPECS.parents[2] / "tests/compll/errors/E701_many_reductions.pse"
ENDINGS = (".codec.cc", ".tf.cc", ".cu", ".mk", "_reference.py")


def gen(folder, *specs, more=()):
    return main(["gen", *map(str, specs), "-o", str(folder), *more])


@pytest.mark.parametrize("name", ["Makefile", *(f"fp32{ending}" for ending in ENDINGS)])
def test_a_file_of_another_is_not_overwritten(tmp_path, capsys, name):
    theirs = tmp_path / name
    theirs.write_text("all:\n\techo mine\n")
    assert gen(tmp_path, FP32) == 1
    assert f"{theirs} must be made by compll" in capsys.readouterr().err
    assert theirs.read_text() == "all:\n\techo mine\n"
    assert [*tmp_path.iterdir()] == [theirs]
    theirs.unlink()
    for _ in range(2):  # its own files it does overwrite
        assert gen(tmp_path, FP32) == 0


def test_kernels_of_another_are_not_removed(tmp_path, capsys):
    theirs = tmp_path / f"{REFUSED.stem}.cu"
    theirs.write_text("// mine\n")
    assert gen(tmp_path, REFUSED) == 1
    assert f"{theirs} must be made by compll" in capsys.readouterr().err
    assert theirs.read_text() == "// mine\n"


def test_a_library_of_another_is_not_overwritten(tmp_path, capsys):
    theirs = tmp_path / "fp32.so"
    theirs.write_bytes(b"mine")
    assert gen(tmp_path, FP32, more=["--target", "cpp", "--build"]) == 1
    assert "fp32.so must be made by compll" in capsys.readouterr().err
    assert theirs.read_bytes() == b"mine"


def test_parts_of_an_older_specification_do_not_stay(tmp_path, capsys):
    spec, folder = tmp_path / "x.pse", tmp_path / "out"
    spec.write_text(FP32.read_text())
    assert gen(folder, spec) == 0
    identity = (folder / "x.mk").read_text().split()[-1]
    (folder / "x.so").write_text(f"tf_hips_codec_id {identity}")
    (folder / "x_ops.so").write_bytes(b"... Compll>Fp32Encode ...")
    (folder / "x_cuda.so").write_bytes(b"of another origin")
    assert gen(folder, SPECS / "onebit.pse") == 0  # another codec, which stays
    all_parts = sorted(folder.iterdir())
    assert gen(folder, spec, more=["--target", "numpy"]) == 0  # of the same specification
    assert sorted(folder.iterdir()) == all_parts and capsys.readouterr().err == ""
    spec.write_text(f"// Changed.\n{FP32.read_text()}")
    assert gen(folder, spec, more=["--target", "cpp"]) == 0
    gone = ["x.tf.cc", "x_reference.py", "x.cu", "x.so", "x_ops.so"]
    told = f"compll: removed what was made of another specification: {', '.join(gone)}\n"
    assert capsys.readouterr().err == told
    assert sorted(folder.iterdir()) == [path for path in all_parts if path.name not in gone]


@pytest.mark.parametrize("left", ["numpy", "cuda"])
def test_each_part_of_an_older_specification_is_seen(tmp_path, capsys, left):
    spec, folder = tmp_path / "x.pse", tmp_path / "out"
    spec.write_text((SPECS / "onebit.pse").read_text())
    assert gen(folder, spec, more=["--target", left]) == 0
    spec.write_text(FP32.read_text())
    assert gen(folder, spec, more=["--target", "cpp"]) == 0
    assert "removed what was made of another" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["Makefile", "x.codec.cc", "x.mk"]


@pytest.mark.parametrize("name", ["x.cu", "x_reference.py", "x.codec.cc"])
def test_parts_that_were_changed_by_hand_stay(tmp_path, capsys, name):
    spec, folder = tmp_path / "x.pse", tmp_path / "out"
    spec.write_text(FP32.read_text())
    assert gen(folder, spec) == 0
    all_parts = sorted(folder.iterdir())
    with (folder / name).open("a") as file:
        file.write("\n")
    assert gen(folder, spec, more=["--target", "cpp"]) == 0
    assert sorted(folder.iterdir()) == all_parts and capsys.readouterr().err == ""


def test_a_library_of_an_older_specification_does_not_stay(tmp_path, capsys):
    spec, folder = tmp_path / "x.pse", tmp_path / "out"
    spec.write_text(FP32.read_text())
    assert gen(folder, spec) == 0
    (folder / "x.so").write_text("tf_hips_codec_id x@0123456789abcdef")
    assert gen(folder, spec, more=["--target", "cpp"]) == 0
    assert "x.so" in capsys.readouterr().err and not (folder / "x.so").exists()


def test_a_library_that_is_built_again_is_not_told_as_removed(tmp_path, capsys, monkeypatch):
    def compile_codec(source, identity, output):
        output.write_text(f"tf_hips_codec_id {identity}")

    monkeypatch.setattr("compll.backends.toolchain.compile_codec", compile_codec)
    spec, folder = tmp_path / "x.pse", tmp_path / "out"
    for text in (FP32.read_text(), f"// Changed.\n{FP32.read_text()}"):
        spec.write_text(text)
        assert gen(folder, spec, more=["--target", "cpp", "--build"]) == 0
        assert (folder / "x.so").is_file() and capsys.readouterr().err == ""


def test_codecs_with_the_same_operations_do_not_lie_in_one_folder(tmp_path, capsys):
    other = tmp_path / "other.pse"
    other.write_text(f"// The same X.\n{FP32.read_text()}")
    folder = tmp_path / "out"
    assert gen(folder, FP32) == 0
    before = sorted(folder.iterdir())
    assert gen(folder, other) == 1
    assert "other.tf.cc and " in (told := capsys.readouterr().err)
    assert "fp32.tf.cc would both register operations such as Fp32Decode" in told
    assert sorted(folder.iterdir()) == before
    assert gen(folder, other, more=["--target", "cpp"]) == 0  # without operations they may
    assert gen(folder, FP32) == 0
    text = (folder / "fp32.tf.cc").read_text()
    assert "TfHips>" not in text  # that of the built-in codec


@pytest.mark.parametrize("end", ["ops", "cuda"])
def test_two_libraries_of_one_name_are_refused(tmp_path, capsys, end):
    other = tmp_path / f"fp32_{end}.pse"
    other.write_text((SPECS / "onebit.pse").read_text())
    folder = tmp_path / "out"
    told = f"fp32 and fp32_{end} would both be built to fp32_{end}.so"
    assert gen(folder, FP32, other) == 1
    assert told in capsys.readouterr().err and not folder.exists()
    assert gen(folder, other) == 0  # whichever is there first
    assert gen(folder, FP32) == 1
    assert told in capsys.readouterr().err
    assert gen(folder, FP32, other, more=["--target", "numpy"]) == 0


def test_make_says_that_it_does_not_find_the_headers(tmp_path):
    assert gen(tmp_path, FP32, more=["--target", "cpp"]) == 0
    command = ["make", "-C", str(tmp_path), "-n", "PYTHON=false"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode != 0 and "set PYTHON" in done.stderr


@pytest.mark.heavy  # compiles
def test_make_builds_again_for_other_headers(tmp_path):
    ours = tmp_path / "another version"  # with a space
    header = ours / "tf_hips/cc/runtime/codec.h"
    header.parent.mkdir(parents=True)
    header.touch()
    folder = tmp_path / "out"
    assert gen(folder, FP32, more=["--target", "cpp"]) == 0
    library = folder / "fp32.so"

    def planned(ours):
        command = ["make", "-C", str(folder), "-n", f"OURS={ours}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
        return done.stdout

    assert f"'-I{ours}' -o fp32.so fp32.codec.cc" in planned(ours)
    ours = ours.rename(tmp_path / "another_version")
    library.touch()
    assert "fp32.so" not in planned(ours)
    os.utime(ours / "tf_hips/cc/runtime/codec.h", (2e9, 2e9))
    assert "-o fp32.so" in planned(ours)
