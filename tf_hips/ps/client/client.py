# SPDX-License-Identifier: Apache-2.0
"""The child's end of the protocol: join, agree on the model, first synchronisation, rounds, leave.

Calls go over a `link`, which connects again where a connection breaks. Only what the other side
lacks is sent again: the server drops what it has had, so a round counts once however often its
bytes travel.

A client waits for the others at least as long as the server does, so it is the server that gives up
first and says whom it has waited for. Rounds and the first synchronisation may take as long as
bytes move: a deadline is one for the time in which nothing does, so it need not know how fast a
link is.

A client is used by one thread at a time; `leave` and `close` may come from another one and end the
call in progress.
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from tf_hips import log
from tf_hips.config import Uplink
from tf_hips.errors import ENDED, ConfigError, PeerError, ProtocolError, TfHipsError
from tf_hips.ps.client.backups import Backups, Give
from tf_hips.ps.client.exchange import Exchange
from tf_hips.ps.client.failures import detail
from tf_hips.ps.client.link import Link
from tf_hips.ps.client.passage import Passage, ReadWeights, read_terms
from tf_hips.ps.client.sketch import Fixed, Hearing
from tf_hips.ps.client.transfers import Transfers
from tf_hips.ps.client.views import Agreed, Halt, Packets, Round
from tf_hips.ps.client.vote import Ballot
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.rounds.gather import to_packet, too_long
from tf_hips.ps.security import tls
from tf_hips.ps.terms.assignment import WHOLE, Shard
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.tree import Guards, Leaves
from tf_hips.ps.terms.weights import Described, Refill, cut_weights, kind_of
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.parcel import Held, Intake
from tf_hips.ps.transport.sockets import WireBytes, is_loopback, split_address

# Seconds that a client waits for longer than the server: its answer has to travel.
_MARGIN_S = 10.0
_AWAY_S = 2.0  # who waits learns what has become of it anyway
_LEAVE_S = 10.0
# The same of a server that keeps its runs: started again, it must hear who has left.
_LEAVE_DURABLE_S = 60.0
# What a last word fails with; a `ValueError` is gRPC's for a channel that another call has lost.
_UNHEARD = (grpc.RpcError, grpc.FutureCancelledError, TfHipsError, ValueError)
# Of a reason or an error, which may quote an array or a graph; a server takes no more of it.
_MOST_CHARACTERS = 2000


class Client:
    """A party's connection to the server above it, or to one of several that share the model.

    Attributes:
        link: what calls of a module of its own go over, beside the calls here.
        wait_s: how long a call waits that the server answers when others have come.
    """

    def __init__(
        self,
        uplink: Uplink,
        run: str,
        workers: int,
        shard: Shard = WHOLE,
        *,
        must_be_back: bool = False,
        leaves: Leaves = (),
        groups: int | None = None,
        guards: Guards = (),
    ) -> None:
        """A client that has not connected yet.

        Args:
            uplink: where the server is, and who this party is.
            run: identity of the run.
            workers: number of workers of this party.
            shard: which of how many servers it must be.
            must_be_back: whether it joins no run but one that is not over, as one that is started
                again.
            leaves: of a party server those below it by path, which have `workers` in all.
            groups: of a party server how many groups of these have batches of their own; None:
                each worker has.
            guards: of a party server its own and those of the servers below it.

        Raises:
            ConfigError: the address or a name is no such thing, a certificate cannot be read or is
                another's, or plain text is asked for beyond loopback.
        """
        try:
            address = split_address(uplink.server)
            wire.check_name("site", uplink.site)
            wire.check_name("run", run)
        except ValueError as error:
            raise ConfigError(f"The uplink is wrong. {error}") from error
        if uplink.tls is None and not is_loopback(address[0]):
            raise ConfigError(
                f"Plain text is for loopback only: `uplink.tls` must be set. Received: "
                f"server={uplink.server!r}"
            )
        credentials = tls.channel_credentials(uplink.tls) if uplink.tls is not None else None
        self._uplink = uplink
        self._workers = workers
        self._shard = shard
        self._must_be_back = must_be_back
        self._leaves = leaves
        self._groups = groups
        self._guards = guards
        # Goes with every call, so it is short: it only tells this process from one that was, or is
        # by mistake, the same site's.
        self._process = uuid.uuid4().hex[:8]
        self.link = Link(uplink, address, credentials, run, self._process)
        self._transfers = Transfers(self.link)
        self.wait_s = self._join_s = uplink.deadline_s
        self._backups = Backups(self.link)
        self._max_gather_bytes = 0
        self._is_durable = False
        self._chunks: tuple[int, ...] = ()  # of the model, at this server
        self._is_synced = False
        self._welcome: Welcome | None = None
        self._is_joining = False
        self._agreed: Agreed | None = None
        self._votes_by_digest = False

    def join(
        self,
        compression: str,
        downlink: str,
        seed: int,
        rule: str | None = None,
        above: str | None = None,
    ) -> Welcome:
        """Joins the run and waits for all other parties. A client that fails to is closed.

        Args:
            compression: text of the compressor of the way up, such as `error_feedback(onebit)`.
            downlink: text of the compressor of the way down, or `same`.
            seed: seed of the run, equal at all parties.
            rule: text of the update rule, such as `fedavg`; None: the server's, or `sum`.
            above: text of the compressor of the server's own way up, if it has a server above it
                and was told none; None: for sums, the one of this way up.

        Raises:
            ProtocolError: the server or another party wants something else.
            PeerError: the server cannot be reached or refuses this party, or another party did not
                come.
        """
        try:
            self._tell_waits(self.ask_terms())
            # The server may count on this party before the answer is here: `leave` tells it then.
            self._is_joining = True
            return self._join(compression, downlink, seed, rule, above)
        except BaseException:
            self.close()  # gRPC waits for a channel left open when the process ends, for ever
            raise
        finally:
            self._is_joining = False

    def ask_terms(self) -> list[str]:
        """Hears what the server was told, as far as a party must know it; `join` asks by itself.

        Returns:
            The sites that have yet to join.

        Raises:
            ProtocolError: it is another shard than this client was told.
            PeerError: the server cannot be reached or refuses this party.
        """
        deadline_s = self._uplink.deadline_s
        terms = read_terms(self.link.control("Terms", b"", deadline_s))
        self._shard.check(self._uplink.server, terms["shard"])
        if self._must_be_back and terms["is_over"]:
            raise PeerError(f"Server {self._uplink.server}: {ENDED}No process can come back to it.")
        self.link.follow(terms["lost_after_s"])
        self._is_durable = terms["is_durable"]
        self._max_gather_bytes = terms["max_gather_bytes"]
        self.wait_s = max(deadline_s, terms["round_timeout_s"] + _MARGIN_S)
        self._join_s = max(deadline_s, terms["join_timeout_s"] + _MARGIN_S)
        return [str(site) for site in terms["absent"]]

    def _tell_waits(self, absent: Sequence[str]) -> None:
        """Says once whom this party waits for; of several servers the first one is asked."""
        others = [site for site in absent if site != self._uplink.site]
        if others and self._shard.index == 0:
            log.news("Connected to %s, waiting for %s", self._uplink.server, ", ".join(others))

    def _join(
        self, compression: str, downlink: str, seed: int, rule: str | None, above: str | None
    ) -> Welcome:
        request = wire.to_json(
            workers=self._workers,
            compression=compression,
            downlink=downlink,
            seed=seed,
            rule=rule,
            leaves=self._leaves or None,
            groups=self._groups,
            above=above,
            guards=self._guards or None,
        )
        fields = wire.from_json(
            self.link.control("Join", request, self._join_s),
            child=int,
            parties=list,
            workers=list,
            compression=str,
            downlink=str,
            seed=int,
            rule=str,
            round=int,
            newest=int,
            session=str,
            is_back=bool,
            oldest=int,
            keeps_all=bool,
            votes=(str, type(None)),
            first_group=int,
            groups=int,
            robust=(str, type(None)),
            quorum=(str, type(None)),
            paths=list,
            guards=list,
        )
        self._welcome = Welcome.from_fields(fields)
        votes = self._welcome.voting
        self._votes_by_digest = votes is not None and votes.is_by_digest
        self.link.watch()
        return self._welcome

    def agree_model(self, shapes: Sequence[Sequence[int]], first_round: int = 0) -> None:
        """Tells the server the shapes of all gradients, in order of position.

        Args:
            shapes: of the gradients.
            first_round: number of the first round, equal at all parties; above 0 in a run that goes
                on after a stop.

        Raises:
            ProtocolError: the model is too large for the server, or another party's differs, or its
                first round does; names the first mismatch.
        """
        welcome = self._joined()
        model = Model(tuple(tuple(int(size) for size in shape) for shape in shapes))
        request = wire.to_json(shapes=model.shapes, round=first_round)
        self.link.control("AgreeModel", request, self.wait_s)
        self._agreed = Agreed(
            model, model.compressor(welcome.compression), model.compressor(welcome.downlink)
        )
        self._chunks = self._shard.chunks(model)

    def backed_up(self, round: int, gather: int) -> None:
        """Says that this party could come back to `round` and `gather`.

        The server keeps what that needs, and forgets what is older.

        Args:
            round: the next round at the moment of the backup.
            gather: the next gather.

        Raises:
            PeerError: the server cannot be reached.
        """
        session = self._joined().session
        request = wire.to_json(session=session, round=round, number=gather)
        self.link.control("BackedUp", request, self.wait_s)

    def offer(self, give: Give | None) -> None:
        """From now on gives a backup of this party to those that have lost theirs.

        Args:
            give: yields the messages of a `parcel`, called by another thread; None: nothing more.
        """
        self._backups.offer(give)

    def fetch_backup(self, intake: Intake) -> None:
        """Fetches the newest backup of another party of as many workers.

        Args:
            intake: takes it.

        Raises:
            PeerError: no party has one, or it cannot be reached.
            ProtocolError: what came is damaged, or does not fit here.
        """
        self._joined()
        self._backups.fetch(intake, self._workers, self.wait_s)

    def backup_messages(self, held: Held, workers: int) -> Iterator[bytes]:
        """The same as it comes, for a party of `workers` workers that has `held` of it."""
        self._joined()
        return self._backups.stream(held, workers)

    def first_sync(self, weights: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Makes the weights of all parties those of child 0.

        Args:
            weights: all weights, of any types and shapes, equal at all parties but for the values.

        Returns:
            The weights of child 0, same types and shapes: of child 0 its own arrays.

        Raises:
            ValueError: a weight holds Python objects.
            ProtocolError: types or shapes differ, or are too large for the server; names the first
                mismatch.
        """
        welcome = self._joined()
        if self._is_synced:
            raise ProtocolError("`first_sync` must be called once in a run.")
        arrays = [np.ascontiguousarray(value) for value in weights]
        total = sum(value.nbytes for value in arrays)
        # NumPy makes at least one dimension of none, so shapes are those of `weights`.
        shapes = [np.shape(value) for value in weights]
        kinds = [kind_of(value.dtype, shape) for value, shape in zip(arrays, shapes, strict=True)]
        fetches = welcome.child != 0
        if not fetches:
            fetches = self.send_weights(
                (tuple(kinds), total), lambda held: cut_weights(arrays, held)
            )
        if not fetches:
            return [np.asarray(value) for value in weights]
        found: list[npt.NDArray[Any]] = []
        types = [value.dtype for value in arrays]
        refill = Refill(zip(types, shapes, strict=True), found.append)
        self.fetch_weights((tuple(kinds), total), lambda: refill.held, refill.take)
        return found

    def send_weights(self, what: Described, read: ReadWeights) -> bool:
        """Sends the first weights of the run; for child 0.

        Args:
            what: kinds and bytes of the weights.
            read: gets a position, yields the bytes from there on as they come.

        Returns:
            Whether they must be fetched instead: the process before this one has sent them.

        Raises:
            ProtocolError: as for `first_sync`.
        """
        fetches = self._transfers.send_weights(what, read, self.wait_s)
        self._is_synced = not fetches
        return fetches

    def fetch_weights(
        self, what: Described, held: Callable[[], int], take: Callable[[bytes], object]
    ) -> None:
        """Fetches the first weights of the run.

        Args:
            what: kinds and bytes of the weights.
            held: how many bytes are here.
            take: gets the bytes that follow them.

        Raises:
            ProtocolError: as for `first_sync`.
        """
        self._transfers.fetch_weights(what, held, take, self.wait_s)
        self._is_synced = True

    def exchange(self, round: int, packets: Packets, weight: float | None = None) -> Packets:
        """Sends this party's packets of one round, returns the merged ones.

        Args:
            round: the round; the first is that of `agree_model`, each next one is one more.
            packets: uint8 [bytes], all chunk packets of the model, tensors in order; of a warm-up
                those of the stage of `round`.
            weight: what this party stands for in a mean, such as its number of samples; None: 1.
                Only with rules that take a mean.

        Returns:
            uint8 [bytes], all chunk packets of the merged gradients, encoded with the downlink's
            compressor, again the stage of `round`.

        Raises:
            PacketError: the server refuses a packet; it names the tensor.
            NonFiniteError: a packet, or the sum of all, holds NaN or an infinity.
            ToleranceError: a robust rule has fewer rows than it needs.
            PeerError: the server cannot be reached, or another party did not deliver or has left.
        """
        whole = self.open_round(round, packets)
        self.transfer(whole, weight)
        return whole.result

    def open_round(self, round: int, packets: Packets) -> Round:
        """What `transfer` works on, after a look at the packets; as for `exchange`."""
        return self.agreed.open_round(round, packets)

    @property
    def agreed(self) -> Agreed:
        """What all parties have agreed on.

        Raises:
            ProtocolError: they have not.
        """
        if self._agreed is None:
            raise ProtocolError("`agree_model` must come before `exchange`.")
        return self._agreed

    def transfer(
        self, passage: Passage, weight: float | None = None, halt: Halt | None = None
    ) -> None:
        """Exchanges what this client's server holds of a round.

        Args:
            passage: the round; other clients may transfer theirs at the same time.
            weight: as for `exchange`.
            halt: by which another thread may end it.

        Raises:
            PeerError: it was ended, or as for `exchange`.
        """
        number, is_here = passage.number, frozenset(self._chunks)
        down = self.agreed.downlink_bytes(number)
        welcome = self._joined()
        exchange = Exchange(
            self.link,
            self._uplink.server,
            passage,
            self._chunks,
            [size * (chunk in is_here) for chunk, size in enumerate(down)],
            Fixed(passage) if isinstance(passage, Hearing) else self._ballot(passage),
            said=() if weight is None else ((wire.WEIGHT_KEY, repr(float(weight))),),
            # What the process before this one has delivered need not travel again.
            is_begun=welcome.is_back and number <= welcome.newest,
            halt=halt if halt is not None else Halt(),
        )
        self.link.persist("Exchange", self.wait_s, exchange.attempt)

    def _ballot(self, passage: Passage) -> Ballot:
        return Ballot(self._votes_by_digest, passage, self._chunks)

    @property
    def max_gather_bytes(self) -> int:
        """Greatest length of a payload in bytes, as the server says; 0 before `join`."""
        return self._max_gather_bytes

    def gather(
        self,
        number: int,
        label: str,
        payload: wire.Buffer,
        go_on: Callable[[], object] | None = None,
    ) -> list[bytes | None]:
        """Sends this party's bytes to all parties, returns those of all.

        Args:
            number: the gather; the first is 0, each next one is one more. One that failed may be
                asked for again.
            label: what the bytes are, the same at all parties; 1 to 1000 bytes.
            payload: any bytes, none included.
            go_on: called when the server says that others go on, if given.

        Returns:
            The payloads of all parties, in child order; None of those without which the server has
            closed the gather, which may be this one.

        Raises:
            ProtocolError: the payload is too long for the server, or the parties do different
                things at this point, which ends the run for all.
            PeerError: the server cannot be reached, or another party did not come or has left.
        """
        num_parties = len(self._joined().parties)
        limit = self._max_gather_bytes
        if len(payload) > limit:
            raise ProtocolError(too_long(len(payload), limit))
        packet = memoryview(to_packet(label, payload))
        return self._transfers.gather(number, packet, limit, num_parties, self.wait_s, go_on)

    def failed(self, text: str) -> None:
        """Says that this party's last step ended with an error, which its script may have caught.

        The next call of this party ends that. If others wait for the party and none comes for some
        10 s, the run ends for all with `text`. A server that cannot be reached is no error: the
        next call says what is wrong.
        """
        if self._welcome is None or self.link.is_closed or self.link.ended is not None:
            return
        try:
            timeout_s = min(self._uplink.deadline_s, _LEAVE_S)
            self.link.once("Failed", wire.to_json(text=text[:_MOST_CHARACTERS]), 0, timeout_s)
        except _UNHEARD as error:
            log.warning(
                "That a step failed was not heard by %s: %s", self._uplink.server, detail(error)
            )

    def away(self, reason: str) -> None:
        """Says why this process ends where another one may take its place; closes the connection.

        The others hear it, and for how long they wait. A server that cannot be reached finds that
        the connection has ended.
        """
        try:
            if self._welcome is not None and not self.link.is_closed and self.link.ended is None:
                timeout_s = min(self._uplink.deadline_s, _AWAY_S)
                request = wire.to_json(reason=reason[:_MOST_CHARACTERS])
                self.link.once("Away", request, 0, timeout_s)
        except _UNHEARD as error:
            log.warning(
                "Why this process ends was not heard by %s: %s", self._uplink.server, detail(error)
            )
        finally:
            self.close()

    def leave(self, reason: str | None = None) -> None:
        """Leaves the run and closes the connection; with a reason, the run ends for all.

        A server that is gone by then is no error: the run is over either way. A link that is away
        for a moment would pass for a party that is lost, so it is tried for 10 s while somebody
        listens there, and for a minute where the server keeps its runs: it may be starting again. A
        second call does nothing.
        """
        try:
            is_heard = not self.link.is_closed and self.link.ended is None
            if is_heard and (self._welcome is not None or self._is_joining):
                timeout_s = min(self._uplink.deadline_s, _LEAVE_S)
                request = wire.to_json(reason=reason and reason[:_MOST_CHARACTERS])
                comes_back = self._is_durable and self._welcome is not None
                if comes_back:
                    timeout_s = max(timeout_s, _LEAVE_DURABLE_S)
                self.link.control("Leave", request, timeout_s, comes_back=comes_back)
        except _UNHEARD as error:
            log.warning(
                "Leaving the run was not heard by %s: %s", self._uplink.server, detail(error)
            )
        finally:
            self.close()

    def close(self) -> None:
        """Closes the connection without leaving the run."""
        self.link.close()

    def wire_bytes(self) -> WireBytes:
        """Bytes that crossed this client's sockets so far, closed connections included."""
        return self.link.meter.read()

    @property
    def is_back(self) -> bool:
        """Whether the server has taken this process for one that comes back."""
        return self._welcome is not None and self._welcome.is_back

    def ended(self, method: str) -> TfHipsError | None:
        """What `method` raises after the run has ended; None: it has not, or was not heard to."""
        return self.link.end_error(method) if self.link.ended is not None else None

    def on_end(self, tell: Callable[[], None]) -> None:
        """From now on `tell` is called, by any thread, when this client hears of the run's end."""
        self.link.on_end = tell

    def _joined(self) -> Welcome:
        if self._welcome is None:
            raise ProtocolError("`join` must come before anything else.")
        return self._welcome
