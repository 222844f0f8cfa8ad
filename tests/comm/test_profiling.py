# SPDX-License-Identifier: Apache-2.0
"""Ranks that measure a profile together, and plans at the start of training."""

from pathlib import Path

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

CANDIDATES = ["error_feedback(onebit)", "dgc"]


@ranks(2, deadline_s=180)
def test_ranks_measure_and_plan_together(tmp_path: Path) -> None:
    import dataclasses
    import time

    from tf_hips.comm import auto, links, primitives, profiling
    from tf_hips.comm.cost_model import step_seconds
    from tf_hips.comm.profile import Profile
    from tf_hips.errors import ConfigError
    from tf_hips.ops.compressor import CHUNK

    rank = primitives.rank()
    # A twelfth of the elements: enough for a slope.
    profiling._CALLS = ((8, 1 << 10), (2, CHUNK))
    profiling._DECODED = ((8, 1 << 10), (1, 2 * CHUNK))
    profiling._MERGES = ((8, 1 << 10, 2), (1, CHUNK, 2), (1, CHUNK, 4))
    profiling._COPIES = ((8, 1 << 10), (2, CHUNK))
    # Clocks that differ: rank 1 believes that everything takes no time, and would go on for ever.
    if rank == 1:
        time.perf_counter = lambda: 0.0
    profile = profiling.measure(CANDIDATES, 0.2)
    everyone = primitives.gather_objects(repr(profile), "profiles")
    assert everyone[0] == everyone[1]
    assert profile.num_ranks == profile.ranks_per_host == 2
    assert [codec.compression for codec in profile.codecs] == [
        "error_feedback(onebit)",
        "dgc(ratio=0.01, momentum=0.9, nesterov=0, clip_norm=0)",
    ]
    for codec in profile.codecs:
        for cost in (codec.encode, codec.decode, codec.decode_sum):
            # Slower than 4 seconds, or faster than 10 microseconds, for a million elements?
            assert 1e-5 < cost(2**20) < 4, (codec.compression, cost)
        assert 1e-5 < codec.recode(2**20, 2) < 8
    onebit, dgc = profile.codecs
    assert onebit.packet(2**20) == 2**17 + 24
    assert onebit.sum_packet == onebit.packet
    assert dgc.sum_packet(2**20) == pytest.approx(4 * dgc.packet(2**20), rel=0.01)
    for kind in ("allreduce", "alltoall", "allgather", "broadcast"):
        cost = getattr(profile, kind)
        assert 0 < cost.delay + cost(2**20) < 4, (kind, cost)
        assert 0 <= cost.cpu <= 1
    assert profile.tiers is None
    # The other rank, of this host and of another one.
    for kind, nodes in ((links.INSIDE, [[0, 1]]), (links.BETWEEN, [[0], [1]])):
        primitives._nodes = nodes
        cost = links.Links(0.2, 0.5).measure(kind)
        assert 0 < cost.delay + cost(2**20) < 4, (kind, cost)
    path = tmp_path / f"profile-{rank}.yaml"
    profile.write(path)
    assert Profile.read(path) == profile

    # A plan at the start, from a profile that is kept.
    folder = tmp_path / "profiles"
    gradients = [("a", 2**22), ("b", 10), ("c", 0)]
    measured = []

    def counted(candidates: list[str], budget_seconds: float) -> Profile:
        measured.append((candidates, budget_seconds))
        return profile

    measure, profiling.measure = profiling.measure, counted
    plan = auto.auto_plan(gradients, budget_seconds=0.3, folder=folder)
    assert measured == [(["error_feedback(onebit)"], 0.3)]
    plan.check(gradients, 2)
    plans = primitives.gather_objects(repr(plan.choices), "plans")
    assert plans[0] == plans[1]
    primitives.barrier()
    [kept] = folder.iterdir()
    assert {one.compression for one in plan.choices} <= {None, "error_feedback(onebit)"}

    # Kept, as long as the link is as it says.
    auto._TRUSTED = 1e9
    again = auto.auto_plan(gradients, folder=folder)
    assert len(measured) == 1
    assert again.choices == plan.choices
    found = Profile.read(kept)
    assert again.predicted_seconds == pytest.approx(step_seconds(again.choices, found))
    auto._TRUSTED = 2.0
    primitives.barrier("both have read the profile")
    if rank == 0:
        slow = dataclasses.replace(found.allreduce, per_byte=1.0)
        dataclasses.replace(found, allreduce=slow).write(kept)
    auto.auto_plan(gradients, budget_seconds=0.3, folder=folder)
    assert len(measured) == 2
    if rank == 0:
        assert Profile.read(kept) == profile
        kept.write_text("version: [")  # a file that was cut off
    auto.auto_plan(gradients, budget_seconds=0.3, folder=folder)
    assert len(measured) == 3

    # Ranks that were told different things say so, on all ranks.
    with pytest.raises(ConfigError, match=r"1 gradients and .* on rank 0; 2 gradients"):
        auto.auto_plan([("a", 5)] * (rank + 1), folder=folder)
    with pytest.raises(ConfigError, match=r"\['onebit'\] on rank 1"):
        auto.auto_plan(gradients, ["terngrad", "onebit"][rank : rank + 1], folder=folder)
    with pytest.raises(ConfigError, match="of other sizes"):
        auto.auto_plan([("a", 5 + rank)], folder=folder)
    with pytest.raises(ValueError, match="must measure the same compressors"):
        measure([["onebit"], ["terngrad"]][rank], 0.3)


@pytest.mark.slow
@ranks(4, deadline_s=240)
def test_two_hosts_of_two_ranks(tmp_path: Path) -> None:
    from tf_hips.comm import primitives, profiling
    from tf_hips.comm.cost_model import step_seconds
    from tf_hips.comm.plan import Choice
    from tf_hips.comm.profile import Profile

    primitives._nodes = [[0, 2], [1, 3]]
    profile = profiling.measure(["error_feedback(onebit)"], 2.0)
    assert profile.tiers is not None
    assert (profile.tiers.hosts, profile.tiers.per_host, profile.tiers.slices) == (2, 2, 2)
    for cost in (profile.tiers.inside, profile.tiers.between):
        assert 0 < cost.delay + cost(2**20) < 4
    path = tmp_path / f"profile-{primitives.rank()}.yaml"
    profile.write(path)
    assert Profile.read(path) == profile
    choices = [Choice("a", 2**22, "error_feedback(onebit)", "hierarchical")]
    assert 0 < step_seconds(choices, profile) < 4


@ranks(1)
def test_one_rank_needs_no_profile(tmp_path: Path) -> None:
    from tf_hips.comm import auto, profiling
    from tf_hips.comm.profile import Collective

    plan = auto.auto_plan([("a", 2**22), ("b", 10)], folder=tmp_path / "profiles")
    assert plan.num_ranks == 1
    assert [choice.topology for choice in plan.choices] == ["allreduce"] * 2
    assert not (tmp_path / "profiles").exists()

    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    with pytest.MonkeyPatch.context() as patch:  # root may read everything
        patch.setattr(auto.Path, "exists", closed)
        assert auto._kept(tmp_path / "closed" / "profile.yaml") is None
    profile = profiling.measure([], 0.1)
    assert (profile.num_ranks, profile.codecs) == (1, ())
    assert profile.allreduce == Collective()
    assert profile.copy(2**20) > 0
    with pytest.raises(ValueError, match="`budget_seconds` must be a number > 0"):
        profiling.measure([], 0.0)
    with pytest.raises(ValueError, match="must make packets"):
        profiling.measure(["powersgd"])


@ranks(1)
def test_the_gradients_of_a_keras_file(tmp_path: Path) -> None:
    import keras

    from tf_hips.comm.keras_file import gradients
    from tf_hips.errors import ConfigError

    layers = [keras.layers.Dense(4, name="wide"), keras.layers.BatchNormalization(name="norm")]
    frozen = keras.layers.Dense(2, trainable=False)
    keras.Sequential([keras.Input((3,)), *layers, frozen]).save(tmp_path / "m.keras")
    found = gradients(str(tmp_path / "m.keras"))
    assert found == [("wide/kernel", 12), ("wide/bias", 4), ("norm/gamma", 4), ("norm/beta", 4)]
    # A large table travels as rows.
    table = keras.layers.Embedding(2**18, 1, name="users")
    small = keras.layers.Embedding(2**18 - 1, 1, name="words")
    inner = keras.Sequential([keras.Input((3,), dtype="int32"), table])
    whole = keras.Input((3,), dtype="int32")
    outputs = [inner(whole), small(whole)]
    keras.Model(whole, outputs).save(tmp_path / "e.keras")
    sizes = {name.split("/")[-2]: size for name, size in gradients(str(tmp_path / "e.keras"))}
    assert sizes == {"users": 0, "words": 2**18 - 1}
    (tmp_path / "n.keras").write_text("nothing")
    with pytest.raises(ConfigError, match=r"must be a file that Keras loads.*n\.keras"):
        gradients(str(tmp_path / "n.keras"))
