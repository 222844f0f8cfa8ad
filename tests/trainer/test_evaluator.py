# SPDX-License-Identifier: Apache-2.0
"""The evaluator: in order, whatever happens to the folder, and it ends."""

import json
import shutil
import threading
import time
import types

import numpy as np
import pytest

from tests.support.eventually import eventually
from tf_hips import log
from tf_hips.callbacks.checkpoint_folder import WEIGHTS, CheckpointFolder
from tf_hips.errors import ConfigError, PeerError
from tf_hips.trainer.settings import Evaluation

pytestmark = pytest.mark.tf
FACTS = {"network": "lenet", "dataset": "digits", "image_size": None}
DEADLINE_S = 40.0


@pytest.fixture(scope="module")
def model():
    from tf_hips import models

    return models.make("lenet", (8, 8, 1), 10)


@pytest.fixture
def folder(tmp_path):
    found = CheckpointFolder(tmp_path / "models")
    found.begin(0)
    return found


@pytest.fixture
def write(folder, model):
    def write_it(step, facts=FACTS):
        folder.write(step, 1, facts, lambda path: model.save_weights(str(path)))

    return write_it


@pytest.fixture
def quick(monkeypatch):
    """Evaluates nothing: tests of what is followed need no numbers."""
    from tf_hips.trainer import evaluator

    class Judge:
        def __init__(self, *_):
            pass

        def evaluate(self, checkpoint):
            return {"step": checkpoint.step, "loss": 0.5, "top1": 0.25, "top5": 1.0}

    monkeypatch.setattr(evaluator, "_Judge", Judge)


def evaluate(folder, **options):
    from tf_hips.trainer import evaluator

    return evaluator.run(Evaluation(model_dir=str(folder.path), poll_s=0.02, **options))


def lines(folder):
    path = folder.path / "evaluations.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Following:
    """An evaluator in a thread of its own."""

    def __init__(self, folder, **options):
        self.error = None
        self.folder = folder

        def run():
            try:
                evaluate(folder, follow=True, **options)
            except Exception as error:  # noqa: BLE001 - raised again by who waits
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def wait_for(self, number):
        def is_there():
            assert self.thread.is_alive(), self.error
            return len(lines(self.folder)) >= number

        eventually(is_there, DEADLINE_S)
        return [line["step"] for line in lines(self.folder)]

    def join(self):
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


def test_numbers_are_those_of_keras_and_numpy(folder, write, model, capsys):
    from tf_hips.data import sets

    write(50)
    assert evaluate(folder, eval_batch_size=77) == 1
    [line] = lines(folder)
    test = sets.load("digits").test
    logits = model(test.x.astype(np.float32) / 255).numpy()
    order = np.argsort(-logits, axis=1)
    assert line["top1"] == pytest.approx((order[:, 0] == test.y).mean())
    assert line["top5"] == pytest.approx((order[:, :5] == test.y[:, None]).any(axis=1).mean())
    shifted = logits - logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(test)), test.y]
    assert line["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert (line["step"], line["rows"]) == (50, len(test.y))
    table = capsys.readouterr().out
    assert "top-1" in table
    assert f"{line['top5']:.2%}" in table


def test_follows_in_order_and_ends_with_training(quick, folder, write):
    write(20)
    write(5)
    following = Following(folder)
    assert following.wait_for(2) == [5, 20]
    write(100)
    write(30)  # as if copied late: it comes before what is there, or is too late
    following.wait_for(3)
    folder.end(100, None)
    following.join()
    steps = [line["step"] for line in lines(folder)]
    assert steps == sorted(steps)
    assert {5, 20, 100} <= set(steps)
    assert not any("skipped" in line for line in lines(folder))


def test_what_is_written_just_before_the_end_is_seen(folder, write):
    from tf_hips.trainer.evaluator import Followed

    write(1)
    followed = iter(Followed(Evaluation(str(folder.path), follow=True, poll_s=0.02), 0))
    assert next(followed)[0] == 1
    write(2)
    folder.end(2, None)
    assert [step for step, _ in followed] == [2]


def test_a_half_written_one_is_waited_for(quick, folder, write, monkeypatch):
    from tf_hips.trainer.evaluator import Followed

    seen = threading.Event()
    wait_for = Followed._wait_for

    def note(*arguments):
        result = wait_for(*arguments)
        seen.set()
        return result

    monkeypatch.setattr(Followed, "_wait_for", note)
    write(10)
    write(20)
    weights = folder.place(10) / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    following = Following(folder)
    folder.end(20, None)  # nor does the end make it give up at once
    assert seen.wait(DEADLINE_S)
    assert lines(folder) == []
    weights.write_bytes(whole)
    following.join()
    assert [line["step"] for line in lines(folder)] == [10, 20]
    assert "skipped" not in lines(folder)[0]


def test_damaged_and_deleted_ones_are_skipped_and_said(quick, folder, write, monkeypatch, capsys):
    from tf_hips.trainer import evaluator

    for step in (10, 20, 30, 40):
        write(step)
    (folder.place(10) / WEIGHTS).write_bytes(b"")
    (folder.place(20) / "checkpoint.json").unlink()
    read = CheckpointFolder.read

    def delete_before(self, step):
        if step == 30:
            shutil.rmtree(self.place(step))
        return read(self, step)

    monkeypatch.setattr(CheckpointFolder, "read", delete_before)
    monkeypatch.setattr(evaluator, "_DAMAGED_FOR_S", 0.1)
    folder.end(40, "NonFiniteError: loss")
    assert evaluate(folder, follow=True) == 4
    found = lines(folder)
    assert [line["step"] for line in found] == [10, 20, 30, 40]
    assert "damaged" in found[0]["skipped"]
    assert "damaged" in found[1]["skipped"]
    assert found[2]["skipped"] == "deleted"
    assert found[3]["top1"] >= 0
    assert "training failed after step 40: NonFiniteError: loss" in capsys.readouterr().out


def test_a_second_evaluator_goes_on_behind_the_first(quick, folder, write):
    write(10)
    evaluate(folder)
    path = folder.path / "evaluations.jsonl"
    path.write_text(path.read_text() + '{"step": 1')  # killed while it wrote
    write(20)
    assert evaluate(folder) == 1
    assert [json.loads(one)["step"] for one in path.read_text().splitlines() if "}" in one] == [
        10,
        20,
    ]
    assert evaluate(folder) == 0


def test_where_the_frequency_leaves_out_all_it_says_so(quick, folder, write, capsys):
    for step in (20, 40):
        write(step)
    assert evaluate(folder, eval_freq=50) == 0
    told = "nothing to evaluate: `--eval-freq 50` leaves out all of 2\n"
    assert capsys.readouterr().out == told
    assert evaluate(folder, eval_freq=30) == 1
    capsys.readouterr()
    assert evaluate(folder, eval_freq=30) == 0
    assert capsys.readouterr().out == "nothing to evaluate after step 40\n"


def test_lines_of_other_runs_and_folders_are_not_those_of_this_one(
    quick, folder, write, tmp_path, capsys
):
    def begin_anew(name):
        shutil.rmtree(folder.path)
        folder.begin(0)
        write(20, FACTS | {"run": name})

    def told():
        return [json.loads(line)["run"] for line in output.read_text().splitlines()]

    output = tmp_path / "all.jsonl"
    begin_anew("first")
    assert evaluate(folder, output=str(output)) == 1
    begin_anew("second")
    assert evaluate(folder, output=str(output)) == 1
    assert told() == ["first", "second"]
    capsys.readouterr()
    assert evaluate(folder, output=str(output)) == 0
    assert "nothing to evaluate after step 20" in capsys.readouterr().out
    elsewhere = CheckpointFolder(folder.path.rename(tmp_path / "moved"))
    assert evaluate(elsewhere, output=str(output)) == 1
    assert told() == ["first", "second", "second"]


def test_the_end_of_an_earlier_session_is_not_that_of_this_run(
    quick, folder, write, monkeypatch, tmp_path
):
    from tf_hips import config

    config.dump(config.Run(run="this"), tmp_path / "run.yaml")
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(tmp_path / "run.yaml"))
    monkeypatch.setenv(config.ROLE_VARIABLE, "evaluator")
    write(10)
    folder.end(10, None, "earlier")
    following = Following(folder, timeout_s=None)
    following.wait_for(1)
    write(20)
    folder.end(20, None, "this")
    following.join()
    assert [line["step"] for line in lines(folder)] == [10, 20]


def test_its_events_are_of_the_run_that_it_evaluates(quick, folder, write, tmp_path):
    write(10, FACTS | {"run": "train-1"})
    evaluate(folder, log_dir=str(tmp_path / "events"))
    [event] = log.read_events(tmp_path / "events")
    assert (event["run"], event["role"], event["step"]) == ("train-1", "evaluator", 10)


def test_every_so_many_steps(quick, folder, write):
    for step in (10, 20, 31, 32, 59, 61):
        write(step)
    evaluate(folder, eval_freq=30)
    assert [line["step"] for line in lines(folder)] == [31, 61]


def test_nothing_for_too_long_is_an_error(folder):
    with pytest.raises(PeerError, match=r"nothing for 0\.1 s"):
        evaluate(folder, follow=True, timeout_s=0.1)


def test_without_a_limit_it_waits_for_as_long_as_training_takes(folder, quick, write, monkeypatch):
    from tf_hips.trainer import evaluator

    looks = []

    def monotonic():  # a day goes by between two looks at the clock
        looks.append(86400.0 * len(looks))
        return looks[-1]

    clock = types.SimpleNamespace(monotonic=monotonic, time_ns=time.time_ns)
    monkeypatch.setattr(evaluator, "time", clock)
    polls = []
    ended = folder.ended
    monkeypatch.setattr(CheckpointFolder, "ended", lambda *_: polls.append(None) or ended())
    following = Following(folder, timeout_s=None)
    while len(polls) < 5:
        assert following.thread.is_alive(), following.error
        threading.Event().wait(0.01)
    write(5)
    folder.end(5, None)
    following.join()
    assert [line["step"] for line in lines(folder)] == [5]


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    from tf_hips.trainer import evaluator

    with pytest.raises(ConfigError, match="must be a folder of checkpoints"):
        evaluator.run(Evaluation(model_dir=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("facts", "options", "message"),
    [
        ({}, {}, "--network is missing"),
        (FACTS, {"network": "alexnet"}, "must be that of the checkpoints, lenet"),
        ({"dataset": "digits"}, {"network": "vgg11"}, "of another model"),
    ],
)
def test_what_does_not_fit_is_refused(folder, write, facts, options, message):
    write(10, facts)
    with pytest.raises(ConfigError, match=message):
        evaluate(folder, **options)


def test_a_model_of_no_numbers_has_a_line(folder, write, model):
    before = model.get_weights()
    try:
        model.set_weights([one * np.nan for one in before])
        write(10)
    finally:
        model.set_weights(before)
    evaluate(folder)
    [line] = lines(folder)
    assert line["loss"] is None
