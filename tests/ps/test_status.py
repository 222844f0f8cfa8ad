# SPDX-License-Identifier: Apache-2.0
"""What a server tells about its run: `tf-hips status` and Prometheus."""

import contextlib
import json
import math
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ps.parties import Party, parties, serving, together, train_all
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import cli, log
from tf_hips.cli import status
from tf_hips.config import Tls
from tf_hips.errors import ConfigError, PeerError
from tf_hips.ops import compressor as compressors
from tf_hips.ps.security.diagnosis import own_identity
from tf_hips.ps.security.tls import Identity
from tf_hips.ps.server.status import Metrics
from tf_hips.ps.transport.sockets import split_address

pytestmark = pytest.mark.heavy  # servers start in most of these


def options_of(identity: Tls) -> list[str]:
    return [
        *("--authority", identity.authority),
        *("--certificate", identity.certificate, "--key", identity.key),
    ]


def test_a_run_is_described_from_its_start_to_its_end(
    certificates: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = certificates.identity("operator", "alice")
    with serving(certificates) as server:

        def ask() -> dict:
            return status.ask(server.address, "local", operator, 10)

        told = ask()
        assert (told["state"], told["round"], told["parameters"]) == ("waiting", 0, 0)
        assert [one["state"] for one in told["children"]] == ["absent", "absent"]
        with parties(server, certificates) as members:
            train_all(members, 0, 2)
            told = ask()
            model = sum(members[0].sizes)
            assert (told["state"], told["round"], told["parameters"]) == ("training", 2, model)
            assert told["compression"] == "error_feedback(onebit)"
            assert told["rounds"] == 6
            assert told["residual_rms"] > 0
            packets = sum(compressors.parse("onebit").wire_bytes(size) for size in members[0].sizes)
            for one in told["children"]:
                assert (one["state"], one["workers"], one["round"], one["lag"]) == (
                    "there",
                    2,
                    2,
                    0,
                )
                assert one["chunks"] == told["chunks"] == 4
                assert one["rounds"] == 3
                assert 3 * packets < one["received_bytes"] < 3 * packets + 500
                assert one["sent_bytes"] == one["received_bytes"]
                assert 0 <= one["last_call_s"] < 20
            # One party is a round ahead, until the other one leaves.
            a, b = members
            ahead = a.packets(3)

            def leave() -> None:
                store = server._session.store
                assert store is not None
                eventually(lambda: store.progress(0) == (3, 4), 20, changed=store.changed)
                assert [one["lag"] for one in ask()["children"]] == [0, 1]
                b.client.leave("it has [other] plans")

            with pytest.raises(PeerError):
                together(lambda: a.client.exchange(3, ahead), leave)
            told = ask()
            assert told["state"] == "over"
            assert "it has [other] plans" in told["ended"]
            assert [one["state"] for one in told["children"]][1] == "left"
            command = ["status", "--server", server.address, *options_of(operator)]
            with pytest.raises(SystemExit) as ended:
                cli.main(command)
            assert ended.value.code == 1
            text = capsys.readouterr().out
            assert "run local: over" in text
            assert "it has [other] plans" in text
            with pytest.raises(SystemExit):
                cli.main([*command, "--json"])
            assert json.loads(capsys.readouterr().out)["run"] == "local"


def test_the_residual_is_that_of_the_store(certificates: Certificates) -> None:
    with serving(certificates) as server, parties(server, certificates) as members:
        train_all(members, 0, 1)
        store = server._session.store
        assert store is not None
        whole = np.concatenate([one for _, one in store.residuals()])
        told = status.ask(server.address, "local", certificates.party("a"), 10)
        assert math.isclose(told["residual_rms"], np.sqrt(np.mean(whole**2)), rel_tol=1e-5)
        # A run that diverges is when somebody asks.
        for _, one in store.residuals():
            one[:] = 1e38
        told = status.ask(server.address, "local", certificates.party("a"), 10)
        assert told["residual_rms"] == pytest.approx(1e38)


def test_who_may_ask(certificates: Certificates, tmp_path: Path) -> None:
    with serving(certificates) as server:
        assert status.ask(server.address, "local", certificates.party("b"), 10)["run"] == "local"
        for identity, text in (
            (certificates.party("c"), "The site must be one of a, b"),
            (certificates.identity("worker", "a"), "must be `party/a`. Received: `worker/a`"),
            (certificates.server(), "must be `party/hq`. Received: `global-server/hq`"),
        ):
            with pytest.raises(PeerError, match=text):
                status.ask(server.address, "local", identity, 10)
        with pytest.raises(PeerError, match=r"The run must be `local`. Received: `other`"):
            status.ask(server.address, "other", certificates.identity("operator", "x"), 10)
        # An operator takes no part.
        stranger = Party(server.address, "a", certificates.identity("operator", "a"))
        with pytest.raises(PeerError, match=r"must be `party/a`. Received: `operator/a`"):
            stranger.join()
        told = status.ask(server.address, "local", certificates.party("a"), 10)
        assert told["refused"] == 5
        assert [one["state"] for one in told["children"]] == ["absent", "absent"]
    assert own_identity(certificates.party("a")) == Identity("party", "a")
    with pytest.raises(ConfigError, match="it has expired"):
        own_identity(certificates.identity("party", "a", days=-1))
    with pytest.raises(PeerError, match="Nothing listens"):
        status.ask(server.address, "local", certificates.party("a"), 0.2)


def test_metrics_say_the_same(certificates: Certificates) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with (
        serving(certificates, metrics="127.0.0.1:0") as server,
        parties(server, certificates) as members,
    ):
        train_all(members, 0, 1)
        told = status.ask(server.address, "local", certificates.party("a"), 10)
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as page:
            text = page.read().decode()
        found = {
            (sample.name, sample.labels.get("site")): sample.value
            for family in parser.text_string_to_metric_families(text)
            for sample in family.samples
        }
        for name in ("received_bytes", "sent_bytes", "rounds", "retries"):
            for child in told["children"]:
                assert found[f"tf_hips_child_{name}_total", child["site"]] == child[name]
        assert found["tf_hips_round", None] == 1
        assert found["tf_hips_parameters", None] == told["parameters"]
        assert found["tf_hips_child_up", "b"] == 1
        assert found["tf_hips_round_seconds_count", None] == 4
        assert found["tf_hips_round_seconds_sum", None] == pytest.approx(told["round_s"])
        assert found["tf_hips_refused_calls_total", None] == 0
        with (
            pytest.raises(ConfigError, match="`metrics` must be a free address"),
            serving(certificates, metrics=server.metrics_address),
        ):
            pass


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    """Metrics that cannot be made."""
    pytest.importorskip("prometheus_client")

    def fail() -> Any:
        raise ValueError("no snapshot")

    made = Metrics("127.0.0.1:0", fail)
    yield made
    made.stop()


def test_an_error_of_metrics_is_told_to_who_asks(metrics: Metrics) -> None:
    with pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(f"http://{metrics.address}/metrics", timeout=10)


def test_a_thread_that_cannot_start_takes_no_place(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = metrics._server._free._value

    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="new thread"):
        metrics._server.process_request(socket.socket(), ("127.0.0.1", 1))
    assert metrics._server._free._value == free


def test_a_connection_has_one_answer(metrics: Metrics) -> None:
    with socket.create_connection(split_address(metrics.address), timeout=10) as one:
        one.sendall(2 * b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"".join(iter(lambda: one.recv(4096), b"")).count(b"500 Internal") == 1


def test_who_says_nothing_costs_so_many_threads_at_most(metrics: Metrics) -> None:
    address = split_address(metrics.address)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(address, timeout=10))
            for _ in range(metrics._server.max_connections)
        ]
        assert len(silent) <= 32
        one_more = stack.enter_context(socket.create_connection(address, timeout=10))
        assert one_more.recv(1) == b""


def test_without_prometheus_the_extra_is_named(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with (
        pytest.raises(ConfigError, match=r"tf_hips\[metrics\]"),
        serving(certificates, metrics="127.0.0.1:0"),
    ):
        pass


def test_who_was_refused_is_told_everywhere(
    certificates: Certificates,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    sites = ("a", "b", "c")
    settings = {"parties": sites, "rule": "clip >> mean", "compression": "fp32"}
    settings |= {"metrics": "127.0.0.1:0", "log_dir": str(tmp_path)}
    with serving(certificates, insecure=True, **settings) as server:
        ways = {"compression": "fp32", "downlink": "fp32", "sites": sites}
        with parties(server, certificates, insecure=True, **ways) as members:
            train_all(members, 0, 0)
            before = status.ask(server.address, "local", None, 10)
            status._show([before])
            assert "refused" not in capsys.readouterr().out.splitlines()[-4].split()
            encode = members[1].packets

            def lie(number: int) -> np.ndarray:
                lengths = [4 * size for size in members[1].sizes]
                packets, at = encode(number).copy(), 0
                for length in lengths:
                    values = packets[at + 16 : at + 16 + length].view(np.float32)
                    values *= np.float32(1e9)
                    at += 16 + length
                assert at == packets.size
                return packets

            members[1].packets = lie  # type: ignore[method-assign]
            train_all(members, 1, 2)
            told = status.ask(server.address, "local", None, 10)
            assert [one["refused_rows"] for one in told["children"]] == [0, 2, 0]
            status._show([told])
            head, *lines = capsys.readouterr().out.splitlines()[-4:]
            assert head.split()[-1] == "refused"
            assert [line.split()[-1] for line in lines] == ["0", "2", "0"]
            page = urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10)
            text = page.read().decode()
            assert 'tf_hips_child_refused_rows_total{run="local",shard="0",site="b"} 2.0' in text
    events = [one for one in log.read_events(tmp_path) if one["event"] == "row_refused"]
    assert [(one["round"], one["child_site"]) for one in events] == [(1, "b"), (2, "b")]
    assert all("times the median" in one["reason"] for one in events)


def test_who_was_chosen_is_told_everywhere(
    certificates: Certificates,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    sites = ("a", "b", "c")
    settings = {"parties": sites, "rule": "krum(f=0)", "compression": "fp32"}
    settings |= {"metrics": "127.0.0.1:0", "log_dir": str(tmp_path)}
    with serving(certificates, insecure=True, **settings) as server:
        ways = {"compression": "fp32", "downlink": "fp32", "sites": sites}
        with parties(server, certificates, insecure=True, **ways) as members:
            train_all(members, 0, 3)
            told = status.ask(server.address, "local", None, 10)
            counts = [one["chosen"] for one in told["children"]]
            assert sum(counts) == 4
            assert [one["chosen_of"] for one in told["children"]] == [4, 4, 4]
            status._show([told])
            head, *lines = capsys.readouterr().out.splitlines()[-4:]
            assert head.split()[-1] == "chosen"
            assert [line.split()[-1] for line in lines] == [f"{count}/4" for count in counts]
            page = urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10)
            text = page.read().decode()
            labels = '{run="local",shard="0",site="b"}'
            assert f"tf_hips_child_chosen_total{labels} {counts[1]}.0" in text
            assert f"tf_hips_child_chosen_of_total{labels} 4.0" in text
    events = [one for one in log.read_events(tmp_path) if one["event"] == "rows_chosen"]
    assert [one["round"] for one in events] == [0, 1, 2, 3]
    chosen = [site for one in events for site in one["sites"]]
    assert [chosen.count(site) for site in sites] == counts
    assert all(one["among"] == [*sites] for one in events)
