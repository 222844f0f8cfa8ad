# SPDX-License-Identifier: Apache-2.0
"""What a party sends that is far longer than what others send: nobody reads it where some lie."""

import json
from typing import Any

import pytest

from tf_hips.errors import ProtocolError

pytestmark = pytest.mark.tf

MIB = 1 << 20
SHORT = json.dumps([["x" * 50]]).encode()


def doubted(paths: Any, workers: Any = None) -> tuple[Any, list[Any]]:
    from tf_hips.strategies.agreeing import Doubted

    events: list[Any] = []

    def write_event(event: str, **values: Any) -> None:
        events.append(values["sites"])

    return Doubted(paths, workers or (1,) * len(paths), write_event), events


def bomb(num_bytes: int) -> bytes:
    return b"[" + b"[]," * (num_bytes // 3) + b"[]]"


def read(payloads: Any, parties: Any, count: int) -> tuple[list[Any], list[int]]:
    """Values as all workers of a party read them, and the lengths of the texts that they get."""
    from tf_hips.strategies import agreeing

    texts = agreeing.as_texts(payloads, parties)
    told = [(text, 1, f"party{place}") for place, text in enumerate(texts)]
    return agreeing.from_texts(told, "x", parties), [len(text or "") for text in texts[:count]]


@pytest.mark.parametrize("num_bytes", [8 << 10, MIB])
def test_a_text_far_longer_than_others_is_named_and_read_by_nobody(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tf_hips.strategies import agreeing

    lengths: list[int] = []

    def loads(text: str) -> Any:
        lengths.append(len(text))
        return json.JSONDecoder().decode(text)

    monkeypatch.setattr(agreeing.json, "loads", loads)
    parties, events = doubted("abcde")
    values, _ = read([SHORT] * 4 + [bomb(num_bytes)], parties, 5)
    assert values == [["x" * 50]] * 4 + [None]
    assert max(lengths) == len(SHORT)
    assert events == [["e"]]
    with pytest.raises(ProtocolError, match="of party `party4` must be a JSON list"):
        read([SHORT] * 4 + [bomb(num_bytes)], None, 5)


def test_claimed_leaves_and_workers_bring_no_longer_texts() -> None:
    claimed = tuple(f"evil/x{n}" for n in range(64))
    parties, events = doubted(("a", "b", "c", *claimed), (1, 1, 1, *[1 << 14] * 64))
    _, lengths = read([SHORT] * 3 + [bomb(MIB // 2)] * 64, parties, 67)
    assert lengths == [len(SHORT)] * 3 + [0] * 64
    assert events == [["evil"]]


def test_who_breaks_both_bounds_below_one_claimed_server_is_left_out_alone() -> None:
    workers = (1, 1, 1, 1, 1 << 15, 1)
    parties, events = doubted(("a", "b", "c", "d", "evil/p", "evil/q"), workers)
    _, lengths = read([SHORT] * 4 + [bomb(MIB + MIB // 5), bomb(6 << 10)], parties, 6)
    assert lengths == [len(SHORT)] * 4 + [0, 0]
    assert events == [["evil"]]


def test_a_worker_of_a_party_server_has_no_longer_texts_than_the_others_there() -> None:
    parties, events = doubted(("west/a", "west/b", "west/c", "east/d", "east/e", "f"))
    _, lengths = read([SHORT, SHORT, bomb(MIB), SHORT, SHORT, SHORT], parties, 6)
    assert lengths == [len(SHORT)] * 2 + [0] + [len(SHORT)] * 3
    assert events == [["west/c"]]


def test_honest_parties_of_very_different_sizes_are_read() -> None:
    from tf_hips.strategies import agreeing

    of_worker = json.dumps([0.25] * 2000)  # digests of a large model

    def payload(workers: int) -> bytes:
        return f"[{','.join([of_worker] * workers)}]".encode()

    sizes = [1, 64, 2, 1, *[4] * 20]
    paths = ("a", "b", "c", "d", *(f"west/{n}" for n in range(20)))
    parties, _ = doubted(paths, sizes)
    texts = agreeing.as_texts([payload(size) for size in sizes], parties)
    assert [len(text or "") for text in texts] == [len(payload(size)) for size in sizes]
    # Nor are texts of which one is empty or a party absent.
    assert agreeing.as_texts([None] * 24, parties) == [None] * 24
    assert agreeing.as_texts([None, b"", *[b"[1]"] * 22], parties)[:3] == [None, "", "[1]"]


def test_a_worker_gathers_texts_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 leaves them out before the other workers of its party get them."""
    from tf_hips.comm import primitives
    from tf_hips.strategies import connected
    from tf_hips.strategies.hierarchical_ps import HierarchicalPS

    strategy = HierarchicalPS.__new__(HierarchicalPS)
    passed_on: list[Any] = []

    class Welcome:
        parties = paths = tuple("abcde")
        workers = (1,) * 5
        bears_liars, looks_at_leaves = True, False

    def broadcast(value: Any, *_: Any, **__: Any) -> Any:
        passed_on.append(value)
        return value

    payloads = [SHORT] * 4 + [bomb(MIB)]
    monkeypatch.setattr(primitives, "gather_objects", lambda value, label: [value])
    monkeypatch.setattr(primitives, "broadcast_object", broadcast)
    monkeypatch.setattr(connected, "on_rank_0", lambda function: function())
    monkeypatch.setattr(strategy, "_together", Welcome, raising=False)
    monkeypatch.setattr(strategy, "_gather_bytes", lambda *_: payloads, raising=False)
    monkeypatch.setattr(strategy, "write_event", lambda *_, **__: None, raising=False)
    assert strategy.gather_objects(["x" * 50], "x") == [["x" * 50]] * 4 + [None]
    assert passed_on == [[SHORT.decode()] * 4 + [""]]
