# SPDX-License-Identifier: Apache-2.0
"""Codecs on the CPU: how near to the speed of memory, and how far ahead of what else there is.

    share   encode and decode of every codec, with and without error feedback, of 64 Mi floats on 2
            threads: the time of the fastest of several kernels that only move the bytes that must
            be moved (codecs_bound.py), over the codec's. More than 1.05 is no share: the bound is
            too low, which meets no target
    merge   16 packets decoded and added one after the other, over one merge of them; 16 Mi floats,
            and 64 Mi of what a target is about
    peers   encoders of GRACE in TensorFlow ops, and in NumPy (codecs_peers.py), over ours; 8 Mi
            floats. TensorFlow has as many threads as ours, and the faster of its two ways counts,
            plain or by XLA. NumPy has one: what counts is thread for thread, ours having one, too;
            "as used" ours have all
    calls   what a call on 16 floats takes, in the C library and as a TensorFlow op

Buffers lie on lines of 64 bytes, as TensorFlow's do, and not 256 MiB apart, as vectors of 64 Mi
floats would otherwise (docs/decisions/0077-processors-that-read-ahead.md); codecs with state have
63 Mi floats.

What is compared alternates, round by round; a result is the median of the rounds' ratios, and
`interval` holds the median of other rounds in nine cases of ten. What must be moved, in bytes per
element: 4 for each time that the gradient is read (twice where a scale or a threshold of the whole
chunk comes first: a chunk of 4 MiB after the other, whose end is still in a cache the second time),
the packet's share, 8 for the residual or a vector of state, 4 for an output that is written and 8
for one that is added to (of a sparse packet: for the lines of 64 bytes alone that have an element
of it, which lie side by side in the kernel; where it is decoded, zeros are written). A target of
`benchmarks/targets.toml` that speaks of several operations counts the slowest; an algorithm that is
not there does not meet its target.
"""

import argparse
import concurrent.futures
import ctypes
import functools
import math
import multiprocessing
import os
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import closing, codecs_peers, harness
from benchmarks.codecs_bound import TOO_LOW, Bound, Streams, build_helper

THREADS = 2
PARTS = ("share", "merge", "peers", "calls")
SIZE, PEER_SIZE, CALL_SIZE = 1 << 26, 1 << 23, 16
ROUNDS = 25
NUM_MERGED = 16
CALLS, OPS = 20000, 200

# How to write a codec that needs arguments, and for the others the defaults.
_TEXTS = {"terngrad": "terngrad(bitwidth=2)", "topk": "topk(ratio=0.01)"}
# How often an encoder must read the gradient, where not once (compression.md, section 6).
_READS = {"terngrad": 2, "topk": 2}
# What targets call sparsifiers.
_SPARSE = ("graddrop", "dgc", "topk")
# Adding a packet of these leaves most of the output alone.
_SCATTERED = (*_SPARSE, "bisparse", "randomk")
_LINE = 16  # floats
# Merges that a target is about.
_MERGED = ("onebit",)

# Buffers lie as far apart as those of models do: some processors find a line in their first-level
# cache by bits 6 to 27 of its address, and then hold one of two lines that differ in none of these.
_APART, _PERIOD, _LINE_BYTES = 9 << 20, 1 << 28, 64

Row = dict[str, Any]

BUSY = "too busy"
# Why nothing is stored.
_WHYS = {
    BUSY: "the machine was too busy to tell of",
    TOO_LOW: "codecs are faster than what bounds them",
    closing.NOT_MEASURED: "not measured",
}

# Columns of the two tables that are printed.
_FIGURES = ("codec", "what", "measured", "unit", "interval", "GB/s", "against", "met")
_TARGETS = ("id", "codec", "what", "measured", "target", "met")


def main() -> int:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of every comparison")
    parser.add_argument("--only", choices=PARTS, help="one part; nothing is stored")
    parser.add_argument("--codecs", nargs="+", help="some codecs; nothing is stored")
    parser.add_argument("--size", type=int, default=SIZE, help="floats; nothing is stored")
    arguments = parser.parse_args()
    # Read when the library makes its threads and when TensorFlow is imported.
    os.environ["TF_HIPS_NUM_THREADS"] = str(THREADS)
    os.environ.update({f"TF_NUM_{kind}_THREADS": str(THREADS) for kind in ("INTRAOP", "INTEROP")})
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    began = time.monotonic()
    bench = _Bench(arguments.rounds, arguments.size, arguments.codecs)
    rows = [row for part in PARTS if arguments.only in (None, part) for row in bench.part(part)]
    is_complete = (arguments.only, arguments.codecs, arguments.size) == (None, None, SIZE)
    is_complete = is_complete and arguments.rounds >= ROUNDS
    rows += _targets(rows)
    note = (
        f"{time.monotonic() - began:.0f} s, {THREADS} threads, {arguments.rounds} rounds. Ratios "
        "are medians of the rounds; what they are of: see the head of `benchmarks/codecs.py`."
    )
    bound = [row for row in rows if row["target"]]
    for why, text in _WHYS.items():
        if ids := [row["id"] for row in bound if row["met"] == why]:
            print(f"bench-codecs: {text}: {', '.join(ids)}")
    is_known = all(row["met"] not in _WHYS for row in bound)
    harness.show("codecs", [_only(row, _FIGURES) for row in rows if not row["target"]])
    harness.show("targets", [_only(row, _TARGETS) for row in bound])
    if is_complete and is_known:
        command = "make bench-codecs"
        harness.write("codecs", rows, command=command, note=note, is_shown=False, by_vectors=True)
    else:
        print("nothing is stored")
    num_met = sum(row["met"] == "yes" for row in bound)
    print(f"bench-codecs: {num_met} of {len(bound)} targets met")
    return 0


def _only(row: Row, columns: Sequence[str]) -> Row:
    """Some columns; arguments of a codec are left out where its target's id is there."""
    shown = {column: row[column] for column in columns}
    return {**shown, "codec": row["codec"].split("(")[0]} if "id" in columns else shown


def _room(place: int, size: int, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
    """Zeros; buffers of different places lie apart, each on a line of 64 bytes as in TensorFlow."""
    num_bytes = size * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + _PERIOD, np.uint8)
    begin = (place * _APART + _LINE_BYTES - raw.ctypes.data) % _PERIOD
    return raw[begin : begin + num_bytes].view(dtype)


def _row(codec: str, what: str, ratio: float | None, unit: str, **more: Any) -> Row:
    return {
        "id": "",
        "codec": codec,
        "what": what,
        "measured": ratio,
        "unit": unit,
        "interval": "",
        "GB/s": "",
        "against": "",
        "target": "",
        "met": "",
        **more,
    }


class _Bench:
    """The machine, the codecs and the buffers of one run."""

    def __init__(self, rounds: int, size: int, codecs: Sequence[str] | None) -> None:
        from tf_hips import ops

        self.rounds, self.size = rounds, size
        asked = [name for name in sorted(ops.REGISTRY) if not codecs or name in codecs]
        texts = {name: _TEXTS.get(name, name) for name in asked}
        # Codecs with state have no encoder without it: their share is measured, and nothing else.
        self.texts = {n: text for n, text in texts.items() if not ops.REGISTRY[n].state_names}
        self.stateful = [text for n, text in texts.items() if n not in self.texts]
        self.helper = build_helper()
        self.bound = Bound(self.helper, THREADS)

    def part(self, name: str) -> Iterator[Row]:
        """The rows of one part."""
        yield from getattr(self, f"_{name}")()

    def _compare(self, ours: Callable[[], Any], other: Callable[[], Any]) -> dict[str, Any]:
        """Other over ours: both are run once before, and then by turns."""
        return codecs_peers.compare(ours, other, self.rounds)

    def _share(self) -> Iterator[Row]:
        from tf_hips import ops
        from tf_hips.ops import native

        n = self.size
        gradient = _room(0, n)
        np.random.default_rng(0).standard_normal(n, dtype=np.float32, out=gradient)
        # What is compared uses the same arrays; the bounds of decoders write to `residual`.
        out, residual = _room(1, n), _room(2, n)
        key = native.Key(seed=1, step=2, tensor_id=3)
        for name, text in self.texts.items():
            plain, feedback = ops.parse(text), ops.parse(f"error_feedback({text})")
            packet = _room(3, plain.wire_bytes(n), np.uint8)
            reads = _READS.get(name, 1)
            encode = functools.partial(native.encode, plain, gradient, key, out=packet)
            keep = functools.partial(native.encode, feedback, gradient, key, residual, out=packet)
            # `write` is not read again, so that packets need not survive their bound.
            scrap = _room(4, packet.size, np.uint8)
            cases: dict[str, tuple[Callable[[], Any], Streams]] = {
                "encode": (encode, Streams(gradient, reads, write=scrap)),
                "encode, feedback": (
                    keep,
                    Streams(gradient, reads, update=residual, write=scrap),
                ),
            }
            for what, (ours, streams) in cases.items():
                residual[:] = 0
                yield self._share_row(text, what, ours, streams, n)
            yield from self._share_of_decoding(plain, text, packet, out, residual)

        for text in self.stateful:
            codec = ops.parse(text)
            # Less, so that the rows of a state, which follow one another, lie apart as well.
            n = self.size * 63 // 64
            packet, scrap = (_room(place, codec.wire_bytes(n), np.uint8) for place in (3, 4))
            shape = codec.state_shape((n,))
            state, scrap_state = (_room(place, math.prod(shape)).reshape(shape) for place in (5, 6))
            encode = functools.partial(native.encode, codec, gradient[:n], key, state, out=packet)
            scrap_state[:] = 1
            streams = Streams(gradient[:n], update=scrap_state, write=scrap)
            yield self._share_row(text, "encode", encode, streams, n)
            yield from self._share_of_decoding(codec, text, packet, out[:n], residual[:n])

    def _share_of_decoding(
        self, codec: Any, text: str, packet: np.ndarray, out: np.ndarray, scrap: np.ndarray
    ) -> Iterator[Row]:
        """Decodes to `out`; the bounds write to `scrap`."""
        from tf_hips.ops import native

        is_scattered = text.split("(")[0] in _SCATTERED
        decode = functools.partial(native.decode, codec, packet, out.size, out=out)
        streams = Streams(packet, write=scrap, is_empty=is_scattered)
        yield self._share_row(text, "decode", decode, streams, out.size)
        touched = out.size
        if is_scattered:
            lines = out[: out.size // _LINE * _LINE].reshape(-1, _LINE)
            touched = _LINE * int(np.count_nonzero(lines.any(axis=1)))
        scrap[:] = 1
        streams = Streams(packet, update=scrap[:touched])
        decode_add = functools.partial(decode, add=True)
        yield self._share_row(text, "decode, add", decode_add, streams, out.size)

    def _share_row(
        self, text: str, what: str, ours: Callable[[], Any], streams: Streams, size: int
    ) -> Row:
        result = self.bound.compare(ours, streams, self.rounds)
        return _row(
            text,
            what,
            result["ratio"],
            "share",
            interval=result["interval"],
            against=result["against"],
            met=result["met"],
            **{"GB/s": round(4 * size / result["seconds"] / 1e9, 2)},
        )

    def _merge(self) -> Iterator[Row]:
        from tf_hips import ops
        from tf_hips.ops import native

        for name, text in self.texts.items():
            # A quarter of it, which takes a quarter of the time, where no target asks for more.
            n = self.size if name in _MERGED else self.size // 4
            gradient = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
            out = np.zeros(n, np.float32)
            codec = ops.parse(text)
            packets = [
                native.encode(codec, gradient, native.Key(seed=row, step=0, tensor_id=0))
                for row in range(NUM_MERGED if codec.wire_bytes(n) < n else 4)
            ]

            def one_by_one(
                codec: Any = codec, packets: list[Any] = packets, out: np.ndarray = out
            ) -> None:
                for row, packet in enumerate(packets):
                    native.decode(codec, packet, out.size, out=out, add=row > 0)

            result = self._compare(
                functools.partial(native.merge, codec, packets, n, out=out), one_by_one
            )
            yield _row(
                text,
                f"merge of {len(packets)}",
                result["ratio"],
                "x",
                interval=result["interval"],
                against="one by one",
                **{"GB/s": round(4 * n / result["seconds"] / 1e9, 2)},
            )

    def _peers(self) -> Iterator[Row]:
        import tensorflow as tf

        n = min(PEER_SIZE, self.size)
        gradient = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
        # TensorFlow's threads would be in the way of others.
        found = {codecs_peers.NUMPY: codecs_peers.compare_numpy(self.texts, n, self.rounds)}
        with concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), codecs_peers.alone
        ) as other:
            called = other.submit(codecs_peers.compare_numpy, self.texts, n, self.rounds)
            found[codecs_peers.NUMPY_ALONE] = called.result(timeout=600)
        for title in (codecs_peers.TENSORFLOW, codecs_peers.XLA):
            encoders = codecs_peers.tensorflow_encoders(title == codecs_peers.XLA)
            tensor = tf.constant(gradient)
            found[title] = codecs_peers.compare_encoders(
                encoders, self.texts, gradient, tensor, self.rounds
            )
        for title, results in found.items():
            for name, result in results.items():
                yield _row(
                    self.texts[name],
                    "encode",
                    result["ratio"],
                    "x",
                    interval=result["interval"],
                    against=title,
                    **{"GB/s": round(4 * n / result["seconds"] / 1e9, 2)},
                )

    def _calls(self) -> Iterator[Row]:
        for name, text in self.texts.items():
            encode, decode = self._c_calls(name, text)
            for what, seconds in (("encode", encode), ("decode", decode)):
                yield _row(text, what, 1e6 * seconds, "us", against="a call in C")
            if name in ("onebit", "terngrad"):
                yield _row(text, "encode", 1e6 * self._op_seconds(text), "us", against="an op")

    def _c_calls(self, name: str, text: str) -> tuple[float, float]:
        """Seconds of an encode and of a decode in the C library."""
        from tf_hips import ops
        from tf_hips.ops import library

        native = library.native()
        native.tf_hips_find_codec.restype = ctypes.c_void_p
        codec = ctypes.c_void_p(native.tf_hips_find_codec(name.encode()))
        compressor = ops.parse(text)
        values = [float(value) for _, value in compressor.params]
        params = (ctypes.c_double * max(1, len(values)))(*values)
        gradient = np.linspace(-1, 1, CALL_SIZE, dtype=np.float32)
        packet = np.zeros(compressor.wire_bytes(CALL_SIZE), np.uint8)
        seconds = []
        for function in ("encode", "decode"):
            call = getattr(self.helper, f"{function}_seconds")
            entry = ctypes.cast(getattr(native, f"tf_hips_{function}"), ctypes.c_void_p)
            sides = (gradient.ctypes.data, CALL_SIZE), (packet.ctypes.data, packet.size)
            first, second = sides if function == "encode" else sides[::-1]
            found = [
                call(entry, codec, params, first[0], first[1], second[0], second[1], CALLS)
                for _ in range(self.rounds)
            ]
            if min(found) < 0:
                raise RuntimeError(f"{function} of {text} must work. Received: a failure")
            seconds.append(statistics.median(found))
        return seconds[0], seconds[1]

    def _op_seconds(self, text: str) -> float:
        """What an encode with feedback costs in a graph of many in a row, the call of it included.

        Each takes the residual of the one before: ops whose results nobody needs would be pruned.
        """
        import tensorflow as tf

        from tf_hips import ops
        from tf_hips.ops import graph

        codec = ops.parse(f"error_feedback({text})")

        @tf.function
        def run(x: Any) -> Any:
            residual = tf.zeros_like(x)
            for tensor_id in range(OPS):
                _, residual = graph.encode(
                    codec, x, seed=1, step=2, tensor_id=tensor_id, kept=residual
                )
            return residual

        x = tf.constant(np.linspace(-1, 1, CALL_SIZE, dtype=np.float32))
        for _ in range(3):
            run(x)
        return statistics.median(
            codecs_peers.seconds(lambda: run(x)) / OPS for _ in range(self.rounds)
        )


def _targets(rows: list[Row]) -> list[Row]:
    """One row per target of the issue that this program measures; missing figures are misses."""
    path = harness.ROOT / "benchmarks/targets.toml"
    targets = tomllib.loads(path.read_text(encoding="utf-8"))["target"]
    found = []
    for target in targets:
        if target["command"] != "make bench-codecs":
            continue
        figures = _figures(target["id"], rows)
        is_least = "at_least" in target
        limit = target["at_least"] if is_least else target["at_most"]
        sign = ">=" if is_least else "<="
        if not figures:
            row = _row("", closing.NOT_MEASURED, None, target["unit"])
            row["met"] = closing.NOT_MEASURED
        else:
            worst = (min if is_least else max)(figures, key=lambda row: row["measured"])
            met = harness.verdict(worst, target)
            if harness.is_noisy(worst, limit):
                met = BUSY
            elif met != "no" and any(one["met"] == TOO_LOW for one in figures):
                met = TOO_LOW  # what the codec's other operations are worth is not known then
            row = {**worst, "unit": target["unit"], "met": met}
        found.append({**row, "id": target["id"], "target": f"{sign} {limit} {target['unit']}"})
    return found


def _figures(identity: str, rows: list[Row]) -> list[Row]:
    """The rows that a target is about: codecs-share-NAME, -merge-NAME, -PEER-NAME, -call-PLACE."""
    _, kind, which = identity.split("-", 2)
    names = {"sparse": _SPARSE}.get(which, (which,))
    own = [row for row in rows if row["codec"].split("(")[0] in names]
    match kind:
        case "share":
            return [row for row in own if row["unit"] == "share"]
        case "merge":
            return [row for row in own if row["what"].startswith("merge")]
        case "tensorflow" | "numpy":
            peers = {
                "tensorflow": (codecs_peers.TENSORFLOW, codecs_peers.XLA),
                "numpy": (codecs_peers.NUMPY_ALONE,),
            }
            return [row for row in own if row["against"] in peers[kind]]
        case "call":
            title = {"c": "a call in C", "op": "an op"}[which]
            return [row for row in rows if row["against"] == title]
    raise ValueError(f"a target of bench-codecs must be known. Received: {identity}")


if __name__ == "__main__":
    sys.exit(main())
