# SPDX-License-Identifier: Apache-2.0
"""The models of the CNN benchmarks are those of their publications."""

import contextlib

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


@contextlib.contextmanager
def without_values():
    """Variables of models that are built get no values: those of VGG-19 fill half a gigabyte."""
    import keras

    with keras.StatelessScope(initialize_variables=False):
        yield
    # Keras keeps a list of them, and gives them their values when the next model is built.
    keras.utils.clear_session(free_memory=False)


@pytest.fixture(scope="module", params=sorted(PARAMETERS))
def named_model(request):
    from tf_hips import models

    with without_values():
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


# Trainable parameters of what `make` makes. At 224 pixels and 1000 classes: torchvision's tables
# for ResNet-18 and the VGGs, Keras' documentation less moving statistics for its own. At 32 pixels
# and 10 classes: the usual ResNets for CIFAR (11.17 M; He et al., table 6, say 0.27 M, 0.46 M,
# 1.7 M), AlexNet for CIFAR as layer sizes say, 5.48 M of SimpleNet's paper plus 9088 of its batch
# normalisation. The others follow from the sizes of their layers.
LARGE = {
    "alexnet": 61_100_840,
    "inception_v3": 23_817_352,
    "mobilenet_v1": 4_231_976,
    "mobilenet_v2": 3_504_872,
    "resnet18_v1": 11_689_512,
    "resnet50_v1": 25_583_592,
    "resnet50_v2": 25_568_360,
    "resnet152": 60_268_520,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
}
VGG_HEAD = 2 * (512 * 512 + 512) + 512 * 10 + 10
SMALL = {
    "alexnet": 23_296 + 307_392 + 663_936 + 884_992 + 590_080 + 2_570,
    "lenet": 61_706 + 2 * 6 * 25,
    "resnet18_v1": 11_173_962,
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet110": 1_727_962,
    "simplenet": 5_489_290 + 2 * 4_544,
    "vgg11": 9_220_480 + 2 * 2_752 + VGG_HEAD,
}
QUICK = {"alexnet", "lenet", "resnet18_v1", "resnet20", "simplenet", "vgg11"}


def num_parameters(name, shape, classes):
    from tf_hips import models

    with without_values():
        model = models.make(name, shape, classes)
    assert model.output_shape == (None, classes)
    last = model.layers[-1]
    assert getattr(last, "activation", None) is None or last.activation.__name__ == "linear"
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in sorted(SMALL)],
)
def test_small_images_get_the_form_for_cifar(name):
    assert num_parameters(name, (32, 32, 3), 10) == SMALL[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LARGE))
def test_large_images_get_the_published_form(name):
    side = 299 if name == "inception_v3" else 224
    assert num_parameters(name, (side, side, 3), 1000) == LARGE[name]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3), (8, 8, 1), (20, 33, 3)])
def test_every_network_takes_small_images(shape):
    from tf_hips import models

    for name in models.NETWORKS:
        if name != "transformer":
            assert num_parameters(name, shape, 7) > 10_000


def test_the_transformer_reads_bytes_and_not_the_padding():
    from tf_hips import models

    model = models.make("transformer", (16,), 3)
    attention = 4 * (128 * 128 + 128)
    block = attention + 4 * 128 + (128 * 512 + 512) + (512 * 128 + 128)
    expected = 257 * 128 + 16 * 128 + 2 * block + 2 * 128 + 128 * 3 + 3
    assert sum(int(np.prod(one.shape)) for one in model.trainable_variables) == expected
    text = np.zeros((2, 16), np.int32)
    text[:, :5] = np.arange(1, 6)
    longer = models.make("transformer", (24,), 3)
    for mine, other in zip(longer.trainable_variables, model.trainable_variables, strict=True):
        value = np.zeros(mine.shape, np.float32)
        value[: other.shape[0]] = other.numpy()
        mine.assign(value)
    np.testing.assert_allclose(longer(np.pad(text, [(0, 0), (0, 8)])), model(text), atol=1e-5)
    assert np.isfinite(model(np.zeros((1, 16), np.int32))).all()


def test_small_digits_get_the_margin_that_lenet_had():
    import keras

    from tf_hips.models import plain

    inputs = keras.Input((28, 28, 1))
    padded = keras.Model(inputs, plain.fitted(inputs, 32))
    image = np.ones((1, 28, 28, 1), np.float32)
    result = padded(image).numpy()[0, ..., 0]
    assert result.shape == (32, 32)
    assert result.sum() == 28 * 28
    assert not result[:2].any()
    assert not result[:, -2:].any()
    tiny = keras.Input((8, 8, 1))
    enlarged = keras.Model(tiny, plain.fitted(tiny, 32))
    pixels = np.arange(64, dtype=np.float32).reshape(1, 8, 8, 1)
    np.testing.assert_array_equal(enlarged(pixels), pixels.repeat(4, 1).repeat(4, 2))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "message"),
    [
        ("vgg18", (32, 32, 3), 10, "`name` must be one of"),
        ("lenet", (32,), 10, "`input_shape` of lenet"),
        ("transformer", (32, 32, 3), 10, "`input_shape` of transformer"),
        ("lenet", (32, 32, 1), 0, "`classes` must be"),
    ],
)
def test_what_cannot_be_made_is_refused(name, shape, classes, message):
    from tf_hips import models

    with pytest.raises(ValueError, match=message) as caught:
        models.make(name, shape, classes)
    assert "Received: " in str(caught.value)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("ResNet-18", "resnet18_v1"),
        ("resnet18-v1", "resnet18_v1"),
        ("LeNet", "lenet"),
        ("mobilenet-v2", "mobilenet_v2"),
        ("inception-v3", "inception_v3"),
        ("VGG11", "vgg11"),
        ("ResNet-152", "resnet152"),
    ],
)
def test_names_of_the_seeds_are_known(given, name):
    from tf_hips import models

    assert models.canonical(given) == name
