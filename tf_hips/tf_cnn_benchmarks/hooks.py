# SPDX-License-Identifier: Apache-2.0
"""Where upstream's modules are wrapped while its script runs, and what for.

    benchmark_cnn.setup                          Horovod starts as ours does
    BenchmarkCNN.print_info                      tells the compression
    BenchmarkCNN.add_forward_pass_and_gradients  upstream's own allreduces do nothing
    VariableMgrIndependent.preprocess_device_grads
                                                 all gradients are summed at once. It is outside of
                                                 what --xla_compile compiles, which has no
                                                 collectives
    BenchmarkCNN.benchmark_with_session          what encoding keeps is saved with the checkpoints
    benchmark_cnn.benchmark_one_step             ... and restored before the first step; a rank that
                                                 waits for ever is noticed

Upstream's gradients are summed, not averaged: so are ours.
"""

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_hips.comm import primitives, watchdog
from tf_hips.comm.foreign import allreduce_replaced
from tf_hips.errors import ConfigError
from tf_hips.strategies.gradients import Gradient
from tf_hips.tf_cnn_benchmarks.options import Options
from tf_hips.tf_cnn_benchmarks.saved import SavedState
from tf_hips.tf_cnn_benchmarks.sums import GraphSum

# The same on all ranks in all steps: a rank may still compute when another waits in the next one.
_STEP = "a step of tf_cnn_benchmarks"


@contextlib.contextmanager
def installed(options: Options) -> Iterator[None]:
    """While the context is open, upstream's modules are wrapped; they must be importable.

    Raises:
        ConfigError: they are not those that are known here.
    """
    benchmark_cnn = importlib.import_module("benchmark_cnn")
    variable_mgr = importlib.import_module("variable_mgr")
    hooks = _Hooks(options)
    points: list[tuple[Any, str, Callable[..., Any]]] = [
        (benchmark_cnn, "setup", hooks.setup),
        (benchmark_cnn, "benchmark_one_step", hooks.one_step),
        (benchmark_cnn, "BenchmarkCNN.print_info", hooks.print_info),
        (benchmark_cnn, "BenchmarkCNN.add_forward_pass_and_gradients", hooks.forward_pass),
        (benchmark_cnn, "BenchmarkCNN.benchmark_with_session", hooks.session),
        (variable_mgr, "VariableMgrIndependent.preprocess_device_grads", hooks.gradients),
    ]
    with contextlib.ExitStack() as stack:
        for module, path, hook in points:
            stack.enter_context(_wrapped(module, path, hook))
        yield


class _Hooks:
    """What surrounds the calls of one run of upstream's script.

    Each hook gets what it surrounds, and its arguments.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._num_allreduces = 0
        self._saved: SavedState | None = None
        self._run: _Run | None = None

    def setup(self, original: Callable[..., Any], params: Any) -> Any:
        """Starts Horovod with our settings, before upstream does.

        Raises:
            ConfigError: upstream sums its gradients by something else.
        """
        if params.variable_update != "horovod":
            raise ConfigError(
                "--comp_alg and --comp_plan must go with --variable_update=horovod. Received: "
                f"--variable_update={params.variable_update}"
            )
        primitives.init()
        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            # The one that upstream's sessions see; what is eager here would take all of them, and
            # a process can give a GPU one number only.
            mine = gpus[primitives.local_worker() % len(gpus)]
            tf.config.set_visible_devices(mine, "GPU")
        return original(params)

    def print_info(self, original: Callable[..., Any], bench: Any) -> None:
        """Tells the compression behind upstream's own lines."""
        original(bench)
        _tell(f"Compression: {self._options.description}")

    def forward_pass(
        self, original: Callable[..., Any], bench: Any, *args: Any, **more: Any
    ) -> Any:
        """Lets upstream build a tower whose gradients are this rank's own."""
        self._num_allreduces = 0
        with allreduce_replaced(self._pass_on):
            return original(bench, *args, **more)

    def _pass_on(self, tensor: Any, average: bool | None = None, **more: Any) -> Any:
        del more
        if average is not False:
            raise ConfigError(
                "upstream must ask for sums, allreduce(..., average=False). Received: "
                f"average={average}"
            )
        self._num_allreduces += 1
        return tensor

    def gradients(self, original: Callable[..., Any], manager: Any, device_grads: Any) -> Any:
        """Sums the gradients of the one tower over the ranks."""
        [pairs] = device_grads
        if self._num_allreduces != len(pairs):
            raise ConfigError(
                "upstream must sum each gradient of its tower by one allreduce of Horovod. "
                f"Received: {len(pairs)} gradients, {self._num_allreduces} allreduces"
            )
        variables = [variable for _, variable in pairs]
        bench = manager.benchmark_cnn
        with tf.device(bench.raw_devices[0]), tf.name_scope("tf_hips_sum"):
            values = [tf.convert_to_tensor(gradient) for gradient, _ in pairs]
            gradients = [
                Gradient(variable.op.name, tuple(value.shape.as_list()), value.dtype)
                for variable, value in zip(variables, values, strict=True)
            ]
            total = self._make_sum(gradients, bench.params.train_dir)
            sums = total(values, tf.compat.v1.train.get_global_step())
        _tell(f"tf_hips: {len(pairs)} gradients, {total.num_compressed} compressed")
        self._saved = None
        if total.variables and bench.params.train_dir is not None:
            self._saved = SavedState(total.variables, total.facts(), bench.params.max_ckpts_to_keep)
        return original(manager, [list(zip(sums, variables, strict=True))])

    def _make_sum(self, gradients: list[Gradient], train_dir: str | None) -> GraphSum:
        try:
            return GraphSum(gradients, self._options, train_dir)
        except ValueError as error:  # flags that do not go together, or with this number of ranks
            raise ConfigError(str(error)) from error

    def session(
        self,
        original: Callable[..., Any],
        bench: Any,
        session: Any,
        supervisor: Any,
        graph_info: Any,
        *args: Any,
        **more: Any,
    ) -> Any:
        """Runs all steps, with what encoding keeps beside upstream's checkpoints."""
        saved, self._saved = self._saved, None
        if saved is None:
            return original(bench, session, supervisor, graph_info, *args, **more)
        self._run = _Run(saved, bench.params, session, graph_info.global_step)
        try:
            with self._run.surrounding(supervisor):
                return original(bench, session, supervisor, graph_info, *args, **more)
        finally:
            self._run = None

    def one_step(
        self,
        original: Callable[..., Any],
        session: Any,
        fetches: Any,
        step: int,
        *args: Any,
        **more: Any,
    ) -> Any:
        """Makes one step; `step` is upstream's, from 0 after its warm-up."""
        if self._run is not None:
            self._run.begin_step()
        if primitives.size() == 1:
            result = original(session, fetches, step, *args, **more)
        else:
            with watchdog.waiting(_STEP):
                result = original(session, fetches, step, *args, **more)
        if self._run is not None:
            self._run.end_step(step + 1)
        return result


class _Run:
    """The steps of one session, and what is saved and restored in it."""

    def __init__(self, saved: SavedState, params: Any, session: Any, global_step: Any) -> None:
        self._saved = saved
        self._params = params
        self._session = session
        self._global_step = global_step
        self._has_begun = False

    @contextlib.contextmanager
    def surrounding(self, supervisor: Any) -> Iterator[None]:
        """While upstream makes its steps.

        Upstream saves on rank 0 alone; the others do what belongs to them at the same steps.
        """
        if primitives.rank() != 0:
            yield
            self._save()  # upstream has saved, on rank 0, when it was through
            return
        saver = supervisor.saver
        original = saver.save

        def save(*args: Any, **more: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self._save()
            else:
                _tell(
                    "tf_hips: a checkpoint of --save_model_secs has nothing of what encoding "
                    "keeps; those of --save_model_steps have"
                )
            return original(*args, **more)

        saver.save = save
        try:
            yield
        finally:
            saver.save = original

    def begin_step(self) -> None:
        """Restores, before the first step: the global step has been broadcast by then."""
        if self._has_begun:
            return
        self._has_begun = True
        step = self._step()
        if step > 0 and not self._saved.restore(self._session, self._params.train_dir, step):
            _tell(
                f"tf_hips: the checkpoint of step {step} has nothing of what encoding keeps for "
                f"{primitives.size()} ranks; it begins with zeros"
            )

    def end_step(self, num_steps: int) -> None:
        """After a step; `num_steps` have been made since upstream's warm-up."""
        every = self._params.save_model_steps
        if primitives.rank() != 0 and every and num_steps > 0 and num_steps % every == 0:
            self._save()

    def _save(self) -> None:
        self._saved.save(self._session, self._params.train_dir, self._step())

    def _step(self) -> int:
        return int(self._session.run(self._global_step))


@contextlib.contextmanager
def _wrapped(module: Any, path: str, hook: Callable[..., Any]) -> Iterator[None]:
    """While the context is open, calls of the function at `path` go through `hook`."""
    owner = module
    *outer, name = path.split(".")
    for one in outer:
        owner = getattr(owner, one, None)
    original = getattr(owner, name, None)
    if original is None:
        raise ConfigError(
            f"the scripts of --tf_cnn_benchmarks_dir must have {module.__name__}.{path}. Received: "
            f"{module.__file__} without it"
        )

    def wrapper(*args: Any, **more: Any) -> Any:
        return hook(original, *args, **more)

    is_own = name in vars(owner)
    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
