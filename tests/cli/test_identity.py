# SPDX-License-Identifier: Apache-2.0
"""`--authority`, `--certificate` and `--key`: volumes of Secrets, modes, passphrases."""

import argparse
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.certs import Certificates
from tests.support.certs import certificates as certificates
from tf_hips.cli import arguments
from tf_hips.config import Tls
from tf_hips.ps.security import tls

NAMES = ("authority", "certificate", "key")


def options(identity: Tls) -> argparse.Namespace:
    return argparse.Namespace(insecure=False, **{one: getattr(identity, one) for one in NAMES})


def copied(identity: Tls, folder: Path) -> Tls:
    folder.mkdir()
    return Tls(*(str(shutil.copy(getattr(identity, one), folder / one)) for one in NAMES))


def test_a_volume_of_a_secret_is_renewed(certificates: Certificates, tmp_path: Path) -> None:
    """Kubernetes turns one link, from a folder of the old files, which it deletes, to another."""
    old, new = certificates.party("a"), certificates.identity("party", "a", days=0.9)
    copied(old, tmp_path / "..2026_11_01")
    (tmp_path / "..data").symlink_to("..2026_11_01")
    for name in NAMES:
        (tmp_path / name).symlink_to(f"..data/{name}")
    found = arguments.identity(options(Tls(*(str(tmp_path / name) for name in NAMES))))
    assert found is not None
    told: list[str] = []
    renewed = tls.Renewed(found, tls.read, told.append)
    assert renewed.get() == tls.read(old)
    copied(new, tmp_path / "..2026_11_27")
    (tmp_path / "..data_tmp").symlink_to("..2026_11_27")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    shutil.rmtree(tmp_path / "..2026_11_01")
    assert renewed.get() == tls.read(new)
    assert told == [f"The changed certificate {tmp_path}/certificate is used"]


def test_a_key_that_everybody_can_read_is_told(
    certificates: Certificates,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = copied(certificates.party("a"), tmp_path / "own")
    real, above = Path.stat, {tmp_path.resolve(), *tmp_path.resolve().parents}

    def as_open(path: Path, **more: Any) -> Any:
        """The folders above are open to all; pytest's are not."""
        told = real(path, **more)
        return os.stat_result((told.st_mode | 0o005, *told[1:])) if path in above else told

    monkeypatch.setattr(Path, "stat", as_open)
    # Those of a Secret are the group's; in a folder that is closed nobody else reaches it.
    for mode, folder in ((0o600, 0o755), (0o440, 0o755), (0o644, 0o700)):
        Path(found.key).chmod(mode)
        (tmp_path / "own").chmod(folder)
        arguments.identity(options(found))
    assert capsys.readouterr().err == ""
    (tmp_path / "own").chmod(0o755)
    arguments.identity(options(found))
    assert f"can read the key {found.key} (mode 0644)" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_named(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = certificates.party("a")
    real = Path.open

    def refused(path: Path, *given: Any, **more: Any) -> Any:
        if str(path) == found.key:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *given, **more)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(arguments.UsageError, match=r"^--key must be .* read\. .*Permission denied"):
        arguments.identity(options(found))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda whole: b"", "PEM files"),
        (lambda whole: whole[: len(whole) // 2], "PEM files"),
        (lambda whole: whole.replace(b"\n", b"\r\n"), None),
        (lambda whole: whole + b"\n\n", None),
        (lambda whole: b"\n" + whole, None),
    ],
    ids=["empty", "cut", "CRLF", "lines behind", "a line before"],
)
def test_keys_as_editors_and_copies_leave_them(
    certificates: Certificates, tmp_path: Path, change: Any, text: str | None
) -> None:
    found = copied(certificates.party("a"), tmp_path / "own")
    Path(found.key).write_bytes(change(Path(found.key).read_bytes()))
    if text is None:
        assert arguments.identity(options(found)) == found
        tls.channel_credentials(found)
        return
    with pytest.raises(arguments.UsageError, match=text):
        arguments.identity(options(found))
