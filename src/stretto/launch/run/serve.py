"""`inference` with several processes: several engines, a router, a KV cache store.

It plans engines as `rl` does (launch/plan/engines.py), without a run, for one machine or for the nodes of `hosts`: the
same command is started on each node, and runs that node's processes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from stretto.base import log, process
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.load import dump, write_json
from stretto.config.root import InferenceConfig
from stretto.config.rules.engine import shape_of
from stretto.config.sections.engines import Disaggregated, MultiNode
from stretto.config.sections.inference import KEY_VAR
from stretto.launch.plan.device_check import check_served_on_cpu
from stretto.launch.plan.engines import plan_engines
from stretto.launch.plan.nodes import (
    check_hosts,
    check_ports,
    find_node_rank,
    idle_gpus,
    on_visible_gpus,
    with_config_dir,
)
from stretto.launch.plan.placement import client_host
from stretto.launch.plan.processes import ProcessSpec, engine_processes, section_of
from stretto.launch.plan.routers import check_router, with_reachable_host
from stretto.launch.plan.specs import EnginesPlan
from stretto.launch.plan.table import process_table
from stretto.launch.run import node_checks, supervisor

STALL_S = 600.0


@dataclass(frozen=True)
class ServingPlan:
    """The processes that `inference` starts, and the addresses of their nodes."""

    hosts: tuple[str, ...]
    engines: EnginesPlan
    processes: tuple[ProcessSpec, ...]
    notes: tuple[str, ...] = ()


def plan_serving(cfg: InferenceConfig, run: RunDir) -> ServingPlan:
    """Plan the engines, router and cache store of an [inference] section.

    Raises: ConfigError if there are fewer hosts, or GPUs on this machine, than the deployment needs.
    """
    nodes = cfg.deployment.num_nodes
    hosts = cfg.hosts
    if hosts is None and nodes == 1:
        cfg = cfg.model_copy(update={"server": with_reachable_host(cfg).server})
    if hosts is None:
        if nodes > 1 and not cfg.dry_run:
            raise ConfigError(
                f'deployment.type = "{cfg.deployment.type}" needs {nodes} nodes: give their addresses with --hosts, in '
                f"the same order on every node, or add --dry-run to see the plan"
            )
        hosts = [client_host(cfg.server.host)] if nodes == 1 else [f"node-{node}" for node in range(nodes)]
    gpus = process.visible_gpus() if nodes == 1 else None
    is_cpu = cfg.device == "cpu" or gpus == []
    if is_cpu:
        check_served_on_cpu(cfg, "")
    check_hosts(hosts, "hosts")
    engines = plan_engines(cfg, hosts, is_cpu=is_cpu)
    last = max((engine.first_gpu or 0) + engine.num_gpus for engine in engines.engines)
    needed = max(last, sum(engine.num_gpus for engine in engines.engines))
    if gpus and not is_cpu and needed > len(gpus):
        raise ConfigError(
            f"parallel: {shape_of(cfg)} take {needed} GPUs, and this machine shows "
            f"{len(gpus)}; lower a degree or deployment.num_replicas, or set CUDA_VISIBLE_DEVICES"
        )
    shown = cfg.model_copy(update={"device": "cpu"}) if is_cpu else cfg
    key = {} if cfg.key is None else {KEY_VAR: cfg.key}
    specs = engine_processes(shown, engines, run, is_held=False, gpus=gpus, key_env=key)
    shape = cfg.deployment
    is_counted = isinstance(shape, MultiNode | Disaggregated) and nodes > 1 and not is_cpu
    notes = idle_gpus(specs, [shape.gpus_per_node] * nodes, "") if is_counted else []
    return ServingPlan(tuple(hosts), engines, tuple(specs), tuple(notes))


def main(cfg: InferenceConfig, *, dry_run: bool) -> int | InferenceConfig:
    """Serve until stopped, or print the plan; the exit status.

    Returns the engine's config if there is only one process, which is then this one.
    """
    run = cfg.run_dir
    missing = check_router(cfg, is_dry_run=dry_run)
    plan = plan_serving(cfg, run)
    if len(plan.processes) == 1:
        return section_of(cfg, plan.engines.engines[0])
    if dry_run:
        sys.stdout.write(process_table(plan.processes, plan.hosts if len(plan.hosts) > 1 else ()) + "\n")
        sys.stdout.write(f"requests go to {', '.join(plan.engines.base_urls)}\n")
        sys.stdout.write("".join(f"note: {note}\n" for note in plan.notes))
        sys.stdout.write(f"NOT READY: {missing}\n" if missing else "")
        return 0
    node = find_node_rank(cfg.node_rank, plan.hosts, "node_rank") if len(plan.hosts) > 1 else 0
    node_dir = run if len(plan.hosts) == 1 else run.of_node(node)
    specs = [with_config_dir(spec, run, node_dir) for spec in plan.processes if spec.node == node]
    keys = "--server.port, --deployment.backend-port, --deployment.router-port"
    check_ports(specs, node, plan.hosts[node], keys)
    if len(plan.hosts) > 1:
        node_checks.check_others(plan.hosts, node, "hosts")
        num_gpus = node_checks.num_gpus(specs)
        node_checks.check_num_gpus(num_gpus, node, plan.hosts[node], "a degree of parallel")
        specs = on_visible_gpus(specs)
    write(plan, cfg, node_dir)
    log.setup("launcher", node_dir, cfg.log.level, cfg.log.json_logging, is_quiet=True)
    title = "\n".join(
        [*(f"note: {note}" for note in plan.notes), f"inference at {', '.join(plan.engines.base_urls)}"]
    )
    return supervisor.serve(specs, node_dir, title, STALL_S)


def unused_gpus(cfg: InferenceConfig) -> str | None:
    """A note if [parallel] and [deployment] leave GPUs of this machine unused."""
    if cfg.device == "cpu" or cfg.deployment.num_nodes > 1:
        return None
    note = node_checks.unused_gpus(cfg.num_gpus)
    return note and note.replace("inference.", "")


def write(plan: ServingPlan, cfg: InferenceConfig, run: RunDir) -> None:
    """Write the config of each engine process."""
    run.configs.mkdir(parents=True, exist_ok=True)
    for engine in plan.engines.engines:
        write_json(run.config(engine.name), dump(section_of(cfg, engine)))
