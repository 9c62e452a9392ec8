"""A Ray cluster on this machine, a head without CPUs and machines with two each, and runs on it.

Everything is in a temporary directory of its own; nothing else of Ray is read or written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster_runs import STRETTO, ClusterRun, rl_settings, sft_settings
from ports import free_port

LIMIT_S = 300.0
MEMORY = 80_000_000  # of the object store of each machine, which a run does not use


class Cluster:
    """Ray's own cluster for tests, whose machines are processes."""

    def __init__(self, num_machines: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="r"))  # short: Ray puts sockets in it
        os.environ |= {"RAY_TMPDIR": str(self.directory), "RAY_USAGE_STATS_ENABLED": "0"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from ray.cluster_utils import Cluster as Machines

            head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
            self._machines = Machines(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []
        for _ in range(num_machines):
            self.add()

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"RAY_ADDRESS": self._machines.address}

    def add(self) -> None:
        """A further machine."""
        self.nodes.append(self._machines.add_node(num_cpus=2, object_store_memory=MEMORY))

    def kill(self, process: int) -> str:
        """Kill the machine that an ancestor of a process belongs to; its number."""
        owners = {int(_variable(process, "RAY_RAYLET_PID") or 0)}
        for number, node in enumerate(self.nodes):
            if node.all_processes["raylet"][0].process.pid in owners:
                self._machines.remove_node(self.nodes.pop(number), allow_graceful=False)
                return str(number)
        raise AssertionError(f"process {process} is on none of the machines: {owners}")

    def close(self) -> None:
        self._machines.shutdown()
        for name in ("RAY_TMPDIR", "RAY_USAGE_STATS_ENABLED"):
            del os.environ[name]
        shutil.rmtree(self.directory, ignore_errors=True)


class RayRun(ClusterRun):
    """A run of two nodes: orchestrator and trainer, and an engine; or two ranks of `sft`."""

    section = "ray"

    def __init__(self, cluster: Cluster, directory: Path, max_steps: int, verb: str = "rl", **ray: Any) -> None:
        """ray: keys of [ray]."""
        if verb == "rl":
            found = rl_settings(directory, max_steps, num_replicas=1)
            # Other runs of this machine may have the default ports: unlike Slurm's nodes, Ray's have its network.
            for section in ("control", "rollout_transport", "weight_broadcast"):
                found[section] = {"port": free_port()}
            found["inference"]["server"] = {"port": free_port()}
        else:
            found = sft_settings(directory, max_steps)
            found["deployment"]["rendezvous_port"] = free_port()
        super().__init__(directory, verb, found, ray)
        self.cluster = cluster
        self.console = directory / "console.txt"

    def start(self, *words: str) -> None:
        with self.console.open("ab") as output:
            self.popen = subprocess.Popen(
                [*STRETTO, self.verb, "@", "run.toml", *words],
                cwd=self.directory,
                env=self.cluster.env,
                stdout=output,
                stderr=output,
            )

    def stretto(self, *words: str) -> str:
        ended = subprocess.run([*STRETTO, *words], env=os.environ, capture_output=True, text=True, timeout=LIMIT_S)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def said(self) -> str:
        return self.console.read_text()

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.popen.poll() is None, f"{what}: the command has ended\n{self.said()}"
            assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S:g} s\n{self.said()}"
            time.sleep(0.2)

    def end(self) -> int:
        """Its exit status."""
        try:
            return self.popen.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {LIMIT_S:g} s\n{self.said()}") from None

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()

    def processes(self, role: str) -> list[int]:
        """The run's processes of a role that are alive."""
        words = f"stretto\0{role}\0@\0{self.dir.path}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if words in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found


def _variable(process: int, name: str) -> str | None:
    words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((word.decode().partition("=")[2] for word in words if word.startswith(f"{name}=".encode())), None)
