# SPDX-License-Identifier: Apache-2.0
"""The exceptions of tf_hips, one per kind of trouble a caller can act on.

Bad arguments are plain `ValueError` or `TypeError`; the classes here are for what an argument check
cannot see: files, libraries, peers and packets. Every message says what was expected and what came.

A job has many workers, and most of them fail because one did. `print_in_one_line` makes each of
them say so in one line; `TF_HIPS_TRACEBACK=1` brings the tracebacks back. A launcher sees by the
exit code `NO_RESTART` that a worker would fail again, however often it is started.
"""

import contextlib
import errno
import os
import re
import socket
import sys
from collections.abc import Iterator
from types import TracebackType

TRACEBACK_VARIABLE = "TF_HIPS_TRACEBACK"
NO_RESTART = 78
"""With what a worker of a launcher ends whose error no restart heals; EX_CONFIG of sysexits.h."""
ENDED = "The run has ended. "
"""What an error says, before the reason, when the run is over for all parties."""

# A disk that is full, a file server or a network that is away for a while.
_OF_A_MOMENT = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EAGAIN),
        *(errno.EINTR, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)
# How the error of a rank begins that another rank's is told to: `strategies.from_rank_0`,
# `strategies.replicas`, `callbacks.peers`; last, `comm.verdicts`.
_OF_A_RANK = (
    r"Rank \d+ (?:failed\.|of this party failed\.|(?:ended|left its step)(?: in [^:]+)? with) "
)
_SAYS_ENDED = re.compile(
    rf"(?:(?:\w+: )?{_OF_A_RANK})*(?:\w+: )?(?:Server [^\s,]+(?:, \w+)?: )?{re.escape(ENDED)}"
)
# In a tree a site is a server whose reason may be that one of its own has left; that is named last.
_SAYS_LEFT = re.compile(
    r"(?:Site `(?P<site>[^`]+)` left the run(?: before it began)?(?:\.|: (?:\w+: )?))+"
)
# What a rank says that another one's end has ended: `comm.watchdog`, or whom `_OF_A_RANK` is of.
_IN_A_STEP = "Another rank of this party ended in the middle of a step"
_SAYS_RANK = re.compile(
    rf"(?:{_IN_A_STEP}: r|R)ank (?P<rank>\d+) (?:of this party )?(?:failed\.|ended|left its step)"
)
_REASON_CHARACTERS = 1000
_CONFIG_VARIABLE = "TF_HIPS_CONFIG"  # that of tf_hips.config, which stands above this module


class TfHipsError(Exception):
    """Base of all errors that tf_hips raises itself."""

    # AutoGraph would raise a StagingError in its place, which nobody catches by our names.
    ag_pass_through = True


class ConfigError(TfHipsError, ValueError):
    """A configuration file or value is wrong; names the file, the key and the nearest valid one."""


class LibraryError(TfHipsError, ImportError):
    """A native library is missing or built for another TensorFlow; names the command that helps."""


class SpecificationError(TfHipsError, ValueError):
    """A specification (`.pse`) is not there or was refused; holds the diagnostics of CompLL."""


class PacketError(TfHipsError, ValueError):
    """A packet is truncated, too long, or was made by another codec."""


class PeerError(TfHipsError, ConnectionError):
    """A peer is gone, late or speaks something else; names the peer, the call, what was awaited."""


class ProtocolError(TfHipsError, RuntimeError):
    """Two sides disagree about the run; names what was expected and what came."""


class StateError(TfHipsError, RuntimeError):
    """What a server keeps on disk is damaged, another's, or in use; names the file and the byte."""


class NonFiniteError(TfHipsError, ArithmeticError):
    """A gradient holds NaN or an infinity and `nonfinite="raise"` is set."""


class ToleranceError(TfHipsError, ValueError):
    """Fewer rows are left than a robust rule needs; names the formula and who was refused."""


def is_final(error: BaseException | None) -> bool:
    """Whether a process that is started again would fail in the same way.

    It is set up wrongly, or the run is over for all, as this process heard itself or from others.
    What a full disk or a network that is away has caused may be over by then.
    """
    is_set_up_wrongly = isinstance(
        error, ConfigError | LibraryError | SpecificationError
    ) and not _is_of_a_moment(error.__cause__)
    return is_set_up_wrongly or (
        isinstance(error, TfHipsError) and reason_of_end(str(error)) is not None
    )


def reason_of_end(text: str) -> str | None:
    """Why the run is over for all, if that is what the text of an error says; else None.

    It says so at its beginning, behind the error's class, the rank of the party that has heard it
    and the server that has answered: what follows may quote any site, which writes what it likes.
    """
    said = _SAYS_ENDED.match(text)
    return text[said.end() :] if said else None


def left_the_run(site: str, reason: str | None, when: str = "") -> str:
    """The reason of a run that is over, or of a site's being left out, since `site` has left it."""
    said = f": {reason[:_REASON_CHARACTERS]}" if reason is not None else "."
    return f"Site `{site}` left the run{when}{said}"


def who_left(text: str) -> str | None:
    """The site whose leaving has ended the run, if that is what the text of an error says.

    The text may also be the reason alone, as a server prints it.
    """
    said = _SAYS_LEFT.match(reason_of_end(text) or text)
    return said["site"] if said else None


def ended_in_a_step(who: str | None) -> str:
    """How the error of a rank begins whose collectives have failed; `who` did it, if it is known.

    Args:
        who: a sentence such as "Rank 1 ended in `fit` with SystemExit: 3."
    """
    told = f": {who[0].lower()}{who[1:]}" if who else "; its own output says why."
    return f"{_IN_A_STEP}{told}"


def which_rank_ended(text: str) -> int | None:
    """The rank of the same party whose end has ended another, if the text of an error says so.

    The first one, where it names several.
    """
    said = _SAYS_RANK.match(text)
    return int(said["rank"]) if said else None


def _is_of_a_moment(cause: BaseException | None) -> bool:
    is_of_network = isinstance(cause, ConnectionError | TimeoutError | socket.gaierror)
    return is_of_network or (isinstance(cause, OSError) and cause.errno in _OF_A_MOMENT)


def end_launched(error: BaseException) -> None:
    """What an exception hook does last: a worker of a launcher ends with a code of its own.

    Raises:
        SystemExit: no restart would heal the error; the interpreter ends with that code.
    """
    if _CONFIG_VARIABLE in os.environ and is_final(error):
        raise SystemExit(NO_RESTART)


@contextlib.contextmanager
def packages_wanted(by: str) -> Iterator[None]:
    """Says how to install TensorFlow, an extra, or Horovod, a wheel of ours, where it is missing.

    Args:
        by: what needs them, the beginning of the message.

    Raises:
        LibraryError: what is done meanwhile imports TensorFlow, Keras or Horovod, which is not
            there; or Horovod was built without TensorFlow.
    """
    try:
        yield
    except ImportError as error:
        name = error.name or ""
        if isinstance(error, ModuleNotFoundError) and name in ("tensorflow", "keras"):
            text = f"{by} needs TensorFlow: pip install 'tf_hips[cpu]', or 'tf_hips[gpu]'"
        elif name.partition(".")[0] == "horovod" or str(error).startswith("Extension horovod"):
            text = (
                f"{by} needs Horovod as `make wheel` builds it for this TensorFlow: pip install "
                f"dist/horovod-*.whl. Received: {' '.join(str(error).split())}"
            )
        else:
            raise
        raise LibraryError(text) from error


def print_in_one_line() -> None:
    """Makes this process print an uncaught `TfHipsError` as one line, `module.Class: text`.

    Diagnostics of a specification keep their lines.

    Other exceptions go where they went before, and so do all with `TF_HIPS_TRACEBACK=1`. A worker
    of a launcher then ends as `end_launched` says.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, TfHipsError) or os.environ.get(TRACEBACK_VARIABLE) == "1":
            before(kind, error, trace)
            end_launched(error)
            return
        # A diagnostic of CompLL points at the text of the specification, over several lines.
        is_drawing = isinstance(error, SpecificationError)
        text = str(error) if is_drawing else " ".join(str(error).split())
        sys.stderr.write(f"{kind.__module__}.{kind.__qualname__}: {text}\n")
        end_launched(error)

    sys.excepthook = hook
