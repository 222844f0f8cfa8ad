# SPDX-License-Identifier: Apache-2.0
"""Parties of a loop train apart, and yet give each other their backups when one's disk is lost."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import disturbed
from tf_hips import log

pytestmark = pytest.mark.tf

TRAIN = """
strategy = tf_hips.HierarchicalPS("fp32")
rank = strategy.global_rank


class Trouble(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and int(model.optimizer.iterations) == int(sys.argv[3]) and once("killed"):
            shutil.rmtree(folder / "backup" / "party1")
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
loop = tf_hips.FedAvg(model, strategy, local_steps=4)
x = np.random.default_rng(rank).normal(size=((160, 88)[rank], 8)).astype("float32")
backup = tf_hips.callbacks.BackupAndRestore(folder / "backup", save_freq=eval(sys.argv[4]))
loop.fit(
    x, x[:, :2], batch_size=8, shuffle=False, epochs=3, verbose=0, callbacks=[Trouble(), backup]
)
print("END", tf_hips.fingerprint(model), flush=True)
print("STEPS", int(model.optimizer.iterations), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_party_of_a_loop_takes_anothers_backup(tmp_path: Path) -> None:
    undisturbed, _ = disturbed.train(tmp_path / "undisturbed", TRAIN, "undisturbed", "0", "4")
    assert len(undisturbed) == 1
    # The newest backup is one where both have the same weights, and nothing was dropped: 12 steps,
    # of which this party's first epoch had 11; or the end of the other one's first epoch.
    for killed_at, save_freq, place in [
        (15, "4", "step 1 of epoch 2"),
        (25, "'epoch'", "step 9 of epoch 2"),
    ]:
        folder = tmp_path / str(killed_at)
        ends, printed = disturbed.train(
            folder,
            TRAIN,
            "disturbed",
            str(killed_at),
            save_freq,
            options=("--max-restarts", "1"),
        )
        assert ends == undisturbed
        told = "No backup here leads into the run that goes on. Another party's is fetched"
        assert told in printed
        assert f"Goes on at {place}" in printed
        assert "[party1/worker0] STEPS 33\n" in printed
        events = log.read_events(folder / "logs")
        assert [one["site"] for one in events if one["event"] == "fetched_backup"] == ["party1"]


@pytest.mark.parametrize("waits", [False, True])
def test_a_party_in_a_local_phase_gives_and_wants_backups(waits: bool) -> None:
    """Where parties wait for nobody they have other weights, and there is nothing to give."""
    from tf_hips.strategies.backups import PartyBackups
    from tf_hips.strategies.connected import ConnectedStrategy
    from tf_hips.strategies.loan import PARTY, Loan

    class Strategy(ConnectedStrategy):
        loan, _is_closed = None, False

        def __init__(self) -> None:
            self.rule = SimpleNamespace(is_asynchronous=not waits)
            self.welcome = SimpleNamespace(is_back=True, keeps_all=False)
            self._sums: dict[object, object] = {}
            self.offered: list[object] = []
            self.client = SimpleNamespace(offer=self.offered.append)

    strategy = Strategy()
    loan = Loan.__new__(Loan)
    loan._strategy, loan._apart = strategy, PARTY
    strategy.loan = loan
    backups = PartyBackups(strategy)
    assert backups.is_lacking() == waits
    backups.offer(Path)
    assert len(strategy.offered) == waits
    assert loan.apart == PARTY
