# SPDX-License-Identifier: Apache-2.0
"""A repository rule that asks the Python of the build where its TensorFlow is.

It lies where tf.sysconfig says that it does; the module is found and not imported, which would take seconds.

TF_HIPS_PYTHON (or PYTHON_BIN_PATH) names the interpreter; `python3` is the fallback. TF_HIPS_TENSORFLOW carries the
version that tools/build.sh read from the wheel's metadata: the rule runs again when it changes.

Result: `:headers` (system includes, so that -Werror stays with our own sources), `:framework` (the library every op
links with), and PYTHON in `config.bzl`.
"""

_ASK = """
from importlib.util import find_spec
spec = find_spec("tensorflow")
print(spec.submodule_search_locations[0] if spec else "")
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
    asked = ctx.execute([python, "-I", "-c", _ASK])
    folder = asked.stdout.strip()
    if asked.return_code or not ctx.path(folder + "/include/tensorflow/core/framework/op_kernel.h").exists:
        fail("{} must find a TensorFlow with its headers. Received: {} {}".format(python, repr(folder), asked.stderr))
    ctx.symlink(folder + "/include", "include")
    ctx.symlink(folder + "/libtensorflow_framework.so.2", "libtensorflow_framework.so.2")
    ctx.file("BUILD", _BUILD)
    ctx.file("config.bzl", "PYTHON = {}\n".format(repr(str(python))))

tf_configure = repository_rule(
    implementation = _tf_configure_impl,
    doc = "Describes the TensorFlow of one Python as a repository.",
    environ = ["TF_HIPS_PYTHON", "PYTHON_BIN_PATH", "TF_HIPS_TENSORFLOW"],
)
