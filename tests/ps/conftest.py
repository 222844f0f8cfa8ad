# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the parameter server's tests."""

from tests.support.certs import certificates, foreign_certificates

__all__ = ["certificates", "foreign_certificates"]
