# SPDX-License-Identifier: Apache-2.0
"""A training in NumPy whose final weights show every bit that a round got wrong.

    gradient = weights - target(child) + noise(seed, round, child)

Gradients depend on the weights, so whatever goes wrong in one round is in all later ones. Data and
noise are functions of (seed, round, child), as a run that can be repeated needs.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.terms.model import Model

RATE = 0.125
SMALL = ((3, 3, 1, 8), (8,), (72, 10), (10,), ())
# The first tensor has two chunks, and its dense packets need five messages.
LARGE = (((1 << 20) + 5000,), (40,), (30, 4))


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained, and how it travels.

    Attributes:
        name: by which command lines know it.
        up: text of the compressor of the way up.
        down: the same of the way down.
        sites: the children.
        shapes: of the weights.
        is_secure: mutual TLS; else plain text.
        rounds: how many there are.
        seed: of the run.
        has_quorum: whether rounds of the global server may close without some children.
        shards: global servers that share the model.
        parties: sites that have a server of their own, each with those of `sites` below it, which
            follow one another there.
        rule: of the global server; None: the sum.
        draws: whether the rule draws from a secret of the run, so that another run has other bits.
    """

    name: str
    up: str
    down: str
    sites: tuple[str, ...] = ("a", "b")
    shapes: tuple[tuple[int, ...], ...] = SMALL
    is_secure: bool = False
    rounds: int = 8
    seed: int = 7
    has_quorum: bool = False
    shards: int = 1
    parties: tuple[tuple[str, tuple[str, ...]], ...] = ()
    rule: str | None = None
    draws: bool = False

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Setting":
        """Reads what `dataclasses.asdict` gives after it has been JSON."""
        shapes = tuple(tuple(shape) for shape in fields["shapes"])
        parties = tuple((site, tuple(leaves)) for site, leaves in fields["parties"])
        return cls(
            **fields | {"sites": tuple(fields["sites"]), "shapes": shapes, "parties": parties}
        )

    def server_of(self, site: str) -> str | None:
        """The party whose server `site` speaks to; None: the global server."""
        return next((name for name, leaves in self.parties if site in leaves), None)

    @property
    def top_children(self) -> tuple[str, ...]:
        """Who speaks to the global server, in the order of its sums."""
        return tuple(dict.fromkeys(self.server_of(site) or site for site in self.sites))


_ONEBIT = "error_feedback(onebit)"
SETTINGS = {
    one.name: one
    for one in (
        Setting("dense", "fp32", "fp32", shapes=LARGE),
        Setting("onebit", _ONEBIT, _ONEBIT),
        Setting("tls", _ONEBIT, _ONEBIT, shapes=LARGE, is_secure=True),
        Setting("noise", *["error_feedback(terngrad(bitwidth=2))"] * 2, sites=("a", "b", "c")),
        # Who is late depends on moments: weights are compared with each other only.
        Setting("quorum", _ONEBIT, _ONEBIT, sites=("a", "b", "c"), has_quorum=True),
        Setting("mixed", "error_feedback(topk(ratio=0.05))", _ONEBIT, sites=("a", "b", "c")),
    )
}
_WEST = {"sites": ("a", "b", "c"), "parties": (("west", ("a", "b")),)}
SHARDED = (
    Setting("two", _ONEBIT, _ONEBIT, shards=2),
    Setting("three-tls", "fp32", _ONEBIT, shapes=LARGE, is_secure=True, shards=3),
)
TREES = (
    Setting("tree", _ONEBIT, _ONEBIT, **_WEST),
    Setting("tree-tls", "fp32", "fp32", shapes=LARGE, is_secure=True, **_WEST),
    Setting("tree-two", "error_feedback(topk(ratio=0.05))", _ONEBIT, shards=2, **_WEST),
)
_ABC = {"sites": ("a", "b", "c")}
RULED = (
    Setting("krum", _ONEBIT, _ONEBIT, **_ABC, rule="krum(f=0)"),
    Setting("median", "fp32", _ONEBIT, shapes=LARGE, **_ABC, rule="median"),
    Setting("clipping", "fp16", _ONEBIT, **_ABC, rule="centred_clipping(f=1)"),
    # A step of the optimizer is of a decision, which must be made once.
    Setting("krum-adam", _ONEBIT, "fp32", **_ABC, rule="multi_krum(f=0) >> adam(0.01)"),
)
RULED_TOGETHER = (
    Setting("krum-two", _ONEBIT, _ONEBIT, shards=2, **_ABC, rule="krum(f=0)"),
    Setting(
        "clipping-three",
        "fp32",
        _ONEBIT,
        ("a", "b", "c"),
        shapes=LARGE,
        shards=3,
        rule="nnm(f=1) >> centred_clipping(f=1)",
    ),
)
RULED_TREES = (
    Setting(
        "tree-median",
        _ONEBIT,
        _ONEBIT,
        ("a", "b", "c", "d"),
        rule="median",
        parties=(("west", ("a", "b")),),
    ),
    Setting(
        "sketched",
        _ONEBIT,
        _ONEBIT,
        ("a", "b", "c", "d"),
        rule="sketched(k=64) >> krum(f=0)",
        parties=(("west", ("a", "b")), ("east", ("c", "d"))),
        draws=True,
    ),
)


class Trainer:
    """Weights and residuals of one child."""

    def __init__(self, setting: Setting, child: int) -> None:
        self._setting, self._child = setting, child
        self._model = Model(setting.shapes)
        self._up, self._down = map(compressors.parse, (setting.up, setting.down))
        self._seed = native.derive_seed(setting.seed, f"party/{setting.sites[child]}")
        # Different at all children, until the first synchronisation.
        draw = np.random.default_rng((setting.seed, child)).standard_normal
        self.weights = [np.asarray(draw(shape), np.float32) for shape in setting.shapes]
        self._targets = [np.asarray(draw(shape), np.float32) for shape in setting.shapes]
        self._residuals = [np.zeros(math.prod(shape), np.float32) for shape in setting.shapes]

    def packets(self, number: int) -> npt.NDArray[np.uint8]:
        """What this child sends in a round; called once a round, for the residuals' sake."""
        draw = np.random.default_rng((self._setting.seed, number, self._child)).standard_normal
        found = []
        for tensor, (weight, target) in enumerate(zip(self.weights, self._targets, strict=True)):
            gradient = weight - target + draw(weight.shape, np.float32)
            kept = self._residuals[tensor] if self._up.has_residual else None
            key = native.Key(self._seed, number, tensor)
            found.append(native.encode(self._up, gradient.reshape(-1), key, kept=kept))
        return np.concatenate(found)

    def apply(self, merged: npt.NDArray[np.uint8]) -> None:
        """Takes a step with what came down."""
        scale = np.float32(RATE / len(self._setting.sites))
        lengths = self._model.packet_bytes(self._down)
        at = 0
        for chunk, length in zip(self._model.chunks, lengths, strict=True):
            values = native.decode(self._down, merged[at : at + length], chunk.size)
            part = self.weights[chunk.tensor].reshape(-1)[chunk.offset :][: chunk.size]
            part -= scale * values
            at += length

    def save(self, path: Path, number: int) -> None:
        """Backs up what it has before round `number`; the file is there as a whole or not."""
        names = {f"weight_{place}": one for place, one in enumerate(self.weights)}
        names |= {f"residual_{place}": one for place, one in enumerate(self._residuals)}
        draft = path.with_suffix(".draft.npz")
        np.savez(draft, number=number, **names)
        draft.replace(path)

    def load(self, path: Path) -> int:
        """Goes on from a backup; the round that comes next."""
        with np.load(path) as saved:
            for place in range(len(self.weights)):
                self.weights[place] = saved[f"weight_{place}"]
                self._residuals[place] = saved[f"residual_{place}"]
            return int(saved["number"])

    def digest(self) -> str:
        """A digest of the weights."""
        return hashlib.sha256(b"".join(one.tobytes() for one in self.weights)).hexdigest()


@functools.cache
def undisturbed(setting: Setting) -> str:
    """The digest of the final weights of a run in which nothing happens: a store, and no server."""
    above = _Stores(setting)
    trainers = [Trainer(setting, child) for child in range(len(setting.sites))]
    for one in trainers[1:]:
        one.weights = [weight.copy() for weight in trainers[0].weights]
    for number in range(setting.rounds):
        merged = above.round(number, [one.packets(number) for one in trainers])
        for one in trainers:
            one.apply(merged)
    assert len({one.digest() for one in trainers}) == 1
    return trainers[0].digest()


class _Stores:
    """The servers of a setting, without processes and links. Shards change no bit."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        up, down = map(compressors.parse, (setting.up, setting.down))
        model = Model(setting.shapes)
        self._top = Store(model, setting.top_children, up, down, setting.seed)
        self._below = {
            site: Store(model, leaves, up, up.for_sums, setting.seed, site=site)
            for site, leaves in setting.parties
        }

    def round(self, number: int, packets: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
        """What all get when each site has sent its packets."""
        for store in (self._top, *self._below.values()):
            store.begin(number)
        for site, sent in zip(self._setting.sites, packets, strict=True):
            store, at = self._below.get(self._setting.server_of(site) or "", self._top), 0
            names = self._setting.top_children
            if store is not self._top:
                names = dict(self._setting.parties)[self._setting.server_of(site) or ""]
            for chunk, length in enumerate(store.packet_limits(number)):
                store.add(number, names.index(site), [(chunk, sent[at : at + length])])
                at += length
        for site, store in self._below.items():
            child = self._setting.top_children.index(site)
            self._top.add(number, child, store.ups(number, 0)[1])
        news = sorted(self._top.results(number, 0)[1], key=lambda pair: pair[0])
        for store in self._below.values():
            for chunk, packet in news:
                store.finish(number, chunk, packet)
        return np.concatenate([packet for _, packet in news])
