# SPDX-License-Identifier: Apache-2.0
"""A Flower server or client of `make bench-ps`; runs in Flower's own virtual environment.

    app.py server '{"address": ..., "clients": 4, "shapes": [...], "rounds": 6, "tls": [...]}'
    app.py client '{"address": ..., "shapes": [...], "seed": 0, "ca": ...}'

FedAvg over `start_server` and `start_client`: one stream per client and no process between the
strategy and the network, which is the fastest way that this release has (a SuperLink stores each
message, and is polled for it). All clients in every round, no evaluation, aggregation in place. A
client sends parameters that it has made before, so nothing is counted but what Flower does.

The server makes one round for each line of standard input, and says its seconds as JSON: from the
parameters of the round before to the aggregated ones.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import flwr
import numpy as np

_MOST_BYTES = 2**31 - 1  # of a message; what gRPC takes


def serve(order: dict[str, Any]) -> None:
    """Serves the rounds."""
    shapes = [tuple(shape) for shape in order["shapes"]]

    class Timed(flwr.server.strategy.FedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            if server_round == 1:
                # All clients are there before the first round counts.
                client_manager.wait_for(order["clients"])
                _say(ready=True)
            sys.stdin.readline()
            self.began = time.perf_counter()
            return super().configure_fit(server_round, parameters, client_manager)

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            if failures or len(results) != order["clients"]:
                raise SystemExit(f"{len(results)} results, {len(failures)} failures: {failures}")
            found = super().aggregate_fit(server_round, results, failures)
            _say(seconds=time.perf_counter() - self.began)
            return found

    strategy = Timed(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=order["clients"],
        min_available_clients=order["clients"],
        initial_parameters=flwr.common.ndarrays_to_parameters(
            [np.zeros(shape, np.float32) for shape in shapes]
        ),
    )
    certificates = tuple(Path(name).read_bytes() for name in order["tls"]) or None
    flwr.server.start_server(
        server_address=order["address"],
        config=flwr.server.ServerConfig(num_rounds=order["rounds"]),
        strategy=strategy,
        grpc_max_message_length=_MOST_BYTES,
        certificates=certificates,
    )


def take_part(order: dict[str, Any]) -> None:
    """Takes part in all rounds."""
    draw = np.random.default_rng(order["seed"]).standard_normal
    mine = [draw(tuple(shape), np.float32) for shape in order["shapes"]]

    class Client(flwr.client.NumPyClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            if len(parameters) != len(mine):
                raise SystemExit(f"{len(parameters)} arrays came")
            return mine, 1, {}

    flwr.client.start_client(
        server_address=order["address"],
        client=Client().to_client(),
        grpc_max_message_length=_MOST_BYTES,
        root_certificates=Path(order["ca"]).read_bytes() if order["ca"] else None,
        insecure=not order["ca"],
        max_wait_time=60.0,
    )


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"server": serve, "client": take_part}[sys.argv[1]](json.loads(sys.argv[2]))
