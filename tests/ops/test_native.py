# SPDX-License-Identifier: Apache-2.0
"""The native face: arguments, buffers, threads."""

import hashlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import tf_hips
from tests.ops.codecs import gradient
from tf_hips.errors import PacketError
from tf_hips.ops import CHUNK, Key, derive_seed, error_feedback, int8, native, onebit, terngrad

KEY = Key(seed=1, step=2, tensor_id=3)


def test_derived_seeds_are_frozen() -> None:
    digest = hashlib.sha256(b"7/worker/0").digest()
    assert derive_seed(7, "worker/0") == int.from_bytes(digest[:8], "little")
    roles = ["worker/0", "worker/1", "owner/0", "party/a", "server"]
    assert len({derive_seed(seed, role) for seed in (0, 1) for role in roles}) == 10


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", 1 << 64), ("seed", -1), ("step", 1 << 32), ("tensor_id", -1), ("offset", 1 << 63)],
)
def test_keys_are_checked(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"`{field}` must be in .* Received: {field}={value}"):
        Key(**{"seed": 0, "step": 0, "tensor_id": 0, field: value})


def test_wrong_arguments() -> None:
    x = gradient(16)
    feedback = error_feedback(onebit())
    with pytest.raises(TypeError, match=r"`x` must be a float32 array\. Received: float64"):
        native.encode(onebit(), x.astype(np.float64), KEY)
    with pytest.raises(TypeError, match="C-contiguous"):
        native.encode(onebit(), x[::2], KEY)
    with pytest.raises(ValueError, match="if and only if"):
        native.encode(onebit(), x, KEY, kept=x.copy())
    with pytest.raises(ValueError, match="if and only if"):
        native.encode(feedback, x, KEY)
    with pytest.raises(ValueError, match=r"`kept` must have 16 elements\. Received: 15"):
        native.encode(feedback, x, KEY, kept=np.zeros(15, np.float32))
    frozen = np.zeros(16, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        native.encode(feedback, x, KEY, kept=frozen)
    with pytest.raises(ValueError, match="`out` must be writable and have at least 26 bytes"):
        native.encode(onebit(), x, KEY, out=np.zeros(25, np.uint8))
    with pytest.raises(ValueError, match=r"at least 26 bytes\. Received: 26, writable=False"):
        native.encode(onebit(), x, KEY, out=np.frombuffer(bytes(26), np.uint8))
    packet = native.encode(onebit(), x, KEY)
    with pytest.raises(ValueError, match="`add` must come with `out`"):
        native.decode(onebit(), packet, 16, add=True)
    with pytest.raises(ValueError, match="`out` must have 16 elements"):
        native.decode(onebit(), packet, 16, out=np.zeros(17, np.float32))
    with pytest.raises(TypeError, match="contiguous uint8"):
        native.decode(onebit(), np.zeros(26, np.int8), 16)
    with pytest.raises(ValueError, match="at least one row"):
        native.merge(onebit(), [], 16)


@pytest.mark.parametrize("field", ["seed", "step", "tensor_id", "offset"])
@pytest.mark.parametrize("value", [1.5, True, "1", None])
def test_keys_are_integers(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"`{field}` must be an integer\. Received: {field}="):
        Key(**{"seed": 0, "step": 0, "tensor_id": 0, field: value})
    assert Key(np.uint64(1), np.int64(2), 3) == Key(1, 2, 3)


def test_numbers_of_elements_are_checked() -> None:
    packet = native.encode(onebit(), gradient(16), KEY)
    calls = (
        lambda n: native.wire_bytes(onebit(), n),
        lambda n: native.decode(onebit(), packet, n),
        lambda n: native.merge(onebit(), [packet], n),
        lambda n: native.merge_encode(onebit(), [packet], n, KEY),
    )
    for call in calls:
        for wrong in (-1, (1 << 48) + 1, 1 << 70):
            with pytest.raises(ValueError, match=rf"`n` must be in .* Received: n={wrong}$"):
                call(wrong)
        for wrong in (1.5, True, None, "16"):
            with pytest.raises(TypeError, match="`n` must be an integer"):
                call(wrong)
    # What is not there is not allocated for.
    for call in calls[1:3]:
        with pytest.raises(PacketError, match=r"must hold 1048576 elements\. Received: 16"):
            call(1 << 45)


def test_the_row_with_a_bad_body_is_named() -> None:
    good = native.encode(terngrad(), gradient(16), KEY)
    bad = good.copy()
    bad[16] = 3  # the width that TernGrad repeats in its body
    message = "row 2 of 4: terngrad.* contradicts the codec's parameters"
    with pytest.raises(PacketError, match=message):
        native.merge(terngrad(), [good, good, bad, bad], 16)
    with pytest.raises(PacketError, match=message):
        native.merge_encode(terngrad(), [good, good, bad, bad], 16, KEY)
    bad[0] = 0
    with pytest.raises(PacketError, match=r"row 1 of 2: .*must start with"):
        native.merge(terngrad(), [good, bad], 16)


def test_the_first_chunk_decides_which_row_is_named() -> None:
    """Whichever thread is first: chunk 0 of row 1 is at fault, and so is chunk 2 of row 0."""
    n = 3 * CHUNK
    good = native.encode(terngrad(), gradient(n), KEY)
    rows = [good.copy(), good.copy()]
    rows[1][16] = 3
    rows[0][2 * good.size // 3 + 16] = 3
    for _ in range(5):
        with pytest.raises(PacketError, match="row 1 of 2"):
            native.merge(terngrad(), rows, n)


def test_rows_of_an_array_are_merged() -> None:
    packet = native.encode(onebit(), gradient(16), KEY)
    expected = native.merge(onebit(), [packet, packet], 16)
    np.testing.assert_array_equal(native.merge(onebit(), np.stack([packet, packet]), 16), expected)
    with pytest.raises(ValueError, match="at least one row"):
        native.merge(onebit(), np.empty((0, 26), np.uint8), 16)


def test_every_status_has_a_text() -> None:
    """Those of both headers, so that a new one without a text is found."""
    folder = Path(tf_hips.__file__).parent / "cc/runtime"
    texts = []
    for header in ("codec.h", "api.h"):
        text = (folder / header).read_text(encoding="ascii")
        [text] = re.findall(r"enum TfHips\w*Status \{.*?\};", text, re.DOTALL)
        for name, number in re.findall(r"\b(TF_HIPS_[A-Z_]+) = (\d+)", text):
            texts.append(native._functions().status_text(int(number)))
            assert texts[-1] != b"unknown status", name
    assert len(texts) == len(set(texts)) == 18


@pytest.mark.heavy
@pytest.mark.parametrize("threads", ["abc", "0", "-1", "1.5", ""])
def test_a_number_of_threads_that_is_none_is_refused(threads: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from tf_hips import ops; ops.onebit().wire_bytes(1)"],
        env={**os.environ, "TF_HIPS_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 1
    expected = f"`TF_HIPS_NUM_THREADS` must be an integer, at least 1. Received: {threads!r}"
    assert expected in result.stderr


def test_every_kind_of_buffer_is_read_without_a_copy() -> None:
    x = gradient(100)
    packet = native.encode(terngrad(), x, KEY)
    values = native.decode(terngrad(), packet, 100)
    whole = b"left" + packet.tobytes() + b"right"
    for buffer in (
        packet.tobytes(),
        bytearray(packet.tobytes()),
        memoryview(packet),
        memoryview(whole)[4:-5],
    ):
        np.testing.assert_array_equal(native.decode(terngrad(), buffer, 100), values)


def test_given_buffers_are_used() -> None:
    x = gradient(100).reshape(10, 10)
    room = np.zeros(1000, np.uint8)
    packet = native.encode(onebit(), x, KEY, out=room)
    assert packet.base is room
    assert packet.size == onebit().wire_bytes(100)
    out = np.zeros(100, np.float32)
    assert native.decode(onebit(), packet, 100, out=out) is out
    assert native.merge(onebit(), [packet, packet], 100, out=out) is out
    np.testing.assert_array_equal(out, 2 * native.decode(onebit(), packet, 100))


@pytest.mark.heavy
def test_the_number_of_threads_changes_nothing() -> None:
    program = (
        "import hashlib, numpy as np; from tf_hips import ops; from tf_hips.ops import native\n"
        "x = np.random.default_rng(0).standard_normal(3 * ops.CHUNK + 7, np.float32)\n"
        "r = np.zeros_like(x); c = ops.error_feedback(ops.terngrad())\n"
        "p = native.encode(c, x, ops.Key(1, 2, 3), r)\n"
        "s = native.merge(c, [p, p, p], x.size)\n"
        "print(hashlib.sha256(p.tobytes() + r.tobytes() + s.tobytes()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TF_HIPS_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
        for threads in ("1", "3", "8")
    }
    assert len(digests) == 1


def test_threads_of_python_may_call_at_once() -> None:
    x = gradient(2 * CHUNK + 9)
    expected = native.encode(terngrad(), x, KEY)
    packets: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: packets.append(native.encode(terngrad(), x, KEY)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(packets) == 4
    assert all((packet == expected).all() for packet in packets)


def test_a_forked_child_makes_its_own_threads() -> None:
    program = (
        "import os, numpy as np; from tf_hips import ops; from tf_hips.ops import native\n"
        "x = np.ones(3 * ops.CHUNK, np.float32)\n"
        "p = native.encode(ops.onebit(), x, ops.Key(1, 2, 3))\n"
        "child = os.fork()\n"
        "q = native.encode(ops.onebit(), x, ops.Key(1, 2, 3))\n"
        "if not child: os._exit(0 if (p == q).all() else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    environment = {**os.environ, "TF_HIPS_NUM_THREADS": "3"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=30)


@pytest.mark.parametrize("compressor", [onebit(), int8(block=32)], ids=str)
def test_large_values_go_past_the_caches_to_any_place(compressor) -> None:
    n = (1 << 21) + 1001  # more than a core's caches hold
    packet = native.encode(compressor, gradient(n, seed=1), KEY)
    expected = native.decode(compressor, packet, n, out=np.zeros(n, np.float32), add=True)
    room = np.empty(n + 32, np.float32)
    for shift in (0, 1, 4, 15):  # a line of memory holds 16
        room[:] = 9
        native.decode(compressor, packet, n, out=room[shift : shift + n])
        assert np.array_equal(room[shift : shift + n], expected), shift
        assert (room[:shift] == 9).all() and (room[shift + n :] == 9).all(), shift


@pytest.mark.parametrize("rows", [3, 4, 9])
def test_large_sums_go_past_the_caches_to_any_place(rows: int) -> None:
    n = (1 << 21) + 1001
    packets = [native.encode(onebit(), gradient(n, seed=row), KEY) for row in range(rows)]
    expected = np.zeros(n, np.float32)
    for row, packet in enumerate(packets):
        native.decode(onebit(), packet, n, out=expected, add=row > 0)
    room = np.empty(n + 32, np.float32)
    for shift in (0, 1, 4, 15):
        room[:] = 9
        native.merge(onebit(), packets, n, out=room[shift : shift + n])
        assert np.array_equal(room[shift : shift + n], expected), shift
        assert (room[:shift] == 9).all() and (room[shift + n :] == 9).all(), shift
