# SPDX-License-Identifier: Apache-2.0
"""What `make bench-codecs` concludes from its figures."""

from benchmarks import codecs, harness


def figure(what: str, ratio: float, interval: str, codec: str = "onebit") -> dict:
    return codecs._row(codec, what, ratio, "share", interval=interval)


def of(identity: str, rows: list) -> dict:
    [row] = [row for row in codecs._targets(rows) if row["id"] == identity]
    return row


def test_a_target_counts_the_slowest_operation() -> None:
    rows = [figure("encode", 0.95, "0.94 - 0.96"), figure("decode", 0.86, "0.85 - 0.87")]
    slowest = of("codecs-share-onebit", rows)
    assert (slowest["measured"], slowest["met"]) == (0.86, "yes")
    rows.append(figure("decode, add", 0.84, "0.83 - 0.85"))
    assert of("codecs-share-onebit", rows)["met"] == "no"


def test_what_is_noisy_or_missing_does_not_meet_a_target() -> None:
    assert of("codecs-share-onebit", [figure("encode", 0.95, "0.70 - 1.20")])["met"] == "noisy"
    assert of("codecs-share-onebit", [figure("encode", 1.4, "0.90 - 1.90")])["met"] == "yes"
    assert of("codecs-share-onebit", [figure("encode", 0.4, "0.30 - 0.50")])["met"] == "no"
    assert of("codecs-share-onebit", [])["met"] == "no"
    other = figure("encode", 0.95, "0.94 - 0.96", codec="tbq")
    assert of("codecs-share-onebit", [other])["met"] == "no"


def test_the_interval_is_narrower_with_more_rounds() -> None:
    assert harness.interval([1.0]) == (1.0, 1.0)
    assert harness.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert harness.interval([float(value) for value in range(25)]) == (8.0, 16.0)
