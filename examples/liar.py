# SPDX-License-Identifier: Apache-2.0
"""One of several parties sends wrong gradients; with a robust rule the others learn all the same.

    tf-hips run --parties 5 --workers 1 examples/liar.py
    tf-hips run --parties 5 --workers 1 --rule "multi_krum(f=1)" examples/liar.py

Party 0 sends the opposite of its gradients, as often as there are others, which undoes their steps.
The first command takes the mean of all, the second leaves out the one farthest from the others.
"""

import argparse

import digits
import keras

import tf_hips


def main() -> None:
    """Trains, and prints the accuracy on the held-out images."""
    parser = argparse.ArgumentParser(description="Train digits beside a party that lies.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=16, help="images per worker and step")
    parser.add_argument(
        "--honest", action="store_true", help="party 0 sends its true gradients, for comparison"
    )
    options = parser.parse_args()
    keras.utils.set_random_seed(0)
    train, test = digits.load()

    strategy = tf_hips.HierarchicalPS(compression="momentum(error_feedback(onebit))")
    rank, workers = strategy.global_rank, strategy.num_replicas_in_sync
    lies = rank == 0 and workers > 1 and not options.honest
    with strategy.scope():
        model = digits.build()
        model.compile(
            optimizer=keras.optimizers.SGD(0.1),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            loss_weights=float(1 - workers) if lies else None,
            metrics=["accuracy"],
        )
    shard = tf_hips.shard(train, options.batch_size, strategy=strategy)
    model.fit(shard, epochs=options.epochs, verbose=0)
    accuracy = model.evaluate(*test, len(test[0]), verbose=0, return_dict=True)["accuracy"]
    strategy.write_event("result", test_accuracy=float(accuracy))
    if rank == 0:
        print(f"{'one liar' if lies else 'no liar'}: test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
