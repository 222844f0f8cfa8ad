# SPDX-License-Identifier: Apache-2.0
"""A client of the key-value store that Horovod's launcher serves for its ranks' rendezvous.

The store lives as long as the launcher (horovodrun, `tf-hips run`, `local_rank_environments`),
which is longer than any rank: what a rank wrote can be read when it is gone. One request is one
connection; nothing here listens.

Imports no TensorFlow.
"""

import contextlib
import http.client
import json
import os
from typing import Any

_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"


class Store:
    """JSON values by name, in a scope of their own."""

    def __init__(self, address: str, port: int, scope: str, timeout_s: float = 2.0) -> None:
        """Connects to nothing yet.

        Args:
            address: name or address of the launcher's host.
            port: port of its store.
            scope: what the names are unique in; letters, digits and "_".
            timeout_s: seconds that a request may take to be answered.
        """
        self._address = address
        self._port = port
        self._scope = scope
        self._timeout_s = timeout_s

    def put(self, name: str, value: Any) -> None:
        """Writes a JSON value.

        Raises:
            ConnectionError: the store cannot be reached, or refuses.
        """
        self._ask("PUT", name, json.dumps(value).encode())

    def get(self, name: str) -> Any:
        """Returns the JSON value of `name`, None where there is none.

        Raises:
            ConnectionError: the store cannot be reached, or answers with something else.
        """
        data = self._ask("GET", name, None)
        try:
            return None if data is None else json.loads(data)
        except ValueError as error:
            raise ConnectionError(
                f"The store must hold JSON under {name}. Received: {data!r}"
            ) from error

    def _ask(self, method: str, name: str, body: bytes | None) -> bytes | None:
        # Not urllib: it would go through a proxy of the environment.
        connection = http.client.HTTPConnection(self._address, self._port, timeout=self._timeout_s)
        try:
            with contextlib.closing(connection):
                connection.request(method, f"/{self._scope}/{name}", body)
                answer = connection.getresponse()
                data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(
                f"The store at {self._address}:{self._port} must answer. "
                f"Received: {type(error).__name__}: {error}"
            ) from error
        if answer.status == http.client.NOT_FOUND:
            return None
        if answer.status != http.client.OK:
            raise ConnectionError(
                f"The store at {self._address}:{self._port} must answer 200. "
                f"Received: {answer.status}"
            )
        return data


def store_of_launcher(scope: str) -> Store | None:
    """The store that this process' launcher told it about; None where there is none (MPI)."""
    address, port = os.environ.get(_ADDRESS, ""), os.environ.get(_PORT, "")
    return Store(address, int(port), scope) if address and port.isdigit() else None
