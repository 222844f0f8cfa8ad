# SPDX-License-Identifier: Apache-2.0
"""Stand-in for upstream's module of this name: its interface, code of our own.

A small network in a graph of TensorFlow 1, with all that our shim wraps or brings back. Batches
are functions of the rank and the global step, so a run that is resumed sees what it would have.
"""

import argparse
import collections
import time
import zlib

import numpy as np
import tensorflow.compat.v1 as tf
import variable_mgr

CLASSES = 10
# What no module of upstream can be imported without.
CELLS = {"lstm": tf.nn.rnn_cell.BasicLSTMCell, "gru": tf.nn.rnn_cell.GRUCell}

GraphInfo = collections.namedtuple("GraphInfo", ["fetches", "global_step", "local_init_op"])


def parse(arguments):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", default="trivial")
    parser.add_argument("--variable_update", default="parameter_server")
    parser.add_argument("--train_dir")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_batches", type=int, default=3)
    parser.add_argument("--init_learning_rate", type=float, default=0.05)
    parser.add_argument("--save_model_steps", type=int)
    parser.add_argument("--max_ckpts_to_keep", type=int, default=5)
    parser.add_argument("--use_fp16", action="store_true")
    parser.add_argument("--xla_compile", action="store_true")
    return parser.parse_args(arguments)


def setup(params):
    if params.variable_update == "horovod":
        import horovod.tensorflow as hvd

        hvd.init()
    return params


class BenchmarkCNN:
    def __init__(self, params):
        self.params = params
        self.raw_devices = ["/cpu:0"]
        self.dtype = tf.float16 if params.use_fp16 else tf.float32
        self.variable_mgr = variable_mgr.VariableMgrIndependent(self)

    def print_info(self):
        print(f"Model:       {self.params.model}")
        print("==========")

    def run(self):
        import horovod.tensorflow as hvd

        with tf.Graph().as_default():
            tf.set_random_seed(1234 + hvd.rank())
            graph_info = self._build_graph()
            is_chief = hvd.rank() == 0
            saver = tf.train.Saver(tf.global_variables(), save_relative_paths=True)
            broadcast = hvd.broadcast_global_variables(0)
            supervisor = tf.train.Supervisor(
                is_chief=True,
                logdir=self.params.train_dir if is_chief else None,
                local_init_op=graph_info.local_init_op,
                saver=saver if is_chief else None,
                global_step=graph_info.global_step,
                summary_op=None,
                save_model_secs=0,
            )
            with supervisor.managed_session(start_standard_services=False) as session:
                return self.benchmark_with_session(
                    session, supervisor, graph_info, None, broadcast, is_chief, None, None
                )

    def _build_graph(self):
        global_step = tf.train.get_or_create_global_step()
        with tf.name_scope("tower_0") as tower, tf.variable_scope("v0"):
            results = self.add_forward_pass_and_gradients(True, 0, 0, None, [], [])
        _, [gradients] = self.variable_mgr.preprocess_device_grads([results["gradvars"]])
        optimizer = tf.train.MomentumOptimizer(self.params.init_learning_rate, 0.5)
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS, tower)
        assert len(updates) == 2  # of batch normalisation
        fetches = {
            "average_loss": results["loss"],
            "train_op": tf.group(optimizer.apply_gradients(gradients), *updates),
        }
        with tf.control_dependencies([fetches["train_op"]]):
            fetches["inc_global_step"] = global_step.assign_add(1)
        return GraphInfo(fetches, global_step, tf.local_variables_initializer())

    def add_forward_pass_and_gradients(
        self,
        phase_train,
        rel_device_num,
        abs_device_num,
        input_processing_info,
        gpu_compute_stage_ops,
        gpu_grad_stage_ops,
    ):
        import horovod.tensorflow as hvd

        seed = tf.stack([tf.cast(tf.train.get_global_step(), tf.int32), hvd.rank()])
        shape = [self.params.batch_size, 8, 8, 3]
        images = tf.random.stateless_normal(shape, seed, dtype=self.dtype)
        labels = tf.random.stateless_uniform(shape[:1], seed, 0, CLASSES, tf.int32)

        def forward_pass_and_gradients():
            loss = tf.losses.sparse_softmax_cross_entropy(labels, self._network(images))
            # Gated: a variable of TensorFlow 1 could otherwise change while gradients of what comes
            # before it are still computed from it, and the numbers would depend on timing.
            gradients = tf.gradients(loss, tf.trainable_variables(), gate_gradients=True)
            return [
                loss,
                *(hvd.allreduce(one, average=False, device_dense="") for one in gradients),
            ]

        if self.params.xla_compile:
            loss, *gradients = tf.xla.experimental.compile(forward_pass_and_gradients)
        else:
            loss, *gradients = forward_pass_and_gradients()
        pairs = list(zip(gradients, tf.trainable_variables(), strict=True))
        return {"loss": loss, "gradvars": pairs}

    def _network(self, images):
        kernel = tf.get_variable("conv/kernel", [3, 3, 3, 8], self.dtype)
        hidden = tf.nn.conv2d(images, kernel, strides=1, padding="SAME")
        with tf.variable_scope("batchnorm0") as scope:
            layer = tf.layers.BatchNormalization(
                momentum=0.9, scale=True, epsilon=1e-3, fused=True, axis=3, _scope=scope
            )
            hidden = tf.nn.relu(layer.apply(hidden, training=True))
        hidden = tf.layers.flatten(tf.layers.average_pooling2d(hidden, 2, 2))
        return tf.cast(tf.layers.dense(hidden, CLASSES, name="dense"), tf.float32)

    def benchmark_with_session(
        self,
        sess,
        supervisor,
        graph_info,
        eval_graph_info,
        bcast_global_variables_op,
        is_chief,
        summary_writer,
        profiler,
    ):
        import horovod.tensorflow as hvd

        sess.run(bcast_global_variables_op)
        begun = int(sess.run(graph_info.global_step))
        num_steps = self.params.num_batches - begun // hvd.size()
        path = f"{self.params.train_dir}/model.ckpt"
        start = time.perf_counter()
        for step in range(num_steps):
            loss = benchmark_one_step(sess, graph_info.fetches, step, self.params.batch_size)
            print(f"{step + 1}\t{loss:.6f}\t{checksum(sess):08x}")
            every = self.params.save_model_steps
            if is_chief and every and (step + 1) % every == 0:
                supervisor.saver.save(sess, path, graph_info.global_step)
        elapsed = time.perf_counter() - start
        images = hvd.size() * num_steps * self.params.batch_size
        print(f"total images/sec: {images / elapsed:.2f}")
        if is_chief and self.params.train_dir:
            supervisor.saver.save(sess, path, graph_info.global_step)
        values = sess.run(tf.trainable_variables())
        print(f"finite: {all(np.isfinite(value).all() for value in values)}")


def checksum(sess):
    found = 0
    for value in sess.run(tf.trainable_variables()):
        found = zlib.crc32(value.tobytes(), found)
    return found


def benchmark_one_step(sess, fetches, step, batch_size):
    return sess.run(fetches)["average_loss"]
