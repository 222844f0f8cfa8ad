# SPDX-License-Identifier: Apache-2.0
"""Texts in YAML stay texts, whoever reads them."""

import pytest
import yaml

from tf_hips.cluster import text

# Of YAML 1.1, 1.2, and go-yaml, which reads `1e-3` as a number where PyYAML does not.
NO_WORDS = [
    *("1e-3", ".5e1", "0o7", "0x1f", "0b1", "1_000", "-1", "+1", "1.", "-.inf", ".nan", "1:30"),
    *("y", "n", "Y", "on", "Off", "yes", "No", "true", "FALSE", "null", "~", "", "2001-01-01"),
    *("2001-01-01 10:00:00", "<<", "=", "- a", "a: b", "a #b", " a", "{a}", "'a'", "10Gi"),
]
WORDS = ["train", "--lr", "-n", "/etc/tf_hips", "batch/v1", "hub.example:7070", "a=b", "f(g)"]


@pytest.mark.parametrize("value", [*NO_WORDS, *WORDS, "one\ntwo\n"])
def test_a_text_stays_a_text(value: str) -> None:
    written = text.documents({"args": [value], value: 1})
    assert yaml.safe_load(written) == {"args": [value], value: 1}
    node = yaml.compose(text.documents([value])).value[0]
    assert (node.style is None) == (value in WORDS)
