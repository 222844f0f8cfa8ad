# SPDX-License-Identifier: Apache-2.0
"""Goldens: text that must not change unnoticed, kept in `golden/` beside the test that makes it.

A golden holds what the test is about and no boilerplate, so that its diff is worth a review.
`pytest --update-golden` writes what the tests made; without it a missing or differing golden fails
the test.
"""

import difflib
from pathlib import Path


class Golden:
    """Compares texts with the goldens of one test file."""

    def __init__(self, folder: Path, update: bool) -> None:
        self._folder = folder
        self._update = update

    def check(self, name: str, text: str) -> None:
        """Fails with a diff unless `golden/<name>` holds `text`; with --update-golden writes it."""
        path = self._folder / name
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        advice = "If this is meant, run `pytest --update-golden` on this test and review the diff."
        if not path.is_file():
            raise AssertionError(f"The golden {path} is missing. {advice}")
        expected = path.read_text(encoding="utf-8")
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(keepends=True),
                text.splitlines(keepends=True),
                fromfile=f"golden/{name}",
                tofile="made by this test",
            )
            raise AssertionError(f"{path} differs. {advice}\n{''.join(diff)}")
