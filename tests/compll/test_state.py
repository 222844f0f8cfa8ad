# SPDX-License-Identifier: Apache-2.0
"""Vectors that outlive a call of Encode: their meaning, in both back ends, and what keeps them."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import compll
from compll import passes
from compll.backends import tf_op
from compll.backends.in_place import is_in_place
from compll.backends.masks import masks
from compll.cli import main
from compll.ir import nodes
from compll.ir.printer import print_plan, print_program, spec_hash
from compll.ir.verify import IrError, verify
from compll.passes import optimise
from tests.compll import hurry
from tests.compll.support import SPECS, compiled, encoder, gradients

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

FILE = Path(__file__).parent / "momentum.pse"
STATES = "state Foo { float* kept; }\n"


@pytest.fixture(scope="module")
def program():
    return compll.compile_spec(FILE)


def hand_written(x, velocity, residual, decay):
    """One step of momentum.pse in NumPy: what is decoded, and both states."""
    velocity = np.float32(decay) * velocity + x
    velocity = np.where(np.isfinite(velocity), velocity, np.float32(0))
    wanted = residual + velocity
    scale = np.abs(wanted).max(initial=np.float32(0))
    sent = np.where(wanted > scale / 2, scale, np.where(wanted < -scale / 2, -scale, 0))
    return sent.astype(np.float32), velocity, (wanted - sent).astype(np.float32)


def test_a_state_is_carried_from_step_to_step(program):
    codec = compll.Reference(program, decay=0.25)
    assert codec.state_names == ("velocity", "residual")
    state = np.zeros((2, 100), np.float32)
    velocity = residual = np.zeros(100, np.float32)
    rng = np.random.default_rng(0)
    for _ in range(5):
        x = rng.normal(size=100).astype(np.float32)
        sent, velocity, residual = hand_written(x, velocity, residual, 0.25)
        np.testing.assert_array_equal(codec.decode(codec.encode(x, state=state), 100), sent)
        np.testing.assert_array_equal(state, [velocity, residual])


def test_machine_code_equals_the_reference(program):
    codec, reference = compiled(program), compll.Reference(program)
    for n in (0, 1, 7, 1023, 5000):
        states = [np.zeros((2, n), np.float32) for _ in range(2)]
        for x in gradients(n).values():
            with np.errstate(all="ignore"):
                expected = reference.encode(x, state=states[0])
            np.testing.assert_array_equal(codec.encode(x, state=states[1]), expected)
            np.testing.assert_array_equal(states[1].view(np.uint32), states[0].view(np.uint32))
            assert np.isfinite(states[0]).all()


IN_PLACE = """
    int k = min(gradient.size, 5);
    int* best = top_k(map(gradient, [&](float g) -> float { return abs(g); }), k);
    float* total = map(range(gradient.size), [&](int i) -> float { return kept[i] + gradient[i]; });
    float* sent = map(best, [&](int i) -> float { return total[i]; });
"""
# Whether no loop reads what an earlier one, or an earlier element of its own, has written.
UPDATES = {
    "own element": ("kept = total; out = concat(sent);", True),
    "a neighbour": (
        "kept = map(range(gradient.size), [&](int i) -> float { return kept[i + 1]; }); "
        "out = concat(sent);",
        False,
    ),
    "sums and copies of old ones": (
        "float all = reduce(kept, 0, sum); float* old = map(kept, [&](float k) -> float "
        "{ return k; }); kept = map(gradient, [&](float g) -> float { return g; }); "
        "out = concat(all, old);",
        True,
    ),
    "a sum of new ones": (
        "kept = total; float all = reduce(kept, 0, sum); "
        "float* rest = map(sent, [&](float x) -> float { return x - all; }); out = concat(rest);",
        False,
    ),
}


def assert_same_in_place(program, num_states, sizes):
    """Machine code that writes new states over the old ones does what the reference does."""
    codec, reference = compiled(program), compll.Reference(program)
    for n in sizes:
        state = np.zeros((num_states, n), np.float32)
        expected = state.copy()
        for x in gradients(n).values():
            with np.errstate(all="ignore"):
                body = reference.encode(x, state=expected)[16:]
            rows = list(state)
            assert codec.encode_body(x, state=rows, new_state=rows).tobytes() == body.tobytes()
            np.testing.assert_array_equal(state.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", UPDATES)
def test_the_new_state_may_be_where_the_old_one_is(name):
    update, is_direct = UPDATES[name]
    text = encoder(IN_PLACE + update)
    program = compll.compile_text(STATES + text, "foo")
    assert is_in_place(optimise(program)) == is_direct
    assert_same_in_place(program, num_states=1, sizes=(0, 1, 9, 3000))


DGC = SPECS / "dgc.pse"
# What makes another algorithm of it, whose states are not zero where the top_k chooses alone.
CHANGES = {
    # Each names the one before twice: in place they would be 2^28 nodes.
    "a chain of many names": (
        "return abs(x) >= 0 ? abs(x) : -1;",
        "float y = abs(x);"
        + "".join(f" if (y > {k}) {{ y = y * 2 + y; }}" for k in range(28))
        + " return y >= 0 ? y : -1;",
    ),
    "one is kept": ("i > last", "i >= last"),
    "equal ones are not kept": ("size[i] == least && i > last", "size[i] == least && i > 0"),
    "a size may be NaN": ("abs(x) >= 0 ? abs(x) : -1", "abs(x)"),
    "others are masked": ("remains(i) ? v[i] : 0", "remains(i) ? u[i] : v[i]"),
    "others are -0": ("remains(i) ? v[i] : 0", "remains(i) ? v[i] : -0.0"),
    "of a neighbour": ("momentum * velocity[i] +", "momentum * velocity[i + 1] +"),
    "the smallest of others": (
        "float least = reduce(map(kept,",
        "float least = reduce(map(range(k),",
    ),
}


def test_states_that_are_masked_by_a_top_k_are_written_once():
    plan = optimise(compll.compile_spec(DGC))
    found = masks(plan)
    assert found is not None
    assert is_in_place(plan)
    # Besides finding the largest there is one loop, over what was chosen, for the packet.
    assert [type(step) for step in found.steps] == [nodes.Store, nodes.Sweep]
    assert [var.name for var in found.written] == ["next_velocity", "next_residual"]
    assert masks(optimise(compll.compile_spec(FILE))) is None


@pytest.mark.parametrize("name", CHANGES)
def test_other_masks_are_computed_for_every_element(name):
    text, other = DGC.read_text(encoding="ascii"), CHANGES[name]
    assert text.count(other[0]) == 1
    program = compll.compile_text(text.replace(*other), "dgc")
    assert masks(optimise(program)) is None
    if name not in ("a size may be NaN", "others are -0", "of a neighbour"):
        return
    assert_same_in_place(program, num_states=2, sizes=(1, 50, 3000))


def test_each_chunk_has_its_part(program):
    n = compll.packet.CHUNK + 5
    codec, reference = compiled(program), compll.Reference(program)
    x = np.random.default_rng(3).normal(size=n).astype(np.float32)
    state, other = np.zeros((2, n), np.float32), np.zeros((2, n), np.float32)
    for _ in range(2):
        packets = codec.encode(x, state=state)
        np.testing.assert_array_equal(reference.encode(x, state=other), packets)
    np.testing.assert_array_equal(state, other)
    alone = np.zeros((2, 5), np.float32)
    for _ in range(2):
        last = reference.encode(x[-5:], state=alone, offset=compll.packet.CHUNK)
    assert packets.tobytes().endswith(last.tobytes())
    np.testing.assert_array_equal(state[:, -5:], alone)


def test_the_name_means_the_new_vector_after_its_assignment():
    text = "float* old = kept; kept = map(gradient, [&](float g) -> float { return g + 1; });"
    program = compll.compile_text(STATES + encoder(f"{text} out = concat(old, kept);"), "foo")
    codec = compll.Reference(program)
    state = np.full((1, 1), 7, np.float32)
    packet = codec.encode(np.ones(1, np.float32), state=state)
    assert packet[16:].view(np.float32).tolist() == [7, 2]
    assert state.tolist() == [[2]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_kept(value):
    """But it is sent: the name means the vector that is kept, `sum` what came."""
    text = (
        "float* total = map(range(gradient.size), "
        "[&](int i) -> float { return kept[i] + gradient[i]; }); kept = total;"
    )
    program = compll.compile_text(STATES + encoder(f"{text} out = concat(total, kept);"), "foo")
    for codec in (compll.Reference(program), compiled(program)):
        state = np.array([[1, 2]], np.float32)
        packet = codec.encode(np.array([value, 3], np.float32), state=state)
        sent = packet[16:].view(np.float32)
        np.testing.assert_array_equal(sent, np.array([value, 5, 0, 5], np.float32))
        assert state.tolist() == [[0, 5]]


def test_states_are_part_of_the_hash(program):
    text = FILE.read_text(encoding="ascii")
    other = compll.compile_text(text.replace("wanted[i] - (", "wanted[i] + ("), "momentum")
    renamed = compll.compile_text(text.replace("velocity", "speed"), "momentum")
    assert len({spec_hash(program), spec_hash(other), spec_hash(renamed)}) == 3


def test_passes_keep_the_states_and_write_them_in_the_loop_of_the_codes(program):
    plan = optimise(program)
    sweeps = [step for step in plan.encode if isinstance(step, nodes.Sweep)]
    written = [{write.field for write in sweep.writes} for sweep in sweeps]
    # The velocity beside the reduction, the residual beside the codes.
    assert written == [{2}, {1, 3}]
    for name, made in passes.stages(program):
        shown = print_plan(made) if isinstance(made, nodes.Plan) else print_program(made)
        assert ("update residual" in shown) == (name not in ("fuse", "pack", "specialise"))


def test_ir(program, golden):
    golden.check("momentum.ir.txt", print_program(program) + "\n" + print_plan(optimise(program)))


def test_a_wrong_program_does_not_pass(program):
    first, second = program.encode.updates
    twice = replace(program.encode, updates=(first, replace(second, state=first.state)))
    with pytest.raises(IrError, match="updated once"):
        verify(replace(program, encode=twice))
    scalar = nodes.Const(program.params[0].var.type, first.value.span, 0.0)
    wrong = replace(program.encode, updates=(first, replace(second, value=scalar)))
    with pytest.raises(IrError, match="vector of float"):
        verify(replace(program, encode=wrong))


@pytest.mark.parametrize(
    "state",
    [None, np.zeros((1, 4), np.float32), np.zeros((2, 5), np.float32), np.zeros((2, 4))],
    ids=["missing", "rows", "length", "type"],
)
def test_a_wrong_state_is_refused(program, state):
    with pytest.raises(ValueError, match=r"`state` must be float32 of shape \(2, 4\)"):
        compll.Reference(program).encode(np.zeros(4, np.float32), state=state)


def test_a_codec_without_state_takes_none():
    program = compll.compile_text(encoder("out = concat(gradient);"), "foo")
    with pytest.raises(ValueError, match="`state` must be None: foo has none"):
        compll.Reference(program).encode(np.zeros(4, np.float32), state=np.zeros((1, 4), "f4"))


@pytest.mark.parametrize("backend", ["numpy", "cpp"])
def test_the_command_line_hands_the_state_on(tmp_path, backend, program, monkeypatch):
    hurry.the_command_line(monkeypatch)
    x = np.random.default_rng(1).normal(size=50).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    run = ["run", str(FILE), "MomentumEncode", "--in", str(tmp_path / "x.npy")]
    run += ["--out", str(tmp_path / "p.npy"), "--backend", backend]
    state = str(tmp_path / "state.npy")
    assert main([*run, "--new-state", state]) == 0
    assert main([*run, "--state", state, "--new-state", state]) == 0
    expected = np.zeros((2, 50), np.float32)
    for _ in range(2):
        packet = compll.Reference(program).encode(x, state=expected)
    np.testing.assert_array_equal(np.load(state), expected)
    np.testing.assert_array_equal(np.load(tmp_path / "p.npy"), packet)


def test_a_state_is_refused_where_there_is_none(tmp_path, capsys):
    spec = tmp_path / "foo.pse"
    spec.write_text(encoder("out = concat(gradient);"), encoding="ascii")
    np.save(tmp_path / "x.npy", np.zeros(3, np.float32))
    run = ["run", str(spec), "FooEncode", "--in", str(tmp_path / "x.npy"), "--out", "unused"]
    assert main([*run, "--state", str(tmp_path / "x.npy")]) == 1
    assert "must have a `state` block" in capsys.readouterr().err


def test_the_numpy_module_keeps_state_too(tmp_path, program):
    assert main(["gen", str(FILE), "-o", str(tmp_path), "--target", "numpy"]) == 0
    file = tmp_path / "momentum_reference.py"
    located = importlib.util.spec_from_file_location("momentum_reference", file)
    module = importlib.util.module_from_spec(located)
    located.loader.exec_module(module)
    assert "encode(gradient, seed=1, state=state)" in module.__doc__
    x, state, expected = np.ones(9, np.float32), *np.zeros((2, 2, 9), np.float32)
    packet = module.codec(decay=0.5).encode(x, state=state)
    np.testing.assert_array_equal(
        packet, compll.Reference(program, decay=0.5).encode(x, state=expected)
    )
    np.testing.assert_array_equal(state, expected)


def test_a_state_need_not_be_read():
    program = compll.compile_text(STATES + encoder("kept = gradient; out = concat(kept);"), "foo")
    x = np.arange(3000, dtype=np.float32)
    for codec in (compll.Reference(program), compiled(program)):
        state = np.full((1, x.size), 9, np.float32)
        assert codec.encode(x, state=state)[16:].tobytes() == x.tobytes()
        np.testing.assert_array_equal(state[0], x)


def test_operations_take_and_give_the_state(program):
    text = tf_op.emit(program)
    assert 'REGISTER_OP(TF_HIPS_OPERATIONS "MomentumEncodeState")' in text
    assert '.Input("state: float")' in text
    assert '.Output("new_state: float")' in text
    for absent in ('MomentumEncode"', "EncodeFeedback", "MergeEncode"):
        assert absent not in text
