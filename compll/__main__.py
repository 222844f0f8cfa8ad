# SPDX-License-Identifier: Apache-2.0
"""`python -m compll`."""

import sys

from compll.cli import main

sys.exit(main())
