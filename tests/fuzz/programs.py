# SPDX-License-Identifier: Apache-2.0
"""Generated programs of the CompLL language in every back end: `python -m tests.fuzz programs`.

A seed whose program one back end runs otherwise than the reference is told, and then the program in
as few lines as still show it.
"""

import argparse
import functools
import os
import random
import sys
import traceback
from collections.abc import Callable, Sequence

import compll
from tests.compll.differential import (
    check_cpp,
    check_cuda,
    compiled_program,
    has_cuda,
    shrink,
)
from tests.compll.generated_feedback import generate_feedback
from tests.compll.generated_integers import generate_integers
from tests.compll.generated_programs import Made, generate
from tests.support import foreign

_SHOWN_CHARACTERS = 600


def main(argv: Sequence[str]) -> int:
    """Compares `--count` programs from `--seed` on; returns 1 if any differs, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz programs",
        description="Compares the back ends of CompLL on programs that a grammar makes.",
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--count", type=int, default=300, help="how many (default: 300)")
    parser.add_argument("--cuda", action="store_true", help="CUDA's kernels too, run on this CPU")
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument(
        "--feedback",
        action="store_true",
        help="quantisers whose loops take care of error feedback, instead of anything",
    )
    grammar.add_argument(
        "--integers",
        action="store_true",
        help="integers around the ends of 32 bits, instead of anything",
    )
    parser.add_argument(
        "--shipped",
        action="store_true",
        help="C++ as it is shipped, with clones for AVX-512 and -O3: takes longer to build",
    )
    parser.add_argument(
        "--aarch64",
        action="store_true",
        help="C++ compiled for AArch64, run by an emulator: a cross compiler and qemu are needed",
    )
    parser.add_argument(
        "--tries", type=int, default=200, help="to shorten a program that fails (default: 200)"
    )
    args = parser.parse_args(argv)
    flags = () if args.shipped else None
    cpp, more = functools.partial(check_cpp, flags=flags), ""
    if args.aarch64:
        if args.cuda or foreign.missing():
            parser.error(foreign.missing() or "--aarch64 is for C++ alone")
        os.environ["CXX"] = foreign.compiler()
        cpp, more = functools.partial(cpp, kind=foreign.Codec), " --aarch64"
    make = generate
    if args.feedback:
        make, more = generate_feedback, f"{more} --feedback"
    elif args.integers:
        make, more = generate_integers, f"{more} --integers"
    refused, failed = 0, []
    for seed in range(args.seed, args.seed + args.count):
        made = make(random.Random(seed))
        program = compiled_program(made)
        if program is None:
            refused += 1
            continue
        for back_end, check in _checks(made, program, cpp, with_cuda=args.cuda).items():
            told = failure(check, program)
            if told is None:
                continue
            failed.append(seed)
            print(f"seed {seed}, {back_end}: {told[:_SHOWN_CHARACTERS]}", flush=True)
            print(shrink(made, failing(check, told), args.tries).text, flush=True)
    print(f"{args.count} programs, {refused} refused, {len(set(failed))} with failures", flush=True)
    for seed in dict.fromkeys(failed):
        print(f"again: python -m tests.fuzz programs --seed {seed} --count 1{more}", flush=True)
    return 1 if failed else 0


def _checks(
    made: Made, program: compll.Program, cpp: Callable[[compll.Program], None], *, with_cuda: bool
) -> dict[str, Callable[[compll.Program], None]]:
    """What is asked of a program, by back end."""
    checks: dict[str, Callable[[compll.Program], None]] = {"C++": cpp}
    if with_cuda and has_cuda(program, made):
        checks["CUDA"] = check_cuda
    return checks


def failure(check: Callable[[compll.Program], None], program: compll.Program) -> str | None:
    """What is wrong with a program; None: nothing is.

    An error within a back end, or a compiler that refuses what it made, is a failure too.
    """
    try:
        check(program)
    except AssertionError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {last.filename}:{last.lineno}: {error}"
    return None


def failing(check: Callable[[compll.Program], None], told: str) -> Callable[[Made], bool]:
    """Whether a program fails in the way that `told` does: the first word of it."""

    def fails(made: Made) -> bool:
        program = compiled_program(made)
        found = None if program is None else failure(check, program)
        return found is not None and found.split(":")[0].split()[0] == told.split(":")[0].split()[0]

    return fails


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
