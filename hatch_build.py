# SPDX-License-Identifier: Apache-2.0
"""Wheel hook: ships the libraries that Bazel built, and says which machines they run on.

TensorFlow loads our libraries by path and they hold no Python symbol, so one wheel serves every
Python that TensorFlow supports: the tag is `py3-none-<platform>`. An editable install needs no
library; `make build` puts them into the tree.
"""

import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILT = (
    "tf_hips/_build_info.py",
    "tf_hips/ops/_tf_hips_ops.so",
    "tf_hips/ops/libtf_hips_native.so",
)


class NativeWheel(BuildHookInterface):
    """Tags the wheel as native and refuses to make one without the libraries."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files; `version` is `editable` or `standard`."""
        if version == "editable":
            return
        missing = [name for name in BUILT if not (Path(self.root) / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"A wheel must hold the built libraries. Missing: {', '.join(missing)}. "
                "Run `make build` first."
            )
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
