"""A Slurm cluster on one machine: every node has a network, a host name and an /etc/hosts of its own.

The controller and the commands of users are in a node of their own, `login`. Nothing outside of the cluster's directory
is written, but for network namespaces and a bridge, whose names begin with the cluster's tag; `stop` removes them.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SUBNET = "10.79.0"
REQUEUE_AFTER_S = 5
DOWN_AFTER_S = 10
GRACE_S = 120
"""For a job that gives way to one of the partition `urgent`."""
LIMIT_S = 240.0
CONFIG = """
ClusterName=tests
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={d}/munge.socket,cred_expire={requeue}
CredType=cred/munge
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool/%n
SlurmctldPidFile={d}/slurmctld.pid
SlurmdPidFile={d}/slurmd.%n.pid
SlurmctldLogFile={d}/slurmctld.log
SlurmdLogFile={d}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout={down}
KillWait=5
MinJobAge=600
PropagateResourceLimits=NONE
NodeName=node[0-{last}] CPUs=4 RealMemory=4000 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=cluster Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""
ENTER = """
mount --make-rprivate /
hostname "$0"
mount --bind {d}/hosts /etc/hosts
mount --bind {d}/resolv.conf /etc/resolv.conf
exec "$@"
"""


class Cluster:
    """Slurm with `num_nodes` nodes, node0, node1, ..."""

    def __init__(self, directory: Path, num_nodes: int) -> None:
        self.directory = directory
        self.nodes = [f"node{number}" for number in range(num_nodes)]
        self._tag = f"st{os.getpid() % 100000}"

    # -- what a user does --

    def login(self, *words: str, cwd: Path | None = None) -> str:
        """Run a command on the login node; its output.

        Raises: AssertionError with it if the command fails.
        """
        ended = subprocess.run(
            self.inside("login", words), cwd=cwd, env=self.env, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def job(self, number: str) -> dict[str, str]:
        """The fields of a job, as `scontrol show job` names them."""
        return dict(re.findall(r"(\w+)=(\S*)", self.login("scontrol", "show", "job", "-o", number)))

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for what happens in the cluster."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {LIMIT_S:g} s\n{self.login('squeue')}"
            time.sleep(0.5)

    def set_link(self, node: str, state: str) -> None:
        """Cut a node off (`down`), or connect it again (`up`)."""
        _run("ip", "link", "set", f"{self._tag}{node}", state)

    def kill(self, node: str) -> None:
        """End all that runs on a node at once, Slurm's daemon too."""
        self.set_link(node, "down")
        _try("kill", "-KILL", *_try("ip", "netns", "pids", f"{self._tag}-{node}").split())

    def kill_jobs(self, node: str) -> None:
        """End all processes of jobs on a node at once; Slurm's own go on."""
        pids = [pid for pid in self._jobs_on(node) if _try("ps", "-o", "comm=", "-p", pid).strip() != "slurmstepd"]
        assert pids, f"nothing runs on {node}"
        _try("kill", "-KILL", *pids)

    def start_node(self, node: str) -> None:
        """Start a node that was killed."""
        self.set_link(node, "up")
        self._start_daemon(node, "slurmd")

    def is_idle(self) -> bool:
        """Whether every node waits for work, and nothing of an earlier job still runs there."""
        states = self.login("sinfo", "-h", "-N", "-p", "cluster", "-o", "%t").split()
        return states == ["idle"] * len(self.nodes) and not any(map(self._jobs_on, self.nodes))

    def _jobs_on(self, node: str) -> list[str]:
        """Process ids on a node, without that of Slurm's daemon."""
        pids = _try("ip", "netns", "pids", f"{self._tag}-{node}").split()
        return [pid for pid in pids if _try("ps", "-o", "comm=", "-p", pid).strip() not in ("", "slurmd")]

    # -- starting and stopping --

    def start(self) -> None:
        self.directory.chmod(0o755)
        for name in ("state", "spool"):
            (self.directory / name).mkdir()
        (self.directory / "munge.key").write_bytes(secrets.token_bytes(1024))
        (self.directory / "munge.key").chmod(0o400)
        # A name server that refuses at once: one that does not answer costs ten seconds per name.
        (self.directory / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        addresses = {"login": 2} | {node: 10 + number for number, node in enumerate(self.nodes)}
        lines = ["127.0.0.1 localhost", *(f"{SUBNET}.{last} {name}" for name, last in addresses.items())]
        (self.directory / "hosts").write_text("\n".join(lines) + "\n")
        text = CONFIG.format(
            d=self.directory, last=len(self.nodes) - 1, requeue=REQUEUE_AFTER_S, down=DOWN_AFTER_S, grace=GRACE_S
        )
        (self.directory / "slurm.conf").write_text(text)
        _run("ip", "link", "add", self._tag, "type", "bridge")
        _run("ip", "link", "set", self._tag, "up")
        for name, last in addresses.items():
            self._add_network(name, f"{SUBNET}.{last}")
        munge = [f"--{what}={self.directory}/munge.{what[:3]}" for what in ("pid-file", "log-file", "seed-file")]
        key, socket = f"--key-file={self.directory}/munge.key", f"--socket={self.directory}/munge.socket"
        self._start_daemon(None, "munged", "--force", key, socket, *munge)
        self._start_daemon("login", "slurmctld", "-i")
        for node in self.nodes:
            (self.directory / "spool" / node).mkdir()
            self._start_daemon(node, "slurmd")
        self.until(self.is_idle, "nodes become idle")

    def stop(self) -> None:
        """End jobs and daemons, and remove the networks; of a cluster that has started only in part, too."""
        daemons = [int(text) for path in self.directory.glob("*.pid") if (text := path.read_text().strip()).isdigit()]
        for node in self.nodes:
            _try("ip", "link", "set", f"{self._tag}{node}", "up")
        if (self.directory / "slurmctld.pid").exists():
            _try(*self.inside("login", ("scancel", "-u", "root")), env=self.env)
            self._wait(lambda: not _try(*self.inside("login", ("squeue", "-h")), env=self.env).strip(), 60)
        for number in ("TERM", "KILL"):
            for name in ("login", *self.nodes):  # a node that was cut off may still run what it was told to end
                if number == "KILL" and (pids := _try("ip", "netns", "pids", f"{self._tag}-{name}").split()):
                    _try("kill", "-KILL", *pids)
            for pid in filter(_is_alive, daemons):
                _try("kill", f"-{number}", str(pid))
            self._wait(lambda: not any(map(_is_alive, daemons)), 30)
        for name in ("login", *self.nodes):
            _try("ip", "netns", "del", f"{self._tag}-{name}")
        _try("ip", "link", "del", self._tag)

    def _start_daemon(self, node: str | None, *words: str) -> None:
        inside = list(words) if node is None else self.inside(node, words)
        log = self.directory / f"{words[0]}.started"
        with log.open("a") as output:
            code = subprocess.run(inside, env=self.env, stdout=output, stderr=output, timeout=60).returncode
        assert code == 0, f"{words}: {log.read_text()}"

    def _wait(self, condition: Callable[[], object], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.2)

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def inside(self, node: str, words: tuple[str, ...] = ()) -> list[str]:
        # Not `ip netns exec`: it mounts /sys anew, without the cgroups that slurmd looks for.
        enter = ["nsenter", f"--net=/run/netns/{self._tag}-{node}", "unshare", "-m", "-u", "--"]
        return [*enter, "bash", "-ec", ENTER.format(d=self.directory), node, *words]

    def _add_network(self, name: str, address: str) -> None:
        space, link = f"{self._tag}-{name}", f"{self._tag}{name}"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", link, "master", self._tag, "up")
        _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _run("ip", "-n", space, "link", "set", device, "up")


def _run(*words: str) -> None:
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, f"{words}: {ended.stderr}"


def _try(*words: str, env: dict[str, str] | None = None) -> str:
    """Run a command that may fail; its output."""
    try:
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60).stdout
    except subprocess.TimeoutExpired:
        return ""


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
