# SPDX-License-Identifier: Apache-2.0
"""Real processes that are killed with SIGKILL, and links that are cut; see `__main__`."""
