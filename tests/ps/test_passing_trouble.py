# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on the way of a party in a run, and is put right in time, ends nothing."""

import concurrent.futures
import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.ps.parties import DEADLINE_S, Party, serving, together, train_all
from tests.ps.relay import Relay
from tests.support.certs import Certificates
from tf_hips.config import Tls
from tf_hips.errors import PeerError
from tf_hips.ps.client.failures import is_broken
from tf_hips.ps.security import authority
from tf_hips.ps.security.diagnosis import Diagnosis, diagnose

BAD_GATEWAY = b"HTTP/1.1 503 Service Unavailable\r\n\r\n"
INTERNAL_ERROR, BAD_RECORD = b"\x15\3\3\0\2\2\x50", b"\x15\3\3\0\2\2\x14"


@pytest.mark.heavy  # a server starts
def test_trouble_that_passes_ends_no_run(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = certificates.party("b")
    names = ("authority", "certificate", "key")
    own = Tls(*(str(shutil.copy(getattr(good, name), tmp_path / name)) for name in names))
    other = authority.make_certificate("party", "b", folder=tmp_path / "other", days=1,
        authority=Path(good.authority).parent)  # fmt: skip
    expired = certificates.identity("party", "b", days=-1)
    found: list[str] = []
    waits: list[Callable[[], object]] = []

    def diagnose_and_mend(*given: Any, **more: Any) -> Diagnosis:
        told = diagnose(*given, **more)
        found.append(told.text)
        while waits:  # what was wrong is put right
            waits.pop()()
        return told

    def answer(text: bytes | None) -> None:
        relay.answer = text

    def lay(kind: str, path: str) -> None:
        Path(getattr(own, kind)).write_bytes(Path(path).read_bytes() if path else b"")

    def put_right() -> None:
        relay.answer = None
        for name in names:
            lay(name, getattr(good, name))

    monkeypatch.setattr("tf_hips.ps.client.link.diagnose", diagnose_and_mend)
    with serving(certificates) as server, Relay(server.port) as relay:
        a = Party(server.address, "a", certificates.party("a"))
        b = Party(relay.address, "b", own)
        together(a.join, b.join)
        troubles: list[tuple[str, Callable[[], object], bool]] = [
            ("accepts TLS now", lambda: relay.flip_after("down", 50), False),
            ("accepts TLS now", lambda: relay.flip_after("up", 50), False),
            ("speaks plain text and this side TLS", lambda: answer(BAD_GATEWAY), True),
            ("handshake with .* failed: .*INTERNAL_ERROR", lambda: answer(INTERNAL_ERROR), True),
            ("handshake with .* failed: .*BAD_RECORD_MAC", lambda: answer(BAD_RECORD), True),
            ("KEY_VALUES_MISMATCH.* used on", lambda: lay("certificate", other.certificate), True),
            ("own certificate .* used on", lambda: lay("authority", ""), True),
            ("it has expired", lambda: [lay(x, getattr(expired, x)) for x in names[1:]], True),
        ]
        numbers = itertools.count()
        for text, begin, is_cut in troubles:
            found.clear()
            # What travels between rounds may take the flip, and then no round meets it.
            for _ in range(1 if is_cut else 3):
                begin()
                if is_cut:
                    # A channel that still holds good credentials would connect by itself.
                    relay.answer = relay.answer or INTERNAL_ERROR
                    relay.cut()
                waits[:] = [put_right]
                number = next(numbers)
                train_all((a, b), number, number)
                if found:
                    break
            assert any(re.search(text, told) for told in found), (text, found)
        # It is the last word of a party that has tried in vain.
        answer(BAD_GATEWAY)
        relay.cut()
        b.client.wait_s = 0.2
        with pytest.raises(PeerError, match=r"speaks plain text and .* Tried for \d s\."):
            b.client.backed_up(0, 0)
        # Nobody is lost whose link is away when it leaves; this server keeps no run.
        waits.append(put_right)
        b.client.leave()
        a.client.leave()
        assert server._session.is_over
        assert server._session.ended is None


def test_code_that_raises_on_either_side_has_not_broken_the_connection() -> None:
    """gRPC says UNKNOWN of both."""

    def requests() -> Iterator[bytes]:
        yield b"first"
        raise KeyError("a mistake")

    def take(messages: Iterator[bytes], _: object) -> bytes:
        return b"".join(messages)

    def fail(*_: object) -> bytes:
        raise KeyError("a mistake")

    def fail_later(*_: object) -> Iterator[bytes]:
        yield b"first"
        raise KeyError("a mistake")

    methods = {
        "Fail": grpc.stream_unary_rpc_method_handler(fail),
        "FailLater": grpc.stream_stream_rpc_method_handler(fail_later),
        "Take": grpc.stream_unary_rpc_method_handler(take),
    }
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, (grpc.method_handlers_generic_handler("any", methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                for method in methods:
                    with pytest.raises(grpc.RpcError) as caught:
                        given = requests() if method == "Take" else iter([b""])
                        list(channel.stream_stream(f"/any/{method}")(given, timeout=DEADLINE_S))
                    assert caught.value.code() == grpc.StatusCode.UNKNOWN
                    assert not is_broken(caught.value)
        finally:
            server.stop(0.0).wait()
