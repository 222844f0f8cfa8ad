# SPDX-License-Identifier: Apache-2.0
"""Servers of parties in `cluster.yaml`: what all are told, and a tree that is started over ssh."""

import contextlib
import shlex
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.cluster.sshd import HOSTS, Site
from tests.cluster.test_description import BASE, NAMES, load
from tests.cluster.test_fleet import process_of, rows
from tests.support.eventually import eventually
from tf_hips import cli
from tf_hips.cluster import archive, kubernetes, layout, systemd
from tf_hips.errors import ConfigError, TfHipsError

REGION = {
    "site": "region",
    "host": "r.example",
    "address": "r.example:7071",
    "parties": ["lab", "east"],
}
LAB = {
    "site": "lab",
    "host": "l.example",
    "address": "l.example:7072",
    "parties": ["north"],
    "options": {"rule": "asgd(0.5)", "period": 4, "state": "own"},
}
PARTIES = [*BASE["parties"], {"site": "north", "hosts": {"n1": 1}}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").touch()
    (tmp_path / "pki").mkdir()
    more = [f"{kind}-{site}" for kind in ("server", "party") for site in ("region", "lab", "north")]
    for name in (*NAMES, *(f"{one}.{end}" for one in more for end in ("pem", "key"))):
        (tmp_path / "pki" / name).write_text(f"of {name}")
    return tmp_path


def tree(folder: Path, **keys: Any) -> Any:
    told = {"party_servers": [REGION, LAB], "parties": PARTIES}
    server = {"rule": "fedavg", "state": "kept", "lost_after": 5, "quorum": 1}
    return load(folder, **told | {"server": server} | keys)


def test_what_each_server_is_told(folder: Path) -> None:
    cluster = tree(folder)
    told = {
        server.site: yaml.safe_load(
            layout.server_file(cluster, server, layout.on_machine(cluster, server))
        )
        for server in cluster.all_servers
    }
    assert told["hub"]["parties"] == ["region", "west"]
    assert told["hub"]["rule"] == "fedavg"
    assert "uplink" not in told["hub"]
    home = "/srv/x/server-region"
    assert told["region"] == {
        "parties": ["lab", "east"],
        "run": "job1",
        "bind": "0.0.0.0:7071",
        "authority": f"{home}/authority.pem",
        "certificate": f"{home}/server-region.pem",
        "key": f"{home}/server-region.key",
        "revoked": f"{home}/revoked.txt",
        "uplink": "hub.example:7070",
        "site": "region",
        "uplink_role": "global-server",
        "uplink_certificate": f"{home}/party-region.pem",
        "uplink_key": f"{home}/party-region.key",
        "state": f"{home}/kept",
        "lost_after": 5,
    }
    lab = told["lab"]
    assert (lab["uplink"], lab["uplink_role"]) == ("r.example:7071", "server")
    assert (lab["rule"], lab["period"], lab["state"]) == (
        "asgd(0.5)",
        4,
        "/srv/x/server-lab/own",
    )
    ways = {party.site: layout.party_on_machine(cluster, party)[2:4] for party in cluster.parties}
    assert ways == {
        "west": ["--server=hub.example:7070", "--site=west"],
        "east": ["--server=r.example:7071", "--server-role=server"],
        "north": ["--server=l.example:7072", "--server-role=server"],
    }


def test_workers_below_a_server_of_their_party_alone_are_told_how_they_meet(folder: Path) -> None:
    cluster = tree(folder, party={"intra": "ps"})
    has = {
        party.site: "--intra=ps" in layout.party_on_machine(cluster, party)
        for party in cluster.parties
    }
    # West has no such server, and the two workers of east meet by Horovod.
    assert has == {"west": False, "east": False, "north": True}


def test_each_machine_gets_both_identities_of_its_server_and_no_other(folder: Path) -> None:
    cluster = tree(folder)
    region = cluster.party_servers[0]
    names = {one.name for one in archive.entries(cluster, region, region.host)}
    assert names == {
        *("authority.pem", "revoked.txt", "server.yaml"),
        *("server-region.pem", "server-region.key", "party-region.pem", "party-region.key"),
    }
    (folder / "pki" / "party-region.key").unlink()
    with pytest.raises(ConfigError, match=r"party-region\.key .*--party-server region"):
        archive.entries(cluster, region, region.host)


def test_deployed_by_other_means(folder: Path) -> None:
    cluster = tree(folder)
    assert set(systemd.units(cluster)) == {
        f"tf-hips-job1-{role}.service"
        for role in (
            *("server-hub", "server-region", "server-lab"),
            *("party-west", "party-east", "party-north"),
        )
    }
    found = list(yaml.safe_load_all(kubernetes.manifests(cluster)["server-region.yaml"]))
    [config] = [one for one in found if one["kind"] == "ConfigMap"]
    told = yaml.safe_load(config["data"]["server.yaml"])
    identity = told["authority"].rpartition("/")[0]
    assert told["uplink_certificate"] == f"{identity}/uplink-certificate.pem"
    secret = kubernetes.secret_command(cluster, cluster.party_servers[0], "pki")
    for part in (
        "certificate.pem=pki/server-region.pem",
        "uplink-certificate.pem=pki/party-region.pem",
        "uplink-key.pem=pki/party-region.key",
    ):
        assert f"--from-file={part}" in secret
    secret = kubernetes.secret_command(cluster, cluster.party_servers[0], "../my pki")
    words = shlex.split(secret.replace("\\\n", ""))
    assert "--from-file=key.pem=../my pki/server-region.key" in words


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such party": (
        {"party_servers": [{**REGION, "parties": ["nobody"]}]},
        "must be sites of `parties` or `party_servers`. Received: 'nobody'",
    ),
    "two servers": (
        {"party_servers": [REGION, {**LAB, "parties": ["east"]}]},
        "must be sites that no other server has. Received: 'east', which 'region' has",
    ),
    "a circle": (
        {"party_servers": [REGION, {**LAB, "parties": ["north", "region"]}]},
        "`party_servers` must be a tree. Received:",
    ),
    "nobody": ({"party_servers": [{**LAB, "parties": []}]}, "must have an entry at least"),
    "one name": (
        {"party_servers": [{**REGION, "site": "west", "parties": ["east"]}]},
        "must have distinct sites. Received: 'west' twice",
    ),
    "derived": (
        {"party_servers": [REGION, {**LAB, "options": {"site": "x"}}]},
        "`party_servers.lab.options.site` follows from the rest of the file",
    ),
    "unknown": (
        {"party_servers": [REGION, {**LAB, "options": {"perod": 3}}]},
        "unknown key `perod`. Did you mean `period`?",
    ),
    "of all": ({"server": {"period": 3}}, "`server.period` follows from the rest of the file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused(case: str, folder: Path) -> None:
    keys, text = WRONG[case]
    with pytest.raises(TfHipsError) as caught:
        tree(folder, **keys)
    assert text in str(caught.value)


TRAIN = """
from tests.ps.parties import Party
from tf_hips import config

uplink = config.current().uplink
party = Party(uplink.server, uplink.site, uplink.tls, server_role=uplink.server_role)
party.join()
party.train(0, 2)
print("trained below", uplink.server_role, party.client._welcome.parties, flush=True)
party.client.leave()
"""


@pytest.mark.heavy
def test_a_tree_from_files_to_its_end(site: Site) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (site.folder / "job" / "train.py").write_text(TRAIN)
    with contextlib.chdir(site.folder), pytest.raises(SystemExit) as ended:
        cli.main(["certs", "issue", "pki", "--party-server", "lab", "--party", "lab"])
    assert ended.value.code == 0
    lab = {"site": "lab", "host": HOSTS[0], "address": f"127.0.0.1:{port}", "parties": ["east"]}
    site.change(party_servers=[{**lab, "folder": str(site.folder / "two")}])
    done = site.run("sync")
    assert done.returncode == 0, done.stdout
    done = site.run("up")
    assert f"listens at 127.0.0.1:{port}" in rows(done)["server-lab"]
    homes = {name: site.home(f"party-{name}") for name in ("west", "east")}
    for name, role in (("west", "global-server"), ("east", "server")):
        said = f"trained below {role} ('east', 'west')"
        eventually(lambda log=homes[name] / "log", said=said: said in log.read_text())
    servers = ("server-hub", "server-lab")
    running = []
    for name in servers:
        with contextlib.suppress(psutil.NoSuchProcess):
            running.append(process_of(site, name))
    assert psutil.wait_procs(running, timeout=20)[1] == []
    assert "joined" in (site.home("server-lab") / "log").read_text().lower()
    assert site.run("down").returncode == 0
