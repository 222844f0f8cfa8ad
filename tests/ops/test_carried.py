# SPDX-License-Identifier: Apache-2.0
"""Specifications that are sent to the processes of other machines."""

import json
from pathlib import Path

import pytest

from compll.backends import toolchain
from tf_hips import errors
from tf_hips.ops import specifications


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """That of this machine, which is used, and that of another one."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    monkeypatch.setenv(specifications.CACHE, str(here))
    return here, there


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_are_carried_as_they_are(
    caches: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    data = f"param ratio{end}// Fl\u00e4che{end}{end}".encode()
    name = toolchain.codec_id("mine", data)
    kept = caches[0] / f"{name.replace('@', '-')}.pse"
    kept.write_bytes(data)
    sent = json.dumps(specifications.carried(f"{name}(ratio=0.5)"))
    monkeypatch.setenv(specifications.CACHE, str(caches[1]))
    specifications.keep(json.loads(sent))
    assert (caches[1] / kept.name).read_bytes() == data


@pytest.mark.parametrize("stem", ["../mine", "a/b", "", "1", "\u00e4", "mine\n"])
def test_a_name_that_no_codec_has_is_refused(caches: tuple[Path, Path], stem: str) -> None:
    with pytest.raises(errors.SpecificationError, match="must have the name of a codec"):
        specifications.keep({toolchain.codec_id(stem, b"x"): "x"})
    assert not list(caches[0].parent.rglob("*.pse"))
