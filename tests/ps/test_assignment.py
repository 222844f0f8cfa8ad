# SPDX-License-Identifier: Apache-2.0
"""Which shard has which chunks: a table that is part of the protocol and of files."""

import itertools
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ps.parties import SHAPES, SITES
from tf_hips.errors import ConfigError
from tf_hips.ops.compressor import CHUNK
from tf_hips.ps.disk import file_format
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.terms.assignment import WHOLE, Shard
from tf_hips.ps.terms.model import Model

LARGE = ((5, 3), (CHUNK + 3,), (), (300, 7), (11,), (CHUNK // 4,), (64,))


def tables(shapes: Any, count: int) -> list[tuple[int, ...]]:
    return [Shard(index, count).chunks(Model(shapes)) for index in range(count)]


def test_the_table_of_shards_never_changes() -> None:
    assert tables(SHAPES, 1) == [(0, 1, 2, 3)]
    assert tables(SHAPES, 2) == [(2,), (0, 1, 3)]
    assert tables(SHAPES, 3) == [(2,), (0,), (1, 3)]
    assert tables(SHAPES, 5) == [(2,), (0,), (3,), (1,), ()]
    assert tables(LARGE, 3) == [(1,), (6,), (0, 2, 3, 4, 5, 7)]
    assert tables(((9 * CHUNK,), (7,)), 4) == [(0, 4, 8), (1, 5, 9), (2, 6), (3, 7)]
    assert tables((), 2) == [(), ()]


@given(
    st.lists(st.lists(st.integers(0, 3000), max_size=2), max_size=30),
    st.integers(1, 9),
)
def test_every_chunk_is_at_one_shard_and_no_shard_has_much_more_than_another(
    shapes: list[list[int]], count: int
) -> None:
    model = Model(tuple(map(tuple, shapes)))
    held = tables(model.shapes, count)
    assert sorted(itertools.chain(*held)) == list(range(len(model.chunks)))
    assert all(list(table) == sorted(table) for table in held)
    loads = [sum(model.chunks[one].size for one in table) for table in held]
    largest = max((chunk.size for chunk in model.chunks), default=0)
    assert max(loads) - min(loads) <= largest
    assert bool(held[0]) == bool(model.chunks)


@pytest.mark.parametrize("numbers", [(1, 1), (-1, 2), (0, 0), (0, 1025), (0.0, 1), (True, 2)])
def test_there_is_no_such_shard(numbers: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="`shard` must be I of N"):
        ServerConfig(parties=SITES, insecure=True, shard=numbers)
    with pytest.raises(ConfigError, match="`shard` must be two numbers"):
        ServerConfig(parties=SITES, insecure=True, shard=(1, 2, 3))  # type: ignore[arg-type]


def test_files_that_know_no_shards_are_of_the_only_server(tmp_path: Path) -> None:
    facts = file_format.Facts("local", SITES, None, None, (1, 2))
    path = tmp_path / "journal-000001"
    path.write_bytes(file_format.Header(facts).to_bytes())
    assert file_format.Reader(path).header.facts == facts
    front = file_format._FRONT
    fields = json.loads(path.read_bytes()[front.size :])
    del fields["facts"]["shard"]
    text = json.dumps(fields).encode()
    head = struct.unpack_from("<8sI", path.read_bytes())
    path.write_bytes(front.pack(*head, len(text), zlib.crc32(text)) + text)
    assert file_format.Reader(path).header.facts.shard == WHOLE.numbers
