# SPDX-License-Identifier: Apache-2.0
"""Real certificates and a real server: who may join, who may not, and that both come to an end."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import forked, launched, ranks
from tests.support.eventually import eventually
from tf_hips.cli import certs
from tf_hips.config import Tls

COMMAND = (sys.executable, "-m", "tf_hips.cli")
# Whom the server turns away gets no further than this.
JOIN = """
import sys
from tf_hips import config
from tf_hips.ps.client.client import Client
run = config.current()
Client(run.uplink, run.run, 1).join(sys.argv[1], "same", run.seed)
"""
MERGE = """
import sys
import numpy as np
from tf_hips import config
from tf_hips.ops import Key, native, parse
from tf_hips.ps.client.client import Client
run = config.current()
client = Client(run.uplink, run.run, 1)
client.join(sys.argv[1], "same", run.seed)
client.agree_model([[4]])
sent = native.encode(parse(sys.argv[1]), np.float32([2, -1, 2, -1]), Key(run.seed, 0, 0))
got = client.exchange(0, sent)
client.leave()
print("trained on", 1 if got.tobytes() == sent.tobytes() else got)
"""
TRAIN = """
import sys
import keras, numpy as np
import tf_hips
strategy = tf_hips.HierarchicalPS(compression=sys.argv[1])
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((4, 3), "float32"), np.ones(4, "float32"), batch_size=2, verbose=0)
print("trained on", strategy.num_replicas_in_sync)
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    certs.make(folder, server="hub", parties=["west", "east"], days=1)
    return folder


def identity(folder: Path, name: str) -> list[str]:
    tls = Tls(*(str(folder / file) for file in ("authority.pem", f"{name}.pem", f"{name}.key")))
    return ["--authority", tls.authority, "--certificate", tls.certificate, "--key", tls.key]


@pytest.fixture
def server(certificates: Path, tmp_path: Path) -> Iterator[forked.Program]:
    process = forked.Program(
        [
            *(*COMMAND, "server", "--parties", "west", "--run", "r1", "--bind", "127.0.0.1:0"),
            *("--compression", "onebit", "--announce", str(tmp_path / "address")),
            *identity(certificates, "global-server-hub"),
        ],
        stderr=subprocess.PIPE,
    )
    try:

        def has_started() -> bool:
            assert process.poll() is None, said(process)
            return (tmp_path / "address").exists()

        eventually(has_started, 30.0, "the server did not start")
        yield process
    finally:
        process.kill()
        process.wait()


def said(server: forked.Program) -> str:
    assert server.stderr is not None
    return str(server.stderr.read())


def party(
    folder: Path, pem: Path, name: str, compression: str, program: str = JOIN
) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(program)
    address = (folder / "address").read_text().strip()
    return launched.run(
        [
            *("party", "--server", address, "--site", name, "--run", "r1"),
            *identity(pem, f"party-{name}"),
            *("--", str(script), compression),
        ],
        timeout=60,
        zygote=ranks.the_zygote() if program == TRAIN else None,
    )


@pytest.mark.heavy
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(MERGE, id="merges"),
        pytest.param(TRAIN, marks=(pytest.mark.tf, pytest.mark.slow), id="trains"),
    ],
)
def test_a_server_refuses_and_goes_on(
    server: forked.Program, certificates: Path, tmp_path: Path, program: str
) -> None:
    impostor = party(tmp_path, certificates, "east", "onebit")
    assert impostor.returncode == 1
    assert "The site must be one of west. Received: `east`" in impostor.stderr
    *said, last = impostor.stderr.splitlines()
    assert last.startswith("tf-hips: east/worker0 failed first")
    assert re.fullmatch(r"\[east/worker0\] tf_hips\.errors\.PeerError: .*", said[-1])
    assert "Traceback" not in impostor.stderr

    other = party(tmp_path, certificates, "west", "terngrad")
    assert other.returncode == 1
    assert "onebit" in other.stderr
    assert "terngrad" in other.stderr

    welcome = party(tmp_path, certificates, "west", "onebit", program)
    assert welcome.returncode == 0, welcome.stderr
    assert "[west/worker0] trained on 1" in welcome.stdout

    assert server.poll() is None
    server.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0, said(server)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["party", "--server", "{address}"], "--certificate must be for `party/local`"),
        (
            ["party", "--server", "{address}", "--site", "east"],
            "--certificate must be for `party/east`",
        ),
        (
            ["server", "--parties", "a", "--uplink", "{address}", "--site", "east"],
            "--uplink-certificate must be for `party/east`",
        ),
    ],
)
def test_a_certificate_of_another_site_is_refused_before_anything_starts(
    options: list[str], wanted: str, certificates: Path, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text("raise SystemExit('must not run')")
    held = identity(certificates, "party-west")
    given = [one.format(address="127.0.0.1:1") for one in options]
    if options[0] == "server":
        given += identity(certificates, "global-server-hub")
        given += [one.replace("--", "--uplink-") for one in held]
    else:
        given += [*held, "--", str(script)]
    done = forked.run([*COMMAND, *given], timeout=30)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"tf-hips {options[0]}: error: {wanted}: the site is what --site says. Received: "
        f"{certificates / 'party-west.pem'}, which is for `party/west`\n"
    )
