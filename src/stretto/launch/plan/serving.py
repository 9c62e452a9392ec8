"""The processes of `inference`: engines, a router, a KV cache store. run/serve.py starts them.

Engines are planned as `rl` plans them (engines.py), without a run, for one machine or for the nodes of `hosts`.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.base import process
from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.check.devices import check_served_on_cpu
from stretto.check.nodes import check_hosts
from stretto.config.root import InferenceConfig
from stretto.config.sections.engines import Disaggregated, MultiNode
from stretto.config.sections.inference import KEY_VAR
from stretto.launch.plan.engines import plan_engines
from stretto.launch.plan.nodes import idle_gpus
from stretto.launch.plan.placement import client_host
from stretto.launch.plan.processes import ProcessSpec, engine_processes
from stretto.launch.plan.routers import with_reachable_host
from stretto.launch.plan.specs import EnginesPlan


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
            f"parallel: {cfg.shape_in_words} take {needed} GPUs, and this machine shows "
            f"{len(gpus)}; lower a degree or deployment.num_replicas, or set CUDA_VISIBLE_DEVICES"
        )
    shown = cfg.model_copy(update={"device": "cpu"}) if is_cpu else cfg
    key = {} if cfg.key is None else {KEY_VAR: cfg.key}
    specs = engine_processes(shown, engines, run, is_held=False, gpus=gpus, key_env=key)
    shape = cfg.deployment
    notes: list[str] = []
    if isinstance(shape, MultiNode | Disaggregated) and nodes > 1 and not is_cpu:
        notes = idle_gpus(specs, [shape.gpus_per_node] * nodes, "")
    return ServingPlan(tuple(hosts), engines, tuple(specs), tuple(notes))
