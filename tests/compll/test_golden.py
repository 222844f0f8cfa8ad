# SPDX-License-Identifier: Apache-2.0
"""Generated text of the product's codecs: bodies of hot functions, and the registrations of one."""

import pytest

import compll
from compll.ir.printer import print_plan, print_program
from compll.passes import optimise
from tests.compll.support import spec


def between(text, start, end):
    return text[text.index(start) : text.index(end)]


@pytest.mark.parametrize("name", ["onebit", "terngrad", "fp32"])
def test_hot_functions(name, golden):
    text = compll.generate(spec(name))[f"{name}.codec.cc"]
    golden.check(
        f"{name}.cc.txt", between(text, "TF_HIPS_HOT void decode_fields", "TF_HIPS_HOT void encode")
    )


@pytest.mark.parametrize("name", ["onebit", "terngrad"])
def test_ir(name, golden):
    program = spec(name)
    golden.check(f"{name}.ir.txt", print_program(program) + "\n" + print_plan(optimise(program)))


def test_frame_of_a_codec(golden):
    text = compll.generate(spec("fp32"))["fp32.codec.cc"]
    start = text.index("TF_HIPS_HOT void decode_fields")
    end = text.index("TF_HIPS_HOT void encode_fields")
    golden.check("fp32_frame.cc.txt", text[:start] + text[end:])


def test_registrations(golden):
    golden.check("terngrad.tf.txt", compll.generate(spec("terngrad"))["terngrad.tf.cc"])
