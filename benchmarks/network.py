# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine with links of a given rate: network namespaces on a bridge.

    bridge (this namespace, `Network.address`)
      |-- port of host 0 -- eth0 of host 0 (a namespace of its own)
      |-- port of host 1 -- eth0 of host 1
      ...

A link's two ends are shaped alike by a token bucket (`tc tbf`), so a host sends and receives at the
rate at most, both at once. Segmentation offload is off unless it is asked for (`Network.offload`):
what is counted and shaped are frames as they would be on a wire. Receive offload is on: without it
the processors of this machine overtake each other with a link's frames, and TCP takes that for
loss. Needs root.

Everything is named after the process that made it and removed at the end, whatever the end is;
what a killed process left is removed by the next one.
"""

import array
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import fcntl
import ipaddress
import json
import os
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

INTERFACE = "eth0"  # of every host
_NETNS = Path("/etc/netns")
_NAMESPACES = Path("/run/netns")
_LINKS = Path("/sys/class/net")
_PREFIX = "hips"
# More than what arrives between two looks of the kernel's timer; little beside a message, so that
# an idle link's saved tokens do not count.
_BURST_S = 0.002
_LEAST_BURST = 32 * 1024  # bytes
_LATENCY = "100ms"  # that a frame may wait in the queue
# What most hosts have; this machine's own may be another one, which a shaped link does not suit.
_CONGESTION_CONTROLS = ("cubic", "reno")
_SIOCETHTOOL = 0x8946
# ETHTOOL_STSO, ETHTOOL_SGSO; ETHTOOL_SGRO stays on.
_SEGMENTATION = (0x1F, 0x24)
_RECEIVE = 0x2C
_CLONE_NEWNET = 0x40000000
_FIRST_SUBNET = int(ipaddress.IPv4Address("10.201.0.0"))
_SUBNETS = 16 * 256


@dataclasses.dataclass(frozen=True)
class Host:
    """One namespace.

    Attributes:
        name: of the namespace.
        address: of its interface.
        port: the other end of its link, on the bridge.
    """

    name: str
    address: str
    port: str

    def command(self, *words: str) -> list[str]:
        """The command that runs `words` on this host, in the same process."""
        return ["ip", "netns", "exec", self.name, *words]

    def counters(self) -> tuple[int, int]:
        """Bytes of all frames that the host has sent, and received."""
        # What the port receives is what the host sends.
        folder = _LINKS / self.port / "statistics"
        sent, received = (
            int((folder / name).read_text(encoding="ascii")) for name in ("rx_bytes", "tx_bytes")
        )
        return sent, received


@dataclasses.dataclass(frozen=True)
class Network:
    """Hosts that see each other.

    Attributes:
        address: this process' own, on the bridge.
        hosts: the hosts.
    """

    address: str
    hosts: tuple[Host, ...]

    def limit(self, mbit: float | None) -> None:
        """Lets every host send and receive so many Mbit/s at most; None: what the cores manage."""
        for host in self.hosts:
            for prefix, device in (([], host.port), (host.command(), INTERFACE)):
                where = [*prefix, "tc", "qdisc"]
                if mbit is None:
                    # Fails where there is none.
                    subprocess.run(
                        [*where, "del", "dev", device, "root"], check=False, capture_output=True
                    )
                    continue
                burst = max(_LEAST_BURST, round(mbit * 1e6 / 8 * _BURST_S))
                _run(
                    *where,
                    *("replace", "dev", device, "root", "tbf", "rate", f"{round(1e6 * mbit)}bit"),
                    *("burst", f"{burst}b", "latency", _LATENCY),
                )

    def offload(self, is_on: bool) -> None:
        """Lets hosts hand on up to 64 KiB as one frame, as loopback does, or frames as on a wire.

        For links without a limit, where this machine's cores would make the frames otherwise.
        """
        for host in self.hosts:
            _set_offloads(host.port, is_on)
            _set_offloads(INTERFACE, is_on, namespace=host.name)

    def counters(self) -> list[tuple[int, int]]:
        """Bytes that each host has sent, and received."""
        return [host.counters() for host in self.hosts]


def why_not() -> str:
    """Why there can be no network here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces must be made by root. Received: another user"
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    return f"{' and '.join(missing)} must be installed (Debian: iproute2)" if missing else ""


@contextlib.contextmanager
def network(num_hosts: int, mbit: float | None = None) -> Iterator[Network]:
    """Makes hosts; removes them at the end. End what runs on them before.

    Args:
        num_hosts: from 1 to 200.
        mbit: rate of each link in Mbit/s, both ways; None: unlimited.

    Raises:
        PermissionError: this process may not make namespaces, or has not the tools.
    """
    why = why_not()
    if why:
        raise PermissionError(why)
    if not 1 <= num_hosts <= 200:
        raise ValueError(f"`num_hosts` must be in [1, 200]. Received: num_hosts={num_hosts}")
    _remove_leftovers()
    stem = f"{_PREFIX}{os.getpid()}"
    subnet = _free_subnet()
    bridge_address, *addresses = (str(subnet[place + 1]) for place in range(num_hosts + 1))
    hosts = tuple(
        Host(f"{stem}n{place}", address, f"{stem}p{place}")
        for place, address in enumerate(addresses)
    )
    try:
        _run("ip", "link", "add", stem, "type", "bridge")
        _run("ip", "address", "add", f"{bridge_address}/{subnet.prefixlen}", "dev", stem)
        _run("ip", "link", "set", stem, "up")
        for host in hosts:
            _add(host, stem, subnet.prefixlen)
        made = Network(bridge_address, hosts)
        made.limit(mbit)
        yield made
    finally:
        _remove(stem, [host.name for host in hosts])


def _add(host: Host, bridge: str, prefix_length: int) -> None:
    folder = _NETNS / host.name
    folder.mkdir(parents=True)
    # Gloo contexts of process sets take what the host's name resolves to (tf_hips.comm.launch).
    names = f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n"
    (folder / "hosts").write_text(names, encoding="utf-8")
    _run("ip", "netns", "add", host.name)
    inner = f"{host.port}i"
    _run("ip", "link", "add", host.port, "type", "veth", "peer", "name", inner)
    for device in (host.port, inner):
        _set_offloads(device, False)
    _run("ip", "link", "set", inner, "netns", host.name, "name", INTERFACE)
    _run("ip", "link", "set", host.port, "master", bridge, "up")
    address = f"{host.address}/{prefix_length}"
    _run(*host.command("ip", "address", "add", address, "dev", INTERFACE))
    _run(*host.command("ip", "link", "set", INTERFACE, "up"))
    _run(*host.command("ip", "link", "set", "lo", "up"))
    setting = f"echo {_congestion_control()} >/proc/sys/net/ipv4/tcp_congestion_control"
    _run(*host.command("sh", "-c", setting))


def _congestion_control() -> str:
    known = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text(encoding="ascii")
    return next((one for one in _CONGESTION_CONTROLS if one in known.split()), known.split()[0])


def _set_offloads(device: str, is_segmenting: bool, namespace: str | None = None) -> None:
    settings = [(command, int(is_segmenting)) for command in _SEGMENTATION] + [(_RECEIVE, 1)]

    def set_all() -> None:
        if namespace is not None:
            _enter(namespace)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
            for command, setting in settings:
                value = array.array("I", [command, setting])
                where, _ = value.buffer_info()
                fcntl.ioctl(handle, _SIOCETHTOOL, struct.pack("16sP", device.encode(), where))

    # A thread of its own, which ends in the namespace that it has entered.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(set_all).result()


def _enter(namespace: str) -> None:
    """Moves this thread to a namespace, for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(_NAMESPACES, namespace).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {namespace} must be there")


def _free_subnet() -> ipaddress.IPv4Network:
    """256 private addresses that no interface of this namespace has."""
    used = [
        ipaddress.ip_interface(f"{one['local']}/{one['prefixlen']}").network
        for link in json.loads(_run("ip", "-j", "-4", "address"))
        for one in link["addr_info"]
    ]
    # Begins at a place of this process' own: several may look at the same time.
    for place in range(_SUBNETS):
        number = (os.getpid() + place) % _SUBNETS
        found = ipaddress.IPv4Network((_FIRST_SUBNET + 256 * number, 24))
        if not any(found.overlaps(network) for network in used):
            return found
    raise OSError("a private subnet must be free. Received: none")


def _remove_leftovers() -> None:
    """Removes networks whose process is gone."""
    names = [path.name for path in (*_LINKS.iterdir(), *_listed(_NAMESPACES), *_listed(_NETNS))]
    for name in names:
        found = re.fullmatch(rf"({_PREFIX}(\d+))(?:n\d+|p\d+)?", name)
        if found and not Path("/proc", found[2]).exists():
            stem = found[1]
            _remove(stem, [one for one in names if re.fullmatch(rf"{stem}n\d+", one)])


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _remove(stem: str, names: Sequence[str]) -> None:
    """Removes whatever is there of the network `stem`, whose hosts have these names."""
    for path in list(_LINKS.iterdir()):
        if re.fullmatch(rf"{stem}(?:p\d+i?)?", path.name):
            subprocess.run(["ip", "link", "del", path.name], check=False, capture_output=True)
    for name in names:
        if (_NAMESPACES / name).exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(_NETNS / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # others may have something there
        _NETNS.rmdir()


def _run(*words: str) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}` must succeed. Received: {done.stderr.strip()}")
    return done.stdout
