# SPDX-License-Identifier: Apache-2.0
"""Upstream's script under our launcher, with a stand-in of our own for upstream.

One launch of two ranks makes all runs: what takes long is to load TensorFlow and build graphs.
"""

from pathlib import Path

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

STANDIN = Path(__file__).with_name("standin")


def run(*flags, variable_update="horovod"):
    """What a run printed on this rank, its exit code, and what all ranks have for weights."""
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
        return code, errors.getvalue(), None
    assert re.search(r"^total images/sec: \d+\.\d\d$", text, re.MULTILINE), text
    with eager():
        weights = primitives.gather_objects(re.findall("^weights: (.*)$", text, re.MULTILINE))
    assert len(weights[0]) == 1
    assert weights == weights[:1] * len(weights), "ranks differ"
    return code, text, weights[0][0]


def losses(text):
    import re

    return re.findall(r"^\d+\t(.*)$", text, re.MULTILINE)


@ranks(2, deadline_s=200.0)
def test_runs_of_the_stand_in(tmp_path):
    import shutil

    import pytest

    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError

    rank = primitives.rank()

    # Without --comp_alg upstream sums by itself; our exact sums are the same numbers, and can stand
    # beside a compiled step.
    _, text, own = run("--model", "lenet")
    assert "Compression" not in text
    _, text, exact = run("--comp_alg", "none")
    assert exact == own
    assert "Compression: none\n" in text
    assert "tf_hips: 5 gradients, 0 compressed\n" in text
    _, _, compiled = run("--comp_alg=none", "--xla_compile")
    assert compiled is not None

    # Small gradients are left alone.
    _, text, _ = run("--comp_alg", "terngrad", "--comp_threshold", 100, "--use_fp16")
    assert "tf_hips: 5 gradients, 2 compressed\n" in text
    assert "Compression: terngrad(bitwidth=2), from 100 elements on\n" in text

    # What codecs do to NaN and infinities, they do alike everywhere.
    for algorithm in ("onebit", "dgc"):
        _, text, _ = run("--comp_alg", algorithm, "--init_learning_rate", 1e30)
        assert "finite: False" in text or float(losses(text)[-1]) > 1e6, text

    # A run that is resumed ends with the weights of one that is not, and not by chance.
    dgc = ["--comp_alg", "dgc(ratio=0.1)"]
    _, text, whole = run(*dgc, "--num_batches", 6)
    parts = [*dgc, "--train_dir", tmp_path / "resumed", "--save_model_steps", 2]
    run(*parts, "--num_batches", 3)
    _, again, resumed = run(*parts, "--num_batches", 4)
    assert losses(again) == losses(text)[3:]
    assert resumed == whole
    folders = sorted(path.name for path in (tmp_path / "resumed" / "tf_hips").iterdir())
    assert folders == ["rank0of2", "rank1of2"]
    files = {path.stem for path in (tmp_path / "resumed" / "tf_hips" / "rank1of2").glob("*.index")}
    assert files == {f"state.ckpt-{step}" for step in (2, 3, 5, 6)}

    # Other flags are refused on all ranks.
    with pytest.raises(ProtocolError, match=r"--comp_alg is dgc\(ratio=0.2.* was dgc\(ratio=0.1"):
        run("--comp_alg", "dgc(ratio=0.2)", *parts[2:], "--num_batches", 6)

    # What one rank lacks, no rank takes.
    if rank == 1:
        shutil.rmtree(tmp_path / "resumed" / "tf_hips" / "rank1of2")
    _, text, other = run(*parts, "--num_batches", 5)
    assert "it begins with zeros" in text
    _, _, whole = run(*dgc, "--num_batches", 8)
    assert other != whole

    # What would do nothing is refused.
    code, error, _ = run(*dgc, variable_update="replicated")
    assert code == 2
    assert error.splitlines()[-1] == (
        "tf_cnn_benchmarks: error: --comp_alg must go with --variable_update=horovod. Received: "
        "--variable_update=replicated"
    )
