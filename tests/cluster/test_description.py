# SPDX-License-Identifier: Apache-2.0
"""`cluster.yaml` is read strictly; what is sent of it, and to whom."""

import argparse
import tarfile
import threading
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from tf_hips.cli import arguments, config_file, party, server
from tf_hips.cli import cluster as command
from tf_hips.cluster import archive, description, fleet, layout, ssh
from tf_hips.errors import ConfigError

BASE: dict[str, Any] = {
    "version": 1,
    "run": "job1",
    "script": "job/train.py",
    "certificates": "pki",
    "folder": "/srv/x",
    "servers": [{"site": "hub", "host": "me@hub.example", "address": "hub.example:7070"}],
    "parties": [
        {"site": "west", "hosts": {"w1": 4, "w2": 4}, "interface": "eth1"},
        {"site": "east", "hosts": {"e1": 2}},
    ],
}
NAMES = (
    *("authority.pem", "authority.key", "revoked.txt", "issued.txt"),
    *("global-server-hub.pem", "global-server-hub.key"),
    *("party-west.pem", "party-west.key", "party-east.pem", "party-east.key"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").touch()
    (tmp_path / "pki").mkdir()
    for name in NAMES:
        (tmp_path / "pki" / name).write_text(f"of {name}")
    return tmp_path


def load(folder: Path, /, **keys: Any) -> description.Cluster:
    """The cluster with other values, as the commands load it."""
    path = folder / "cluster.yaml"
    told = {key: value for key, value in {**BASE, **keys}.items() if value is not None}
    path.write_text(yaml.safe_dump(told, sort_keys=False))
    return command.load(str(path))


def site(**keys: Any) -> list[dict[str, Any]]:
    """One entry of a list of sites, with other values."""
    return [keys]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no version": ({"version": None}, "expected a mapping with `version: 1`"),
    "version 2": ({"version": 2}, "`version` must be 1. Received: 2"),
    "unknown key": ({"sript": "a"}, "unknown key `sript`. Did you mean `script`?"),
    "unknown key of a party": (
        {"parties": site(site="a", host={"h": 1})},
        "unknown key `parties[0].host`. Did you mean `hosts`?",
    ),
    "no run": ({"run": None}, "lacks the key `run`"),
    "bad run": ({"run": "a/b"}, "`run` must be 1 to 50 letters"),
    "no script": ({"script": "job/none.py"}, "`script` must be a file. Received: 'job/none.py'"),
    "a program": ({"script": "train"}, "`script` must be a .py file. Received: 'train'"),
    "no certificates": ({"certificates": "no"}, "`certificates` must be a folder"),
    "relative folder": ({"folder": "srv"}, "`folder` must be an absolute path"),
    "folder with spaces": ({"folder": "/a b"}, "`folder` must be an absolute path"),
    "folder above": ({"folder": "/a/../b"}, "must be a plain path without `..`"),
    "relative program": ({"program": "bin/tf-hips"}, "`program` must be a program's name"),
    "bad image": ({"image": "a b"}, "`image` must be the name of a container image"),
    "bad volume": ({"volume": "10 GB"}, "`volume` must be a size such as 10Gi"),
    "bad user": ({"user": "a b"}, "`user` must be the name of a user"),
    "numbers": ({"arguments": ["--epochs", 3]}, "`arguments[1]` must be of type str. Received: 3"),
    "lines": ({"arguments": ["a\nb"]}, "`arguments` must be lines of text"),
    "no servers": ({"servers": []}, "`servers` must have an entry at least"),
    "no parties": ({"parties": []}, "`parties` must have an entry at least"),
    "party twice": (
        {"parties": [{"site": "a", "hosts": {"h": 1}}, {"site": "a", "hosts": {"i": 1}}]},
        "`parties` must have distinct sites. Received: 'a' twice",
    ),
    "port twice": (
        {
            "servers": [
                {"site": "a", "host": "h", "address": "x:1"},
                {"site": "b", "host": "h", "address": "y:1"},
            ]
        },
        "`servers` must have distinct ports on a host. Received: 'h:1' twice",
    ),
    "option of ssh": (
        {"servers": site(site="a", host="-oProxyCommand=x", address="h:1")},
        "at `servers[0]`: `host` must be a destination of ssh",
    ),
    "no port": ({"servers": site(site="a", host="h", address="h")}, "`address` must be HOST:PORT"),
    "IPv6 without brackets": (
        {"servers": site(site="a", host="h", address="2001:db8::1:7070")},
        "`address` must have an IPv6 address in brackets",
    ),
    "port 0": (
        {"servers": site(site="a", host="h", address="h:0")},
        "`address` must have a port from 1 to 65535. Received: 'h:0'",
    ),
    "no hosts": ({"parties": site(site="a", hosts={})}, "`hosts` must name a host at least"),
    "no slots": (
        {"parties": site(site="a", hosts={"h": 0})},
        "`hosts.h` must be a number of slots >= 1. Received: 0",
    ),
    "user of a host": ({"parties": site(site="a", hosts={"me@h": 1})}, "`hosts` must be names"),
    "interface of one": (
        {"parties": site(site="a", hosts={"h": 1}, interface="eth0")},
        "`interface` is for a party of several hosts",
    ),
    "bad variable": (
        {"parties": site(site="a", hosts={"h": 1}, environment={"A B": "c"})},
        "`environment` must be names of variables. Received: 'A B'",
    ),
    "own variable": (
        {"parties": site(site="a", hosts={"h": 1}, environment={"TF_HIPS_ROLE": "c"})},
        "`environment.TF_HIPS_ROLE` is set by tf-hips itself",
    ),
    "lines of a variable": (
        {"parties": site(site="a", hosts={"h": 1}, environment={"A": "b\nc"})},
        "`environment.A` must be one line",
    ),
    "unknown option": (
        {"server": {"compresion": "onebit"}},
        "server: unknown key `compresion`. Did you mean `compression`?",
    ),
    "refused option": (
        {"server": {"lost_after": 0}},
        "server: `lost_after` must be a number of seconds > 0",
    ),
    "no choice": (
        {"server": {"late": "sideways"}},
        "server: `late` must be one of next, drop. Received: 'sideways'",
    ),
    "no choice of a party": (
        {"party": {"intra": "gloo"}},
        "party: `intra` must be one of horovod, ps. Received: 'gloo'",
    ),
    "unknown codec": ({"party": {"compression": "onebti"}}, "party: `compression`"),
    "derived option": (
        {"server": {"bind": "h:1"}},
        "`server.bind` follows from the rest of the file, or is not for it, and may not be set",
    ),
    "derived option of parties": ({"party": {"hosts": "h:1"}}, "`party.hosts` follows from"),
    "state with spaces": ({"server": {"state": "a b"}}, "`server.state` must be a path of letters"),
    "log above": ({"party": {"log_dir": "../x"}}, "`party.log_dir` must be a path of letters"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused(case: str, folder: Path) -> None:
    keys, said = WRONG[case]
    with pytest.raises(ConfigError) as refused:
        load(folder, **keys)
    assert said in str(refused.value)
    assert str(folder / "cluster.yaml") in str(refused.value)


def test_every_option_of_the_commands_has_a_place() -> None:
    """A path must be known as one, and what names a file or a place must follow from the rest."""
    parsers = argparse.ArgumentParser().add_subparsers()
    for name, module, derived in (
        ("server", server, description.SERVER_DERIVED),
        ("party", party, description.PARTY_DERIVED),
    ):
        module.add(parsers)
        parser = parsers.choices[name]
        file = parser.get_default("file") or config_file.ConfigFile(parser)
        assert set(file.paths) <= {*description.PATHS, *derived}
        assert set(derived) - {"shard"} <= set(file.keys)
    kinds = parsers.choices["server"].get_default("file")._types
    codecs = {key for key, kind in kinds.items() if kind in (arguments.codec, arguments.downlink)}
    assert codecs == set(description.COMPRESSIONS)


def test_what_a_server_and_the_parties_are_told(folder: Path) -> None:
    cluster = load(
        folder,
        server={"state": "kept", "log_dir": "/var/log/x", "lost_after": 5, "once": True},
        party={"deadline": 7, "log_dir": "logs", "max_restarts": 3},
        arguments=["--a", "b c"],
    )
    hub = layout.on_machine(cluster, cluster.servers[0])
    told = yaml.safe_load(layout.server_file(cluster, cluster.servers[0], hub))
    assert told == {
        "parties": ["west", "east"],
        "run": "job1",
        "bind": "0.0.0.0:7070",
        "authority": "/srv/x/server-hub/authority.pem",
        "certificate": "/srv/x/server-hub/global-server-hub.pem",
        "key": "/srv/x/server-hub/global-server-hub.key",
        "revoked": "/srv/x/server-hub/revoked.txt",
        "state": "/srv/x/server-hub/kept",
        "log_dir": "/var/log/x",
        "lost_after": 5,
        "once": True,
    }
    assert layout.party_on_machine(cluster, cluster.parties[0]) == [
        *("tf-hips", "party", "--server=hub.example:7070", "--site=west", "--run=job1"),
        "--authority=/srv/x/party-west/authority.pem",
        "--certificate=/srv/x/party-west/party-west.pem",
        "--key=/srv/x/party-west/party-west.key",
        *("--deadline=7", "--log-dir=/srv/x/party-west/logs", "--max-restarts=3"),
        *("--hostfile", "/srv/x/party-west/hostfile", "--interface", "eth1"),
        *("--", "train.py", "--a", "b c"),
    ]


def test_several_servers_are_shards(folder: Path) -> None:
    servers = [
        {"site": f"s{number}", "host": f"h{number}", "address": f"h{number}:1"}
        for number in range(3)
    ]
    cluster = load(folder, servers=servers)
    told = [
        layout.server_options(cluster, one, layout.on_machine(cluster, one))
        for one in cluster.servers
    ]
    assert [one["shard"] for one in told] == ["0/3", "1/3", "2/3"]
    assert [one.get("lead") for one in told] == [None, "h0:1", "h0:1"]
    assert "--server=h0:1,h1:1,h2:1" in layout.party_on_machine(cluster, cluster.parties[0])


@pytest.mark.parametrize(
    ("keys", "bind"),
    [
        ({"address": "h:1"}, "0.0.0.0:1"),
        ({"address": "127.0.0.1:1"}, "127.0.0.1:1"),
        ({"address": "[::1]:1"}, "[::1]:1"),
        ({"address": "[2001:db8::1]:1"}, "[::]:1"),
        ({"address": "h:1", "bind": "10.0.0.1:2"}, "10.0.0.1:2"),
    ],
)
def test_where_a_server_listens(keys: dict[str, str], bind: str, folder: Path) -> None:
    cluster = load(folder, servers=site(site="a", host="h", **keys))
    assert cluster.servers[0].listens_at == bind


def sent(folder: Path, /, **keys: Any) -> dict[tuple[str, str], set[str]]:
    """Names of what each host gets for each role."""
    cluster = load(folder, **keys)
    found = {}
    for role, host in fleet.places(cluster.roles):
        data = archive.pack(archive.entries(cluster, role, host))
        with tarfile.open(fileobj=BytesIO(data)) as file:
            found[layout.role_name(role), host] = set(file.getnames())
            for member in file.getmembers():
                assert member.mode & 0o077 == 0
    return found


def test_each_machine_gets_its_own_and_nothing_else(folder: Path) -> None:
    assert sent(folder) == {
        ("server-hub", "me@hub.example"): {
            *("authority.pem", "global-server-hub.pem", "global-server-hub.key"),
            *("revoked.txt", "server.yaml"),
        },
        ("party-west", "w1"): {
            *("authority.pem", "party-west.pem", "party-west.key"),
            *("hostfile", "job/train.py"),
        },
        ("party-west", "w2"): {"job/train.py"},
        ("party-east", "e1"): {
            *("authority.pem", "party-east.pem", "party-east.key"),
            "job/train.py",
        },
    }


def test_no_key_travels_with_the_script(folder: Path) -> None:
    """Certificates beside the script stay; another key is an error, until it is excluded."""
    (folder / "train.py").touch()
    for name in ("data.bin", "notes.pyc", ".git"):
        (folder / name).touch()
    found = sent(folder, script="train.py", exclude=["*.bin", "cluster.yaml", "job"])
    assert found["party-west", "w2"] == {"job/train.py"}

    secret = folder / "job" / "id"
    secret.write_text('KEY = "-----BEGIN PRIVATE KEY-----"  # a program that speaks of one\n')
    assert ("party-west", "w2") in sent(folder)
    begin = "-----BEGIN OPENSSH PRIVATE KEY-----"
    secret.write_text(f"-----BEGIN CERTIFICATE-----\n{'A' * 900}\n{begin}\n{'b3Bl' * 16}\n")
    with pytest.raises(ConfigError, match="is a private key, and would be sent to all sites"):
        sent(folder)
    assert ("party-west", "w2") in sent(folder, exclude=["id"])
    secret.write_text(
        "-----BEGIN RSA PRIVATE KEY-----\r\nProc-Type: 4,ENCRYPTED\r\n"
        f"DEK-Info: AES-128-CBC,E31F\r\n\r\n{'b3Bl' * 16}\r\n"
    )
    with pytest.raises(ConfigError, match="is a private key"):
        sent(folder)


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("data/*.bin", {"train.py", "data/a.txt", "x.bin"}),
        ("./data/", {"train.py", "x.bin"}),
        ("data/a*", {"train.py", "data/b.bin", "x.bin"}),
        ("*.bin", {"train.py", "data/a.txt"}),
    ],
)
def test_a_pattern_with_a_slash_is_that_of_a_path(folder: Path, pattern: str, left: set) -> None:
    for name in ("data/a.txt", "data/b.bin", "x.bin"):
        (folder / "job" / name).parent.mkdir(exist_ok=True)
        (folder / "job" / name).touch()
    found = sent(folder, exclude=[pattern])["party-west", "w2"]
    assert found == {f"job/{name}" for name in left}


def test_links_are_sent_as_links(folder: Path) -> None:
    """What a link leads to is not read, so no key comes along that way."""
    (folder / "job" / "keys").symlink_to("../pki")
    cluster = load(folder)
    data = archive.pack(archive.entries(cluster, cluster.parties[0], "w2"))
    with tarfile.open(fileobj=BytesIO(data)) as file:
        assert {one.name: one.issym() for one in file.getmembers()} == {
            "job/train.py": False,
            "job/keys": True,
        }


def test_a_missing_certificate_is_named_before_anything_is_sent(folder: Path) -> None:
    (folder / "pki" / "party-east.key").unlink()
    with pytest.raises(ConfigError, match=r"certs issue .* --party east` makes certificates"):
        sent(folder)


def test_what_is_known_when_it_is_interrupted_is_told() -> None:
    """Commands that have begun are not forgotten."""
    heard: list[str] = []
    begun = threading.Event()
    interrupted = threading.Event()

    def slow() -> fleet.Outcome:
        begun.set()
        assert interrupted.wait(20)
        return fleet.Outcome("slow", "h", True, "done")

    def interrupt() -> fleet.Outcome:
        assert begun.wait(20)
        interrupted.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fleet._at_once([slow, interrupt], lambda outcome: heard.append(outcome.role))
    assert heard == ["slow"]


@pytest.mark.parametrize(
    ("act", "again", "is_good", "state"),
    [
        ("up", "lives 7", False, "running"),
        ("up", "gone", False, "not running"),
        ("up", "", False, "unknown"),
        ("down", "lives 7", False, "running"),
        ("down", "gone", True, "not running"),
        ("down", "", False, "unknown"),
    ],
)
def test_after_a_broken_connection_the_machine_is_asked_again(
    act: str,
    again: str,
    is_good: bool,
    state: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = load(folder)
    asked: list[str] = []

    def call(host: str, options: object, verb: str, *_: object) -> ssh.Answer:
        asked.append(verb)
        if verb == "look" and again:
            word, _, rest = again.partition(" ")
            return ssh.Answer(((word, rest),), 0, "", "")
        return ssh.Answer((("starting", ""),), 255, ssh.explain("Connection reset", host), "")

    monkeypatch.setattr(ssh, "call", call)
    heard: list[fleet.Outcome] = []
    getattr(fleet, act)(cluster, cluster.parties[1:], 1.0, heard.append)
    [outcome] = heard
    assert (outcome.is_good, outcome.state) == (is_good, state)
    assert outcome.detail.startswith("the connection broke")
    assert asked == ["start" if act == "up" else "stop", "look"]


@pytest.mark.parametrize("act", ["up", "down"])
def test_less_than_a_second_is_not_none(
    act: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machines count whole seconds; after none, `down` would kill at once."""
    told: list[list[str]] = []

    def call(host: str, options: object, verb: str, words: list[str], *_: object) -> ssh.Answer:
        told.append(words)
        return ssh.Answer((("killed" if verb == "stop" else "slow", "7"),), 0, "", "")

    monkeypatch.setattr(ssh, "call", call)
    cluster = load(folder)
    heard: list[fleet.Outcome] = []
    getattr(fleet, act)(cluster, cluster.parties[1:], 0.4, heard.append)
    assert told[0][2 if act == "up" else 1] == "1"
    assert " 0.4 s" in heard[0].detail


def test_all_that_run_already_are_as_they_were_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = ssh.Answer((("already", "7"),), 0, "", "")
    monkeypatch.setattr(ssh, "call", lambda *_: answer)
    cluster = load(folder)
    heard: list[fleet.Outcome] = []
    fleet.up(cluster, cluster.roles, 1.0, heard.append)
    assert len(heard) == len(cluster.roles)
    assert {(one.is_good, one.state) for one in heard} == {(True, "runs already")}


def test_options_of_ssh_come_before_ours() -> None:
    words = ssh.command("h", ["-p", "2", "-o", "ConnectTimeout=3"], "look", ["/a b"])
    assert words[:3] == ["ssh", "-o", "BatchMode=yes"]
    assert words.index("ConnectTimeout=3") < words.index("ConnectTimeout=15")
    assert words[-3:-1] == ["--", "h"]
    assert words[-1].endswith("tf-hips look '/a b'")
