# SPDX-License-Identifier: Apache-2.0
"""The C++ compiler: its flags, what names it, and the cache of what it makes."""

import re

from compll.backends import makefile, toolchain
from tests.compll.support import SPECS
from tf_hips.ops import jit

ROOT = SPECS.parents[2]


def test_a_codec_is_compiled_alike_by_all_who_compile_one():
    built = (ROOT / "tf_hips/cc/defs.bzl").read_text()
    listed = re.search(r"^COPTS = \[(.*?)^\]", built, re.MULTILINE | re.DOTALL)
    flags = {flag for flag in re.findall(r'"(-[^"]+)"', listed[1]) if not flag.startswith("-W")}
    assert "-fno-math-errno" in flags
    assert set(toolchain.FLAGS) == {*flags, "-fPIC", "-shared"}
    assert jit._FLAGS == toolchain.FLAGS
    generated = re.search(r"^FLAGS := (.*)$", makefile.TEXT, re.MULTILINE)
    assert {*generated[1].split(), "-shared"} == set(toolchain.FLAGS)
