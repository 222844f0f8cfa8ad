# SPDX-License-Identifier: Apache-2.0
"""A compression may stand in the script or in the run's configuration; two must be the same."""

from pathlib import Path

import pytest

from tf_hips import config, error_feedback, onebit, terngrad
from tf_hips.errors import ConfigError

pytestmark = pytest.mark.tf


def chosen(given: object, named: str | None) -> object:
    from tf_hips.strategies.chosen import chosen_compression

    return chosen_compression(given, config.Run(compression=named))


def test_who_names_it_decides() -> None:
    assert chosen(None, None) is None
    assert chosen("onebit", None) == onebit()
    assert chosen(None, "error_feedback(onebit)") == error_feedback(onebit())
    assert chosen(terngrad(), "terngrad") == chosen("terngrad(2)", "terngrad(bitwidth=2)")


def test_two_that_differ_are_refused() -> None:
    text = r"the same in the script and .*Received: onebit in the script, terngrad\(bitwidth=2\) in"
    with pytest.raises(ConfigError, match=text):
        chosen("onebit", "terngrad")


def test_a_wrong_text_is_the_configurations() -> None:
    with pytest.raises(ConfigError, match=r"of the run's configuration: .*did you mean 'onebit'"):
        chosen(None, "onebti")


def test_it_is_a_key_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    run = config.Run(compression="error_feedback(onebit)")
    config.dump(run, path)
    assert config.load(path) == run
    path.write_text("compression: 3\n")
    with pytest.raises(ConfigError, match=r"`compression` must be of type str\. Received: 3"):
        config.load(path)


def test_a_rule_of_the_configuration_is_that_of_the_ranks() -> None:
    from tf_hips import robust
    from tf_hips.strategies.robust_party import chosen_aggregator

    def rule(given: object, named: str | None) -> object:
        return chosen_aggregator(given, config.Run(rule=named))

    assert rule(None, None) is None and rule(None, "mean") is None and rule(None, "sum") is None
    assert rule("median", None) == rule(None, "median") == rule("median", "median")
    assert rule("median", "median") == robust.median() == rule(robust.median(), "mean")
    with pytest.raises(ConfigError, match=r"Received: median.* in the script, krum\(f=1\) in"):
        rule("median", "krum(f=1)")
    with pytest.raises(ConfigError, match=r"sum, mean or a robust rule without a server.*adam"):
        rule(None, "adam(0.01)")
