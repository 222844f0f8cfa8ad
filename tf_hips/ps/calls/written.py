# SPDX-License-Identifier: Apache-2.0
"""What has been written of each child: one that does the same again and again fills no disk."""

# Processes of a child in one run of which the same event is written.
_MOST_PROCESSES = 64


class Written:
    """Which events of children are in the log already. Thread-safe as far as one child's calls."""

    def __init__(self) -> None:
        """Nothing is."""
        self._newest: dict[tuple[int, str], tuple[str, int]] = {}
        self._process: dict[tuple[int, str], tuple[str, str, int]] = {}

    def is_new(self, run: str, child: int, event: str, number: int) -> bool:
        """Whether an event of a child is the first one of `number`, or of a later one.

        Args:
            run: what tells it from others, `Session.token`.
            child: of which it is.
            event: its name.
            number: of the round or the gather: a child has them in order.
        """
        before = self._newest.get((child, event))
        if before is not None and before[0] == run and number <= before[1]:
            return False
        self._newest[child, event] = run, number
        return True

    def is_of_another(self, run: str, child: int, event: str, process: str) -> bool:
        """Whether the event before was of another process of the child, and few were.

        Args:
            run: what tells it from others, `Session.token`.
            child: of which it is.
            event: its name.
            process: which one of the child's.
        """
        before = self._process.get((child, event))
        last, count = before[1:] if before is not None and before[0] == run else ("", 0)
        if last == process or count >= _MOST_PROCESSES:
            return False
        self._process[child, event] = run, process, count + 1
        return True
