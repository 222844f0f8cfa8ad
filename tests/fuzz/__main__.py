# SPDX-License-Identifier: Apache-2.0
"""Feeds `decoders` with bytes that a fuzzer finds by coverage, until it is told to end.

    python3.11 -m venv FOLDER && FOLDER/bin/pip install atheris numpy pyyaml absl-py
    PYTHONPATH=. FOLDER/bin/python -m tests.fuzz -max_total_time=300 -max_len=8192 CORPUS

Options are libFuzzer's. By hand, and not in `make test`: atheris is no dependency. An input that
breaks a promise is written to `crash-...`; given as the only argument, it is run again.
"""

import sys

import atheris

with atheris.instrument_imports(include=["tf_hips.ps", "tests.fuzz"]):
    from tests.fuzz import decoders

if __name__ == "__main__":
    atheris.Setup(sys.argv, decoders.one_input)
    atheris.Fuzz()
