# SPDX-License-Identifier: Apache-2.0
"""What `make bench-loops` concludes, and that each of its targets is about a figure."""

import tomllib
from pathlib import Path

from benchmarks import closing, collectives_jobs, harness, loops

TARGETS = tomllib.loads((harness.ROOT / "benchmarks/targets.toml").read_text(encoding="utf-8"))


def test_every_target_is_about_something_that_is_measured() -> None:
    known = {one["id"] for one in TARGETS["target"] if one["command"] == loops.COMMAND}
    folder = Path(loops.__file__).parent
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.glob("loops_*.py"))
    assert known
    assert all(f'"{name}"' in sources for name in known)


def test_a_step_beyond_its_bound_is_a_miss() -> None:
    def met(measured: float, interval: str) -> str:
        row = collectives_jobs.row(
            "overhead", "cnn", measured, "x", interval=interval, about="loops-overhead-step"
        )
        [found] = [
            one
            for one in closing.targets([row], loops.COMMAND)
            if one["id"] == "loops-overhead-step"
        ]
        return found["met"]

    assert met(1.02, "1.010 - 1.025") == "yes"
    assert met(1.05, "1.040 - 1.060") == "no"
    assert met(1.02, "0.700 - 1.500") == "noisy"
