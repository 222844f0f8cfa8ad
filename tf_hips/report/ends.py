# SPDX-License-Identifier: Apache-2.0
"""Whether a run has ended, and how, from the events of its workers.

Of each site what it has told since it joined or began last counts: one that has failed may have
come back. A `result` is the end of a trainer, and a `left` without a reason that of a script. Where
neither may be expected, of a script without a server, nothing is known.
"""

from collections.abc import Sequence

from tf_hips.log import Event

ENDED = "ended"

_FAILED, _OPEN = "failed", "not ended"


def state(events: Sequence[Event], setup: Event) -> str | None:
    """How a run stands.

    Args:
        events: of its workers, in order of time.
        setup: what its trainer says of itself; empty: nothing.

    Returns:
        "ended"; "failed: " and the reason that was told first; "not ended: " and how far it has
        come, of a run that was killed or is on. Where other sites have ended, the site comes
        before. None: not known.
    """
    of_sites: dict[str, list[Event]] = {}
    for event in events:
        of_sites.setdefault(event["site"], []).append(event)
    ends = {site: _of_site(own, setup) for site, own in of_sites.items()}
    known = {site: end for site, end in ends.items() if end is not None}
    if not known:
        return None
    bad = [(end, site) for site, end in known.items() if end[0] != ENDED]
    if not bad:
        return ENDED
    # Others fail because the first one did.
    (kind, _, text), site = min(bad, key=lambda one: (one[0][0] != _FAILED, one[0][1]))
    told = f"{kind}: {text}" if text else kind
    return told if len(bad) == len(known) else f"{site} {told}"


def _of_site(own: Sequence[Event], setup: Event) -> tuple[str, int, str] | None:
    """What has become of a site by its own events, when, and the reason or how far it has come."""
    begins = [at for at, one in enumerate(own) if one["event"] == "joined" or _begins(one, setup)]
    if not begins:
        return None
    recent = own[begins[-1] :]
    if any(one["event"] == "result" for one in recent):
        return ENDED, recent[-1]["time_us"], ""
    left = next((one for one in reversed(recent) if one["event"] == "left"), None)
    if left is None:
        return _OPEN, recent[-1]["time_us"], _place(own, setup)
    reason = left.get("reason")
    return (ENDED if reason is None else _FAILED), left["time_us"], str(reason or "")


def _begins(event: Event, setup: Event) -> bool:
    """Whether a trainer begins there that says how many steps it makes, and so its `result`."""
    return event["event"] == "setup" and "steps" in event and event.keys() >= setup.keys()


def _place(own: Sequence[Event], setup: Event) -> str:
    """How far a site has come."""
    made = max((int(e.get("step") or 0) for e in own if e["event"] == "epoch"), default=0)
    rounds = max((int(e["round"]) + 1 for e in own if e["event"] == "round"), default=0)
    if setup.get("mode") == "sync":
        made = max(made, rounds)  # a round for each step
    if "steps" in setup:
        return f"step {made}/{setup['steps']}"
    return f"{rounds} rounds" if rounds else ""
