# SPDX-License-Identifier: Apache-2.0
"""All machines of a cluster at once: copying, starting, ending, and what came of it.

A connection can break at any moment. What is reported is what the machine said, or what it says
when it is asked again; where it cannot be asked, that is said.
"""

import dataclasses
import functools
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from tf_hips.cluster import archive, layout, ssh
from tf_hips.cluster.description import Cluster, PartySite, Role, ServerSite
from tf_hips.cluster.ssh import Answer

# An sshd takes ten connections that have not logged in yet, and starts to refuse others.
_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one command on one machine.

    Attributes:
        role: name of the role, `server-hub`.
        host: destination of ssh.
        is_good: whether it is as it was asked for.
        state: in a word or two.
        detail: in a sentence.
    """

    role: str
    host: str
    is_good: bool
    state: str
    detail: str = ""


Tell = Callable[[Outcome], None]


def sync(cluster: Cluster, roles: Sequence[Role], tell: Tell) -> None:
    """Sends every machine of `roles` what it needs; `tell` hears of each when it is done.

    Raises:
        ConfigError: something that must be sent is not there; nothing has been sent then.
    """
    sent = [(role, host, archive.entries(cluster, role, host)) for role, host in places(roles)]

    def one(role: Role, host: str, entries: list[archive.Entry]) -> Outcome:
        folder = str(layout.home(cluster, role))
        options = cluster.ssh_options
        answer = ssh.call(host, options, "receive", [folder], archive.pack(entries))
        name = layout.role_name(role)
        if answer.find("received"):
            return Outcome(name, host, True, "copied", f"{len(entries)} files to {folder}")
        kept = "what was there before is there still"
        if answer.trouble:
            return Outcome(name, host, False, "not copied", f"{answer.trouble}; {kept}")
        if answer.find("unwritable"):
            detail = f"{folder} cannot be written: {answer.error}"
            return Outcome(name, host, False, "not copied", detail)
        return _failed(name, host, answer, "not copied")

    _at_once([functools.partial(one, *given) for given in sent], tell)


def up(cluster: Cluster, roles: Sequence[Role], patience_s: float, tell: Tell) -> None:
    """Starts servers, then parties; these only if all of those servers run.

    Args:
        cluster: the cluster.
        roles: what is started.
        patience_s: seconds that a role may take to be ready: a server listens, the processes of a
            party are started.
        tell: hears of each role when its fate is known.
    """
    is_served = True

    def hear(outcome: Outcome) -> None:
        nonlocal is_served
        is_served &= outcome.is_good
        tell(outcome)

    servers = [role for role in roles if isinstance(role, ServerSite)]
    parties = [role for role in roles if isinstance(role, PartySite)]
    start = functools.partial(_start, cluster, patience_s)
    _at_once([functools.partial(start, role) for role in servers], hear)
    if is_served:
        _at_once([functools.partial(start, role) for role in parties], tell)
        return
    for party in parties:
        detail = "a server that it needs does not run"
        tell(Outcome(layout.role_name(party), party.launcher, False, "not started", detail))


def down(cluster: Cluster, roles: Sequence[Role], grace_s: float, tell: Tell) -> None:
    """Ends parties, then servers.

    Args:
        cluster: the cluster.
        roles: what is ended.
        grace_s: seconds between SIGTERM and SIGKILL.
        tell: hears of each role when its fate is known.
    """
    for kind in (PartySite, ServerSite):
        chosen = [role for role in roles if isinstance(role, kind)]
        _at_once([functools.partial(_end, cluster, grace_s, role) for role in chosen], tell)


def places(roles: Iterable[Role]) -> list[tuple[Role, str]]:
    """Each role with each of its hosts."""
    return [
        (role, host)
        for role in roles
        for host in ([role.host] if isinstance(role, ServerSite) else role.hosts)
    ]


def start_command(cluster: Cluster, role: Role) -> list[str]:
    """How a role is started by `up`."""
    if isinstance(role, ServerSite):
        ready = str(layout.home(cluster, role) / layout.READY)
        return [*layout.server_command(cluster, role), f"--announce={ready}"]
    return layout.party_on_machine(cluster, role, ready=True)


def variables(role: Role) -> list[str]:
    """The variables that a role gets, `NAME=VALUE`."""
    given = role.environment if isinstance(role, PartySite) else {}
    return [f"{name}={value}" for name, value in given.items()]


def plan(cluster: Cluster, command: str, roles: Sequence[Role]) -> list[str]:
    """What a command would do, a line for each machine, in its order.

    Raises:
        ConfigError: as for `sync`.
    """
    if command == "sync":
        lines = []
        for role, host in places(roles):
            entries = archive.entries(cluster, role, host)
            names = ", ".join(entry.name for entry in entries)
            size = sum(entry.size for entry in entries)
            lines.append(f"{host}: to {layout.home(cluster, role)}, {size} bytes: {names}")
        return lines
    ordered = sorted(roles, key=lambda role: isinstance(role, PartySite) is (command == "up"))
    if command == "down":
        return [f"{role.launcher}: end {layout.role_name(role)}" for role in ordered]
    lines = []
    for role in ordered:
        words = ["env", *variables(role)] if variables(role) else []
        text = shlex.join([*words, *start_command(cluster, role)])
        lines.append(f"{role.launcher}: in {_working(cluster, role)}: {text}")
    return lines


def _working(cluster: Cluster, role: Role) -> str:
    place = layout.on_machine(cluster, role)
    return str(place.data if isinstance(role, ServerSite) else place.job)


def _start(cluster: Cluster, patience_s: float, role: Role) -> Outcome:
    name, host = layout.role_name(role), role.launcher
    folder = str(layout.home(cluster, role))
    arguments = [folder, _working(cluster, role), str(math.ceil(patience_s)), cluster.run]
    arguments += start_command(cluster, role)
    data = "".join(f"{variable}\n" for variable in variables(role)).encode()
    answer = ssh.call(host, cluster.ssh_options, "start", arguments, data)
    if answer.trouble:
        return _after_break(cluster, role, answer, "not started", is_wanted=True)
    found = answer.find("up", "already", "over", "ended", "slow", "absent", "no-program")
    word, rest = found or ("", "")
    pid, _, ready = rest.partition(" ")
    last = answer.log[-1] if answer.log else "its log says nothing"
    if word == "up":
        what = f"listens at {ready}" if isinstance(role, ServerSite) else ready
        return Outcome(name, host, True, "running", f"pid {pid}, {what}")
    if word == "over":
        return Outcome(name, host, rest == "0", f"over, exit code {rest}", last)
    if word == "already" and ready not in ("", cluster.run):
        other = f"pid {pid} of run {ready}; `tf-hips down` ends it, before {cluster.run} can start"
        return Outcome(name, host, False, "not started", other)
    if word == "already":
        return Outcome(name, host, True, "runs already", f"pid {pid}; `tf-hips down` ends it")
    details = {
        "ended": (f"ended, exit code {rest}", last),
        "slow": ("not ready", f"pid {pid} runs, but was not ready after {patience_s:g} s"),
        "absent": ("not started", f"{folder} is not complete there; `tf-hips sync` copies it"),
        "no-program": (
            "not started",
            f"there is no program {rest} there; `program` says where tf-hips is",
        ),
    }
    if word in details:
        return Outcome(name, host, False, *details[word])
    return _failed(name, host, answer, "not started")


def _end(cluster: Cluster, grace_s: float, role: Role) -> Outcome:
    name, host = layout.role_name(role), role.launcher
    folder = str(layout.home(cluster, role))
    answer = ssh.call(host, cluster.ssh_options, "stop", [folder, str(math.ceil(grace_s))])
    if answer.trouble:
        return _after_break(cluster, role, answer, "not ended", is_wanted=False)
    word, pid = answer.find("stopped", "killed", "gone", "absent", "stays") or ("", "")
    good = {
        "stopped": ("ended", f"pid {pid}"),
        "killed": ("killed", f"pid {pid} did not end within {grace_s:g} s of SIGTERM"),
        "gone": ("not running", ""),
        "absent": ("not running", f"there is no {folder}"),
    }
    if word in good:
        return Outcome(name, host, True, *good[word])
    if word == "stays":
        return Outcome(name, host, False, "not ended", f"pid {pid} outlives SIGKILL")
    return _failed(name, host, answer, "not ended")


def _after_break(
    cluster: Cluster, role: Role, answer: Answer, undone: str, *, is_wanted: bool
) -> Outcome:
    """What can be said when ssh failed: the machine is asked once more if it was ever reached."""
    name, host = layout.role_name(role), role.launcher
    if answer.is_unreached:
        return Outcome(name, host, False, undone, answer.trouble)
    again = ssh.call(host, cluster.ssh_options, "look", [str(layout.home(cluster, role))])
    word, pid = again.find("lives", "gone", "absent") or ("", "")
    if word == "lives":
        return Outcome(name, host, False, "running", f"{answer.trouble}; asked again: pid {pid}")
    if word:
        # Of one that runs it is not known whether it is ready; one that is gone is ended.
        return Outcome(name, host, not is_wanted, "not running", f"{answer.trouble}; asked again")
    return Outcome(name, host, False, "unknown", f"{answer.trouble}; it could not be asked again")


def _failed(name: str, host: str, answer: Answer, state: str) -> Outcome:
    if answer.find("busy"):
        return Outcome(name, host, False, state, "another `tf-hips up` or `down` is at work there")
    lacks = answer.find("lacks")
    if lacks:
        return Outcome(name, host, False, state, f"the machine has no program {lacks[1]}")
    return Outcome(name, host, False, state, answer.error or f"exit code {answer.code}")


def _at_once(jobs: Sequence[Callable[[], Outcome]], tell: Tell) -> None:
    """Runs all jobs; on an interruption, those that have begun are waited for and told of."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        untold = {pool.submit(job) for job in jobs}
        try:
            while untold:
                for future in wait(untold, return_when=FIRST_COMPLETED).done:
                    untold.remove(future)
                    tell(future.result())
        except BaseException:
            begun = [future for future in untold if not future.cancel()]
            for future in begun:
                if future.exception() is None:
                    tell(future.result())
            raise
