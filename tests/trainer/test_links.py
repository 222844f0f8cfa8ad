# SPDX-License-Identifier: Apache-2.0
"""How gradients travel, as `tf-hips train` is told: what strategies get of it, what is refused."""

import re

import pytest

from tf_hips import config
from tf_hips.cli import main
from tf_hips.comm.plan import Choice, Plan
from tf_hips.errors import ConfigError
from tf_hips.trainer.links import Links
from tf_hips.trainer.settings import Training

SERVED = config.Run(uplink=config.Uplink("127.0.0.1:1", "west"))


def test_options_are_what_the_strategies_call_them(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Plan(2, (Choice("kernel", 6),)).write("plan.yaml")
    assert settings().links == Links()
    told = settings(
        *("--compression", "hips2bit(threshold=0.01)", "--downlink", "fp32"),
        *("--local-compression", "fp16", "--topology", "ring", "--comp-threshold", "262144"),
    )
    assert told.links == Links("fp32", "fp16", "ring", 262144)
    assert settings("--downlink", "same", "--plan", "auto").links == Links("same", plan="auto")
    file = tmp_path / "train.yaml"
    file.write_text("plan: plan.yaml\ndownlink: fp16\n")
    monkeypatch.chdir("/")
    told = settings("--config", str(file))
    assert told.links == Links("fp16", plan=str(tmp_path / "plan.yaml"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "local", "--topology", "ring"], "on one device, without `topology`. Received: "
         "topology=ring"),
        (["-m", "local", "--downlink", "fp32"], "on one device, without `downlink`"),
        (["--simulated-workers", "5", "--comp-threshold", "9"], "sends nothing that could be "
         "encoded. Received: comp_threshold=9"),
        (["--simulated-workers", "5", "--plan", "auto"], "Received: plan=auto"),
    ],
)  # fmt: skip
def test_a_mode_that_sends_nothing_refuses_them(words, message, refused):
    refused(words, message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology", "rnig"], "--topology: must be one of ps, ring, butterfly, blocks, "),
        (["--topology", "rnig"], "did you mean ring? Received: 'rnig'"),
        (["--plan", "nowhere.yaml"], "--plan: "),
        (["--downlink", "onebit("], "--downlink: "),
        (["--comp-threshold", "-1"], "--comp-threshold: must be a whole number >= 0"),
        (["--downlink", "fp32"], "`downlink` must come with a server (`tf-hips run`, "),
        (["--local-compression", "fp16"], "Received: local_compression=fp16"),
    ],
)
def test_what_cannot_be_is_said_at_once(words, message, monkeypatch, capsys, tmp_path):
    for name in (config.CONFIG_VARIABLE, config.ROLE_VARIABLE, "TF_CONFIG", "HOROVOD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["train", "-n", "lenet", "-dt", "digits", *words])
    text = capsys.readouterr().err
    assert (ended.value.code, text.count("\n")) == (2, 1)
    assert message in text


class Made(Exception):
    """In place of a strategy: what it was given."""


@pytest.fixture
def asked(monkeypatch):
    """What a mode gives its strategy, of `Training`'s options and of a run."""
    import tf_hips
    from tf_hips.trainer.modes import MODES

    monkeypatch.setenv("HOROVOD_SIZE", "2")

    def make(*arguments, **options):
        raise Made(arguments, options)

    for name in ("CompressedRing", "HierarchicalPS"):
        monkeypatch.setattr(tf_hips, name, make)

    def ask(mode, run, **links):
        settings = Training("lenet", "digits", mode=mode, links=Links(**links))
        with pytest.raises(Made) as made:
            MODES[mode].make(settings, run)
        return made.value.args[1]

    return ask


@pytest.mark.tf
@pytest.mark.parametrize("mode", ["sync", "async", "dcasgd", "fedavg", "hfa", "streaming"])
def test_parties_below_a_server_get_all_of_it(mode, asked):
    links = {"downlink": "fp16", "local_compression": "int8", "topology": "ring"}
    got = asked(mode, SERVED, comp_threshold=7, **links)
    assert got.items() >= {**links, "comp_threshold": 7, "plan": None}.items()
    got = asked(mode, SERVED, plan="auto")
    # Fragments share one vector on the wire, so what comes down may keep nothing.
    own = None if mode == "streaming" else "same"
    assert (got["downlink"], got["local_compression"], got["plan"]) == (own, None, "auto")


@pytest.mark.tf
@pytest.mark.parametrize("mode", ["sync", "fedavg", "esync"])
def test_a_job_without_a_server_gets_its_ways(mode, asked):
    got = asked(mode, config.Run(), topology="blocks", comp_threshold=7)
    assert (got["topology"], got["comp_threshold"], got["plan"]) == ("blocks", 7, None)
    assert not got.keys() & {"downlink", "local_compression"}


@pytest.mark.tf
@pytest.mark.parametrize(
    ("run", "links", "message"),
    [
        (SERVED, {"topology": "ring"}, "must come with `local_compression`"),
        (SERVED, {"plan": "auto", "local_compression": "int8"}, "without `local_compression`"),
        (config.Run(), {"topology": "ring"}, "must come with `compression`"),
        (config.Run(), {"downlink": "fp32"}, "`downlink` must come with a server"),
    ],
)
@pytest.mark.parametrize("mode", ["sync", "fedavg"])
def test_what_does_not_go_together_is_one_line(mode, run, links, message, monkeypatch):
    from tf_hips.trainer.modes import MODES

    monkeypatch.setenv("HOROVOD_SIZE", "2")
    settings = Training("lenet", "digits", mode=mode, links=Links(**links))
    with pytest.raises(ConfigError, match=re.escape(message)):
        MODES[mode].make(settings, run)
