# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: a deadline, fixed seeds, no process left behind, goldens.

A test that is late is first interrupted by pytest-timeout's signal, which unwinds it so that its
fixtures end what they started. If the main thread sits in native code (a collective whose peer is
gone) no Python signal handler runs; then a watchdog thread shows all stacks, kills every process
that the tests started, and ends the session.
"""

import faulthandler
import gc
import os
import random
import re
import shutil
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis.internal.conjecture import providers

from tests.support import children
from tests.support.golden import Golden
from tests.support.lean import sitecustomize

# Seconds between a test's deadline and the watchdog's.
GRACE_S = 30.0
# Seconds that processes which were told to end may take to do so.
LINGER_S = 3.0

# TensorFlow reads these when it is imported, here or in a child.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("MPLBACKEND", "Agg")
# oneDNN makes code for each shape that a kernel meets: a quarter of what small models take. Tests
# that run whole programs as users do (the demo, the page on new algorithms) have it on.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# NumPy's threads look for work for a while behind each product, which no test shares out: with as
# many processes as processors they take the time of others. Read when NumPy is imported: in the
# processes of `-n` and in children.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Also what tests start imports Keras without scikit-learn. Behind all others on `sys.path`, as some
# hand that on.
_lean = str(Path(sitecustomize.__file__).parent)
sys.path.append(_lean)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _lean]))

# The same examples on every run; `--hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("repeatable")
# Hypothesis collects constants from all modules that are loaded. Those of TensorFlow load others
# when they are asked for their file, which took up to a minute; and examples would change with any
# source of ours.
providers._get_local_constants = lambda: providers._local_constants

_stderr = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the goldens that the tests make"
    )


def pytest_configure(config: pytest.Config) -> None:
    children.mark_environment()
    # A shell ignores Control-C for what it starts in the background, and children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A copy, because by the time the watchdog speaks pytest has put its own file in stderr's place.
    config.stash[_stderr] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `-m "not tf"` does not even import modules marked `tf`: TensorFlow takes seconds.

    So with `heavy`: to import all modules is a quarter of what `make check` may take.
    """
    left_out = re.findall(r"\bnot (tf|heavy)\b", config.option.markexpr)
    if not left_out or collection_path.suffix != ".py":
        return None
    marker = rf"^pytestmark = .*\bmark\.({'|'.join(left_out)})\b"
    text = collection_path.read_text(encoding="utf-8")
    return True if re.search(marker, text, re.MULTILINE) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `--dist loadgroup`; else pytest-xdist's own."""
    from tests.support.schedule import ByGroup

    return ByGroup(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "gpu": None if any(Path("/dev").glob("nvidia[0-9]*")) else "no NVIDIA device",
        "net": None
        if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
        else "needs root, ip and tc",
    }
    # Those that take long begin first, else one worker waits for the last of them.
    items.sort(key=lambda item: item.get_closest_marker("heavy") is None)
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    deadline = _deadline(item)
    if not deadline:
        return (yield)
    watchdog = threading.Timer(
        deadline + GRACE_S, _give_up, (item.nodeid, item.config.stash[_stderr])
    )
    watchdog.daemon = True
    watchdog.start()
    try:
        return (yield)
    finally:
        watchdog.cancel()


def _deadline(item: pytest.Item) -> float:
    """Seconds that pytest-timeout gives this test; 0 means no limit."""
    marker = item.get_closest_marker("timeout")
    if marker:
        return float(marker.args[0] if marker.args else marker.kwargs.get("timeout", 0))
    option = item.config.getoption("timeout")
    return float(option if option is not None else item.config.getini("timeout"))


def _give_up(test: str, stderr: int) -> None:
    left = children.left_behind()
    os.write(
        stderr, f"\n{test} ignored its deadline. Ending:\n{children.describe(left)}\n".encode()
    )
    faulthandler.dump_traceback(file=stderr)
    children.end(left)
    os._exit(3)


@pytest.fixture(scope="session", autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    yield
    left = children.wait_until_gone(LINGER_S)
    message = f"The tests left these processes behind:\n{children.describe(left)}"
    children.end(left)
    if left:
        pytest.fail(message, pytrace=False)


_is_frozen = pytest.StashKey[bool]()


@pytest.fixture(autouse=True)
def _large_imports_are_not_garbage(pytestconfig: pytest.Config) -> None:
    # TensorFlow's half a million objects stay; looking at them again and again takes long. To ask
    # `gc` how many are frozen counts them, 25 ms a test.
    if "keras" in sys.modules and not pytestconfig.stash.get(_is_frozen, False):
        gc.collect()
        gc.freeze()
        pytestconfig.stash[_is_frozen] = True


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    # Keras draws its default seeds from `random`; scikit-learn from NumPy's global generator.
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares text with files in `golden/` beside the test: `golden.check("onebit.cc", text)`."""
    return Golden(request.path.parent / "golden", request.config.getoption("--update-golden"))
