# SPDX-License-Identifier: Apache-2.0
"""Rounds over one global server and over several that share the model.

Two parties, threads of this process, send packets to server processes. A job with one server and
one with several take turns, round by round. Over loopback all servers share the processors of one
machine, so this shows what sharing costs. With `--mbps` every server is a network namespace with a
link of that rate, in mutual TLS, and only the servers' links are slow: this shows what sharing
gains where a server's link is what a round waits for (needs root). Prints, and stores nothing:

    python -m benchmarks.shards [--rounds 15] [--elements 25000000] [--servers 2] [--mbps 100]
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

from benchmarks import network
from tf_hips.cli import certs
from tf_hips.config import Uplink
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.client.shards import connect

SITES = ("a", "b")
SMALL = 20  # tensors of 1000 elements beside the large one
START_S = 30.0
WARM_UP = 2


def main() -> int:
    """Measures, for two compressors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--mbps", type=float)
    options = parser.parse_args()
    shapes = [(options.elements,), *[(1000,)] * SMALL]
    print(f"compression             packets  1 server  {options.servers} servers   ratio (medians)")
    for text in ("error_feedback(onebit)", "fp32"):
        codec = compressors.parse(text).codec
        values = np.random.default_rng(0).standard_normal(options.elements, np.float32)
        packets = np.concatenate(
            [native.encode(codec, values[:size], native.Key(0, 0, 0)) for (size,) in shapes]
        )
        one, several = _measure(text, shapes, packets, options)
        ratio = statistics.median(b / a for a, b in zip(one, several, strict=True))
        print(
            f"{text:22} {packets.size / 2**20:5.1f} MiB "
            f"{1e3 * statistics.median(one):6.1f} ms {1e3 * statistics.median(several):7.1f} ms "
            f"  {ratio:5.2f}",
            flush=True,
        )
    return 0


def _measure(text, shapes, packets, options):
    """Seconds of each round: of one server, of several; all give the same bytes."""
    rounds, count = options.rounds, options.servers
    with contextlib.ExitStack() as stack:
        hosts = []
        if options.mbps is not None:
            hosts = stack.enter_context(network.network(1 + count, options.mbps)).hosts
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(SITES)))
        ways = [
            _joined(stack, pool, base, some, number, text, shapes)
            for number, some in ((1, hosts[:1]), (count, hosts[1:]))
        ]
        seconds = [[], []]
        for number in range(WARM_UP + rounds):
            merged = []
            for way, clients in enumerate(ways):
                began = time.perf_counter()
                found = pool.map(lambda one, number=number: one.exchange(number, packets), clients)
                merged += list(found)
                seconds[way].append(time.perf_counter() - began)
            if not all(np.array_equal(one, merged[0]) for one in merged):
                raise RuntimeError(f"round {number} differs between one server and {count}")
        return [each[WARM_UP:] for each in seconds]


def _joined(stack, pool, base, hosts, count, text, shapes):
    """The clients of new servers, on `hosts` or, without any, on loopback in plain text."""
    files = [base / f"{count}-{index}" for index in range(count)]
    identities = [None] * (1 + len(SITES))
    options = ["--insecure"]
    if hosts:
        folder = base / f"certificates-{count}"
        identities = certs.make(folder, server="hub", parties=SITES, days=1)
        own = identities[0]
        options = ["--authority", own.authority, "--certificate", own.certificate]
        options += ["--key", own.key]
    for index, file in enumerate(files):
        command = [sys.executable, "-m", "tf_hips.cli", "server", "--parties", ",".join(SITES)]
        command += ["--bind", f"{hosts[index].address if hosts else '127.0.0.1'}:0", *options]
        command += ["--announce", str(file), "--shard", f"{index}/{count}"]
        command = hosts[index].command(*command) if hosts else command
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        stack.callback(server.wait, 10)
        stack.callback(server.terminate)
    deadline = time.monotonic() + START_S
    while not all(file.exists() for file in files):
        if time.monotonic() > deadline:
            raise RuntimeError("a server did not start")
        time.sleep(0.05)
    address = ",".join(file.read_text().strip() for file in files)
    clients = [
        connect(Uplink(address, site, identity), "local", 1)
        for site, identity in zip(SITES, identities[1:], strict=True)
    ]
    for client in clients:
        stack.callback(client.close)
    list(pool.map(lambda one: one.join(text, "same", 7), clients))
    list(pool.map(lambda one: one.agree_model(shapes), clients))
    return clients


if __name__ == "__main__":
    sys.exit(main())
