# SPDX-License-Identifier: Apache-2.0
"""A strategy that is given a specification: all ranks compile it at once and train with it."""

from pathlib import Path

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf


@ranks(2, deadline_s=240)
def test_all_ranks_compile_a_specification_at_once_and_stay_equal(tmp_path):
    import os

    os.environ["TF_HIPS_CACHE"] = str(tmp_path / "cache")
    from tests.strategies import training
    from tests.support import hurried
    from tf_hips import config, errors, load
    from tf_hips.comm import primitives
    from tf_hips.ops import error_feedback
    from tf_hips.strategies import CompressedRing, HierarchicalPS

    rank = primitives.rank()
    compiler = str(hurried.compiler(tmp_path)) if rank == 0 else None
    os.environ["CXX"] = primitives.gather_objects(compiler)[0]
    os.environ[hurried.HURRY] = "1"
    x, y = training.data(64)
    own = training.shard([x, y], rank, 2)
    spec = Path(__file__).parents[1] / "ops" / "mine.pse"
    run = config.Run(log_dir=str(tmp_path))

    histories = []
    for compression in (f"error_feedback({spec}(1, 7))", error_feedback(load(spec)(1, 7))):
        strategy = CompressedRing(compression=compression, config=run)
        with strategy.scope():
            model = training.build("adam", run_eagerly=not histories)
        histories.append(training.fit(model, own, epochs=2))
        training.assert_same_on_all_ranks(model)
    assert histories[0][-1] < histories[0][0]
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1

    strategy = HierarchicalPS(compression=f"{spec}(salt=7)", local_compression=f"{spec}(1, 7)")
    with strategy.scope():
        model = training.build("adam", run_eagerly=True)
    assert training.fit(model, own, epochs=2)[-1] < 1e3
    training.assert_same_on_all_ranks(model)

    wrong = tmp_path / f"wrong{rank}.pse"
    wrong.write_text("void WrongEncode(float* gradient, uint8* out) { out = concat(gpa); }\n")
    with pytest.raises(errors.SpecificationError, match=r"error\[E201\]: unknown name `gpa`"):
        CompressedRing(compression=str(wrong), config=run)
    with pytest.raises(
        TypeError, match=r"`compression` must be a compressor .* parentheses, `load\(\)`"
    ):
        CompressedRing(compression=load, config=run)
