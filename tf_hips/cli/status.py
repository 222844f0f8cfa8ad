# SPDX-License-Identifier: Apache-2.0
"""`tf-hips status`: what the run of a server, or of several, is doing, as a table or as JSON."""

import argparse
import json
import sys
import threading
from concurrent import futures
from typing import Any

from tf_hips import tables
from tf_hips.cli import arguments
from tf_hips.config import SERVER_ROLES
from tf_hips.log import printable

_TURN_S = 0.2  # of waiting
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# On a narrow terminal, in this order; who is late, absent, refused, chosen or outvoted stays.
_LEFT_OUT = ("workers", "retries", "chunks", "sent", "received", "last call", "lag")


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "status",
        help="what a server's run is doing",
        description="Asks a server what its run is doing. The certificate is one of role operator "
        "(`tf-hips certs issue DIR --operator NAME`) or that of a party of the run.",
    )
    parser.add_argument(
        "--server",
        required=True,
        type=arguments.endpoints,
        metavar="HOST:PORT,...",
        help="the server; all of them, where several share the model",
    )
    parser.add_argument(
        "--run",
        dest="run_name",
        type=arguments.site,
        default="local",
        metavar="NAME",
        help="name of the run (default local)",
    )
    parser.add_argument(
        "--server-role",
        choices=SERVER_ROLES,
        default=SERVER_ROLES[0],
        help="role of its certificate: `server` is one of a party (default global-server)",
    )
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")
    parser.add_argument(
        "--timeout",
        type=arguments.seconds,
        default=10.0,
        metavar="S",
        help="seconds to reach the server (default 10)",
    )
    arguments.add_identity(parser, "the caller")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Asks and prints; 1 where the run has ended for a reason, or one of several is silent."""
    tls = arguments.identity(options)
    arguments.check_loopback("--server", options.server, tls)
    servers = options.server.split(",")
    role = options.server_role
    if len(servers) == 1:
        told = [ask(servers[0], options.run_name, tls, options.timeout, role)]
    else:
        told = _ask_all(servers, options.run_name, tls, options.timeout, role)
    if options.json:
        text = json.dumps(told if len(told) > 1 else told[0], indent=2)
        sys.stdout.write(text + "\n")
    else:
        _show(told)
    return 1 if any(one.get("error") or one.get("ended") for one in told) else 0


def _ask_all(
    servers: list[str], run_name: str, tls: Any, timeout_s: float, role: str
) -> list[dict[str, Any]]:
    """What each server tells, and as its `server` which it is; the `error` of one that does not.

    Ctrl-C ends it at once: nobody waits for the threads.
    """
    from tf_hips.errors import TfHipsError

    def one(server: str, answer: "futures.Future[dict[str, Any]]") -> None:
        try:
            answer.set_result({"server": server, **ask(server, run_name, tls, timeout_s, role)})
        except TfHipsError as error:
            answer.set_result({"server": server, "error": str(error)})
        except Exception as error:  # noqa: BLE001 - handed to the caller, which raises it
            answer.set_exception(error)

    answers: list[futures.Future[dict[str, Any]]] = [futures.Future() for _ in servers]
    for given in zip(servers, answers, strict=True):
        threading.Thread(target=one, args=given, daemon=True).start()
    # In turns: Python does not hear a signal that comes when a wait is about to begin.
    while futures.wait(answers, timeout=_TURN_S).not_done:
        pass
    return [answer.result() for answer in answers]


def ask(
    server: str, run_name: str, tls: Any, timeout_s: float, role: str = SERVER_ROLES[0]
) -> dict[str, Any]:
    """What a server tells (`ps.server.status.snapshot`).

    Args:
        server: `host:port`.
        run_name: identity of the run.
        tls: identity of the caller; None: plain text.
        timeout_s: seconds to reach the server.
        role: of its certificate.

    Raises:
        TfHipsError: it cannot be reached, or refuses the caller.
    """
    from tf_hips.config import Uplink
    from tf_hips.ps.client.link import Link
    from tf_hips.ps.security import tls as identities
    from tf_hips.ps.security.diagnosis import own_identity
    from tf_hips.ps.transport.sockets import split_address

    site = own_identity(tls).site if tls is not None else "operator"
    credentials = identities.channel_credentials(tls) if tls is not None else None
    link = Link(
        Uplink(server, site, tls, timeout_s, role),
        split_address(server),
        credentials,
        run_name,
        "status",
    )
    try:
        told: dict[str, Any] = json.loads(link.control("Status", b"", timeout_s))
        return told
    finally:
        link.close()


def _show(all_told: list[dict[str, Any]]) -> None:
    console = tables.console()
    is_sharded = "server" in all_told[0]
    columns = ["workers", "round", "lag", "chunks", "received", "sent", "retries", "last call"]
    has_quorum = any(told.get("quorum") is not None for told in all_told)
    # Of children that lie, or that have sent what no rule takes.
    has_refused = any(
        child.get("refused_rows") for told in all_told for child in told.get("children", ())
    )
    # What a rule that chooses rows makes of each; of no other rule.
    chooses = any(child.get("chosen_of") for told in all_told for child in told.get("children", ()))
    votes = any(
        str(told.get(name) or "").startswith("detox")
        for told in all_told
        for name in ("rule", "robust")
    )
    more = [*(("late", "absent") if has_quorum else ()), *["refused_rows"] * has_refused]
    more += ["chosen"] * chooses
    more += ["outvoted", "proven", "passed_over"] * votes
    rows: list[tuple[str, ...]] = []
    is_first = True
    for told in all_told:
        if "error" in told:
            console.print(f"server {told['server']}: {printable(told['error'])}")
            continue
        if is_first:
            _show_run(console, told)
            is_first = False
        _show_server(console, told)
        shard = ["/".join(map(str, told["shard"]))] if is_sharded else []
        for child in told["children"]:
            last = child["last_call_s"]
            row = (
                *shard,
                child["site"],
                child["state"],
                str(child["workers"]),
                str(child["round"]),
                str(child["lag"]),
                f"{child['chunks']}/{told['chunks']}",
                _bytes(child["received_bytes"]),
                _bytes(child["sent_bytes"]),
                str(child["retries"]),
                "never" if last is None else f"{_time(last)} ago",
                *(_count(child, column) for column in more),
            )
            rows.append(row)
    texts = [tables.Column(name) for name in (*["shard"] * is_sharded, "site", "state")]
    counts = tables.numbers(*columns, *(_header(name) for name in more))
    tables.show([*texts, *counts], rows, leave_out=_LEFT_OUT, hint="--json prints all")


def _show_run(console: Any, told: dict[str, Any]) -> None:
    """What is the same at all servers."""
    console.print(f"run {told['run']}: {told['state']}, round {told['round']}")
    if told["tensors"]:
        console.print(f"model: {told['parameters']:,} parameters in {told['tensors']} tensors")
        below = (
            f", of what {told['robust']} makes of the parties here" if told.get("robust") else ""
        )
        bears = f" (bears {told['bears']})" if told.get("bears") else ""
        rule = f"{told['rule']}{below}{bears}"
        console.print(f"rule: {rule}; up: {told['compression']}; down: {told['downlink']}")


def _show_server(console: Any, told: dict[str, Any]) -> None:
    name = ""
    if "server" in told:
        index, count = told["shard"]
        name = f" {told['server']}, shard {index} of {count}"
    if told["ended"]:
        console.print(f"server{name} ended: {printable(told['ended'])}")
    per_round = f"{_span(told['round_s'] / told['rounds'])} a round, " if told["rounds"] else ""
    refused = "1 call" if told["refused"] == 1 else f"{told['refused']} calls"
    console.print(
        f"server{name}: up for {_time(told['uptime_s'])}, {per_round}{refused} refused, "
        f"{'durable' if told['is_durable'] else 'state in memory'}"
    )
    if told.get("certificate_s") is not None:
        console.print(_certificates(told))
    if told["quorum"] is not None:
        deadline_s = told["deadline_s"]
        when = "when all have come" if deadline_s is None else f"after {_span(deadline_s)}"
        console.print(f"quorum: {told['quorum']} of {len(told['children'])}, {when}")
    above = told["uplink"]
    if above is not None:
        state = "not joined yet"
        if above["is_joined"]:
            state = f"by {above['compression']}; {above['leaves']} leaves in the tree"
        console.print(f"above: {above['server']}, as `{above['site']}`, {state}")
    if told["tensors"]:
        way = "down" if above is None else "up"
        console.print(f"its way {way} has missed {told['residual_rms']:.3g} (rms) so far")


def _certificates(told: dict[str, Any]) -> str:
    """When the server's ends, and of the parties' the first one."""
    text = f"certificate: {_ends(told['certificate_s'])}"
    ends = [
        (child["certificate_s"], child["site"])
        for child in told["children"]
        if child["certificate_s"] is not None
    ]
    if not ends:
        return text
    left_s, site = min(ends)
    return f"{text}; of those below that of {printable(site)} is the first: {_ends(left_s)}"


def _ends(left_s: float) -> str:
    from tf_hips.ps.security.expiry import span

    return f"ends in {span(left_s)}" if left_s > 0 else "has ended"


def _count(child: dict[str, Any], column: str) -> str:
    """How often a child was seen so; of rounds in which it was chosen, of how many."""
    number = str(child.get(column, 0))
    return f"{number}/{child.get('chosen_of', 0)}" if column == "chosen" else number


def _header(name: str) -> str:
    return name.removesuffix("_rows").replace("_", " ")


def _bytes(number: float) -> str:
    unit = 0
    # Not at 1024: 1000 has a digit too many.
    while number >= 999.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{tables.short(number)} {_UNITS[unit]}"


def _span(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 999.5 else _time(seconds)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
