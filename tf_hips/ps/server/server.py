# SPDX-License-Identifier: Apache-2.0
"""A server: one session after another, from the first that listens to the end.

With an uplink it is the server of one party of another server (`uplink`), else the global server.
What its children call is in `calls.service`.

A server whose children have all left is ready for them to come again, unless it serves one run only
(`once`). One with a `state_dir` goes on with the run that it finds there (`durable`), and answers
when what it has accepted is durable. Imports no TensorFlow: a server starts in about a second.
"""

import concurrent.futures
import functools
import threading
from typing import Any

import grpc

from tf_hips import log
from tf_hips.config import Tls
from tf_hips.errors import ENDED, ConfigError, PeerError, ProtocolError
from tf_hips.ps.calls.admission import Admission
from tf_hips.ps.calls.joint import Judge, Lead, judge_of
from tf_hips.ps.calls.service import Calls
from tf_hips.ps.calls.traffic import Traffic
from tf_hips.ps.calls.wait_limits import Waits
from tf_hips.ps.client.shards import connect
from tf_hips.ps.disk.durable import Keeper
from tf_hips.ps.rules import why_weak
from tf_hips.ps.security import tls
from tf_hips.ps.security.diagnosis import check_server
from tf_hips.ps.security.expiry import Expiry, Own, text_of
from tf_hips.ps.server.listening import SERVER_OPTIONS, are_known, check_free
from tf_hips.ps.server.status import Metrics, snapshot
from tf_hips.ps.server.uplink import Upper
from tf_hips.ps.session.session import Session
from tf_hips.ps.session.settings import ServerConfig, terms_of
from tf_hips.ps.session.waiting import STOPPED
from tf_hips.ps.transport import keepalive, wire
from tf_hips.ps.transport.calls_at_once import MAX_CALLS

# For children to hear why a run has ended, before a server of one run stops.
_GRACE_S = 10.0


class Server:
    """A server, listening once started."""

    def __init__(self, config: ServerConfig) -> None:
        """A server that does not listen yet."""
        self._config = config
        self._terms = terms_of(config)
        self._lock = threading.Lock()
        self._keeper: Keeper | None = None
        self._stopped = threading.Event()
        self._role, site = tls.SERVER_ROLE, tls.SERVER_ROLE
        if config.uplink is not None:
            self._role, site = tls.PARTY_SERVER_ROLE, config.uplink.site
        self._events = log.EventLog(
            config.log_dir,
            run=config.run,
            role=self._role,
            site=site,
            rank=self._terms.shard.index,
        )
        self._session = Session(self._terms, tell=self._events.write_later)
        self._waits = Waits(config)
        self._upper: Upper | None = None
        self._judge: Judge | None = None
        expiry = Expiry(self._tell_end)
        self._own = Own(config.tls, expiry, self._role)
        self._admission = Admission(config, self._tell, expiry)
        self._traffic = Traffic(len(config.parties))
        self._metrics: Metrics | None = None
        self._server: grpc.Server | None = None
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The port the server listens at; 0 before `start`."""
        return self._port

    @property
    def metrics_address(self) -> str | None:
        """`host:port` of the metrics; None: there are none."""
        return self._metrics.address if self._metrics is not None else None

    @property
    def address(self) -> str:
        """`host:port` the server listens at."""
        return f"{self._config.bind.rpartition(':')[0]}:{self._port}"

    def start(self) -> None:
        """Starts to listen.

        Raises:
            ConfigError: the address is taken or not this machine's, or a certificate cannot be
                used, or another server holds the state.
            StateError: the state is damaged, or another run's.
            PeerError: the state cannot be written.
        """
        if self._config.tls is not None:
            self._check_identity(self._config.tls)
        if self._config.uplink is not None:
            connect(self._config.uplink, self._config.run, 1).close()  # whether it can be used
        check_free(self._config.bind)
        if self._config.state_dir is not None:
            self._keeper = Keeper(
                self._config.state_dir, self._config.run, self._terms, self._events
            )
        try:
            if self._keeper is not None:
                self._session = self._keeper.restore() or self._keeper.begin()
            self._judge = judge_of(self._config, self._session)
            if self._config.metrics is not None:
                self._metrics = Metrics(self._config.metrics, self.snapshot)
            self._listen()
            self._pass_up()
        except BaseException:
            self._stop_metrics()
            if self._keeper is not None:
                self._keeper.close()  # the run is as it was
                self._keeper = None
            raise
        shard = self._terms.shard
        self._events.write(
            "listen",
            address=self.address,
            parties=list(self._config.parties),
            shard=list(shard.numbers),
        )
        uplink = self._config.uplink
        log.info(
            "%s%s of run %s listens at %s for the parties %s",
            "Global server" if uplink is None else f"Server of party {uplink.site}",
            "" if shard.is_whole else f", {shard},",
            self._config.run,
            self.address,
            ", ".join(self._config.parties),
        )
        rule, terms = self._config.rule, self._terms
        weak = why_weak(rule, len(terms.parties), terms.quorum) if rule is not None else None
        if weak is not None:
            log.warning("%s", weak)
        self._own.look()
        if self._metrics is not None:
            log.info("Metrics at http://%s/metrics", self._metrics.address)
            if self._metrics.is_public:
                log.warning("Metrics are plain HTTP for whoever reaches this address")

    def wait(self) -> str | None:
        """Waits until the run is over and `once` is set, or nobody can go on, or until `stop`.

        Nobody can below the quorum, or with a state that is older than the run.

        Returns:
            None after a run that all children left in peace or after `stop`, else why the run
            ended.
        """
        while not self._stopped.is_set():
            self._own.look()
            session = self._session
            with session.changed:
                # Once a second it looks whether another session has begun, or this one sleeps.
                if not session.changed.wait_for(functools.partial(self._is_done, session), 1.0):
                    # Of several servers the first hears all calls; by its end the others end.
                    is_first = self._terms.shard.index == 0
                    limit_s = self._config.idle_timeout_s
                    if is_first and session.is_started and session.idle_s() > limit_s:
                        session.end(f"No party called for {limit_s:g} s (`--idle-timeout`).")
                    continue
                session.changed.wait_for(session.is_known_to_all, _GRACE_S)
            return None if self._stopped.is_set() else session.ended
        return None

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """Ends the run, if one is on, and stops to listen.

        Args:
            grace_s: seconds that calls in progress may take to end; most are told at once. A child
                whose leaving is cut off would look for the server for a minute.
        """
        self._stopped.set()
        with self._lock:
            session = self._session  # another one may just have begun; none will after it
        with session.changed:
            if not session.is_over:  # who hears later of a run that is over, hears why
                session.end(STOPPED)
        self._waits.close()
        if self._server is not None:
            self._server.stop(grace_s).wait()
            self._server = None
        if self._upper is not None:
            self._upper.close()
            self._upper = None
        if self._judge is not None:
            self._judge.close()
            self._judge = None
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        self._stop_metrics()
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        self._events.close()

    def _listen(self) -> None:
        children = len(self._config.parties)
        # A call of each other shard waits at the first one for the end of a round.
        shard = self._terms.shard
        shards = shard.count - 1 if shard.index == 0 else 0
        # Beside what children may have at once: for who is refused, and for operators.
        self._pool = concurrent.futures.ThreadPoolExecutor(
            MAX_CALLS * children + shards + 4, thread_name_prefix="tf_hips-server"
        )
        calls = Calls(self._config, self._waits, self._admission, self._traffic, self._events, self)
        server = grpc.server(
            self._pool,
            handlers=(grpc.method_handlers_generic_handler(wire.SERVICE, calls.handlers()),),
            options=(*SERVER_OPTIONS, *keepalive.options(self._config.lost_after_s)),
            maximum_concurrent_rpcs=MAX_CALLS * children + shards + 8,
        )
        files = self._config.tls
        try:
            if files is None:
                self._port = server.add_insecure_port(self._config.bind)
            else:
                self._port = server.add_secure_port(
                    self._config.bind,
                    tls.server_credentials(files, self._check_identity, self._tell),
                )
        except RuntimeError as error:
            check_free(self._config.bind)
            if files is not None and not are_known(
                tls.server_credentials(files, self._check_identity, self._tell)  # for one server
            ):
                raise ConfigError(
                    "`tls`: certificate and key must be of a kind that gRPC knows, RSA or P-256. "
                    f"Received: {files.certificate} and {files.key}"
                ) from error
            raise ConfigError(
                f"`bind` must be a free address of this machine. Received: {self._config.bind}, "
                "which gRPC cannot use"
            ) from error
        server.start()
        self._server = server

    def _stop_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.stop()
            self._metrics = None

    @property
    def has_older_state(self) -> bool:
        """Whether the run has ended because the state that it was restored from is older."""
        return self._session.is_disowned

    def _tell(self, text: str) -> None:
        """Says what has become of a file that has changed."""
        self._events.write("changed", text=text)
        log.warning("%s", text)

    def _tell_end(self, name: str, left_s: float) -> None:
        """A certificate ends soon: this server's, or the one that a child shows."""
        self._events.write("certificate_ends", who=name, left_s=left_s)
        log.warning("%s", text_of(name, left_s))

    def _is_done(self, session: Session) -> bool:
        # Somebody has to look, and another run must not replace what is there.
        must_end = session.is_below_quorum or session.is_disowned
        is_over = session.is_over and (self._config.once or must_end)
        return self._stopped.is_set() or is_over

    def _renew(self) -> None:
        """Begins a new session where a process that joins finds one that is over.

        One that has ended because the disk failed goes on, as in a server that is started again,
        unless other servers are in it.
        """
        if self._stopped.is_set() and self._session.is_over:
            raise PeerError(f"{ENDED}{STOPPED}" if self._session.is_started else STOPPED)
        if not self._session.is_over or self._config.once:
            return
        if self._session.is_disowned:
            raise PeerError(f"{ENDED}{self._session.ended}")
        self._session = (
            self._keeper.renew()
            if self._keeper
            else Session(self._terms, tell=self._events.write_later)
        )
        try:
            self._judge = judge_of(self._config, self._session)
        except BaseException:
            # Else the next one to join would find a session that nobody judges.
            self._session.end("The server's certificate cannot be read.")
            raise
        self._pass_up()

    def _pass_up(self) -> None:
        """Takes the session to the server above, and to the other shards, if there are any."""
        if self._judge is not None:
            self._judge.start()
        if self._waits.uplink is not None:
            uplink, waits = self._waits.uplink, self._waits
            self._upper = Upper(
                uplink,
                self._config.run,
                self._session,
                self._events,
                lambda: waits.ask(uplink.deadline_s),
                before=self._upper,
            )
            self._upper.start()

    def can_be_left(self) -> bool:
        """Whether a run is on that another server would restore; what was accepted is durable."""
        session = self._session
        if self._keeper is None or not session.is_started or session.is_over:
            return False
        try:
            session.settle()
        except PeerError:
            return False  # and that has ended the run
        self._events.settle()
        return True

    def session_of(self, *, is_join: bool) -> Session:
        """The session that a call belongs to; a new one where a process joins after the end."""
        with self._lock:
            if is_join:
                self._renew()
            return self._session

    def lead_of(self) -> tuple[Lead, Session]:
        """Who rules on rounds for all shards, and the session that it does it for.

        Raises:
            ProtocolError: this server has all of the model, or is not the first shard of it.
        """
        with self._lock:
            if not isinstance(self._judge, Lead):
                raise ProtocolError(
                    "`lead` must be the address of shard 0 of several. Received: that of "
                    f"{self._terms.shard}"
                )
            return self._judge, self._session

    def has_failed(self, session: Session, site: str, text: str) -> None:
        """A step of a child ended with an error."""
        if self._upper is not None and session.have_all_failed:
            self._upper.failed(site, text)

    def snapshot(self) -> dict[str, Any]:
        """What there is to tell of the run (`status.snapshot`)."""
        above = self._upper.describe() if self._upper is not None else None
        told = snapshot(self._config, self._session, self._traffic)
        for child in told["children"]:
            child["certificate_s"] = self._admission.certificate_s(child["site"])
        return told | {"uplink": above, "certificate_s": self._own.look()}

    def _check_identity(self, identity: Tls) -> None:
        check_server(identity, self._role)
