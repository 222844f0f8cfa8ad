# SPDX-License-Identifier: Apache-2.0
"""Rounds of a server with and without `--state`: what it costs that a run is durable.

Two parties send packets to a server process over loopback, which is the fastest link there is, so
this is what durability costs at worst. Two servers, one of each kind, take turns, round by round.
The state goes to `--folder`, so that is the disk that is measured. Prints, and stores nothing:

    python -m benchmarks.state [--rounds 15] [--elements 8388608] [--folder DIR]
"""

import argparse
import concurrent.futures
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tf_hips.config import Uplink
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.client.client import Client

SITES = ("a", "b")
SMALL = 20  # tensors of 1000 elements beside the large one
START_S = 30.0
WARM_UP = 2


def main() -> int:
    """Measures, for two compressors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--folder")
    options = parser.parse_args()
    shapes = [(options.elements,), *[(1000,)] * SMALL]
    print("compression             packets  in memory   durable     ratio (median of the rounds')")
    for text in ("error_feedback(onebit)", "fp32"):
        compressor = compressors.parse(text)
        packets = np.concatenate(
            [
                native.encode(
                    compressor.codec,
                    np.random.default_rng(size).standard_normal(size, np.float32),
                    native.Key(0, 0, 0),
                )
                for (size,) in shapes
            ]
        )
        plain, durable = _measure(text, shapes, packets, options.rounds, options.folder)
        ratio = statistics.median(b / a for a, b in zip(plain, durable, strict=True))
        print(
            f"{text:22} {packets.size / 2**20:5.1f} MiB "
            f"{1e3 * statistics.median(plain):7.1f} ms {1e3 * statistics.median(durable):7.1f} ms "
            f"  {ratio:5.2f}"
        )
    return 0


def _measure(text, shapes, packets, rounds, folder):
    """Seconds of each round: without and with a state."""
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(SITES)))
        ways = [
            _joined(stack, pool, base / name, options, text, shapes)
            for name, options in (("plain", []), ("durable", ["--state", str(base / "state")]))
        ]
        seconds = [[], []]
        for number in range(WARM_UP + rounds):
            for way, clients in enumerate(ways):
                began = time.perf_counter()
                list(pool.map(lambda one, number=number: one.exchange(number, packets), clients))
                seconds[way].append(time.perf_counter() - began)
        return [each[WARM_UP:] for each in seconds]


def _joined(stack, pool, announce, options, text, shapes):
    """The clients of a new server."""
    command = [sys.executable, "-m", "tf_hips.cli", "server", "--parties", ",".join(SITES)]
    command += ["--bind", "127.0.0.1:0", "--insecure", "--announce", str(announce), *options]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    stack.callback(server.wait, 10)
    stack.callback(server.terminate)
    deadline = time.monotonic() + START_S
    while not announce.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the server did not start")
        time.sleep(0.05)
    address = announce.read_text().strip()
    clients = [Client(Uplink(address, site), "local", 1) for site in SITES]
    for client in clients:
        stack.callback(client.close)
    list(pool.map(lambda one: one.join(text, "same", 7), clients))
    list(pool.map(lambda one: one.agree_model(shapes), clients))
    return clients


if __name__ == "__main__":
    sys.exit(main())
