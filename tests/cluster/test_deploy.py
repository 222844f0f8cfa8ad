# SPDX-License-Identifier: Apache-2.0
"""`tf-hips deploy` on the example of docs/deploy.md: what is written, and who can read it."""

import os
import re
import shutil
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.sshd import PROGRAM, ROOT
from tests.support.golden import Golden
from tf_hips import cli
from tf_hips.cluster import container, systemd

PAGE = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
KINDS = ("systemd", "kubernetes", "horovod", "skypilot", "container")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The example of the page, with a script and certificates that are files."""
    [example] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "cluster.yaml"
    path.write_text(example)
    (tmp_path / "job" / "parts").mkdir(parents=True)
    (tmp_path / "job" / "train.py").write_text("print('trained')\n")
    (tmp_path / "job" / "parts" / "model.py").write_text("LAYERS = 3\n")
    (tmp_path / "job" / "data.npz").write_text("excluded")
    (tmp_path / "pki").mkdir()
    return path


def change(source: Path, **keys: Any) -> None:
    source.write_text(yaml.safe_dump({**yaml.safe_load(source.read_text()), **keys}))


def deploy(source: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["deploy", "--from", str(source), "--to", str(source.parent / "out"), *options])
    return int(ended.value.code or 0)


def written(source: Path) -> dict[str, str]:
    """All files, by name."""
    out = source.parent / "out"
    return {
        path.relative_to(out).as_posix(): path.read_text()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def objects(text: str) -> dict[str, Any]:
    """The documents of a manifest, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def as_kubernetes_reads(text: str) -> str:
    """A word, or the value of a variable, when `$(NAME)` is replaced and `$$` is a `$`."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: f"<{m[1]}>" if m[1] else "$", text)


def test_the_example_gives_these_files(source: Path, golden: Golden) -> None:
    assert deploy(source) == 0
    files = written(source)
    for name, text in files.items():
        if not name.startswith(("job/", ".")):
            golden.check(name.replace("/", "__"), text)
    assert {name.partition("/")[0] for name in files} == {
        *("systemd", "kubernetes", "horovod", "skypilot", "job"),
        *("Containerfile", "README.md", ".tf-hips-deploy"),
    }
    assert {name for name in files if name.startswith("job/")} == {
        "job/train.py",
        "job/parts/model.py",
    }
    assert deploy(source) == 0
    assert written(source) == files


def test_the_server_of_kubernetes(source: Path) -> None:
    assert deploy(source) == 0
    found = objects(written(source)["kubernetes/server-hub.yaml"])
    assert set(found) == {"ConfigMap", "PersistentVolumeClaim", "Deployment", "Service"}
    spec = found["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    [one] = pod["containers"]
    assert spec["strategy"] == {"type": "Recreate"}
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == spec["selector"]["matchLabels"]
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == one["ports"][0]["name"]
    told = yaml.safe_load(found["ConfigMap"]["data"]["server.yaml"])
    assert told["bind"] == f"0.0.0.0:{one['ports'][0]['containerPort']}"
    mounted = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
    assert set(mounted) == {volume["name"] for volume in pod["volumes"]}
    assert one["args"] == ["server", "--config", f"{mounted['config']}/server.yaml"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert told["state"].startswith(f"{mounted['data']}/")
    claim = found["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["data"]["persistentVolumeClaim"] == {"claimName": claim}
    for key in ("authority", "certificate", "key", "revoked"):
        folder, _, file = told[key].rpartition("/")
        assert folder == mounted["identity"]
        secret = volumes["identity"]["secret"]["secretName"]
        command = written(source)["README.md"].partition(f"generic {secret} ")[2]
        assert f"--from-file={file}=" in command.partition("kubectl")[0]
    assert pod["securityContext"]["runAsNonRoot"]

    change(source, server={})
    assert deploy(source) == 0
    found = objects(written(source)["kubernetes/server-hub.yaml"])
    assert "PersistentVolumeClaim" not in found
    volumes = found["Deployment"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "data", "emptyDir": {}} in volumes


def test_other_options_of_a_server_are_another_pod(source: Path) -> None:
    def template() -> dict[str, Any]:
        assert deploy(source) == 0
        text = written(source)["kubernetes/server-hub.yaml"]
        return objects(text)["Deployment"]["spec"]["template"]

    first, again = template(), template()
    server = yaml.safe_load(source.read_text())["server"]
    change(source, server={**server, "compression": "terngrad"})
    assert first == again != template()


def test_a_server_of_kubernetes_takes_its_file(source: Path, tmp_path: Path) -> None:
    """The command itself reads what it would be given."""
    assert deploy(source) == 0
    text = objects(written(source)["kubernetes/server-hub.yaml"])["ConfigMap"]["data"]
    path = tmp_path / "server.yaml"
    for told in (text["server.yaml"], written(source)["systemd/server-hub/server.yaml"]):
        path.write_text(told)
        with pytest.raises(SystemExit) as ended:
            cli.main(["server", "--config", str(path), "--print-config"])
        assert ended.value.code == 0


def test_a_party_of_several_hosts_is_an_mpi_job(source: Path) -> None:
    change(
        source,
        parties=[
            {"site": "west", "hosts": {"a": 4, "b": 2}, "environment": {"A": "$(B) $$ c"}},
            {"site": "east", "hosts": {"c": 3}},
        ],
        arguments=["$(HOME)", "two words", "$$(A)$$5"],
    )
    assert deploy(source) == 0
    job = objects(written(source)["kubernetes/party-west.yaml"])["MPIJob"]
    assert job["apiVersion"] == "kubeflow.org/v2beta1"
    spec = job["spec"]
    workers = spec["mpiReplicaSpecs"]["Worker"]
    assert (spec["slotsPerWorker"], workers["replicas"]) == (2, 3)
    [launcher] = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    words = [*launcher["command"], *launcher["args"]]
    assert words[:2] == ["tf-hips", "party"]
    assert words[words.index("--hostfile") + 1] == "/etc/mpi/hostfile"
    told = [as_kubernetes_reads(word) for word in words[words.index("--") :]]
    assert told == ["--", "train.py", "$(HOME)", "two words", "$$(A)$$5"]
    [variable] = launcher["env"]
    assert (variable["name"], as_kubernetes_reads(variable["value"])) == ("A", "$(B) $$ c")
    assert not any("mpirun" in word for word in words)
    [worker] = workers["template"]["spec"]["containers"]
    # Worker 0 reads the certificate, and it is another pod than the launcher.
    assert worker["volumeMounts"] == launcher["volumeMounts"]
    assert worker["image"] == launcher["image"]
    file = written(source)["Containerfile"]
    assert spec["sshAuthMountPath"] in file
    assert worker["args"][-1] in file

    job = objects(written(source)["kubernetes/party-east.yaml"])["Job"]
    assert job["spec"]["backoffLimit"] == 0
    [one] = job["spec"]["template"]["spec"]["containers"]
    assert one["args"][one["args"].index("--num-proc") + 1] == "3"


def test_parties_accept_their_command_lines(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What Kubernetes and systemd start gets as far as certificates that are not there."""
    assert deploy(source) == 0
    capsys.readouterr()
    monkeypatch.chdir(source.parent / "job")
    files = written(source)
    for name in ("west", "east"):
        found = objects(files[f"kubernetes/party-{name}.yaml"])
        if "MPIJob" in found:
            template = found["MPIJob"]["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]
        else:
            template = found["Job"]["spec"]["template"]
        unit = files[f"systemd/tf-hips-digits-party-{name}.service"]
        [line] = re.findall("^ExecStart=(.*)$", unit, re.MULTILINE)
        for words in (template["spec"]["containers"][0]["args"], line.split()[1:]):
            with pytest.raises(SystemExit) as ended:
                cli.main(words)
            assert ended.value.code == 2
            assert "--authority must be a file" in capsys.readouterr().err


def test_a_server_may_write_where_it_is_told_to(source: Path) -> None:
    """Also outside of its folder: all of the system is read-only for it."""
    change(source, server={"state": "/var/lib/kept", "log_dir": "events"})
    assert deploy(source, "--only", "systemd") == 0
    unit = written(source)["systemd/tf-hips-digits-server-hub.service"]
    assert "ReadWritePaths=/srv/tf_hips/server-hub -/var/lib/kept\n" in unit


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_takes_the_units(source: Path) -> None:
    program = source.parent / "tf-hips"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    change(source, program=str(program), arguments=['a "b" \\ %h $HOME', "c"])
    told = yaml.safe_load(source.read_text())
    told["parties"][1].pop("program")
    told["parties"][0]["environment"] = {"A": 'b "c" %h'}
    change(source, parties=told["parties"])
    assert deploy(source) == 0
    units = sorted((source.parent / "out" / "systemd").glob("*.service"))
    assert len(units) == 3
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_party_that_is_stopped_has_not_failed(source: Path) -> None:
    assert deploy(source) == 0
    unit = written(source)["systemd/tf-hips-digits-party-west.service"]
    # `party.report` ends with 128 + SIGTERM.
    assert f"SuccessExitStatus={128 + signal.SIGTERM}\n" in unit


def test_a_server_below_port_1024_may_take_it(source: Path) -> None:
    change(source, servers=[{"site": "hub", "host": "h", "address": "h:443"}])
    assert deploy(source) == 0
    unit = written(source)["systemd/tf-hips-digits-server-hub.service"]
    assert "AmbientCapabilities=CAP_NET_BIND_SERVICE\n" in unit
    found = objects(written(source)["kubernetes/server-hub.yaml"])
    assert found["Service"]["spec"]["ports"][0]["port"] == 443


def test_words_of_a_unit_are_quoted() -> None:
    assert systemd.command_text(["/a/b", "--x=1", "two words", 'q"\\', "%h $HOME", ""]) == (
        '/a/b --x=1 "two words" "q\\"\\\\" "%%h $$HOME" ""'
    )


def test_horovodrun_reads_the_hostfiles(source: Path) -> None:
    hosts = pytest.importorskip("horovod.runner.common.util.hosts")
    assert deploy(source, "--only", "horovod") == 0
    out = source.parent / "out" / "horovod"
    text = hosts.parse_host_files(str(out / "party-west.hosts"))
    assert [(host.hostname, host.slots) for host in hosts.parse_hosts(text)] == [
        ("west1", 4),
        ("west2", 4),
    ]
    assert hosts.parse_hosts_and_slots(text) == (["west1", "west2"], {"west1": 4, "west2": 4})


def test_the_first_node_of_skypilot_starts_the_party(source: Path, tmp_path: Path) -> None:
    """The text that SkyPilot would run, by a shell, with programs that say what they are given."""
    party = {"log_dir": "/srv/HOME/logs"}
    change(source, arguments=["it's", "/HOME/x"], party=party)
    assert deploy(source, "--only", "skypilot") == 0
    task = yaml.safe_load(written(source)["skypilot/party-west.yaml"])
    assert task["num_nodes"] == 2
    assert set(task["file_mounts"].values()) == {
        "wheels",
        "../pki/authority.pem",
        "../pki/party-west.pem",
        "../pki/party-west.key",
    }
    home = tmp_path / "home"
    (home / "tf_hips/venv/bin").mkdir(parents=True)
    (home / ".ssh").mkdir()
    program = home / "tf_hips/venv/bin/tf-hips"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    lines = {}
    for rank in ("0", "1", "0"):
        done = subprocess.run(
            ["bash", "-c", task["run"]],
            env={
                **{"HOME": str(home), "PATH": "/usr/bin:/bin", "SKYPILOT_NODE_RANK": rank},
                "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        lines[rank] = done.stdout.splitlines()
    assert lines["1"] == []
    words = lines["0"]
    assert words[0] == "party"
    assert f"--key={home}/tf_hips/party-west.key" in words
    assert "--log-dir=/srv/HOME/logs" in words
    assert words[words.index("--hostfile") + 1] == f"{home}/tf_hips/hostfile"
    assert words[words.index("--") :] == ["--", "train.py", "it's", "/HOME/x"]
    hosts = (home / "tf_hips/hostfile").read_text()
    assert hosts == "10.0.0.1 slots=4\n10.0.0.2 slots=4\n"
    assert (home / ".ssh/config").read_text().count("Host 10.0.0.2\n") == 1
    assert subprocess.run(["bash", "-n", "-c", task["setup"]], check=False).returncode == 0


@pytest.mark.skipif(PROGRAM is None, reason="no sshd (openssh-server) on this machine")
def test_sshd_takes_the_configuration_of_the_image(tmp_path: Path) -> None:
    [command] = re.findall(r"printf '%s\\n' ('Port.*?) >", container.containerfile(), re.DOTALL)
    lines = re.findall(r"'([^']*)'", command)
    key = tmp_path / "id_rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", key], check=True)
    text = "\n".join(lines).replace(f"{container.SSH_FOLDER}/id_rsa", str(key))
    assert str(key) in text
    (tmp_path / "sshd_config").write_text(text + "\n")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    done = subprocess.run(
        [str(PROGRAM), "-T", "-f", tmp_path / "sshd_config"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "port 2222\n" in done.stdout
    assert f"authorizedkeysfile {container.SSH_FOLDER}/authorized_keys\n" in done.stdout


def test_the_script_of_the_image_may_write_beside_itself() -> None:
    text = container.containerfile()
    [user] = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    assert f"groupadd --gid {user} tf_hips " in text
    assert f"useradd --uid {user} --gid tf_hips " in text
    assert f"COPY --chown={user}:{user} job/ {container.JOB}/\n" in text
    assert f"install -d -o tf_hips -g tf_hips {container.JOB} " in text


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_alone(kind: str, source: Path) -> None:
    assert deploy(source) == 0
    everything = written(source)
    assert deploy(source, "--only", kind) == 0
    some = written(source)
    for name, text in some.items():
        if name not in ("README.md", ".tf-hips-deploy"):
            assert everything[name] == text
    folders = {name.partition("/")[0] for name in some} & {*KINDS, "job", "Containerfile"}
    expected = {
        "container": {"Containerfile", "job"},
        "skypilot": {"skypilot", "job"},
    }
    assert folders == expected.get(kind, {kind})
    assert re.findall("^## (.*)$", some["README.md"], re.MULTILINE) == [kind]


def test_what_others_put_there_stays(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = source.parent / "out"
    assert deploy(source) == 0
    (out / "wheels").mkdir()
    (out / "wheels" / "one.whl").touch()
    change(source, parties=[{"site": "west", "hosts": {"a": 1}}])
    assert deploy(source) == 0
    assert (out / "wheels" / "one.whl").exists()
    assert not (out / "horovod" / "party-east.hosts").exists()

    change(source, parties=[{"site": "north", "hosts": {"a": 1}}])
    (out / "horovod" / "party-north.hosts").write_text("mine")
    before = written(source)
    assert deploy(source) == 1
    assert "party-north.hosts must not be there already" in capsys.readouterr().err
    assert written(source) == before


def test_programs_stay_programs_and_output_is_not_input(source: Path) -> None:
    inside = source.parent / "job" / "tool.sh"
    inside.write_text("#!/bin/sh\n")
    inside.chmod(0o755)
    assert deploy(source, "--to", str(source.parent / "job" / "out")) == 0
    assert deploy(source) == 0
    assert not [name for name in written(source) if name.startswith("job/out")]
    mode = (source.parent / "out" / "job" / "tool.sh").stat().st_mode
    assert mode & stat.S_IXUSR


def test_the_folder_of_the_script_can_take_them(source: Path) -> None:
    """What was written there is no part of the script: each call writes the same, and no more."""
    job = source.parent / "job"
    for _ in range(2):
        assert deploy(source, "--to", str(job)) == 0
    names = {path.relative_to(job / "job").as_posix() for path in (job / "job").rglob("*.*")}
    assert names == {"train.py", "parts/model.py"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"server": {"once": True}}, "`server.once` must be false for Kubernetes"),
        ({"server": {"state": "/srv/x"}}, "`server.state` must be a relative path for Kubernetes"),
        ({"run": "r" * 45}, "names of run and site must be short under Kubernetes"),
        (
            {"parties": [{"site": s, "hosts": {"a": 1}} for s in ("a.b", "a_b")]},
            "sites must have distinct names under Kubernetes. Received: a.b and a_b",
        ),
    ],
)
def test_what_kubernetes_cannot_do_is_refused(
    keys: dict[str, Any], said: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(source, **keys)
    assert deploy(source) == 1
    assert said in capsys.readouterr().err
    assert not (source.parent / "out").exists()
    assert deploy(source, "--only", "systemd,horovod,skypilot,container") == 0


def test_commands_of_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Every sub-command and option that the page names, by the parser itself."""
    texts = re.findall(r"`(tf-hips [^`]+)`", PAGE)
    [block] = re.findall(r"```\n(tf-hips certs init.*?)```", PAGE, re.DOTALL)
    texts += [line.partition("#")[0].strip() for line in block.splitlines()]
    assert len(texts) > 20
    helps: dict[str, str] = {}
    for text in texts:
        command = text.split()[1]
        if command not in helps:
            with pytest.raises(SystemExit) as ended:
                cli.main([command, "--help"])
            assert ended.value.code == 0, text
            helps[command] = capsys.readouterr().out
        if command != "certs":
            for option in re.findall(r"--[a-z-]+", text):
                assert option in helps[command], text
    for command in ("sync", "up", "down"):
        assert f"| `tf-hips {command}` |" in PAGE


def test_an_unknown_kind_is_refused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert deploy(source, "--only", "docker") == 2
    assert "must be some of systemd, kubernetes" in capsys.readouterr().err
