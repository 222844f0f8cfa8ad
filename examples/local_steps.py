# SPDX-License-Identifier: Apache-2.0
"""Parties train for some steps on their own between two meetings: federated averaging (FedAvg).

    tf-hips run --parties 2 --workers 1 --log-dir log examples/local_steps.py --local-steps 10
    tf-hips summary log            accuracy, and what crossed the slow tier

Each party sends how far it has moved its weights since they met, with one bit per element; what a
bit cannot say is carried over to the next meeting.
"""

import argparse

import digits
import keras

import tf_hips


def main() -> None:
    """Trains, and prints the accuracy on the held-out images."""
    parser = argparse.ArgumentParser(description="Train digits by federated averaging.")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16, help="images per worker and step")
    parser.add_argument("--local-steps", type=int, default=10, help="steps between two meetings")
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    train, test = digits.load()

    strategy = tf_hips.HierarchicalPS(compression="error_feedback(onebit)")
    with strategy.scope():
        model = digits.build()
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    loop = tf_hips.FedAvg(model, strategy, local_steps=options.local_steps)
    shard = tf_hips.shard(train, options.batch_size, strategy=strategy)
    loop.fit(shard, epochs=options.epochs, verbose=2 if strategy.global_rank == 0 else 0)
    accuracy = model.evaluate(*test, len(test[0]), verbose=0, return_dict=True)["accuracy"]
    fingerprint = tf_hips.fingerprint(model)
    strategy.write_event("result", test_accuracy=float(accuracy), fingerprint=fingerprint)
    print(f"worker {strategy.global_rank}: test accuracy {accuracy:.4f}, weights {fingerprint}")


if __name__ == "__main__":
    main()
