# SPDX-License-Identifier: Apache-2.0
r"""Rules on distances for rows that are at several places: decided on sketches of k numbers.

    place with rows    y_i = S x_i, k numbers of d, and |x_i|^2       O(d) for each row
    place that decides distances |y_i - y_j|^2 --> rule --> one weight for each row
    places with rows   sum of w_i x_i

S is made of two halves, y = [y', y''] / sqrt(2). In each a block of so many coordinates as the half
has numbers is turned by a random amount, each coordinate gets a random sign, and blocks are added
up: a count sketch in which neighbours never meet. So x_a and x_b meet with a probability of 2 / k
at most in each half, with a random sign, and for any vector x that does not depend on the seed

    E |S x|^2 = |x|^2,   Var |S x|^2 <= (2 / k) |x|^4

(Charikar, Chen and Farach-Colton, 2002; Weinberger et al., 2009, lemma 2: the proof takes signs of
four coordinates that are independent, and where two meet). With k = 512 a squared distance is wrong
by 6 % (one deviation). Two halves, so that of two large coordinates that meet the other half tells
(Kane and Nelson, 2014).

Norms travel exactly, and | |x_i| - |x_j| | <= |x_i - x_j| <= |x_i| + |x_j|: a squared distance is
never taken for less than that, so a row that is far too long is far, whatever meets in a sketch,
nor for more, so sums of distances are finite, whatever a sketch says. Of a row with b blocks b
elements at most meet in a number, so that |S x|^2 <= b |x|^2 (Cauchy and Schwarz): a sketch that is
longer is no row's, and the row is refused.

Whoever knows the seed before the rows are made makes rows that the sketch does not see. So the seed
comes from a secret, and is told when rows cannot change any more.

Bits: turns and signs are Philox4x64-10 by NumPy, keyed by seed and chunk; sums are float64, block
by block of a chunk, then chunk by chunk as they come, and rounded to float32 once.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Sequence

import numpy as np

from tf_hips.errors import ToleranceError
from tf_hips.ops import call_text, native_robust
from tf_hips.ops.compressor import CHUNK
from tf_hips.ops.native import Doubles, Floats
from tf_hips.ops.registry import Parameter, checked
from tf_hips.robust.aggregator import Aggregation, Aggregator, Decision, Measures
from tf_hips.robust.rows import Limits, Rejected, Rows, as_rows, totals
from tf_hips.robust.value import SHORTENING, needs_pairs

NAME = "sketched"
SEED_BYTES = 16
_HEAD = re.compile(r"\s*sketched\s*(?:\(([^()]*)\)\s*)?", re.ASCII)
_K = Parameter("k", 512, 16, 1 << 16)
_WEIGHTED = ("krum", "multi_krum", "geometric_median", "mda", "cge", "mean")
_CHOOSING = ("krum", "multi_krum", "mda", "cge")
_ROUNDING = 1.001  # of norms in float32
_UNSEEN = 1e-9  # squares of elements below 1e-19 are 0 in float32: no norm has them, sketches do


@dataclasses.dataclass(frozen=True)
class Sketched:
    """A rule that looks at sketches of rows in place of rows. A plain value.

    Attributes:
        then: the rule; its result is one weighted sum of rows.
        k: numbers of a sketch; 0: `then` looks at norms alone, which are exact. None: 512, or 0.

    Raises:
        ValueError: `then` is another rule, or `k` is out of range or means nothing.
        TypeError: `then` is no rule, or `k` no integer.
    """

    then: Aggregator
    k: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.then, Aggregator):
            raise call_text.wrong_kind("then", "a rule such as robust.krum(f=1)", self.then)
        why = why_not(self.then)
        if why is not None:
            raise ValueError(why)
        looks = needs_pairs(self.then.steps)
        if not looks and self.k:
            raise ValueError(
                f"`k` means nothing in {NAME} >> {self.then}, which looks at norms alone. "
                f"Received: k={self.k!r}"
            )
        if looks:
            object.__setattr__(self, "k", int(_K.checked(_K.default if self.k is None else self.k)))
        else:
            object.__setattr__(self, "k", 0)

    @property
    def text(self) -> str:
        """The text of the rule of a server, such as "sketched(k=512) >> krum(f=1)"."""
        return f"{head(self.numbers)} >> {self.then.text}"

    @property
    def numbers(self) -> int:
        """`k`, which is known."""
        return self.k or 0

    @property
    def chooses(self) -> bool:
        """Whether rows with a weight are those that the rule has chosen, and others have none."""
        return self.then.rule.name in _CHOOSING

    def __repr__(self) -> str:
        return self.text

    def __call__(self, rows: Rows, *, secret: int = 0, step: int = 0) -> Floats:
        """The vector of `run`."""
        return self.run(rows, secret=secret, step=step).vector

    def run(
        self,
        rows: Rows,
        *,
        secret: int = 0,
        step: int = 0,
        limits: Limits | None = None,
        missing: int = 0,
    ) -> Aggregation:
        """Aggregates rows that are all here, as a tree of servers would.

        Args:
            rows: as for `Aggregator.run`.
            secret: what seeds are drawn from; no sender of a row may know it.
            step: of the run.
            limits: as for `Aggregator.run`.
            missing: as for `Aggregator.run`.

        Raises:
            ToleranceError, NonFiniteError, ValueError, TypeError: as for `Aggregator.run`.
        """
        given = as_rows(rows)
        making = Sketching(seed_of(secret, step), len(given), self.numbers)
        for chunk, rows_of in enumerate(zip(*map(_cut, given), strict=True)):
            making.add(chunk, rows_of)
        decision = self.decide(
            making.squares(),
            making.sketches(),
            rows=given,
            secret=secret,
            step=step,
            limits=limits,
            missing=missing,
            most=most_stretch([row.size for row in _cut(given[0])], self.numbers),
        )
        return self.then.apply(decision, given)

    def decide(
        self,
        squares: Doubles,
        sketches: Floats,
        *,
        rows: Sequence[Floats] | None = None,
        secret: int = 0,
        step: int = 0,
        limits: Limits | None = None,
        missing: int = 0,
        of: int | None = None,
        most: float = math.inf,
    ) -> Decision:
        """Which rows take part, and with which weights.

        Args:
            squares: squared norms of n rows, [n].
            sketches: of them, float32 [n, k].
            rows: as far as they are here; looked at for the element that is not finite.
            secret: what `bucketing` draws from.
            step: of the run.
            limits: as for `Aggregator.run`.
            missing: as for `Aggregator.run`.
            of: as for `Aggregator.run`.
            most: `most_stretch` of the rows; whose sketch is longer is refused.

        Raises:
            ToleranceError: as for `Aggregator.run`.
        """
        n = len(squares)
        if n > native_robust.MAX_ROWS:
            raise ToleranceError(
                f"{self} bears {native_robust.MAX_ROWS} rows at most. Received: n={n}"
            )
        pairs = np.zeros((1, 0))
        known: list[Rejected] = []
        if self.numbers and n:
            known = _impossible(squares, sketches, most)
            with np.errstate(all="ignore"):
                found = native_robust.distances(list(sketches))[1]
                norms = np.sqrt(squares)
                first, second = np.triu_indices(n, 1)
                least = np.square(norms[first] - norms[second])
                pairs = np.clip(found, least, np.square(norms[first] + norms[second]))
        return self.then.decide(
            Measures(np.asarray(squares, np.float64)[None], pairs),
            rows=rows if rows is not None else [np.empty(0, np.float32)] * n,
            seed=secret,
            step=step,
            limits=limits,
            missing=missing,
            of=of,
            known=known,
        )


class Sketching:
    """Makes sketches of n rows, chunk by chunk, in any order of chunks."""

    def __init__(self, seed: bytes, n: int, k: int) -> None:
        """Nothing has been added.

        Args:
            seed: of the round, SEED_BYTES bytes.
            n: rows.
            k: numbers of a sketch; 0: norms alone.
        """
        self._seed = seed
        self._widths = (k // 2, k - k // 2) if k else ()
        # A block that is turned goes on behind the end; `sketches` puts that to the front.
        self._sums = [np.zeros((n, 2 * width)) for width in self._widths]
        self._squares: list[Doubles] = []
        self._n = n

    def add(self, chunk: int, rows: Sequence[Floats]) -> None:
        """Adds a chunk of all rows.

        Args:
            chunk: its number; each chunk has turns and signs of its own.
            rows: float32 [size] each.
        """
        size = rows[0].size if rows else 0
        if size == 0:
            return
        with np.errstate(over="ignore"):
            self._squares.append(native_robust.distances(rows, with_pairs=False)[0])
        if not self._widths:
            return
        stream = np.random.Philox(key=_key(self._seed, chunk))
        halves = []
        for width, sums in zip(self._widths, self._sums, strict=True):
            signs = stream.random_raw(-(-size // 64))
            turns = (stream.random_raw(-(-size // width)) % np.uint64(width)).astype(np.int64)
            halves.append((signs, turns, sums))
        native_robust.add_sketches(rows, halves)

    def squares(self) -> Doubles:
        """Squared norms of the rows, [n]."""
        if not self._squares:
            return np.zeros(self._n)
        return np.array(totals(np.concatenate(self._squares)))

    def sketches(self) -> Floats:
        """The sketches, float32 [n, k]; zeros of a row whose norm no rule takes."""
        halves = [sums[:, :width] + sums[:, width:] for width, sums in self._halves()]
        found = np.concatenate([*halves, np.zeros((self._n, 0))], axis=1) / np.sqrt(2.0)
        found[~(self.squares() <= Limits().max_norm ** 2)] = 0.0
        return np.asarray(found, np.float32)

    def _halves(self) -> list[tuple[int, Doubles]]:
        return list(zip(self._widths, self._sums, strict=True))


def sketched(then: Aggregator, k: int | None = None) -> Sketched:
    """A rule on distances over all leaves of a tree, by sketches of their rows.

    Args:
        then: a rule whose result is one weighted sum of rows, such as `krum(f=2)`.
        k: numbers of a sketch; a squared distance is wrong by sqrt(2 / k) of itself, one deviation.
            None: 512.

    Raises:
        ValueError, TypeError: as for `Sketched`.
    """
    return Sketched(then, k)


def head(k: int) -> str:
    """What stands before a rule in a text."""
    return f"{NAME}({_K.name}={k})" if k else NAME


def split(text: str) -> tuple[int | None, str] | None:
    """The `k` that a text begins with, None where it says none, and the rest; None: no sketches.

    Raises:
        ValueError: an argument is wrong, or nothing stands behind.
    """
    front, arrow, rest = text.partition(">>")
    match = _HEAD.fullmatch(front)
    if match is None:
        return None
    if not arrow:
        raise ValueError(
            f"a rule must stand behind `{NAME}`, as in 'sketched(k=512) >> krum(f=1)'. Received: "
            f"{text[:320]!r}"
        )
    given = call_text.values(NAME, {_K.name: _K}, (match.group(1) or "").strip(), text)
    try:
        values = checked(NAME, (_K,), given)
        return (int(values[_K.name]) if given else None), rest
    except TypeError as error:
        raise ValueError(str(error)) from error


def why_not(rule: Aggregator) -> str | None:
    """Why a rule cannot be decided on sketches; None: it can."""
    name = rule.rule.name
    if name == "mean" and len(rule.steps) == 1:
        why = "a mean looks at no rows, and is the mean of all leaves without sketches"
    elif name == "centred_clipping":
        why = "its sum has the result of the round before in it, of which there is no row"
    elif name not in _WEIGHTED:
        why = "its result is made of sorted values of each coordinate, which no sketch has"
    elif any(
        step.name in SHORTENING and needs_pairs(rule.steps[place + 1 :])
        for place, step in enumerate(rule.steps)
    ):
        why = (
            "of a row that was shortened no distance is known: a sketch is wrong by a share of the "
            "long row, which may be more than the short one"
        )
    else:
        return None
    return (
        f"Behind `{NAME}` there must be a rule whose result is one weighted sum of rows, sum of "
        "w_i x_i, which whoever has rows makes of its own: krum, multi_krum, geometric_median, "
        f"mda, cge, or a mean behind nnm, bucketing, clip or arc. Received: {rule}; {why}"
    )


def most_stretch(sizes: Sequence[int], k: int) -> float:
    """How many times the squared norm of a row that of its sketch is at most, whatever the seed.

    Args:
        sizes: elements of each chunk of the row.
        k: numbers of a sketch; 0: there are none.
    """
    widths = (k // 2, k - k // 2) if k else ()
    blocks = [sum(-(-size // width) for size in sizes) for width in widths]
    return sum(blocks) / 2.0


def seed_of(secret: int, step: int) -> bytes:
    """The seed of the sketches of a round; known to nobody before it is told."""
    return hashlib.sha256(f"{secret}/robust/sketch/{step}".encode()).digest()[:SEED_BYTES]


def _cut(row: Floats) -> list[Floats]:
    """The chunks of a row."""
    return [row[at : at + CHUNK] for at in range(0, row.size, CHUNK)]


def _impossible(squares: Doubles, sketches: Floats, most: float) -> list[Rejected]:
    """The rows whose sketch is longer than any that a row of that norm has."""
    with np.errstate(all="ignore"):
        lengths = np.sqrt(np.square(sketches, dtype=np.float64).sum(axis=1))
        longest = np.sqrt(most * squares) * _ROUNDING + _UNSEEN
    return [
        Rejected(
            row,
            f"a sketch of norm {lengths[row]:.3g}, at most {longest[row]:.3g} of a row of norm "
            f"{math.sqrt(squares[row]):.3g}",
        )
        for row in np.flatnonzero(lengths > longest).tolist()
    ]


def _key(seed: bytes, chunk: int) -> int:
    found = hashlib.sha256(seed + chunk.to_bytes(8, "little")).digest()[:SEED_BYTES]
    return int.from_bytes(found, "little")
