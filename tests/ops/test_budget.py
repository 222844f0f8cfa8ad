# SPDX-License-Identifier: Apache-2.0
"""`budget(...)`: what it becomes for which model, and what is refused."""

import pytest

from tf_hips import ops
from tf_hips.ops.budgets import LADDER


def test_it_is_the_most_exact_that_fits() -> None:
    one = ops.budget(wan_mbps=10, max_sync_s=30)
    chosen = {
        n: one.for_sizes([n]).codec.name for n in (10**6, 10**7, 25 * 10**6, 10**8, 3 * 10**8)
    }
    assert list(chosen.values()) == ["fp32", "int8", "terngrad", "onebit", "topk"]
    for n in chosen:
        found = one.for_sizes([n])
        assert one.seconds(found, [n]) <= 30
        place = LADDER.index(next(text for text in LADDER if ops.parse(text) == found))
        assert place == 0 or one.seconds(ops.parse(LADDER[place - 1]), [n]) > 30


@pytest.mark.parametrize("n", [1000, 10**5, 10**7])
def test_the_ladder_goes_down(n: int) -> None:
    seconds = [ops.budget(1, 1).seconds(ops.parse(text), [n]) for text in LADDER]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == len(LADDER)
    for text in LADDER:
        assert ops.parse(text).for_sums == ops.parse(text)


def test_it_counts_up_and_down_and_every_gradient() -> None:
    one = ops.budget(wan_mbps=8, max_sync_s=1)  # a megabyte in a second
    exact = ops.parse("fp32")
    assert one.seconds(exact, [1000, 0, 5]) == 2e-6 * (exact.wire_bytes(1000) + exact.wire_bytes(5))
    assert one.for_sizes([124_000]).text == "fp32"
    assert one.for_sizes([126_000]).text == "fp16"
    assert one.for_sizes([62_000] * 2 + [2000]).text == "fp16"


def test_its_text_makes_it_again() -> None:
    for numbers in ((10, 30), (0.1, 1e5), (2.5, 0.001), (1 / 3, 7)):
        one = ops.budget(*numbers)
        assert ops.parse(one.text) == one
        assert one.is_budget
    assert ops.budget(10, 0.5).text == "budget(wan_mbps=10, max_sync_s=0.5)"
    assert one.wire_bytes_of((3, 5)) == one.wire_bytes(15)
    assert not ops.onebit().is_budget
    assert ops.onebit().for_sizes([3]) == ops.onebit()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("budget", "`wan_mbps` must be given"),
        ("budget(10)", "`max_sync_s` must be given"),
        ("budget(0, 1)", "`wan_mbps` must be in"),
        ("budget(1, 2, 3)", "takes 2 arguments"),
        ("error_feedback(budget(1, 2))", "must wrap a compressor"),
        ("warmup(budget(1, 2), steps=3)", "must wrap a compressor"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ops.parse(text)


def test_a_model_that_nothing_fits_says_how_long_it_takes() -> None:
    with pytest.raises(
        ValueError, match=r"topk\(ratio=0.001\)\), which takes 10.4 s for the 1000000000"
    ):
        ops.budget(10, 10).for_sizes([10**9])
    with pytest.raises(ValueError, match="no packets before"):
        ops.budget(10, 10).chunk_packet_bytes(3)
