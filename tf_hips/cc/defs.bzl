# SPDX-License-Identifier: Apache-2.0
"""compll_codecs(): from specifications to codecs, without and with TensorFlow; one_unit(): sources compiled as one."""

load("@local_tensorflow//:config.bzl", "PYTHON")

# One meaning of a float expression everywhere: no contraction to fused multiply-add, no fast-math.
COPTS = [
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    # Vector code needs selections; threaded jumps make branches of them, and so does arithmetic that may trap: it is
    # moved to where its result is chosen. No number depends on either.
    "-fno-thread-jumps",
    "-fno-trapping-math",
    # A square root that may set errno is a call for each element; nobody looks at errno of one.
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
]

# What is hand-written of the TensorFlow ops and reads TensorFlow's headers.
TF_SOURCES = [
    "tf/codec_kernels.cc",
    "tf/codec_shapes.cc",
    "tf/cuda_library.cc",
    "tf/flow_ops.cc",
    "tf/gpu_kernels.cc",
    "tf/loaded_codecs.cc",
    "tf/loaded_ops.cc",
    "tf/low_rank_ops.cc",
    "tf/robust_ops.cc",
]

def one_unit(name, sources):
    """A file that includes sources, which are then compiled as one.

    Where headers cost more than what follows them: TensorFlow's take eight seconds to read, and a codec's own half
    of what it takes to compile. Names without linkage must differ among the sources.

    Args:
      name: of the rule; the file is NAME.cc.
      sources: paths of the sources from the root of the tree.
    """
    lines = ["// SPDX-License-Identifier: Apache-2.0"] + ["#include \"" + source + "\"" for source in sources]
    native.genrule(
        name = name,
        outs = [name + ".cc"],
        cmd = "printf '%s\\n' " + " ".join(["'" + line + "'" for line in lines]) + " > $@",
    )

def compll_codecs(name, units):
    """Compiles specifications with the compiler of this tree. The output is never committed.

    Makes NAME, the plain C codecs, which are registered when loaded, and NAME_tf, those and their TensorFlow ops.
    A codec is called like its specification, specs/CODEC.pse: the compiler names its output and symbols after it.

    Args:
      name: of the libraries.
      units: lists of codecs, each compiled as one source; lists of equal work keep all cores busy.
    """
    codecs = [codec for unit in units for codec in unit]
    plain = {codec: "gen/" + codec + ".codec.cc" for codec in codecs}
    tf_ops = ["gen/" + codec + ".tf.cc" for codec in codecs]
    specs = ["specs/" + codec + ".pse" for codec in codecs]
    folder = native.package_name() + "/"

    # One run for all: starting Python takes longer than compiling a specification.
    native.genrule(
        name = name + "_gen",
        srcs = specs,
        outs = plain.values() + tf_ops,
        cmd = "PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1 '" + PYTHON +
              "' -m compll gen $(SRCS) --target cpp,tensorflow -o $(RULEDIR)/gen",
        message = "compll gen",
        tools = ["//compll:compiler"],
    )
    parts = []
    for number, unit in enumerate(units):
        part = name + "_" + str(number)
        parts.append(":" + part)
        one_unit(part + "_unit", [folder + plain[codec] for codec in unit])
        native.cc_library(
            name = part,
            srcs = [part + "_unit.cc"],
            copts = COPTS,
            linkstatic = True,
            textual_hdrs = [plain[codec] for codec in unit],
            deps = ["//tf_hips/cc:runtime"],
            alwayslink = True,
        )
    native.cc_library(
        name = name,
        deps = parts,
    )
    one_unit(name + "_tf_unit", ["tf_hips/cc/" + source for source in TF_SOURCES] + [folder + file for file in tf_ops])
    native.cc_library(
        name = name + "_tf",
        srcs = [name + "_tf_unit.cc"],
        copts = COPTS,
        linkstatic = True,
        textual_hdrs = tf_ops + ["//tf_hips/cc:" + source for source in TF_SOURCES],
        deps = [":" + name, "//tf_hips/cc:tf_glue"],
        alwayslink = True,
    )
