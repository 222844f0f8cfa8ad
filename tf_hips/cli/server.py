# SPDX-License-Identifier: Apache-2.0
"""`tf-hips server`: a server of a run, in the foreground: the global one, or that of a party."""

import argparse
import logging
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from tf_hips.cli import arguments, config_file, quorums, signals, uplinks, votes
from tf_hips.config import Tls, Uplink
from tf_hips.errors import ConfigError

if TYPE_CHECKING:
    from tf_hips.ps.session.settings import ServerConfig

_MIB = 2**20


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "server",
        help="serve the parties of a run",
        description="Serves the parties of a run until it is told to end. With --uplink it is the "
        "server of one party of another server, and what it serves are the leaves of that party.",
        usage="tf-hips server --parties A,B [options]",
    )
    parser.add_argument(
        "--parties",
        required=True,
        type=arguments.sites,
        metavar="A,B",
        help="the parties, in the order of their sums",
    )
    parser.add_argument(
        "--bind",
        type=arguments.endpoint,
        default="127.0.0.1:7070",
        metavar="HOST:PORT",
        help="where to listen; port 0: a free one, see --announce (default 127.0.0.1:7070)",
    )
    parser.add_argument(
        "--run",
        dest="run_name",
        type=arguments.site,
        default="local",
        metavar="NAME",
        help="name of the run, as the parties have it (default local)",
    )
    parser.add_argument(
        "--compression",
        type=arguments.codec,
        metavar="TEXT",
        help="the only compression taken (default: the first party's)",
    )
    parser.add_argument(
        "--downlink",
        type=arguments.downlink,
        metavar="TEXT",
        help="the only compression of the way down, or `same` (default: the first party's)",
    )
    parser.add_argument(
        "--rule",
        type=arguments.rule,
        metavar="TEXT",
        help="the only update rule taken, as momentum(learning_rate=0.1) (default: the first "
        "party's, else sum), or a robust one, krum(f=1) (docs/robustness.md); with --uplink an "
        "asynchronous one, by which its parties go on without each other, or a robust one",
    )
    parser.add_argument(
        "--max-model-mb",
        type=arguments.count,
        metavar="N",
        help="limit of a model in MiB (default 16384)",
    )
    parser.add_argument(
        "--max-gather-mb",
        type=arguments.count,
        metavar="N",
        help="limit of one exact sum of a party in MiB (default 64)",
    )
    parser.add_argument(
        "--round-timeout",
        type=arguments.seconds,
        metavar="S",
        help="seconds in which no byte of a round may move (default 600)",
    )
    parser.add_argument(
        "--join-timeout",
        type=arguments.seconds,
        metavar="S",
        help="seconds to wait for all parties (default 600)",
    )
    parser.add_argument(
        "--lost-after",
        type=arguments.seconds,
        metavar="S",
        help="seconds that a party whose connection ended may take to come back (default 120)",
    )
    parser.add_argument(
        "--idle-timeout",
        type=arguments.seconds,
        metavar="S",
        help="seconds in which no party may call, as all of them compute, before the run ends "
        "(default 3600, or --round-timeout if that is longer)",
    )
    parser.add_argument("--once", action="store_true", help="end with the run")
    parser.add_argument("--announce", metavar="FILE", help="write HOST:PORT to FILE when listening")
    parser.add_argument("--log-dir", metavar="DIR", help="folder for event logs")
    parser.add_argument(
        "--state",
        metavar="DIR",
        help="keep the run in DIR; started again with the same options, the server goes on with it",
    )
    parser.add_argument(
        "--shard",
        type=arguments.shard,
        metavar="I/N",
        help="hold a part of the model: this is server I, from 0, of N that share it (default 0/1)",
    )
    parser.add_argument(
        "--lead",
        type=arguments.endpoint,
        metavar="HOST:PORT",
        help="with --shard from 1 on, where shard 0 is: it says whose updates count in a round, by "
        "a rule that looks at whole rows, as krum(f=1)",
    )
    parser.add_argument(
        "--past-mb",
        type=arguments.count,
        metavar="N",
        help="limit of what is kept of rounds that are over, for parties that come back from an "
        "older backup (default 4096 with --state, else 256)",
    )
    parser.add_argument(
        "--revoked", metavar="FILE", help="certificates to refuse, as `tf-hips certs revoke` writes"
    )
    parser.add_argument(
        "--metrics",
        type=arguments.endpoint,
        metavar="HOST:PORT",
        help="tell Prometheus about the run, in plain HTTP",
    )
    votes.add(parser)
    quorums.add(parser)
    uplinks.add(parser)
    arguments.add_identity(parser, "the server")
    parser.set_defaults(run=run, file=config_file.add(parser))


def run(options: argparse.Namespace) -> int:
    """Serves; SIGTERM, or a terminal that is closed, ends in peace.

    With a state the run stays for the next start.
    """
    options = options.file.merge(options)
    if options.print_config:
        sys.stdout.write(options.file.text(options))
        return 0
    tls = arguments.identity(options)
    uplink = uplinks.of(options)
    rule = votes.rule_of(options)
    if options.insecure and options.revoked is not None:
        raise arguments.UsageError(
            f"--revoked lists certificates, and --insecure has none. Received: {options.revoked}"
        )
    if options.log_dir is not None:
        arguments.check_log_dir(options.log_dir)
    if options.announce is not None:
        arguments.check_output("--announce", options.announce)
    from absl import flags
    from absl import logging as absl_logging

    from tf_hips.ps.server.foreground import serve
    from tf_hips.ps.server.memory import limit_arenas

    limit_arenas()
    config = _config_of(options, tls, uplink, rule)
    flags.FLAGS.mark_as_parsed()  # absl's own flags keep their defaults
    absl_logging.use_absl_handler()
    absl_logging.get_absl_handler().setFormatter(_Formatter())
    absl_logging.set_verbosity(absl_logging.INFO)
    signals.handle((signal.SIGTERM, signal.SIGHUP), _end)
    serve(config, Path(options.announce) if options.announce else None)
    return 0


def _config_of(
    options: argparse.Namespace, tls: Tls | None, uplink: Uplink | None, rule: str | None
) -> "ServerConfig":
    """What the server is told.

    Raises:
        UsageError: options do not go together.
    """
    from tf_hips.ps.session.settings import ServerConfig

    limits = {
        "max_model_bytes": options.max_model_mb and options.max_model_mb * _MIB,
        "max_gather_bytes": options.max_gather_mb and options.max_gather_mb * _MIB,
        "past_bytes": options.past_mb and options.past_mb * _MIB,
        "round_timeout_s": options.round_timeout,
        "join_timeout_s": options.join_timeout,
        "lost_after_s": options.lost_after,
        "idle_timeout_s": options.idle_timeout,
    }
    if options.idle_timeout is None and options.round_timeout is not None:
        # Who may wait so long for another one may compute for as long.
        limits["idle_timeout_s"] = max(ServerConfig.idle_timeout_s, options.round_timeout)
    try:
        return ServerConfig(
            parties=options.parties,
            run=options.run_name,
            bind=options.bind,
            compression=options.compression,
            downlink=options.downlink,
            rule=rule,
            tls=tls,
            revoked=options.revoked,
            metrics=options.metrics,
            insecure=options.insecure,
            once=options.once,
            log_dir=options.log_dir,
            state_dir=options.state,
            shard=options.shard or (0, 1),
            lead=options.lead,
            uplink=uplink,
            uplink_compression=options.uplink_compression,
            **quorums.of(options),
            period=options.period,
            **{name: value for name, value in limits.items() if value is not None},
        )
    except ConfigError as error:  # all of it comes from options
        raise arguments.UsageError(str(error)) from error


class _Formatter(logging.Formatter):
    """`date time text`; the level is named from warnings on."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of one message."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')} {level}{record.getMessage()}"


def _end(number: int, frame: FrameType | None) -> NoReturn:
    # Who ends a whole group, as systemd does, and a launcher in it, send this twice. Raised once
    # more while what was accepted is written, it would end the run that is to be kept. A server
    # that hangs there takes SIGKILL, which keeps the run as well.
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    sys.exit(0)
