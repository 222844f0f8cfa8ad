# SPDX-License-Identifier: Apache-2.0
"""The Keras runner with the flags of tf_cnn_benchmarks."""

import re

import pytest

from benchmarks import cnn
from tests.support.ranks import ranks

TOTAL = r"^-{64}\ntotal images/sec: \d+\.\d\d\n-{64}\n\Z"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "vgg20"], "vgg19"),
        (["--batch_size", "0"], "Received: '0'"),
        (["--init_learning_rate", "nan"], "Received: 'nan'"),
        (["--data_dir", "somewhere"], "must go with --data_name"),
        (["--xla_compile"], "XLA has no collectives"),
        (["--variable_update", "independent", "--comp_alg", "dgc"], "--variable_update=horovod"),
        (["--comp_alg", "onebyte"], "onebit"),
        (["--comp_topology", "ring"], "--comp_topology must go with a --comp_alg"),
    ],
)
def test_a_wrong_flag_is_told_in_a_line(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        cnn.parse(flags)
    assert end.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("cnn: error: ")
    assert message in error


@pytest.mark.tf
def test_the_list_of_models_is_that_of_the_package():
    from tf_hips import models

    assert set(cnn.MODELS) == set(models.MODELS)


def output_of(*flags):
    import contextlib
    import io

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        model = cnn.run(cnn.parse([str(flag) for flag in flags]))
    return output.getvalue(), model


@ranks(2, deadline_s=240.0)
def test_two_workers_print_what_upstream_prints(tmp_path):
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_hips
    from tf_hips import models
    from tf_hips.comm import primitives

    small = ["--num_batches", 3, "--batch_size", 4, "--display_every", 2]
    text, model = output_of("--model", "lenet", "--comp_alg", "dgc", *small)
    assert "Batch size:  8 global\n             4 per worker\n" in text
    compression = re.escape(cnn.parse(["--comp_alg", "dgc"]).comp_alg.text)
    head = rf"^Compression: {compression}\n=+\nRunning warm up\nDone warm up\nStep\tImg/sec\t"
    assert re.search(head, text, re.MULTILINE), text
    steps = re.findall(
        r"^(\d+)\timages/sec: [\d.]+ \+/- [\d.]+ \(jitter = [\d.]+\)\t[\d.]+$", text, re.MULTILINE
    )
    assert steps == ["1", "2"]
    assert re.search(TOTAL, text, re.MULTILINE)
    prints = primitives.gather_objects(tf_hips.fingerprint(model))
    assert prints[0] == prints[1]
    assert type(model.optimizer) is keras.optimizers.SGD

    # A data set that one rank has prepared: coloured images, for a model of gray ones.
    tfds = cnn.tensorflow_datasets()

    class Dots(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(
                    {
                        "image": tfds.features.Image(shape=(9, 9, 3)),
                        "label": tfds.features.ClassLabel(num_classes=3),
                    }
                ),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for row in range(24):
                yield row, {"image": np.full((9, 9, 3), 10 * row, np.uint8), "label": row % 3}

    data = ["--data_name", "dots", "--data_dir", tmp_path]
    if primitives.rank() == 0:
        Dots(data_dir=tmp_path).download_and_prepare()
    primitives.barrier()
    ring = ["--comp_alg", "onebit", "--comp_topology", "ring", "--comp_threshold", 1000]
    text, model = output_of("--model", "lenet", *ring, *data, *small)
    assert "Compression: error_feedback(onebit), topology ring, from 1000 elements on\n" in text
    assert "Dataset:     dots\n" in text
    assert re.search(TOTAL, text, re.MULTILINE)
    assert model.output_shape == (None, 3)
    prints = primitives.gather_objects(tf_hips.fingerprint(model))
    assert prints[0] == prints[1]
    # Workers have different rows, in the range that models like.
    flags = cnn.parse([*map(str, data), "--batch_size", "4"])
    dataset, classes = cnn.batches(flags, models.MODELS["lenet"], primitives.rank())
    images, labels = next(iter(dataset))
    assert (images.shape, classes) == ((4, 32, 32, 1), 3)
    assert float(tf.reduce_min(images)) >= -1 and float(tf.reduce_max(images)) <= 1
    seen = primitives.gather_objects(np.round(images[:, 0, 0, 0].numpy(), 4).tolist())
    assert not set(seen[0]) & set(seen[1])
    assert len(labels) == 4


@pytest.mark.tf
def test_what_is_no_data_set_is_told(tmp_path, capsys):
    flags = ["--variable_update", "independent", "--data_dir", str(tmp_path), "--data_name"]
    assert cnn.main([*flags, "no_such_set"]) == 1
    assert "--data_name must be a data set" in capsys.readouterr().err
    assert cnn.main([*flags, "mnist"]) == 1
    assert "must have been prepared" in capsys.readouterr().err
