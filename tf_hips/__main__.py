# SPDX-License-Identifier: Apache-2.0
"""`python -m tf_hips` is `tf-hips`, also where the folder of scripts is not on the path."""

from tf_hips.cli import main

if __name__ == "__main__":
    main()
