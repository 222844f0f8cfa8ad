# SPDX-License-Identifier: Apache-2.0
"""Which backup a run goes on from.

Invariant: all workers that begin together take up the same one, or all of them none.
"""

from collections.abc import Callable

from tf_hips import log
from tf_hips.callbacks.folder import Backup, BackupFolder
from tf_hips.callbacks.handover import Epochs, fetch, meta_of
from tf_hips.callbacks.peers import Peers

# A job that has got another site than before ends here, as the new one has nothing to go on from.
_WITHOUT = (
    "Where one has none, or sites have changed: begin all from a saved model and with another "
    "directory of backups (docs/resume.md, other sites than before)"
)


class Choice:
    """The choice of all ranks; each of its steps is made on all of them.

    Attributes:
        is_back: whether it leads into a run that goes on, in which the others are elsewhere.
    """

    def __init__(
        self,
        peers: Peers,
        folder: BackupFolder,
        check: Callable[[Backup], None],
        num_steps: int | None = None,
        first_epoch: int = 0,
    ) -> None:
        """Chooses among the backups of a folder.

        Args:
            peers: of this rank.
            folder: of this party.
            check: raises where this rank cannot take a backup up.
            num_steps: of an epoch here; None: not known.
            first_epoch: of the `fit` that runs, alike in all parties.
        """
        self._peers = peers
        self._folder = folder
        self._check = check
        self._num_steps = num_steps
        self._first_epoch = first_epoch
        self.is_back = False

    def backup(self) -> Backup | None:
        """The newest backup that all parties have; the same on all workers.

        A party that comes back to a run that goes on takes up its own newest one.
        """
        listed = self._peers.on_first(
            lambda: [[one.number, one.epoch, one.step] for one in self._folder.backups()]
        )
        backups = [Backup(*one) for one in listed]
        if backups and self._take_place(backups[-1]):
            return backups[-1]
        fetched = self._fetch(backups[-1].number + 1 if backups else 1)
        if fetched is not None:
            return fetched
        if self._peers.has_rounds:
            return self._by_round(backups)
        everyone = self._peers.gather_from_all(
            [[one.epoch, one.step] for one in backups], "backups of this run"
        )
        if not any(everyone):
            return None
        common = [
            backup
            for backup in backups
            if all([backup.epoch, backup.step] in places for places in everyone)
        ]
        if not common:
            told = "; ".join(f"worker {number}: {places}" for number, places in enumerate(everyone))
            raise ValueError(
                "All parties must have a backup of the same step. Received [epoch, step] of each: "
                f"{told}. {_WITHOUT}"
            )
        return common[-1]

    def _by_round(self, backups: list[Backup]) -> Backup | None:
        """The newest backup of the newest round that all parties have one of.

        In a round of a loop parties train apart, and are rarely at the same step.
        """
        rounds = self._peers.on_first(
            lambda: [
                (meta_of(self._folder, one).get("place") or {}).get("round") for one in backups
            ]
        )
        everyone = self._peers.gather_from_whole_run(rounds, "backups of this run")
        if not any(everyone):
            return None
        common = set(rounds).intersection(*map(set, everyone)) - {None}
        if not common:
            told = "; ".join(f"worker {number}: {places}" for number, places in enumerate(everyone))
            raise ValueError(
                "All parties must have a backup of the same round; keep more of them. Received "
                f"rounds of each: {told}. {_WITHOUT}"
            )
        return backups[max(place for place, one in enumerate(rounds) if one == max(common))]

    def _take_place(self, backup: Backup) -> bool:
        """Comes back to the run that `backup` is of, if it goes on; the same on all ranks."""
        backups = self._peers.backups
        if backups is None:
            return False
        place = self._peers.on_first(lambda: meta_of(self._folder, backup).get("place"))
        if not backups.can_come_back(place):
            return False
        # Restored where it was made: a rank that cannot do that says so before others rely on it.
        self._peers.together(lambda: self._check(backup))
        backups.come_back(place)
        self.is_back = True
        return True

    def _fetch(self, number: int) -> Backup | None:
        """Takes up another party's newest backup, if that is the way into a run that goes on."""
        backups = self._peers.backups
        if backups is None or not backups.is_lacking():
            return None
        log.warning(
            "No backup here leads into the run that goes on. Another party's is fetched: what "
            "encoding had dropped here is lost, so the run will not end bit for bit as without it."
        )
        epochs = None
        if self._peers.has_rounds:
            epochs = Epochs(self._num_steps, self._first_epoch, self._peers.has_equal_steps)
        fetched = self._peers.on_first(lambda: fetch(self._folder, number, backups, epochs))
        backup = Backup(*fetched)
        try:
            if not self._take_place(backup):
                raise ValueError(
                    "it is of another run or another `fit`, or its rounds are kept no more"
                )
        except ValueError as error:
            raise ValueError(f"Another party's backup cannot be taken up here: {error}") from error
        self._peers.on_first(lambda: backups.note(meta_of(self._folder, backup)["place"]))
        return backup
