# SPDX-License-Identifier: Apache-2.0
"""`primitives` on real ranks, and alone."""

import json

import numpy as np
import pytest

from tests.support.ranks import ranks, start_alone
from tf_hips.comm import launchers
from tf_hips.errors import ConfigError


@ranks(3)
def test_collectives_on_three_ranks():
    import tensorflow as tf

    from tf_hips.comm import primitives

    rank = primitives.rank()
    assert primitives.size() == 3
    assert primitives.local_rank() == rank

    def collectives():
        base = tf.constant([1.0, 2.0]) * (rank + 1.0)
        own = tf.cast(tf.fill([rank], rank), tf.uint8)
        return (
            primitives.allreduce(base, "sum"),
            primitives.allreduce(base, "least", "min"),
            primitives.allgather(own, "gather"),
            # Rank r sends nothing to rank 0, one row to rank 1 and two rows to rank 2.
            primitives.alltoall(tf.fill([3], rank), [0, 1, 2], "exchange"),
            primitives.broadcast(tf.fill([2], rank), "root", root=2),
        )

    def check(results):
        total, least, gathered, exchanged, root = (result.numpy().tolist() for result in results)
        assert total == [6.0, 12.0]
        assert least == [1.0, 2.0]
        assert gathered == [1, 2, 2]
        assert exchanged == [[], [0, 1, 2], [0, 0, 1, 1, 2, 2]][rank]
        assert root == [2, 2]

    check(collectives())

    # Names, not scopes: every rank builds the same collectives under another scope.
    @tf.function(autograph=False)
    def scoped():
        with tf.name_scope(f"scope_of_rank_{rank}"):
            return collectives()

    for _ in range(3):
        check(scoped())

    # Small parts at once, large ones in rounds: what comes is the same.
    for row in (1, 1 << 16):
        lengths = [0, 2, 3]
        parts = [tf.fill([length, row], tf.cast(rank, tf.uint8)) for length in lengths]
        came = tf.function(primitives.exchange, autograph=False)(parts, lengths, "parts").numpy()
        expected = np.repeat(np.arange(3, dtype=np.uint8), lengths[rank])
        np.testing.assert_array_equal(came, np.repeat(expected[:, None], row, 1))

    # Some of the ranks among each other; one that is not of them only comes along.
    has_rounds = primitives.schedules.has_rounds
    for one in (True, False):
        primitives.schedules.has_rounds = lambda *_, one=one: one
        lengths = [] if rank == 1 else [2, 3]
        parts = [tf.fill([length], tf.cast(rank, tf.uint8)) for length in lengths]
        came = primitives.exchange(parts, lengths, "group", groups=[[0, 2]], largest=3)
        assert came.numpy().tolist() == [[0, 0, 2, 2], [], [0, 0, 0, 2, 2, 2]][rank]
    primitives.schedules.has_rounds = has_rounds

    # Grappler would compute a collective of constants once for all calls, and drop one whose result
    # this rank does not use; the other ranks would wait for this one.
    @tf.function(autograph=False)
    def careless(number):
        total = primitives.allreduce(tf.ones([2]), "of_constants")
        unused = primitives.allreduce(tf.cast(tf.fill([2], number), tf.float32), "unused")
        return total if rank else total + unused

    for number in range(3):
        expected = 3.0 if rank else 3.0 + 3.0 * number
        assert careless(tf.constant(number)).numpy().tolist() == [expected] * 2

    # More elements than Horovod counts travel in parts; small tensors as they are.
    from tf_hips.comm import parts

    large = tf.reshape(tf.range(21), [3, 7]) + 100 * rank
    whole = [sum(large.numpy() + 100 * (one - rank) for one in range(3)), large - 100 * rank]
    limits, names = (parts.PART, parts.MOST), []
    full_name = primitives._full_name
    primitives._full_name = lambda name: names.append(name) or full_name(name)
    parts.PART = 8

    def both():
        return primitives.allreduce(large, "many"), primitives.broadcast(large, "many_too")

    for found in (both(), tf.function(both, autograph=False)()):
        for one, expected in zip(found, whole, strict=True):
            np.testing.assert_array_equal(one, expected)
    assert names[:6] == [f"{one}.part_{k}" for one in ("many", "many_too") for k in range(3)]
    names.clear()
    primitives.broadcast(large, "at_a_time", part=20)
    primitives.broadcast(large, "at_once", part=21)
    assert names == ["at_a_time.part_0", "at_a_time.part_1", "at_once"]
    primitives._full_name = full_name
    parts.MOST = 20
    for attempt in (
        lambda: primitives.allgather(large, "gather"),
        lambda: primitives.alltoall(large, [1, 1, 1], "exchange"),
    ):
        with pytest.raises(ValueError, match=r"must have at most 20 .* Received: 21 elements"):
            attempt()
    parts.PART, parts.MOST = limits

    assert primitives.broadcast_object({"rank": rank, "text": "gr\u00fcezi"}) == {
        "rank": 0,
        "text": "gr\u00fcezi",
    }
    assert primitives.gather_objects([rank] * rank) == [[], [1], [2, 2]]
    primitives.barrier()
    with pytest.raises(ValueError, match="drops what precedes"):
        primitives.allreduce(tf.zeros(1), "scope/name")
    with pytest.raises(ValueError, match="operation='max'"):
        primitives.allreduce(tf.zeros(1), "name", "max")


def _alone():
    """Horovod has begun already, in an environment of no launcher."""
    import os

    import tensorflow as tf

    from tf_hips.comm import primitives as p

    assert not [name for name in os.environ if name.startswith(("HOROVOD_RANK", "HOROVOD_SIZE"))]
    p.init()
    assert (p.rank(), p.size(), p.local_rank()) == (0, 1, 0)
    x = tf.constant([1, 2])
    for y in (
        p.allreduce(x, "a"),
        p.allgather(x, "b"),
        p.alltoall(x, [2], "c"),
        p.broadcast(x, "d"),
    ):
        assert y.numpy().tolist() == [1, 2]
    assert p.broadcast_object([1]) == [1]
    assert p.gather_objects("x") == ["x"]
    p.barrier()
    p.shutdown()
    p.shutdown()
    with pytest.raises(p.ProtocolError, match="new process"):
        p.init()


@pytest.mark.tf
@pytest.mark.timeout(120)
def test_without_a_launcher_there_is_one_rank(tmp_path):
    start_alone(_alone, tmp_path)


@pytest.mark.tf
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ({}, "610"),
        ({"TF_HIPS_STALL_S": "2000.5"}, "2011"),
        ({"TF_HIPS_STALL_S": "3"}, "30"),
        ({"TF_HIPS_STALL_S": "1e30"}, "1000000"),
        ({"HOROVOD_GLOO_TIMEOUT_SECONDS": "45"}, "45"),
    ],
)
def test_gloo_waits_for_a_healthy_rank_as_long_as_the_watchdog(monkeypatch, told, seconds):
    from tf_hips.comm import primitives

    environment = {**told}
    monkeypatch.setattr(primitives.os, "environ", environment)
    seen = []
    monkeypatch.setattr(primitives, "is_running", lambda: False)
    monkeypatch.setattr(primitives, "_facts", (0, 1, 0))
    monkeypatch.setattr(primitives.hvd, "init", lambda: seen.append(dict(environment)))
    primitives.init()
    assert [one["HOROVOD_GLOO_TIMEOUT_SECONDS"] for one in seen] == [seconds]


@pytest.mark.tf
@pytest.mark.timeout(120)
def test_horovod_that_fuses_is_refused(monkeypatch):
    from tf_hips.comm import primitives

    started = []
    monkeypatch.setattr(primitives, "_facts", None)
    monkeypatch.setattr(primitives, "is_running", lambda: True)
    monkeypatch.setattr(primitives.watchdog, "start", lambda *more: started.append(more))
    for name, value in {"rank": 1, "size": 2, "local_rank": 1}.items():
        monkeypatch.setattr(primitives.hvd, name, lambda value=value: value)
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)
    with pytest.raises(
        ConfigError, match=r"with HOROVOD_FUSION_THRESHOLD=its default\. Remove `hvd"
    ):
        primitives.init()
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1024")
    with pytest.raises(ConfigError, match="with HOROVOD_FUSION_THRESHOLD=1024"):
        primitives.init()
    assert not started
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    primitives.init()
    primitives.init()
    assert len(started) == 1
    # Alone there is nothing to fuse.
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD")
    monkeypatch.setattr(primitives, "_facts", None)
    monkeypatch.setattr(primitives.hvd, "size", lambda: 1)
    primitives.init()
    # But what an MPI has started is not alone, unless it is told so.
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setattr(primitives, "_facts", None)
        monkeypatch.setenv(name, "4")
        with pytest.raises(ConfigError, match=rf"without MPI .* Received: {name}=4$"):
            primitives.init()
        monkeypatch.setenv("HOROVOD_SIZE", "1")
        primitives.init()
        monkeypatch.delenv("HOROVOD_SIZE")
        monkeypatch.delenv(name)


def test_who_is_one_of_several_is_told_before_it_trains_alone():
    worker = {"type": "worker", "index": 0}
    two = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": worker})
    chief = json.dumps({"cluster": {"chief": {"0": "a:1"}, "worker": ["b:1"]}, "task": worker})
    for environment, received in [
        ({"TF_CONFIG": two}, "a TF_CONFIG of 2 tasks that train"),
        ({"TF_CONFIG": chief}, "a TF_CONFIG of 2 tasks that train"),
        ({"DMLC_NUM_WORKER": "2", "DMLC_ROLE": "worker"}, "DMLC_NUM_WORKER=2"),
        ({"DMLC_NUM_WORKER": "1", "DMLC_NUM_ALL_WORKER": "2"}, "DMLC_NUM_ALL_WORKER=2"),
    ]:
        with pytest.raises(ConfigError, match=rf"HOROVOD_SIZE=1 .* Received: {received}$"):
            launchers.check_alone(environment)
        launchers.check_alone({**environment, "HOROVOD_SIZE": "1"})
        launchers.check_alone({**environment, "TF_HIPS_CONFIG": "run.yaml"})
    one = {"cluster": {"worker": ["a:1"], "ps": ["c:1", "d:1"]}, "task": worker}
    evaluator = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator", "index": 0}}
    no_task = {"cluster": {"worker": ["a:1", "b:1"]}}
    for told in (one, evaluator, no_task, {}, [], {"cluster": 7, "task": worker}):
        launchers.check_alone({"TF_CONFIG": json.dumps(told), "DMLC_NUM_WORKER": "1"})
    launchers.check_alone({"TF_CONFIG": "no JSON"})
