# SPDX-License-Identifier: Apache-2.0
"""The models of the CNN benchmarks are those of their publications."""

import numpy as np
import pytest

pytestmark = pytest.mark.tf

# Trainable parameters. Sources: Keras' documentation for those of keras.applications, less the
# moving statistics that it counts in; He et al. (2016) say 0.27 M for ResNet-20; 61,100,840 is the
# one-column AlexNet that frameworks share; LeNet-5 has 61,706 where its third layer is connected to
# all maps of the second.
PARAMETERS = {
    "alexnet": 61_100_840,
    "inception3": 23_817_352,
    "lenet": 61_706,
    "mobilenet": 4_231_976,
    "resnet20": 269_722,
    "resnet50": 25_583_592,
    "trivial": 224 * 224 * 3 + 1 + 2 * 4096 + 4097 * 1000,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
}


@pytest.fixture(scope="module", params=sorted(PARAMETERS))
def named_model(request):
    import keras

    from tf_hips import models

    # Variables get no values: those of VGG-19 would fill half a gigabyte.
    with keras.StatelessScope(initialize_variables=False):
        return request.param, models.build(request.param)


def test_every_model_has_the_published_number_of_parameters(named_model):
    name, model = named_model
    count = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    assert count == PARAMETERS[name]


def test_every_model_takes_its_images_and_gives_logits(named_model):
    from tf_hips import models

    name, model = named_model
    known = models.MODELS[name]
    assert model.input_shape == (None, *known.input_shape)
    assert model.output_shape == (None, known.classes)
    last = model.layers[-1]
    assert getattr(last, "activation", None) is None or last.activation.__name__ == "linear"


def test_a_shortcut_that_grows_has_zeros_for_new_channels():
    import keras

    from tf_hips import models

    model = models.build("resnet20", classes=3)
    assert model.output_shape == (None, 3)
    [joined, _] = [one for one in model.layers if isinstance(one, keras.layers.Concatenate)]
    part = keras.Model(model.input, [joined.input[0], joined.output])
    image = np.random.default_rng(0).normal(size=(1, 32, 32, 3)).astype(np.float32)
    narrow, wide = part.predict(image, verbose=0)
    assert narrow.shape == (1, 16, 16, 16)
    assert np.abs(narrow).max() > 0
    np.testing.assert_array_equal(wide[..., :16], narrow)
    assert not wide[..., 16:].any()


@pytest.mark.parametrize(("name", "classes"), [("vgg18", None), ("lenet", 0)])
def test_what_is_no_model_is_refused(name, classes):
    from tf_hips import models

    with pytest.raises(ValueError, match="Received: "):
        models.build(name, classes)


def test_the_list_is_complete():
    from tf_hips import models

    assert set(models.MODELS) == set(PARAMETERS)
