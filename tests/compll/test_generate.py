# SPDX-License-Identifier: Apache-2.0
"""`compll gen`: what each target writes, a Makefile that works elsewhere, a library that loads."""

import ctypes
import importlib.util
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import compll
from compll.backends import toolchain
from compll.backends.library import CompiledCodec
from compll.cli import main
from tests.compll import hurry
from tests.compll.support import SPECS, gradients
from tests.support import hurried

ROOT = SPECS.parents[2]
TERNGRAD, FP32 = SPECS / "terngrad.pse", SPECS / "fp32.pse"
NAMES = ("fp32", "onebit", "terngrad")


def made(folder, *targets):
    """Names of the files that a command leaves for three specifications."""
    specs = [str(SPECS / f"{name}.pse") for name in NAMES]
    options = ["--target", ",".join(targets)] if targets else []
    assert main(["gen", *specs, "-o", str(folder), *options]) == 0
    return sorted(path.name for path in folder.iterdir())


def test_each_target_writes_its_files(tmp_path):
    sources = [f"{name}.codec.cc" for name in NAMES]
    operations = [f"{name}.tf.cc" for name in NAMES]
    modules = [f"{name}_reference.py" for name in NAMES]
    kernels = [f"{name}.cu" for name in NAMES]
    fragments = [f"{name}.mk" for name in NAMES]
    everything = ["Makefile", *sources, *fragments, *operations, *modules, *kernels]
    assert made(tmp_path / "all") == sorted(everything)
    assert made(tmp_path / "cuda", "cuda") == sorted(["Makefile", *kernels])
    assert made(tmp_path / "cpp", "cpp") == sorted(["Makefile", *sources, *fragments])
    assert made(tmp_path / "numpy", "numpy") == modules


def test_targets_may_come_one_by_one(tmp_path):
    given = ["--target", "numpy", "--target", "tensorflow", "--target", "cpp,numpy"]
    assert main(["gen", str(TERNGRAD), "-o", str(tmp_path), *given]) == 0
    made = sorted(path.name for path in tmp_path.iterdir() if path.stem != "Makefile")
    ends = (".codec.cc", ".mk", ".tf.cc", "_reference.py")
    assert made == [f"terngrad{end}" for end in ends]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("rust", "must be of numpy, cpp, cuda, tensorflow. Received: 'rust'"),
        ("", "must be of numpy"),
        ("tensorflow", "tensorflow needs cpp beside it"),
    ],
)
def test_targets_that_are_refused(tmp_path, capsys, target, message):
    with pytest.raises(SystemExit) as stopped:
        main(["gen", str(TERNGRAD), "-o", str(tmp_path / "out"), "--target", target])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_numpy_module_is_the_reference(tmp_path):
    made(tmp_path, "numpy")
    for name, params in (("terngrad", {"bitwidth": 4}), ("onebit", {})):
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}_reference.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        theirs = compll.Reference(compll.compile_spec(SPECS / f"{name}.pse"), **params)
        x = gradients(1023)["plain"]
        packet = module.codec(**params).encode(x, seed=5)
        assert packet.tobytes() == theirs.encode(x, seed=5).tobytes()


def test_parameters_without_a_default_and_with_odd_names(tmp_path):
    file = tmp_path / "odd.pse"
    file.write_text(
        "// \\ ' \" %s {x}\n"
        "void OddEncode(float* gradient, uint8* out, int compll, float codec) {\n"
        "    float sized = compll * codec;\n    out = concat(sized, gradient);\n}\n"
    )
    assert main(["gen", str(file), "-o", str(tmp_path), "--target", "numpy"]) == 0
    values: dict = {}
    exec((tmp_path / "odd_reference.py").read_text(), values)
    packet = values["codec"](codec=0.5, compll=4).encode(np.ones(1, np.float32))
    assert packet[16:20].view(np.float32) == 2.0
    with pytest.raises(TypeError, match="compll"):
        values["codec"](codec=0.5)


def planned(folder, *goals):
    """What make would build: nothing runs."""
    command = ["make", "-C", str(folder), "-n", f"PYTHON={sys.executable}", *goals]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"-o (\S+)", done.stdout)


@pytest.mark.heavy
def test_a_second_call_keeps_what_the_first_one_made(tmp_path):
    for name, target in (("terngrad", "cpp,tensorflow"), ("onebit", "cpp"), ("fp32", "cuda")):
        spec = str(SPECS / f"{name}.pse")
        assert main(["gen", spec, "-o", str(tmp_path), "--target", target]) == 0
    assert sorted(planned(tmp_path)) == ["onebit.so", "terngrad.so"]
    assert planned(tmp_path, "cuda") == ["fp32_cuda.so"]
    alone = tmp_path / "alone"
    assert main(["gen", str(TERNGRAD), "-o", str(alone), "--target", "cuda"]) == 0
    assert planned(alone) == ["terngrad_cuda.so"]


def test_the_glue_of_operations_is_compiled_once(tmp_path):
    made(tmp_path, "cpp", "tensorflow")
    built = planned(tmp_path, "tensorflow", "TENSORFLOW=-Iflags")  # TensorFlow is not asked
    assert len(set(built)) == len(built)
    assert set(built) >= {"objects/tf/codec_kernels.o", *(f"{name}_ops.so" for name in NAMES)}


ODD = """
param Odd { float self in [0, 9] = 0.5; float program = 2; int library = 1; float PROGRAM = 4; }
void OddEncode(float* g, uint8* o, float self, float program, int library, float PROGRAM) {
    float product = self * program * library * PROGRAM;
    o = concat(map(g, [&](float x) -> float { return x * product; }));
}
void OddDecode(uint8* o, float* g, float self, float program, int library, float PROGRAM) {
    extract(o, g);
}
"""


@pytest.mark.parametrize("backend", ["numpy", pytest.param("cpp", marks=pytest.mark.heavy)])
def test_parameters_named_as_our_own_arguments(tmp_path, backend, monkeypatch):
    hurry.the_command_line(monkeypatch)
    file, x = tmp_path / "odd.pse", np.arange(1, 4, dtype=np.float32)
    file.write_text(ODD)
    np.save(tmp_path / "x.npy", x)
    assert main(["check", str(file)]) == 0
    assert main(["gen", str(file), "-o", str(tmp_path), "--target", "numpy"]) == 0
    values: dict = {}
    exec((tmp_path / "odd_reference.py").read_text(), values)
    packet = values["codec"](self=3, program=1, library=2, PROGRAM=1).encode(x)
    np.testing.assert_array_equal(packet[16:].view(np.float32), x * 6)
    out = str(tmp_path / "p.npy")
    run = ["run", str(file), "OddEncode", "--in", str(tmp_path / "x.npy"), "--out", out]
    assert main([*run, "--set", "self=3", "--set", "library=5", "--backend", backend]) == 0
    np.testing.assert_array_equal(np.load(out)[16:].view(np.float32), x * 120)


@pytest.mark.heavy
def test_the_makefile_builds_elsewhere_what_build_leaves(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CXX", str(hurried.compiler(tmp_path)))
    monkeypatch.setenv(hurried.HURRY, "1")
    made, elsewhere = tmp_path / "made", tmp_path / "elsewhere"
    assert main(["gen", str(FP32), "-o", str(made), "--build", "--target", "cpp"]) == 0
    assert capsys.readouterr().out.strip() == str(made / "fp32.so")
    (made / "fp32.so").rename(tmp_path / "fp32.so")
    made.rename(elsewhere)
    done = subprocess.run(
        ["make", "-C", str(elsewhere), f"PYTHON={sys.executable}"],
        # Not in a hurry, or the compiler would give the library that it has made before.
        env={**os.environ, "PYTHONPATH": str(ROOT), hurried.HURRY: ""},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    program = compll.compile_spec(FP32)
    x = gradients(1023)["plain"]
    expected = compll.Reference(program).encode(x, seed=2).tobytes()
    ids = set()
    for library in (tmp_path / "fp32.so", elsewhere / "fp32.so"):
        assert CompiledCodec(program, library).encode(x, seed=2).tobytes() == expected
        told = ctypes.c_char.in_dll(ctypes.CDLL(str(library)), "tf_hips_codec_id")
        ids.add(ctypes.string_at(ctypes.addressof(told)))
    assert len(ids) == 1 and ids.pop().startswith(b"fp32@")


UNREAD = """
void UnreadEncode(float* gradient, uint8* out) {
    uint8* c = map(range(gradient.size), [&](int i) -> uint8 { return i; });
    out = concat(c);
}

void UnreadDecode(uint8* packet, float* gradient) {
    uint8* c;
    extract(packet, c);
    gradient = map(range(gradient.size), [&](int i) -> float { return i; });
}
"""


@pytest.mark.heavy
def test_a_gradient_that_nothing_reads_is_no_warning(tmp_path):
    source = compll.generate(compll.compile_text(UNREAD, "unread"))["unread.codec.cc"]
    file = tmp_path / "unread.codec.cc"
    file.write_text(source)
    flags = ("-Wall", "-Wextra", "-fsyntax-only", "-DTF_HIPS_NO_CLONES", "-I", str(ROOT))
    command = (*toolchain.compiler(), *toolchain.FLAGS, *flags, str(file))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.tf
@pytest.mark.timeout(400)
def test_the_makefile_builds_tensorflow_operations(tmp_path):
    file = tmp_path / "elsewhere.pse"
    file.write_text(f"// Another one.\n{TERNGRAD.read_text()}")  # has the X of a built-in codec
    assert main(["gen", str(file), "-o", str(tmp_path)]) == 0
    done = subprocess.run(
        ["make", "-C", str(tmp_path), "tensorflow", f"PYTHON={sys.executable}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert main(["gen", str(SPECS / "fp32.pse"), "-o", str(tmp_path)]) == 0
    assert planned(tmp_path, "tensorflow", "TENSORFLOW=-Iflags") == ["fp32_ops.so"]
    program = (
        "import sys, tensorflow as tf\n"
        "from tf_hips.ops import library\n"
        "ours = library.ops(tf)\n"
        "ops = tf.load_op_library(sys.argv[1])\n"
        "x = tf.range(9, dtype=tf.float32)\n"
        "packet = ops.compll_tern_grad_encode(gradient=x, seed=2, step=0)\n"
        "assert ours.tf_hips_tern_grad_encode(gradient=x, seed=2, step=0).shape == packet.shape\n"
        "print(packet.numpy().tobytes().hex())\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "elsewhere_ops.so")],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    reference = compll.Reference(compll.compile_spec(file))
    packet = reference.encode(np.arange(9, dtype=np.float32), seed=2)
    assert shown.stdout.split()[-1] == packet.tobytes().hex()


def test_defaults_of_attributes_are_of_their_kind():
    text = """
param Wide { int k = 9007199254740992; int m = -9007199254740992; float f = 9007199254740992; }
void WideEncode(float* gradient, uint8* out, int k, int m, float f) {
    float s = k * f + m;
    out = concat(s, gradient);
}
"""
    made = compll.generate(compll.compile_text(text, "wide"))["wide.tf.cc"]
    assert 'int >= -9007199254740992 = 9007199254740992"' in made
    assert 'int >= -9007199254740992 = -9007199254740992"' in made
    assert '.Attr("f: float = 9007199254740992.0")' in made
