# SPDX-License-Identifier: Apache-2.0
"""What `make bench-codecs` concludes from its figures."""

import itertools

import numpy as np

from benchmarks import closing, codecs, codecs_bound, codecs_peers, harness


def figure(what: str, ratio: float, interval: str, codec: str = "onebit") -> dict:
    return codecs._row(codec, what, ratio, "share", interval=interval)


def of(identity: str, rows: list) -> dict:
    [row] = [row for row in codecs._targets(rows) if row["id"] == identity]
    return row


def test_a_target_counts_the_slowest_operation() -> None:
    rows = [figure("encode", 0.95, "0.94 - 0.96"), figure("decode", 0.87, "0.86 - 0.88")]
    slowest = of("codecs-share-onebit", rows)
    assert (slowest["measured"], slowest["met"]) == (0.87, "yes")
    rows.append(figure("decode, add", 0.84, "0.83 - 0.85"))
    assert of("codecs-share-onebit", rows)["met"] == "no"


def test_what_is_noisy_or_missing_does_not_meet_a_target() -> None:
    assert of("codecs-share-onebit", [figure("encode", 0.95, "0.70 - 1.20")])["met"] == codecs.BUSY
    assert of("codecs-share-onebit", [figure("encode", 1.4, "0.90 - 1.90")])["met"] == "yes"
    assert of("codecs-share-onebit", [figure("encode", 0.4, "0.30 - 0.50")])["met"] == "no"
    assert of("codecs-share-onebit", [figure("encode", 0.86, "0.84 - 0.88")])["met"] == "noisy"
    nothing = of("codecs-share-onebit", [])
    assert (nothing["measured"], nothing["met"]) == (None, closing.NOT_MEASURED)
    other = figure("encode", 0.95, "0.94 - 0.96", codec="tbq")
    assert of("codecs-share-onebit", [other])["met"] == closing.NOT_MEASURED


def test_who_is_faster_than_the_bound_meets_no_target() -> None:
    beaten = {**figure("decode", 1.2, "1.19 - 1.21"), "met": codecs_bound.TOO_LOW}
    rows = [figure("encode", 0.95, "0.94 - 0.96"), beaten]
    assert of("codecs-share-onebit", rows)["met"] == codecs_bound.TOO_LOW
    assert of("codecs-share-onebit", [beaten])["met"] == codecs_bound.TOO_LOW
    rows.append(figure("encode, feedback", 0.5, "0.49 - 0.51"))
    assert of("codecs-share-onebit", rows)["met"] == "no"


def test_every_kernel_moves_what_it_is_given_and_no_more() -> None:
    bound = codecs_bound.Bound(codecs_bound.build_helper(), threads=2)
    kinds = [range(bound._helper.num_ways(kind)) for kind in range(4)]
    room = np.zeros(300_001, np.uint8)
    kept = np.random.default_rng(0).integers(0, 256, 4 * 70_003, np.uint8)
    before = kept.copy()
    for ways in itertools.chain(*(_each(kinds, kind) for kind in range(4))):
        room[:] = 7
        streams = codecs_bound.Streams(before, 2, update=kept, write=room[5:-9])
        bound._seconds(streams, ways)
        assert (room[5:-9] == 1).all(), ways
        assert (room[:5] == 7).all() and (room[-9:] == 7).all(), ways
        assert (kept == before).all(), ways


def _each(kinds: list, kind: int) -> list:
    return [tuple(one if k == kind else 0 for k in range(4)) for one in kinds[kind]]


def test_the_interval_is_narrower_with_more_rounds() -> None:
    assert harness.interval([1.0]) == (1.0, 1.0)
    assert harness.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert harness.interval([float(value) for value in range(25)]) == (8.0, 16.0)


def test_peers_are_counted_thread_for_thread_and_at_their_best() -> None:
    def over(against: str, ratio: float) -> dict:
        return codecs._row("onebit", "encode", ratio, "x", against=against)

    numpy = [over(codecs_peers.NUMPY, 90.0), over(codecs_peers.NUMPY_ALONE, 50.0)]
    assert of("codecs-numpy-onebit", numpy)["measured"] == 50.0
    assert of("codecs-numpy-onebit", numpy[:1])["met"] == closing.NOT_MEASURED
    graph = [over(codecs_peers.TENSORFLOW, 9.0), over(codecs_peers.XLA, 4.0)]
    assert of("codecs-tensorflow-onebit", graph)["met"] == "no"


def test_peers_compute_the_same_ternary_levels() -> None:
    values = np.linspace(-1, 2, 30_001, dtype=np.float32)
    levels, low, high = codecs_peers.numpy_encoders()["terngrad"](values)
    assert (levels.dtype, levels.max(), low, high) == (np.uint8, 3, -1, 2)
    # Rounding is unbiased, so the mean of what is decoded is that of the values.
    decoded = low + (high - low) / 3 * levels
    assert abs(float(decoded.mean()) - 0.5) < 0.02
