"""`inference` with several processes: several engines, a router, a KV cache store.

plan/serving.py says which. On several machines the same command is started on each node, and runs the processes of that
node.
"""

from __future__ import annotations

import sys

from stretto.base import log
from stretto.base.paths import RunDir
from stretto.check import nodes as node_checks
from stretto.check.nodes import check_ports, find_node_rank
from stretto.config.load import dump, write_json
from stretto.config.root import InferenceConfig
from stretto.launch.plan.nodes import on_visible_gpus, with_config_dir
from stretto.launch.plan.processes import section_of
from stretto.launch.plan.routers import check_router
from stretto.launch.plan.serving import ServingPlan, plan_serving
from stretto.launch.plan.table import process_table
from stretto.launch.run import supervisor

STALL_S = 600.0


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
