# SPDX-License-Identifier: Apache-2.0
"""compll_op() and compll_tf_library(): from specifications to codecs, without and with TensorFlow."""

load("@local_tensorflow//:config.bzl", "PYTHON")

# One meaning of a float expression everywhere: no contraction to fused multiply-add, no fast-math.
COPTS = [
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    # Vector code needs selections; threaded jumps make branches of them.
    "-fno-thread-jumps",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
]

def compll_op(name, spec):
    """Compiles `spec` with the compiler of this tree. The output is never committed.

    Makes NAME_codec, the plain C codec, registered when loaded, and gen/NAME.tf.cc, its TensorFlow ops, for
    compll_tf_library(). NAME is the stem of the specification's file, because the compiler names its output and
    its symbols after it.

    Args:
      name: stem of the specification's file.
      spec: label of the specification.
    """
    native.genrule(
        name = name + "_gen",
        srcs = [spec],
        outs = ["gen/" + name + ".codec.cc", "gen/" + name + ".tf.cc"],
        cmd = "PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 '" + PYTHON + "' -m compll gen $< --target cpp,tensorflow -o $(RULEDIR)/gen",
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

def compll_tf_library(name, specs):
    """The TensorFlow ops of several compll_op()s, compiled as one file.

    TensorFlow's headers take eight seconds to read, whatever follows them; so they are read once for all.

    Args:
      name: of the library.
      specs: names of compll_op()s of this folder.
    """
    include = "#include \"" + native.package_name() + "/gen/{}.tf.cc\""
    lines = ["// SPDX-License-Identifier: Apache-2.0"] + [include.format(spec) for spec in specs]
    native.genrule(
        name = name + "_gen",
        outs = ["gen/" + name + ".cc"],
        cmd = "printf '%s\\n' " + " ".join(["'" + line + "'" for line in lines]) + " > $@",
    )
    native.cc_library(
        name = name,
        srcs = ["gen/" + name + ".cc"],
        copts = COPTS,
        linkstatic = True,
        textual_hdrs = ["gen/" + spec + ".tf.cc" for spec in specs],
        deps = [":" + spec + "_codec" for spec in specs] + ["//tf_hips/cc:tf_glue"],
        alwayslink = True,
    )
