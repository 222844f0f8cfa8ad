# SPDX-License-Identifier: Apache-2.0
"""Ranks that would wait for each other for ever get an error that says why, within 30 seconds.

Horovod cannot be started again once it has stopped, so every mistake has processes of its own. They
mostly wait, so they do it side by side.
"""

import os
import time
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.ranks import ranks, run_parties

pytestmark = pytest.mark.tf

_CASE = "TF_HIPS_TEST_CASE"
_LIMIT_S = 30.0


@ranks(2)
def test_data_of_unequal_length_is_an_error_on_both_ranks():
    import pytest

    from tests.strategies import training
    from tf_hips.comm import primitives, watchdog
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    x, y = training.data(64)
    with CompressedRing().scope():
        model = training.build()
    training.fit(model, [x, y])

    def batches():
        for _ in range(5 - rank):
            yield x[:8], y[:8]

    began = time.monotonic()
    with pytest.raises(ProtocolError) as caught:
        model.fit(batches(), verbose=0)
    assert time.monotonic() - began < _LIMIT_S
    text = str(caught.value)
    for part in (
        "All ranks must come to the same collectives in the same order",
        "rank 0 waits in the sum of the gradients of ",
        "/kernel and 3 more (test_never_hanging.py:",
        "rank 1 in loss and metrics of all replicas (test_never_hanging.py:",
        "`tf_hips.shard`, `steps_per_epoch`",
    ):
        assert part in text, text
    # Whatever comes next says the same, at once.
    began = time.monotonic()
    assert watchdog.verdict() == text
    with pytest.raises(ProtocolError, match="same order"):
        primitives.barrier()
    with pytest.raises(ProtocolError, match="same order"):
        model.fit(x, y, verbose=0)
    assert time.monotonic() - began < 2


@pytest.mark.heavy
@pytest.mark.timeout(240)
def test_no_mistake_hangs(tmp_path):
    _run(tmp_path, "caught_error", "death_in_a_ring", "other_rows")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_more_mistakes_do_not_hang(tmp_path):
    _run(tmp_path, "unequal_loops", "normal_end", "other_order", "late")


def _run(folder, *cases):
    environments = [{_CASE: case} for case in cases]
    for environment in environments:
        if environment[_CASE] == "late":
            environment["TF_HIPS_STALL_S"] = "15"
    run_parties(
        _case, {"folder": folder}, [2] * len(cases), environments=environments, deadline_s=200
    )


def _case(folder):
    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing

    case = os.environ[_CASE]
    strategy = CompressedRing()
    with strategy.scope():
        model = training.build()
    arrays = training.data(64)
    if case not in ("death_in_a_ring", "other_rows"):  # these have models of their own
        training.fit(model, arrays)
    cases = {
        "unequal_loops": _unequal_loops,
        "other_order": _other_order,
        "caught_error": _caught_error,
        "normal_end": _normal_end,
        "death_in_a_ring": _death_in_a_ring,
        "other_rows": _other_rows,
        "late": _late,
    }
    cases[case](strategy, model, arrays, primitives.rank(), Path(folder) / case)


def _error(kind, *parts, attempt):
    """Makes `attempt`; its error must come in time, be of `kind` and have all `parts`."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        attempt()
    took = time.monotonic() - began
    assert took < _LIMIT_S, took
    text = " ".join(str(caught.value).split())
    for part in parts:
        assert part in text, text
    return caught.value


def _unequal_loops(strategy, model, arrays, rank, done):
    """A custom loop in the user's own tf.function, with a step less on rank 1."""
    import contextlib
    import io
    import sys

    import keras
    import tensorflow as tf

    from tf_hips.errors import ProtocolError

    with strategy.scope():
        weight = tf.Variable(tf.zeros([4]))
        optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((weight - x) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
        return loss

    @tf.function
    def distributed(x):
        return strategy.run(step, (x,))

    parts = ("rank 0 waits in the sum of the gradients of ", "rank 1 in the sum of a float32[]")
    one = tf.constant(1.0)
    if rank == 1:
        for _ in range(4):
            distributed(one)
        _error(
            ProtocolError,
            *parts,
            attempt=lambda: strategy.reduce("SUM", tf.constant(1.0), axis=None),
        )
        return

    def attempt():
        for _ in range(5):
            distributed(one)

    # TensorFlow's error comes out of the user's function; what ends the process says why.
    error = _error(tf.errors.UnknownError, attempt=attempt)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        sys.excepthook(type(error), error, error.__traceback__)
    [last] = said.getvalue().strip().splitlines()[-1:]
    assert last.startswith("tf_hips.errors.ProtocolError: All ranks must come"), said.getvalue()
    assert all(part in last for part in parts)
    assert "Horovod has been shut down" not in last
    _error(
        ProtocolError, *parts, attempt=lambda: strategy.reduce("SUM", tf.constant(1.0), axis=None)
    )


def _other_order(strategy, model, arrays, rank, done):
    """Collectives of two kinds, in two orders."""
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError

    # Eagerly, Horovod pairs what comes: two of a kind meet, and see that they are not the same.
    _error(
        ProtocolError,
        "rank 0 at thing 0, rank 1 at thing 1",
        attempt=lambda: primitives.gather_objects(rank, f"thing {rank}"),
    )
    primitives.barrier()  # which ends nothing

    @tf.function
    def in_a_graph(x):
        return strategy.reduce("SUM", x, axis=None)

    value = tf.constant([1.0, 2.0])
    assert in_a_graph(value).numpy().tolist() == [2.0, 4.0]
    attempts = [lambda: in_a_graph(value), lambda: primitives.gather_objects(1, "numbers")]
    kind = ProtocolError if rank else tf.errors.UnknownError
    error = _error(kind, attempt=attempts[rank])
    told = error if rank else _error(ProtocolError, attempt=attempts[1])
    assert "rank 0 waits in the sum of a float32[2]" in str(told)
    assert "rank 1 in numbers of all ranks" in str(told)


def _other_rows(strategy, model, arrays, rank, done):
    """Rank 1 alone hands over a dense gradient, as all have done in a step before."""
    import keras
    import tensorflow as tf

    from tf_hips.errors import ProtocolError

    with strategy.scope():
        tables = [tf.Variable(tf.zeros([9, 2]), name=name) for name in ("words", "users")]
        optimizer = keras.optimizers.Adam()

    def step(indices, *are_rows):
        rows = tf.IndexedSlices(tf.ones([2, 2]), indices, tf.constant([9, 2]))
        optimizer.apply_gradients(
            (rows if is_rows else tf.ones([9, 2]), table)
            for is_rows, table in zip(are_rows, tables, strict=True)
        )

    def run(*are_rows):
        strategy.run(step, (tf.constant([1, 2]), *are_rows))

    for words in (True, False, True):
        run(words, True)
    _error(
        ProtocolError,
        "rank 0 waits in the sum of the gradients of words and 1 more, 0 (words), 1 (users) as ",
        "rank 1 in the sum of the gradients of words and 1 more, 1 (users) as rows",
        "none can go on. Hand over the gradient of a variable alike on all ranks",
        attempt=lambda: run(rank == 0, True),
    )


def _caught_error(strategy, model, arrays, rank, done):
    """Rank 1 raises in the middle of an epoch, catches it, and goes on alone."""
    import keras

    from tf_hips.comm import primitives
    from tf_hips.errors import PeerError

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise ValueError("no more disk")

    parts = (
        "Rank 1 left its step in `fit` of model",
        "ValueError: no more disk",
        "Rank 0 has waited",
        "the sum of the gradients of",
        "catch it on all ranks alike",
    )
    if rank == 0:
        _error(PeerError, *parts, attempt=lambda: training_of(model, arrays))
        done.touch()
        return
    with pytest.raises(ValueError, match="no more disk"):
        training_of(model, arrays, callbacks=[Failing()])
    _wait_for(done)
    _error(PeerError, *parts, attempt=primitives.barrier)


def _normal_end(strategy, model, arrays, rank, done):
    """Rank 1 is through when rank 0 is not."""
    import atexit

    from tf_hips.errors import PeerError

    if rank == 1:
        atexit._run_exitfuncs()  # as at the end of a script
        os._exit(0)
    _error(
        PeerError,
        "Another rank of this party ended in the middle of a step: rank 1 ended, without an error.",
        attempt=lambda: training_of(model, arrays),
    )


def _death_in_a_ring(strategy, model, arrays, rank, done):
    """Rank 1 dies when it has what came in the hops, in the third step."""
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import PeerError
    from tf_hips.strategies import CompressedRing

    steps = []
    gather = primitives.allgather

    def die(packets):
        steps.append(len(packets))
        if len(steps) == 3:
            os._exit(0)
        return packets

    def gather_or_die(tensor, name):
        if rank == 1 and name.endswith(".merged"):
            tensor = tf.ensure_shape(tf.numpy_function(die, [tensor], tf.uint8), tensor.shape)
        return gather(tensor, name)

    primitives.allgather = gather_or_die
    with CompressedRing("error_feedback(onebit)", topology="ring").scope():
        other = training.build()
    _error(
        PeerError,
        "Another rank of this party ended in the middle of a step",
        "the sum of the gradients of",
        "/kernel and 3 more",
        attempt=lambda: training_of(other, arrays),
    )


def _late(strategy, model, arrays, rank, done):
    """Rank 1 takes its time in a callback: that is no mistake, up to a limit."""
    import keras

    from tf_hips.comm import primitives, watchdog
    from tf_hips.errors import PeerError

    class Busy(keras.callbacks.Callback):
        def __init__(self, until):
            super().__init__()
            self.until = until

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and rank == 1:
                self.until()

    training_of(model, arrays, callbacks=[Busy(lambda: time.sleep(9))])
    assert watchdog.verdict() is None
    parts = (
        "within TF_HIPS_STALL_S=15 s",
        "rank 1 is busy: `fit` of model",
        "(test_never_hanging.py:",
        "Rank 0 has waited 1",
        "Raise TF_HIPS_STALL_S",
    )
    if rank == 0:
        _error(PeerError, *parts, attempt=lambda: training_of(model, arrays))
        done.touch()
        return
    _error(
        PeerError,
        *parts,
        attempt=lambda: training_of(model, arrays, callbacks=[Busy(lambda: _wait_for(done))]),
    )
    _error(PeerError, *parts, attempt=primitives.barrier)


def training_of(model, arrays, **options):
    from tests.strategies import training

    model.fit(training.rows(arrays), verbose=0, **options)


def _wait_for(path):
    eventually(path.exists, _LIMIT_S, f"{path} did not come")
