# SPDX-License-Identifier: Apache-2.0
"""What a server tells about its run: to `tf-hips status` as JSON, to Prometheus as metrics.

Both are made of one snapshot, so they never disagree. Making it reads the residuals of the way down
once (4 bytes an element); nothing else grows with the model.
"""

import http
import importlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tf_hips import log
from tf_hips.errors import ConfigError
from tf_hips.ps.calls.traffic import Traffic
from tf_hips.ps.server.bounded_http import BoundedHandler, BoundedServer
from tf_hips.ps.session.session import Session
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.transport.sockets import is_loopback, split_address

Snapshot = dict[str, Any]
# Whoever asks for metrics costs the reading of all residuals; not for every connection.
_FRESH_S = 1.0


def snapshot(config: ServerConfig, session: Session, traffic: Traffic) -> Snapshot:
    """What there is to tell.

    Returns:
        `run`, `shard` (which of how many servers), `uptime_s`, `is_durable`, `refused` (calls),
        `rounds` and `round_s` (calls of rounds that ended well, and their seconds), and what
        `Session.describe` says; of each child, besides, `received_bytes`, `sent_bytes`, `rounds`,
        `retries` and `last_call_s` (ago).
    """
    told = session.describe()
    children, all_of_them = traffic.read()
    for one, counts in zip(told["children"], children, strict=True):
        one |= {
            "received_bytes": counts.received_bytes,
            "sent_bytes": counts.sent_bytes,
            "rounds": counts.rounds,
            "retries": counts.retries,
            "last_call_s": counts.last_call_s,
        }
    return {
        "run": config.run,
        "shard": list(config.shard),
        "is_durable": config.state_dir is not None,
        **all_of_them,
        **told,
    }


class Metrics:
    """An HTTP endpoint for Prometheus, `/metrics`."""

    def __init__(self, bind: str, read: Callable[[], Snapshot]) -> None:
        """Begins to listen.

        Args:
            bind: `host:port`; port 0 takes a free one. It is plain HTTP, and tells names, rounds
                and bytes to whoever asks.
            read: takes a snapshot.

        Raises:
            ConfigError: the address is not free, or `prometheus-client` is not installed.
        """
        try:
            client = importlib.import_module("prometheus_client")
            core = importlib.import_module("prometheus_client.core")
        except ImportError as error:
            raise ConfigError(
                "Metrics need the package `prometheus-client`: pip install 'tf_hips[metrics]'"
            ) from error
        host, port = split_address(bind)
        registry = client.CollectorRegistry()
        registry.register(_Collector(core, read))
        exposition = importlib.import_module("prometheus_client.exposition")
        try:
            self._server = _MetricsServer((host, port), exposition, registry)
        except OSError as error:
            raise ConfigError(
                f"`metrics` must be a free address of this machine. Received: {bind} "
                f"({error.strerror})"
            ) from error
        self.address = f"{bind.rpartition(':')[0]}:{self._server.server_address[1]}"
        self.is_public = not is_loopback(host)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="tf_hips-metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stops to listen."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _MetricsServer(BoundedServer):
    """The connections of those who ask for metrics."""

    max_connections = 32  # of a Prometheus or two; the rounds need threads and descriptors, too

    def __init__(self, address: tuple[str, int], exposition: Any, registry: Any) -> None:
        super().__init__(address, _MetricsHandler, None)
        self.exposition = exposition
        self.registry = registry


class _MetricsHandler(BoundedHandler):
    """Requests of one connection."""

    server: _MetricsServer
    protocol_version = "HTTP/1.0"  # one answer for each: none comes after `stop`

    def do_GET(self) -> None:
        """All metrics, whatever the path, in the format that is asked for."""
        accepts = self.headers.get("Accept", "")
        encode, kind = self.server.exposition.choose_encoder(accepts)
        try:
            body = encode(self.server.registry)
        except Exception as error:  # noqa: BLE001 - who asks must hear something
            log.warning("Metrics cannot be made. %r", error)
            self.send_error(http.HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A line for each time that Prometheus asks would be of no use."""


class _Collector:
    """Makes metrics of a snapshot whenever Prometheus asks; of the same one within a second."""

    def __init__(self, core: Any, read: Callable[[], Snapshot]) -> None:
        self._core = core
        self._read = read
        self._lock = threading.Lock()
        self._taken = -math.inf
        self._told: Snapshot = {}

    def describe(self) -> list[Any]:
        """Nothing: registering must not take a snapshot."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics."""
        with self._lock:
            if time.monotonic() - self._taken > _FRESH_S:
                self._told, self._taken = self._read(), time.monotonic()
            told = self._told
        run = {"run": told["run"], "shard": str(told["shard"][0])}
        yield self._one("round", "Newest round that has begun.", told["round"], run)
        yield self._one("parameters", "Elements of all gradients.", told["parameters"], run)
        yield self._one("uptime_seconds", "Since the server listens.", told["uptime_s"], run)
        yield self._one(
            "downlink_residual_rms",
            "Root mean square of what packets of the way down have missed so far.",
            told["residual_rms"],
            run,
        )
        refused = self._core.CounterMetricFamily(
            "tf_hips_refused_calls", "Calls that were refused.", labels=list(run)
        )
        refused.add_metric(list(run.values()), told["refused"])
        yield refused
        rounds = self._core.SummaryMetricFamily(
            "tf_hips_round_seconds",
            "From the call of a child to its last result.",
            labels=list(run),
        )
        rounds.add_metric(list(run.values()), count_value=told["rounds"], sum_value=told["round_s"])
        yield rounds
        for name, kind, text in (
            ("received_bytes", "Counter", "Messages that a child has sent."),
            ("sent_bytes", "Counter", "Messages that went to a child."),
            ("rounds", "Counter", "Rounds of which a child has got all results."),
            ("retries", "Counter", "Calls that a child made again."),
            ("lag", "Gauge", "Rounds that a child is behind the newest one."),
            ("late", "Counter", "Updates of a child that came after their round was closed."),
            ("absent", "Counter", "Rounds that were closed without a child."),
            ("refused_rows", "Counter", "Updates of a child that a robust rule has refused."),
            ("chosen", "Counter", "Rounds in which a rule has chosen a child's row."),
            ("chosen_of", "Counter", "Rounds in which a rule that chooses had a child's row."),
            ("outvoted", "Counter", "Rounds in which a child's group has said something else."),
            ("proven", "Counter", "Rounds in which a child has sent other packets than it said."),
            ("passed_over", "Counter", "Rounds in which a child was asked for packets in vain."),
        ):
            family = getattr(self._core, f"{kind}MetricFamily")(
                f"tf_hips_child_{name}", text, labels=[*run, "site"]
            )
            for child in told["children"]:
                family.add_metric([*run.values(), child["site"]], child[name])
            yield family
        if told["quorum"] is not None:
            yield self._one("quorum", "Children that make a round.", told["quorum"], run)
        if told["deadline_s"] is not None:
            text = "After the opening of a round, when the quorum is enough."
            yield self._one("round_deadline_seconds", text, told["deadline_s"], run)
        there = self._core.GaugeMetricFamily(
            "tf_hips_child_up", "1 while a child is there.", labels=[*run, "site"]
        )
        for child in told["children"]:
            there.add_metric([*run.values(), child["site"]], float(child["state"] == "there"))
        yield there

    def _one(self, name: str, text: str, value: float, labels: dict[str, str]) -> Any:
        family = self._core.GaugeMetricFamily(f"tf_hips_{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
