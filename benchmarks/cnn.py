# SPDX-License-Identifier: Apache-2.0
"""Images per second of a CNN in Keras, with the flags and the closing line of tf_cnn_benchmarks.

    horovodrun -np 4 python -m benchmarks.cnn --model vgg19 --batch_size 16 --comp_alg dgc
    tf-hips run --parties 1 --workers 2 benchmarks/cnn.py --model resnet20 --data_name cifar10
    python -m benchmarks.cnn --model lenet

For those who have no upstream checkout: the models are Keras' (`tf_hips.models`), and so is the
loop, `fit` under `tf_hips.CompressedRing`. Every rank prints, as upstream's do. Gradients are
averaged here, as Keras does; upstream sums them.
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path

from tf_hips.errors import TfHipsError
from tf_hips.ops.compressor import Compressor
from tf_hips.tf_cnn_benchmarks import options as cnn_options

PROGRAM = "cnn"
SEED = 1234
DASHES = "-" * 64
OPTIMIZERS = ("sgd", "momentum", "rmsprop", "adam")
MODELS = (
    *("trivial", "lenet", "alexnet", "resnet20", "resnet50"),
    *("vgg16", "vgg19", "inception3", "mobilenet"),
)


def parse(arguments):
    """The flags; a wrong one is told in a line, before TensorFlow is loaded."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="trivial")
    add("--batch_size", type=count, default=32, metavar="N", help="of each worker (default 32)")
    add("--num_batches", type=count, default=100, metavar="N", help="to measure (default 100)")
    add(
        "--num_warmup_batches",
        type=cnn_options.elements,
        metavar="N",
        help="before them (default: a tenth of them, 10 at most)",
    )
    add("--display_every", type=count, default=10, metavar="N", help="steps (default 10)")
    add("--optimizer", choices=OPTIMIZERS, default="sgd")
    add("--init_learning_rate", type=rate, metavar="X", help="default: by the model")
    add("--data_name", metavar="NAME", help="of tensorflow-datasets; default: synthetic images")
    add("--data_dir", metavar="DIR", help="where --data_name has been prepared")
    add(
        "--variable_update",
        choices=("horovod", "independent"),
        default="horovod",
        help="independent: plain Keras, one worker, no strategy",
    )
    add(
        "--comp_alg",
        type=cnn_options.algorithm,
        metavar="TEXT",
        help="as for `python -m tf_hips.tf_cnn_benchmarks` (default none: exact sums)",
    )
    cnn_options.add_ways(parser)
    add("--use_fp16", action="store_true", help="Keras' policy mixed_float16")
    add("--xla_compile", action="store_true", help="with --variable_update=independent only")
    flags = parser.parse_args(arguments)
    if flags.num_warmup_batches is None:
        flags.num_warmup_batches = min(10, math.ceil(flags.num_batches / 10))
    if flags.data_dir and not flags.data_name:
        parser.error("--data_dir must go with --data_name")
    cnn_options.check_ways(parser, flags)
    if flags.variable_update == "independent" and (flags.comp_alg or flags.comp_plan):
        parser.error("--comp_alg and --comp_plan must go with --variable_update=horovod")
    if flags.variable_update == "horovod" and flags.xla_compile:
        parser.error(
            "--xla_compile must go with --variable_update=independent: XLA has no collectives"
        )
    return flags


def count(text):
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1. Received: {text!r}")
    return int(text)


def rate(text):
    """A positive number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0. Received: {text!r}")
    return value


def main(arguments):
    """Trains, prints, and returns the exit code."""
    flags = parse(arguments)
    try:
        run(flags)
    except (TfHipsError, ValueError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    return 0


def run(flags):
    """Trains as the flags say; returns the model.

    Raises:
        ConfigError: the data set is not there, or is none of images.
    """
    import contextlib

    import keras

    from tf_hips import models

    is_alone = flags.variable_update == "independent"
    strategy = None
    if not is_alone:
        strategy = make_strategy(flags)
    workers = strategy.num_replicas_in_sync if strategy else 1
    rank = strategy.global_rank if strategy else 0
    keras.mixed_precision.set_global_policy("mixed_float16" if flags.use_fp16 else "float32")
    keras.utils.set_random_seed(SEED)
    known = models.MODELS[flags.model]
    dataset, classes = batches(flags, known, rank)
    tell_head(flags, workers)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = models.build(flags.model, classes)
        model.compile(
            optimizer(flags, known.learning_rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=flags.xla_compile,
        )
    clock = make_clock(flags, workers)
    print("Running warm up")
    steps = flags.num_warmup_batches + flags.num_batches
    model.fit(dataset, steps_per_epoch=steps, verbose=0, callbacks=[clock])
    print(DASHES)
    print(f"total images/sec: {clock.total():.2f}")
    print(DASHES, flush=True)
    return model


def options_of(flags):
    """What the flags say about gradients."""
    return cnn_options.Options(
        Path(),
        True,
        flags.comp_alg if isinstance(flags.comp_alg, Compressor) else None,
        flags.comp_threshold,
        flags.comp_topology,
        flags.comp_plan,
    )


def make_strategy(flags):
    """The strategy of the flags.

    Raises:
        ConfigError: the plan is none.
    """
    import tf_hips
    from tf_hips.comm import primitives
    from tf_hips.comm.plan import Plan

    options = options_of(flags)
    # A benchmark goes on whatever its gradients are, as upstream's does.
    given = {"nonfinite": "propagate"}
    if options.plan is None:
        given |= {"compression": options.compressor, "topology": options.topology}
        given |= {"comp_threshold": options.threshold}
    elif options.has_columns:
        primitives.init()
        topology = options.topology or "ps"
        given["plan"] = Plan.from_secopa(
            options.plan, primitives.size(), options.compressor.text, topology
        )
    else:
        given["plan"] = options.plan
    return tf_hips.CompressedRing(**given)


def tell_head(flags, workers):
    """The lines that upstream prints first."""
    import tensorflow as tf

    lines = {
        "TensorFlow": ".".join(tf.__version__.split(".")[:2]),
        "Keras": tf.keras.__version__,
        "Model": flags.model,
        "Dataset": flags.data_name or "synthetic",
        "Mode": "training",
        "Batch size": f"{workers * flags.batch_size} global",
        "": f"{flags.batch_size} per worker",
        "Num batches": flags.num_batches,
        "Precision": "mixed_float16" if flags.use_fp16 else "float32",
        "Optimizer": flags.optimizer,
        "Variables": flags.variable_update,
        "Compression": options_of(flags).description,
    }
    for name, value in lines.items():
        print(f"{name + ':' if name else '':<12} {value}")
    print("==========")


def optimizer(flags, learning_rate):
    """The optimizer of the flags, with upstream's settings."""
    import keras

    learning_rate = flags.init_learning_rate or learning_rate
    if flags.optimizer == "momentum":
        return keras.optimizers.SGD(learning_rate, momentum=0.9)
    if flags.optimizer == "rmsprop":
        return keras.optimizers.RMSprop(learning_rate, rho=0.9, momentum=0.9, epsilon=1.0)
    kind = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[flags.optimizer]
    return kind(learning_rate)


def batches(flags, known, rank):
    """Endless batches of one worker, and the number of classes."""
    import numpy as np
    import tensorflow as tf

    if flags.data_name:
        return of_data_set(flags, known)
    random = np.random.default_rng([SEED, rank])
    images = random.standard_normal((flags.batch_size, *known.input_shape), dtype=np.float32)
    labels = random.integers(known.classes, size=flags.batch_size)
    return tf.data.Dataset.from_tensors((images, labels)).repeat(), known.classes


def of_data_set(flags, known):
    """The same of a data set that has been prepared, its images made to fit the model.

    Raises:
        ConfigError: it is not there, or has no images with labels.
    """
    import tensorflow as tf

    import tf_hips
    from tf_hips import data
    from tf_hips.errors import ConfigError

    tfds = tensorflow_datasets()
    try:
        builder = tfds.builder(flags.data_name, data_dir=flags.data_dir)
    except tfds.core.DatasetNotFoundError as error:
        raise ConfigError(
            f"--data_name must be a data set of tensorflow-datasets. Received: {flags.data_name!r}"
        ) from error
    if not builder.data_path.exists():
        raise ConfigError(
            f"--data_name={flags.data_name} must have been prepared, by "
            f"tfds.builder({flags.data_name!r}, data_dir=...).download_and_prepare(). Received: "
            f"no {builder.data_path}"
        )
    keys = builder.info.supervised_keys
    features = builder.info.features
    if keys is None or not isinstance(features[keys[0]], tfds.features.Image):
        raise ConfigError(
            f"--data_name must have images with labels. Received: {flags.data_name}, {features}"
        )
    picture, label = (features[key] for key in keys)
    height, width, channels = known.input_shape

    def fitted(coded, number):
        image = tf.cast(picture.decode_example(coded), tf.float32) / 127.5 - 1.0
        image = tf.image.resize(image, [height, width])
        if image.shape[-1] != channels:
            to_gray, to_rgb = tf.image.rgb_to_grayscale, tf.image.grayscale_to_rgb
            image = to_gray(image) if channels == 1 else to_rgb(image)
        return image, number

    # Decoded behind the sharding: each worker its own images only.
    rows = builder.as_dataset(
        split="train",
        as_supervised=True,
        shuffle_files=False,
        decoders={keys[0]: tfds.decode.SkipDecoding()},
    )
    if flags.variable_update == "horovod":
        sharded = tf_hips.shard(rows, flags.batch_size)
    else:
        sharded = data.shard(rows, flags.batch_size, group=0, groups=1, seed=0)
    images = sharded.unbatch().map(fitted, num_parallel_calls=2)
    whole = images.batch(flags.batch_size, drop_remainder=True).repeat().prefetch(2)
    return whole, label.num_classes


def tensorflow_datasets():
    """The package, with the name that its version 4.9.10 looks for and does not require."""
    import importlib.resources
    import importlib.util

    if importlib.util.find_spec("importlib_resources") is None:
        sys.modules.setdefault("importlib_resources", importlib.resources)
    import tensorflow_datasets

    return tensorflow_datasets


def make_clock(flags, workers):
    """A callback of Keras that times the steps and prints as upstream does."""
    import keras

    class Clock(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seconds = []
            self.steps = -flags.num_warmup_batches
            self.start = self.began = self.ended = 0.0

        def on_train_batch_begin(self, batch, logs=None):
            if self.steps == 0:
                print("Done warm up")
                print("Step\tImg/sec\ttotal_loss", flush=True)
                self.seconds.clear()
                self.began = time.perf_counter()
            self.model.reset_metrics()  # the loss of this step, not of all so far
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            loss = float(logs["loss"])  # waits for the device
            self.ended = time.perf_counter()
            self.seconds.append(self.ended - self.start)
            self.steps += 1
            if self.steps == 1 or (self.steps > 0 and self.steps % flags.display_every == 0):
                print(f"{self.steps}\t{self.speed()}\t{loss:.3f}", flush=True)

        def speed(self):
            speeds = [flags.batch_size / one for one in self.seconds]
            mean = flags.batch_size / statistics.fmean(self.seconds)
            error = statistics.pstdev(speeds) / math.sqrt(len(speeds))
            middle = statistics.median(speeds)
            jitter = 1.4826 * statistics.median(abs(one - middle) for one in speeds)
            return f"images/sec: {mean:.1f} +/- {error:.1f} (jitter = {jitter:.1f})"

        def total(self):
            # From the first step to the last, with what is between them.
            return workers * flags.batch_size * self.steps / (self.ended - self.began)

    return Clock()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
