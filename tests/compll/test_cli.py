# SPDX-License-Identifier: Apache-2.0
"""The command line: what it writes, and one clear line for every mistake."""

import numpy as np
import pytest

from compll.cli import main
from tests.compll.support import SPECS

TERNGRAD = str(SPECS / "terngrad.pse")
LISTING = str(SPECS.parents[2] / "tests/compll/terngrad_listing.pse")


@pytest.fixture
def gradient(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(0).normal(size=1000).astype(np.float32))
    return str(path)


def test_gen_writes_both_sources(tmp_path):
    specs = [str(SPECS / f"{name}.pse") for name in ("onebit", "terngrad", "fp32")]
    assert main(["gen", *specs, "-o", str(tmp_path / "made")]) == 0
    made = sorted(path.name for path in (tmp_path / "made").iterdir())
    assert made == [f"{n}.{e}.cc" for n in ("fp32", "onebit", "terngrad") for e in ("codec", "tf")]


def test_check_names_the_functions(capsys):
    assert main(["check", TERNGRAD, LISTING]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "TernGradEncode, TernGradDecode" in lines[0]
    assert "TernGradEncode; spec hash" in lines[1]


def test_ir_and_includes(capsys):
    assert main(["ir", TERNGRAD]) == 0
    assert "sweep gradient.size" in capsys.readouterr().out
    assert main(["includes"]) == 0
    assert capsys.readouterr().out.strip() == str(SPECS.parents[2])


@pytest.mark.parametrize("backend", ["numpy", "cpp"])
def test_run_there_and_back(tmp_path, gradient, backend):
    packet, back = str(tmp_path / "p.npy"), str(tmp_path / "y.npy")
    common = ["--set", "bitwidth=4", "--backend", backend]
    run = ["run", TERNGRAD, "TernGradEncode", "--in", gradient, "--out", packet, "--seed", "7"]
    assert main([*run, *common]) == 0
    run = ["run", TERNGRAD, "TernGradDecode", "--in", packet, "--out", back, "--size", "1000"]
    assert main([*run, *common]) == 0
    x, y = np.load(gradient), np.load(back)
    assert np.load(packet).dtype == np.uint8
    assert np.abs(x - y).max() <= (x.max() - x.min()) / 15 * 1.0001


def test_backends_write_the_same_packet(tmp_path, gradient):
    made = {}
    for backend in ("numpy", "cpp"):
        out = tmp_path / f"{backend}.npy"
        run = ["run", LISTING, "TernGradEncode", "--in", gradient, "--out", str(out)]
        assert main([*run, "--set", "bitwidth=2", "--step", "3", "--backend", backend]) == 0
        made[backend] = out.read_bytes()
    assert made["numpy"] == made["cpp"]


def files(tmp_path):
    x = np.ones(100, np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "double.npy", x.astype(np.float64))
    np.save(tmp_path / "matrix.npy", x.reshape(10, 10))
    np.save(tmp_path / "object.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "archive.npz", x=x)
    (tmp_path / "junk.npy").write_bytes(b"junk")
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "bad.pse").write_text("void FooEncode(float* g, uint8* o) { o = concat(h); }")
    run = ["run", TERNGRAD, "TernGradEncode", "--in", str(tmp_path / "x.npy")]
    main([*run, "--out", str(tmp_path / "packet.npy")])
    packet = np.load(tmp_path / "packet.npy")
    np.save(tmp_path / "short.npy", packet[:-1])
    np.save(tmp_path / "long.npy", np.append(packet, packet))
    run = ["run", str(SPECS / "onebit.pse"), "OnebitEncode", "--in", str(tmp_path / "x.npy")]
    main([*run, "--out", str(tmp_path / "foreign.npy")])


ENCODE, DECODE = "TernGradEncode", "TernGradDecode"
MISTAKES = [
    ("missing input", ENCODE, "none.npy", [], "none.npy: No such file"),
    ("double", ENCODE, "double.npy", [], "float32 vector. Received: float64"),
    ("matrix", ENCODE, "matrix.npy", [], "Received: float32 of shape (10, 10)"),
    ("pickle", ENCODE, "object.npy", [], "must be a .npy file"),
    ("archive", ENCODE, "archive.npz", [], "must be a .npy file"),
    ("junk", ENCODE, "junk.npy", [], "must be a .npy file"),
    ("empty", ENCODE, "empty.npy", [], "must be a .npy file"),
    ("truncated", DECODE, "short.npy", ["--size", "100"], "must have 51 bytes. Received: 50"),
    ("too long", DECODE, "long.npy", ["--size", "100"], "must have 51 bytes. Received: 102"),
    ("another codec", DECODE, "foreign.npy", ["--size", "100"], "another codec"),
    (
        "other width",
        DECODE,
        "packet.npy",
        ["--size", "100", "--set", "bitwidth=3"],
        "other parameters",
    ),
    ("wrong size", DECODE, "packet.npy", ["--size", "99"], "must hold 99 elements. Received: 100"),
    ("no size", DECODE, "packet.npy", [], "`--size` must be"),
    ("negative size", DECODE, "packet.npy", ["--size", "-1"], "`--size` must be"),
    ("huge size", DECODE, "packet.npy", ["--size", "1000000000000000"], "`--size` must be"),
    ("size of an encode", ENCODE, "x.npy", ["--size", "3"], "for decoding only"),
    ("unknown parameter", ENCODE, "x.npy", ["--set", "width=3"], "Known: bitwidth"),
    ("out of range", ENCODE, "x.npy", ["--set", "bitwidth=9"], "in [1, 8]. Received: bitwidth=9"),
    ("not whole", ENCODE, "x.npy", ["--set", "bitwidth=1.5"], "must be an integer"),
    ("nan", ENCODE, "x.npy", ["--set", "bitwidth=nan"], "`bitwidth` must be"),
    ("infinite", ENCODE, "x.npy", ["--set", "bitwidth=inf"], "`bitwidth` must be"),
    ("no number", ENCODE, "x.npy", ["--set", "bitwidth"], "NAME=NUMBER"),
    ("no such function", "Encode", "x.npy", [], "TernGradEncode and TernGradDecode"),
]


@pytest.mark.parametrize("backend", ["numpy", "cpp"])
def test_mistakes_are_one_line_each(tmp_path, capsys, backend):
    files(tmp_path)
    for what, function, data, extra, expected in MISTAKES:
        run = [
            "run",
            TERNGRAD,
            function,
            "--in",
            str(tmp_path / data),
            "--out",
            str(tmp_path / "o"),
        ]
        assert main([*run, "--backend", backend, *extra]) == 1, what
        message = capsys.readouterr().err
        assert message.startswith("compll: error: "), what
        assert message.count("\n") == 1, message
        assert expected in message, what


def test_a_bad_specification_shows_the_program(tmp_path, capsys):
    files(tmp_path)
    bad = str(tmp_path / "bad.pse")
    for command in (["check", bad], ["gen", bad, "-o", str(tmp_path)], ["ir", bad]):
        assert main(command) == 1
        assert "error[E201]: unknown name `h`" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "none.pse")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["check", str(tmp_path)]) == 1
    assert "Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["run", TERNGRAD], ["gen"]])
def test_misspelt_commands_are_usage(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_no_compiler(monkeypatch, capsys, tmp_path, gradient):
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = [
        "run",
        TERNGRAD,
        ENCODE,
        "--in",
        gradient,
        "--out",
        str(tmp_path / "o"),
        "--backend",
        "cpp",
    ]
    assert main(run) == 1
    assert "a C++17 compiler is needed" in capsys.readouterr().err
