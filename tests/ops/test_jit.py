# SPDX-License-Identifier: Apache-2.0
"""tf_hips.load: a specification becomes a codec of the running program, the same in all faces."""

import codecs
import errno
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import compll
import tf_hips
from compll import pipeline, specification
from compll.backends import toolchain
from tests.ops.codecs import bits, gradient
from tests.support import hurried
from tests.support.ranks import process_groups, run_parties
from tf_hips.errors import LibraryError, ProtocolError, SpecificationError
from tf_hips.ops import (
    Compressor,
    Key,
    error_feedback,
    graph,
    library,
    loaded,
    native,
    parse,
    registry,
    specifications,
)
from tf_hips.ops.library import NATIVE_PATH
from tf_hips.ps.rules import robust as robust_rules
from tf_hips.ps.session.joining import described
from tf_hips.ps.session.members import Terms

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
MINE = Path(__file__).with_name("mine.pse")
NAME = toolchain.codec_id("mine", MINE.read_bytes())
KEY = Key(seed=3, step=2, tensor_id=1)
BIG = 2**53 - 1  # no float32 holds it


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory):
    """A cache of its own, so that these tests compile; what they load, other tests do not see."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for module, names in ((loaded, ("_tables",)), (registry, ("_loaded", "_newest"))):
            for name in names:
                patch.setattr(module, name, {})
        patch.setenv(specifications.CACHE, str(folder))
        patch.setenv("CXX", str(hurried.compiler(tmp_path_factory.mktemp("compiler"))))
        yield folder


@pytest.fixture(scope="module")
def mine(_cache) -> Iterator[Compressor]:
    """Compiled as it is for users; what these tests compile besides, in a hurry."""
    codec = tf_hips.load(MINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hurried.HURRY, "1")
        yield codec(2.0, salt=BIG)


def changed(folder: Path, name: str = "mine") -> Path:
    """A specification of the same name and another content."""
    file = folder / f"{name}.pse"
    file.write_text(MINE.read_text() + "\n// changed\n")
    return file


def run(program: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """A program in a process of its own, without TensorFlow."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_parameters_may_have_the_names_of_our_arguments(tmp_path: Path, mine: Compressor) -> None:
    file = tmp_path / "selfish.pse"
    file.write_text(
        "void SelfishEncode(float* g, uint8* o, float self, float values) {\n"
        "    o = concat(map(g, [&](float x) -> float { return x * self + values; }));\n}\n"
        "void SelfishDecode(uint8* o, float* g, float self, float values) { extract(o, g); }\n"
    )
    codec = tf_hips.load(file)(self=3.0, values=1.0)
    assert parse(codec.text) == codec
    packet = native.encode(codec, np.ones(3, np.float32), KEY)
    np.testing.assert_array_equal(native.decode(codec, packet, 3), np.full(3, 4, np.float32))


def test_its_text_says_which_content_it_is(mine: Compressor) -> None:
    assert mine.text == f"{NAME}(scale=2, salt={BIG})"
    assert parse(mine.text) == mine
    assert parse("mine(2, 9007199254740991)") == mine
    assert parse(f"{MINE}(2, salt={BIG})", files=True) == mine
    feedback = error_feedback(mine)
    assert parse(f"error_feedback({MINE}(2, {BIG}))", files=True) == feedback
    assert parse(feedback.text) == feedback
    assert pickle.loads(pickle.dumps(feedback)) == feedback


def test_faces_agree(mine: Compressor) -> None:
    x = gradient(2**20 + 77)
    reference = compll.Reference(compll.compile_spec(MINE), **dict(mine.params))
    packet = reference.encode(x, seed=3, step=2, tensor_id=1)
    assert native.encode(mine, x, KEY).tobytes() == packet.tobytes()
    assert mine.wire_bytes(x.size) == packet.size
    values = reference.decode(packet, x.size)
    np.testing.assert_array_equal(bits(native.decode(mine, packet, x.size)), bits(values))
    in_graph, _ = graph.encode(mine, tf.constant(x), seed=3, step=2, tensor_id=1)
    assert in_graph.numpy().tobytes() == packet.tobytes()
    decoded = graph.decode(mine, in_graph, x.size)
    np.testing.assert_array_equal(bits(decoded.numpy()), bits(values))


def test_all_ops_match_the_native_library_with_static_shapes(mine: Compressor) -> None:
    feedback = error_feedback(mine)
    x, kept = gradient(35), gradient(35, seed=1)
    size = mine.wire_bytes(35)

    @tf.function(input_signature=[tf.TensorSpec([5, 7]), tf.TensorSpec([35])])
    def both(x: tf.Tensor, flat: tf.Tensor) -> list[tf.Tensor]:
        shaped = tf.reshape(flat, [5, 7])
        first, residual = graph.encode(feedback, x, seed=3, step=2, tensor_id=1, kept=shaped)
        rows = tf.stack([first, first])
        merged = graph.merge(feedback, rows, 35)
        again, left = graph.merge_encode(feedback, rows, 35, flat, seed=3, step=2, tensor_id=1)
        assert first.shape == again.shape == [size]
        assert residual.shape == [5, 7]
        assert left.shape == merged.shape == [35]
        return [first, residual, merged, again, left]

    first, residual, merged, again, left = both(x.reshape(5, 7), kept)
    expected_residual, expected_left = kept.copy(), kept.copy()
    packet = native.encode(feedback, x, KEY, kept=expected_residual)
    assert first.numpy().tobytes() == packet.tobytes()
    np.testing.assert_array_equal(residual.numpy().ravel(), expected_residual)
    np.testing.assert_array_equal(merged.numpy(), native.merge(feedback, [packet, packet], 35))
    expected = native.merge_encode(feedback, [packet, packet], 35, KEY, kept=expected_left)
    assert again.numpy().tobytes() == expected.tobytes()
    np.testing.assert_array_equal(left.numpy(), expected_left)


def test_the_op_refuses_parameters_that_do_not_fit(mine: Compressor) -> None:
    encode = library.ops(tf).tf_hips_loaded_encode
    scalars = {"gradient": tf.ones([3]), "seed": 1, "step": 1, "codec": NAME}
    for values in ({}, {"integers": [1, 2], "floats": [1.0]}, {"integers": [1], "floats": []}):
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="2 parameters"):
            encode(**scalars, **values)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"`scale`.*\[0, 100\]"):
        encode(**scalars, integers=[1], floats=[101.0])


def test_a_graph_without_its_codec_says_which_to_load(mine: Compressor) -> None:
    name = "absent@0123456789abcdef"

    @tf.function
    def encoded(x: tf.Tensor) -> tf.Tensor:
        packet = library.ops(tf).tf_hips_loaded_encode(gradient=x, seed=1, step=1, codec=name)
        assert packet.shape.as_list() == [None]
        return packet

    with pytest.raises(tf.errors.FailedPreconditionError, match=r'tf_hips.load\("absent.pse"\)'):
        encoded(tf.ones([3]))


def saved_graph(folder: Path, packet: str) -> None:
    """In another process."""
    library.ops(tf)
    model = tf.saved_model.load(str(folder))
    with pytest.raises(tf.errors.FailedPreconditionError, match="is not loaded in this process"):
        model.encoded(tf.ones([10]))
    tf_hips.load(MINE)
    assert model.encoded(tf.ones([10])).numpy().tobytes().hex() == packet


def test_a_saved_graph_runs_where_the_codec_is_loaded(mine: Compressor, tmp_path: Path) -> None:
    class Model(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([10])])
        def encoded(self, x: tf.Tensor) -> tf.Tensor:
            return graph.encode(mine, x, seed=3, step=2, tensor_id=1)[0]

    tf.saved_model.save(Model(), str(tmp_path / "model"))
    packet = native.encode(mine, np.ones(10, np.float32), KEY).tobytes().hex()
    told = {"folder": tmp_path / "model", "packet": packet}
    run_parties(saved_graph, told, [1], deadline_s=90)


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_xla_is_told_why(mine: Compressor, kind: str) -> None:
    compressor = parse("mine(2, 5)")

    @tf.function(jit_compile=True)
    def compiled(x: tf.Tensor, packet: tf.Tensor) -> tf.Tensor:
        if kind == "decode":
            return graph.decode(compressor, packet, 8)
        return graph.encode(compressor, x * 2.0, seed=1, step=1, tensor_id=0)[0]

    packet = native.encode(compressor, np.ones(8, np.float32), KEY)
    with pytest.raises(tf.errors.UnimplementedError, match=r"has no XLA kernel: .*outside of"):
        compiled(tf.ones([8]), tf.constant(packet))


@pytest.mark.parametrize(
    ("arguments", "named", "error", "text"),
    [
        ((), {}, ValueError, "`salt` must be given"),
        ((1.0, 2, 3), {}, TypeError, "takes 2 arguments"),
        ((1.0, 2.5), {}, TypeError, "`salt` must be an integer"),
        ((101.0, 2), {}, ValueError, r"`scale` must be in \[0.0, 100.0\]"),
        ((1.0, 2), {"salt": 3}, ValueError, "given once"),
        ((), {"salt": 1, "sale": 3}, ValueError, "sale=3"),
    ],
)
def test_wrong_arguments(mine: Compressor, arguments, named, error, text) -> None:
    codec = tf_hips.load(MINE)
    with pytest.raises(error, match=text):
        codec(*arguments, **named)
    assert "scale=1.5, salt)" in repr(codec)


def test_error_feedback_around_what_diverges_is_refused(mine: Compressor) -> None:
    assert error_feedback(parse("mine(2, 1)")).has_residual
    with pytest.raises(ValueError, match=rf"residuals grow without bound. Received: {NAME}\(sc"):
        parse("error_feedback(mine(5, 1))")


def test_what_came_over_a_network_opens_no_file(mine: Compressor) -> None:
    with pytest.raises(ValueError, match="must read like"):
        parse(f"{MINE}(2, 1)")
    with pytest.raises(SpecificationError, match="must be a specification of that content"):
        parse("mine@0123456789abcdef(2, 1)")


def test_rules_that_need_every_element_refuse_a_codec_that_scatters(
    tmp_path: Path, mine: Compressor
) -> None:
    file = tmp_path / "front.pse"
    file.write_text(
        "void FrontEncode(float* g, uint8* o) {\n"
        "    int k = min(g.size, 3);\n"
        "    o = concat(map(range(k), [&](int i) -> float { return g[i]; }));\n}\n"
        "void FrontDecode(uint8* o, float* g) {\n"
        "    float* values;\n    extract(o, values);\n"
        "    g = scatter(g.size, range(values.size), values);\n}\n"
    )
    front = tf_hips.load(file)()
    assert not mine.is_sparse and not error_feedback(mine).is_sparse
    for sparse in (front, error_feedback(front), parse(f"warmup({front.text}, 10)")):
        assert sparse.is_sparse
        why = robust_rules.why_not("median", 5, sparse.text)
        assert why is not None and "most values are 0. " in why
        assert why.endswith(f" Received: {sparse.text}")
        assert robust_rules.why_not("geometric_median", 5, sparse.text) is None
    assert robust_rules.why_not("median", 5, mine.text) is None


def test_another_content_of_the_same_name(mine: Compressor, tmp_path: Path) -> None:
    other = changed(tmp_path)
    with pytest.raises(ValueError, match=f"loaded before as {NAME}.*replace=True"):
        tf_hips.load(other)
    replaced = tf_hips.load(other, replace=True)
    assert parse("mine(2, 1)").name == replaced.name != NAME
    assert native.encode(mine, gradient(9), KEY).size == mine.wire_bytes(9)
    assert tf_hips.load(MINE, replace=True).name == NAME
    assert parse("mine(2, 1)").name == NAME
    with pytest.raises(ValueError, match="onebit is a built-in codec"):
        tf_hips.load(changed(tmp_path, "onebit"))


def test_diagnostics_come_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "wrong.pse"
    file.write_text("void WrongEncode(float* gradient, uint8* out) { out = concat(gpa); }\n")
    with pytest.raises(compll.CompileError) as theirs:
        compll.compile_spec(file)
    with pytest.raises(SpecificationError) as ours:
        parse(f"{file}(1)", files=True)
    assert str(ours.value) == str(theirs.value)
    assert "error[E201]" in str(ours.value)


def test_a_codec_needs_both_directions_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "half.pse"
    file.write_text("void HalfEncode(float* gradient, uint8* out) { out = concat(gradient); }\n")
    with pytest.raises(SpecificationError, match="no Decode"):
        tf_hips.load(file)
    with pytest.raises(SpecificationError, match="can be read"):
        tf_hips.load(tmp_path / "missing.pse")
    for wrong in (3, None, b"x.pse"):
        with pytest.raises(TypeError, match=r"`path` must be a path such as 'my.pse'. Received"):
            tf_hips.load(wrong)  # type: ignore[arg-type]


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(LibraryError, match=r"install g\+\+.*no-such-compiler"):
        tf_hips.load(changed(tmp_path, "compilerless"))


def test_a_cache_that_others_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv(specifications.CACHE, str(folder))
    with pytest.raises(LibraryError, match="closed to others"):
        tf_hips.load(changed(tmp_path, "open_cache"))


LOAD = (
    "import sys, numpy as np, tf_hips\n"
    "from tf_hips.ops import Key, native\n"
    f"codec = tf_hips.load({str(MINE)!r})(2, 1)\n"
    "packet = native.encode(codec, np.arange(9, dtype=np.float32), Key(3, 2, 1))\n"
    "print(packet.tobytes().hex(), 'compll.pipeline' in sys.modules, 'tensorflow' in sys.modules)\n"
)


def test_processes_at_once_compile_once(mine: Compressor, tmp_path: Path) -> None:
    compiler, count = tmp_path / "counting", tmp_path / "count"
    compiler.write_text(
        f'#!/bin/sh\ncase "$1" in --version|-dumpmachine) ;; *) echo x >>{count};; esac\n'
        f'exec {os.environ["CXX"]} "$@"\n'
    )
    compiler.chmod(0o755)
    environment = {
        **os.environ,
        specifications.CACHE: str(tmp_path / "cache"),
        "CXX": str(compiler),
    }
    with process_groups() as start:
        processes = [
            start([sys.executable, "-c", LOAD], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
            for _ in range(4)
        ]
        outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    expected = native.encode(parse("mine(2, 1)"), np.arange(9, dtype=np.float32), KEY)
    assert {output[0].decode() for output in outputs} == {expected.tobytes().hex()}
    assert count.read_text() == "x\n"
    left = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert left == [".lock", ".pse", ".so"]


def test_a_cached_codec_needs_no_compiler_and_no_tensorflow(mine: Compressor) -> None:
    assert run(LOAD).stdout.split()[1:] == ["False", "False"]


def test_a_damaged_entry_is_made_again(mine: Compressor, tmp_path: Path, _cache: Path) -> None:
    for part in _cache.glob(f"mine-{NAME.partition('@')[2]}*.so"):
        shutil.copy2(part, tmp_path)
    first = run(LOAD, **{specifications.CACHE: str(tmp_path)})
    # The specification, which was not kept, is: else none could ever name the codec by its content.
    assert (tmp_path / f"{NAME.replace('@', '-')}.pse").read_bytes() == MINE.read_bytes()
    assert first.stdout.split()[1:] == ["False", "False"]
    (entry,) = tmp_path.glob("*.so")
    whole = entry.read_bytes()
    (tmp_path / "mine-0123456789abcdef-0123456789abcdef.so").write_bytes(b"an old one")
    # The system's loader refuses the first. It would map the second, and die behind its end.
    for damaged in (b"half a library", whole[: len(whole) // 2]):
        entry.write_bytes(damaged)
        second = run(LOAD, **{specifications.CACHE: str(tmp_path)})
        assert second.stdout.split() == [first.stdout.split()[0], "True", "False"]


def test_a_full_disk_is_told(
    mine: Compressor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("compll.backends.toolchain.compile_codec", write)
    with pytest.raises(LibraryError, match=r"can be written.*No space left"):
        tf_hips.load(changed(tmp_path, "roomless"))


def test_a_server_finds_what_a_peer_names_by_its_content(mine: Compressor, tmp_path: Path) -> None:
    program = (
        "from tf_hips.errors import TfHipsError\n"
        "from tf_hips.ops import parse\n"
        "try:\n"
        f"    print(parse('error_feedback({NAME}(2, 1))').wire_bytes(100))\n"
        "except TfHipsError as error:\n"
        "    print(error)\n"
    )
    cache = str(tmp_path / "cache")
    expected = str(mine.wire_bytes(100))
    assert run(program).stdout.strip() == expected
    without = run(program, **{specifications.CACHE: cache}).stdout
    assert "--compression mine.pse" in without
    assert f"set {specifications.SPECS}" in without
    marked = tmp_path / "marked/mine.pse"  # a byte order mark is no part of a specification
    marked.parent.mkdir()
    marked.write_bytes(codecs.BOM_UTF8 + MINE.read_bytes())
    specs = f"{tmp_path}:{marked.parent}"
    found = run(program, **{specifications.CACHE: cache, specifications.SPECS: specs})
    assert found.stdout.strip() == expected, found.stderr
    wrong = changed(tmp_path)
    told = run(
        program,
        **{specifications.CACHE: str(tmp_path / "other"), specifications.SPECS: str(tmp_path)},
    ).stdout
    assert toolchain.codec_id("mine", wrong.read_bytes()) in told


def test_a_server_without_the_file_or_a_compiler_says_so_to_the_party(
    mine: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = Terms(("east",), None, None, max_model_bytes=1 << 20)
    joining = {"process": "p", "workers": 1, "downlink": "same", "seed": 0}
    joined = described(terms, None, compression="mine(2, 1)", **joining)
    assert joined.compression == joined.downlink == parse("mine(2, 1)").text
    with pytest.raises(ProtocolError, match=r"unknown to the server.*TF_HIPS_SPECS"):
        described(terms, None, compression="mine@0123456789abcdef(2, 1)", **joining)
    monkeypatch.setattr(loaded, "_tables", {})
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ProtocolError, match=r"unknown to the server: a C\+\+ compiler is needed"):
        described(terms, None, compression=f"{NAME}(2, 1)", **joining)


def test_a_library_that_was_built_elsewhere_needs_no_compiler(
    mine: Compressor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = changed(tmp_path, "elsewhere")
    library = pipeline.build(specification.read(file), tmp_path / "made")
    monkeypatch.setenv("CXX", "no-such-compiler")
    codec = parse(f"{library}(2, 1)", files=True)
    assert codec.name == toolchain.codec_id("elsewhere", file.read_bytes())
    x = gradient(99)
    ours = native.decode(codec, native.encode(codec, x, KEY), 99)
    theirs = native.decode(mine, native.encode(mine, x, KEY), 99)
    np.testing.assert_array_equal(ours, theirs)
    (tmp_path / "no.so").write_bytes(b"not a library")
    with pytest.raises(LibraryError, match="must be a library that `compll gen --build`"):
        tf_hips.load(tmp_path / "no.so")
    with pytest.raises(LibraryError, match="tf_hips_codec_id"):
        tf_hips.load(NATIVE_PATH)
    part = tmp_path / "part.so"
    part.write_bytes(library.read_bytes()[:9000])
    with pytest.raises(LibraryError, match=r"9000 bytes of at least [0-9]+: it was cut off"):
        tf_hips.load(part)


def test_a_peer_finds_a_library_that_was_built_elsewhere(
    mine: Compressor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the cache of who has loaded it, as a server does, or in a folder of the user's."""
    file = changed(tmp_path, "alone")
    made = tmp_path / "made"
    library = pipeline.build(specification.read(file), made)
    file.unlink()
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(specifications.CACHE, str(tmp_path / "cache"))
    text = parse(f"{library}(2, 1)", files=True).text

    def named(cache: str, folder: Path) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(loaded, "_tables", {})
            patch.setattr(registry, "_loaded", {})
            patch.setenv(specifications.CACHE, str(tmp_path / cache))
            patch.setenv(specifications.SPECS, str(folder))
            return parse(text).text

    # A library of that name and another content is not even opened.
    (tmp_path / "alone.so").write_bytes(b"another")
    assert named("cache", tmp_path) == named("empty", made) == text
    with pytest.raises(SpecificationError, match=r"or the library alone\.so"):
        named("empty", tmp_path)


def test_a_library_that_was_built_again_is_the_new_one(mine: Compressor, tmp_path: Path) -> None:
    file = changed(tmp_path, "rebuilt")
    library = pipeline.build(specification.read(file), tmp_path / "made")
    first = tf_hips.load(library)
    file.write_text(file.read_text() + "// again\n")
    assert pipeline.build(specification.read(file), tmp_path / "made") == library
    with pytest.raises(ValueError, match=f"loaded before as {first.name}.*replace=True"):
        tf_hips.load(library)
    second = tf_hips.load(library, replace=True)
    assert second.name == toolchain.codec_id("rebuilt", file.read_bytes()) != first.name
    assert loaded.table(second.name) != loaded.table(first.name)
    x = gradient(99)
    np.testing.assert_array_equal(
        native.encode(first(2, 1), x, KEY)[16:], native.encode(second(2, 1), x, KEY)[16:]
    )


def halved(folder: Path, one: str = "TwoEncode", two: str = "TwoDecode") -> tuple[Path, Path]:
    """The codec of `mine.pse` under another name, in two files."""
    text = MINE.read_text().replace("Mine", "Two")
    at = text.index("void TwoDecode")
    folder.mkdir(exist_ok=True)
    for name, part in ((one, text[:at]), (two, text[at:])):
        (folder / f"{name}.pse").write_text(part)
    return folder / f"{one}.pse", folder / f"{two}.pse"


def test_a_codec_in_two_files_is_that_of_one(mine: Compressor, tmp_path: Path) -> None:
    encode, decode = halved(tmp_path / "two")
    whole = tmp_path / "Two.pse"
    whole.write_text(encode.read_text() + decode.read_text())
    name = toolchain.codec_id("Two", whole.read_bytes())
    for paths in ((encode, decode), (decode, encode), (encode,), (decode,), (whole,)):
        assert tf_hips.load(*paths).name == name
    codec = parse(f"error_feedback({decode}(2, salt=1))", files=True).inner
    assert codec is not None and codec.name == name
    x = gradient(999)
    packet = native.encode(codec, x, KEY)
    reference = compll.Reference(compll.compile_spec(whole), scale=2, salt=1)
    assert packet.tobytes() == reference.encode(x, KEY.seed, KEY.step, KEY.tensor_id).tobytes()
    np.testing.assert_array_equal(native.decode(codec, packet, 999), reference.decode(packet, 999))
    library = pipeline.build(specification.read(encode, decode), tmp_path / "made")
    assert tf_hips.load(library).name == name
    with pytest.raises(ValueError, match="left out for a library"):
        tf_hips.load(library, decode)
    # Either half is part of the content.
    decode.write_text(decode.read_text() + "// changed\n")
    with pytest.raises(ValueError, match=f"`{encode} \\+ {decode}` must have the content.*{name}"):
        tf_hips.load(encode)


def test_a_server_finds_both_files_of_what_a_peer_names(mine: Compressor, tmp_path: Path) -> None:
    encode, decode = halved(tmp_path / "two", "two_encode", "two_decode")
    name = tf_hips.load(encode, decode).name
    program = f"from tf_hips.ops import parse\nprint(parse('{name}(2, 1)').wire_bytes(100))\n"
    environment = {
        specifications.CACHE: str(tmp_path / "cache"),
        specifications.SPECS: str(tmp_path / "two"),
    }
    found = run(program, **environment)
    assert found.stdout.strip() == str(mine.wire_bytes(100)), found.stderr
    decode.unlink()  # the cache keeps both as one
    again = run(program, **environment)
    assert again.stdout == found.stdout, again.stderr


def test_the_half_that_is_missing_is_named(tmp_path: Path) -> None:
    encode, decode = halved(tmp_path)
    decode.unlink()
    with pytest.raises(SpecificationError, match=r"no Decode; there is no TwoDecode.pse beside it"):
        tf_hips.load(encode)
    decode.write_text(encode.read_text().replace("TwoEncode", "TwiceEncode"))
    with pytest.raises(SpecificationError, match=r"must hold TwoDecode. Received: TwiceEncode"):
        tf_hips.load(encode)
    encode.rename(tmp_path / "first.pse")
    with pytest.raises(SpecificationError, match=r"first.pse does not end with Encode.pse, so no"):
        tf_hips.load(tmp_path / "first.pse")
    with pytest.raises(SpecificationError, match=r"none.pse` must be a specification that can"):
        tf_hips.load(tmp_path / "first.pse", tmp_path / "none.pse")


@pytest.mark.slow
def test_clusters_that_tensorflow_compiles_on_its_own_fall_back() -> None:
    program = (
        "import tensorflow as tf\n"
        "from tf_hips.ops import graph, parse\n"
        "@tf.function\n"
        "def value(x):\n"
        "    for _ in range(6): x = tf.sin(x) * 2.0\n"
        "    packet, _ = graph.encode(parse('onebit'), x, seed=1, step=2, tensor_id=3)\n"
        "    y = graph.decode(parse('onebit'), packet, 1000)\n"
        "    return tf.reduce_sum(tf.abs(y))\n"
        "results = {float(value(tf.range(1000, dtype=tf.float32))) for _ in range(3)}\n"
        "assert len(results) == 1 and results.pop() > 1, results\n"
    )
    flags = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit --tf_xla_min_cluster_size=1"
    done = run(program, TF_XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr
