# SPDX-License-Identifier: Apache-2.0
"""The command line: what it writes, and one clear line for every mistake."""

import contextlib
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import compll
from compll import commands
from compll.backends.cache import build
from compll.cli import main
from tests.compll import hurry
from tests.compll.support import SPECS

TERNGRAD = str(SPECS / "terngrad.pse")
MOMENTUM = str(SPECS.parents[2] / "tests/compll/momentum.pse")
LISTING = str(SPECS.parents[2] / "tests/compll/terngrad_listing.pse")


# The compiler's runs take seconds where the cache is empty: not in `make check`.
BACKENDS = pytest.mark.parametrize(
    "backend", ["numpy", pytest.param("cpp", marks=pytest.mark.heavy)]
)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch):
    hurry.the_command_line(monkeypatch)


@pytest.fixture
def gradient(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(0).normal(size=1000).astype(np.float32))
    return str(path)


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


@BACKENDS
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


@BACKENDS
def test_run_with_error_feedback(tmp_path, gradient, backend):
    """Over rounds all is sent: the sum of what was decoded lacks the last residual alone."""
    packet, back, rest = (str(tmp_path / name) for name in ("p.npy", "y.npy", "r.npy"))
    common = ["--set", "bitwidth=2", "--backend", backend]
    run = ["run", TERNGRAD, "TernGradEncode", "--in", gradient, "--out", packet]
    decode = ["run", TERNGRAD, "TernGradDecode", "--in", packet, "--out", back, "--size", "1000"]
    x, total = np.load(gradient), np.zeros(1000)
    for step in range(3):
        wanted = x + np.load(rest) if step else x
        more = ["--step", str(step), *(["--residual", rest] if step else [])]
        assert main([*run, *common, "--new-residual", rest, *more]) == 0
        assert main([*decode, *common]) == 0
        np.testing.assert_array_equal(np.load(rest), wanted - np.load(back))
        total += np.load(back)
    np.testing.assert_allclose(total + np.load(rest), 3 * x, atol=1e-5)
    assert main([*run, *common, "--residual", packet]) == 1  # of bytes
    np.save(gradient, np.array([np.nan, 1], np.float32))
    assert main([*run, *common, "--residual", rest]) == 1  # of 1000 elements
    assert main([*run, *common, "--new-residual", rest]) == 0
    assert np.isfinite(np.load(rest)).all()


def test_run_between_pipes(tmp_path, gradient):
    (given, to_give), (result, to_result) = os.pipe(), os.pipe()
    with os.fdopen(given, "rb"), os.fdopen(result, "rb") as found, os.fdopen(to_result, "wb"):
        with os.fdopen(to_give, "wb") as file:
            file.write(Path(gradient).read_bytes())
        run = ["run", TERNGRAD, "TernGradEncode", "--in"]
        assert main([*run, f"/dev/fd/{given}", "--out", f"/dev/fd/{to_result}"]) == 0
        assert main([*run, gradient, "--out", str(tmp_path / "p.npy")]) == 0
        expected = (tmp_path / "p.npy").read_bytes()
        assert found.read1(len(expected) + 1) == expected


@pytest.mark.parametrize("unwritable", ["p.npy", "r.npy"])
def test_a_residual_goes_on_only_with_its_packet(tmp_path, gradient, capsys, unwritable):
    files = {name: tmp_path / name for name in ("p.npy", "r.npy")}
    run = ["run", TERNGRAD, "TernGradEncode", "--in", gradient]
    kept = ["--out", str(files["p.npy"]), "--new-residual", str(files["r.npy"])]
    assert main([*run, *kept]) == 0
    before = {name: file.read_bytes() for name, file in files.items()}
    rest = str(files["r.npy"])
    files[unwritable] = tmp_path / "no" / "folder"
    kept = ["--out", str(files["p.npy"]), "--new-residual", str(files["r.npy"])]
    assert main([*run, *kept, "--residual", rest, "--seed", "3"]) == 1
    assert f"{files[unwritable]}: No such file" in capsys.readouterr().err
    there = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: there[name] for name in before} == before
    assert set(there) == {*before, "x.npy"}  # nothing lies beside them
    link = tmp_path / "link.npy"
    link.symlink_to("p.npy")
    assert main([*run, "--out", str(link), "--seed", "3"]) == 0
    assert link.is_symlink() and (tmp_path / "p.npy").read_bytes() != before["p.npy"]
    assert main([*run, "--out", "/dev/null"]) == 0


@pytest.mark.parametrize(
    ("spec", "function", "option"),
    [(TERNGRAD, "TernGradEncode", "--new-residual"), (MOMENTUM, "MomentumEncode", "--new-state")],
)
def test_two_outputs_are_two_files(tmp_path, gradient, capsys, spec, function, option):
    run = ["run", spec, function, "--in", gradient]
    packet, link = str(tmp_path / "p.npy"), tmp_path / "link.npy"
    link.symlink_to("p.npy")
    for again in (packet, f"{tmp_path}/./p.npy", str(link)):
        assert main([*run, "--out", packet, option, again]) == 1
        told = f"`--out` and `{option}` must be two files. Received: {again}"
        assert told in capsys.readouterr().err
        assert not Path(packet).exists()
    nowhere = tmp_path / "nowhere"
    nowhere.symlink_to("/dev/null")
    for name in ("/dev/null", str(nowhere)):
        assert main([*run, "--out", name, option, name]) == 0


@pytest.mark.parametrize(
    ("spec", "function", "lacks"),
    [(LISTING, "TernGradEncode", "a Decode"), (MOMENTUM, "MomentumEncode", "no `state` block")],
)
def test_who_has_no_error_feedback(tmp_path, gradient, capsys, spec, function, lacks):
    run = ["run", spec, function, "--in", gradient, "--out", str(tmp_path / "p")]
    set_ = ["--set", "bitwidth=2"] if spec == LISTING else []
    assert main([*run, *set_, "--new-residual", str(tmp_path / "r")]) == 1
    assert f"must have {lacks} for `--residual`" in capsys.readouterr().err
    assert not list(tmp_path.glob("[pr]"))


@pytest.mark.heavy
def test_backends_write_the_same_packet(tmp_path, gradient, monkeypatch):
    monkeypatch.setattr(commands, "build", build)  # as it is for users
    made = {}
    for backend in ("numpy", "cpp"):
        out = tmp_path / f"{backend}.npy"
        run = ["run", LISTING, "TernGradEncode", "--in", gradient, "--out", str(out)]
        assert main([*run, "--set", "bitwidth=2", "--step", "3", "--backend", backend]) == 0
        made[backend] = out.read_bytes()
    assert made["numpy"] == made["cpp"]


def npy(header: str, data: bytes = b"") -> bytes:
    """A .npy file with any header."""
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


HEADER = "{{'descr': '{}', 'fortran_order': False, 'shape': {}}}"


def files(tmp_path):
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04" + b"x" * 60)
    (tmp_path / "text.npy").write_text("1.0 2.0 3.0\n")
    (tmp_path / "broken.npy").write_bytes(npy("{'descr': ("))
    (tmp_path / "string.npy").write_bytes(npy("{'descr': '"))
    (tmp_path / "long.npy").write_bytes(npy(HEADER.format("<f4", f"({10**30},)")))
    (tmp_path / "huge.npy").write_bytes(npy(HEADER.format("<f4", f"({10**15},)")))
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
    np.save(tmp_path / "twice.npy", np.append(packet, packet))
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
    ("zip", ENCODE, "zip.npy", [], "must be a .npy file"),
    ("text", ENCODE, "text.npy", [], "must be a .npy file"),
    ("broken header", ENCODE, "broken.npy", [], "must be a .npy file"),
    ("open string", ENCODE, "string.npy", [], "must be a .npy file"),
    ("shape beyond 64 bits", ENCODE, "long.npy", [], "must be a .npy file"),
    ("shape beyond memory", ENCODE, "huge.npy", [], "must be a .npy file"),
    ("much to decode", DECODE, "packet.npy", ["--size", "1000000000000"], "must hold 1048576"),
    ("seed", DECODE, "packet.npy", ["--size", "100", "--seed", "0"], "`--seed` is for encoding"),
    ("offset", DECODE, "packet.npy", ["--size", "9", "--offset", "1"], "`--offset` is for enc"),
    (
        "twice set",
        ENCODE,
        "x.npy",
        ["--set", "bitwidth=2", "--set", "bitwidth=3"],
        "must give bitwidth once",
    ),
    ("too long", DECODE, "twice.npy", ["--size", "100"], "must have 51 bytes. Received: 102"),
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
    ("to decode", DECODE, "packet.npy", ["--new-residual", "r.npy"], "are for encoding only"),
    ("other residual", ENCODE, "x.npy", ["--residual", "none.npy"], "none.npy: No such file"),
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


@BACKENDS
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
        assert "ickle" not in message or what == "pickle", message


@BACKENDS
def test_a_bad_block_or_width_is_named(tmp_path, capsys, gradient, backend):
    spec = tmp_path / "scaled.pse"
    spec.write_text(
        "void ScaledEncode(float* g, uint8* o, int block, int bits) {\n"
        "    uint<bits>* codes = map(g, [&](float x) -> uint<bits> { return x; });\n"
        "    o = concat(block_reduce(g, block, 0, max), codes);\n}\n"
    )
    run = ["run", str(spec), "ScaledEncode", "--in", gradient, "--out", str(tmp_path / "o")]
    for block, bits, expected in (
        (100, 4, "a block must have 16, 32, 64, 128, 256, 512, 1024 elements. Received: 100"),
        (128, 20, "the width `uint<bits>` must be from 1 to 16. Received: 20"),
    ):
        values = ["--set", f"block={block}", "--set", f"bits={bits}"]
        assert main([*run, *values, "--backend", backend]) == 1
        assert capsys.readouterr().err == f"compll: error: {expected}\n"


@BACKENDS
def test_too_much_memory_is_one_line(tmp_path, capsys, gradient, backend):
    spec = tmp_path / "huge.pse"
    spec.write_text(
        "void HugeEncode(float* g, uint8* o) { uint8* v = "
        "map(range(1 << 40), [&](int i) -> uint8 { return i; }); o = concat(v); }"
    )
    run = ["run", str(spec), "HugeEncode", "--in", gradient, "--out", str(tmp_path / "o")]
    assert main([*run, "--backend", backend]) == 1
    message = capsys.readouterr().err
    assert message.startswith("compll: error: not enough memory")
    assert message.count("\n") == 1


def test_gen_does_not_write_two_codecs_to_one_place(tmp_path, capsys):
    text = "void {}Encode(float* g, uint8* o) {{ o = concat(g); }}"
    for path, prefix in (("a/x.pse", "Foo"), ("b/x.pse", "Bar"), ("b/y.pse", "Foo")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text.format(prefix))
    made = tmp_path / "made"
    for pair, what in (
        (("a/x.pse", "b/x.pse"), "both be written to x.codec.cc"),
        (("a/x.pse", "b/y.pse"), "both register operations of Foo"),
        (("a/x.pse", "a/x.pse"), "both be written to x.codec.cc"),
    ):
        assert main(["gen", *(str(tmp_path / path) for path in pair), "-o", str(made)]) == 1
        assert what in capsys.readouterr().err
    assert not made.exists()


def test_the_whole_key_can_be_given(tmp_path, gradient):
    out = tmp_path / "p.npy"
    run = ["run", TERNGRAD, ENCODE, "--in", gradient, "--out", str(out)]
    assert main([*run, "--seed", "1", "--step", "2", "--tensor-id", "3", "--offset", "4"]) == 0
    expected = compll.Reference(compll.compile_spec(TERNGRAD)).encode(np.load(gradient), 1, 2, 3, 4)
    np.testing.assert_array_equal(np.load(out), expected)


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


def test_all_bad_specifications_are_told(tmp_path, capsys):
    text = "void {0}Encode(float* g, uint8* o) {{ o = concat({0}); }}"
    wrong = [tmp_path / "one.pse", tmp_path / "two.pse"]
    for path, name in zip(wrong, ("One", "Two"), strict=True):
        path.write_text(text.format(name))
    given = [str(wrong[0]), TERNGRAD, str(wrong[1])]
    for command in (["check", *given], ["gen", *given, "-o", str(tmp_path / "made")]):
        assert main(command) == 1
        told = capsys.readouterr().err
        assert "unknown name `One`" in told and "unknown name `Two`" in told
    assert not (tmp_path / "made").exists()


def test_of_very_many_mistakes_the_first_are_shown(tmp_path, capsys):
    path = tmp_path / "broken.pse"
    for count, told in ((30, 20), (21, 20), (20, 20)):
        lines = "".join(f"    float x{i} = nope{i};\n" for i in range(count))
        path.write_text(f"void BEncode(float* g, uint8* o) {{\n{lines}    o = concat(x0);\n}}\n")
        assert main(["check", str(path)]) == 1
        said = capsys.readouterr().err
        assert said.count("error[E201]") == told
        more = {30: "and 10 more errors", 21: "and 1 more error"}.get(count)
        assert said.endswith(f"\n\n{more} in {path}\n" if more else "`float nope19 = ...;`\n")


@pytest.mark.parametrize(
    ("arguments", "near"),
    [(["chek", TERNGRAD], "check"), (["ir", TERNGRAD, "--after", "fus"], "fuse"), (["xyzzy"], "")],
)
def test_a_misspelt_word_is_told_what_is_near(arguments, near, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.partition("; did you mean ")[2] == (f"{near}?" if near else "")


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["run", TERNGRAD], ["gen"]])
def test_misspelt_commands_are_usage(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_the_help_of_a_command_says_what_it_does(capsys):
    for command in ("gen", "check", "ir", "run", "includes"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = capsys.readouterr().out.split("\n\n")[1]
        assert said[0].isupper() and said.endswith("."), command


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "x").touch()
    assert main(["gen", TERNGRAD, "-o", str(tmp_path / "x")]) == 1
    assert "`--output` must be a folder" in capsys.readouterr().err


FULL = "compll: error: No space left on device\n"


@contextlib.contextmanager
def closed_pipe():
    """The end to write to of a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)


@pytest.mark.heavy  # eight processes
@pytest.mark.parametrize(
    ("output", "code", "said", "unbuffered"),
    [
        pytest.param("", 141, "", "", id="pipe"),
        pytest.param("", 141, "", "1", id="pipe, unbuffered"),
        pytest.param(" >&-", 0, "", "", id="closed"),
        # One of the two commands fills a buffer, so both ways to fail are among the others.
        pytest.param(" >&-", 0, "", "1", id="closed, unbuffered", marks=pytest.mark.slow),
        pytest.param(" > /dev/full", 1, FULL, "", id="full"),
        pytest.param(" > /dev/full", 1, FULL, "1", id="full, unbuffered", marks=pytest.mark.slow),
    ],
)
def test_output_that_nobody_reads(unbuffered, output, code, said):
    """What was printed is more than a buffer holds, and less."""
    for command in (f"ir {SPECS / 'eden.pse'}", "includes"):
        with closed_pipe() as pipe:
            ended = subprocess.run(
                ["bash", "-c", f"{sys.executable} -m compll {command}{output}; exit $?"],
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
                stdout=pipe,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
        assert (ended.returncode, ended.stderr) == (code, said)


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
    assert "a C++ compiler is needed" in capsys.readouterr().err


def test_it_says_its_version_which_is_that_of_the_package(capsys):
    # Read, and not imported: the compiler stands alone.
    package = Path(compll.__file__).parents[1] / "tf_hips/__init__.py"
    version = re.search(r'^__version__ = "(.+)"$', package.read_text(), re.MULTILINE)[1]
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"compll {version}\n"


def test_a_full_disk_names_no_file_that_is_not_there(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("compll.pipeline.write", full)
    assert main(["gen", TERNGRAD, "-o", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "compll: error: No space left on device\n"
