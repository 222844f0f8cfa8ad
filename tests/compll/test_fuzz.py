# SPDX-License-Identifier: Apache-2.0
"""Whatever the text, the compiler refuses it with diagnostics or makes a codec of it that is right.

Short here; `make test-all` goes on for minutes, and compares accepted programs in C++, too. The
examples are the same on every run; `--hypothesis-profile=explore` looks for new ones.
"""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compll
from compll.backends.cache import build
from compll.backends.library import CompiledCodec
from compll.cli import main
from tests.compll import fuzzing, hurry
from tests.compll.support import SPECS, assert_same_floats

pytestmark = pytest.mark.heavy  # hundreds of examples each

ANY = settings(suppress_health_check=list(HealthCheck))
CHOICES = st.randoms(use_true_random=False)


@settings(ANY, max_examples=100)
@given(CHOICES)
def test_changed_specifications(choose):
    fuzzing.survives(fuzzing.mutate(choose).encode("utf-8"))


@settings(ANY, max_examples=150)
@given(st.binary(max_size=120))
def test_any_bytes(data):
    fuzzing.survives(data)
    fuzzing.survives(b"void FooEncode(float* gradient, uint8* out) {" + data + b"}")


@st.composite
def changed_bytes(draw):
    """A specification of the product with some bytes changed."""
    text = bytearray(draw(st.sampled_from(sorted(SPECS.glob("*.pse")))).read_bytes())
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text) - 1))
        text[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(text)


@settings(ANY, max_examples=60)
@given(changed_bytes())
def test_changed_bytes(text):
    fuzzing.survives(text)


@pytest.mark.timeout(120)
@settings(ANY, max_examples=40)
@given(CHOICES)
def test_the_command_line_shows_no_traceback(tmp_path_factory, choose):
    file = tmp_path_factory.getbasetemp() / "changed.pse"
    file.write_bytes(fuzzing.mutate(choose).encode("utf-8"))
    for command in (["check"], ["ir", "--after", "pack"]):
        assert main([command[0], str(file), *command[1:]]) in (0, 1)


def test_changes_get_through():
    """Else the tests above would try the parser alone."""
    texts = [fuzzing.mutate(random.Random(seed)) for seed in range(60)]
    accepted = [text for text in texts if fuzzing.survives(text.encode("utf-8")) is not None]
    assert len(accepted) > 2
    assert len(set(texts)) > 50


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(ANY, max_examples=10_000)
@given(CHOICES)
def test_many_changed_specifications(choose):
    fuzzing.survives(fuzzing.mutate(choose).encode("utf-8"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(ANY, max_examples=10_000)
@given(changed_bytes())
def test_many_changed_bytes(text):
    fuzzing.survives(text)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("batch", range(4))
def test_accepted_programs_are_the_same_in_c(batch):
    programs = []
    seed = batch * 1_000_000
    while len(programs) < 20:
        seed += 1
        text = fuzzing.mutate(random.Random(seed)).encode("utf-8")
        program = fuzzing.survives(text, f"fuzz{len(programs)}")
        if program is not None and fuzzing.codecs(program) is not None:
            programs.append(program)
    # One library for all, so without the symbol that names its only codec.
    source = "#undef TF_HIPS_CODEC_ID\n" + "\n".join(
        compll.generate(program)[f"{program.name}.codec.cc"] for program in programs
    )
    library = build(source, "fuzz", hurry.flags())
    for program in programs:
        (reference,) = fuzzing.codecs(program)
        compiled = CompiledCodec(program, library, **fuzzing.values_of(program))
        for n in (0, 1, fuzzing.N, 1500):
            x = fuzzing.sample(n)
            if program.encode is not None:
                names = program.state_names
                states = [np.zeros((len(names), n), np.float32) if names else None for _ in "rc"]
                # Twice: what the first call keeps, the second one reads.
                for step in (2, 3):
                    packet = reference.encode(x, seed=9, step=step, state=states[0])
                    again = compiled.encode(x, seed=9, step=step, state=states[1])
                    assert again.tobytes() == packet.tobytes()
                if names:
                    assert_same_floats(*states)
            if program.encode is not None and program.decode is not None:
                assert_same_floats(compiled.decode(packet, n), reference.decode(packet, n))
            if program.decode is not None:
                body = np.random.default_rng(n).integers(0, 256, reference.body_bytes(n), np.uint8)
                assert decoded(compiled, body, n) == decoded(reference, body, n)


def decoded(codec, body, n):
    """What any bytes decode to, each NaN alike, or that they are refused."""
    try:
        if isinstance(codec, CompiledCodec):
            out = np.empty(n, np.float32)
            codec.decode_body(body, out)
        else:
            out = codec.decode_body(body, n)
    except compll.PacketError:
        return "refused"
    return np.where(np.isnan(out), np.float32(np.nan), out).tobytes()
