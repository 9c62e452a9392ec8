"""Where an orchestrator and a trainer that were started alone meet: a file in the run directory that both of them see.

The orchestrator listens at all addresses of its machine unless `control.host` is given, at the next free port if a
default one is taken, and writes addresses and ports to RUN/orchestrator.json, with the addresses of its engines. Only
processes with the run's secret are admitted on its wires, whoever reaches the ports. A trainer without `control.host`
reads the file, and takes the first address at which the port answers. If trainer, orchestrator and engines are not on
one machine, and no [weight_broadcast] is given, weights are files in the run directory.

Processes of `rl` get their addresses from the launcher: nothing here concerns them.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from stretto.base.errors import EngineError
from stretto.base.files import write_atomic
from stretto.base.paths import RunDir
from stretto.base.ports import LOOPBACK, PortClaims, is_own_address, own_addresses
from stretto.base.status import is_supervised
from stretto.config.root import OrchestratorConfig, TrainerConfig
from stretto.config.section import Section
from stretto.config.sections.transport import FilesystemWeights, ZmqRollouts

logger = logging.getLogger(__name__)

ALL_ADDRESSES = "0.0.0.0"
NUM_TRIED = 100
"""Ports from the default one on."""
WIRES = ("control", "rollout_transport")
"""Sections of what the orchestrator listens at."""
PROBE_S = 2.0
POLL_S = 0.2


class Meeting(msgspec.Struct, frozen=True):
    """What RUN/orchestrator.json holds."""

    hostname: str
    addresses: tuple[str, ...]
    """Addresses of its machine at which others may reach it."""
    control_port: int
    rollout_port: int | None
    """None: batches are files."""
    engines: tuple[str, ...]
    """Hosts of the engines."""

    @property
    def is_here(self) -> bool:
        """Whether the orchestrator is on this machine."""
        return self.hostname == socket.gethostname() and any(map(is_own_address, self.addresses or (LOOPBACK,)))


# -- the orchestrator's end --


def at_all_addresses(cfg: OrchestratorConfig, claims: PortClaims) -> OrchestratorConfig:
    """The config of an orchestrator that was started alone: without a `host` its wires listen at all addresses.

    Without `control.host`, trainers read the ports in the file: then a default port that is taken is the next free one.
    claims: hold these ports until the wires are open.
    """
    if is_supervised():
        return cfg
    found = {key: _with_host(getattr(cfg, key), ALL_ADDRESSES) for key in WIRES}
    if "host" not in cfg.control.model_fields_set:
        found = {key: _at_free_port(wire, claims) for key, wire in found.items()}
    return cfg.model_copy(update=found)


def moved_ports(before: OrchestratorConfig, now: OrchestratorConfig) -> list[str]:
    """A line for each port that `at_all_addresses` has moved."""
    ports = {key: [getattr(getattr(cfg, key), "port", None) for cfg in (before, now)] for key in WIRES}
    moved = [(key, first, port) for key, (first, port) in ports.items() if first != port]
    return [f"{key}.port is {port}, since {first} is taken on this machine" for key, first, port in moved]


def _at_free_port(wire: Any, claims: PortClaims) -> Any:
    """The wire's section at the first free port from its default one on; unchanged if the user gave the port."""
    if not hasattr(wire, "port") or "port" in wire.model_fields_set:
        return wire
    ports = range(wire.port, wire.port + NUM_TRIED)
    port = next((each for each in ports if claims.claim(wire.host, each)), wire.port)
    return wire if port == wire.port else wire.model_copy(update={"port": port})


def announce(cfg: OrchestratorConfig) -> Callable[[], None]:
    """Write where this orchestrator listens; returns what removes the file. Under a launcher nothing is written."""
    if is_supervised():
        return lambda: None
    host, path = cfg.control.host, cfg.run_dir.orchestrator
    urls = [cfg.client.base_url] if isinstance(cfg.client.base_url, str) else cfg.client.base_url
    meeting = Meeting(
        socket.gethostname(),
        tuple(own_addresses()) if host == ALL_ADDRESSES else (host,),
        cfg.control.port,
        cfg.rollout_transport.port if isinstance(cfg.rollout_transport, ZmqRollouts) else None,
        tuple(urlsplit(url).hostname or "" for url in urls),
    )
    content = msgspec.json.encode(meeting)
    write_atomic(path, content + b"\n", mode=0o600)
    if host == ALL_ADDRESSES:
        logger.info(
            "trainers with the run's secret are admitted at %s, port %d (control.host = %r: on this machine only)",
            ", ".join(meeting.addresses) or LOOPBACK,
            cfg.control.port,
            LOOPBACK,
        )

    def remove() -> None:
        with suppress(OSError):
            if path.read_bytes().strip() == content:  # not that of an orchestrator which came after this one
                path.unlink()

    return remove


# -- the trainer's end --


def with_orchestrator(cfg: TrainerConfig, should_stop: Callable[[], bool]) -> TrainerConfig:
    """The config of a trainer that was started alone, with the address of its orchestrator.

    Raises: EngineError if no orchestrator answers within control.register_timeout_s.
    """
    if is_supervised() or "host" in cfg.control.model_fields_set:
        return cfg
    deadline = time.monotonic() + cfg.control.register_timeout_s
    logger.info("waiting for an orchestrator: %s", cfg.run_dir.orchestrator)
    while not should_stop():
        meeting = _read(cfg.run_dir)
        port = cfg.control.port
        is_typed = "port" in cfg.control.model_fields_set
        if meeting is not None and not is_typed:
            port = meeting.control_port
        if (address := _find_address(meeting, port, is_typed=is_typed)) is not None:
            return _moved(cfg, meeting, address, port)
        if time.monotonic() > deadline:
            raise EngineError(_absent(cfg, meeting, port))
        time.sleep(POLL_S)
    return cfg


def _find_address(meeting: Meeting | None, port: int, *, is_typed: bool) -> str | None:
    """The first address at which the orchestrator's port answers.

    is_typed: the user gave the port; then it may also be on this machine, without a file.
    """
    if meeting is None:
        # Without either, whatever answers at the default port may be the orchestrator of another run.
        candidates = [LOOPBACK] if is_typed else []
    elif meeting.hostname == socket.gethostname():
        candidates = [*meeting.addresses, LOOPBACK]
    else:
        # Networks of containers have the same addresses on every machine: those of this one are not the orchestrator's.
        candidates = [*(each for each in meeting.addresses if not is_own_address(each)), meeting.hostname]
    return next((each for each in candidates if _answers(each, port)), None)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), PROBE_S):
            return True
    except OSError:
        return False


def _moved(cfg: TrainerConfig, meeting: Meeting | None, address: str, port: int) -> TrainerConfig:
    """The config with the orchestrator's address, and with files for weights if there are several machines."""
    update: dict[str, Any] = {"control": cfg.control.model_copy(update={"host": address, "port": port})}
    rollouts = _with_host(cfg.rollout_transport, address)
    there = None if meeting is None else meeting.rollout_port
    if isinstance(rollouts, ZmqRollouts) and there is not None and "port" not in rollouts.model_fields_set:
        rollouts = rollouts.model_copy(update={"port": there})
    update["rollout_transport"] = rollouts
    logger.info("the orchestrator is at %s, port %d", address, port)
    if "weight_broadcast" not in cfg.model_fields_set and meeting is not None and not _is_one_machine(meeting):
        update["weight_broadcast"] = FilesystemWeights()
        logger.info("trainer, orchestrator and engines are on several machines: weights are files in %s", cfg.run_dir)
    return cfg.model_copy(update=update)


def _is_one_machine(meeting: Meeting) -> bool:
    """Whether orchestrator, engines and all ranks of this trainer are on this machine."""
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    is_local = os.environ.get("LOCAL_WORLD_SIZE", num_ranks) == num_ranks
    return is_local and meeting.is_here and all(map(is_own_address, meeting.engines))


def _with_host(section: Section, host: str) -> Section:
    """A wire's section at a host, unless the user gave one, or it has none."""
    has_host = "host" in type(section).model_fields and "host" not in section.model_fields_set
    return section.model_copy(update={"host": host}) if has_host else section


def _read(run: RunDir) -> Meeting | None:
    try:
        return msgspec.json.decode(run.orchestrator.read_bytes(), type=Meeting)
    except (OSError, msgspec.DecodeError):
        return None


def _absent(cfg: TrainerConfig, meeting: Meeting | None, port: int) -> str:
    timeout = f"within control.register_timeout_s = {cfg.control.register_timeout_s:g}"
    if meeting is None:
        return (
            f"no orchestrator was found {timeout}: there is no {cfg.run_dir.orchestrator}; start `orchestrator` with "
            "the same output_dir and run.name, or give control.host"
        )
    places: Sequence[str] = (*meeting.addresses, meeting.hostname)
    return (
        f"the orchestrator of {cfg.run_dir.orchestrator} did not answer {timeout}, at port {port} of "
        f"{', '.join(places)}; start it, or give control.host with an address at which this machine reaches it"
    )
