# SPDX-License-Identifier: Apache-2.0
"""A codec whose Encode stands in one file and whose Decode in another: what one file would be."""

import importlib.util
import re

import numpy as np
import pytest

import compll
from compll import specification
from compll.cli import main
from compll.ir.printer import spec_hash
from tests.compll.support import gradients
from tests.support import hurried

PARAM = "param Foo { float clip in [0, 10] = 2; }\n"
ENCODE = (
    "void FooEncode(float* gradient, uint8* out, float clip) {\n"
    "    float most = reduce(gradient, 0, max) * clip;\n"
    "    uint2* codes = map(gradient, [&](float g) -> uint2 { return g > random<float>(0, 1); });\n"
    "    out = concat(most, codes);\n"
    "}\n"
)
DECODE = (
    "// void FooEncode( in a comment is no Encode\n"
    "void FooDecode(uint8* in, float* gradient, float clip) {\n"
    "    float most;\n"
    "    uint2* codes;\n"
    "    extract(in, most, codes);\n"
    "    gradient = map(codes, [&](uint2 c) -> float { return c * most; });\n"
    "}"
)
HEAD = "FooEncode, FooDecode; spec hash "


def put(folder, **texts):
    """Writes files of these names; returns their paths."""
    folder.mkdir(exist_ok=True)
    paths = []
    for name, text in texts.items():
        path = folder / f"{name}.pse"
        path.write_text(text)
        paths.append(str(path))
    return paths


@pytest.fixture
def halves(tmp_path):
    """Files whose names say that they belong together."""
    return put(tmp_path / "two", FooEncode=PARAM + ENCODE, FooDecode=DECODE)


@pytest.fixture
def whole(tmp_path):
    return put(tmp_path / "one", Foo=PARAM + ENCODE + DECODE)[0]


def test_two_files_are_the_codec_of_one(halves, whole):
    one = compll.compile_spec(whole)
    for paths in (halves, halves[::-1], halves[:1], halves[1:]):
        two = compll.compile_spec(*paths)
        assert (two.name, spec_hash(two)) == ("Foo", spec_hash(one))
    x = gradients(1023)["plain"]
    packet = compll.Reference(compll.compile_spec(halves[1]), clip=3).encode(x, seed=5)
    assert packet.tobytes() == compll.Reference(one, clip=3).encode(x, seed=5).tobytes()
    assert specification.read(*halves).data == specification.read(whole).data


def test_blocks_may_stand_in_both_files_and_in_any_order(tmp_path, whole):
    expected = spec_hash(compll.compile_spec(whole))
    state = "state Foo { float* kept; }\n"
    for number, (one, two) in enumerate(
        ((PARAM + ENCODE, PARAM + DECODE), (ENCODE, DECODE + PARAM), (ENCODE + PARAM, DECODE))
    ):
        paths = put(tmp_path / str(number), FooEncode=one, FooDecode=two)
        program = compll.compile_spec(*paths)
        assert spec_hash(program) == expected
        assert program.params[0].default == 2
    keeping = ENCODE.replace("    out =", "    kept = gradient;\n    out =")
    paths = put(tmp_path / "state", FooEncode=state + keeping, FooDecode=state + DECODE)
    assert compll.compile_spec(*paths).state_names == ("kept",)


@pytest.mark.parametrize(
    ("one", "two", "name"),
    [
        ("FooEnc", "FooDec", "Foo"),
        ("my_foo_encode", "my_foo_decode", "my_foo"),
        ("encode", "decode", "Foo"),
        ("a", "b", "Foo"),
        ("there", "these", "the"),
    ],
)
def test_it_is_named_after_what_the_files_share(tmp_path, one, two, name):
    paths = put(tmp_path, **{one: ENCODE, two: DECODE})
    assert compll.compile_spec(*paths).name == name
    assert [spec.name for spec in specification.group(paths[::-1])] == [name]


def test_a_clash_names_the_place_in_both_files(tmp_path, capsys):
    other = "\n" + PARAM.replace("= 2", "= 3")
    one, two = put(tmp_path, FooEncode=PARAM + ENCODE, FooDecode=other + DECODE)
    assert main(["check", one, two]) == 1
    told = capsys.readouterr().err
    assert "error[E203]: a second `param Foo`" in told
    assert f"--> {two}:2:7" in told
    assert f"note: it must be equal to the first one, on line 1 of {one}" in told
    for text in (ENCODE, ENCODE.replace("Foo", "Bar")):
        paths = put(tmp_path / "twice", a=ENCODE, b=text)
        with pytest.raises(compll.CompileError) as caught:
            compll.compile_spec(*paths)
        assert f"on line 1 of {paths[0]}" in str(caught.value)


def test_lines_of_both_may_end_in_carriage_returns(tmp_path, whole):
    paths = [tmp_path / "FooEncode.pse", tmp_path / "FooDecode.pse"]
    for path, text in zip(paths, (PARAM + ENCODE, DECODE), strict=True):
        path.write_bytes(text.replace("\n", "\r").encode())
    expected = spec_hash(compll.compile_spec(whole))
    assert spec_hash(compll.compile_spec(*map(str, paths))) == expected
    for path in paths:
        assert spec_hash(compll.compile_spec(str(path))) == expected


def test_mistakes_are_told_with_the_file_and_the_line(tmp_path):
    bad = {
        "E201": (ENCODE, DECODE.replace("c * most", "c * mots"), "{1}:6:"),
        "E504": (ENCODE.replace("concat(most, codes)", "most"), DECODE, "{0}:4:"),
        "E507": (ENCODE, DECODE.replace(", float clip", ""), "{1}:2:6"),
        "E506": (ENCODE, DECODE.replace("uint2*", "uint4*"), "{1}:5:"),
        "E101": (ENCODE[:-2], DECODE, "{0}:4:"),
        "E002": (ENCODE + "/*", DECODE, "{0}:6:1"),
        "E004": (ENCODE, DECODE.encode() + b"\xff", "{1}:7:2"),
    }
    for code, (one, two, place) in bad.items():
        paths = [tmp_path / "FooEncode.pse", tmp_path / "FooDecode.pse"]
        for path, text in zip(paths, (one, two), strict=True):
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(compll.CompileError) as caught:
            compll.compile_spec(*paths)
        told = str(caught.value)
        assert code in told, told
        assert f"--> {place.format(*paths)}" in told, told


def test_mistakes_of_both_files_come_at_once(tmp_path):
    paths = [tmp_path / "FooEncode.pse", tmp_path / "FooDecode.pse"]
    paths[0].write_text(ENCODE.rstrip().removesuffix("}"))
    paths[1].write_text(DECODE.replace(";", "", 1) + "/*")
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_spec(*paths)
    places = re.findall(r"--> (.*?):(\d+)", str(caught.value))
    # A comment that is not closed is told before the file is parsed.
    assert places == [(str(paths[0]), "4"), (str(paths[1]), "7")]


def test_check_joins_halves_and_keeps_codecs_apart(tmp_path, capsys, halves, whole):
    bar = put(tmp_path / "bar", one=ENCODE.replace("Foo", "Bar"), two=DECODE.replace("Foo", "Bar"))
    assert main(["check", bar[1], *halves, whole, bar[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{bar[0]} + {bar[1]}: BarEncode, BarDecode; spec hash ")
    assert lines[1].startswith(f"{halves[0]} + {halves[1]}: {HEAD}")
    assert lines[2].startswith(f"{whole}: {HEAD}")
    assert lines[1].split()[-1] == lines[2].split()[-1]
    assert len(lines) == 3
    # A neighbour that holds something else is left alone.
    halves = put(tmp_path / "two", FooDecode=DECODE.replace("FooDecode", "BarDecode"))
    alone = str(tmp_path / "two/FooEncode.pse")
    assert main(["check", alone]) == 0
    assert capsys.readouterr().out.startswith(f"{alone}: FooEncode; spec hash ")


def test_several_other_halves_are_told_apart_by_name_or_refused(tmp_path, capsys):
    first = put(tmp_path / "a", FooEncode=ENCODE, FooDecode=DECODE)
    second = put(tmp_path / "b", FooEncode=ENCODE, FooDecode=DECODE)
    assert main(["check", first[0], second[0], second[1], first[1]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": Foo")[0] for line in lines] == [
        f"{one} + {two}" for one, two in (first, second)
    ]
    one, two, three = put(tmp_path / "c", one=ENCODE, two=DECODE, three=DECODE)
    assert main(["check", one, two, three]) == 1
    told = capsys.readouterr().err
    assert f"{one} must have one other half, FooDecode. Received: {two} and {three}" in told
    assert main(["ir", two, first[0], second[0]]) == 1
    assert f"{two} must have one other half, FooEncode" in capsys.readouterr().err
    foreign = put(tmp_path / "d", other=ENCODE.replace("Foo", "Bar"))[0]
    assert main(["ir", *first, foreign]) == 1
    assert "`SPEC` must be one codec, in one file or two. Received: " in capsys.readouterr().err


def test_run_takes_two_files_or_finds_the_other(tmp_path, halves, whole):
    x, packet, back = (str(tmp_path / name) for name in ("x.npy", "p.npy", "y.npy"))
    np.save(x, gradients(1023)["plain"])
    made = []
    for specs in ([whole], halves, halves[::-1], halves[1:]):
        run = ["run", *specs, "FooEncode", "--in", x, "--out", packet, "--seed", "3"]
        assert main(run) == 0
        run = ["run", *specs, "FooDecode", "--in", packet, "--out", back, "--size", "1023"]
        assert main(run) == 0
        made.append((np.load(packet).tobytes(), np.load(back).tobytes()))
    assert len(set(made)) == 1


def test_gen_writes_one_codec(tmp_path, halves, whole):
    for folder, specs in (("apart", halves), ("beside", halves[:1]), ("whole", [whole])):
        assert main(["gen", *specs, "-o", str(tmp_path / folder)]) == 0
    for name in ("Foo.codec.cc", "Foo.tf.cc", "Foo.cu", "Foo.mk", "Makefile"):
        texts = {(tmp_path / folder / name).read_text() for folder in ("apart", "beside", "whole")}
        assert len(texts) == 1, name
    module = tmp_path / "apart/Foo_reference.py"
    assert "from FooEncode.pse and FooDecode.pse." in module.read_text()
    spec = importlib.util.spec_from_file_location("two_files_reference", module)
    held = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(held)
    x = gradients(1023)["plain"]
    packet = compll.Reference(compll.compile_spec(whole)).encode(x, seed=2)
    assert held.codec().encode(x, seed=2).tobytes() == packet.tobytes()


@pytest.mark.heavy
def test_the_machine_code_of_two_files_is_that_of_one(tmp_path, halves, capsys, monkeypatch):
    monkeypatch.setenv("CXX", str(hurried.compiler(tmp_path)))
    monkeypatch.setenv(hurried.HURRY, "1")
    x, packet = str(tmp_path / "x.npy"), str(tmp_path / "p.npy")
    np.save(x, gradients(1023)["plain"])
    run = ["run", *halves, "FooEncode", "--in", x, "--out", packet, "--backend", "cpp"]
    assert main(run) == 0
    reference = compll.Reference(compll.compile_spec(halves[0]))
    assert np.load(packet).tobytes() == reference.encode(np.load(x)).tobytes()
    assert main(["gen", *halves, "-o", str(tmp_path), "--target", "cpp", "--build"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "Foo.so")
