# SPDX-License-Identifier: Apache-2.0
"""What share of a device copy a codec can reach: the bytes that must be moved, over those that its
kernels move. docs/gpu.md has both, and targets say which rows cannot meet them.
"""

import re
import tomllib

import numpy as np
import pytest

import compll
from benchmarks.gpu import shares
from tests.compll.support import SPECS, spec

pytestmark = pytest.mark.heavy  # encodes and decodes by the reference, all codecs

ROOT = SPECS.parents[2]
PAGE = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
NAMES = sorted(path.stem for path in SPECS.glob("*.pse"))
N = 1 << 18  # as in tests/compll/emulation/traffic.py
ROWS = ("encode", "encode, feedback", "decode", "decode, add", f"merge of {shares.NUM_MERGED}")


def lines(heading: str) -> dict[str, list[str]]:
    """The cells of the table that has this heading, by codec."""
    [table] = re.findall(rf"^\| {heading} \|.*\n\|[ -|]*\n((?:\|.*\n)*)", PAGE, flags=re.M)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return {name: rest for name, *rest in cells}


MOVED, REACHED = lines("bytes"), lines("at most")


def shape(program: compll.Program) -> shares.Shape:
    """Of the reference's packets."""
    x = np.random.default_rng(0).normal(size=N).astype(np.float32)
    reference, states = compll.Reference(program), len(program.state_names)
    state = np.zeros((states, N), np.float32) if states else None
    packets = reference.encode(x, state=state)
    return shares.Shape(N, packets.size, states, shares.sectors(reference.decode(packets, N)))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_tells_what_can_be_reached(name):
    bounds = shares.bounds(name, shape(spec(name)))
    for what, moved, reached in zip(ROWS, MOVED[name], REACHED[name], strict=True):
        if what not in bounds:
            assert (moved, reached) == ("-", "-")
            continue
        share = bounds[what] / N / float(moved)
        assert share <= 1.004, f"{what}: more than the kernels move"
        # The bytes of the page have two decimals.
        assert float(reached) == pytest.approx(min(share, 1), abs=0.011), f"{what}: {share:.3f}"


@pytest.mark.parametrize("ident", ["gpu-quantisers", "gpu-sparse"])
def test_a_target_tells_what_it_cannot_reach(ident):
    text = (ROOT / "benchmarks/targets.toml").read_text(encoding="utf-8")
    [target] = (one for one in tomllib.loads(text)["target"] if one["id"] == ident)
    is_sparse = "sparse" in ident
    below = {
        f"{name}'s {what} {reached}"
        for name in NAMES
        if (name in shares.SPARSE) == is_sparse
        for what, reached in zip(ROWS[:4], REACHED[name][:4], strict=True)
        if reached != "-" and float(reached) < target["at_least"]
    }
    told = set(re.findall(r"\w+'s (?:en|de)code(?:, feedback|, add)? 0\.\d\d", target["missed"]))
    assert told == below


def test_sectors_are_counted_whole():
    values = np.zeros(19, np.float32)
    assert shares.sectors(values) == 0
    values[[0, 7, 18]] = 1
    assert shares.sectors(values) == 2
    sparse = shares.Shape(n=1024, wire=64, states=0, sectors=3)
    assert shares.bounds("topk", sparse)["decode, add"] == 64 + 2 * 3 * 32
    assert shares.bounds("randomk", sparse)["encode"] == 64 + 3 * 32
    assert shares.bounds("tbq", sparse)["decode, add"] == 64 + 8 * 1024
