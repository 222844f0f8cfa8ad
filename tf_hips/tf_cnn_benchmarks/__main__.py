# SPDX-License-Identifier: Apache-2.0
"""`python -m tf_hips.tf_cnn_benchmarks`."""

import sys

from tf_hips.tf_cnn_benchmarks import launcher

if __name__ == "__main__":
    sys.exit(launcher.main(sys.argv[1:]))
