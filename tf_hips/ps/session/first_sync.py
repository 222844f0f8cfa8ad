# SPDX-License-Identifier: Apache-2.0
"""The calls of the first synchronisation: child 0 sends its weights, the others fetch them.

With a server above, child 0 sends only where it stands first in the whole tree. Elsewhere all
children fetch what comes down from there (`wanted`, `describe`, `take`). Which weights those are,
the server must say above: as the child says that comes first, or below a robust rule as most say,
because others than those of the run would end it.

Part of a session, and under its lock. The bytes are kept by `weights`.
"""

import collections
import functools
import threading
from collections.abc import Callable, Iterator

from tf_hips.errors import ProtocolError
from tf_hips.ps.session.members import Caller
from tf_hips.ps.session.state import State
from tf_hips.ps.session.waiting import Wait, Waiting
from tf_hips.ps.terms.recorder import Kind
from tf_hips.ps.terms.weights import Described
from tf_hips.ps.transport import wire

_FIRST_WEIGHTS = "the first weights"


class FirstSync:
    """The first synchronisation of one run."""

    def __init__(
        self,
        state: State,
        changed: threading.Condition,
        waiting: Waiting,
        check: Callable[[Caller], object],
        settle: Callable[[], None],
    ) -> None:
        """Nobody has begun.

        Args:
            state: of the run.
            changed: the session's lock.
            waiting: the session's waiting calls.
            check: called first by each call, with the lock held; raises if the caller may not.
            settle: waits until all that was accepted is durable; raises if it never will be.
        """
        self._state = state
        self._changed = changed
        self._waiting = waiting
        self._joined = check
        self._settle = settle
        self._site = state.members.site
        self.wanted: Described | None = None  # what children wait for from above
        self._said: dict[int, Described] = {}  # what each has said, before that

    @property
    def comes_from_above(self) -> bool:
        """Whether the server above sends the first weights."""
        place = self._state.members.place
        return place is not None and place.first > 0

    def describe(self, kinds: tuple[str, ...], num_bytes: int) -> None:
        """Notes what will come from the server above."""
        with self._changed:
            self._describe(kinds, num_bytes)

    def take(self, data: wire.Buffer) -> None:
        """Takes the next bytes from the server above."""
        with self._changed:
            held = self._state.weights.held
            self._state.weights.take(held, data)
            self._state.recorder.add(Kind.WEIGHTS, data, position=held)
            self._changed.notify_all()

    def begin(self, caller: Caller, kinds: list[object], num_bytes: int) -> tuple[int, bool]:
        """Compares a child's description of its weights with that of child 0, once it is there.

        Args:
            caller: the call.
            kinds: for each weight its type and shape in one text.
            num_bytes: bytes of all weights.

        Returns:
            How many of the bytes the server holds, and whether the caller fetches them: all
            children but child 0 do, and one that has come back where they are there.

        Raises:
            ProtocolError: the weights differ or are larger than the server's limit.
        """
        if not all(isinstance(kind, str) for kind in kinds):
            raise ProtocolError("`kinds` must hold texts.")
        weights = tuple(str(kind) for kind in kinds)
        self._state.members.terms.check_bytes("model's weights", num_bytes)
        with self._changed:
            self._joined(caller)
            held = self._state.weights
            has_returned = self._state.members.children[caller.child].num_returns > 0
            if held.is_forgotten:
                raise ProtocolError(
                    f"Site `{self._site(caller.child)}` can come back to this run only from a "
                    "backup that was made in it: the first weights are no longer kept."
                )
            from_above = self.comes_from_above
            if from_above and self.wanted is None:
                self._said[caller.child] = weights, num_bytes
                self.wanted = self._most()
                self._changed.notify_all()
            if caller.child == 0 and not from_above and not (has_returned and held.are_whole):
                self._describe(weights, num_bytes)
                # Another process than the one that sent them may have others: it sends all again.
                return 0 if has_returned else held.held, False
            self._waiting.until(
                caller,
                Wait(
                    _FIRST_WEIGHTS,
                    lambda: self._state.weights.is_described,
                    self._missing,
                    self._needs,
                ),
            )
            text = self._state.weights.difference(weights, num_bytes)
            if text is not None:
                raise ProtocolError(
                    f"All parties must begin with the same weights. {_upper(self._sender)} "
                    f"(there) and site `{self._site(caller.child)}` (here) differ: {text}. Build, "
                    "or load, the same model in the same order at all of them: one from "
                    "`load_model` has variables in another order than one that is built"
                )
            return held.held, True

    def upload(self, caller: Caller, position: int, data: wire.Buffer) -> int:
        """Takes bytes `position` ... of the weights from child 0; bytes it has are skipped.

        Returns:
            The position after them.

        Raises:
            ProtocolError: the call comes from another child, leaves a gap or goes beyond the end,
                or below a robust rule a weight is not finite.
        """
        with self._changed:
            self._joined(caller)
            if caller.child != 0 or self.comes_from_above:
                raise ProtocolError(
                    f"{_upper(self._sender)} sends the first weights. "
                    f"Received: weights of site `{self._site(caller.child)}`"
                )
            held = self._state.weights.held
            rule = self._state.members.doubting_rule
            spoilt = None if rule is None else self._state.weights.nonfinite(position, data)
            if spoilt is not None:
                # Before anybody gets it: all others would begin with it. Without a rule that
                # doubts, an infinity may well be meant: an observer of ranges begins with one.
                raise ProtocolError(
                    f"Below rule {rule} the first weights must be finite. Received: NaN or an "
                    f"infinity in weight {spoilt}, of site `{self._site(caller.child)}`"
                )
            end = self._state.weights.take(position, data)
            if end > held:
                self._state.recorder.add(
                    Kind.WEIGHTS, memoryview(data)[held - position :], position=held
                )
            self._changed.notify_all()
            return end

    def download(self, caller: Caller, position: int) -> Iterator[bytes]:
        """The weights of child 0 from byte `position`, in messages, as they come in."""
        weights = self._state.weights
        while True:
            with self._changed:
                self._joined(caller)
                if position > weights.num_bytes:
                    raise ProtocolError(
                        f"The weights have {weights.num_bytes} bytes. Received: byte {position}"
                    )
                if position == weights.num_bytes:
                    return
                self._waiting.until(
                    caller,
                    Wait(
                        _FIRST_WEIGHTS,
                        functools.partial(weights.has_message, position),
                        lambda: (
                            f"{self._sender} has sent {weights.held} of {weights.num_bytes} bytes "
                            "of the first weights"
                        ),
                        self._needs,
                        lambda: weights.held,
                    ),
                )
                message = weights.message(position)
            self._settle()
            yield message
            position += len(message)

    @property
    def _sender(self) -> str:
        return "the server above" if self.comes_from_above else f"site `{self._site(0)}`"

    def _most(self) -> Described | None:
        """What the server asks for above; None: below a robust rule, more must have said it.

        Without a majority among all of them it is what child 0 says.
        """
        members = self._state.members
        [(found, count)] = collections.Counter(self._said.values()).most_common(1)
        if members.doubting_rule is None or 2 * count > len(members.children):
            return found
        return self._said[0] if len(self._said) == len(members.children) else None

    def _missing(self) -> str:
        if self.comes_from_above and self.wanted is None:
            members = self._state.members
            names = members.names(set(members.children) - set(self._said))
            return f"the parties {names} have not begun the first synchronisation"
        return f"{self._sender} has not begun to send the first weights"

    def _needs(self) -> list[int]:
        return [] if self.comes_from_above else [0]

    def _describe(self, kinds: tuple[str, ...], num_bytes: int) -> None:
        is_new = not self._state.weights.is_described
        self._state.weights.describe(kinds, num_bytes)
        if is_new:
            self._state.recorder.add(Kind.DESCRIBED, kinds=kinds, bytes=num_bytes)
        self._changed.notify_all()


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
