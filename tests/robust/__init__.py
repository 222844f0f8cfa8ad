# SPDX-License-Identifier: Apache-2.0
"""Tests of robust aggregation; oracle.py holds the definitions in plain NumPy."""
