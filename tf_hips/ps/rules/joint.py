# SPDX-License-Identifier: Apache-2.0
"""What shards of one model tell each other about a round of a rule that looks at whole rows.

    shard i  --Report:  the measures of its chunks, of the rows of all children-->  shard 0
    shard i  <--Verdict: whose rows take part, with which weights-----------------  shard 0

Measures travel chunk by chunk: their sums over all chunks are rounded once, so they are those of
one server. What is decided of them travels, too, and is not decided again elsewhere: on another
processor a tie could go another way.

    u32 bytes of JSON | JSON, an object | float64, little-endian

Invariant: `from_bytes` takes what `to_bytes` gives; anything else is a ProtocolError before memory
is taken for it.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_hips.errors import ProtocolError
from tf_hips.ops.native import Doubles
from tf_hips.ops.native_robust import CoordinateRule
from tf_hips.ps.terms.assignment import Shard
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import from_payload, to_payload
from tf_hips.robust.aggregator import Decision, Measures
from tf_hips.robust.rows import Rejected

# Of the JSON before the numbers: fixed fields, and what is said of each child.
_HEAD_BYTES = 1 << 12
_CHILD_BYTES = 1 << 11

_NUMBER_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Report:
    """What one shard has measured of a round.

    Attributes:
        shard: which one.
        agreed: digest of what all shards of a run must have been told alike.
        measures: of its chunks, in their order, and of all children, in theirs; behind these of the
            reference, where the rule begins with one.
    """

    shard: Shard
    agreed: str
    measures: Measures

    def to_bytes(self) -> bytes:
        """As it travels."""
        squares, pairs = self.measures.squares, self.measures.pairs
        head = {
            "shard": list(self.shard.numbers),
            "agreed": self.agreed,
            "rows": squares.shape[1],
            "pairs": pairs.shape[1],
        }
        return b"".join(to_payload(head, _packed(squares) + _packed(pairs)))

    @classmethod
    def from_bytes(cls, payload: bytes, model: Model, num_children: int) -> "Report":
        """Reads what `to_bytes` wrote.

        Args:
            payload: what has come.
            model: that all children have agreed on.
            num_children: how many there are.

        Raises:
            ProtocolError: it is something else, or of another model or number of children.
        """
        try:
            head, data = from_payload(payload)
            shard = Shard.from_numbers(head["shard"])
            agreed, rows, pairs = head["agreed"], head["rows"], head["pairs"]
            chunks = len(shard.chunks(model))
            are_numbers = type(rows) is int and type(pairs) is int and type(agreed) is str
            if not are_numbers or rows not in (num_children, num_children + 1):
                raise ValueError(f"rows={rows} of {num_children} children")
            if pairs not in (0, rows * (rows - 1) // 2):
                raise ValueError(f"pairs={pairs} of {rows} rows")
            numbers = _unpacked(data, chunks * (rows + pairs))
            if not (numbers >= 0).all():  # NaN is not either
                raise ValueError("a sum of squares below 0")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(
                f"A report must hold the measures of a shard. Received: {error}"
            ) from error
        squares, apart = numbers[: chunks * rows], numbers[chunks * rows :]
        measures = Measures(squares.reshape(chunks, rows), apart.reshape(chunks, pairs))
        return cls(shard, agreed, measures)

    @staticmethod
    def limit(model: Model, num_children: int) -> int:
        """Greatest length in bytes."""
        rows = num_children + 1
        return _HEAD_BYTES + _NUMBER_BYTES * len(model.chunks) * (rows + rows * (rows - 1) // 2)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What shard 0 has decided about a round, for all shards.

    Attributes:
        children: whose rows are looked at, in their order; none: nobody takes part.
        missing: children that take no part because something is wrong with them, with what.
        decision: about the rows of `children`; None where there are none, or with `refusal`.
        refusal: why nothing can be made of the round; None: something can.
        has_too_few: whether that is for want of rows, and not for numbers that are not finite.
    """

    children: tuple[int, ...] = ()
    missing: Mapping[int, str] = dataclasses.field(default_factory=dict)
    decision: Decision | None = None
    refusal: str | None = None
    has_too_few: bool = True

    def to_bytes(self) -> bytes:
        """As it travels, and as it is recorded."""
        head: dict[str, Any] = {
            "children": self.children,
            "missing": sorted(self.missing.items()),
            "refusal": self.refusal,
            "has_too_few": self.has_too_few,
            "decision": None,
        }
        decision, numbers = self.decision, b""
        if decision is not None:
            numbers = _packed(decision.mixing)
            head["decision"] = {
                "accepted": decision.accepted,
                "rejected": [(one.row, one.reason) for one in decision.rejected],
                "f": decision.f,
                "coordinate": decision.coordinate,
                "selected": decision.selected,
                "mixing": decision.mixing.shape,
            }
        return b"".join(to_payload(head, numbers))

    @classmethod
    def from_bytes(cls, payload: bytes, num_children: int) -> "Verdict":
        """Reads what `to_bytes` wrote.

        Args:
            payload: what has come.
            num_children: how many there are.

        Raises:
            ProtocolError: it is something else.
        """
        try:
            head, data = from_payload(payload)
            children = _places(head["children"], num_children)
            missing = _reasons(head["missing"], num_children)
            refusal, fields = head["refusal"], head["decision"]
            if refusal is not None and type(refusal) is not str:
                raise ValueError(f"refusal={refusal!r}")
            if type(has_too_few := head["has_too_few"]) is not bool:
                raise ValueError(f"has_too_few={has_too_few!r}")
            if (fields is not None) != (bool(children) and refusal is None):
                raise ValueError("children without a decision, or one without them")
            decision = _decision(fields, data, len(children)) if fields is not None else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(
                f"A verdict must say whose rows take part. Received: {str(error)[:200]}"
            ) from error
        return cls(children, missing, decision, refusal, has_too_few)

    @staticmethod
    def limit(num_children: int) -> int:
        """Greatest length in bytes."""
        most = (num_children + 1) ** 2
        return _HEAD_BYTES + _CHILD_BYTES * num_children + _NUMBER_BYTES * most


def of_rows(measures: Measures, rows: Sequence[int]) -> Measures:
    """The measures of some of the rows.

    Args:
        measures: of all of them.
        rows: which, in ascending order.
    """
    left, right = np.triu_indices(measures.squares.shape[1], 1)
    # Pairs keep their order, which is that of the pairs of the rows that are left.
    kept = np.isin(left, rows) & np.isin(right, rows)
    pairs = measures.pairs[:, kept] if measures.pairs.shape[1] else measures.pairs
    return Measures(measures.squares[:, list(rows)], pairs)


def _packed(numbers: Doubles) -> bytes:
    return np.ascontiguousarray(numbers, "<f8").tobytes()


def _unpacked(data: memoryview, count: int) -> Doubles:
    if len(data) != count * _NUMBER_BYTES:
        raise ValueError(f"{len(data)} bytes of {count} numbers")
    return np.frombuffer(data, "<f8").astype(np.float64)


def _places(values: Sequence[Any], count: int) -> tuple[int, ...]:
    """Numbers below `count`, ascending."""
    found = tuple(values)
    are_places = all(type(one) is int and 0 <= one < count for one in found)
    if not are_places or any(one >= two for one, two in itertools.pairwise(found)):
        raise ValueError(f"{str(found)[:80]}, not ascending numbers below {count}")
    return found


def _reasons(pairs: Sequence[Any], count: int) -> dict[int, str]:
    """Why, by place."""
    places = _places([place for place, _ in pairs], count)
    reasons = [reason for _, reason in pairs]
    if not all(type(one) is str for one in reasons):
        raise ValueError("a reason that is no text")
    return dict(zip(places, reasons, strict=True))


def _decision(fields: Mapping[str, Any], data: memoryview, num_rows: int) -> Decision:
    accepted = _places(fields["accepted"], num_rows)
    rejected = _reasons(fields["rejected"], num_rows)
    if sorted((*accepted, *rejected)) != list(range(num_rows)) or not accepted:
        raise ValueError(f"rows that are neither accepted nor rejected, of {num_rows}")
    selected = fields["selected"]
    height, width = fields["mixing"]
    if type(height) is not int or not 1 <= height <= num_rows + 1:
        raise ValueError(f"{height} weighted sums of {num_rows} rows")
    if width not in (len(accepted), len(accepted) + 1):
        raise ValueError(f"weights of {width} rows, of {len(accepted)}")
    mixing = _unpacked(data, height * width).reshape(height, width)
    if not np.isfinite(mixing).all() or type(fields["f"]) is not int:
        raise ValueError("a weight or an f that is no number")
    coordinate = fields["coordinate"]
    if coordinate is not None:
        rule, drop = coordinate
        if type(drop) is not int or not 0 <= drop < height:
            raise ValueError(f"drop={drop} of {height} rows")
        coordinate = CoordinateRule(rule), drop
    elif height != 1:
        raise ValueError(f"{height} results")
    return Decision(
        accepted,
        tuple(Rejected(row, reason) for row, reason in rejected.items()),
        fields["f"],
        mixing,
        coordinate,
        None if selected is None else _places(selected, num_rows),
    )
