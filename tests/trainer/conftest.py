# SPDX-License-Identifier: Apache-2.0
"""What tests of `tf-hips train` share."""

import re

import pytest

from tests.trainer import networks
from tests.trainer.test_command import WHAT, Became
from tf_hips.cli import arguments, preflight, train


@pytest.fixture
def small_network(monkeypatch):
    """Whatever network is asked for, it is one dense layer."""
    from tf_hips import models

    monkeypatch.setattr(models, "make", networks.dense)


@pytest.fixture
def settings(monkeypatch):
    """What a command line would train."""
    parser = arguments.Parser(prog="tf-hips")
    train.add(parser.add_subparsers(dest="command"))
    became = []

    def become(_, told, environment=None):
        del environment
        became.append(told)
        raise Became

    monkeypatch.setattr(train, "become", become)
    monkeypatch.setattr(preflight, "_check_launcher", lambda told: None)  # there is one

    def run(*words):
        options = parser.parse_args(["train", *WHAT, *words])
        with pytest.raises(Became):
            options.run(options)
        return became.pop()

    return run


@pytest.fixture
def refused(monkeypatch):
    """Says that a command line is refused in one line that has a message in it."""
    parser = arguments.Parser(prog="tf-hips")
    train.add(parser.add_subparsers(dest="command"))
    monkeypatch.setattr(train, "become", lambda *_: pytest.fail("it was accepted"))

    def check(words, message):
        options = parser.parse_args(["train", *WHAT, *words])
        with pytest.raises(arguments.UsageError, match=re.escape(message)) as caught:
            options.run(options)
        assert "\n" not in str(caught.value)

    return check
