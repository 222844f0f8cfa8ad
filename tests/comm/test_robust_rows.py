# SPDX-License-Identifier: Apache-2.0
"""`robust_rows`: what comes of other ranks may be anything, and decides about its row only."""

import numpy as np
import pytest

from tf_hips import robust
from tf_hips.comm import robust_rows
from tf_hips.comm.robust_rows import BROKEN, NOT_FINITE, SOUND, TOO_LONG, Decider, Share
from tf_hips.errors import ToleranceError
from tf_hips.ops import native
from tf_hips.ops.compressor import Compressor, parse

SIZES = (5, 1, 300)
NUM_RANKS = 5
RULES = ("median(f=2)", "mean", "cge(f=2)", "nnm(f=2) >> trimmed_mean(f=2)", "geometric_median")


def _rows(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(NUM_RANKS, sum(SIZES))).astype(np.float32)


def _lines(num_floats: int) -> int:
    return -(-num_floats // 16) * 16


def _received(rows: np.ndarray, compressor: Compressor | None) -> np.ndarray:
    """What comes of each rank: packets of all pieces, and a byte for each; or the values."""
    sent = []
    for rank, row in enumerate(rows):
        parts = np.split(row, np.cumsum(SIZES)[:-1])
        if compressor is None:
            padded = [np.pad(part, (0, _lines(part.size) - part.size)) for part in parts]
            sent.append(np.concatenate(padded))
            continue
        packets = [
            native.encode(compressor, np.ascontiguousarray(part), native.Key(rank, 0, place))
            for place, part in enumerate(parts)
        ]
        sent.append(np.concatenate([*packets, np.zeros(len(SIZES), np.uint8)]))
    return np.stack(sent)


def _share(rule: str, text: str | None = "fp32", scale: float = 1.0) -> Share:
    """Pieces of packets, or None: of values."""
    if text is None:
        rooms = tuple(_lines(size) for size in SIZES)
        return Share(SIZES, rooms, rooms, None, robust.parse(rule), NUM_RANKS, scale)
    compressor = parse(text)
    lengths = tuple(compressor.chunk_packet_bytes(size) for size in SIZES)
    return Share(SIZES, lengths, SIZES, compressor, robust.parse(rule), NUM_RANKS, scale)


def _of_pieces(share: Share, results: np.ndarray) -> np.ndarray:
    """Results without what lies between them."""
    begins = np.cumsum([0, *share.rooms[:-1]])
    return np.concatenate(
        [results[begin : begin + size] for begin, size in zip(begins, SIZES, strict=True)]
    )


def _result(share: Share, received: np.ndarray) -> tuple[np.ndarray, list[robust_rows.Refused]]:
    """The result of the rule, and who is refused."""
    # One array of all ranks, or one array of each.
    given = [received.reshape(-1)] if share.compressor else list(received)
    if share.rule.is_coordinate:
        results, faults = share.merged(*given)
        return _of_pieces(share, results), robust_rows.by_rank(faults, [7, 8, 9])
    decider = Decider(share.rule, NUM_RANKS, seed=3)
    measures = share.measured(*given)
    results = share.applied(*given, decision=decider(measures, 0))
    return _of_pieces(share, results), decider.refused(measures, [7, 8, 9])


@pytest.mark.parametrize("rule", RULES)
def test_what_cannot_be_a_row_is_refused_and_named(rule: str) -> None:
    share = _share(rule)
    rows = _rows()
    clean, nobody = _result(share, _received(rows, share.compressor))
    assert nobody == []
    without = share.rule.run(np.delete(rows, 1, axis=0), missing=1, seed=3).vector

    first = sum(share.lengths[:2])
    broken, declared, spoilt = (_received(rows, share.compressor) for _ in range(3))
    broken[1, first : first + 4] ^= 0xFF  # the magic number of the last piece
    declared[1, sum(share.lengths) + 2] = 1
    bad = rows.copy()
    bad[1, -1] = np.inf
    spoilt = _received(bad, share.compressor)
    for received, fault in ((broken, BROKEN), (declared, NOT_FINITE), (spoilt, NOT_FINITE)):
        found, [refused] = _result(share, received)
        assert (refused.rank, refused.tensors) == (1, (9,))
        assert refused.reason == robust_rows.REASONS[fault]
        last = slice(sum(SIZES[:2]), None)
        np.testing.assert_allclose(found[last], without[last], rtol=1e-5, atol=1e-6)
        if share.rule.is_coordinate:  # the other pieces are as they were
            np.testing.assert_array_equal(found[: last.start], clean[: last.start])
        else:
            np.testing.assert_allclose(found, without, rtol=1e-5, atol=1e-6)

    bad[1, -1] = 3e18
    found, [refused] = _result(share, _received(bad, share.compressor))
    assert np.isfinite(found).all()
    assert refused.rank == 1
    assert "1e+18" in refused.reason or refused.reason == robust_rows.REASONS[TOO_LONG]


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize("rule", RULES)
def test_values_have_the_results_of_packets(rule: str, scale: float) -> None:
    """Also where a piece of a row is refused, which is then left out of that piece alone."""
    packets, values = _share(rule, "fp32", scale), _share(rule, None, scale)
    rows = _rows()
    for rank, element, value in ((0, 0, 1.0), (1, -1, np.nan), (3, 5, np.inf), (2, 7, 3e18)):
        bad = rows.copy()
        bad[rank, element] = value
        expected, refused = _result(packets, _received(bad, packets.compressor))
        received = _received(bad, None)
        found, also = _result(values, received)
        np.testing.assert_array_equal(found, expected)
        assert also == refused
        # What lies between pieces is no part of a row.
        received[:, _lines(SIZES[0]) - 1] = [np.nan, np.inf, 1e30, -1e30, 0.0]
        found, also = _result(values, received)
        np.testing.assert_array_equal(found, expected)
        assert also == refused


@pytest.mark.parametrize("text", [None, "fp32"])
def test_in_one_piece_nothing_is_absurd_beside_the_others(text: str | None) -> None:
    """The gradient of a bias is almost 0 on most ranks, and not on one."""
    share, rows = _share("median(f=2)", text), _rows() * np.float32(1e-6)
    rows[4] += 1
    found, refused = _result(share, _received(rows, share.compressor))
    assert refused == []
    np.testing.assert_array_equal(found, np.median(rows, axis=0))


@pytest.mark.parametrize("rule", RULES)
def test_too_few_rows_give_zeros_and_everyone_finds_out(rule: str) -> None:
    share, rows = _share(rule), _rows()
    rows[:3] = np.nan
    if rule in ("mean", "geometric_median"):
        rows[:] = np.nan
    found, refused = _result(share, _received(rows, share.compressor))
    np.testing.assert_array_equal(found, np.zeros(sum(SIZES), np.float32))
    with pytest.raises(ToleranceError, match=f"{len(refused)} (missing|refused)"):
        robust_rows.check(share.rule, NUM_RANKS, len(refused))


def test_a_lying_owner_of_chunks_cannot_make_the_decision_anything_else() -> None:
    """Partial distances that cannot be are cut to what can; the result is a mean of rows."""
    for rule in RULES[2:]:
        share, rows = _share(rule), _rows()
        received = _received(rows, share.compressor).reshape(-1)
        honest = share.measured(received)
        pairs = slice(NUM_RANKS, -NUM_RANKS)
        for value in (np.nan, np.inf, -np.inf, -1.0, 1e300):
            lying = honest.copy()
            lying[1, pairs] = value
            decider = Decider(share.rule, NUM_RANKS, seed=3)
            decision = decider(lying, 0)
            assert decision is not None
            np.testing.assert_allclose(decision.mixing.sum(axis=1), 1.0, rtol=1e-6)
            found = share.applied(received, decision=decision)
            assert (found <= rows.max(axis=0) + 1e-5).all(), (rule, value)
            assert (found >= rows.min(axis=0) - 1e-5).all(), (rule, value)
            assert decider.refused(lying, [7, 8, 9]) == []
        # It can say that an honest row is no row. That is told, with its name.
        for value in (1.7e308, 1e38, np.inf):
            lying = np.tile(honest, (2, 1))  # two such values have no sum that is a float64
            lying[:, 0] = value
            [refused] = Decider(share.rule, NUM_RANKS, seed=3).refused(lying, [7, 8, 9])
            assert (refused.rank, refused.tensors) == (0, ())
        for fault in (1e9, np.nan):
            lying = honest.copy()
            lying[1, 0], lying[1, -NUM_RANKS] = np.nan, fault
            [refused] = Decider(share.rule, NUM_RANKS, seed=3).refused(lying, [7, 8, 9])
            assert (refused.rank, refused.tensors) == (0, (8,))


def test_a_decision_is_made_once_in_a_step() -> None:
    share = _share("bucketing(s=2) >> geometric_median")
    measures = share.measured(_received(_rows(), share.compressor).reshape(-1))
    decider = Decider(share.rule, NUM_RANKS, seed=3)
    assert decider(measures, 0) is decider(measures.copy(), 0)
    drawn = {decider(measures, step).mixing.tobytes() for step in range(8)}
    assert len(drawn) > 1, "what is drawn depends on the step"


def test_faults_of_several_pieces_are_of_one_rank() -> None:
    faults = np.full((3, 4), SOUND, np.uint8)
    faults[2, 1], faults[0, 1], faults[1, 3] = BROKEN, NOT_FINITE, 77
    found = robust_rows.by_rank(faults, [5, 2, 4])
    assert [(one.rank, one.reason, one.tensors) for one in found] == [
        (1, robust_rows.REASONS[BROKEN], (4, 5)),
        (3, "an unknown fault", (2,)),
    ]
    assert robust_rows.most_refused(faults) == 1
    assert robust_rows.most_refused(faults[:0]) == 0
