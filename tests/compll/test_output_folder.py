# SPDX-License-Identifier: Apache-2.0
"""`compll gen` beside what already lies in the folder: files of others, and codecs like its own."""

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
