# SPDX-License-Identifier: Apache-2.0
"""What of a loop does not go with a quorum, by which a server closes rounds without some members.

    a sum           is multiplied for those who are absent, as if they had sent as much as the
                    others; shares of members are no such parts
    SCAFFOLD        c is moved by what members say that their c_i are moved by: what of that is late
                    is missing in c for ever
    fragments       one after the other share a vector: what is late would be added to the next one

All of it trains wrongly and says nothing, so a loop is refused before it trains. Who closes rounds
is told in `guards`, the same to all workers of a tree.
"""

from typing import Any

from tf_hips import log
from tf_hips.errors import ConfigError
from tf_hips.loops.meeting import Meeting
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.terms.quorum import drops_late
from tf_hips.ps.terms.tree import BETWEEN


def check_rule(welcome: Welcome | None, rule: Any) -> None:
    """Looks whether what members send is averaged, where some may be absent.

    Args:
        welcome: what the server has said; None: there is none.
        rule: of the topmost server.

    Raises:
        ConfigError: it is added up.
    """
    if rule is None or rule.is_mean or rule.is_asynchronous or not _with_quorum(welcome):
        return
    raise ConfigError(
        "Where a server's quorum may go on without a party of a loop, its rule must take a mean: "
        f"`--rule mean`. Received: {rule}"
    )


def check_controls(welcome: Welcome | None) -> None:
    """Looks whether all control variates of SCAFFOLD come in their round.

    Raises:
        ConfigError: a server may go on without some.
    """
    if _with_quorum(welcome):
        raise ConfigError(
            "SCAFFOLD's control variates must come from all members in their round, else that of "
            "all stays wrong: start the servers without a quorum, or take another method. "
            "Received: scaffold=True, and a quorum"
        )


def check_fragments(welcome: Welcome | None) -> None:
    """Looks whether a fragment that is late counts nowhere.

    Raises:
        ConfigError: a server may add it to the next fragment, or it is not known.
    """
    servers = _with_quorum(welcome)
    if welcome is None or not servers:
        return
    own, _, _ = welcome.paths[welcome.child].rpartition(BETWEEN)
    if servers == [own] and welcome.quorum is not None and drops_late(welcome.quorum):
        return
    told = ", ".join(one or "the topmost server" for one in servers)
    raise ConfigError(
        "Fragments take turns, so one that is late must not count in the next round, which is of "
        "another one: start the server with `--late drop`, or without a quorum; in a tree no "
        f"server may have one but that of all parties. Received: a quorum of {told}"
        + (f", {welcome.quorum}" if welcome.quorum is not None else "")
    )


def _with_quorum(welcome: Welcome | None) -> list[str]:
    """Paths of the servers of a tree that may go on without some children."""
    guards = () if welcome is None else welcome.guards
    return [path for path, _, least in guards if least is not None]


def tell_last(number: int, meeting: Meeting, party: int) -> None:
    """Says in the log why the training of an absent party ends that has data left.

    Args:
        number: of the round.
        meeting: the last one.
        party: that hears of it.
    """
    bears_liars = meeting.bearing is not None and meeting.bearing.bears_liars  # says why by itself
    is_absent = all(one.is_absent for one in meeting.parties[party])
    if bears_liars or not is_absent or any(one.stops for one in meeting.everyone):
        return
    log.warning(
        "Training ends with round %d, though there are data left here: the server's quorum has "
        "gone on without this party, and all others have ended.",
        number,
    )
