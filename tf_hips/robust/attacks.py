# SPDX-License-Identifier: Apache-2.0
"""What peers that lie may send, for tests and studies.

An attack is a plain value; called with the honest rows it gives those of f liars. Names: h_1 .. h_m
are honest rows, mu their mean, sigma their deviation in each coordinate, n = m + f. Sources and
where the field's codes differ: docs/attacks.md. What is random is a function of (seed, step).
"""

import dataclasses
import functools
import math
import statistics as numbers
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tf_hips.ops.compressor import Compressor, packet_sizes
from tf_hips.ops.native import PREFIX_BYTES, Bytes, Doubles, Floats, derive_seed
from tf_hips.robust import attack_params, attack_search
from tf_hips.robust.aggregator import parse
from tf_hips.robust.attack_params import Z_FORMULAE
from tf_hips.robust.deciding import secret_order
from tf_hips.robust.detox import groups
from tf_hips.robust.rows import Rows, as_rows

PACKET_NAMES = attack_params.PACKETS
"""Attacks on packets."""
NAMES = tuple(name for name in attack_params.PARAMS if name not in PACKET_NAMES)
"""All attacks on gradients."""
RANDOM, WORST = PLACEMENTS = ("random", "worst")
"""Where liars sit; see `liars`."""
# Where a packet's body holds the first of the floats that its elements are made of; and the codec's
# parameter that says for how many elements there is one, None: there are two for all.
_SCALES: dict[str, tuple[int, str | None]] = {
    "onebit": (0, None),
    "terngrad": (2, None),
    "eden": (4, "block"),
    "fp8": (0, "block"),
    "int8": (0, "block"),
    "qsgd": (0, "bucket"),
}
SCALED = tuple(_SCALES)
"""Codecs whose packets have scales. Others send values of elements, or take a threshold of all."""


@dataclasses.dataclass(frozen=True)
class Attack:
    """What liars send.

    Attributes:
        name: one of NAMES or PACKET_NAMES.
        params: (name, value) of each parameter.

    Raises:
        ValueError: there is no such attack, or a parameter is out of range.
        TypeError: a parameter is of another type.
    """

    name: str
    params: tuple[tuple[str, int | float | str], ...] = ()

    def __post_init__(self) -> None:
        _one_of("name", self.name, (*NAMES, *PACKET_NAMES))
        attack_params.check(self.name, self.params)

    @property
    def is_of_packets(self) -> bool:
        """Whether packets lie and not rows: calling it gives none, see `lie_about_scale`."""
        return self.name in PACKET_NAMES

    def __getitem__(self, name: str) -> int | float | str:
        """The value of a parameter."""
        return dict(self.params)[name]

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.params)
        return f"{self.name}({arguments})" if arguments else self.name

    def __call__(
        self,
        honest: Rows,
        f: int,
        *,
        own: Rows | None = None,
        before: Floats | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> Floats:
        """The rows of f liars, [f, d].

        Args:
            honest: the rows of those who do not lie.
            f: how many lie.
            own: what the liars themselves would have sent, if they did not; None: each the mean of
                the honest rows.
            before: the result of the step before, which free riders send back, and where
                `centred_clipping` begins in a search.
            seed: of the run.
            step: of the run.

        Raises:
            ValueError: there are no honest rows, or not f own ones; or f of so many cannot do what
                the attack asks for (of `optimal`: its rule), or the attack is one on packets.
        """
        if self.is_of_packets:
            raise ValueError(
                f"an attack on rows must be one of {', '.join(NAMES)}. Received: {self}, of "
                "packets: `lie_about_scale`, and `simulate_liars` where a codec makes some"
            )
        if f < 0:
            raise ValueError(f"`f` must be 0 or more. Received: f={f}")
        rows = np.stack(as_rows(honest)).astype(np.float64)
        mine = np.tile(rows.mean(axis=0), (f, 1))
        if own is not None and f:
            mine = np.stack(as_rows(own)).astype(np.float64)
        if mine.shape != (f, rows.shape[1]):
            raise ValueError(f"`own` must hold {f} rows of {rows.shape[1]}. Received: {mine.shape}")
        if not f:
            return np.empty(mine.shape, np.float32)
        if ("statistics", "own") in self.params and (own is None or f < 2):
            what = "none" if own is None else f"{f}"
            raise ValueError(
                f"`own` must hold 2 rows or more for {self}: others have no deviation. Received: "
                f"{what}"
            )
        generator = np.random.Generator(
            np.random.Philox(key=derive_seed(seed, f"attack/{self.name}/{step}"))
        )
        with np.errstate(over="ignore"):
            if self.name == "optimal":
                sent = self._searched(rows, f, before, seed, step)
            else:
                sent = self._sent(rows, mine, f, before, generator)
            return np.ascontiguousarray(np.broadcast_to(sent, mine.shape), np.float32)

    def _sent(
        self,
        rows: Doubles,
        own: Doubles,
        f: int,
        before: Floats | None,
        generator: np.random.Generator,
    ) -> Doubles:
        match self.name:
            case "reversed_gradient":
                return -float(self["c"]) * own
            case "constant":
                return np.full_like(own, float(self["c"]))
            case "nan":
                return np.full_like(own, np.nan)
            case "gaussian":
                return generator.normal(float(self["mean"]), float(self["sigma"]), own.shape)
            case "sign_flip":
                return -own if self["of"] == "own" else -rows.mean(axis=0)
            case "alie":
                return self._alie(rows, own, f)
            case "inner_product":
                return np.asarray(-float(self["epsilon"]) * rows.mean(axis=0), np.float64)
            case "mimic":
                return np.asarray(rows[self._target(rows)], np.float64)
            case "min_max" | "min_sum":
                return self._farthest(rows)
            case _:
                start = np.zeros(rows.shape[1]) if before is None else before.astype(np.float64)
                return start + generator.normal(0.0, float(self["sigma"]), own.shape)

    def _alie(self, rows: Doubles, own: Doubles, f: int) -> Doubles:
        seen = {"honest": rows, "own": own, "all": np.concatenate([rows, own])}[
            str(self["statistics"])
        ]
        deviation = seen.std(axis=0, ddof=int(self["ddof"]) if len(seen) > 1 else 0)
        z = self["z"]
        factor = alie_z(len(rows) + f, f, z) if isinstance(z, str) else float(z)
        return np.asarray(seen.mean(axis=0) + float(self["sign"]) * factor * deviation, np.float64)

    def _searched(
        self, rows: Doubles, f: int, before: Floats | None, seed: int, step: int
    ) -> Doubles:
        aggregator = parse(str(self["rule"]))
        aggregator.check(len(rows) + f)
        rule = functools.partial(aggregator, reference=before, seed=seed, step=step)
        mean = rows.mean(axis=0)
        if self["base"] == "inner_product":
            return attack_search.farthest(rows, f, rule, np.zeros_like(mean), -mean)
        return attack_search.farthest(rows, f, rule, mean, -rows.std(axis=0))

    def _target(self, rows: Doubles) -> int:
        target = int(self["target"])
        if target >= len(rows):
            raise ValueError(
                f"`target` of mimic must be less than the {len(rows)} honest rows. Received: "
                f"target={target}"
            )
        if target >= 0:
            return target
        return int(np.argmax(np.einsum("ij,j->i", rows, top_direction(rows))))

    def _farthest(self, rows: Doubles) -> Doubles:
        """The mean and, along a direction, as much as the rule of the attack allows."""
        mean = rows.mean(axis=0)
        direction = {
            "unit": lambda: -mean / max(float(np.linalg.norm(mean)), 1e-300),
            "std": lambda: -rows.std(axis=0),
            "sign": lambda: -np.sign(mean),
        }[str(self["direction"])]()
        length = float(np.dot(direction, direction))
        if length == 0.0:
            return np.asarray(mean, np.float64)
        apart = np.stack([((rows - row) ** 2).sum(axis=1) for row in rows])
        towards = mean - rows
        squares = (towards**2).sum(axis=1)
        if self.name == "min_sum":
            sums = apart.sum(axis=1)
            bound = float(sums.max() if self["bound"] == "max" else sums.min())
            room = bound - float(squares.sum())
            gamma = math.sqrt(max(room, 0.0) / (len(rows) * length))
        else:
            across = np.einsum("ij,j->i", towards, direction)
            over = squares - float(apart.max())
            roots = np.sqrt(np.maximum(across**2 - length * over, 0.0))
            gamma = float(((roots - across) / length).min())
        return np.asarray(mean + max(gamma, 0.0) * direction, np.float64)


def reversed_gradient(c: float = 100.0) -> Attack:
    """-c times the own gradient; DETOX's `rev_grad`."""
    return Attack("reversed_gradient", (("c", c),))


def constant(c: float = -100.0) -> Attack:
    """The same number in all coordinates."""
    return Attack("constant", (("c", c),))


def nan() -> Attack:
    """No numbers at all."""
    return Attack("nan")


def gaussian(mean: float = 0.0, sigma: float = 200.0) -> Attack:
    """Noise in place of a gradient, other noise of each liar."""
    return Attack("gaussian", (("mean", mean), ("sigma", sigma)))


def sign_flip(of: str = "own") -> Attack:
    """The own gradient reversed, or the honest mean (`of="mean"`)."""
    return Attack("sign_flip", (("of", of),))


def alie(
    z: float | str = "paper", sign: int = -1, statistics: str = "honest", ddof: int = 0
) -> Attack:
    """A little is enough: mu + sign z sigma, near enough to hide (Baruch et al., NeurIPS 2019).

    Args:
        z: a number above 0, or a formula of `alie_z`. DETOX's code has 1, ByzFL's 1.5.
        sign: -1 as the authors, 1 as DETOX and ByzFL.
        statistics: whose mean and deviation: the honest rows', the liars' own, or all.
        ddof: 0 as the authors and DETOX, 1 as ByzFL.
    """
    return Attack("alie", (("z", z), ("sign", sign), ("statistics", statistics), ("ddof", ddof)))


def alie_z(n: int, f: int, formula: str = "paper") -> float:
    """How many deviations f of n liars may be off: the inverse normal distribution at a share.

    With s = floor(n / 2 + 1) - f supporters that they need, the share is (n - f - s) / (n - f) in
    the paper; (n - s) / n is what other codes have.

    Raises:
        ValueError: f is not less than n / 2; or the share is 1 / 2 or less, so that liars would
            send the mean, or lie the other way round.
    """
    supporters = n // 2 + 1 - f
    _one_of("formula", formula, Z_FORMULAE)
    if not 0 <= f < n / 2 or n < 3:
        raise ValueError(f"f must be less than n / 2, of n > 2 rows. Received: n={n}, f={f}")
    text, over, under = "(n - f - s) / (n - f)", n - f - supporters, n - f
    if formula == "n":
        text, over, under = "(n - s) / n", n - supporters, n
    if not 1 / 2 < over / under < 1:
        raise ValueError(
            f"{text}, with s = floor(n / 2 + 1) - f, must be in (1/2, 1) for alie(z={formula!r}): "
            f"else z is 0 or less, and nothing is attacked; give z a number. Received: {over}/"
            f"{under}, of n={n}, f={f}"
        )
    return numbers.NormalDist().inv_cdf(over / under)


def inner_product(epsilon: float = 2.0) -> Attack:
    """-epsilon mu: turns the mean round as soon as epsilon > (n - f) / f (Xie et al., UAI 2019)."""
    return Attack("inner_product", (("epsilon", epsilon),))


def mimic(target: int = 0) -> Attack:
    """Copies one honest row, which then counts more than others (Karimireddy et al., ICLR 2022).

    Args:
        target: number of that row, the same in all steps, as in ByzFL. -1: the one farthest along
            the top direction of this step alone, so that steps copy different rows. The paper
            follows that direction over first steps, and keeps to one row then.
    """
    return Attack("mimic", (("target", target),))


def min_max(direction: str = "std") -> Attack:
    """As far from every honest row as the two that are farthest apart are from each other."""
    return Attack("min_max", (("direction", direction),))


def min_sum(direction: str = "std", bound: str = "max") -> Attack:
    """As far as the sum of squared distances to honest rows is one that an honest row has.

    Args:
        direction: "unit": -mu / |mu|; "std": -sigma; "sign": -sign(mu).
        bound: the largest sum of an honest row, as in the paper, or the smallest, as in the
            authors' code ("min").
    """
    return Attack("min_sum", (("direction", direction), ("bound", bound)))


def free_riding(sigma: float = 0.0) -> Attack:
    """Sends back what came down the step before (at first zeros), with some noise."""
    return Attack("free_riding", (("sigma", sigma),))


def optimal(base: str = "alie", rule: str = "mean") -> Attack:
    """`alie` or `inner_product` by liars who know the rule: with the factor that moves it most.

    Factors from 0.1 to 100 are tried in each step, 20 of them, each with a call of the rule on the
    honest rows and the lies: see `attack_search`.

    Args:
        base: "alie": mu - z sigma; "inner_product": -epsilon mu.
        rule: text of the rule, as `robust.parse` reads it.
    """
    return Attack("optimal", (("base", base), ("rule", rule)))


def lying_scale(factor: float = 1000.0) -> Attack:
    """Packets with honest codes and a scale `factor` times theirs: see `lie_about_scale`."""
    return Attack("lying_scale", (("factor", factor),))


def flip_labels(labels: npt.NDArray[np.integer], num_classes: int) -> npt.NDArray[np.integer]:
    """Labels y as num_classes - 1 - y; the gradient is then an honest one of wrong labels."""
    if labels.size and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"labels must be in [0, {num_classes}). Received: {labels.min()} to {labels.max()}"
        )
    # Labels in bytes may have more classes than they hold.
    held = np.promote_types(labels.dtype, np.min_scalar_type(num_classes - 1))
    return num_classes - 1 - labels.astype(held)


def has_scale(compressor: Compressor) -> bool:
    """Whether packets have a scale that can lie."""
    return compressor.codec.name in _SCALES


def lie_about_scale(compressor: Compressor, packets: Bytes, n: int, factor: float) -> Bytes:
    """Packets whose codes are honest, and whose scales are `factor` times what they were.

    Args:
        compressor: one of SCALED, with error feedback or not.
        packets: all packets of n elements; not changed.
        n: elements.
        factor: what the scale is multiplied with; NaN and infinities, too.

    Raises:
        ValueError: packets of the compressor have no such scale.
    """
    codec = compressor.of_size(n).codec  # what is mixed sends small tensors as fp16
    if not has_scale(codec):
        known = ", ".join(SCALED)
        raise ValueError(
            f"the compressor must be one of {known}. Received: {compressor.text} for {n} elements"
        )
    offset, block = _SCALES[codec.name]
    lying = np.array(packets, np.uint8, copy=True)
    at = 0
    for size in packet_sizes(n):
        count = 2 if block is None else -(-size // int(dict(codec.params)[block]))
        begin = at + PREFIX_BYTES + offset
        scales = np.frombuffer(lying[begin : begin + 4 * count].tobytes(), "<f4")
        with np.errstate(all="ignore"):
            scaled = (scales * np.float32(factor)).astype("<f4")
        lying[begin : begin + 4 * count] = np.frombuffer(scaled.tobytes(), np.uint8)
        at += codec.wire_bytes(size)
    return lying


def top_direction(rows: Doubles, steps: int = 20) -> Doubles:
    """The direction in which centred rows differ most, by power iteration; of norm 1, or zeros."""
    centred = rows - rows.mean(axis=0)
    # It is a sum of rows, so all steps but the last are taken on n x n products.
    products = np.einsum("ik,jk->ij", centred, centred)
    shares = np.zeros(len(rows))
    shares[int(np.argmax(np.diagonal(products)))] = 1.0
    for _ in range(steps):
        shares = np.einsum("ij,j->i", products, shares)
        largest = float(np.abs(shares).max())
        if largest == 0.0:
            return np.zeros(rows.shape[1])
        shares = shares / largest
    direction = np.einsum("i,ij->j", shares, centred)
    norm = float(np.linalg.norm(direction))
    return direction / norm if norm else np.zeros(rows.shape[1])


def liars(
    n: int,
    q: int,
    seed: int,
    step: int = 0,
    *,
    fixed: bool = False,
    placement: str = "random",
    r: int = 1,
    group_seed: int | None = None,
) -> tuple[int, ...]:
    """Who lies: q of n workers.

    Args:
        n: workers.
        q: how many lie.
        seed: of the adversary.
        step: of the run.
        fixed: the same in all steps.
        placement: "random"; or as many groups of r as they can own: "worst" of groups of
            neighbours, or with `group_seed` of those that the server has drawn with it.
        r: workers of a group.
        group_seed: the server's seed, which "worst" then knows.

    Raises:
        ValueError: q is not in [0, n], or there is no such placement.
    """
    if not 0 <= q <= n:
        raise ValueError(f"`q` must be in [0, n]. Received: q={q}, n={n}")
    _one_of("placement", placement, PLACEMENTS)
    if placement == RANDOM:
        order = secret_order(n, seed, 0 if fixed else step, "attack/liars")
        return tuple(sorted(order[:q]))
    known = groups(n, r, group_seed or 0, step, fixed=group_seed is None)
    chosen: list[int] = []
    for one in sorted(known, key=len):
        needed = len(one) // 2 + 1
        if len(chosen) + needed <= q:
            chosen += one[:needed]
    rest = [worker for one in known for worker in one if worker not in chosen]
    return tuple(sorted([*chosen, *rest[: q - len(chosen)]]))


def _one_of(name: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ValueError(f"`{name}` must be one of {', '.join(known)}. Received: {name}={value!r}")
    return value
