# SPDX-License-Identifier: Apache-2.0
"""One launch: ranks that go through a list of features together, and say which of them fail.

Ranks talk here through files in a folder they share (`Board`), not through what is being tested: so
values of all ranks of all parties can be compared, and a rank that is left alone says so.
"""

import contextlib
import gc
import os
import pickle
import reprlib
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.strategies import training
from tests.strategies.features import (
    Configuration,
    Feature,
    configurations,
    cover,
    everything,
)
from tf_hips import config
from tf_hips.comm import primitives
from tf_hips.strategies import CompressedRing, HierarchicalPS, local

BATCH = training.BATCH
PARTY = "TEST_PARTY"
_SITES = ("north", "south")
_STRATEGIES = {"CompressedRing": CompressedRing, "HierarchicalPS": HierarchicalPS}
_WAIT_S = 60.0

# A feature's title, the policy it ran with, and the arguments of `Job.afterwards`.
_Later = tuple[str, Any, Callable[[], Any], Callable[[Any], None]]


class Lost(Exception):
    """Another rank does not come any more."""


class Board:
    """Values of all ranks, through files."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = folder, rank, size
        self._name, self._count = "", 0

    def begin(self, name: str) -> None:
        """What is gathered from now on belongs to the feature `name`."""
        self._name, self._count = name, 0

    def gather(self, value: Any) -> list[Any]:
        """Values of all ranks, by rank.

        Raises:
            Lost: another rank has ended the feature, or does not come.
        """
        self._count += 1
        self._write(f"{self._count}", value)
        return [self._read(f"{self._count}", rank) for rank in range(self._size)]

    def outcomes(self, own: str | None) -> list[str | None]:
        """How the feature ended, on each rank: None or an error.

        Raises:
            Lost: a rank has not ended it.
        """
        self._write("end", own)
        return [self._read("end", rank) for rank in range(self._size)]

    def _path(self, label: str, rank: int) -> Path:
        return self._folder / f"{self._name}.{label}.{rank}"

    def _write(self, label: str, value: Any) -> None:
        path = self._path(label, self._rank)
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(pickle.dumps(value))
        new.rename(path)

    def _read(self, label: str, rank: int) -> Any:
        end = time.monotonic() + _WAIT_S
        while time.monotonic() < end:
            with contextlib.suppress(FileNotFoundError):
                return pickle.loads(self._path(label, rank).read_bytes())
            # It may have written the value just before it ended.
            if self._path("end", rank).exists() and not self._path(label, rank).exists():
                raise Lost(f"Rank {rank} has ended the feature {self._name} already.")
            time.sleep(0.005)
        raise Lost(f"Rank {rank} does not come, in the feature {self._name}.")


class Job:
    """What a feature is given.

    Attributes:
        configuration: what is tested.
        rank: this rank among all ranks of all parties.
        size: their number.
        party: number of this rank's party.
        is_full: whether all features are shown, not the cover's.
        folder: empty; the same for all ranks of a party, as a shared directory is.
    """

    def __init__(self, configuration: Configuration, folder: Path, is_full: bool) -> None:
        self.configuration = configuration
        self.is_full = is_full
        self.party = int(os.environ.get(PARTY, "0"))
        self.rank = sum(configuration.sizes[: self.party]) + primitives.rank()
        self.size = sum(configuration.sizes)
        self.is_exact = configuration.is_exact
        self.has_uplink = configuration.has_uplink
        self._root = folder
        self._board = Board(folder, self.rank, self.size)
        self._runs = 0
        self._open: list[Any] = []
        self._servers = contextlib.ExitStack()
        self.folder = folder
        self.later: list[_Later] = []
        self._title = ""

    def begin(self, name: str) -> None:
        """Makes ready for a feature."""
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(100 + self.rank)
        self._title = f"{self.configuration.name}: {name}"
        name = f"{self.configuration.name}.{name}"
        self._board.begin(name)
        self.folder = self._root / f"{name}-party{self.party}"
        self.folder.mkdir(exist_ok=True)

    def end(self, error: str | None) -> list[str | None]:
        """Leaves the feature's runs; returns how it ended on all ranks."""
        for strategy in self._open:
            if hasattr(strategy, "close"):
                strategy.close()
        self._open.clear()
        outcomes = self._board.outcomes(error)
        self._servers.close()
        keras.mixed_precision.set_dtype_policy("float32")
        shutil.rmtree(self.folder, ignore_errors=True)
        return outcomes

    # Strategies and models.

    def strategy(self, kind: Callable[[type], type] = lambda cls: cls, **arguments: Any) -> Any:
        """A new strategy of the configuration; with a server it is a new run.

        Args:
            kind: makes another class of the strategy's class.
            arguments: more arguments of its, or another compression.
        """
        cls = kind(_STRATEGIES[self.configuration.strategy])
        run = self._join() if self.has_uplink else None
        arguments = {"compression": self.configuration.compression, **arguments}
        strategy = cls(config=run, **arguments)
        assert strategy.global_rank == self.rank
        assert strategy.num_replicas_in_sync == self.size
        self._open.append(strategy)
        return strategy

    def _join(self) -> config.Run:
        from tests.strategies.test_hierarchical_ps import serving

        self._runs += 1
        run = f"{self.configuration.name}-{self._runs}"
        server = self._servers.enter_context(serving(run)) if self.rank == 0 else None
        port = self._board.gather(server.port if server else None)[0]
        uplink = config.Uplink(
            server=f"127.0.0.1:{port}", site=_SITES[self.party], deadline_s=_WAIT_S
        )
        return config.Run(run=run, seed=7, uplink=uplink)

    def make(self, build: Callable[[], Any], strategy: Any = None) -> Any:
        """What `build` makes in the scope of a new strategy, with a seed of this rank's own."""
        strategy = strategy or self.strategy()
        keras.utils.set_random_seed(self.rank)
        with strategy.scope():
            return build()

    def eagerly(self, model: keras.Model) -> keras.Model:
        """`model`, whose steps are eager in the cover: to trace them is most of what it takes.

        Where all features are shown they are in graphs.
        """
        if not self.is_full:
            model.run_eagerly = True
        return model

    # Other ranks.

    def gather(self, value: Any) -> list[Any]:
        """Values of all ranks, by rank."""
        return self._board.gather(value)

    def equal(self, value: Any) -> Any:
        """Asserts that all ranks have the same value, bit for bit; returns it."""
        everyone = [pickle.dumps(one) for one in self.gather(value)]
        assert len(set(everyone)) == 1, [reprlib.repr(pickle.loads(one)) for one in everyone]
        return value

    def one_process(self, action: Callable[[], Any]) -> Any:
        """What `action` returns in one process without a strategy, with rank 0's seed."""
        return self.gather(_alone(action) if self.rank == 0 else None)[0]

    def afterwards(self, action: Callable[[], Any], check: Callable[[Any], None]) -> None:
        """Lets one rank call `check` with what `action` returns in one process, as `one_process`.

        It happens when all features have ended, different ones on the ranks at the same time; what
        `check` looks at must be known to be equal on all ranks.
        """
        self.later.append((self._title, keras.mixed_precision.dtype_policy(), action, check))

    def shard(self, arrays: Sequence[np.ndarray], batch: int = BATCH) -> list[np.ndarray]:
        """This rank's rows: its k-th batch and the others' make up the k-th joined batch."""
        return training.shard(arrays, self.rank, self.size, batch)

    # Assertions.

    def assert_replicas(self, model: keras.Model) -> None:
        """Weights, slots and random states are equal on all ranks, bit for bit."""
        states = [
            variable.numpy().tobytes()
            for variable in model.non_trainable_variables
            if "seed_generator" in variable.path
        ]
        self.equal([[value.tobytes() for value in training.values(model)], states])


def _alone(action: Callable[[], Any]) -> Any:
    keras.utils.set_random_seed(0)
    with local():
        return action()


def close(mine: Any, theirs: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Asserts that two lists (or dictionaries) of arrays are nearly equal."""
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), (mine.keys(), theirs.keys())
        for key, value in mine.items():
            np.testing.assert_allclose(value, theirs[key], rtol, atol, err_msg=str(key))
        return
    for place, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        np.testing.assert_allclose(one, other, rtol, atol, err_msg=f"number {place}")


def run(names: Sequence[str], folder: Path, chosen: Sequence[str], is_full: bool) -> None:
    """The body of each rank: goes through features, ends with an error if any fails.

    Args:
        names: of configurations with the same parties.
        folder: shared by all ranks of the launch.
        chosen: features to run; empty for the cover's.
        is_full: whether the cover is the full product.
    """
    known = everything()
    jobs = [Job(configuration, folder, is_full) for configuration in configurations(names)]
    todo = [
        (job, feature)
        for job in jobs
        for feature in (
            [known[name] for name in chosen] or cover(job.configuration, is_full=is_full)
        )
    ]
    # TensorFlow's half a million objects stay; looking at them takes longer than many features.
    gc.collect()
    gc.freeze()
    failed, times = [], {}
    for job, feature in todo:
        title = f"{job.configuration.name}: {feature.name}"
        began, worked = time.monotonic(), time.process_time()
        outcomes = _check(job, feature)
        times[title] = time.monotonic() - began, time.process_time() - worked
        print(f"{title}: {times[title][0]:.1f} s", flush=True)
        if any(outcomes):
            failed.append(title)
            print(f"\n{title} fails on rank {job.rank}:\n{outcomes[job.rank]}", flush=True)
        if not primitives.is_running():
            failed.append("the job has been ended")
            break
    failed += _check_later(jobs)
    if primitives.rank() == 0:
        (folder / "times").write_bytes(pickle.dumps(times))
    if failed:
        raise AssertionError(f"{len(failed)} of {len(todo)} features fail: {'; '.join(failed)}")


def _check_later(jobs: Sequence[Job]) -> list[str]:
    """Goes through this rank's share of what was left for later; titles of what fails."""
    failed = []
    share = [one for job in jobs for one in job.later][jobs[0].rank :: jobs[0].size]
    for title, policy, action, check in share:
        keras.mixed_precision.set_dtype_policy(policy)
        try:
            check(_alone(action))
        except Exception:  # noqa: BLE001 - each is reported with the feature's name
            failed.append(title)
            print(f"\n{title} is not one process:\n{traceback.format_exc(limit=-6)[-3000:]}")
    return failed


def _check(job: Job, feature: Feature) -> list[str | None]:
    error = None
    try:
        job.begin(feature.name)
        feature.check(job)
    # Every kind of failure is reported with the feature's name; `pytest.raises` has one of its own.
    except (Exception, pytest.fail.Exception):  # noqa: BLE001
        error = traceback.format_exc(limit=-6)[-3000:]
    try:
        return job.end(error)
    except Lost as lost:
        # The other rank may wait in a collective that this one will never call.
        print(f"Feature {feature.name} ends the job: {lost}\n{error or ''}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
