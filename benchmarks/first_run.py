# SPDX-License-Identifier: Apache-2.0
"""What a newcomer waits for: a fresh clone with an empty HOME, then the Makefile's verbs in it.

Clones the commit that is checked out here into a temporary folder, points HOME and the caches at an
empty one, and times `make demo` (which sets everything up), `make demo` again, `make check` and
`make test`. Debian packages that are already installed stay installed; the result says so. Stores
the figures under the ids of `targets.toml`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from benchmarks import harness

LAST_LINE = re.compile(
    r"^demo: accuracy=(?P<accuracy>[\d.]+) "
    r"slow_tier_bytes=(?P<slow>\d+) dense_bytes=(?P<dense>\d+) "
    r"replicas=(?P<replicas>\w+)$"
)


def main() -> int:
    """Runs the verbs and stores the table; the exit code says whether all targets were met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", metavar="DIR", help="work in DIR and leave it there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(arguments.keep or scratch)
        values = measure(folder)
    targets = tomllib.loads((harness.ROOT / "benchmarks/targets.toml").read_text(encoding="utf-8"))[
        "target"
    ]
    rows = [_row(target, values[target["id"]]) for target in targets if target["id"] in values]
    harness.write(
        "first_run",
        rows,
        command="make bench-first-run",
        note="Fresh clone, empty HOME, no caches of ours or pip's; "
        "Debian packages were installed already.",
    )
    return 0 if all(row["met"] == "yes" for row in rows) else 1


def measure(folder: Path) -> dict[str, float]:
    """Figures by target id, measured in a clone under `folder`."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", str(harness.ROOT), str(clone)], check=True)
    # How packages are reached belongs to the machine; where they are cached must not.
    environment = {
        key: value
        for key, value in os.environ.items()
        if key in {"PATH", "LANG", "TERM"}
        or key.startswith(("PIP_", "SSL_"))
        or key.lower().endswith("_proxy")
    }
    environment.pop("PIP_CACHE_DIR", None)
    environment["HOME"] = str(home)
    environment["TF_HIPS_MEASURING"] = (
        "1"  # the result that is made here cannot be held against its targets yet
    )

    def make(verb: str) -> tuple[float, str]:
        start = time.monotonic()
        done = subprocess.run(
            ["make", verb],
            cwd=clone,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seconds = time.monotonic() - start
        (folder / f"{verb}.log").write_text(done.stdout, encoding="utf-8")
        harness.console().print(f"make {verb}: {seconds:.1f} s, exit code {done.returncode}")
        if done.returncode:
            raise SystemExit(f"`make {verb}` failed with {done.returncode}:\n{done.stdout[-4000:]}")
        return seconds, done.stdout

    first, _ = make("demo")
    second, output = make("demo")
    last = LAST_LINE.match(output.strip().splitlines()[-1])
    if last is None or last["replicas"] != "identical":
        raise SystemExit(
            f"Expected the demo's last line. Received: {output.strip().splitlines()[-1]!r}"
        )
    check, _ = make("check")
    test, _ = make("test")
    return {
        "first-demo-seconds": first,
        "second-demo-seconds": second,
        "demo-accuracy": float(last["accuracy"]),
        "demo-bytes-ratio": int(last["dense"]) / int(last["slow"]),
        "check-seconds": check,
        "test-seconds": test,
    }


def _row(target: dict[str, Any], value: float) -> dict[str, Any]:
    bound = f">= {target['at_least']}" if "at_least" in target else f"<= {target['at_most']}"
    return {
        "id": target["id"],
        "figure": target["figure"],
        "measured": value,
        "target": f"{bound} {target['unit']}".strip(),
        "met": harness.verdict({"measured": value}, target),
    }


if __name__ == "__main__":
    sys.exit(main())
