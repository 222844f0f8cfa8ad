# SPDX-License-Identifier: Apache-2.0
"""Each pass by itself, and the verifiers between them: what is wrong does not pass."""

import re
from dataclasses import replace

import pytest

import compll
from compll import passes
from compll.cli import main
from compll.ir import nodes
from compll.ir.printer import print_plan, print_program
from compll.ir.types import INT
from compll.ir.verify import IrError
from compll.ir.verify_plan import verify_plan
from compll.source import Span
from tests.compll.support import SPECS, spec

NAMES = sorted(path.stem for path in SPECS.glob("*.pse"))
TEXT = """
void FooEncode(float* gradient, uint8* out) {
    float unused = reduce(gradient, 0, sum);
    int bits = 1 << 2;
    uint<bits>* codes = map(gradient, [&](float g) -> uint<bits> {
        float forgotten = g * g;
        return g + bits;
    });
    out = concat(codes);
}
"""


def after(name: str, text: str = TEXT) -> str:
    """What a pass makes of a specification, printed."""
    made = dict(passes.stages(compll.compile_text(text.replace("bits>", "4>"), "foo")))[name]
    return print_plan(made) if isinstance(made, nodes.Plan) else print_program(made)


def test_each_pass_does_its_part_and_no_other():
    assert "reduce sum" in after("inline") and "1 << 2" in after("inline")
    assert "float(4)" not in after("fold") and "4f" in after("fold")
    assert "reduce sum" in after("fold") and "forgotten" in after("fold")
    assert "reduce" not in after("dead") and "forgotten" not in after("dead")
    assert "sweep" not in after("dead") and "sweep gradient.size" in after("fuse")
    assert "body" not in after("fuse")
    assert "body\n  field 0: field 0: uint4[gradient.size]\n" in after("pack")


@pytest.mark.parametrize("name", passes.NAMES)
def test_the_command_shows_a_pass(name, capsys):
    assert main(["ir", str(SPECS / "onebit.pse"), "--after", name]) == 0
    shown = capsys.readouterr().out
    made = dict(passes.stages(spec("onebit")))[name]
    assert shown == (print_plan(made) if isinstance(made, nodes.Plan) else print_program(made))


def test_an_unknown_pass_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["ir", str(SPECS / "onebit.pse"), "--after", "magic"])
    # Newer versions of Python do not put choices in quotes.
    assert re.search(r"choose from .*\bpack\b", capsys.readouterr().err)


@pytest.mark.parametrize("name", NAMES)
def test_passes_are_done_after_one_run(name):
    """Folding or dropping again changes nothing."""
    made = dict(passes.stages(spec(name)))
    assert print_program(passes.fold(made["fold"])) == print_program(made["fold"])
    assert print_program(passes.dead(made["dead"])) == print_program(made["dead"])


def broken(plan):
    """Plans that a faulty pass could make of onebit's, and what the verifier says."""
    sweep, *rest = plan.encode
    shorter = replace(sweep, size=nodes.Const(INT, Span(0, 1), 3))
    yield replace(plan, encode=(*rest, sweep)), "not computed before it"
    yield replace(plan, encode=(sweep, *rest[:-1])), "never computed: other"
    yield replace(plan, encode=(sweep, *rest, rest[0])), "computed twice"
    yield replace(plan, encode=(shorter, *rest)), "must have its size"
    yield replace(plan, encode=(replace(sweep, writes=()), *rest)), "never computed: 2"
    yield replace(plan, encode=(sweep, *rest, replace(sweep, reduces=()))), "written twice"
    yield replace(plan, decode=()), "never computed: 0"
    yield replace(plan, body=plan.body[1:]), "fields of both functions"
    scalar = replace(plan.body[-1], size=None)
    yield replace(plan, body=(*plan.body[:-1], scalar)), "if and only if it is a vector"
    yield replace(plan, body=()), "fields of both functions"


def test_the_verifier_refuses_broken_plans():
    plan = passes.optimise(spec("onebit"))
    verify_plan(plan, is_packed=True)
    found = list(broken(plan))
    assert len(found) == 10
    for one, message in found:
        with pytest.raises(IrError, match=message):
            verify_plan(one, is_packed=True)
