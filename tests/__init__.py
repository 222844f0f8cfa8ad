# SPDX-License-Identifier: Apache-2.0
"""Tests of compll and tf_hips; folders mirror the packages."""
