# SPDX-License-Identifier: Apache-2.0
"""Keras alone does not find what it can do without."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.support.lean import sitecustomize


@pytest.mark.parametrize("name", ["sklearn", "matplotlib"])
def test_keras_alone_does_not_find_what_it_can_do_without(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"{name} is left out in tests"):
        exec(f"import {name}", {"__name__": "keras.src.wrappers.fixes"})
    assert importlib.util.find_spec(name) is not None
    folder = str(Path(sitecustomize.__file__).parent)
    assert folder in os.environ["PYTHONPATH"].split(os.pathsep)
