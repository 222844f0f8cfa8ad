# SPDX-License-Identifier: Apache-2.0
"""CUDA, as far as it can be shown without a GPU: nvcc takes what is generated, and the kernels, run
on this CPU thread by thread (tests/compll/emulation), give the bytes of the reference.
"""

import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import compll
from compll.backends import cuda
from compll.backends.toolchain import NVCC_FLAGS, include_folder
from compll.cli import main
from compll.packet import CHUNK
from compll.passes import optimise
from tests.compll.emulation import ADD, FINE, RESIDUAL, Emulated, build
from tests.compll.support import SPECS, assert_same_floats, gradients, residual_of, spec

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

EVERY = sorted(path.stem for path in SPECS.glob("*.pse"))
NAMES = [name for name in EVERY if not spec(name).state_names]
# One of each kind: sums, noise, blocks with fused scales, odd widths, and what is kept.
QUICK = ("onebit", "terngrad", "qsgd", "natural", "graddrop")
ALL = [
    pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,), id=name)
    for name in NAMES
]
SMALL = (0, 1, 17, 1023, 1024, 1025, 5000)
KEY = {"seed": 2**63 + 5, "step": 3, "tensor_id": 9, "offset": 0}
# Status codes of codec.h and api.h.
CONTRADICTS, BAD_MAGIC, BAD_VERSION, BAD_HASH, BAD_COUNT = 3, 17, 18, 20, 21


@functools.cache
def both(name: str, **params: float) -> tuple[Emulated, compll.Reference]:
    """Emulated kernels, and the reference they must equal."""
    program = spec(name)
    return Emulated(program, **params), compll.Reference(program, **params)


def check(name: str, x: np.ndarray, key: dict, skew: int = 0, **params: float) -> None:
    """Packets equal those of the reference, and decode to the same."""
    kernels, reference = both(name, **params)
    expected = reference.encode(x, **key)
    packets, _ = kernels.encode(x, skew=skew, **key)
    np.testing.assert_array_equal(packets, expected)
    values, report = kernels.decode([packets], x.size)
    assert report == FINE
    assert_same_floats(values, reference.decode(expected, x.size))


@pytest.mark.parametrize("name", ALL)
def test_packets_equal_the_reference(name):
    kernels, _ = both(name)
    for may_be_alone in (True, False):
        kernels.alone(may_be=may_be_alone)
        for n in SMALL:
            for number, x in enumerate(gradients(n).values()):
                # The order of threads must not matter.
                kernels.order(backwards=number % 2 == 1)
                check(name, x, KEY)
    kernels.alone(may_be=True)


@pytest.mark.parametrize("name", ("onebit", "graddrop"))
def test_a_chunk_and_a_bit(name):
    check(name, gradients(CHUNK + 1027)["broken"], KEY)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_several_chunks(name):
    for n in (CHUNK + 1027, 3 * CHUNK):
        check(name, gradients(n)["broken"], KEY)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("terngrad", {"bitwidth": 1}),
        ("terngrad", {"bitwidth": 8}),
        ("qsgd", {"bits": 3, "bucket": 1024}),
        ("qsgd", {"bits": 8, "bucket": 16}),
        ("graddrop", {"ratio": 1.0}),
        pytest.param("topk", {"ratio": 1.0}, marks=pytest.mark.slow),
        pytest.param("int8", {"block": 1024}, marks=pytest.mark.slow),
        pytest.param("fp8", {"format": 2, "block": 16}, marks=pytest.mark.slow),
    ],
)
def test_parameters(name, params):
    check(name, gradients(5001)["plain"], KEY, **params)


WIDTHS = """
param Widths {
    int few in [1, 8] = 3;
    int many in [1, 16] = 9;
}
void WidthsEncode(float* gradient, uint8* out, int few, int many) {
    uint<few>* low = map(gradient, [&](float x) -> uint<few> { return x * 5; });
    uint<many>* high = map(gradient, [&](float x) -> uint<many> { return x * 9000; });
    out = concat(low, high);
}
void WidthsDecode(uint8* packet, float* gradient, int few, int many) {
    uint<few>* low;
    uint<many>* high;
    extract(packet, low, high);
    gradient = map(range(gradient.size), [&](int i) -> float { return low[i] + 300 * high[i]; });
}
"""


def test_every_width():
    """Shifts and stores of a width that a parameter gives are those of a width that is known."""
    program = compll.compile_text(WIDTHS, "widths")
    library = build(program)
    x = np.abs(gradients(3001)["plain"])
    for many in range(1, 17):
        params = {"few": (many + 1) // 2, "many": many}
        kernels, reference = (
            Emulated(program, library, **params),
            compll.Reference(program, **params),
        )
        packets, _ = kernels.encode(x, skew=many % 16)
        np.testing.assert_array_equal(packets, reference.encode(x))
        values, report = kernels.decode([packets], x.size)
        assert report == FINE
        assert_same_floats(values, reference.decode(packets, x.size))


def test_no_thread_divides_by_the_size_of_blocks():
    """They are powers of two: a division of 64 bits would cost as much as encoding an element."""
    source = cuda.emit(optimise(spec("qsgd")))
    kernels = source[source.index("encode_blocks1(") : source.index("encode_blocks1_grid")]
    assert not re.findall(r"int_div|/ (?:block|bucket)", kernels)


def test_a_sum_of_more_tiles_than_shared_memory_has_room_for():
    program = compll.compile_text(
        "void LongEncode(float* g, uint8* out) {"
        "    float* whole = map(range(1025 * 1024 + 3), [&](int i) -> float { return i * 0.1; });"
        "    out = concat(reduce(whole, 0, sum), reduce(g, 0, sum)); }",
        "long",
    )
    kernels, reference = Emulated(program), compll.Reference(program)
    x = gradients(2500)["plain"]
    np.testing.assert_array_equal(kernels.encode(x)[0], reference.encode(x))


def test_noise_and_packets_that_are_not_aligned():
    for skew, offset in ((1, 3), (6, 12), (15, 2**40 + 7)):
        for name in ("terngrad", "graddrop", "natural"):
            check(name, gradients(5001)["plain"], {**KEY, "offset": offset}, skew)


@pytest.mark.parametrize("name", ALL)
def test_error_feedback(name):
    kernels, reference = both(name)
    for n in (0, 17, 3001):
        for what in ("plain", "broken"):
            x = gradients(n)[what]
            residual = np.random.default_rng(n).normal(size=n).astype(np.float32)
            packets, left = kernels.encode(x, residual, **KEY)
            np.testing.assert_array_equal(packets, reference.encode(x + residual, **KEY))
            assert_same_floats(left, residual_of(reference, x + residual, packets))


@pytest.mark.parametrize("name", ALL)
def test_rows_are_summed_in_their_order(name):
    kernels, reference = both(name)
    n, rng = 2100, np.random.default_rng(3)
    for num in (3, 70):
        rows = [reference.encode(rng.normal(size=n).astype(np.float32), seed=k) for k in range(num)]
        before = rng.normal(size=n).astype(np.float32)
        total, added = reference.decode(rows[0], n), before + reference.decode(rows[0], n)
        for row in rows[1:]:
            total, added = total + reference.decode(row, n), added + reference.decode(row, n)
        for out, mode, expected in ((None, 0, total), (before, ADD, added)):
            values, report = kernels.decode(rows, n, out, mode)
            assert report == FINE
            assert_same_floats(values, expected)


def changed(packets: np.ndarray, at: int, value: int) -> np.ndarray:
    packets = packets.copy()
    packets[at] = value
    return packets


@pytest.mark.parametrize(
    ("at", "status"), [(0, BAD_MAGIC), (4, BAD_VERSION), (8, BAD_HASH), (12, BAD_COUNT)]
)
def test_a_foreign_packet_is_reported_and_nothing_is_written(at, status):
    kernels, reference = both("onebit")
    n = CHUNK + 5
    good = reference.encode(np.ones(n, np.float32))
    second = good.size - 16 - reference.body_bytes(5)
    bad = changed(good, second + at, good[second + at] ^ 0x40)
    values, report = kernels.decode([good, good, bad, bad], n)
    assert report == 2 << 40 | 1 << 8 | status
    assert (values == 7).all()


def test_a_body_that_contradicts_is_reported():
    kernels, reference = both("terngrad")
    good = reference.encode(gradients(100)["plain"])
    _, report = kernels.decode([good, changed(good, 16, 9)], 100)
    assert report == 1 << 40 | CONTRADICTS
    kernels, reference = both("graddrop", ratio=1.0)
    good = reference.encode(gradients(100)["plain"])
    for at, value in ((16, 200), (20, 99), (19, 255)):
        bad = changed(good, at, value)
        with pytest.raises(compll.PacketError):
            reference.decode(bad, 100)
        values, report = kernels.decode([bad], 100, mode=RESIDUAL)
        assert report == CONTRADICTS
        assert (values == 7).all()


def test_arguments_are_checked():
    kernels, reference = both("onebit")
    codec, values = kernels.codec, kernels.values
    assert codec.wire_bytes(values, -1) == -16
    assert (
        codec.wire_bytes(values, 2 * CHUNK + 3)
        == reference.encode(np.zeros(2 * CHUNK + 3, np.float32)).size
    )
    none = (None, 0, None)
    assert codec.encode(values, None, None, None, None, None, 0, None, 0, *none) == 1
    assert codec.decode(values, None, 40, 1, None, 0, 0, None, *none) == 1


def test_parameters_are_rounded_before_they_are_checked():
    """A caller in C gives binary64s: the largest float as it is printed lies above it."""
    program = compll.compile_text(
        "void ScaleEncode(float* g, uint8* out, float s) "
        "{ out = concat(map(g, [&](float x) -> float { return x * s; })); }",
        "scale",
    )
    kernels, x = Emulated(program, s=1), np.ones(9, np.float32)
    for given in (0.1, 3.40282347e38, -3.4028235677973362e38):
        kernels.values[0] = given
        packets, _ = kernels.encode(x)
        np.testing.assert_array_equal(packets, compll.Reference(program, s=given).encode(x))
    for given in (3.4028235677973367e38, float("inf"), float("nan")):
        kernels.values[0] = given
        assert kernels.codec.wire_bytes(kernels.values, 9) < 0


def test_what_cuda_says_is_kept():
    """Of the last call that failed; and the library knows whether it can run at all."""
    program = compll.compile_text(
        "void TripleEncode(float* g, uint8* out) "
        "{ out = concat(map(g, [&](float x) -> float { return x * 3; })); }",
        "triple",
    )
    kernels = Emulated(program)
    library = kernels._library
    library.tf_hips_cuda_error_text.restype = ctypes.c_char_p
    assert kernels.codec.error_text() == library.tf_hips_cuda_error_text()
    library.emulation_fail(1, 0)
    with pytest.raises(AssertionError, match="32"):
        kernels.encode(np.ones(9, np.float32))
    kernels.encode(np.ones(9, np.float32))
    assert kernels.codec.error_text() == library.tf_hips_cuda_error_text() == b"an emulated error"


@pytest.mark.parametrize(
    ("capability", "driver", "told"),
    [
        (90, 0, ""),
        (86, 0, ""),
        (120, 0, ""),
        (75, 0, "GPU 0 has compute capability 7.5, and the library code for 8.0 9.0"),
        (90, 1, "an emulated error (CUDA of the driver: 12.4, of the library: 13.0)"),
    ],
)
def test_a_library_says_why_it_cannot_run(tmp_path, capability, driver, told):
    # A copy: it asks once.
    copy = shutil.copyfile(build(spec("onebit")), tmp_path / "copy.so")
    library = ctypes.CDLL(str(copy))
    library.tf_hips_cuda_refusal.restype = ctypes.c_char_p
    library.emulation_capability(capability)
    try:
        library.emulation_fail(0, driver)
        found = library.tf_hips_cuda_refusal().decode()
        assert found.startswith(told) and bool(found) == bool(told)
        library.emulation_capability(90)
        library.emulation_fail(0, 1 - driver)
        assert library.tf_hips_cuda_refusal().decode() == found
    finally:
        # Emulated libraries of a process share it.
        library.emulation_fail(0, 0)


def test_few_kernels():
    """What a small tensor costs is mostly how many kernels are launched."""
    x = gradients(1000)["plain"]
    for name, most in (("onebit", 2), ("terngrad", 3), ("qsgd", 1), ("natural", 1)):
        kernels, _ = both(name)
        for may_be_alone, encodes, decodes in ((True, 1, 1), (False, most, 2)):
            kernels.alone(may_be=may_be_alone)
            before = kernels.launches()
            packets, _ = kernels.encode(x)
            assert kernels.launches() - before == encodes
            kernels.decode([packets] * 16, x.size)
            assert kernels.launches() - before == encodes + decodes
        kernels.alone(may_be=True)


def test_only_a_call_with_a_residual_has_the_registers_of_its_decoder():
    """The kernel that encodes and decodes a tile is two, one of which does not decode."""
    source = cuda.emit(optimise(spec("qsgd")))
    decoded = "decode_kernels::decode_tile_of_rows<true>(call.rest, spot, own_sums);"
    assert re.search(r"if constexpr \(leaves_rest\) \{[^}]*" + re.escape(decoded), source)
    assert source.count(decoded) == 1
    for grid, leaves in (("encode_blocks1_grid", "false"), ("encode_blocks1_rest_grid", "true")):
        opening = rf"TF_HIPS_CROWDED_KERNEL {grid}\([^{{]*\{{\s*follow\(\);\s*"
        known = "" if leaves == "true" else r"TF_HIPS_ASSUME\(call.residual == nullptr\);\s*"
        assert re.search(rf"{opening}{known}encode_blocks1<{leaves}>\(", source)


@pytest.mark.parametrize("name", EVERY)
def test_one_kernel_does_all_of_a_small_call(name):
    """Where there would be several, for 2048 elements at least, within a block's shared memory."""
    source = cuda.emit(optimise(spec(name)))
    for side in ("encode", "decode"):
        run = source[source.index(f"void run_{side}(") :]
        launches = re.findall(
            r"TF_HIPS_(?:LAUNCH|FOLLOW)\(|run_top_k|launch_", run[: run.index("\n}\n")]
        )
        tiles = re.findall(rf"bool start_{side}.*?tiles\[k\] > (\d+)\) call->alone", source, re.S)
        assert bool(tiles) == (len(launches) > 1)
        assert all(int(most) >= 2 for most in tiles)


@pytest.mark.parametrize("n", (1, 1000, 4097))
def test_a_small_top_k_is_one_kernel(n):
    """Encoding and decoding; with a residual, one of each. Of equals the first are taken."""
    kernels, reference = both("graddrop")
    few = np.round(gradients(n)["plain"] * 2)
    for x in (gradients(n)["broken"], few.astype(np.float32)):
        before = kernels.launches()
        packets, _ = kernels.encode(x)
        np.testing.assert_array_equal(packets, reference.encode(x))
        kernels.decode([packets], n)
        assert kernels.launches() - before == 2


def test_sorts_of_every_kind(tmp_path):
    text = """
    void SortedEncode(float* gradient, uint8* out) {
        float* up = sort(gradient, less);
        uint8* down = sort(map(gradient, [&](float g) -> uint8 { return g * 8 + 128; }), greater);
        int* odd = filter(range(gradient.size), [&](int i) -> uint1 { return i & 1; });
        int* late = sort(odd, greater);
        int last = late[0] + reduce(odd, 0, max) + odd.size;
        uint32 found = last;
        out = concat(found, up, down);
    }
    """
    program = compll.compile_text(text, "sorted")
    kernels, reference = Emulated(program), compll.Reference(program)
    for n in (0, 1, 1000, 20_000):
        for x in gradients(n).values():
            packets, _ = kernels.encode(x)
            np.testing.assert_array_equal(packets, reference.encode(x))


SHRINKING = """
void ShrinkEncode(float* gradient, uint8* out, int rest) {
    int* few = range(rest == 0 ? 4096 - gradient.size : gradient.size % rest);
    lambda_func at = [&](int i) -> float { return gradient[i] + i; }
    float* values = map(few, at);
    float total = reduce(values, 0, sum);
    int whole = reduce(map(few, [&](int i) -> int { return i; }), 0, sum);
    uint32 low = whole;
    uint16* kept = filter(few, [&](int i) -> uint1 { return gradient[i] > 0; });
    uint32* best = top_k(map(range(min(few.size, gradient.size)), at), few.size / 2);
    float* down = sort(values, greater);
    float* most = block_reduce(values, 64, 0, max);
    float* most_room = block_reduce(values, 64, 0, min);  // as the length of `most` is called
    lambda_func code = [&](int i) -> uint<3> {
        return most[i / 64] - most_room[i / 64] + i + random<int>(0, 2);
    }
    uint<3>* codes = map(few, code);
    out = concat(total, low, kept, best, down, codes, map(most, at));
}
void ShrinkDecode(uint8* packet, float* gradient, int rest) {
    float total;
    uint32 low;
    uint16* kept;
    uint32* best;
    float* down;
    uint<3>* codes;
    float* blocks;
    extract(packet, total, low, kept, best, down, codes, blocks);
    float* sent = scatter(gradient.size, best, down);
    int middle = reduce(codes, 0, sum);
    lambda_func value = [&](int i) -> float { return sent[i] + down[i] + middle; }
    gradient = map(range(gradient.size), value);
}
"""


@pytest.mark.parametrize(("rest", "last"), [(0, 100), (5000, 4900), (5000, 100)])
def test_a_length_that_shrinks_as_a_chunk_grows(rest, last):
    """The last chunk then has more tiles of a loop than the others, or none has them all."""
    program = compll.compile_text(SHRINKING, "shrink")
    kernels, reference = Emulated(program, rest=rest), compll.Reference(program, rest=rest)
    x = gradients(CHUNK + last)["plain"]
    expected = reference.encode(x, **KEY)
    packets, _ = kernels.encode(x, **KEY)
    np.testing.assert_array_equal(packets, expected)
    values, report = kernels.decode([packets], x.size)
    assert report == FINE
    assert_same_floats(values, reference.decode(expected, x.size))


STATES = [Path(__file__).with_name("momentum.pse")]
STATES += [SPECS / f"{name}.pse" for name in EVERY if name not in NAMES]


@pytest.mark.parametrize("file", STATES, ids=lambda file: file.stem)
def test_states_outlive_a_call(file):
    program = compll.compile_spec(file)
    kernels, reference = Emulated(program), compll.Reference(program)
    for n in (0, 17, 5001):
        expected = np.zeros((len(program.state_names), n), np.float32)
        found: np.ndarray | None = expected.copy()
        for step, x in enumerate(gradients(n).values()):
            packets, found = kernels.encode(x, state=found, step=step)
            np.testing.assert_array_equal(packets, reference.encode(x, step=step, state=expected))
            assert_same_floats(found, expected)
            values, report = kernels.decode([packets], n)
            assert report == FINE
            assert_same_floats(values, reference.decode(packets, n))
    assert kernels.codec.encode(kernels.values, *[None] * 5, 0, None, 0, None, 0, None) == 7


def test_what_is_refused_is_said(tmp_path, capsys):
    file = SPECS.parents[2] / "tests/compll/errors/E701_many_reductions.pse"
    assert main(["gen", str(file), "-o", str(tmp_path), "--target", "cuda"]) == 1
    assert "error[E701]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    # Of several codecs the others have theirs, and what an earlier version of it left is gone.
    (tmp_path / f"{file.stem}.cu").touch()
    assert main(["gen", str(file), str(SPECS / "onebit.pse"), "-o", str(tmp_path)]) == 0
    assert f"the rest was written, without {file.stem}.cu\n" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("*.cu")] == ["onebit.cu"]
    assert len(list(tmp_path.glob("*.codec.cc"))) == 2


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here: not compiled")
@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        # Has what the oldest kind of GPU lacks an instruction for.
        ("topk", "sm_75"),
        *(pytest.param(name, "sm_90", marks=pytest.mark.slow) for name in EVERY),
        *(pytest.param(name, "sm_75", marks=pytest.mark.slow) for name in EVERY if name != "topk"),
    ],
)
def test_nvcc_compiles(tmp_path, name, gpu):
    """To machine code of the oldest and a newer kind; `make build CUDA=1` does it for all."""
    file = tmp_path / f"{name}.cu"
    file.write_text(cuda.emit(optimise(spec(name))), encoding="ascii")
    flags = [flag for flag in NVCC_FLAGS if "gencode" not in flag]
    command = ["nvcc", *flags, f"-arch={gpu}", f"-I{include_folder()}"]
    if gpu == "sm_90":  # the other has room for fewer blocks than launch bounds wish for
        command += ["-Werror=all-warnings", "-shared"]
    else:  # what runs on the CPU is the same for both
        command.append("-cubin")
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "codec"), str(file)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
