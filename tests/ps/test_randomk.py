# SPDX-License-Identifier: Apache-2.0
"""random-k at servers: parties, party servers and the topmost one draw the same in a round."""

import numpy as np
import numpy.typing as npt
import pytest

from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ops.compressor import CHUNK
from tf_hips.ps import rules
from tf_hips.ps.rounds.asynchronous import AsynchronousStore
from tf_hips.ps.rounds.periods import Above, PeriodicStore
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.terms.model import Model

SEED = 7
MODEL = Model(((3, 50), (0,), (CHUNK + 999,), (170,)))
SITES = ("a", "b")
CHUNKS = range(len(MODEL.chunks))
EVERYWHERE = pytest.mark.parametrize(
    "text",
    ["randomk", "error_feedback(randomk)", "mixed(warmup(randomk, steps=4), below=160)"],
)


def sent(text: str, site: str, number: int, chunk: int) -> npt.NDArray[np.uint8]:
    """The packet of a party whose gradient is 1 everywhere."""
    codec, where = compressors.parse(text), MODEL.chunks[chunk]
    key = native.Key(codec.encoder_seed(SEED, f"party/{site}"), number, where.tensor, where.offset)
    return native.encode(codec_of(text, number, chunk), np.ones(where.size, np.float32), key)


def codec_of(text: str, number: int, chunk: int) -> compressors.Compressor:
    return MODEL.codec(compressors.parse(text).at(number), chunk).codec


def decoded(text: str, number: int, chunk: int, packet: npt.NDArray[np.uint8]) -> npt.NDArray:
    return native.decode(codec_of(text, number, chunk), packet, MODEL.chunks[chunk].size)


@EVERYWHERE
@pytest.mark.parametrize("site", [None, "west"])
def test_sums_come_back_whole(text: str, site: str | None) -> None:
    """Or go up whole, from a server below another one."""
    codec = compressors.parse(text)
    store = Store(MODEL, SITES, codec, codec, SEED, site=site)
    for number in (0, 1, 5):
        if number == 5:
            store = Store(MODEL, SITES, codec, codec, SEED, first_round=5, site=site)
        store.begin(number)
        for child, name in enumerate(SITES):
            for chunk in CHUNKS:
                store.add(number, child, [(chunk, sent(text, name, number, chunk))])
        made = (store.results if site is None else store.ups)(number, 0)[1]
        assert len(made) == len(CHUNKS)
        for chunk, packet in made:
            row = decoded(text, number, chunk, sent(text, "a", number, chunk))
            np.testing.assert_array_equal(decoded(text, number, chunk, packet), 2 * row)
            if site is not None:
                store.finish(number, chunk, packet)


@EVERYWHERE
def test_updates_of_children_that_wait_for_nobody_come_back_whole(text: str) -> None:
    codec = compressors.parse(text)
    above = Above("west", codec, codec, 1, is_mean=False)
    more = (MODEL, SITES, codec, codec, SEED, rules.parse("asgd(1.0)"))
    for store in (AsynchronousStore(*more), PeriodicStore(*more, above=above)):
        lane = store.of(1)
        lane.begin(0)
        for chunk in CHUNKS:
            lane.add(0, 1, [(chunk, sent(text, "b", 0, chunk))])
        assert lane.is_merged(0)
        wanted = [decoded(text, 0, chunk, sent(text, "b", 0, chunk)) for chunk in CHUNKS]
        for chunk, packet in lane.results(0, 0)[1]:
            np.testing.assert_array_equal(abs(decoded(text, 0, chunk, packet)), wanted[chunk])
        if isinstance(store, PeriodicStore):
            for chunk, wants in zip(CHUNKS, wanted, strict=True):
                _, packet = store._on_way[0, chunk]
                np.testing.assert_array_equal(abs(decoded(text, 0, chunk, packet)), wants)
