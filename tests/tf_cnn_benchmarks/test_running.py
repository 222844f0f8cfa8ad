# SPDX-License-Identifier: Apache-2.0
"""Upstream's script under our launcher, with a stand-in of our own for upstream.

One launch of two ranks makes most runs: what takes long is to load TensorFlow and build graphs.
"""

from pathlib import Path

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

STANDIN = Path(__file__).with_name("standin")
SIZES = {"conv/kernel": 216, "gamma": 8, "beta": 8, "dense/kernel": 1280, "dense/bias": 10}


def run(*flags, variable_update="horovod"):
    """Exit code, what was printed on this rank, and after each step this rank's loss and what all
    ranks have for weights."""
    import contextlib
    import io
    import re

    from tf_hips.comm import primitives
    from tf_hips.tf_cnn_benchmarks import launcher
    from tf_hips.tf_cnn_benchmarks.sums import eager

    output, errors = io.StringIO(), io.StringIO()
    arguments = ["--tf_cnn_benchmarks_dir", str(STANDIN), "--variable_update", variable_update]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = launcher.main([*arguments, *map(str, flags)])
    text = output.getvalue()
    if code:
        return code, errors.getvalue(), []
    assert re.search(r"^total images/sec: \d+\.\d\d$", text, re.MULTILINE), text
    steps = re.findall(r"^\d+\t(\S+)\t([0-9a-f]{8})$", text, re.MULTILINE)
    assert steps
    with eager():
        weights = primitives.gather_objects([checksum for _, checksum in steps])
    assert weights == weights[:1] * len(weights), "ranks differ"
    return code, text, steps


@ranks(2, deadline_s=300.0)
def test_runs_of_the_stand_in(tmp_path):
    import shutil

    import pytest

    from tf_hips.comm import primitives
    from tf_hips.comm.plan import Choice, Plan
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import in_party

    rank = primitives.rank()

    # Without --comp_alg upstream sums by itself; our exact sums are the same numbers.
    _, text, own = run("--model", "lenet")
    assert "Compression" not in text
    _, text, exact = run("--comp_alg", "none")
    assert exact == own
    assert "Compression: none\n" in text
    assert "tf_hips: 5 gradients, 0 compressed\n" in text

    # A plan says what is compressed, which way it goes, and in how many parts. Sums are outside of
    # what XLA compiles.
    choices = [Choice(name, size) for name, size in SIZES.items()]
    choices[3] = Choice("dense/kernel", 1280, "terngrad", "ring", 2)
    Plan(2, tuple(choices)).write(tmp_path / "plan.yaml")
    _, text, _ = run("--comp_plan", tmp_path / "plan.yaml", "--use_fp16", "--xla_compile")
    assert "tf_hips: 5 gradients, 1 compressed\n" in text
    assert "Compression: plan plan.yaml\n" in text
    Plan(2, tuple(choices[1:])).write(tmp_path / "other.yaml")
    code, error, _ = run("--comp_plan", tmp_path / "other.yaml")
    assert code == 2
    assert "gradient 0 of the model, v0/conv/kernel, has 216 elements" in error.splitlines()[-1]

    # What a codec does to NaN and infinities, it does alike everywhere.
    lines = [f"{name},{size},{'y' if size > 100 else 'n'},1\n" for name, size in SIZES.items()]
    (tmp_path / "SeCoPaPlan.txt").write_text("".join(lines))
    columns = ["--comp_plan", tmp_path / "SeCoPaPlan.txt", "--comp_topology", "ring"]
    _, text, steps = run("--comp_alg", "onebit", *columns, "--init_learning_rate", 1e30)
    assert "tf_hips: 5 gradients, 2 compressed\n" in text
    assert "finite: False" in text or float(steps[-1][0]) > 1e6, text

    # A run that is resumed ends with the weights of one that is not, and not by chance; it takes
    # the plan that it was begun with, whatever is measured now.
    def measure(*way):
        choices = (Choice(one, n, *(way * (one == "dense/kernel"))) for one, n in SIZES.items())
        plan = Plan(2, tuple(choices))
        in_party.auto_plan = lambda gradients: plan

    auto = ["--comp_plan", "auto"]
    measure("dgc(ratio=0.1)", "ps")
    _, _, whole = run(*auto, "--num_batches", 8)
    parts = ["--train_dir", tmp_path / "resumed", "--save_model_steps", 2]
    run(*auto, *parts, "--num_batches", 3)
    measure(None, "allreduce")
    _, text, resumed = run(*auto, *parts, "--num_batches", 4)
    assert resumed == whole[3:6]
    assert "tf_hips: 5 gradients, 1 compressed\n" in text
    assert "it begins with zeros" not in text
    folders = sorted(path.name for path in (tmp_path / "resumed" / "tf_hips").glob("rank*"))
    assert folders == ["rank0of2", "rank1of2"]
    files = {path.stem for path in (tmp_path / "resumed" / "tf_hips" / "rank1of2").glob("*.index")}
    assert files == {f"state.ckpt-{step}" for step in (2, 3, 5, 6)}

    # Other flags are refused on all ranks.
    told = r"`dgc\(ratio=0.1.* of the plan is not known and was .* compression is dgc\(ratio=0.2"
    with pytest.raises(ProtocolError, match=told):
        run("--comp_alg", "dgc(ratio=0.2)", *parts, "--num_batches", 6)

    # What one rank lacks, no rank takes.
    if rank == 1:
        shutil.rmtree(tmp_path / "resumed" / "tf_hips" / "rank1of2")
    _, text, other = run(*auto, *parts, "--num_batches", 5)
    assert "it begins with zeros" in text
    assert other[0][0] == whole[6][0]  # the loss of the same weights
    assert other[0][1] != whole[6][1]

    # What would do nothing is refused.
    code, error, _ = run("--comp_alg", "dgc(ratio=0.1)", variable_update="replicated")
    assert code == 2
    assert error.splitlines()[-1] == (
        "tf_cnn_benchmarks: error: --comp_alg and --comp_plan must go with "
        "--variable_update=horovod. Received: --variable_update=replicated"
    )


@pytest.mark.slow  # tests/comm/test_profiling.py measures, and plans, with fewer graphs
@ranks(2, deadline_s=300.0)
def test_a_plan_that_is_measured_first(tmp_path):
    import functools
    import os

    from tf_hips.strategies import in_party

    # Where the link is memory, it compresses nothing or little.
    os.environ["TF_HIPS_CACHE"] = str(tmp_path / "cache")
    in_party.auto_plan = functools.partial(in_party.auto_plan, budget_seconds=0.5)
    _, text, _ = run("--comp_plan", "auto")
    assert "Compression: plan auto\n" in text
    assert len([*(tmp_path / "cache").rglob("profiles/*.yaml")]) == 1

    # What another codec does to NaN and infinities, whatever the way is.
    _, text, steps = run("--comp_alg", "dgc", "--init_learning_rate", 1e30)
    assert "tf_hips: 5 gradients, 5 compressed\n" in text
    assert "finite: False" in text or float(steps[-1][0]) > 1e6, text
