"""The hosts of a deployment: the same command is started on each, and the others report to the first.

The user starts `stretto doctor CONFIG` on every host, in the same way as the run; inside a Slurm job by `srun stretto
doctor CONFIG`. Every other host connects to the first one at the control port, which the run needs, too. It sends its
findings, measures the network, and looks for a file that the first host has written into the directory of runs.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from stretto.base.errors import ConfigError, WireError
from stretto.check.nodes import check_others, find_node_rank
from stretto.config.root import EvalConfig, InferenceConfig, RLConfig
from stretto.launch.launchers import launcher_of
from stretto_doctor.configs import Config
from stretto_doctor.finding import Finding, bad, good, note, warn
from stretto_doctor.network import PORT, Peer, findings_of, listen, new_token

_SHARED = "shared directory"


def in_job(cfg: Config) -> Config:
    """Inside a Slurm job, the config with the hosts of that job, as its nodes will get it; else the same config."""
    if isinstance(cfg, EvalConfig) or cfg.slurm is None:
        return cfg
    launcher = launcher_of(cfg)
    if launcher is None or (hosts := launcher.job_hosts()) is None:
        return cfg
    hosts = hosts[: cfg.num_nodes]
    if cfg.num_nodes == 1 or len(hosts) < cfg.num_nodes:
        return cfg.model_copy(update={"slurm": None})
    if isinstance(cfg, InferenceConfig):
        return cfg.model_copy(update={"hosts": hosts, "slurm": None})
    shape = cfg.deployment.model_copy(update={"hosts": hosts})
    return cfg.model_copy(update={"deployment": shape, "slurm": None})


def hosts_of(cfg: Config) -> list[str]:
    """Addresses of the hosts of a deployment; [] if it has only one host, or they are not known yet."""
    if isinstance(cfg, EvalConfig) or cfg.num_nodes == 1:
        return []
    if isinstance(cfg, InferenceConfig):
        return cfg.hosts or []
    return (cfg.deployment.hosts or []) if cfg.deployment.type == "multi_node" else []


def elsewhere(cfg: Config, command: str) -> Iterator[Finding]:
    """Notes about machines that were not checked, and the command that checks them."""
    if isinstance(cfg, EvalConfig):
        return
    if cfg.slurm is not None:
        fix = f"salloc -N {cfg.num_nodes} (with your partition), then: srun --ntasks-per-node=1 {command}"
        yield note("Slurm", "the job's machines were not looked at, only this one", fix)
    elif cfg.ray is not None:
        fix = f"on each machine of the cluster: {command} --no-ray"
        yield note("Ray", "the cluster's machines were not looked at, only this one", fix)
    elif cfg.num_nodes > 1 and not hosts_of(cfg):
        key = "--hosts" if isinstance(cfg, InferenceConfig) else "--deployment.hosts"
        fix = f'on each host: {command} {key} \'["host-0", "host-1"]\''
        yield note("hosts", f"{cfg.num_nodes} machines, and none is named: only this one was looked at", fix)


class HostReports:
    """This host among those of a deployment: the first listens, the others report to it."""

    def __init__(self, cfg: Config, hosts: Sequence[str]) -> None:
        """Raises: ConfigError if this machine is not one of the hosts."""
        self.hosts = list(hosts)
        is_serving = isinstance(cfg, InferenceConfig)
        rank = cfg.node_rank if is_serving else cfg.deployment.node_rank  # type: ignore[union-attr]
        self.key = "hosts" if is_serving else "deployment.hosts"
        self.node = find_node_rank(rank, self.hosts, "node_rank" if is_serving else "deployment.node_rank")
        self.port = cfg.control.port if isinstance(cfg, RLConfig) else PORT
        self.directory = cfg.output_dir.expanduser().absolute()  # type: ignore[union-attr]

    def reach(self) -> Iterator[Finding]:
        """Whether the network has a route to the others."""
        check_others(self.hosts, self.node, self.key)
        yield good("hosts", f"node {self.node} of {len(self.hosts)} has a way to the others")

    def receive(self, wait_s: float) -> list[Finding]:
        """On the first host: the findings of the others, and the measurements of the network."""
        token = new_token()
        missing = set(range(1, len(self.hosts)))
        found: list[Finding] = []
        try:
            listener = socket.create_server((self.hosts[0], self.port))
        except OSError as error:
            raise ConfigError(
                f"node 0 cannot listen at {self.hosts[0]}:{self.port} ({error.strerror}), where the others report"
            ) from error
        with listener, _marker(self.directory, token):
            for report in listen(listener, token, wait_s=wait_s, is_renewed=True) if missing else ():
                node = report.node
                name = f"node {node}" if node in missing else f"node {node}?"
                missing.discard(node or 0)
                found += [replace(each, host=f"{name}, {report.host}") for each in report.findings]
                if not missing:
                    break
        for node in sorted(missing):
            fix = f"start the same command on {self.hosts[node]}, and open port {self.port} on {self.hosts[0]}"
            text = f"no report came from it within {wait_s:.0f} s"
            found.append(bad("report", text, fix, f"node {node}, {self.hosts[node]}"))
        return found

    def send(self, findings: Sequence[Finding], wait_s: float) -> list[Finding]:
        """On another host: report to the first, and measure the network; returns the further findings.

        Raises: WireError if the first host does not answer.
        """
        peer = Peer(self.hosts[0], self.port, wait_s=wait_s)
        link = peer.measure(findings, self.node)
        seen = [*findings_of(link, f"to {self.hosts[0]}"), self._find_marker(peer.token)]
        peer.close(link, seen)
        return seen

    def _find_marker(self, token: str) -> Finding:
        if token and _marker_file(self.directory, token).exists():
            return good(_SHARED, f"{self.directory} is that of the first host")
        text = f"{self.directory} is not that of the first host, which checkpoints and weights as files need"
        return warn(_SHARED, text, "put --output-dir on a file system that all hosts mount")


def _marker_file(directory: Path, token: str) -> Path:
    return directory / f".stretto-doctor-{token}"


@contextmanager
def _marker(directory: Path, token: str) -> Iterator[None]:
    """Context in which a file exists for which other hosts look; if it cannot be written, they do not find it."""
    file, was_there = _marker_file(directory, token), directory.is_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError:
        pass
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        if not was_there and directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def pair(address: str, wait_s: float) -> list[Finding]:
    """Measure the network to a host that runs `stretto doctor --listen`.

    Raises: WireError if the host does not answer; ConfigError for an invalid address.
    """
    host, _, port = address.rpartition(":") if address.count(":") == 1 else (address, "", "")
    if port and not port.isdecimal():
        raise ConfigError(f"--peer {address}: give HOST or HOST:PORT")
    peer = Peer(host, int(port or PORT), wait_s=wait_s)
    link = peer.measure()
    found = list(findings_of(link, f"to {host}"))
    peer.close(link, found)
    return found


def listen_for(host: str, port: int, wait_s: float) -> Iterator[list[Finding]]:
    """The findings of peers that connect within wait_s seconds, one peer after another.

    Raises: WireError if this machine cannot listen there.
    """
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise WireError(f"cannot listen at {host}:{port}: {error}; give an address of this machine") from error
    with listener:
        for report in listen(listener, new_token(), wait_s=wait_s):
            yield report.findings
