# SPDX-License-Identifier: Apache-2.0
"""A party's connections to several global servers that share one model.

    join, model, presence, failed steps, leaving   every shard
    a round                                        every shard, all at once, each with its chunks
    gathers, first weights                         shard 0

A round is over when all shards have answered; one that has no chunk is asked, too, so that it knows
the round. When one fails, the exchanges of the others are ended and their connections kept: the
round may be tried again, as with one server.

Invariant: a run that ends at one shard ends at all. Each party that hears of it leaves the others
with that reason, and its next call says it.
"""

import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy.typing as npt

from tf_hips.config import Uplink
from tf_hips.errors import ConfigError, PeerError, ProtocolError, TfHipsError
from tf_hips.ps.client.backups import Give
from tf_hips.ps.client.client import Client
from tf_hips.ps.client.link import Link
from tf_hips.ps.client.passage import Passage, ReadWeights
from tf_hips.ps.client.views import Halt, Packets
from tf_hips.ps.client.welcome import Welcome, why_apart
from tf_hips.ps.terms.assignment import MAX_SHARDS, Shard
from tf_hips.ps.terms.tree import Guards, Leaves
from tf_hips.ps.terms.weights import Described
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.parcel import Held, Intake
from tf_hips.ps.transport.sockets import WireBytes

SEPARATOR = ","
_TURN_S = 0.2  # of waiting
# What servers of one run need not agree on: how far they are, and who they are.
_EACH_ITS_OWN = ("round", "newest", "session", "is_back", "oldest", "keeps_all")

_Result = TypeVar("_Result")
_OnError = Callable[[BaseException], object]


class ShardedClient:
    """What `Client` is, with several servers. Methods, threads and errors are the same."""

    def __init__(
        self,
        uplink: Uplink,
        run: str,
        workers: int,
        *,
        must_be_back: bool = False,
        leaves: Leaves = (),
        groups: int | None = None,
        guards: Guards = (),
    ) -> None:
        """Clients that have not connected yet.

        Args:
            uplink: where the servers are, in the order of their shards, and who this party is.
            run: identity of the run.
            workers: number of workers of this party.
            must_be_back: as for `Client`.
            leaves: as for `Client`.
            groups: as for `Client`.
            guards: as for `Client`.

        Raises:
            ConfigError: as for `Client`, or there are too many servers.
        """
        servers = [server.strip() for server in uplink.server.split(SEPARATOR)]
        if len(servers) > MAX_SHARDS:
            raise ConfigError(
                f"`server` must name at most {MAX_SHARDS} servers. Received: {len(servers)}"
            )
        self._servers = servers
        self._clients = [
            Client(
                dataclasses.replace(uplink, server=server),
                run,
                workers,
                Shard(place, len(servers)),
                must_be_back=must_be_back,
                leaves=leaves,
                groups=groups,
                guards=guards,
            )
            for place, server in enumerate(servers)
        ]
        self._lock = threading.Lock()
        self._ended_at: int | None = None  # the shard at which the run has ended
        self._is_leaving = False
        self._on_end: Callable[[], None] | None = None
        for place, client in enumerate(self._clients):
            client.on_end(functools.partial(self._hear, place))

    def join(
        self,
        compression: str,
        downlink: str,
        seed: int,
        rule: str | None = None,
        above: str | None = None,
    ) -> Welcome:
        """Joins the run at every shard and waits for all other parties; see `Client.join`.

        Raises:
            ProtocolError: the servers are not those of one run in the order of their shards, or as
                for `Client.join`.
            PeerError: as for `Client.join`, or a run that one server has restored is over at
                another; it is left, so that it ends at all.
        """
        # The run may end at one server while another has yet to answer.
        with self._calling("Join"):
            welcomes = self._join_all(
                lambda client: client.join(compression, downlink, seed, rule, above)
            )
        # Outside of it: another party that found the same and left is not the cause of this.
        self._check_one_run(welcomes)
        # A party that was killed may have been known to some of the servers only.
        return dataclasses.replace(
            welcomes[0],
            round=max(one.round for one in welcomes),
            newest=min(one.newest for one in welcomes),
            session=SEPARATOR.join(one.session for one in welcomes),
            is_back=any(one.is_back for one in welcomes),
            oldest=max(one.oldest for one in welcomes),
            keeps_all=all(one.keeps_all for one in welcomes),
        )

    def agree_model(self, shapes: Sequence[Sequence[int]], first_round: int = 0) -> None:
        """Tells every server the shapes of all gradients; see `Client.agree_model`."""
        with self._calling("AgreeModel"):
            self._all(lambda client: client.agree_model(shapes, first_round))

    def first_sync(self, weights: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Makes the weights of all parties those of child 0, by shard 0: `Client.first_sync`."""
        with self._calling("BeginSync"):
            return self._clients[0].first_sync(weights)

    def send_weights(self, what: Described, read: ReadWeights) -> bool:
        """Sends the first weights of the run to shard 0; see `Client.send_weights`."""
        with self._calling("BeginSync"):
            return self._clients[0].send_weights(what, read)

    def fetch_weights(
        self, what: Described, held: Callable[[], int], take: Callable[[bytes], object]
    ) -> None:
        """Fetches the first weights of the run from shard 0; see `Client.fetch_weights`."""
        with self._calling("BeginSync"):
            self._clients[0].fetch_weights(what, held, take)

    def backed_up(self, round: int, gather: int) -> None:
        """Tells every server where this party could come back to; see `Client.backed_up`."""
        with self._calling("BackedUp"):
            self._all(lambda client: client.backed_up(round, gather))

    def offer(self, give: Give | None) -> None:
        """As `Client.offer`, by shard 0."""
        self._clients[0].offer(give)

    def fetch_backup(self, intake: Intake) -> None:
        """As `Client.fetch_backup`, by shard 0."""
        with self._calling("WantBackup"):
            self._clients[0].fetch_backup(intake)

    def backup_messages(self, held: Held, workers: int) -> Iterator[bytes]:
        """As `Client.backup_messages`, by shard 0."""
        return self._clients[0].backup_messages(held, workers)

    def exchange(self, round: int, packets: Packets, weight: float | None = None) -> Packets:
        """Sends this party's packets of one round, returns the merged ones; see `Client.exchange`.

        The error that is raised is that of the server that failed first.
        """
        with self._calling("Exchange"):
            whole = self._clients[0].open_round(round, packets)
        self.transfer(whole, weight)
        return whole.result

    def transfer(self, passage: Passage, weight: float | None = None) -> None:
        """Exchanges the packets of one round with all servers, as they come; as `exchange`."""
        with self._calling("Exchange"):
            halts = [Halt() for _ in self._clients]
            tasks = [
                functools.partial(client.transfer, passage, weight, halt)
                for client, halt in zip(self._clients, halts, strict=True)
            ]

            def halt_all(_: BaseException) -> None:
                for halt in halts:
                    halt.set()

            _together(tasks, halt_all)

    @property
    def link(self) -> Link:
        """As of `Client`; where one server speaks for all it is shard 0's."""
        return self._clients[0].link

    @property
    def max_gather_bytes(self) -> int:
        """As of `Client`; gathers are shard 0's."""
        return self._clients[0].max_gather_bytes

    def gather(
        self,
        number: int,
        label: str,
        payload: wire.Buffer,
        go_on: Callable[[], object] | None = None,
    ) -> list[bytes | None]:
        """Sends bytes to all parties, returns those of all, by shard 0; see `Client.gather`."""
        with self._calling("Gather"):
            return self._clients[0].gather(number, label, payload, go_on)

    def failed(self, text: str) -> None:
        """Says that this party's last step ended with an error; see `Client.failed`.

        Every shard hears it: a party that waits for this one may wait at any of them.
        """
        self._all(lambda client: client.failed(text))

    def away(self, reason: str) -> None:
        """Says to every shard why this process ends; see `Client.away`."""
        with self._lock:
            self._is_leaving = True
        self._all(lambda client: client.away(reason))

    def leave(self, reason: str | None = None) -> None:
        """Leaves the run at every shard, also where one cannot be reached; see `Client.leave`."""
        with self._lock:
            self._is_leaving = True
        self._all(lambda client: client.leave(reason))

    def close(self) -> None:
        """Closes the connections without leaving the run."""
        for client in self._clients:
            client.close()

    def ended(self, method: str) -> TfHipsError | None:
        """As `Client.ended`, of the shard at which the run has ended."""
        place = self._ended_at
        return self._clients[place].ended(method) if place is not None else None

    def on_end(self, tell: Callable[[], None]) -> None:
        """From now on `tell` is called, by any thread, when the run is heard to have ended."""
        self._on_end = tell

    def wire_bytes(self) -> WireBytes:
        """Bytes that crossed the sockets to all shards so far, closed connections included."""
        return sum((client.wire_bytes() for client in self._clients), WireBytes())

    def _all(
        self,
        call: Callable[[Client], _Result],
        on_error: _OnError | None = None,
    ) -> list[_Result]:
        return _together([functools.partial(call, client) for client in self._clients], on_error)

    def _join_all(self, join: Callable[[Client], Welcome]) -> list[Welcome]:
        """What all servers answer; leaves those that count on this party where not all do."""
        try:
            # Before any server counts on this party, each must be the one that it is taken for.
            self._all(lambda client: client.ask_terms(), lambda _: self.close())
            return self._all(join, self._give_up_join)
        except BaseException as error:
            self._give_up_join(error)
            raise

    def _give_up_join(self, error: BaseException) -> None:
        if any(client.is_back for client in self._clients):
            self.close()  # the run goes on, and waits for another process
        else:
            self.leave(
                f"It could not join all servers of the run: {str(error) or type(error).__name__}"
            )

    def _check_one_run(self, welcomes: Sequence[Welcome]) -> None:
        """Raises where the servers that were joined are not of one run; leaves them then."""
        try:
            self._compare(welcomes)
        except ProtocolError as error:
            self._give_up_join(error)
            raise
        reason = why_apart(welcomes, self._servers)
        if reason is not None:
            self.leave(reason)  # who only closed would be known to all when it comes again
            raise PeerError(reason)

    def _compare(self, welcomes: Sequence[Welcome]) -> None:
        """Raises ProtocolError where servers were told different things."""
        first = welcomes[0]
        for server, other in zip(self._servers, welcomes, strict=True):
            for field in dataclasses.fields(Welcome):
                one, two = getattr(first, field.name), getattr(other, field.name)
                if field.name not in _EACH_ITS_OWN and one != two:
                    raise ProtocolError(
                        f"All servers of a run must agree on `{field.name}`. Received: {one} from "
                        f"{self._servers[0]} and {two} from {server}"
                    )

    @contextlib.contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        """An error after the end of the run says how it ended, whichever server is called."""
        self._check(method)
        try:
            yield
        except TfHipsError:
            self._check(method)  # the connection that failed was closed because of that
            raise

    def _check(self, method: str) -> None:
        error = self.ended(method)
        if error is not None:
            raise error

    def _hear(self, place: int) -> None:
        """The run has ended at a shard: the others are left with its reason."""
        with self._lock:
            if self._is_leaving or self._ended_at is not None:
                return
            self._ended_at = place
        if self._on_end is not None:
            self._on_end()
        reason = str(self._clients[place].ended("Watch"))
        others = [client for client in self._clients if client is not self._clients[place]]
        tasks = [functools.partial(client.leave, reason) for client in others]
        # The thread that calls is a connection's own, and must not wait for others.
        with contextlib.suppress(RuntimeError):  # the process ends, and leaves them itself
            threading.Thread(
                target=_together, args=(tasks,), name="tf_hips-leave", daemon=True
            ).start()


Connection = Client | ShardedClient


def connect(
    uplink: Uplink,
    run: str,
    workers: int,
    *,
    must_be_back: bool = False,
    leaves: Leaves = (),
    groups: int | None = None,
    guards: Guards = (),
) -> Connection:
    """The client of a party: of one server, or of all that share the model.

    Args:
        uplink: where the servers are, and who this party is.
        run: identity of the run.
        workers: number of workers of this party.
        must_be_back: as for `Client`.
        leaves: as for `Client`.
        groups: as for `Client`.
        guards: as for `Client`.

    Raises:
        ConfigError: as for `Client`.
    """
    kind = ShardedClient if SEPARATOR in uplink.server else Client
    return kind(
        uplink,
        run,
        workers,
        must_be_back=must_be_back,
        leaves=leaves,
        groups=groups,
        guards=guards,
    )


def _together(
    tasks: Sequence[Callable[[], _Result]],
    on_error: _OnError | None = None,
) -> list[_Result]:
    """Runs tasks at the same time, each in a thread of its own, and waits for all of them.

    Args:
        tasks: what to do.
        on_error: called with the error, when the first of them fails or the caller is
            interrupted; it makes the others end.

    Returns:
        Their results; raises the error that came first.
    """
    results: dict[int, _Result] = {}
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(place: int) -> None:
        try:
            results[place] = tasks[place]()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            done.put(error)
        else:
            done.put(None)

    for place in range(len(tasks)):
        try:
            threading.Thread(target=run, args=(place,), name="tf_hips-shard", daemon=True).start()
        except RuntimeError:
            run(place)  # an interpreter that ends starts no more threads: one after the other, then
    first: BaseException | None = None
    try:
        for _ in tasks:
            error = _heard(done)
            if error is not None and first is None:
                first = error
                if on_error is not None:
                    on_error(error)
    except BaseException as error:
        if on_error is not None:
            on_error(error)
        raise
    if first is not None:
        raise first
    return [results[place] for place in range(len(tasks))]


def _heard(done: "queue.SimpleQueue[BaseException | None]") -> BaseException | None:
    # In turns: Python does not hear a signal that comes when a wait is about to begin.
    while True:
        with contextlib.suppress(queue.Empty):
            return done.get(timeout=_TURN_S)
