# SPDX-License-Identifier: Apache-2.0
"""Measurements, and the targets that they are held against."""
