# SPDX-License-Identifier: Apache-2.0
"""Data sets from files: read to the pixel; what is damaged is said in one line."""

import gzip
import sys

import numpy as np
import pytest

from tests.data import files as written
from tf_hips.data import sets
from tf_hips.errors import ConfigError


def refused(name, folder, **options):
    with pytest.raises(ConfigError) as caught:
        sets.load(name, folder, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("below", ["", "fashion-mnist"])
def test_idx_files_are_read_to_the_pixel(tmp_path, below):
    written.write_mnist(tmp_path / below, train=30, test=10, seed=7)
    data = sets.load("Fashion-MNIST", tmp_path)
    pixels = np.random.default_rng(7).integers(0, 256, (30, 28, 28))
    np.testing.assert_array_equal(data.train.x[..., 0], pixels)
    np.testing.assert_array_equal(data.train.y, np.arange(30) % 10)
    assert (len(data.test), data.classes, data.shape) == (10, 10, (28, 28, 1))
    assert not data.is_text


def test_files_that_are_called_alike_are_told_by_their_folder(tmp_path):
    written.write_mnist(tmp_path, seed=1)
    written.write_mnist(tmp_path / "fashion-mnist", seed=2)
    assert sets.load("fashion_mnist", tmp_path).source == str(tmp_path / "fashion-mnist")
    assert sets.load("mnist", tmp_path).source == str(tmp_path)


def test_cifar10_is_read_to_the_pixel(tmp_path):
    written.write_cifar10(tmp_path / "cifar10")
    data = sets.load("cifar10", tmp_path)
    expected = [written.cifar_records((np.arange(10) % 10)[:, None], n)[1] for n in range(6)]
    np.testing.assert_array_equal(data.train.x, np.concatenate(expected[:5]))
    np.testing.assert_array_equal(data.test.x, expected[5])
    np.testing.assert_array_equal(data.train.y, np.tile(np.arange(10), 5))


def test_cifar100_has_the_fine_classes(tmp_path):
    labels = np.array([[1, 99], [2, 0], [3, 57]])
    data, images = written.cifar_records(labels, 1)
    for name in ("train.bin", "test.bin"):
        (tmp_path / name).write_bytes(data)
    loaded = sets.load("cifar100", tmp_path)
    np.testing.assert_array_equal(loaded.train.y, [99, 0, 57])
    np.testing.assert_array_equal(loaded.test.x, images)
    assert loaded.classes == 100


def test_a_half_downloaded_file_is_named(tmp_path):
    written.write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert f"{path} is cut off" in refused("mnist", tmp_path)
    path.write_bytes(whole[:7])
    assert f"{path} is cut off" in refused("mnist", tmp_path)
    path.write_bytes(b"<html>not found</html>")
    assert f"{path} must be compressed by gzip" in refused("mnist", tmp_path)
    path.write_bytes(gzip.compress(b"<html>not found</html>"))
    assert f"{path} must be an idx file" in refused("mnist", tmp_path)


def test_a_wrong_size_is_named(tmp_path):
    written.write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    data = gzip.decompress(path.read_bytes())
    for changed, received in ((data[:-5], str(40 * 784 - 5)), (data + b"x", "more")):
        path.write_bytes(gzip.compress(changed))
        assert f"must hold {40 * 784} values. Received: {received}" in refused("mnist", tmp_path)
    path.write_bytes(gzip.compress(data[:4] + b"\xff" * 12))
    assert "must have at most" in refused("mnist", tmp_path)
    written.write_idx(path, np.zeros((39, 28, 28)))
    assert "equally many rows. Received: 39 and 40" in refused("mnist", tmp_path)


def test_cut_records_are_named(tmp_path):
    written.write_cifar10(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    text = refused("cifar10", tmp_path)
    assert f"{path} must be records of 3073 bytes" in text
    assert f"Received: {10 * 3073 - 1} bytes" in text


def test_a_missing_file_is_named(tmp_path):
    written.write_cifar10(tmp_path)
    (tmp_path / "data_batch_4.bin").unlink()
    assert refused("cifar10", tmp_path).endswith("without data_batch_4.bin")


def test_a_label_out_of_range_is_named_with_its_row(tmp_path):
    written.write_mnist(tmp_path)
    written.write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.array([1, 2, 10] + [0] * 17))
    text = refused("mnist", tmp_path)
    assert "Labels must be from 0 to 9 in the test rows of mnist" in text
    assert text.endswith("Received: 10 in row 2")


def test_an_empty_data_set_is_refused(tmp_path):
    written.write_mnist(tmp_path, test=0)
    assert "a sample at least in the test rows" in refused("mnist", tmp_path)


def test_what_is_not_there_is_said_with_the_command_that_fetches_it(tmp_path):
    text = refused("mnist", tmp_path)
    assert "`tf-hips data prepare mnist --data-dir DIR`" in text
    assert str(tmp_path) in text
    assert "train-images-idx3-ubyte.gz" in text
    assert "`tf-hips data prepare imdb_reviews " in refused("imdb_reviews", tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [("digits", (8, 8, 1), 10), ("synthetic", (28, 28, 1), 10), ("synthetic_text", (64,), 4)],
)
def test_made_sets_need_no_file(name, shape, classes):
    data = sets.load(name)
    again = sets.load(name)
    assert (data.shape, data.classes) == (shape, classes)
    np.testing.assert_array_equal(data.train.x, again.train.x)
    assert set(data.train.y) == set(range(classes))
    assert len(data.train) > 3 * len(data.test)


def test_synthetic_texts_end_in_padding_and_tell_their_class():
    data = sets.load("synthetic_text")
    lengths = (data.train.x > 0).sum(axis=1)
    assert 16 <= lengths.min() < lengths.max() == 64
    assert all(not row[length:].any() for row, length in zip(data.train.x, lengths, strict=True))
    counts = np.stack(
        [np.bincount(data.train.x[data.train.y == one].ravel(), minlength=257) for one in range(4)]
    )[:, 1:]
    shares = counts / counts.sum(axis=1, keepdims=True)
    assert np.abs(shares[0] - shares[1]).sum() > 0.2


def test_looking_for_a_data_set_needs_no_tensorflow(tmp_path):
    import subprocess

    written.write_mnist(tmp_path)
    code = (
        "import sys\nfrom tf_hips.data import sets\n"
        f"data = sets.load('mnist', {str(tmp_path)!r})\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.tf
def test_folders_of_images_become_rows(tmp_path):
    import tensorflow as tf

    for part, number in (("train", 3), ("validation", 2)):
        for shade, name in ((40, "apple"), (200, "pear")):
            place = tmp_path / part / name
            place.mkdir(parents=True)
            for index in range(number):
                image = np.full((16, 16, 3), shade + index, np.uint8)
                (place / f"{index}.png").write_bytes(tf.io.encode_png(image).numpy())
    data = sets.load("image-folder", tmp_path, image_size=16)
    np.testing.assert_array_equal(data.train.y, [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(data.train.x[:, 0, 0, 0], [40, 41, 42, 200, 201, 202])
    assert sets.load("image_folder", tmp_path).shape == (32, 32, 3)
    # Notebooks and desktops leave such things behind.
    (tmp_path / "train/.ipynb_checkpoints").mkdir()
    (tmp_path / "validation/.thumbnails").mkdir()
    (tmp_path / "train/pear/._0.png").write_bytes(b"no image")
    data = sets.load("image_folder", tmp_path)
    assert (data.classes, len(data.train), len(data.test)) == (2, 6, 4)
    (tmp_path / "train/pear/link.png").symlink_to(tmp_path / "nowhere")
    assert "link.png cannot be read: No such file" in refused("image_folder", tmp_path)
    (tmp_path / "train/pear/link.png").unlink()
    (tmp_path / "train/pear/0.png").write_bytes(b"no image")
    assert "0.png must be an image" in refused("image_folder", tmp_path)
    (tmp_path / "train/pear/0.png").unlink()
    (tmp_path / "validation/plum").mkdir()
    assert "Received: 'plum' more" in refused("image_folder", tmp_path)


def test_a_folder_without_test_images_is_refused(tmp_path):
    (tmp_path / "train/apple").mkdir(parents=True)
    assert "without `test`" in refused("image_folder", tmp_path)
    (tmp_path / "test").mkdir()
    assert "must hold images" in refused("image_folder", tmp_path)


@pytest.mark.tf
def test_what_is_stored_is_read_by_tensorflow_datasets(tmp_path):
    from tf_hips.data.sets import prepared

    written.write_cifar10(tmp_path / "raw", rows=4)
    data = sets.load("cifar10", tmp_path / "raw")
    place = prepared.store(data, tmp_path / "door")
    assert place == tmp_path / "door/cifar10/1.0.0"
    assert sets.find("cifar10", tmp_path / "door").kind == "prepared"
    again = sets.load("cifar10", tmp_path / "door")
    np.testing.assert_array_equal(again.train.x, data.train.x)
    np.testing.assert_array_equal(again.test.y, data.test.y)
    assert sets.load("cifar10", tmp_path / "door", image_size=8).shape == (8, 8, 3)
    with pytest.raises(ConfigError, match="must not have cifar10 yet"):
        prepared.store(data, tmp_path / "door")
    [record] = place.glob("*train*")
    record.write_bytes(record.read_bytes()[:-100])
    assert "cannot be read" in refused("cifar10", tmp_path / "door")


@pytest.mark.tf
def test_of_prepared_sets_pixels_are_bytes_and_test_rows_have_labels(tmp_path):
    import tensorflow as tf

    from tf_hips.data.sets import prepared

    tfds = prepared._tfds()
    label = tfds.features.ClassLabel(num_classes=3)
    pixels = np.full((4, 2, 2, 1), 255.4, np.float32)
    texts = np.array([b"one", b"two", b"three", b"four"])
    hidden = np.full(4, -1, np.int64)
    known = np.arange(4) % 3
    for name, feature, key, splits in (
        ("floats", tfds.features.Tensor(shape=(2, 2, 1), dtype=np.float32), "image", {}),
        ("benchmark", tfds.features.Text(), "sentence", {"test": hidden, "validation": known}),
        ("contest", tfds.features.Text(), "sentence", {"test": hidden}),
    ):
        rows = pixels if key == "image" else texts
        tfds.dataset_builders.store_as_tfds_dataset(
            name=name,
            version="1.0.0",
            features=tfds.features.FeaturesDict({key: feature, "label": label}),
            split_datasets={
                split: tf.data.Dataset.from_tensor_slices({key: rows, "label": y})
                for split, y in {"train": known, **splits}.items()
            },
            data_dir=str(tmp_path),
            disable_shuffling=True,
        )
    assert "must be bytes" in refused("floats", tmp_path)
    assert "Received: float32" in refused("floats", tmp_path, image_size=2)
    benchmark = sets.load("benchmark", tmp_path)
    np.testing.assert_array_equal(benchmark.test.y, known)
    assert len(benchmark.train) == 4
    contest = sets.load("contest", tmp_path)  # the last fifth of its training rows
    np.testing.assert_array_equal(contest.train.y, known[:3])
    np.testing.assert_array_equal(contest.test.y, known[3:])


@pytest.mark.tf
def test_what_cannot_be_fetched_is_said_at_once(tmp_path, monkeypatch):
    import socket

    from tf_hips.data.sets import prepared

    def unknown(*_args, **_options):
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError) as caught:
        prepared.download("mnist", tmp_path, None)
    assert "cannot be downloaded here (no way to storage.googleapis.com)" in str(caught.value)
    assert "`tf-hips data prepare mnist --data-dir DIR`" in str(caught.value)
    with pytest.raises(ConfigError, match="does not know"):
        prepared.download("no_such_thing", tmp_path, None)
