# SPDX-License-Identifier: Apache-2.0
"""A SkyPilot task for each party: machines in a cloud that it starts on.

SkyPilot runs the same commands on all nodes. The first one writes the hosts' file from the nodes'
addresses and starts the party; with the key that SkyPilot leaves on the first node, horovodrun
reaches the others.
"""

import shlex
from pathlib import PurePosixPath
from typing import Any

from tf_hips.cluster import layout, text
from tf_hips.cluster.description import Cluster, PartySite
from tf_hips.cluster.layout import Place

# What a shell replaces by the user's home, and where it must not be quoted.
_HOME = "~/tf_hips"
_KEY = "~/.ssh/sky-cluster-key"
# Stands for that home until the command is quoted; no path of a user's may have a colon.
_OPENED = "/:home"


def task(cluster: Cluster, party: PartySite, certificates: str) -> str:
    """The text of a party's task.

    Args:
        cluster: what it is a party of.
        party: the party.
        certificates: the folder of certificates, from the folder in which `sky` is called.
    """
    names = [layout.AUTHORITY, *layout.identity_files(party)]
    told: dict[str, Any] = {
        "name": f"{cluster.run}-{layout.role_name(party)}",
        "num_nodes": len(party.hosts),
        "resources": {"cpus": f"{max(party.hosts.values())}+"},
        "workdir": "job",
        "file_mounts": {
            f"{_HOME}/wheels": "wheels",
            **{f"{_HOME}/{name}": f"{certificates}/{name}" for name in names},
        },
    }
    if party.environment:
        told["envs"] = dict(party.environment)
    told["setup"] = _setup()
    told["run"] = _run(cluster, party)
    return f"# Written by `tf-hips deploy`.\n{text.documents(told)}"


def _setup() -> str:
    return f"""\
set -e
# The wheels are for Python 3.11.
python3.11 -m venv {_HOME}/venv || conda create -q -y -p {_HOME}/venv python=3.11
{_HOME}/venv/bin/python -m pip install -q {_HOME}/wheels/horovod-*.whl \\
    "$(echo {_HOME}/wheels/tf_hips-*.whl)[cpu]"
chmod 600 {_HOME}/*.key
"""


def _run(cluster: Cluster, party: PartySite) -> str:
    # A shell opens `~` only at the beginning of a word, and not in `--key=~/...`.
    folder = PurePosixPath(_OPENED)
    place = Place(folder, *layout.identity_files(party), folder, folder)
    several = len(party.hosts) > 1
    where = (
        ["--hostfile", f"{_OPENED}/{layout.HOSTFILE}"]
        if several
        else ["--num-proc", str(party.slots)]
    )
    if several and party.interface:
        where += ["--interface", party.interface]
    _, *words = layout.party_command(cluster, party, place, where)
    end = words.index("--")  # what the script is told stays as it is
    quoted = [_word(word) for word in words[:end]] + [shlex.quote(word) for word in words[end:]]
    command = " \\\n    ".join(quoted)
    start = f'exec "$home/venv/bin/tf-hips" {command}\n'
    lines = 'home="$HOME/tf_hips"\nPATH="$home/venv/bin:$PATH"\n'
    if not several:
        return f"set -e\n{lines}{start}"
    slots = " ".join(str(number) for number in party.hosts.values())
    return f"""\
set -e
# The first node starts the workers of all.
[ "$SKYPILOT_NODE_RANK" = 0 ] || exit 0
{lines}set -- {slots}
for address in $SKYPILOT_NODE_IPS; do
  printf '%s slots=%s\\n' "$address" "$1"
  shift
done >"$home/hostfile"
for address in $SKYPILOT_NODE_IPS; do
  grep -qsx "Host $address" ~/.ssh/config && continue
  printf 'Host %s\\n  IdentityFile {_KEY}\\n  StrictHostKeyChecking no\\n' \\
    "$address" >>~/.ssh/config
done
{start}"""


def _word(word: str) -> str:
    """A word of a command, in which the folder stands for one in the user's home."""
    before, found, after = word.partition(f"{_OPENED}/")
    return f'{before}"$home"/{shlex.quote(after)}' if found else shlex.quote(word)
