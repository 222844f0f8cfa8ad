# SPDX-License-Identifier: Apache-2.0
"""What a server is told: one frozen value, checked when it is made."""

import dataclasses
import math

from tf_hips.config import MOST_SECONDS, Tls, Uplink
from tf_hips.errors import ConfigError
from tf_hips.ops import compressor as compressors
from tf_hips.ps import rules
from tf_hips.ps.rules.way_down import SAME, as_up
from tf_hips.ps.session.members import Terms, no_quorum
from tf_hips.ps.terms import quorum as quorums
from tf_hips.ps.terms.assignment import Shard
from tf_hips.ps.terms.past import MOST_IN_MEMORY
from tf_hips.ps.terms.quorum import Quorum
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.sockets import is_loopback, split_address

# A record's length has 32 bits, and its fields stand in it, too.
_MAX_RECORDED_BYTES = (1 << 32) - (1 << 16)

_PAST_BYTES_ON_DISK = 4 << 30

MAX_PERIOD = 1 << 20


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """What a global server is told.

    Attributes:
        parties: names of the sites, in child order.
        run: identity of the run.
        bind: `host:port` to listen at; port 0 takes a free one.
        compression: text of the compressor of the way up; None: what the first party brings.
        downlink: the same of the way down, or `same`; None: what the first party brings.
        rule: text of the update rule (docs/rules.md); None: what the first party brings. With an
            `uplink` an asynchronous one, or a robust one, votes included: what most of the parties
            say goes up.
        max_model_bytes: limit of a model, gradients as float32 and weights alike.
        max_gather_bytes: limit of what a party sends in one exact sum.
        tls: identity of the server; its certificate is one of role `global-server`.
        revoked: file of certificates that are refused (revocation.py), or None; only with `tls`.
        max_refused: calls that may be refused of one child in a minute, before it is turned away.
        metrics: `host:port` of an endpoint for Prometheus, or None.
        insecure: plain text; allowed on loopback only, and only without `tls`.
        round_timeout_s: seconds that a child waits in a round while nothing of it moves.
        join_timeout_s: seconds that a child waits for the others to join.
        lost_after_s: seconds that a child may take to come back after its connection closed; then
            the run ends for all.
        idle_timeout_s: seconds without any call after which a run that has started is given up;
            of several servers the first one says so.
        once: stop when the run is over.
        log_dir: folder for the event log, or None.
        state_dir: folder in which the run is kept, so that a server that was killed goes on with it
            when it is started again; None: in memory only.
        shard: which of how many servers share the model, from 0 (assignment.py).
        lead: `host:port` of shard 0, which the other shards ask what becomes of a round where the
            rule looks at whole rows; None: such rules are refused there.
        past_bytes: limit of what is kept of rounds that are over, for parties that come back from
            an older backup; None: 4 GiB in a `state_dir`, else 256 MiB of memory.
        uplink: the server above this one, and as which party this one joins it; then it is the
            server of that party. None: this is the global server.
        quorum: parties whose updates make a round, once its deadline is over; None: all of them.
        round_deadline: seconds after the opening of a round, or "adaptive", which None is, too.
        deadline_mads: how many median absolute deviations an adaptive deadline lies beyond the
            median of past arrivals; None: 5.
        late: what becomes of an update that is complete after that: it counts in the "next" round,
            which None is, too, or it is dropped ("drop").
        close_at: parties whose updates make a round at once; instead of a quorum.
        below_quorum_s: seconds that fewer parties than the quorum may be there; then the run, and
            the server, end. None: half of `round_timeout_s`, 300 at most.
        uplink_compression: text of the compressor of the way up to it; None: what the parties wish
            for, or else, for sums, what they send with themselves.
        period: with an `uplink` and a rule of its own, updates of the model by its children, of all
            together, after which what they have moved goes up; None: as many as there are parties.
    """

    parties: tuple[str, ...]
    run: str = "local"
    bind: str = "127.0.0.1:0"
    compression: str | None = None
    downlink: str | None = None
    rule: str | None = None
    max_model_bytes: int = 16 << 30
    max_gather_bytes: int = 64 << 20
    tls: Tls | None = None
    revoked: str | None = None
    max_refused: int = 30
    metrics: str | None = None
    insecure: bool = False
    round_timeout_s: float = 600.0
    join_timeout_s: float = 600.0
    lost_after_s: float = 120.0
    idle_timeout_s: float = 3600.0
    once: bool = False
    log_dir: str | None = None
    state_dir: str | None = None
    shard: tuple[int, int] = (0, 1)
    lead: str | None = None
    past_bytes: int | None = None
    uplink: Uplink | None = None
    uplink_compression: str | None = None
    quorum: int | None = None
    round_deadline: float | str | None = None
    deadline_mads: float | None = None
    late: str | None = None
    close_at: int | None = None
    below_quorum_s: float | None = None
    period: int | None = None

    def __post_init__(self) -> None:
        """Checks all values.

        Raises:
            ConfigError: one of them is wrong.
        """
        try:
            host, _ = split_address(self.bind)
            if self.metrics is not None:
                split_address(self.metrics)
            if self.lead is not None:
                split_address(self.lead)
            wire.check_name("run", self.run)
            for site in self.parties:
                wire.check_name("parties", site)
            terms_of(self)
        except ValueError as error:
            raise ConfigError(f"The server's configuration is wrong. {error}") from error
        if not self.parties or len(set(self.parties)) != len(self.parties):
            raise ConfigError(
                f"`parties` must be distinct names, at least one. Received: {self.parties}"
            )
        if self.uplink is not None and self.downlink is not None:
            raise ConfigError(
                "`downlink` is what the topmost server says, so `uplink` excludes it. Received: "
                f"downlink={self.downlink!r}"
            )
        has_own_rule = self.uplink is not None and self.rule is not None
        own = rules.parse(str(self.rule)) if has_own_rule else None
        is_robust = own is not None and own.is_robust and not own.gives_steps
        if own is not None and own.sketch is not None:
            raise ConfigError(
                "What is decided on sketches the topmost server decides, so `uplink` excludes it. "
                f"Received: rule={self.rule!r}"
            )
        if own is not None and not (own.is_asynchronous or is_robust):
            raise ConfigError(
                "What is made of gradients in synchronous rounds is what the topmost server says, "
                "so with an `uplink` a synchronous `rule` must be a robust one alone, such as "
                f"`krum(f=1)`. Received: rule={self.rule!r}"
            )
        if own is not None and own.is_asynchronous and own.is_robust:
            raise ConfigError(
                "Rows wait for each other at the topmost server, so with an `uplink` a robust "
                "`rule` must be a synchronous one, such as `krum(f=1)`. Received: "
                f"rule={self.rule!r}"
            )
        if self.period is not None and (own is None or not own.is_asynchronous):
            raise ConfigError(
                "`period` needs `uplink` and an asynchronous `rule`. Received: "
                f"period={self.period}"
            )
        if self.period is not None and not 1 <= self.period <= MAX_PERIOD:
            raise ConfigError(
                f"`period` must be from 1 to {MAX_PERIOD}. Received: period={self.period}"
            )
        if self.uplink is not None and self.shard != (0, 1):
            raise ConfigError(
                "A party has one server, so `uplink` excludes `shard`. Received: "
                f"shard={self.shard}"
            )
        _check_lead(self.lead, self.shard, insecure=self.insecure)
        if self.uplink is None and self.uplink_compression is not None:
            raise ConfigError(
                "`uplink_compression` needs `uplink`. Received: "
                f"uplink_compression={self.uplink_compression!r}"
            )
        if self.insecure == (self.tls is not None):
            raise ConfigError("Either `tls` must be set or `insecure`, and not both.")
        if self.revoked is not None and self.tls is None:
            raise ConfigError(f"`revoked` needs `tls`. Received: revoked={self.revoked!r}")
        if self.insecure and not is_loopback(host):
            raise ConfigError(f"`insecure` is for loopback only. Received: bind={self.bind!r}")
        if self.state_dir is not None and self.max_gather_bytes >= _MAX_RECORDED_BYTES:
            raise ConfigError(
                f"`max_gather_bytes` must be less than {_MAX_RECORDED_BYTES} with a `state_dir`. "
                f"Received: max_gather_bytes={self.max_gather_bytes}"
            )
        if self.past_bytes is not None and self.past_bytes < 0:
            raise ConfigError(f"`past_bytes` must be >= 0. Received: past_bytes={self.past_bytes}")
        for name in ("max_model_bytes", "max_gather_bytes", "max_refused"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"`{name}` must be > 0 and finite. Received: {name}={getattr(self, name)}"
                )
        for name in ("round_timeout_s", "join_timeout_s", "lost_after_s", "idle_timeout_s"):
            if not 0 < getattr(self, name) <= MOST_SECONDS:
                raise ConfigError(
                    f"`{name}` must be > 0 and at most 1e9. Received: {name}={getattr(self, name)}"
                )


def terms_of(config: ServerConfig) -> Terms:
    """The session's terms, texts of compressors and of the rule made canonical.

    Raises:
        ValueError: a compressor or the rule is unknown.
    """
    compression = config.compression
    if compression is not None:
        found = compressors.check_makes_packets(
            compressors.resolve(compression, "compression"), "compression", may_be_mixed=True
        )
        compression = found.text
    downlink = config.downlink
    if downlink == SAME:
        told = None if config.rule is None else rules.parse(config.rule)
        if compression is None:
            downlink = None  # it depends on what the first party brings
        elif told is not None or not found.has_threshold:
            downlink = as_up(found, told).text  # else it depends on a party's rule
    elif downlink is not None:
        found = compressors.check_makes_packets(
            compressors.resolve(downlink, "downlink"), "downlink", may_be_mixed=True
        )
        downlink = compressors.check_for_sums(found).text
    way_up = config.uplink_compression
    if way_up is not None:
        found = compressors.check_makes_packets(
            compressors.resolve(way_up, "uplink_compression"),
            "uplink_compression",
            may_be_mixed=True,
        )
        way_up = compressors.check_for_sums(found).text
    rule = None if config.rule is None else rules.parse(config.rule).text
    is_robust = rule is not None and rules.parse(rule).is_robust
    if rule is not None and (config.uplink is None or is_robust):
        shard = Shard.from_numbers(config.shard)
        is_led = _is_led(config)
        why_not = rules.why_not(
            rule, len(config.parties), compression, _quorum(config), shard, is_led=is_led
        )
        if why_not is not None:
            raise ValueError(why_not)
    return Terms(
        config.parties,
        compression,
        downlink,
        config.max_model_bytes,
        config.lost_after_s,
        config.max_gather_bytes,
        Shard.from_numbers(config.shard),
        _past_bytes(config),
        None if config.uplink is not None and is_robust else rule,
        config.uplink.site if config.uplink is not None else None,
        way_up,
        _quorum(config),
        config.period,
        rule if config.uplink is not None and is_robust else None,
        _is_led(config),
    )


def _is_led(config: ServerConfig) -> bool:
    return config.shard[0] == 0 or config.lead is not None


def _check_lead(lead: str | None, shard: tuple[int, int], *, insecure: bool) -> None:
    """Raises ConfigError where a server cannot ask `lead` for anything."""
    if lead is None:
        return
    if shard[0] == 0:
        raise ConfigError(
            "`lead` is for the shards from 1 on: it is the address of shard 0. Received: "
            f"lead={lead!r}, shard={shard}"
        )
    if insecure and not is_loopback(split_address(lead)[0]):
        raise ConfigError(f"`insecure` is for loopback only. Received: lead={lead!r}")


def _quorum(config: ServerConfig) -> Quorum | None:
    quorum = quorums.from_options(
        len(config.parties),
        config.quorum,
        config.round_deadline,
        config.deadline_mads,
        config.late,
        config.close_at,
        config.below_quorum_s,
    )
    if quorum is not None and config.below_quorum_s is None:
        below_s = min(quorum.below_s, config.round_timeout_s / 2)
        quorum = dataclasses.replace(quorum, below_s=below_s)
    for name, value in (
        ("round_deadline", quorum.deadline_s if quorum is not None else None),
        ("below_quorum_s", config.below_quorum_s),
    ):
        if value is not None and value >= config.round_timeout_s:
            raise ValueError(
                f"`{name}` must be less than `round_timeout_s`, after which parties give up. "
                f"Received: {name}={value}, round_timeout_s={config.round_timeout_s}"
            )
    if quorum is not None and config.rule is not None and rules.parse(config.rule).is_asynchronous:
        raise ValueError(no_quorum(config.rule, "the server's own configuration"))
    return quorum


def _past_bytes(config: ServerConfig) -> int:
    if config.past_bytes is not None:
        return config.past_bytes
    return MOST_IN_MEMORY if config.state_dir is None else _PAST_BYTES_ON_DISK
