# SPDX-License-Identifier: Apache-2.0
"""Long runs of fuzzers, until they are told to end; by hand, and not in `make test`.

Decoders of bytes get what a fuzzer finds by coverage:

    python3.11 -m venv FOLDER && FOLDER/bin/pip install atheris numpy pyyaml absl-py
    PYTHONPATH=. FOLDER/bin/python -m tests.fuzz -max_total_time=300 -max_len=8192 CORPUS

Options are libFuzzer's; atheris is no dependency. An input that breaks a promise is written to
`crash-...`; given as the only argument, it is run again.

Back ends of CompLL get programs that a grammar makes (tests/fuzz/programs.py), in .venv:

    python -m tests.fuzz programs --seed 0 --count 300 [--cuda] [--shipped] [--integers]

A seed that fails is told, with a short program that fails in the same way. `TF_HIPS_CPU=base`
before it takes the loops that machines without AVX-512 run.
"""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["programs"]:
        from tests.fuzz import programs

        sys.exit(programs.main(sys.argv[2:]))

    import atheris

    with atheris.instrument_imports(include=["tf_hips.ps", "tests.fuzz"]):
        from tests.fuzz import decoders

    atheris.Setup(sys.argv, decoders.one_input)
    atheris.Fuzz()
