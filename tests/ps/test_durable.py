# SPDX-License-Identifier: Apache-2.0
"""Sessions restored from what a killed server left: in every phase, at every record, bit for bit.

A copy of the folder, taken when everything is durable, is what SIGKILL leaves. `test_restart` kills
real servers.
"""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.ps.served import (
    FEEDBACK,
    MODEL,
    NOISE,
    SHAPES,
    SITES,
    Served,
    accepted,
    rounds,
    undisturbed,
)
from tf_hips import log
from tf_hips.errors import NonFiniteError, PeerError, ProtocolError, StateError
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ops.compressor import CHUNK
from tf_hips.ps.disk import journal as journals
from tf_hips.ps.disk.file_format import Reader
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Kind


def test_a_session_that_nobody_has_joined_is_new(tmp_path: Path) -> None:
    """Children whose Join was not answered join again."""
    with Served(tmp_path) as first:
        first.killed(tmp_path / "killed")
    with Served(tmp_path / "killed") as second:
        assert [one["child"] for one in second.join()] == [0, 1]


def test_who_has_joined_may_ask_again(tmp_path: Path) -> None:
    with Served(tmp_path) as first:
        answers = first.join()
        first.killed(tmp_path / "killed")
    with Served(tmp_path / "killed") as second:
        assert second.is_restored
        for child in (0, 1):
            again = second.session.join(second.caller(child), 2, FEEDBACK, FEEDBACK, 7)
            assert again == answers[child]
        with pytest.raises(ProtocolError, match="must be as the one before it"):
            second.session.join(second.caller(0, "new"), 2, FEEDBACK, FEEDBACK, 8)


def test_models_are_kept_one_by_one(tmp_path: Path) -> None:
    with Served(tmp_path) as first:
        first.join()
        first.session.agree_model(first.caller(0), SHAPES, 3)
        first.killed(tmp_path / "one")
        first.session.agree_model(first.caller(1), SHAPES, 3)
        first.killed(tmp_path / "all")
    with Served(tmp_path / "one") as second:
        assert second.session.store is None
        with pytest.raises(ProtocolError, match="the same step"):
            second.session.agree_model(second.caller(1), SHAPES, 4)
        second.session.agree_model(second.caller(1), SHAPES, 3)
        assert second.begin(3).round == 3
    with Served(tmp_path / "all") as second:
        second.session.agree_model(second.caller(0), SHAPES, 3)
        assert second.begin(3).round == 3


def test_the_first_weights_go_on_where_they_were(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        assert first.session.begin_sync(first.caller(0), ["<f4[1280]"], len(content)) == (
            0,
            False,
        )
        first.killed(tmp_path / "described")
        first.session.upload(first.caller(0), 0, content[:1000])
        first.session.upload(first.caller(0), 500, content[500:2000])
        first.killed(tmp_path / "half")
    for name, held in (("described", 0), ("half", 2000)):
        with Served(tmp_path / name) as second:
            with pytest.raises(ProtocolError, match="begin with the same weights"):
                second.session.begin_sync(second.caller(1), ["<f4[1281]"], len(content))
            begun = second.session.begin_sync(second.caller(0), ["<f4[1280]"], len(content))
            assert begun == (held, False)
            second.session.upload(second.caller(0), held, content[held:])
            got = b"".join(second.session.download(second.caller(1), 300))
            assert got == content[300:]


def test_gathers_go_on_where_they_were(tmp_path: Path) -> None:
    with Served(tmp_path) as first:
        first.join()
        for number in range(3):
            first.gather(number, 0, b"zero %d" % number, wait=False)
            first.gather(number, 1, b"", wait=True)
        first.killed(tmp_path / "between")
        first.gather(3, 1, b"one", wait=False)
        first.killed(tmp_path / "mid")
    with Served(tmp_path / "between") as second:
        assert second.gather(2, 1, b"", wait=True) == [b"zero 2"]
        assert second.session._state.gathers.has(0, 2)
    with Served(tmp_path / "mid") as second:
        assert second.session.has_payload(second.caller(1), 3)
        assert second.gather(3, 0, b"zero", wait=True) == [b"zero", b"one"]
        with pytest.raises(ProtocolError, match="must stay what it was"):
            second.gather(3, 1, b"other", wait=True)


@pytest.mark.heavy
@pytest.mark.parametrize("texts", [(FEEDBACK, FEEDBACK), ("fp32", NOISE)], ids=["onebit", "noise"])
def test_a_server_killed_after_any_record_gives_the_same_rounds(
    tmp_path: Path, texts: tuple[str, str]
) -> None:
    """The children deliver anew what they had delivered; nothing counts twice, nothing is lost."""
    with Served(tmp_path / "first", texts=texts) as first:
        first.join()
        first.agree()
        first.deliver(rounds(0, 2))
        first.killed(tmp_path / "whole")
    path = tmp_path / "whole" / "state" / "job" / "journal-000001"
    reader = Reader(path)
    ends = [reader.end for _ in reader.records()]
    reader.close()
    data = path.read_bytes()
    expected = undisturbed(4, texts)
    starts = [*ends[3:], len(data)]  # after all have joined and told their models
    assert len(starts) == 3 * len(MODEL.chunks) * len(SITES) + 2 + 1
    for step, end in enumerate(starts):
        base = tmp_path / f"cut{step}"
        shutil.copytree(tmp_path / "whole", base)
        torn = data[: end + 5 * (step % 2)]
        (base / "state" / "job" / "journal-000001").write_bytes(torn)
        with Served(base, texts=texts) as second:
            store = second.session.store
            assert store is not None
            oldest = min(store._rounds)
            assert second.train(oldest, 4) == expected[oldest:]
            second.killed(tmp_path / f"end{step}")
        packets = [
            (fields["round"], fields["child"], fields["chunk"])
            for kind, fields in accepted(tmp_path / f"end{step}")
            if kind == Kind.PACKET
        ]
        assert sorted(packets) == sorted(rounds(0, 4))


def test_results_of_the_last_round_can_be_had_again(tmp_path: Path) -> None:
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        first.deliver(rounds(0, 1))
        first.deliver([(2, 0, 0)])
        first.killed(tmp_path / "killed")
    with Served(tmp_path / "killed") as second:
        store = second.session.store
        assert store is not None
        assert second.results(1) == undisturbed(1, second.texts)[1]
        assert (store.delivered(2, 0), store.delivered(2, 1)) == ({0}, frozenset())


def test_an_overflow_is_refused_again_and_its_packets_with_it(tmp_path: Path) -> None:
    huge = np.full(MODEL.chunks[2].size, 3e38, np.float32)
    packet = native.encode(compressors.parse("fp32"), huge, native.Key(0, 0, 0))
    texts = ("fp32", FEEDBACK)
    with Served(tmp_path, texts=texts) as first:
        first.join()
        first.agree()
        first.deliver(rounds(0, 0))
        store = first.begin(1)
        store.add(1, 0, [(2, packet)])
        with pytest.raises(NonFiniteError, match="an overflow"):
            store.add(1, 1, [(2, packet)])
        first.killed(tmp_path / "refused")
        first.deliver([(1, 1, 2)])
        first.killed(tmp_path / "one")
    expected = undisturbed(2, texts)
    for name, delivered in (("refused", set()), ("one", {2})):
        with Served(tmp_path / name, texts=texts) as second:
            store = second.session.store
            assert store is not None
            assert store.delivered(1, 1) == delivered
            assert len(store.refusals(1)) == 1
            assert second.train(1, 2) == expected[1:]


def hold_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on nothing becomes durable before this is set."""
    may_go, sync = threading.Event(), os.fdatasync

    def slow(descriptor: int) -> None:
        assert may_go.wait(30)
        sync(descriptor)

    monkeypatch.setattr(journals.os, "fdatasync", slow)
    return may_go


def test_a_result_is_told_when_its_packets_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        assert first.session._recorder.settle() is None
        may_go = hold_up(monkeypatch)
        first.deliver(rounds(0, 0))
        store = first.session.store
        assert store is not None
        assert store._rounds[0].num_merged == len(MODEL.chunks)
        assert store.results(0, 0) == (0, [])
        assert not store.is_merged(0)
        late = first.caller(0)
        late.patience_s = 0.0
        with pytest.raises(PeerError, match="the server's disk is late"):
            first.session.wait_results(late, store, 0, 0, lambda: False, 0)
        may_go.set()
        assert first.results(0) == undisturbed(0, first.texts)[0]


def test_first_weights_are_told_when_they_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before that, the server would get others of child 0, and another child has these."""
    content = bytes(range(256)) * 20
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        recorder = first.session._recorder
        assert recorder.settle() is None
        may_go = hold_up(monkeypatch)
        settle = recorder.settle

        def let_go() -> str | None:
            may_go.set()
            return settle()

        first.session.begin_sync(first.caller(0), ["<f4[1280]"], len(content))
        first.session.upload(first.caller(0), 0, content)
        monkeypatch.setattr(recorder, "settle", let_go)
        told = first.session.download(first.caller(1), 0)
        begin = next(told)
        assert may_go.is_set()
        assert begin + b"".join(told) == content


def test_a_refusal_is_told_when_its_packets_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = np.full(MODEL.chunks[0].size, 3e38, np.float32)
    packet = native.encode(compressors.parse("fp32"), huge, native.Key(0, 0, 0))
    with Served(tmp_path, texts=("fp32", "fp32")) as first:
        first.join()
        first.agree()
        assert first.session._recorder.settle() is None
        may_go = hold_up(monkeypatch)
        store = first.begin(0)
        store.add(0, 0, [(0, packet)])
        with pytest.raises(NonFiniteError):
            store.add(0, 1, [(0, packet)])
        assert (store.refusals(0), store.has_refused(0)) == ([], True)
        may_go.set()
        assert first.session._recorder.settle() is None
        assert len(store.refusals(0)) == 1


def test_a_run_that_is_over_begins_anew(tmp_path: Path) -> None:
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        first.session.leave(first.caller(0), None)
        first.killed(tmp_path / "one")
        first.session.leave(first.caller(1), None)
        first.killed(tmp_path / "all")
    with Served(tmp_path / "one") as second:
        assert second.is_restored
        assert set(second.session._presence._timers) == {1}
        with pytest.raises(ProtocolError, match="Site `a` has left this run"):
            second.session.agree_model(second.caller(0), SHAPES)
        second.session.end("The disk is full of cats.")
        second.killed(tmp_path / "reason")
    for name in ("all", "reason"):
        with Served(tmp_path / name) as third:
            assert not third.is_restored
            third.join()
        assert [kind for kind, _ in accepted(tmp_path / name)] == [Kind.JOINED]


def test_a_step_that_failed_is_remembered_until_the_next_call(tmp_path: Path) -> None:
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        first.session.fail(first.caller(0), "no more disk")
        first.killed(tmp_path / "failed")
        first.deliver([(0, 0, 0)])
        first.killed(tmp_path / "later")
    for name, failures in (("failed", {0: "no more disk"}), ("later", {})):
        with Served(tmp_path / name) as second:
            assert second.session._waiting.failures() == failures


def test_a_record_that_cannot_be_done_is_refused(tmp_path: Path) -> None:
    with Served(tmp_path) as first:
        first.join()
        first.session._recorder.add(Kind.PACKET, b"", round=0, child=0, chunk=0)
        first.killed(tmp_path / "killed")
    path = tmp_path / "killed/state/job/journal-000001"
    before = path.read_bytes()
    text = r"journal-000001, byte \d+: a record must say what this server can do again"
    for _ in range(2):  # the folder is free again
        with pytest.raises(StateError, match=text):
            Served(tmp_path / "killed")
    assert path.read_bytes() == before


def test_a_large_chunk_is_kept_and_restored(tmp_path: Path) -> None:
    """Over several messages, with a residual of 4 MiB."""
    shapes = [[CHUNK + 9]]
    model = Model.from_json(shapes)
    compressor = compressors.parse(FEEDBACK)
    plain = Store(model, SITES, compressor, compressor, 7)

    def packet(number: int, child: int, chunk: int) -> npt.NDArray[np.uint8]:
        values = np.random.default_rng((number, child, chunk)).standard_normal(
            model.chunks[chunk].size, np.float32
        )
        return native.encode(compressor.codec, values, native.Key(0, 0, 0))

    def one_round(store: Store, number: int) -> list[bytes]:
        for child in (0, 1):
            store.add(number, child, [(chunk, packet(number, child, chunk)) for chunk in (0, 1)])
        return [one.tobytes() for _, one in sorted(store.results(number, 0)[1], key=lambda x: x[0])]

    expected = []
    for number in range(3):
        plain.begin(number)
        expected.append(one_round(plain, number))
    with Served(tmp_path) as first:
        first.join()
        for child in (0, 1):
            first.session.agree_model(first.caller(child), shapes)
        for number in range(2):
            one_round(first.begin(number), number)
        first.killed(tmp_path / "killed")
    with Served(tmp_path / "killed") as second:
        store = second.begin(2)
        one_round(store, 2)
        assert second.session._recorder.settle() is None
        assert one_round(store, 2) == expected[2]


def test_an_event_log_outlives_a_full_disk_and_a_cut_line(tmp_path: Path) -> None:
    facts = {"run": "job", "role": "server", "site": "x", "rank": 0}
    events = log.EventLog(tmp_path, **facts)
    events.write("one")
    path = tmp_path / "server-x-0.jsonl"
    lines = events._lines
    assert lines is not None
    lines.close()
    with open("/dev/full", "w") as lines._file:  # noqa: PTH123 - a device
        events.write("dropped")
        events.write("dropped, too")
    lines._tries_at = 0.0  # half a minute later there is room
    events.write("two")
    events.write("three")
    events.close()
    with path.open("a") as file:
        file.write('{"event": "cut o')
    events = log.EventLog(tmp_path, **facts)
    events.write("four")
    events.close()
    found = log.read_events(tmp_path)
    assert [event["event"] for event in found] == ["one", "two", "three", "four"]
    assert [event.get("dropped") for event in found] == [None, 2, None, None]
    assert path.read_text().count("\n") == 5
