# SPDX-License-Identifier: Apache-2.0
"""Targets of a fuzzer that is led by coverage, and generated programs: see `__main__`."""
