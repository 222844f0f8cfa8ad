# SPDX-License-Identifier: Apache-2.0
"""What `remote.sh` does with an archive, run here as a machine of the cluster runs it."""

import io
import subprocess
import tarfile
from importlib import resources
from pathlib import Path

import pytest


@pytest.fixture
def receive(tmp_path: Path):
    """Packs a folder, and gives it to the script."""
    script = resources.files("tf_hips.cluster").joinpath("remote.sh").read_text("utf-8")

    def run() -> subprocess.CompletedProcess[bytes]:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(tmp_path / "job", "job")
        return subprocess.run(
            ["sh", "-c", script, "tf-hips", "receive", tmp_path / "there"],
            input=packed.getvalue(),
            capture_output=True,
            timeout=60,
        )

    return run


def test_a_link_to_a_folder_is_replaced(tmp_path: Path, receive) -> None:
    for name in ("old", "new", "job"):
        (tmp_path / name).mkdir()
    link = tmp_path / "job" / "data"
    for name in ("old", "new"):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / name)
        done = receive()
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "there/job/data").readlink() == tmp_path / name
        assert not list((tmp_path / name).iterdir())


def test_a_folder_in_the_way_of_a_link_is_told_before_anything_changes(
    tmp_path: Path, receive
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/data").symlink_to(tmp_path)
    (tmp_path / "job/train.py").write_text("new")
    (tmp_path / "there/job/data").mkdir(parents=True)
    (tmp_path / "there/job/train.py").write_text("old")
    done = receive()
    assert done.returncode == 1
    assert b"a folder is where job/data comes as a file or link" in done.stderr
    assert b"unwritable" in done.stdout
    assert (tmp_path / "there/job/train.py").read_text() == "old"
    assert not list((tmp_path / "there").glob("incoming*"))
