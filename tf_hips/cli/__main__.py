# SPDX-License-Identifier: Apache-2.0
"""`python -m tf_hips.cli` is `tf-hips`: what the launcher starts where no script is on the path."""

from tf_hips.cli import main

main()
