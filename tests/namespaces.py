"""Hosts of one's own: network namespaces joined by a bridge. They take root; without it a test is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

WIRE = "wire"  # the interface's name inside a namespace, where there is no other but the loopback


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=120)


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def _join(namespaces: list[str], switch: str) -> None:
    """A bridge in the namespace ``switch``, and an interface on it in each of the others."""
    ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    ip("-n", switch, "link", "set", "bridge", "up")
    for host, name in enumerate(namespaces):
        port = f"port{host}"
        ip("link", "add", WIRE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
        ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        ip("-n", name, "address", "add", f"{address(host)}/24", "dev", WIRE)
        ip("-n", name, "link", "set", WIRE, "up")
        ip("-n", name, "link", "set", "lo", "up")


class Network(list[str]):
    """The hosts, by name."""

    switch: str

    def cut(self, host: int) -> None:
        """Nothing passes any more, and nobody is told: at the switch's end, as a cable that is pulled far away."""
        ip("-n", self.switch, "link", "set", f"port{host}", "down")


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """So many hosts; nothing of them is seen outside, and nothing of them stays. Skips where they cannot be."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces take root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces take the command `ip` (iproute2)")
    *ranks, switch = names = [f"overtone-{os.getpid()}-{place}" for place in (*range(hosts), "switch")]
    with ExitStack() as leaving:  # interfaces and bridge go with the namespace they are in
        try:
            for name in names:
                ip("netns", "add", name)
                leaving.callback(ip, "netns", "delete", name)
            _join(ranks, switch)
            ip("netns", "exec", ranks[0], "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: `{' '.join(error.cmd)}` said {error.stderr.strip()!r}")
        found = Network(ranks)
        found.switch = switch
        yield found
