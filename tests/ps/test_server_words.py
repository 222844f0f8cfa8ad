# SPDX-License-Identifier: Apache-2.0
"""What a server and its parties say in their logs, and what they keep to themselves."""

import logging
import re
import threading

import grpc
import pytest

from tests.ps.parties import DEADLINE_S, Party, parties, serving, train_all
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.errors import ENDED
from tf_hips.ps import rules
from tf_hips.ps.calls.entrance import Entrance
from tf_hips.ps.session.waiting import STOPPED

pytestmark = pytest.mark.heavy  # servers start in most of these


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_party_says_once_whom_it_waits_for(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(certificates) as server:
        first = Party(server.address, "a", certificates.party("a"))
        second = Party(server.address, "b", certificates.party("b"))
        joining = threading.Thread(target=first.join, daemon=True)
        joining.start()
        session = server._session
        eventually(lambda: session.absent() == ["b"], 20, changed=session.changed)
        second.join()
        joining.join(20)
        assert not joining.is_alive()
        assert session.absent() == []
        first.client.leave()
        second.client.leave()
        assert session.absent() == ["a", "b"]  # of the run that begins next
        said = [
            (record.levelname, record.getMessage())
            for record in caplog.records
            if "waiting for" in record.getMessage()
        ]
        # No warning, and yet shown.
        assert said == [("INFO", f"Connected to {server.address}, waiting for b")]


def test_who_hangs_up_and_a_stop_are_no_refusals(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(certificates) as server:
        with parties(server, certificates) as (a, b):
            train_all((a, b), 0, 0)
            has_failed = threading.Event()
            waiting = server._session._waiting

            def wait() -> None:
                with pytest.raises(Exception, match="left the run"):
                    b.train(1, 1)
                has_failed.set()

            thread = threading.Thread(target=wait, daemon=True)
            thread.start()
            eventually(lambda: waiting._num_calls > 0, 20, changed=server._session.changed)
            b.client.close()  # in the middle of its round
            assert has_failed.wait(20)
            thread.join(20)
        eventually(lambda: waiting._num_calls == 0, 20, changed=server._session.changed)
        server.stop(5.0)
    assert [text for text in messages(caplog) if "Refused" in text] == []


class Context:
    """A call of somebody with an address of IPv6."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def peer(self) -> str:
        return "ipv6:%5B::1%5D:52480"

    def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.aborted.append(text)
        raise RuntimeError(code.name)


@pytest.mark.parametrize("reason", ["\N{FIRE}" * 2000, "a" * 3000])
def test_a_long_reason_in_any_script_is_heard(certificates: Certificates, reason: str) -> None:
    """What gRPC sends three bytes for each of would be more than it takes in a status."""
    with serving(certificates, insecure=True) as server:
        link = Party(server.address, "a", None).client.link
        server._session.end(reason)
        with pytest.raises(grpc.RpcError) as caught:
            link.once("Failed", b'{"text":"step"}', 0, DEADLINE_S)
        link.close()
    assert caught.value.code() == grpc.StatusCode.ABORTED
    told = caught.value.details()
    assert len(told) >= 500
    assert reason.startswith(told)


@pytest.mark.parametrize(
    ("reason", "warnings"),
    [
        (f"{ENDED}{STOPPED}", []),
        (STOPPED, []),
        ("No.", ["Refused a call of ipv6:[::1]:52480: No."]),
    ],
)
def test_a_refused_address_can_be_read(
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    reason: str,
    warnings: list[str],
) -> None:
    with serving(certificates, insecure=True) as server:
        entrance = Entrance(
            *(server._config, server._waits, server._admission, server._traffic),
            *(server._events, server),
        )
        context = Context()
        with pytest.raises(RuntimeError, match="ABORTED"):
            entrance._refuse(context, grpc.StatusCode.ABORTED, reason)
    assert context.aborted == [reason]
    assert [text for text in messages(caplog) if "Refused" in text] == warnings


@pytest.mark.parametrize(
    ("rule", "children", "text"),
    [
        ("median", 2, "nobody that lies among 2 children in a round: .* takes 3 or more to bear"),
        ("median", 1, None),
        ("median", 3, None),
        ("trimmed_mean(f=0)", 2, None),
        ("krum >> fedavg", 4, "krum.* >> fedavg.* nobody that lies .* takes 5 or more to bear one"),
        ("clip >> mean", 2, None),
        ("sum", 2, None),
        ("detox(r=3) >> mean", 4, "2 groups, the smallest of 1: .*, and mean .* bears no spoilt"),
        ("detox(r=3) >> median", 5, "2 groups, the smallest of 2: .*, and median.* no spoilt one"),
        ("detox(r=2) >> median", 6, None),
        ("detox(r=3) >> mean", 3, "one group of 3, .* more than 1 of them can spoil it"),
        ("detox(r=3) >> mean", 2, "one group of 2, .* any of them can spoil it"),
    ],
)
def test_a_rule_that_bears_nobody_is_a_warning(
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    rule: str,
    children: int,
    text: str | None,
) -> None:
    with serving(certificates, parties=tuple("abcdef")[:children], rule=rule):
        pass
    found = [said for said in messages(caplog) if "spoil" in said]
    assert found == ([] if text is None else [rules.why_weak(rule, children)])
    if text is not None:
        assert re.search(text, found[0])
