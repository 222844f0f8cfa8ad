# SPDX-License-Identifier: Apache-2.0
"""The watchdog without processes: its store, and the thread of one rank."""

import contextlib
import json
import logging
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tf_hips.comm import here, watchdog
from tf_hips.comm.rendezvous import Store, store_of_launcher
from tf_hips.comm.verdicts import State, Wait
from tf_hips.errors import ConfigError, PeerError, ProtocolError


def waits(key="a", seconds=10.0, **more):
    return State(wait=Wait(f"collective {key}", key, seconds), **more)


# The store.


class _Handler(BaseHTTPRequestHandler):
    """What Horovod's store does, and what it should not."""

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.values[self.path] = body
        self._answer(200, b"")

    def do_GET(self):
        if self.path.endswith("/hang"):
            self.server.release.wait(10)
        value = self.server.values.get(self.path)
        code = 500 if self.path.endswith("/broken") else 404 if value is None else 200
        self._answer(code, value or b"")

    def _answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.values, server.release = {}, threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(server):
    return Store("127.0.0.1", server.server_address[1], "scope", timeout_s=0.3)


def test_the_store_keeps_json(server, store):
    assert store.get("0") is None
    store.put("0", {"text": "gr\u00fcezi"})
    assert store.get("0") == {"text": "gr\u00fcezi"}
    assert set(server.values) == {"/scope/0"}
    server.values["/scope/1"] = b"no json"
    with pytest.raises(ConnectionError, match="hold JSON under 1"):
        store.get("1")
    with pytest.raises(ConnectionError, match=r"answer 200\. Received: 500"):
        store.get("broken")
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="must answer"):
        store.get("hang")
    assert time.monotonic() - began < 5
    with pytest.raises(ConnectionError, match="must answer"):
        Store("127.0.0.1", 1, "scope").put("0", 1)


def test_the_launcher_names_the_store(monkeypatch):
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    assert store_of_launcher("x") is None
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "?")
    assert store_of_launcher("x") is None
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "123")
    assert isinstance(store_of_launcher("x"), Store)


# The thread of one rank, with time and the other ranks made up.


class _Clock:
    """Time that passes when it is told to."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    fake = types.SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    monkeypatch.setattr(watchdog, "time", fake)
    monkeypatch.setattr(here, "time", fake)
    monkeypatch.setattr(watchdog, "_here", here.Here())
    monkeypatch.setattr(watchdog, "_watchdog", None)
    return clock


class _Dictionary:
    """A store in memory that counts what it is asked."""

    def __init__(self):
        self.values, self.asked, self.is_down = {}, [], False

    def put(self, name, value):
        self._ask("PUT", name)
        self.values[name] = json.loads(json.dumps(value))

    def get(self, name):
        self._ask("GET", name)
        return self.values.get(name)

    def _ask(self, method, name):
        if self.is_down:
            raise ConnectionError("down")
        self.asked.append((method, name))


def dog_of(monkeypatch, store, rank=0, size=2, stall_s=600.0):
    stopped = []
    dog = watchdog.Watchdog(rank, size, store, lambda: stopped.append(1), stall_s)
    monkeypatch.setattr(watchdog, "_watchdog", dog)
    return dog, stopped


def run(dog, clock, seconds, others=None):
    """Looks twice a second; `others` gives what the other ranks say, as time goes on."""
    for tick in range(int(2 * seconds)):
        for rank, state in (others(tick) if others else {}).items():
            dog._store.values[str(rank)] = state.to_json()
        dog.look()
        clock.sleep(0.5)


def test_an_undisturbed_rank_asks_little(monkeypatch, clock):
    store = _Dictionary()
    dog, _ = dog_of(monkeypatch, store)
    for _ in range(60):
        with watchdog.waiting("a sum"):
            pass
        run(dog, clock, 0.5)
    assert {method for method, _ in store.asked} == {"PUT"}
    assert 14 <= len(store.asked) <= 17
    assert store.values["0"]["begun"] > 50


def test_a_deadlock_is_found_told_and_raised(monkeypatch, clock, caplog):
    store = _Dictionary()
    dog, stopped = dog_of(monkeypatch, store)

    def others(tick):
        return {1: waits("b", tick / 2, beat=tick // 4, begun=3)}

    began = clock.now
    with watchdog.waiting("my sum", "a"), caplog.at_level(logging.ERROR):
        while not stopped and clock.now < began + 30:
            run(dog, clock, 0.5, lambda tick: others(int(2 * (clock.now - began))))
    assert 4 <= clock.now - began <= 8
    assert "rank 0 waits in my sum" in store.values["verdict"]["text"]
    assert watchdog.verdict() == store.values["verdict"]["text"]
    with pytest.raises(ProtocolError, match="rank 1 in collective b"), watchdog.waiting("more"):
        pytest.fail("a collective begins after the verdict")
    with pytest.raises(ProtocolError):
        watchdog.check()


def test_collectives_are_counted_once(monkeypatch, clock):
    dog_of(monkeypatch, _Dictionary())

    def begun():
        return watchdog._here.sample(clock.now)[0]

    # What goes around collectives is the first of them, so ranks that make one each have begun as
    # many, whatever it is part of.
    for inner, count in [([], 1), (["x"], 1), (["x", "y"], 2)]:
        before = begun()
        with watchdog.waiting("values of all ranks"):
            assert begun() == before + 1
            for key in inner:
                with watchdog.waiting(f"the allgather `{key}`", key):
                    pass
        assert begun() == before + count
    before = begun()
    for _ in range(2):
        with watchdog.waiting("the sum", "sum"):
            pass
    assert begun() == before + 2


def test_the_lowest_rank_that_waits_judges(monkeypatch, clock):
    store = _Dictionary()
    dog, stopped = dog_of(monkeypatch, store, rank=1, size=3)
    away = State(failure="ValueError: boom", failed_s=100.0)
    with watchdog.waiting("my sum", "a"):
        run(dog, clock, 20, lambda tick: {0: waits("a", tick / 2, beat=tick), 2: away})
        assert not stopped
        assert ("GET", "2") not in store.asked
        # It falls silent; then the next one judges.
        run(dog, clock, 20)
    assert stopped
    assert watchdog.verdict().startswith("Rank 2 left its step with ValueError: boom")


def test_a_verdict_of_another_rank_is_adopted(monkeypatch, clock):
    store = _Dictionary()
    dog, stopped = dog_of(monkeypatch, store)
    store.values["verdict"] = {"kind": "peer", "text": "Rank 7 is gone."}
    with watchdog.waiting("my sum"):
        run(dog, clock, 4)
    assert stopped
    with pytest.raises(PeerError, match=r"^Rank 7 is gone\.$"):
        watchdog.check()


def test_a_slow_rank_is_noted_once_and_given_up_late(monkeypatch, clock):
    store = _Dictionary()
    said = []
    monkeypatch.setattr(watchdog.log, "warning", lambda text, *values: said.append(text % values))
    dog, stopped = dog_of(monkeypatch, store, stall_s=100.0)
    with watchdog.waiting("my sum"):
        run(dog, clock, 90, lambda tick: {1: State(beat=tick, doing="a trace", begun=4)})
        assert not stopped
        [one] = said
        assert "Rank 0 has waited 30 s in my sum" in one
        assert "rank 1 is busy: a trace" in one
        run(dog, clock, 20, lambda tick: {1: State(beat=1000 + tick, doing="a trace", begun=4)})
    assert stopped
    assert "TF_HIPS_STALL_S=100 s" in watchdog.verdict()


def test_failures_last_until_the_next_collective(monkeypatch, clock):
    store = _Dictionary()
    dog, _ = dog_of(monkeypatch, store)
    with watchdog.doing("`fit` of model m"):
        watchdog.failed(ValueError("boom\nand more"))
    watchdog.failed(ValueError("boom\nand more"))  # again, on its way out
    run(dog, clock, 1)
    told = State.from_json(store.values["0"])
    assert (told.failure, told.doing, told.is_freed) == (
        "ValueError: boom",
        "`fit` of model m",
        False,
    )
    with watchdog.waiting("a sum"):
        run(dog, clock, 1)
    assert State.from_json(store.values["0"]).failure is None
    watchdog.failed(RuntimeError("Horovod has been shut down."))
    run(dog, clock, 1)
    assert State.from_json(store.values["0"]).is_freed
    dog.end()
    assert State.from_json(store.values["0"]).has_ended
    before = list(store.asked)
    dog.end()
    assert store.asked == before


IN_A_GRAPH = """Graph execution error:

Detected at node Square defined at (most recent call last):
  File "train.py", line 3, in <module>

  File "train.py", line 7, in step
{stack}
RuntimeError: the pipeline broke
Traceback (most recent call last):

  File "data.py", line 46, in rows
    raise RuntimeError("the pipeline broke")

\t [[{{node PyFunc}}]] [Op:__inference_step_595]"""


@pytest.mark.parametrize("stack", ["", "<stack traces unavailable>"])
def test_others_are_told_what_has_happened_in_a_graph(monkeypatch, clock, stack):
    store = _Dictionary()
    dog, _ = dog_of(monkeypatch, store)
    watchdog.failed(ValueError(IN_A_GRAPH.format(stack=stack)))
    run(dog, clock, 1)
    told = State.from_json(store.values["0"])
    assert told.failure == "ValueError: RuntimeError: the pipeline broke"


class _Place:
    """A graph, as the watchdog asks it."""

    def __init__(self):
        self.begun, self.at, self.left = 5, None, 0

    def where(self):
        return self.begun, self.at

    def leave(self):
        self.at, self.left = None, self.left + 1


def test_graphs_are_asked(monkeypatch, clock):
    store = _Dictionary()
    dog, _ = dog_of(monkeypatch, store)
    place = _Place()
    watchdog.watch(place)
    monkeypatch.setattr(here, "_is_in_tensorflow", lambda: True)
    place.at = ("gradients", "g")
    run(dog, clock, 2)
    told = State.from_json(store.values["0"])
    assert (told.wait.text, told.wait.key, told.begun) == ("gradients", "g", 5)
    assert 1 <= told.wait.seconds <= 2
    place.begun = 6  # another step of the same label
    run(dog, clock, 0.5)
    assert watchdog._here.sample(clock.now)[1].seconds <= 0.5
    # A function that failed leaves its mark, but nobody is inside it.
    monkeypatch.setattr(here, "_is_in_tensorflow", lambda: False)
    assert watchdog._here.sample(clock.now)[1] is None
    watchdog.failed(ValueError("x"))
    assert place.left == 1
    del place


def test_errors_of_horovod_are_explained(monkeypatch, clock):
    store = _Dictionary()
    _, stopped = dog_of(monkeypatch, store, size=3)

    def again():
        assert stopped
        stopped.clear()
        with pytest.raises(PeerError, match="Another rank"):
            watchdog.check()
        watchdog._here.verdict = None

    words = "Horovod has been shut down. This was caused by an exception"
    for other in ("something else", "Connection reset by peer: cannot read gs://data"):
        assert watchdog.explain(RuntimeError(other)) is None
    gloo = "[/x/gloo/transport/tcp/pair.cc:589] Read error [::1]:7: Connection reset by peer"
    assert here.words_of_horovod(RuntimeError(f"a\n {gloo}\n")) == gloo
    assert watchdog.explain(ProtocolError(words)) is None

    store.values["1"] = State(failure="PeerError: x", is_freed=True, has_ended=True).to_json()
    store.values["2"] = State(failure="ValueError: boom", has_ended=True).to_json()
    with pytest.raises(PeerError) as caught, watchdog.waiting("my sum"):
        raise RuntimeError(f"trace\n{words}\nmore")
    for part in (
        "rank 2 ended with ValueError: boom",
        "This rank waited in my sum",
        "on all ranks",
    ):
        assert part in str(caught.value)
    assert "Horovod" not in str(caught.value)  # the reason is known

    # It is through when the others are not.
    store.values["2"] = State(has_ended=True).to_json()
    again()
    told = str(watchdog.explain(RuntimeError(words)))
    assert told.startswith(
        "Another rank of this party ended in the middle of a step: rank 2 ended, without an error. "
    )
    assert "All workers must call the same methods of Keras (`fit`, `evaluate`" in told
    assert "Horovod" not in told

    # Rank 2 was killed: rank 1 goes on to show that it is there.
    store.values["2"] = State(beat=4).to_json()
    store.values["1"] = State(beat=4).to_json()

    def sleep(seconds):
        clock.now += seconds
        store.values["1"] = State(beat=int(clock.now)).to_json()

    monkeypatch.setattr(watchdog.time, "sleep", sleep)
    again()
    told = str(watchdog.explain(RuntimeError(words)))
    assert "rank 2 gives no sign of life (killed, stopped" in told
    assert f"Horovod here: {words}" in told
    again()
    store.is_down = True
    assert "its own output says why" in str(watchdog.explain(RuntimeError(words)))
    again()
    monkeypatch.setattr(watchdog, "_watchdog", None)
    assert "its own output says why" in str(watchdog.explain(RuntimeError(words)))


def test_a_store_that_is_gone_for_a_while_is_one_warning(monkeypatch, clock):
    store = _Dictionary()
    store.is_down = True
    said, failed, answered = [], threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(watchdog.log, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(watchdog, "_POLL_S", 0.01)
    monkeypatch.setattr(watchdog, "_RETRY_S", 0.01)
    dog, stopped = dog_of(monkeypatch, store)
    real = dog._put

    def put(*arguments, **named):
        try:
            real(*arguments, **named)
        except ConnectionError:
            failed.release()
            raise
        answered.set()

    monkeypatch.setattr(dog, "_put", put)
    dog._thread.start()
    for _ in range(2 * watchdog._MAX_FAILURES):
        assert failed.acquire(timeout=10)
    assert said == ["For now, ranks that wait for ever are not noticed. ConnectionError('down')"]
    assert not answered.is_set()
    store.is_down = False
    assert answered.wait(10)
    dog.end()
    assert store.values["0"]["has_ended"]
    store.is_down = True
    dog.publish()
    assert not stopped


def test_a_store_that_fails_now_and_then_hides_no_deadlock(monkeypatch, clock):
    store = _Dictionary()
    dog, stopped = dog_of(monkeypatch, store)
    with watchdog.waiting("my sum", "a"):
        for tick in range(2 * 15):
            store.values["1"] = waits("b", tick / 2, beat=1 + tick, begun=3).to_json()
            store.is_down = tick % 3 == 1
            dog._try_to_look()
            clock.sleep(0.5)
            if stopped:
                break
    assert stopped


def test_what_was_told_before_the_store_was_gone_is_no_deadlock(monkeypatch, clock):
    store = _Dictionary()
    dog, stopped = dog_of(monkeypatch, store)
    old = waits("b", beat=1, begun=3)
    with watchdog.waiting("my sum", "a"):
        store.is_down = True
        clock.sleep(20)
        dog._try_to_look()
        store.is_down = False
        # The other rank has not reached the store yet; it has long gone on.
        run(dog, clock, 7, lambda _: {1: old})
        run(dog, clock, 20, lambda tick: {1: waits("a", tick / 2, beat=2 + tick, begun=9)})
        assert not stopped
        run(dog, clock, 5, lambda tick: {1: waits("b", 5 + tick / 2, beat=100 + tick, begun=9)})
    assert stopped


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_the_limit_is_checked(monkeypatch, clock, text):
    monkeypatch.setenv("TF_HIPS_STALL_S", text)
    with pytest.raises(ConfigError, match=f"TF_HIPS_STALL_S must be .* Received: '{text}'"):
        watchdog.start(0, 1, lambda: None)


def test_one_rank_and_no_launcher_need_no_watchdog(monkeypatch, clock):
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "1")
    watchdog.start(0, 1, lambda: None)
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    watchdog.start(0, 2, lambda: None)
    assert watchdog._watchdog is None
    watchdog.stop()
    assert watchdog.verdict() is None
