# SPDX-License-Identifier: Apache-2.0
"""The part `wire` of `make bench-collectives`; see `collectives`.

Before the rounds Horovod's two ways, each gradient by itself or all as one group, make `TRIES`
steps each at each rate; the faster one counts there. In a round it and our sum make a step by
turns. Where a step takes longer than `LONG_S`, only the way that was faster at the rate before
makes one, once for both codecs.
"""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.collectives_jobs import (
    LONG_S,
    ONEBIT,
    RATES,
    Bench,
    Options,
    Row,
    Steps,
    bench_of,
    bound_s,
    link_of,
    ratio_row,
    step_rows,
)

CODECS = {"onebit": ONEBIT, "tbq": "error_feedback(tbq)"}
PRECISIONS = ("fp32", "fp16")
TRIES = 2
# From the fastest link on.
LINKS = (None, *reversed(RATES))
UNLIMITED = "no limit, offload"
"""What a link without a limit is called: its frames are as large as on loopback."""

# By way and rate: steps of one each, as they came.
Found = dict[tuple[str, int | None], list[Steps]]


def wire(options: Options) -> Iterator[Row]:
    """Our sums beside their bounds and beside Horovod's."""
    with bench_of(options) as bench:
        bench.load("vgg19")
        theirs: Found = {}
        best = _tried(bench, theirs)
        for name, text in CODECS.items():
            bench.make(name, "sum", choices=[[text, "ps", 1]])
            bench.make("codecs", "codecs", of=name)
            bench.make("packets", "packets", text=text)
            found = _rounds(bench, name, best, theirs)
            bench.drop(name, "codecs", "packets")
            for way, mbit in ((name, mbit) for mbit in LINKS):
                yield from _step_rows(way, mbit, found[way, mbit])
            for way in ("codecs", "packets"):
                yield from _step_rows(f"{way} of {name}", None, found[way, None])
            yield from _over_bound(name, found)
            yield from _over_ours(name, found, best, theirs)
        for (way, mbit), steps in theirs.items():
            yield from _step_rows(f"Horovod {way}", mbit, steps)


def _tried(bench: Bench, theirs: Found) -> dict[tuple[str, int | None], str]:
    """Horovod's faster way of each precision, by rate."""
    best: dict[tuple[str, int | None], str] = {}
    for precision in PRECISIONS:
        ways = {f"{precision}-each": False, f"{precision}-grouped": True}
        for way, grouped in ways.items():
            bench.make(way, "horovod", precision=precision, grouped=grouped)
        in_order = list(ways)
        for mbit in LINKS:
            bench.limit(mbit)
            for way in in_order * TRIES:
                made = bench.theirs(way)
                theirs.setdefault((way, mbit), []).append(made)
                if made.median > LONG_S:
                    break
            if (in_order[-1], mbit) in theirs:
                in_order.sort(key=lambda way: _joined(theirs[way, mbit]).median)
            best[precision, mbit] = in_order[0]
    return best


def _rounds(
    bench: Bench, name: str, best: dict[tuple[str, int | None], str], theirs: Found
) -> Found:
    """Steps of our sum, of its parts, and of Horovod's ways as far as they are not long."""
    found: Found = {}
    for number in range(bench.options.rounds):
        for mbit in LINKS:
            bench.limit(mbit)
            ours = [name] if mbit else [name, "codecs", "packets"]
            others = [best[precision, mbit] for precision in PRECISIONS]
            if not bench.options.is_full:
                others = [way for way in others if theirs[way, mbit][0].median <= LONG_S]
            ways = [*ours, *others]
            for way in reversed(ways) if number % 2 else ways:
                made = bench.theirs(way) if way in others else bench.ours(way)
                found.setdefault((way, mbit), []).append(made)
                if way in others:
                    theirs[way, mbit].append(made)
    return found


def _over_bound(name: str, found: Found) -> Iterator[Row]:
    codecs = found["codecs", None]
    for mbit in RATES:
        steps = found[name, mbit]
        ratios = [
            step.median / bound_s(step.num_bytes, mbit, alone.median)
            for step, alone in zip(steps, codecs, strict=True)
        ]
        wire_s = _joined(steps).num_bytes * 8 / (mbit * 1e6)
        yield ratio_row(
            "wire",
            f"{name} over its bound",
            ratios,
            link=link_of(mbit),
            against=f"wire {wire_s:.3g} s, codecs {_joined(codecs).median:.3g} s",
            about=f"collectives-bound-{name}-{mbit}",
        )


def _over_ours(
    name: str, found: Found, best: dict[tuple[str, int | None], str], theirs: Found
) -> Iterator[Row]:
    for precision in PRECISIONS:
        for mbit in LINKS:
            way, ours = best[precision, mbit], found[name, mbit]
            # A long one was made once, and is held against all of ours.
            steps = found.get((way, mbit)) or theirs[way, mbit][:1] * len(ours)
            num = len(found.get((way, mbit), [0]))
            is_target = (precision, mbit) == ("fp32", RATES[0])
            yield ratio_row(
                "wire",
                f"{precision} allreduce over {name}",
                [other.median / mine.median for other, mine in zip(steps, ours, strict=True)],
                link=_link(mbit),
                against=f"Horovod {way}: {num} step{'s' * (num > 1)}",
                about=f"collectives-faster-{name}" if is_target else "",
            )


def _step_rows(what: str, mbit: int | None, steps: Sequence[Steps]) -> Iterator[Row]:
    return step_rows("wire", what, mbit, _joined(steps), _link(mbit))


def _link(mbit: int | None) -> str:
    return UNLIMITED if mbit is None else link_of(mbit)


def _joined(blocks: Sequence[Steps]) -> Steps:
    """Blocks of one step each."""
    return Steps(
        [second for block in blocks for second in block.seconds],
        statistics.median(block.num_bytes for block in blocks),
    )
