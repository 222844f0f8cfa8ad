# SPDX-License-Identifier: Apache-2.0
"""Whose rows robust rules have refused, or borne: counted, logged, and told as events."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

from tf_hips import log
from tf_hips.log import Tell


class Rejections:
    """The rows of one run that were refused since the server began. Thread-safe."""

    def __init__(self, sites: Sequence[str]) -> None:
        """None was refused.

        Args:
            sites: names of the children.
        """
        self.tell: Tell | None = None
        self._sites = tuple(sites)
        self._lock = threading.Lock()
        self._counts = [0] * len(sites)
        self._last: dict[int, int] = {}  # the last round in which each was refused
        self._absurd: dict[int, int] = {}  # the last round in which the norm of each was absurd
        self._is_quiet = False

    @property
    def counts(self) -> list[int]:
        """Rows that were refused, by child."""
        with self._lock:
            return self._counts.copy()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Notes nothing meanwhile: rounds are done again that were told before."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def note_absurd(self, number: int, found: Mapping[int, str]) -> None:
        """Rows of round `number` had absurd norms, and a rule of coordinates bore them.

        Args:
            number: the round.
            found: by child, what is absurd.
        """
        if self._is_quiet:
            return
        self._say(
            "norm_absurd",
            f"In round {number} the update of site %s has an absurd norm, which the rule bears in "
            "each coordinate: %s",
            found,
            dict.fromkeys(found, number),
            self._absurd,
        )

    def note(
        self, number: int, refused: Mapping[int, str], rounds: Mapping[int, int] | None = None
    ) -> None:
        """Rows of round `number` were refused.

        Args:
            number: the round; of children that wait for nobody the step.
            refused: by child, why.
            rounds: of children that have rounds of their own, which one; None: of all `number`.
        """
        if self._is_quiet:
            return
        own = {child: number if rounds is None else rounds[child] for child in refused}
        with self._lock:
            for child in refused:
                self._counts[child] += 1
        which = "Round" if rounds is None else "Step"
        text = f"{which} {number} goes on without the update of site %s: %s"
        self._say("row_refused", text, refused, own, self._last)

    def _say(
        self,
        event: str,
        text: str,
        found: Mapping[int, str],
        rounds: Mapping[int, int],
        last: dict[int, int],
    ) -> None:
        """Tells of each child an event, and of a row of rounds one line in the log.

        Args:
            event: its name.
            text: of the line, with places for the site and the reason.
            found: by child, the reason.
            rounds: by child, in which round.
            last: the last round of each child; takes these.
        """
        with self._lock:
            before = {child for child in found if rounds[child] - last.get(child, -2) <= 1}
            last.update(rounds)
        for child, reason in sorted(found.items()):
            site = self._sites[child]
            if self.tell is not None:
                self.tell(event, round=rounds[child], child=child, child_site=site, reason=reason)
            (log.debug if child in before else log.warning)(text, site, reason)
