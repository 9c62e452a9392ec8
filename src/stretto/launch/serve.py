"""`inference` where one process is not enough: several engines, a router before them, a store behind them.

The same plan as that of `rl` (launch/engines.py), without a run: on one machine, or on the nodes of `hosts`, each of
which starts the same command and runs what is its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.base import log, process
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.base.ports import is_free
from stretto.config.load import dump
from stretto.config.roots import InferenceConfig
from stretto.launch import local
from stretto.launch.engines import EnginesPlan, plan_engines
from stretto.launch.nodes import engine_processes, moved, own_rank
from stretto.launch.placement import reachable
from stretto.launch.plan import ProcessSpec, process_table, section_of, write_json

STALL_S = 600.0


@dataclass(frozen=True)
class ServingPlan:
    """What `inference` starts, on which nodes."""

    hosts: tuple[str, ...]
    engines: EnginesPlan
    processes: tuple[ProcessSpec, ...]


def plan_serving(cfg: InferenceConfig, run: RunDir) -> ServingPlan:
    """Engines, router and store of one [inference], as processes.

    Raises: ConfigError when there are fewer hosts than the shape needs.
    """
    nodes = cfg.deployment.num_nodes
    hosts = cfg.hosts
    if hosts is None:
        if nodes > 1 and not cfg.dry_run:
            raise ConfigError(
                f'deployment.type = "{cfg.deployment.type}" needs {nodes} nodes: give their addresses with --hosts, in '
                f"the same order on each, or start it with --dry-run to see the plan"
            )
        hosts = [reachable(cfg.server.host)] if nodes == 1 else [f"node-{node}" for node in range(nodes)]
    engines = plan_engines(
        cfg, hosts, is_cpu=cfg.device == "cpu" or (nodes == 1 and not process.visible_gpus())
    )
    shown = cfg if nodes > 1 or process.visible_gpus() else cfg.model_copy(update={"device": "cpu"})
    return ServingPlan(tuple(hosts), engines, tuple(engine_processes(shown, engines, run, is_held=False)))


def main(cfg: InferenceConfig, *, dry_run: bool) -> int | InferenceConfig:
    """Serve until told to stop, or the plan on the screen; one process alone: the config to serve with in this one."""
    run = cfg.run_dir
    plan = plan_serving(cfg, run)
    if len(plan.processes) == 1:
        return section_of(cfg, plan.engines.engines[0])
    if dry_run:
        sys.stdout.write(process_table(plan.processes, plan.hosts if len(plan.hosts) > 1 else ()) + "\n")
        sys.stdout.write(f"requests go to {', '.join(plan.engines.base_urls)}\n")
        return 0
    node = own_rank(cfg.node_rank, plan.hosts, "node_rank") if len(plan.hosts) > 1 else 0
    own = run if len(plan.hosts) == 1 else RunDir(run.path.with_name(f"{run.path.name}-node-{node}"))
    specs = [moved(spec, run, own) for spec in plan.processes if spec.node == node]
    _check_ports(specs, plan.hosts[node])
    write(plan, cfg, own)
    log.setup("launcher", own, cfg.log.level, cfg.log.json_logging, is_quiet=True)
    what = f"inference at {', '.join(plan.engines.base_urls)}"
    return local.serve(specs, own, what, STALL_S)


def write(plan: ServingPlan, cfg: InferenceConfig, run: RunDir) -> None:
    """The config of each engine's process."""
    run.configs.mkdir(parents=True, exist_ok=True)
    for engine in plan.engines.engines:
        write_json(run.config(engine.name), dump(section_of(cfg, engine)), is_secret=cfg.api_key is not None)


def _check_ports(specs: Sequence[ProcessSpec], host: str) -> None:
    for spec in specs:
        for what, port in spec.ports.items():
            if not is_free(host, port):
                raise ConfigError(
                    f"port {port} ({what} of {spec.name}) is taken on {host}; give others with --server.port, "
                    f"--deployment.backend-port, --deployment.router-port"
                )
