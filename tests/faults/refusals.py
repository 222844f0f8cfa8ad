# SPDX-License-Identifier: Apache-2.0
"""States and models that a server must refuse, in one line, and keep the last good state.

What was damaged is put right again afterwards, and the run must go on with it as if nothing had
been: so a refusal has changed nothing.
"""

import contextlib
import dataclasses
import hashlib
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults import job as jobs
from tests.faults.job import RUN, Failed, Job
from tests.faults.training import SETTINGS
from tf_hips import log

_SETTING = SETTINGS["onebit"]
_ROUND = 4
_VERSION_AT = 8  # of a file's header
_GARBAGE = bytes(range(40))


def _newest(job: Job, what: str) -> Path:
    return max((job.top.state / RUN).glob(f"{what}-*"))


def _digests(job: Job) -> dict[str, str]:
    files = (one for one in (job.top.state / RUN).iterdir() if one.name != "lock")
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in files}


def _refused(job: Job, text: str) -> str:
    """Starts the server, which must refuse in one line that has `text`; the line."""
    path = job.top.log
    size, before = path.stat().st_size, _digests(job)
    job.serve(is_refused=True)
    lines = path.read_text(encoding="utf-8")[size:].splitlines()
    if len(lines) != 1 or "tf-hips server: error: " not in lines[0] or text not in lines[0]:
        raise Failed(f"one line with `{text}` must be said. Received: {lines}")
    if job.server.ends() != 1:
        raise Failed(f"the exit code must be 1. Received: {job.server.ends()}")
    if _digests(job) != before:
        raise Failed(f"a refusal must change nothing. Received: {_digests(job)}, was {before}")
    return lines[0].removeprefix("tf-hips server: error: ").replace(str(job.top.state), "STATE")


@contextlib.contextmanager
def _changed(path: Path, offset: int, data: bytes) -> Iterator[None]:
    """Other bytes in a file, for a while."""
    kept = path.read_bytes()
    path.write_bytes(kept[:offset] + data + kept[offset + len(data) :])
    try:
        yield
    finally:
        path.write_bytes(kept)


def _damaged(what: str, text: str, *, offset: int | None = None) -> Callable[[Path], str]:
    """One byte of a file is another one: in the middle, or at `offset`."""

    def run(base: Path) -> str:
        said = ""

        def act(job: Job) -> None:
            nonlocal said
            job.train(_ROUND)
            job.reach(_ROUND - 1)
            job.server.kill()
            path = _newest(job, what)
            at = path.stat().st_size // 2 if offset is None else offset
            with _changed(path, at, bytes([path.read_bytes()[at] ^ 0x55])):
                said = _refused(job, text)
            job.serve()

        jobs.run(base, _SETTING, act, is_eager=what == "snapshot")
        return said

    return run


def _torn(base: Path) -> str:
    """Bytes after the last record: nobody was told of them, so they are cut off."""
    found: list[int] = []

    def act(job: Job) -> None:
        job.train(_ROUND)
        job.reach(_ROUND - 1)
        job.server.kill()
        with _newest(job, "journal").open("ab") as file:
            file.write(_GARBAGE)
        job.serve()
        events = log.read_events(job.top.events)
        found.extend(one["cut_bytes"] for one in events if one["event"] == "restored")

    jobs.run(base, _SETTING, act)
    if found != [len(_GARBAGE)]:
        raise Failed(f"{len(_GARBAGE)} bytes must have been cut off. Received: {found}")
    return f"{found[0]} bytes cut off"


def _full(base: Path) -> str:
    """No room in the middle of a run: it ends for all, and what was durable is there."""
    with Job(base, _SETTING) as job:
        job.start()
        job.reach(-1)
        job.train(_ROUND)
        job.reach(_ROUND - 1)
        room = _newest(job, "journal").stat().st_size + 100
        resource.prlimit(job.server.process.pid, resource.RLIMIT_FSIZE, (room, room))
        job.train(_SETTING.rounds)
        for one in job.children:
            text = one.wait_for("error")["error"]
            if "The server cannot keep the run" not in text or "\n" in text:
                raise Failed(f"a child must hear why in one line. Received: {text!r}")
        code = job.server.ends()
        lines = job.top.log.read_text(encoding="utf-8").splitlines()
        if code != 1 or sum("server: error: The server" in one for one in lines) != 1:
            raise Failed(f"the server must say why, and end with 1, not {code}\n{job.story()}")
        job.serve()
        [restored] = [one for one in log.read_events(job.top.events) if one["event"] == "restored"]
        if restored["round"] not in (_ROUND - 1, _ROUND):
            raise Failed(f"round {_ROUND - 1} must have been kept. Received: {restored}")
        return f"the run ended for all; restored in round {restored['round']}"


def _other_server(base: Path) -> str:
    """A server that was told another compression does not go on with the run."""
    said = ""

    def act(job: Job) -> None:
        nonlocal said
        job.train(_ROUND)
        job.reach(_ROUND - 1)
        job.server.kill()
        job.top.more = ["--compression", "fp16"]
        said = _refused(job, "must be of a server with compression=fp16")
        job.top.more = []
        job.serve()

    jobs.run(base, _SETTING, act)
    return said


def _other_model(base: Path) -> str:
    """A child whose model has other shapes is refused; the server lives."""
    with Job(base, _SETTING) as job:
        job.serve()
        other = dataclasses.replace(_SETTING, shapes=(*_SETTING.shapes[:-1], (3,)))
        for site, setting in zip(_SETTING.sites, (_SETTING, other), strict=True):
            job.bring_child(site, setting)
        # Whichever comes second is refused.
        job.eventually(lambda: any(one.has_said("error") for one in job.children))
        [refused] = [one for one in job.children if one.has_said("error")]
        text = str(refused.wait_for("error")["error"])
        if not re.search(r"(4 is \[\] there and \[3\]|4 is \[3\] there and \[\]) here", text):
            raise Failed(f"the tensor must be named. Received: {text!r}")
        if "\n" in text or refused.ends() != 1 or job.server.process.poll() is not None:
            raise Failed(f"one line, the code 1, and a server that lives\n{job.story()}")
        return text


def _second_server(base: Path) -> str:
    """A folder that a server holds is refused to another one."""
    said = ""

    def act(job: Job) -> None:
        nonlocal said
        held = job.server
        text = "must be a folder that no running server uses"
        job.top.port = 0
        said = _refused(job, text)
        job.top.port, job.top.process = job.relay.port, held

    jobs.run(base, _SETTING, act)
    return said


REFUSALS: dict[str, Callable[[Path], str]] = {
    "refusal/full-disk": _full,
    "refusal/torn-tail": _torn,
    "refusal/damaged-snapshot": _damaged("snapshot", "is damaged at byte"),
    "refusal/damaged-journal": _damaged("journal", "is damaged at byte"),
    "refusal/version": _damaged("journal", "must have format", offset=_VERSION_AT),
    "refusal/snapshot-version": _damaged("snapshot", "must have format", offset=_VERSION_AT),
    "refusal/other-server": _other_server,
    "refusal/other-model": _other_model,
    "refusal/held-folder": _second_server,
}
