# SPDX-License-Identifier: Apache-2.0
"""Which tests never run at the same time, and which begin first, where pytest-xdist has workers.

Groups go by files, and not by marks: pytest-xdist 3.8 writes the names of marked groups to a field
that pytest 9.2 does not read, so that `--dist loadgroup` alone groups nothing and says nothing
(pytest-dev/pytest-xdist#1386).
"""

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

_ROOT = Path(__file__).resolve().parents[2]
# Folders whose tests start many processes and wait for deadlines, by what they start most. The
# features wait for nothing: they go beside all others, else one worker has all that takes long.
_FOLDERS = {
    **{"comm": "ranks", "strategies": "ranks"},
    **{"cli": "servers", "cluster": "servers", "ps": "servers"},
}
_FILES = {"test_features": "features"}
_RANKS = re.compile(
    r"^from tests\.support(\.(ranks|lateness))? import .*"
    r"\b(ranks|run_parties|run_with_one_late|sites|disturbed)\b",
    re.MULTILINE,
)
_SHARED_FIXTURE = re.compile(r'^@pytest\.fixture\(.*scope="module"', re.MULTILINE)


@functools.cache
def group_of(file: str) -> str | None:
    """The group of the tests in a file; None where each is one by itself.

    Tests of a group run one after the other in one worker. Tests that keep every core busy are
    never beside each other, nor are those that wait for deadlines. Tests that share a fixture of
    their module are a group, so that it is made once.

    Args:
        file: relative to the repository.
    """
    path = _ROOT / file
    group = _FILES.get(path.stem) or _FOLDERS.get(path.parent.name)
    if group:
        return group
    text = path.read_text(encoding="utf-8")
    if _RANKS.search(text):
        return "ranks"
    return path.stem if _SHARED_FIXTURE.search(text) else None


class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out whole groups, those of most tests first, and then the tests that have none."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0]) or nodeid
