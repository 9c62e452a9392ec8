"""`inference` with several processes: several engines, a router, a KV cache store.

plan/serving.py says which. On several machines the same command is started on each node, and runs the processes of that
node.
"""

from __future__ import annotations

from stretto.base import log
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.check import nodes as node_checks
from stretto.check.nodes import check_ports, find_node_rank
from stretto.config.load import dump, write_json
from stretto.config.root import InferenceConfig
from stretto.launch.plan.nodes import on_visible_gpus, with_config_dir
from stretto.launch.plan.processes import section_of
from stretto.launch.plan.routers import check_router, has_router
from stretto.launch.plan.serving import ServingPlan, plan_serving
from stretto.launch.plan.table import process_table
from stretto.launch.run import supervisor

STALL_S = 600.0
PORT_KEYS = "--server.port, --deployment.backend-port, --deployment.router-port"


def has_several(cfg: InferenceConfig) -> bool:
    """Whether `inference` may be more than one process."""
    return max(cfg.deployment.num_processes, cfg.num_nodes) > 1 or cfg.kv_cache_offload is not None or has_router(cfg)


def planned(cfg: InferenceConfig) -> str | InferenceConfig:
    """The processes as a dry run shows them, or the engine's config if there is only one process."""
    missing = check_router(cfg, is_dry_run=True)
    plan = plan_serving(cfg, cfg.run_dir)
    if len(plan.processes) == 1:
        return section_of(cfg, plan.engines.engines[0])
    is_here = len(plan.hosts) == 1
    lines = [process_table(plan.processes, () if is_here else plan.hosts)]
    lines += [f"requests go to {', '.join(plan.engines.base_urls)}", *(f"note: {note}" for note in plan.notes)]
    lines += [f"NOT READY: {missing}"] if missing else []
    if is_here and cfg.slurm is None and cfg.ray is None:
        try:
            check_ports(plan.processes, 0, plan.hosts[0], PORT_KEYS)
        except ConfigError as error:
            lines.append(f"NOT READY: {error}")
    return "\n".join(lines)


def main(cfg: InferenceConfig) -> int | InferenceConfig:
    """Serve until stopped; the exit status.

    Returns the engine's config if there is only one process, which is then this one.
    """
    run = cfg.run_dir
    check_router(cfg, is_dry_run=False)
    plan = plan_serving(cfg, run)
    if len(plan.processes) == 1:
        return section_of(cfg, plan.engines.engines[0])
    node = find_node_rank(cfg.node_rank, plan.hosts, "node_rank") if len(plan.hosts) > 1 else 0
    node_dir = run if len(plan.hosts) == 1 else run.of_node(node)
    specs = [with_config_dir(spec, run, node_dir) for spec in plan.processes if spec.node == node]
    check_ports(specs, node, plan.hosts[node], PORT_KEYS)
    if len(plan.hosts) > 1:
        node_checks.check_others(plan.hosts, node, "hosts")
        num_gpus = node_checks.num_gpus(specs)
        node_checks.check_num_gpus(num_gpus, node, plan.hosts[node], "a degree of parallel")
        specs = on_visible_gpus(specs)
    write(plan, cfg, node_dir)
    log.setup("launcher", node_dir, cfg.log.level, cfg.log.json_logging, is_quiet=True)
    title = "\n".join([*(f"note: {note}" for note in plan.notes), f"inference at {', '.join(plan.engines.base_urls)}"])
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
