# SPDX-License-Identifier: Apache-2.0
"""docs/gpu.md says how many bytes CUDA kernels move; the emulation counts them."""

import pytest

from tests.compll.emulation.traffic import row
from tests.compll.support import SPECS

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

TABLE = (SPECS.parents[2] / "docs/gpu.md").read_text(encoding="utf-8").splitlines()
QUICK = ("onebit",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else (pytest.mark.slow,), id=name)
        for name in sorted(path.stem for path in SPECS.glob("*.pse"))
    ],
)
def test_the_page_tells_what_is_moved(name):
    # The table behind it says what share of a copy that allows (test_gpu_bounds.py).
    told, *_ = (line for line in TABLE if line.startswith(f"| {name} |"))
    told, found = (line.split("|")[2:-1] for line in (told, row(name)))
    for said, counted in zip(told, found, strict=True):
        # Vectors need not begin where a sector does.
        is_none = said.strip() == counted.strip() == "-"
        assert is_none or float(counted) == pytest.approx(float(said), abs=0.015)
