# SPDX-License-Identifier: Apache-2.0
"""Whoever does the same again and again fills neither the event log nor the journal."""

import logging
from pathlib import Path

import grpc
import pytest

from tests.ps.parties import Party, parties, raw_channel, raw_exchange, serving, train_all
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import log
from tf_hips.cli import status
from tf_hips.ps.calls import written
from tf_hips.ps.calls.written import Written

pytestmark = pytest.mark.heavy  # servers, and what is asked again and again


def test_a_round_that_is_asked_for_again_is_written_and_counted_once(
    certificates: Certificates, tmp_path: Path
) -> None:
    with (
        serving(certificates, log_dir=str(tmp_path)) as server,
        parties(server, certificates) as (a, b),
        raw_channel(server.address, certificates.party("b")) as channel,
    ):
        train_all((a, b), 0, 3)
        for _ in range(3):
            assert raw_exchange(channel, b.call(0), [])[0] == grpc.StatusCode.OK
            b.client.agree_model(b.shapes, 0)
        told = status.ask(server.address, "local", certificates.identity("operator", "x"), 10)
        assert [one["rounds"] for one in told["children"]] == [4, 4]
        assert told["rounds"] == 8
    events = [one for one in log.read_events(tmp_path) if one.get("child_site") == "b"]
    assert [one["round"] for one in events if one["event"] == "round"] == [0, 1, 2, 3]
    assert len([one for one in events if one["event"] == "model"]) == 1


def test_comebacks_are_written_in_brief_and_not_for_ever(
    certificates: Certificates,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(written, "_MOST_PROCESSES", 3)
    monkeypatch.setattr("tf_hips.ps.session.comeback._MOST_TOLD", 2)
    caplog.set_level(logging.INFO)
    with (
        serving(certificates, log_dir=str(tmp_path)) as server,
        parties(server, certificates) as (a, b),
    ):
        train_all((a, b), 0, 0)
        before = b
        for _ in range(4):
            before.client.close()
            eventually(lambda: not server._session._presence.is_there(1))
            before = Party(server.address, "b", certificates.party("b"))
            before.join()
        before.client.close()
    events = [one for one in log.read_events(tmp_path) if one["event"] == "join"]
    [first, *again] = [one for one in events if one["child_site"] == "b"]
    assert first["leaves"] == [["b", 2]] and not first["is_back"]
    assert len(again) == 2
    assert all(one["is_back"] and "leaves" not in one for one in again)
    told = [one.getMessage() for one in caplog.records]
    assert sum("has come back as another process" in one for one in told) == 2


def test_numbers_of_another_run_begin_anew() -> None:
    one = Written()
    assert [one.is_new("run", 0, "round", number) for number in (0, 1, 1, 0, 2)] == [
        *(True, True, False, False, True)
    ]
    assert one.is_new("run", 1, "round", 0) and one.is_new("run", 0, "gather", 0)
    assert one.is_new("next", 0, "round", 0) and not one.is_new("next", 0, "round", 0)
    assert one.is_of_another("run", 0, "join", "p") and not one.is_of_another("run", 0, "join", "p")
    assert one.is_of_another("next", 0, "join", "p")
