# SPDX-License-Identifier: Apache-2.0
"""Programs that a grammar makes are the same in every back end.

A few here; `python -m tests.fuzz programs` compares any number.
"""

import functools
import random
import re

import pytest

import compll
from tests.compll.differential import check_cpp, check_cuda, compiled_program, has_cuda, shrink
from tests.compll.generated_integers import generate_integers
from tests.compll.generated_programs import VALUES, generate
from tests.compll.support import in_one_library
from tests.fuzz import programs

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

# Seeds that found something, or whose programs have what those lack.
SEEDS = {
    0: "indices of a filter, and a state",
    3: "a field with fewer blocks than the gradient",
    73: "a state that is reduced and overwritten at once",
    137: "codes that are read in order and mirrored",
    326: "a decoder that reduces what rows decode",
}
CUDA_SEEDS = (2, 3, 73, 88)
INTEGER_SEED = 0
# What programs are made of, as it stands in them.
PARTS = (
    *("map(", "range(", "reduce(", "block_reduce(", "filter(", "sort(", "top_k(", "sample("),
    "hadamard(",
    *("scatter(", "random<float>", "random<int>", "lambda_func", "if (", "else", "?", "state "),
    *("bitcast<float>", "bitcast<uint32>", "^ 1]", "^ 3]", "^ 7]", "/ block]", "/ 128]", "seed"),
    *("sum)", "prod)", "min)", "max)", "count)", "and)", "or)", "uint1*", "uint2*", "uint4*"),
    *("uint8*", "uint16*", "uint32*", "uint<width>*", "uint<17 - width>*", "uint<11>*", "{0}.size"),
    *("log2(", "sqrt(", "round(", "sign(", "&&", "||", "-> uint1", "packet, width", "+=", "less)"),
)


def made(seed):
    return generate(random.Random(seed))


@functools.cache
def quick():
    """Programs of SEEDS, and the library of all."""
    return in_one_library({seed: made(seed).text for seed in SEEDS}, "made")


@pytest.mark.parametrize("seed", SEEDS)
def test_machine_code_equals_the_reference(seed):
    found, library = quick()
    check_cpp(found[seed], library=library)


def test_integers_in_machine_code_equal_the_reference():
    """A seed with a name of 32 bits among numbers of 64; used as it is, C++ does not compile it."""
    one = generate_integers(random.Random(INTEGER_SEED))
    check_cpp(compll.compile_text(one.text, "made"), sizes=(33,), values_of=VALUES[:1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", CUDA_SEEDS)
def test_kernels_equal_the_reference(seed):
    program = compll.compile_text(made(seed).text, "made")
    assert has_cuda(program, made(seed))
    check_cuda(program)


def test_programs_are_accepted_and_have_everything():
    found = [made(seed) for seed in range(100)]
    accepted = [one.text for one in found if compiled_program(one) is not None]
    assert len(accepted) > 2 / 3 * len(found)
    one = made(CUDA_SEEDS[0])
    assert has_cuda(compll.compile_text(one.text, "made"), one)
    together = "\n".join(accepted)
    assert not [part for part in PARTS if part.replace("{0}", "") not in together]
    for function in ("reduce(", "block_reduce(", "sort(", "top_k(", "hadamard("):
        decoders = [text.partition("MadeDecode")[2] for text in accepted]
        assert any(function in text for text in decoders)
    assert made(7) == made(7)
    assert made(7) != made(8)


def test_programs_of_integers_are_accepted_and_have_everything():
    found = [generate_integers(random.Random(seed)) for seed in range(20)]
    assert sum(compiled_program(one) is not None for one in found) > 2 / 3 * len(found)
    together = "\n".join(one.text for one in found)
    parts = ["? (", ") ? ", "~", "^", "(!", "sign(", "min(", "abs(", "/", "%", "<< 63", "& 63)"]
    parts += ["(1 << 60)", "(-0.0)", "bitcast<uint32>(g);", "block_reduce(", "reduce(", ">= "]
    assert not [part for part in parts if part not in together]
    assert found[7] == generate_integers(random.Random(7))


def test_a_program_that_fails_is_made_short():
    whole = made(next(seed for seed in range(99) if "sort(" in "".join(made(seed).decode)))
    short = shrink(whole, lambda one: "sort(" in "".join(one.decode))
    assert len(short.text) < 0.7 * len(whole.text)
    assert compiled_program(short) is not None
    # Nothing is left that could go.
    assert len(short.fields) == 1
    assert len(short.decode) == 2
    assert shrink(whole, lambda one: False) == whole


def test_the_long_run_tells_what_fails(monkeypatch, capsys):
    monkeypatch.setattr(programs, "check_cpp", _no_reductions)
    seeds = [seed for seed in range(12) if _fails(made(seed))]
    assert 0 < len(seeds) < 12
    assert programs.main(["--count", "12", "--tries", "9"]) == 1
    told = capsys.readouterr().out
    assert [int(seed) for seed in re.findall(r"^seed (\d+), C\+\+: no", told, re.M)] == seeds
    assert f"12 programs, 0 refused, {len(seeds)} with failures" in told
    assert f"again: python -m tests.fuzz programs --seed {seeds[0]} --count 1" in told
    fine = next(seed for seed in range(12) if seed not in seeds)
    assert programs.main(["--seed", str(fine), "--count", "1"]) == 0


def _fails(one):
    return programs.failure(lambda program: _no_reductions(program, ()), compiled_program(one))


def _no_reductions(program, flags):
    """A back end that cannot reduce in a Decode."""
    names = {type(let.value).__name__ for let in program.decode.lets}
    assert "Reduce" not in names, "no reductions"
