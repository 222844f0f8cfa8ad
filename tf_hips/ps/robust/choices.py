# SPDX-License-Identifier: Apache-2.0
"""Whose rows the rule of a run has chosen, where it chooses some: counted, and told as events."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

from tf_hips.log import Tell


class Choices:
    """The rows of one run that were chosen since the server began. Thread-safe."""

    def __init__(self, sites: Sequence[str]) -> None:
        """None was chosen.

        Args:
            sites: names of the children.
        """
        self.tell: Tell | None = None
        self._sites = tuple(sites)
        self._lock = threading.Lock()
        self._chosen = [0] * len(sites)
        self._chosen_of = [0] * len(sites)
        self._is_quiet = False

    @property
    def counts(self) -> list[dict[str, int]]:
        """Of each child `chosen`, rounds in which its row was, of the `chosen_of` that had it."""
        with self._lock:
            pairs = zip(self._chosen, self._chosen_of, strict=True)
            return [{"chosen": chosen, "chosen_of": of} for chosen, of in pairs]

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Notes nothing meanwhile: rounds are done again that were told before."""
        self._is_quiet = True
        try:
            yield
        finally:
            self._is_quiet = False

    def note(
        self,
        number: int,
        chosen: Sequence[int],
        among: Sequence[int],
        leaves: tuple[Sequence[str], Sequence[str]] | None = None,
    ) -> None:
        """A rule has made the result of round `number` of the rows of some children.

        Args:
            number: the round; of children that wait for nobody the step.
            chosen: these children.
            among: whose rows it has looked at, these among them.
            leaves: what is told in place of both, where rows are those of leaves below.
        """
        if self._is_quiet:
            return
        with self._lock:
            for children, counts in ((chosen, self._chosen), (among, self._chosen_of)):
                for child in children:
                    counts[child] += 1
        names = leaves or tuple([self._sites[one] for one in part] for part in (chosen, among))
        if self.tell is not None:
            self.tell("rows_chosen", round=number, sites=list(names[0]), among=list(names[1]))
