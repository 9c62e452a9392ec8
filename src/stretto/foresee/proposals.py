"""Other settings of the same run, each with the time of its step: what to change, and what it gains.

Every proposal is a config like the given one with one thing changed. It is listed only if its processes fit into
memory, and its gain is simulated, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from stretto.base.errors import StrettoError
from stretto.config.root import RLConfig
from stretto.config.sections.model import ActivationCheckpointSection
from stretto.foresee.costs import Costs
from stretto.foresee.memory import engine_memory, trainer_memory
from stretto.foresee.setup import Setup, with_config
from stretto.foresee.simulation import Times, simulate
from stretto.foresee.workload import Workload
from stretto.launch.plan.placement import replaced

LEAST_GAIN = 0.02
"""Smaller gains are not worth a line."""


@dataclass(frozen=True)
class Proposal:
    """One change, as keys and values, and what a step would take."""

    changes: dict[str, Any]
    step_s: float
    staleness_p95: float
    gain: float
    """Share of the step's time that it saves."""
    peak_bytes: float
    """Peak memory of a trainer's rank."""

    @property
    def text(self) -> str:
        return ", ".join(f"{key} = {value}" for key, value in self.changes.items())


def propose(
    costs: Costs,
    workload: Workload,
    now: Times,
    *,
    steps: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Proposal]:
    """The changes that help, the best first; ones that save memory if the run does not fit."""
    setup, found = costs.setup, []
    fits_now = _fits(setup)
    for changes in _candidates(setup, now):
        say(", ".join(f"{key} = {value}" for key, value in changes.items()))
        try:
            other = with_config(setup, _changed(setup.cfg, changes))
            if not _fits(other):
                continue
            times = simulate(replace(costs, setup=other), workload, steps=steps)
        except StrettoError:
            continue  # a degree that does not divide, or a split without engines
        gain = 1 - times.step_s / now.step_s
        if gain >= LEAST_GAIN or not fits_now:
            peak = trainer_memory(other, other.cfg.row_tokens).peak.total
            found.append(Proposal(changes, times.step_s, times.staleness_p95, gain, peak))
    return sorted(found, key=lambda proposal: -proposal.gain)


def _fits(setup: Setup) -> bool:
    memories = [
        trainer_memory(setup, setup.cfg.row_tokens),
        *(engine_memory(setup, e) for e in setup.engines),
    ]
    return all(memory.fits for memory in memories)


def _changed(cfg: RLConfig, changes: dict[str, Any]) -> RLConfig:
    """The config with these keys; ranks follow from nodes and degrees."""
    for key, value in changes.items():
        cfg = replaced(cfg, key, value)
    shape = cfg.deployment
    if shape.type == "multi_node":
        workers = max(1, shape.num_ranks // (cfg.model.cp * cfg.model.tp))
        cfg = replaced(cfg, "orchestrator.num_train_workers", workers)
    elif cfg.deployment.num_train_gpus:
        workers = max(1, cfg.deployment.num_train_gpus // (cfg.model.cp * cfg.model.tp))
        cfg = replaced(cfg, "orchestrator.num_train_workers", workers)
    return cfg


def _candidates(setup: Setup, now: Times) -> Iterator[dict[str, Any]]:
    """Changes that might help, depending on who waits for whom."""
    cfg = setup.cfg
    level = cfg.orchestrator.max_async_level
    for other in (1, 2, 4, 8, 16):
        if level < other <= max(cfg.orchestrator.max_off_policy_steps, 1) and now.trainer_idle > 0.05:
            yield {"orchestrator.max_async_level": other}
    if cfg.orchestrator.batch_order == "dispatch" and level and now.trainer_idle > 0.1:
        yield {"orchestrator.batch_order": "finished"}
    yield from _splits(setup, now)
    yield from _meshes(setup, now)


def _splits(setup: Setup, now: Times) -> Iterator[dict[str, Any]]:
    """Nodes or GPUs moved between trainer and engines, and between prefill and decode engines."""
    cfg, inference = setup.cfg, setup.cfg.inference
    if inference is None:
        return
    shape = inference.deployment
    if shape.type == "disaggregated":
        num = shape.num_prefill_replicas
        if num > 1:
            fewer = {"inference.deployment.num_prefill_replicas": num - 1}
            yield fewer | {
                "inference.deployment.num_decode_nodes": shape.num_decode_nodes + shape.num_prefill_nodes
            }
        if shape.num_decode_nodes > shape.num_prefill_nodes:
            more = {"inference.deployment.num_prefill_replicas": num + 1}
            yield more | {
                "inference.deployment.num_decode_nodes": shape.num_decode_nodes - shape.num_prefill_nodes
            }
    deployment = cfg.deployment
    if deployment.type == "multi_node" and shape.type == "multi_node":
        for moved in (-2, -1, 1, 2):
            train, serve = deployment.num_train_nodes + moved, shape.num_nodes - moved
            if train >= 1 and serve >= 1:
                yield {"deployment.num_train_nodes": train, "inference.deployment.num_nodes": serve}
    if deployment.type == "single_node" and shape.type == "single_node" and not setup.is_cpu:
        gpus = inference.parallel.num_gpus
        for moved in (-1, 1):
            train, serve = setup.num_ranks - moved * gpus, shape.num_replicas + moved
            if train >= 1 and serve >= 1:
                yield {"deployment.num_train_gpus": train, "inference.deployment.num_replicas": serve}


def _meshes(setup: Setup, now: Times) -> Iterator[dict[str, Any]]:
    """Other degrees and lengths of rows for the same ranks."""
    model = setup.model
    if setup.num_ranks > 1:
        for cp in (model.cp // 2, model.cp * 2):
            if cp >= 1 and cp != model.cp:
                yield {"model.cp": cp}
        if model.tp > 1:
            yield {"model.tp": model.tp // 2}
        if setup.size.experts and setup.degrees.ep > 1:
            yield {"model.ep": setup.degrees.ep // 2}
            yield {"model.ep": setup.degrees.ep * 2}
    if model.ac is not None and model.ac_offloading is None:
        yield {"model.ac": None}
    elif model.ac is None and not _fits(setup):
        yield {"model.ac": ActivationCheckpointSection()}
