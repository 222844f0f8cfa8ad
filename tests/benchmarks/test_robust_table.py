# SPDX-License-Identifier: Apache-2.0
"""The table of `make bench-robust`: who lies, what is refused, and what real servers make of it."""

import contextlib
import json

import numpy as np
import pytest

from benchmarks import robust, robust_levels, robust_processes, robust_table
from benchmarks.robust_levels import (
    ATTACKS,
    CODECS,
    LENGTH,
    LEVELS,
    MEMBERS,
    MORE_CODECS,
    PARTIES,
    Cell,
    Encoder,
    Fleet,
    Merger,
    Trainee,
    members_of,
)
from benchmarks.robust_processes import CELLS
from benchmarks.robust_table import NONE, RULES, Line, Trainer
from tests.ps.parties import serving, together
from tf_hips.config import Uplink
from tf_hips.ops import native
from tf_hips.ps import rules
from tf_hips.ps.client.client import Client

pytestmark = pytest.mark.heavy  # trainings

MEDIAN = Cell("median", "global", "onebit", "alie")


@pytest.mark.parametrize("seed", range(4))
def test_as_many_lie_as_the_rules_bear(seed: int) -> None:
    for level, num_parties, num_workers in (("party", 0, 5), ("global", 1, 0), ("both", 1, 4)):
        cell = Cell("median", level, "none", "constant")
        parties, workers = robust_levels.liars(cell, seed)
        assert (len(parties), len(workers)) == (num_parties, num_workers)
        for party in range(PARTIES):
            lying = workers & {*members_of(party)}
            assert len(lying) == (level != "global" and party not in parties)
        honest = robust_levels.liars(Cell("median", level, "none", NONE), seed)
        assert honest == (frozenset(), frozenset())


def test_what_the_package_refuses_is_refused_with_its_reason() -> None:
    for text in RULES:
        for level in LEVELS:
            for codec in CODECS:
                Cell(text, level, codec, NONE).why_not()
    assert Cell("mean", "both", "dgc", NONE).why_not() is None
    assert "2 f + 3" in (Cell("krum(f=1)", "party", "none", NONE).why_not() or "")
    assert Cell("geometric_median(f=1)", "both", "dgc", NONE).why_not() is None
    assert "4 f + 3" in (Cell("bulyan(f=1)", "global", "none", NONE).why_not() or "")
    for text in ("median", "krum(f=1)", "nnm(f=1) >> trimmed_mean(f=1)"):
        assert "packets of all elements" in (Cell(text, "global", "dgc", NONE).why_not() or "")
    assert Cell("median", "global", "onebit", "scale").why_not() is None
    assert "no scale" in (Cell("median", "global", "none", "scale").why_not() or "")
    for codec in MORE_CODECS:
        assert Cell("median", "both", codec, NONE).why_not() is None


def test_a_server_refuses_what_the_table_says_is_refused() -> None:
    for text in RULES:
        for codec in CODECS:
            cell = Cell(text, "global", codec, NONE)
            with contextlib.suppress(ValueError):  # a server does not know the rule
                theirs = rules.why_not(text, PARTIES, cell.compressor.for_sums.text)
                assert (theirs is None) == (cell.why_not() is None), cell


@pytest.mark.parametrize("codec", CODECS)
def test_a_party_alone_sends_what_it_sends_among_all(codec: str) -> None:
    cell = Cell("geometric_median(f=1)", "global", codec, "min-sum")
    whole, trainee = Fleet(cell, 3), Trainee(cell, 3)
    alone = {party: Fleet(cell, 3) for party in range(PARTIES)}
    for step in range(3):
        packets = whole.packets(trainee.weights, step, trainee.before, range(PARTIES))
        for party, fleet in alone.items():
            mine = fleet.packets(trainee.weights, step, trainee.before, [party])[party]
            assert mine.tobytes() == packets[party].tobytes()
        above = Merger(cell.rule, whole.for_sums, 3)
        trainee.step(above.merged([packets[party] for party in range(PARTIES)], step))


def test_residuals_are_kept_of_honest_packets_only() -> None:
    row = np.random.default_rng(0).standard_normal(LENGTH).astype(np.float32)
    for text in CODECS:
        compressor = Cell("mean", "global", text, NONE).compressor
        lying, honest = Encoder(compressor, 1, "worker/0"), Encoder(compressor, 1, "worker/0")
        lying.lie(row * 100, 0)
        assert lying.packet(row, 1).tobytes() == honest.packet(row, 1).tobytes()
        again = lying.packet(row, 1).tobytes()
        assert (again == honest.packet(row, 1).tobytes()) and compressor.has_state == (
            text != "none"
        )


def test_a_rule_helps_where_it_is_and_a_mean_does_not() -> None:
    for level in LEVELS:
        attacked = [
            robust_levels.trained(Cell(rule, level, "onebit", "reversed"), 0, 60)
            for rule in ("mean", "median")
        ]
        assert attacked[0] < 40 < 75 < attacked[1]


def test_a_real_server_gives_the_bits_of_the_table() -> None:
    seed, steps = 5, 4
    sites = tuple(f"s{party}" for party in range(PARTIES))
    wanted = Trainee(MEDIAN, seed)
    fleet, down = Fleet(MEDIAN, seed), Encoder(Fleet(MEDIAN, seed).for_sums, seed, "server")
    above = Merger("median", fleet.for_sums, seed)
    for step in range(steps):
        up = fleet.packets(wanted.weights, step, wanted.before, range(PARTIES))
        packet = down.packet(above.merged([up[party] for party in range(PARTIES)], step), step)
        wanted.step(native.decode(down.compressor, packet, LENGTH))

    with serving(None, parties=sites, insecure=True, rule="median") as server:

        def train(party: int) -> bytes:
            mine, trainee = Fleet(MEDIAN, seed), Trainee(MEDIAN, seed)
            client = Client(Uplink(server.address, sites[party], None, 20.0), "local", MEMBERS)
            try:
                client.join(mine.for_sums.text, "same", seed, "median")
                client.agree_model([(LENGTH,)])
                for step in range(steps):
                    up = mine.packets(trainee.weights, step, trainee.before, [party])[party]
                    merged = client.exchange(step, up)
                    trainee.step(native.decode(mine.for_sums, merged, LENGTH))
            finally:
                client.close()
            return trainee.weights.tobytes()

        found = together(*(lambda party=party: train(party) for party in range(PARTIES)))
    assert {*found} == {wanted.weights.tobytes()}


def test_a_line_says_what_is_clean_and_what_is_worst() -> None:
    accuracy = {name: 90.0 - place for place, name in enumerate(ATTACKS)}
    line = Line("krum(f=1)", "global", "onebit", None, accuracy)
    worst = [*ATTACKS][-1]
    assert (line.worst, line.shown) == (worst, f"90.0 / {90 - len(ATTACKS) + 1:.1f} {worst}")
    row = robust_table._row(line)
    assert (row["measured"], row["unit"]) == (90 - len(ATTACKS) + 1, "%")
    refused = robust_table._row(Line("krum(f=1)", "party", "none", "needs more", {}))
    assert (refused["unit"], refused["against"]) == ("refused", "needs more")
    robust_table.show([line])
    shown = f"| `krum(f=1)` | global | {line.shown} |\n"
    assert robust_table.markdown([line]) == shown


def test_all_rows_of_the_part_and_its_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = dict.fromkeys(ATTACKS, 80.0)
    fake = [Line(*(one.rule, one.level, one.codec), None, accuracy) for one in CELLS]
    fake.append(Line("krum(f=1)", "party", "none", "needs more", {}))
    monkeypatch.setattr(robust_table, "lines", lambda seeds: (fake, [0.2, 0.3, 0.9]))
    monkeypatch.setattr(robust_processes, "trained", lambda cell, seed: 80.0 + seed)
    rows = list(robust.PARTS["table"](9, 10**9))
    assert len({tuple(row) for row in rows}) == 1
    about = {row["about"]: row["measured"] for row in rows if row["about"]}
    assert about["robust-table-run"] == 0.3
    assert about["robust-table-processes"] == 1.0
    assert about["robust-table-minutes"] < 0.1
    assert len(rows) == 4 + 2 + 2 * len(CELLS)


def test_a_trainer_answers_with_means_over_seeds() -> None:
    cell = {"rule": "median", "level": "party", "codec": "none", "attack": NONE}
    answer = Trainer().train([cell], [0, 1], 5)
    each = [robust_levels.trained(Cell(**cell), seed, 5) for seed in (0, 1)]
    assert answer["accuracies"] == [np.mean(each)]
    assert len(json.loads(json.dumps(answer))["seconds"]) == 2


def test_cells_that_are_repeated_are_cells_of_the_table() -> None:
    assert len(CELLS) == 3
    for cell in CELLS:
        assert cell.why_not() is None
        assert cell.rule in RULES
    assert len({cell.codec for cell in CELLS}) == 3
    with pytest.raises(ValueError, match="as a whole"):
        robust_processes.trained(Cell("median", "both", "none", "alie"), 0)


@pytest.mark.slow
def test_real_processes_train_as_the_table_says() -> None:
    cell = CELLS[0]
    assert robust_processes.trained(cell, 1, 12) == robust_levels.trained(cell, 1, 12)


@pytest.mark.slow
def test_two_processes_make_the_table() -> None:
    rules = ["median", "krum(f=1)"]
    found, seconds = robust_table.lines(
        rules, levels=["party"], codecs=["onebit"], seeds=1, steps=4
    )
    assert [line.why_not is None for line in found] == [True, False]
    assert {*found[0].accuracy} == {*ATTACKS}
    assert len(seconds) == len(ATTACKS)
