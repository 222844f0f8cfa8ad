# SPDX-License-Identifier: Apache-2.0
"""A compressed sum on GPUs: residuals lie there, codecs run there, and the weights are the same.

With doubles of GPUs (tests/support/gpu_double.cc) and emulated kernels: not run on a GPU. Only the
sum is on the double; TensorFlow's wheel for CPUs has no kernels that would train a model there.
"""

import shutil
from pathlib import Path

import pytest

from tests.support.ranks import run_parties

pytestmark = [pytest.mark.tf, pytest.mark.timeout(300)]


@pytest.mark.slow
def test_a_ring_sums_on_gpus(tmp_path: Path) -> None:
    from tests.compll import emulation
    from tests.compll.support import spec
    from tests.support import gpu_double

    plugin = gpu_double.build(tmp_path)
    kernels = shutil.copyfile(emulation.build(spec("onebit")), tmp_path / "libtf_hips_cuda.so")
    arguments = {"plugin": str(plugin), "kernels": str(kernels)}
    run_parties(_train, arguments, [2], deadline_s=240)


def _train(plugin: str, kernels: str) -> None:
    import keras

    import tf_hips
    from tests.strategies import training
    from tests.support import gpu_double
    from tf_hips.comm import primitives
    from tf_hips.ops import library, placement
    from tf_hips.strategies import party

    gpu_double.load(Path(plugin))
    # Its own copy finds the kernels beside it.
    folder = Path(kernels).with_name(f"rank-{primitives.rank()}")
    folder.mkdir()
    for path in (library.OPS_PATH, Path(kernels)):
        shutil.copyfile(path, folder / path.name)
    library.OPS_PATH = folder / library.OPS_PATH.name
    data = training.shard(training.data(160), primitives.rank(), 2)
    weights = []
    for is_on_gpu in (True, False):
        placement._has_kernels.cache_clear()
        library.CUDA_PATH = folder / ("libtf_hips_cuda.so" if is_on_gpu else "missing.so")
        keras.utils.set_random_seed(5)
        party.device = lambda: "/cpu:0"
        strategy = tf_hips.CompressedRing("error_feedback(onebit)")
        party.device = lambda: "/gpu:0"
        with strategy.scope():
            model = training.build(keras.optimizers.SGD(0.1))
        training.fit(model, data, epochs=2)
        training.assert_same_on_all_ranks(model)
        weights.append(model.get_weights())
        held = vars(strategy.state.gradients0).items()
        kept = [value for name, value in held if "residual" in name]
        assert kept
        assert all(("GPU" in one.device) == is_on_gpu for one in kept), [one.device for one in kept]
    for on_gpu, on_cpu in zip(*weights, strict=True):
        assert on_gpu.tobytes() == on_cpu.tobytes()
