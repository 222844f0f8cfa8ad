# SPDX-License-Identifier: Apache-2.0
"""compll_op(): from one specification to two libraries, one without and one with TensorFlow."""

load("@local_tensorflow//:config.bzl", "PYTHON")

# One meaning of a float expression everywhere: no contraction to fused multiply-add, no fast-math.
COPTS = [
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
]

def compll_op(name, spec):
    """Compiles `spec` with the compiler of this tree. The output is never committed.

    Makes NAME_codec (the plain C codec, registered when loaded) and NAME_tf (its TensorFlow ops); NAME is the stem
    of the specification's file, because the compiler names its output and its symbols after it.

    Args:
      name: stem of the specification's file.
      spec: label of the specification.
    """
    native.genrule(
        name = name + "_gen",
        srcs = [spec],
        outs = ["gen/" + name + ".codec.cc", "gen/" + name + ".tf.cc"],
        cmd = "PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 '" + PYTHON + "' -m compll gen $< -o $(RULEDIR)/gen",
        message = "compll gen",
        tools = ["//compll:compiler"],
    )
    native.cc_library(
        name = name + "_codec",
        srcs = ["gen/" + name + ".codec.cc"],
        copts = COPTS,
        linkstatic = True,
        deps = ["//tf_hips/cc:runtime"],
        alwayslink = True,
    )
    native.cc_library(
        name = name + "_tf",
        srcs = ["gen/" + name + ".tf.cc"],
        copts = COPTS,
        linkstatic = True,
        deps = [
            ":" + name + "_codec",
            "//tf_hips/cc:tf_glue",
        ],
        alwayslink = True,
    )
