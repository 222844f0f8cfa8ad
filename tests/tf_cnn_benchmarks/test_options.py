# SPDX-License-Identifier: Apache-2.0
"""The flags of `python -m tf_hips.tf_cnn_benchmarks` that are ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from tf_hips.ops.compressor import parse as parse_compressor
from tf_hips.tf_cnn_benchmarks import launcher, options

STANDIN = Path(__file__).with_name("standin")
YAML = str(Path(__file__).resolve().parents[2] / ".pre-commit-config.yaml")  # any file of YAML
DIRECTORY = ["--tf_cnn_benchmarks_dir", str(STANDIN)]


def test_what_is_not_ours_stays_in_its_order() -> None:
    given = [
        "--model",
        "vgg19",
        *DIRECTORY,
        "--xla",
        "--comp_alg=dgc(ratio=0.01)",
        "--batch_size=16",
    ]
    found, rest = options.parse(given)
    assert rest == ["--model", "vgg19", "--xla", "--batch_size=16"]
    assert found.directory == STANDIN
    assert found.sums
    assert found.compressor == parse_compressor("dgc(ratio=0.01)")
    assert found.description == found.compressor.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("onebit", "error_feedback(onebit)"),
        ("onebit()", "onebit"),
        ("tbq", "error_feedback(tbq)"),
        ("graddrop", "error_feedback(graddrop)"),
        ("terngrad", "terngrad"),
        ("dgc", "dgc"),
    ],
)
def test_names_of_hipress_keep_what_they_do_not_send(name: str, text: str) -> None:
    found, _ = options.parse([*DIRECTORY, "--comp_alg", name])
    assert found.compressor == parse_compressor(text)
    assert found.sums


def test_none_is_an_exact_sum_and_nothing_is_upstreams() -> None:
    exact, _ = options.parse([*DIRECTORY, "--comp_alg", "none"])
    assert (exact.sums, exact.compressor, exact.description) == (True, None, "none")
    upstream, _ = options.parse(DIRECTORY)
    assert (upstream.sums, upstream.compressor) == (False, None)


def test_the_threshold_is_told() -> None:
    found, _ = options.parse([*DIRECTORY, "--comp_alg", "onebit", "--comp_threshold", "262144"])
    assert found.threshold == 262144
    assert found.description == "error_feedback(onebit), from 262144 elements on"


def test_a_plan_of_columns_says_less_than_one_in_yaml(tmp_path: Path) -> None:
    columns, yaml = tmp_path / "SeCoPaPlan.txt", tmp_path / "plan.yaml"
    for path in (columns, yaml):
        path.write_text("")
    ways = ["--comp_alg", "onebit()", "--comp_topology", "ring"]
    found, _ = options.parse([*DIRECTORY, *ways, "--comp_plan", str(columns)])
    assert (found.plan, found.topology, found.has_columns) == (columns, "ring", True)
    assert found.description == "onebit, plan SeCoPaPlan.txt, topology ring"
    found, _ = options.parse([*DIRECTORY, "--comp_plan", str(yaml)])
    assert (found.sums, found.compressor, found.has_columns) == (True, None, False)
    assert found.description == "plan plan.yaml"
    found, _ = options.parse([*DIRECTORY, "--comp_plan", "auto"])
    assert (found.sums, found.plan, found.has_columns) == (True, "auto", False)
    assert found.description == "plan auto"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--tf_cnn_benchmarks_dir"),
        (["--tf_cnn_benchmarks_dir", "nowhere"], "Received: 'nowhere'"),
        ([*DIRECTORY, "--comp_alg", "onebyte"], "onebit"),
        ([*DIRECTORY, "--comp_alg", "nothing.pse"], "nothing.pse"),
        ([*DIRECTORY, "--comp_alg", "dgc", "--comp_threshold", "-1"], "Received: '-1'"),
        ([*DIRECTORY, "--comp_threshold", "7"], "a --comp_alg that encodes. Received: none given"),
        ([*DIRECTORY, "--comp_alg", "none", "--comp_threshold", "7"], "encodes. Received: none"),
        ([*DIRECTORY, "--comp_topology", "ring"], "--comp_topology must go with a --comp_alg"),
        ([*DIRECTORY, "--comp_alg", "dgc", "--comp_topology", "tree"], "'butterfly'"),
        ([*DIRECTORY, "--comp_plan", "nowhere"], "Received: 'nowhere'"),
        ([*DIRECTORY, "--comp_plan", __file__], "--comp_plan must go with a --comp_alg"),
        ([*DIRECTORY, "--comp_plan", YAML, "--comp_alg", "dgc"], "must go without --comp_alg"),
        ([*DIRECTORY, "--comp_plan", YAML, "--comp_topology", "ps"], "without --comp_topology"),
        ([*DIRECTORY, "--comp_plan", "auto", "--comp_alg", "dgc"], "must go without --comp_alg"),
        (
            [*DIRECTORY, "--comp_plan", __file__, "--comp_alg", "dgc", "--comp_threshold", "7"],
            "its lines say y or n",
        ),
    ],
)
def test_a_wrong_flag_is_told_in_a_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        options.parse(flags)
    assert end.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("tf_cnn_benchmarks: error: ")
    assert message in error


def test_a_wrong_flag_loads_no_tensorflow() -> None:
    program = (
        "import sys; from tf_hips.tf_cnn_benchmarks import launcher\n"
        "try: launcher.main(['--comp_alg', 'onebyte'])\n"
        "except SystemExit: sys.exit('tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=50)
    assert done.returncode == 0, done.stderr.decode()


def test_a_checkpoint_of_another_update_is_told_in_a_line() -> None:
    class NotFoundError(Exception):  # TensorFlow's
        pass

    missing = NotFoundError("Restoring failed.\nKey v/cg/affine0/biases not found in checkpoint\n")
    text = launcher._of_another_update(missing)
    assert text is not None
    assert "--variable_update of the run that wrote it" in text
    assert text.endswith("Received: no v/cg/affine0/biases in the checkpoint of --train_dir")
    for other in (NotFoundError("Key global_step not found"), ValueError(str(missing))):
        assert launcher._of_another_update(other) is None
