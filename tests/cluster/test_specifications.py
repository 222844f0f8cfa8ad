# SPDX-License-Identifier: Apache-2.0
"""Specifications that a `cluster.yaml` names: servers get them beside their settings."""

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import test_description
from tests.cluster.sshd import ROOT
from tests.support import hurried
from tf_hips import cli
from tf_hips.cli import cluster as command
from tf_hips.cluster import archive, description, fleet, layout
from tf_hips.errors import ConfigError
from tf_hips.ops.specifications import CACHE

pytestmark = pytest.mark.heavy  # compiles

MINE = (ROOT / "tests/ops/mine.pse").read_text()
NAMES = (
    *("authority.pem", "revoked.txt", "global-server-hub.pem", "global-server-hub.key"),
    *("server-region.pem", "server-region.key", "party-region.pem", "party-region.key"),
    *("party-west.pem", "party-west.key", "party-east.pem", "party-east.key"),
)
BASE: dict[str, Any] = {
    **test_description.BASE,
    "servers": [{"site": "hub", "host": "hub.example", "address": "hub.example:7070"}],
    "parties": [{"site": "west", "hosts": {"w1": 4}}, {"site": "east", "hosts": {"e1": 2}}],
    "server": {"compression": "error_feedback(codecs/mine.pse(salt=1))", "downlink": "onebit"},
    "party_servers": [
        {
            **{"site": "region", "host": "r.example", "address": "r.example:7071"},
            "parties": ["west"],
            "options": {"uplink_compression": "mixed(TwoDecode.pse(2, salt=1), below=9)"},
        }
    ],
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that other tests compiled or loaded is there."""
    hurried.cache_of_its_own(tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Specifications in one file and in two, beside a script and below it."""
    (tmp_path / "job/codecs").mkdir(parents=True)
    (tmp_path / "job/train.py").touch()
    (tmp_path / "job/codecs/mine.pse").write_text(MINE)
    two = MINE.replace("Mine", "Two")
    at = two.index("void TwoDecode")
    (tmp_path / "job/TwoEncode.pse").write_text(two[:at])
    (tmp_path / "job/TwoDecode.pse").write_text(two[at:])
    (tmp_path / "pki").mkdir()
    for name in NAMES:
        (tmp_path / "pki" / name).touch()
    return tmp_path


def source(folder: Path, /, **keys: Any) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({**BASE, **keys}))
    return path


def load(folder: Path, /, **keys: Any) -> description.Cluster:
    found: description.Cluster = command.load(str(source(folder, **keys)))
    return found


def code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    return int(ended.value.code or 0)


def test_servers_are_sent_what_their_settings_name(folder: Path) -> None:
    cluster = load(folder)
    hub, region, *_ = cluster.roles
    for server, names in (
        (hub, {"codecs/mine.pse"}),
        (region, {"TwoEncode.pse", "TwoDecode.pse"}),
    ):
        entries = {one.name: one for one in archive.entries(cluster, server, server.launcher)}
        assert {name for name in entries if name.endswith(".pse")} == names
        for name in names:
            assert entries[name].content == (folder / "job" / name).read_bytes()
    lines = fleet.plan(cluster, "sync", cluster.roles)
    assert ", server.yaml, codecs/mine.pse" in lines[0]
    assert ", server.yaml, TwoDecode.pse, TwoEncode.pse" in lines[1]


def test_a_server_takes_what_it_was_sent(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = load(folder)
    for server in cluster.all_servers:
        home = tmp_path / layout.role_name(server)
        for entry in archive.entries(cluster, server, server.host):
            (home / entry.name).parent.mkdir(parents=True, exist_ok=True)
            (home / entry.name).write_bytes(entry.content)
        told = str(home / layout.SERVER_FILE)
        assert code_of("server", "--config", told, "--print-config") == 0, capsys.readouterr().err


def test_a_library_is_sent_as_it_is(folder: Path) -> None:
    (folder / "job/codecs/mine.so").write_bytes(b"\x7fELF")
    cluster = description.load(source(folder, server={"downlink": "codecs/mine.so(salt=1)"}))
    [entry] = archive.specifications(cluster, cluster.servers[0])
    assert (entry.name, entry.content) == ("codecs/mine.so", b"\x7fELF")


def test_other_means_have_them_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers of systemd and Kubernetes take their files, and may write what they compile."""
    out = tmp_path / "out"
    path = source(folder)
    assert code_of("deploy", "--from", str(path), "--to", str(out)) == 0, capsys.readouterr().err
    for role in ("server-hub", "server-region"):
        unit = (out / f"systemd/tf-hips-job1-{role}.service").read_text()
        assert f"\nEnvironment={CACHE}=/srv/x/{role}/{layout.CACHE}\n" in unit
        told = out / "systemd" / role / layout.SERVER_FILE
        assert code_of("server", "--config", str(told), "--print-config") == 0

        written = (out / f"kubernetes/{role}.yaml").read_text()
        found = {one["kind"]: one for one in yaml.safe_load_all(written)}
        pod = found["Deployment"]["spec"]["template"]["spec"]
        [container] = pod["containers"]
        [data] = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "data"]
        assert container["env"] == [{"name": CACHE, "value": f"{data}/{layout.CACHE}"}]
        mounted = as_mounted(pod, found["ConfigMap"], tmp_path / f"{role}-pod")
        assert code_of("server", "--config", str(mounted), "--print-config") == 0


def as_mounted(pod: dict[str, Any], config: dict[str, Any], folder: Path) -> Path:
    """Lays out the volume as Kubernetes does, with links; returns where `server.yaml` is."""
    [volume] = [one["configMap"] for one in pod["volumes"] if one["name"] == "config"]
    assert volume["name"] == config["metadata"]["name"]
    texts = {key: text.encode() for key, text in config["data"].items()}
    texts |= {key: base64.b64decode(text) for key, text in config["binaryData"].items()}
    for item in volume["items"]:
        file = folder / "..2026" / item["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(texts.pop(item["key"]))
        link = folder / item["path"].partition("/")[0]
        link.symlink_to(Path("..2026", link.name))
    assert not texts
    return folder / layout.SERVER_FILE


@pytest.mark.parametrize("named", ["../mine.pse", "/srv/mine.pse", "codecs/../mine.so"])
def test_a_file_that_would_not_be_sent_is_refused(named: str, folder: Path) -> None:
    message = r"`server\.compression` must name a file in the script's folder, .* Received: '"
    with pytest.raises(ConfigError, match=f"{message}{named}'"):
        load(folder, server={"compression": f"error_feedback({named}(salt=1))"})
    options = {"uplink_compression": f"{named}(salt=1)"}
    region = {**BASE["party_servers"][0], "options": options}
    with pytest.raises(ConfigError, match=r"`party_servers\.region\.options\.uplink_compression`"):
        load(folder, party_servers=[region])
