# SPDX-License-Identifier: Apache-2.0
r"""Where servers and children stand in a tree: its leaves, and what a server has heard from above.

                  server                 leaves, in tree order:
                 /      \                a (2 workers), b (1), c (4)
      server `west`      c
       /       \
      a         b

A leaf is a child that computes gradients: a party of Horovod workers, or a single worker. A child
says which leaves it stands for when it joins: itself, or, as the server of a party, those below it,
each by its path from there, `west/a` of a region. When all have joined, every leaf learns the names
of all of them, so it knows its own number among them.

Invariant: the leaves of a child follow one another, in the order of its own children.
"""

import dataclasses
import functools
import itertools
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from tf_hips.errors import ProtocolError
from tf_hips.ps.transport.wire import Buffer, check_name
from tf_hips.robust.rows import lesser_median

MAX_LEAVES = 4096
MAX_WORKERS = 1 << 20
MAX_DEPTH = 64
FAR_LARGER = 8
"""A number of workers that is so many times that of others is looked at, where some may lie."""
BETWEEN = "/"  # of the names of a path; no name has it

Leaf = tuple[str, int]
Leaves = tuple[Leaf, ...]
Paths = tuple[str, ...]
Guard = tuple[str, str | None, int | None]
"""Of a server, what others must know of its rounds: its path, the robust rule by which it merges,
if it has one, and how many children its quorum waits for, if it has that."""
Guards = tuple[Guard, ...]
"""Those of a tree that have either; the path of the server that they are told by is ""."""

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_ABSENT = (1 << 64) - 1
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Place:
    """What a party server has heard when it joined the server above it.

    Attributes:
        first: number of its first leaf among those of the whole tree.
        leaves: of the whole tree.
        compression: text of the compressor of its own way up.
        downlink: text of the compressor of the topmost server's way down.
        rule: text of the topmost server's update rule.
        session: what tells the run above from others of its name.
        first_group: number of its first group of workers with batches of their own.
        groups: how many of these there are in the whole tree.
        paths: of the leaves of the whole tree, from the topmost server.
        guards: of the servers of the whole tree.
    """

    first: int
    leaves: Leaves
    compression: str
    downlink: str
    rule: str
    session: str
    first_group: int
    groups: int
    # A state that was kept before these were told lacks them.
    paths: Paths = dataclasses.field(default=(), compare=False)
    guards: Guards = dataclasses.field(default=(), compare=False)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Place":
        """Reads what `dataclasses.asdict` has made and JSON has carried."""
        read = {
            "leaves": tuple((str(site), int(n)) for site, n in fields["leaves"]),
            "paths": tuple(map(str, fields.get("paths", ()))),
            "guards": as_guards(fields.get("guards", ())),
        }
        return cls(**fields | read)

    @property
    def num_leaves(self) -> int:
        """Leaves of the whole tree."""
        return len(self.leaves)


def read_leaves(value: object, site: str, workers: int) -> Leaves:
    """The leaves that a child stands for, each by its path from there; None: itself alone.

    Raises:
        ProtocolError: `value` is no such list, or its workers are not `workers` in all.
    """
    if value is None:
        return ((site, workers),)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_LEAVES:
        raise ProtocolError(f"`leaves` must be a list of 1 to {MAX_LEAVES} pairs.")
    leaves = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[1]) is not int:
            raise ProtocolError(
                f"A leaf must be a pair of site and workers. Received: {str(pair)[:80]}"
            )
        try:
            parts = str(pair[0]).split(BETWEEN, MAX_DEPTH)
            path = BETWEEN.join(check_name("leaves", part) for part in parts)
            leaves.append((path, pair[1]))
        except ValueError as error:
            raise ProtocolError(str(error)) from error
    check_workers(leaves)
    if sum(count for _, count in leaves) != workers:
        raise ProtocolError(
            f"`workers` must be those of all leaves. Received: workers={workers} for "
            f"{sum(count for _, count in leaves)}"
        )
    return tuple(leaves)


def read_guards(value: object, *, is_leaf: bool) -> Guards:
    """What the server of a party says of itself and of those below it; None: nothing.

    Raises:
        ProtocolError: `value` is no such list, or a leaf says it.
    """
    if value is None:
        return ()
    if is_leaf or not isinstance(value, list) or len(value) > MAX_LEAVES:
        raise ProtocolError(
            f"`guards` must be a list of at most {MAX_LEAVES} triples, of the server of a party."
        )
    for one in value:
        if not isinstance(one, list) or len(one) != 3 or not _is_guard(*one):
            raise ProtocolError(
                "A guard must be the path of a server, a robust rule or null, and how many "
                f"children its quorum waits for or null. Received: {str(one)[:80]}"
            )
    return as_guards(value)


def _is_guard(path: object, rule: object, least: object) -> bool:
    if not isinstance(path, str) or path.count(BETWEEN) > MAX_DEPTH:
        return False
    try:
        for part in path.split(BETWEEN) if path else ():
            check_name("guards", part)
    except ValueError:
        return False
    is_count = least is None or (type(least) is int and 1 <= least <= MAX_LEAVES)
    return is_count and (rule is None or isinstance(rule, str))


def as_guards(values: Iterable[Sequence[Any]]) -> Guards:
    """Guards of what JSON has made of them."""
    return tuple((path, rule, least) for path, rule, least in values)


def read_groups(value: int | None, workers: int, *, is_leaf: bool) -> int:
    """How many groups of a child's workers have batches of their own; None: each worker has.

    Fewer are of the server of a party whose children vote.

    Raises:
        ProtocolError: it is out of range.
    """
    groups = workers if value is None else value
    if not 1 <= groups <= workers or (is_leaf and groups != workers):
        raise ProtocolError(
            f"`groups` must be from 1 to the number of workers, and of a party without a server "
            f"that number. Received: groups={str(groups)[:40]} of {workers} workers"
        )
    return groups


def check_workers(leaves: Iterable[Leaf]) -> None:
    """Raises ProtocolError unless each leaf has a sane number of workers."""
    for site, count in leaves:
        if not 1 <= count <= MAX_WORKERS:
            raise ProtocolError(
                f"`workers` must be from 1 to 2^20. Received: workers={count} of site `{site}`"
            )


def far_larger(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Positions of counts that are far larger than most, each with the median of the others.

    Of an even number of others it is the lesser one: of five counts two may be such.
    """
    found = []
    for place, count in enumerate(counts):
        others = [*counts[:place], *counts[place + 1 :]]
        if others and count > FAR_LARGER * lesser_median(others):
            found.append((place, lesser_median(others)))
    return found


def path_of(site: str, path: str) -> str:
    """The path of a leaf from the server of `site`, which is the leaf itself or stands above it."""
    return site if path == site else f"{site}{BETWEEN}{path}"


@dataclasses.dataclass(frozen=True)
class Branch:
    """A leaf of a tree, or a server that stands above several.

    Attributes:
        path: from the topmost server; of a server that stands above one other alone, which is left
            out, its own.
        leaf: number of the leaf; None: it is a server.
        below: what the server's children are.
    """

    path: str
    leaf: int | None
    below: "tuple[Branch, ...]" = ()


@functools.lru_cache(maxsize=4)
def branches(paths: tuple[str, ...]) -> tuple[Branch, ...]:
    """The children of the topmost server, from the paths of the leaves.

    Kept, as it takes long where a liar claims thousands of leaves far below.
    """
    root: dict[str, Any] = {}
    for leaf, path in enumerate(paths):
        node = root
        for part in path.split(BETWEEN):
            node = node.setdefault(part, {})
        # Who lies may say that it is a leaf itself, beside others that are below it.
        node[""] = Branch(path, leaf)
    return tuple(_branch(name, node) for name, node in root.items())


def _branch(path: str, node: dict[str, Any]) -> Branch:
    below = tuple(
        child if isinstance(child, Branch) else _branch(f"{path}{BETWEEN}{name}", child)
        for name, child in node.items()
    )
    return (
        dataclasses.replace(below[0], path=path) if len(below) == 1 else Branch(path, None, below)
    )


def merged(
    paths: tuple[str, ...], values: Sequence[_T | None], merge: Callable[[list[_T]], _T | None]
) -> _T | None:
    """One value of all leaves, that counts each child of a server once, however large it is.

    A child says by itself how many leaves it has.

    Args:
        paths: of the leaves, from the topmost server.
        values: of the leaves, in the same order; None: it has none.
        merge: makes the value of a server from those of its children that have one, at least one;
            of one child it is that child's. None: it has none.

    Returns:
        That of the topmost server; None: it has none.
    """
    if len(paths) != len(values):
        raise ValueError(f"Each of {len(paths)} leaves must have a value. Received: {len(values)}")
    return _merged(branches(paths), values, merge)


def _merged(
    below: Sequence[Branch],
    values: Sequence[_T | None],
    merge: Callable[[list[_T]], _T | None],
) -> _T | None:
    told = (
        _merged(one.below, values, merge) if one.leaf is None else values[one.leaf] for one in below
    )
    known = [one for one in told if one is not None]
    return merge(known) if known else None


def check_names(paths: Iterable[str], own: str | None) -> None:
    """Raises ProtocolError where two of a tree have one name, by which each has noise of its own.

    Args:
        paths: of all leaves.
        own: name of the server itself towards the one above it, if there is one.
    """
    seen = {own: f"{own}, which is this server"} if own is not None else {}
    whole: set[str] = set()
    for path in paths:
        parts = path.split(BETWEEN)
        for end, name in enumerate(parts, 1):
            here = BETWEEN.join(parts[:end])
            there = seen.setdefault(name, here)
            # Leaves share the servers on their ways, and nothing else.
            if there != here or (end == len(parts) and here in whole):
                raise ProtocolError(
                    f"Every site of a tree must have a name of its own, party servers included. "
                    f"Received: `{name}` twice, as {there} and as {here}"
                )
        whole.add(path)


def check_above(guards: Guards, paths: Iterable[str]) -> None:
    """Raises ProtocolError unless each is of one server that stands above some of the leaves.

    Args:
        guards: that a child brings, each path from there.
        paths: of its leaves, from there.
    """
    above = {""}
    for path in paths:
        parts = path.split(BETWEEN)
        above |= {BETWEEN.join(parts[:end]) for end in range(1, len(parts))}
    for one, _, _ in guards:
        if one not in above:
            raise ProtocolError(
                f"`guards` must be of servers above leaves, once each. Received: {one[:80]!r}"
            )
        above.remove(one)


def bundle(payloads: Sequence[Buffer | None]) -> bytes:
    """Payloads of several leaves as one: u32 count | u64 length of each | the payloads.

    A leaf that is absent, None, has 2^64 - 1 for a length.
    """
    lengths = (_LENGTH.pack(_ABSENT if one is None else len(one)) for one in payloads)
    return b"".join((_COUNT.pack(len(payloads)), *lengths, *(one or b"" for one in payloads)))


def unbundle(data: Buffer, count: int) -> list[memoryview | None]:
    """Reads what `bundle` made of `count` payloads; views of `data`, None where one is absent.

    Raises:
        ProtocolError: `data` is something else.
    """
    view = memoryview(data)
    front = _COUNT.size + count * _LENGTH.size
    if len(view) < front or _COUNT.unpack_from(view)[0] != count:
        raise ProtocolError(f"A bundle must have the payloads of {count} leaves.")
    lengths = [_LENGTH.unpack_from(view, _COUNT.size + n * _LENGTH.size)[0] for n in range(count)]
    sizes = [0 if length == _ABSENT else length for length in lengths]
    if front + sum(sizes) != len(view):
        raise ProtocolError(
            f"The payloads of a bundle must fill it: {front + sum(sizes)} bytes. Received: "
            f"{len(view)}"
        )
    cuts = itertools.accumulate(sizes, initial=front)
    parts = [view[start:end] for start, end in itertools.pairwise(cuts)]
    return [
        None if length == _ABSENT else part for length, part in zip(lengths, parts, strict=True)
    ]
