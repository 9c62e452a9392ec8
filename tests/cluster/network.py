"""Hosts in network namespaces: each has an address, a name and /etc/hosts of its own; files are shared.

    with network(3) as hosts:
        hosts[0].start(["inference", ...])
        hosts[1].inside(lambda: urlopen(f"http://{hosts[0].address}:8000/health"))

A command is in a session of its own and is killed with all it has started when the network goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

ENDING_S = 30.0
CLONE_NEWNET = 0x40000000
Result = TypeVar("Result")
# /etc/hosts and the host name are replaced for the command alone. `ip netns exec` would mount another /sys as well.
ENTER = """
mount --make-rprivate / && hostname "$1" && mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/resolv.conf" /etc/resolv.conf && shift 2 && exec "$@"
"""


@dataclass
class Host:
    name: str
    address: str
    address6: str
    namespace: str
    directory: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, words: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """A command on this host; its output goes to a pipe."""
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--uts", "--"]
        process = subprocess.Popen(
            [*enter, "sh", "-c", ENTER, "sh", self.name, str(self.directory), *map(str, words)],
            env=os.environ | (env or {}),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def set_link(self, state: str) -> None:
        """Cut the host off (`down`), or connect it again (`up`)."""
        _ip("-n", self.namespace, "link", "set", "eth0", state)
        if state == "up" and Path("/proc/net/if_inet6").exists():  # it went with the link
            _ip("-n", self.namespace, "addr", "replace", f"{self.address6}/64", "dev", "eth0", "nodad")

    def kill(self) -> None:
        """End everything that runs on the host, at once."""
        for pid in _pids(self):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self, words: Sequence[str | Path], env: Mapping[str, str] | None = None) -> tuple[int, str]:
        process = self.start(words, env)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def num_bytes_sent(self) -> int:
        """Bytes that have left this host for others."""
        words = ["ip", "-json", "-statistics", "-n", self.namespace, "link", "show", "eth0"]
        [link] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        return link["stats64"]["tx"]["bytes"]

    def inside(self, call: Callable[[], Result]) -> Result:
        """Call this in a thread whose sockets, and those of threads that it starts, are on this host."""

        def enter_and_call() -> Result:
            with open(f"/run/netns/{self.namespace}") as network:
                if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
            return call()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(enter_and_call).result()


@contextlib.contextmanager
def network(number: int, directory: Path, tag: str = "st") -> Iterator[list[Host]]:
    """So many hosts, host-0 and so on, on one bridge."""
    subnet = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
    tag = f"{tag}{os.getpid() % 100_000}"
    subnet6 = f"fd00:{os.getpid() % 0x10000:x}:"
    hosts = [
        Host(f"host-{i}", f"{subnet}.{10 + i}", f"{subnet6}:{10 + i}", f"{tag}-{i}", directory) for i in range(number)
    ]
    # No name server inside: an address that does not answer would cost seconds for each unknown name.
    (directory / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    names = "".join(f"{host.address} {host.name}\n" for host in hosts)
    (directory / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    bridge = f"br{tag}"
    with contextlib.ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        for index, host in enumerate(hosts):
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
            link = f"v{tag}-{index}"
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            stack.callback(_ip, "link", "del", link)  # with its namespace it would go some time later
            stack.callback(_kill, host)
            _ip("link", "set", link, "master", bridge, "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            if Path("/proc/net/if_inet6").exists():
                _ip("-n", host.namespace, "addr", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _kill(host: Host) -> None:
    """End what was started; what is still in the namespace after a while is killed.

    Keepers are given the time to end by themselves, because they remove what their process has left behind.
    """
    for process in host.started:
        process.terminate()
    deadline = time.monotonic() + ENDING_S
    while (pids := _pids(host)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in host.started:
        process.communicate()


def _pids(host: Host) -> list[int]:
    words = ["ip", "netns", "pids", host.namespace]
    return [int(pid) for pid in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()]
