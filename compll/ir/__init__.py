# SPDX-License-Identifier: Apache-2.0
"""The typed IR: where front end, passes and back ends meet."""
