# SPDX-License-Identifier: Apache-2.0
"""A repository rule that asks the Python of the build where its TensorFlow is.

TF_HIPS_PYTHON (or PYTHON_BIN_PATH) names the interpreter; `python3` is the fallback. TF_HIPS_TENSORFLOW carries the
version that tools/build.sh read from the wheel's metadata: the rule runs again when it changes, and only then, because
importing TensorFlow takes seconds.

Result: `:headers` (system includes, so that -Werror stays with our own sources), `:framework` (the library every op
links with), and PYTHON and TF_VERSION in `config.bzl`.
"""

_ASK = """
import tensorflow as tf
print("\\n".join([tf.__version__, tf.sysconfig.get_include(), tf.sysconfig.get_lib()]))
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(
        ["include/" + folder + "/**" for folder in [
            "Eigen", "absl", "google", "ml_dtypes", "tensorflow/core", "tensorflow/tsl", "third_party", "tsl",
            "unsupported", "xla/stream_executor", "xla/tsl",
        ]] + ["include/xla/*.pb.h"],
    ),
    defines = ["_GLIBCXX_USE_CXX11_ABI=1", "EIGEN_MAX_ALIGN_BYTES=64"],
    includes = ["include"],
)

cc_import(
    name = "framework",
    shared_library = "libtensorflow_framework.so.2",
)
"""

def _tf_configure_impl(ctx):
    environ = ctx.os.environ
    name = environ.get("TF_HIPS_PYTHON", "") or environ.get("PYTHON_BIN_PATH", "") or "python3"
    python = name if name.startswith("/") else ctx.which(name)
    if not python:
        fail("TF_HIPS_PYTHON must name a Python with TensorFlow. Received: " + name)
    asked = ctx.execute([python, "-c", _ASK], environment = {"TF_CPP_MIN_LOG_LEVEL": "3"})
    lines = asked.stdout.strip().split("\n")
    if asked.return_code or len(lines) != 3:
        fail("{} could not import TensorFlow:\n{}".format(python, asked.stderr))
    version, include, lib = lines
    ctx.symlink(include, "include")
    ctx.symlink(lib + "/libtensorflow_framework.so.2", "libtensorflow_framework.so.2")
    ctx.file("BUILD", _BUILD)
    ctx.file("config.bzl", "PYTHON = {}\nTF_VERSION = {}\n".format(repr(str(python)), repr(version)))

tf_configure = repository_rule(
    implementation = _tf_configure_impl,
    doc = "Describes the TensorFlow of one Python as a repository.",
    environ = ["TF_HIPS_PYTHON", "PYTHON_BIN_PATH", "TF_HIPS_TENSORFLOW"],
)
