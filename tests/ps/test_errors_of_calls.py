# SPDX-License-Identifier: Apache-2.0
"""What a call says of an error that is neither the caller's nor the run's."""

import grpc
import pytest

from tf_hips.errors import LibraryError, PacketError, TfHipsError, ToleranceError
from tf_hips.ps.calls.entrance import Entrance


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LibraryError("it lacks a function"), grpc.StatusCode.INTERNAL),
        (ToleranceError("krum needs n >= 5"), grpc.StatusCode.NOT_FOUND),
        (PacketError("of another codec"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_every_error_of_ours_is_told(error: TfHipsError, code: grpc.StatusCode) -> None:
    told = []

    class Server(Entrance):
        def __init__(self) -> None:
            self._admission = self  # type: ignore[assignment]

        def admit(self, context: object) -> None:
            del context

        def _refuse(self, context, code, text):  # type: ignore[no-untyped-def]
            told.append((code, text))

    with Server()._translated(None):  # type: ignore[arg-type]
        raise error
    assert told == [(code, str(error))]
